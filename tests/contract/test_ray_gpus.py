"""``joulery up`` on two Ray nodes with GPUs: each replica has a whole GPU of Ray, on the node that it is to be on."""

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.domain.serving.service import Slice, SliceKind
from tests.app.serving.test_service import profile as toy_profile
from tests.contract.test_engine import NO_RAY
from tests.e2e.test_up import Up
from tests.e2e.test_up_gateways import BODY, address
from tests.runtime.site_files import toy_site
from tests.two_ray_nodes import TwoNodes, two_ray_nodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY),
]
PATIENCE_S, REQUESTS = 600.0, 30


class Where:
    """Answers with the number of GPUs that its process may use, and whether its model is to use one."""

    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1,)),)

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        gpus = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        return {"y": np.array([len(gpus), float(os.environ.get("JOULERY_DEVICE") == "cuda")], np.float32)}


@pytest.fixture
def cluster() -> Iterator[TwoNodes]:
    with two_ray_nodes(gpus=1) as made:
        yield made


def site_file(folder: Path, cluster: TwoNodes) -> Path:
    cores = toy_profile()
    entries = [entry for entry in cores.entries if entry.slice.cores == 1]
    whole = tuple(replace(entry, slice=Slice(SliceKind.WHOLE)) for entry in entries)
    write_profile(folder / "profile.json", replace(cores, entries=whole))
    engine = f"\n    kind: ray\n    address: {cluster.address}\n    dashboard: {cluster.dashboard}\n    direct: true"
    engine += "\n    nodes:" + "".join(
        f"\n      - {{name: {name}, address: {at}, gpus: 1}}"
        for name, at in zip(("north", "south"), cluster.addresses, strict=True)
    )
    changed = {
        "fleet: {cpu: {cores: 2}}\n": "",
        "    slo:": "    rate: 20 /s\n    profile: profile.json\n    slo:",
        '"tests.runtime.toy_models:Sum", options: {busy_s: 0.002}': '"tests.contract.test_ray_gpus:Where"',
        "policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}": "policy: {kind: fixed, variant: small}",
        'serving: {listen: "127.0.0.1:0", drain: 2 s}': f'serving:\n  listen: "127.0.0.1:0"\n  engine:{engine}',
        "load: {": "# load: {",
    }
    return toy_site(folder, changed=changed)


def test_replicas_have_a_gpu_each_on_every_node(
    tmp_path: Path, cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PYTHONPATH"):
        monkeypatch.setenv(name, cluster.environ[name])
    out = tmp_path / "report.json"
    with Up(site_file(tmp_path, cluster), tmp_path, "--stay", "--json-out", str(out)) as up:
        with httpx.Client(timeout=PATIENCE_S) as http:
            answers = [http.post(f"{address(up)}/v2/models/sums/infer", json=BODY).json() for _ in range(REQUESTS)]
        up.process.send_signal(signal.SIGINT)
        status, _, errors = up.end()
        assert status == 0, errors
    assert {tuple(answer["outputs"][0]["data"]) for answer in answers} == {(1.0, 1.0)}, (
        "one GPU, which its model is to use"
    )
    nodes = json.loads(out.read_text())["nodes"]
    assert sum(node["answered"] for node in nodes) == REQUESTS
    assert min(node["answered"] for node in nodes) > 0, "each node has a replica"
