"""``joulery up`` on two Ray nodes with grids of their own: both are metered, requests follow the cleaner grid."""

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from joulery.app.profiling.service_profile import write_profile
from joulery.app.runs.replay import decide_again
from joulery.domain.serving.service import Slice, SliceKind
from joulery.store.run.directory import open_run
from tests.app.serving.test_service import profile as toy_profile
from tests.contract.test_engine import NO_RAY
from tests.e2e.test_up import Up
from tests.e2e.test_up_gateways import BODY, address
from tests.runtime.site_files import toy_site
from tests.two_ray_nodes import TwoNodes, two_ray_nodes
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=NO_RAY),
]
PATIENCE_S = 700.0
REQUESTS = 60


class Where:
    """Answers with the number of GPUs that its process may use, and whether its model is to use one."""

    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1,)),)

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        gpus = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        return {"y": np.array([len(gpus), float(os.environ.get("JOULERY_DEVICE") == "cuda")], np.float32)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_ray_nodes(gpus=1) as made:
        yield made


def grid(path: Path, g_per_kwh: float) -> None:
    """An intensity that is known for an hour."""
    hour = datetime.fromtimestamp(time.time() // 3600 * 3600, UTC)
    rows = [f"{hour.isoformat()},{g_per_kwh}", f"{datetime.fromtimestamp(hour.timestamp() + 3600, UTC).isoformat()},1"]
    made = path.with_suffix(".new")
    made.write_text("\n".join(["timestamp_utc,ci_lifecycle", *rows]) + "\n")
    made.replace(path)


def site_file(folder: Path, cluster: TwoNodes) -> Path:
    write_profile(folder / "profile.json", toy_profile())
    nodes = "".join(
        f"\n      - {{name: {name}, address: {at}, cores: 1, carbon: {{kind: file, path: {name}.csv}}}}"
        for name, at in zip(("north", "south"), cluster.addresses, strict=True)
    )
    engine = f"\n    kind: ray\n    address: {cluster.address}\n    dashboard: {cluster.dashboard}\n    direct: true"
    engine += f"\n    nodes:{nodes}"
    changed = {
        "fleet: {cpu: {cores: 2}}\n": "",
        "    slo:": "    rate: 20 /s\n    profile: profile.json\n    slo:",
        "policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}": "policy: {kind: fixed, variant: small}",
        'serving: {listen: "127.0.0.1:0", drain: 2 s}': f'serving:\n  listen: "127.0.0.1:0"\n  engine:{engine}',
        "load: {": "# load: {",
    }
    return toy_site(folder, changed=changed)


def gpu_site_file(folder: Path, cluster: TwoNodes) -> Path:
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
        '"tests.runtime.toy_models:Sum", options: {busy_s: 0.002}': '"tests.contract.test_ray_nodes:Where"',
        "policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}": "policy: {kind: fixed, variant: small}",
        'serving: {listen: "127.0.0.1:0", drain: 2 s}': f'serving:\n  listen: "127.0.0.1:0"\n  engine:{engine}',
        "load: {": "# load: {",
    }
    return toy_site(folder, changed=changed)


def orders(folder: Path) -> list[dict[str, int]]:
    """The orders of the nodes that the run has logged."""
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    found = [line["decision"] for line in lines if "decision" in line]
    return [decision["value"] for decision in found if decision["kind"] == "prefer_nodes"]


def test_requests_follow_the_cleaner_grid_and_both_nodes_are_accounted(
    tmp_path: Path, cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PYTHONPATH"):
        monkeypatch.setenv(name, cluster.environ[name])
    grid(tmp_path / "north.csv", 400.0)
    grid(tmp_path / "south.csv", 50.0)
    out = tmp_path / "report.json"
    with Up(site_file(tmp_path, cluster), tmp_path, "--stay", "--json-out", str(out)) as up:
        url = f"{address(up)}/v2/models/sums/infer"
        with httpx.Client(timeout=PATIENCE_S) as http:
            wait_until(lambda: orders(tmp_path) == [{"south": 0, "north": 1}], "the first order", PATIENCE_S)
            for _ in range(REQUESTS):
                assert http.post(url, json=BODY).status_code == 200
            grid(tmp_path / "south.csv", 700.0)
            wait_until(lambda: orders(tmp_path)[1:] == [{"north": 0, "south": 1}], "the second order", PATIENCE_S)
            for _ in range(REQUESTS):
                assert http.post(url, json=BODY).status_code == 200
        up.process.send_signal(signal.SIGINT)
        status, _, errors = up.end()
        assert status == 0, errors
    report = json.loads(out.read_text())
    north, south = report["nodes"]
    assert (north["node"], south["node"]) == ("north", "south")
    assert north["answered"] + south["answered"] == report["answered"] == 2 * REQUESTS
    assert min(north["answered"], south["answered"]) >= 0.9 * REQUESTS
    assert report["attainment_ratio"] == pytest.approx(1.0, abs=0.05)
    assert report["nodes_energy_j"] == pytest.approx(north["energy_j"] + south["energy_j"], rel=1e-12)
    assert report["nodes_unmetered"] == []
    for node in (north, south):
        assert node["coverage_ratio"] > 0.8 and 0 < node["ray_j"] <= node["energy_j"]
        assert node["carbon_g"] > 0 and node["carbon_unknown_j"] == 0
    assert north["carbon_g"] == pytest.approx(north["energy_j"] * 400.0 / 3.6e6, rel=0.02)
    assert 50.0 <= south["carbon_g"] / south["energy_j"] * 3.6e6 <= 700.0
    assert north["machine"] == south["machine"], "one machine, counted once"
    assert decide_again(open_run(tmp_path / "run").log()).differences == ()


def test_replicas_have_a_gpu_each_on_every_node(
    tmp_path: Path, cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PYTHONPATH"):
        monkeypatch.setenv(name, cluster.environ[name])
    out = tmp_path / "report.json"
    with Up(gpu_site_file(tmp_path, cluster), tmp_path, "--stay", "--json-out", str(out)) as up:
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
