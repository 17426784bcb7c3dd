"""The Open Inference Protocol over gRPC through joined gateways, played with Triton's own client: one is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_up import Up
from tests.e2e.test_up_gateways import ended, pid_of, site_file
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("up")]
ASKED = 20
# Both sides register messages of the same names, which one process cannot hold: the client has one of its own.
CLIENT = f"""
import json, sys
import numpy as np
import tritonclient.grpc as triton

answered, variants, failed = 0, set(), []
array = np.arange(6, dtype=np.float32).reshape(3, 2)
while answered < {ASKED} and len(failed) < {ASKED}:
    # A channel of its own comes to any of the gateways.
    client = triton.InferenceServerClient(sys.argv[1])
    given = triton.InferInput("x", array.shape, "FP32")
    given.set_data_from_numpy(array)
    try:
        token = {{"authorization": "Bearer " + sys.argv[2]}}
        answer = client.infer("sums", [given], request_id=str(answered), headers=token)
    except triton.InferenceServerException as error:
        failed.append(error.status())
    else:
        assert np.array_equal(answer.as_numpy("y"), array.sum(axis=1))
        variants.add(answer.get_response().parameters["x-joulery-variant"].string_param)
        assert answer.get_response().parameters["x-joulery-energy-j"].double_param > 0
        answered += 1
    client.close()
print(json.dumps({{"answered": answered, "variants": sorted(variants), "failed": failed}}))
"""


def test_grpc_of_all_gateways_is_answered_and_counted_once(tmp_path: Path) -> None:
    for name in ("grpc", "tritonclient"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    where, join, state = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", tmp_path / "state"
    site, out = site_file(tmp_path), tmp_path / "report.json"
    for name in ("join", "clients"):
        (tmp_path / f"{name}.token").write_text(f"{name}-token-that-is-long\n")
    extended = f"join: '{join}', join_token_file: join.token}}, grpc: '{where}', token_file: clients.token}}"
    site.write_text(site.read_text().replace("outlive: 120 s}}", f"outlive: 120 s, {extended}"))
    with ended(state), Up(site, tmp_path, "--stay", "--json-out", str(out)) as up:
        up.until("/dashboard")
        first = asked(where)
        os.kill(pid_of(state, "gateway-1"), signal.SIGKILL)
        second = asked(where)
        wait_until(lambda: pid_of(state, "gateway-1") != 0, "another gateway-1")
        third = through_another_machine(tmp_path, join)
        up.process.send_signal(signal.SIGINT)
        status, _, errors = up.end()
    assert status == 0, errors
    report = json.loads(out.read_text())
    answered = sum(one["answered"] for one in (first, second, third))
    assert (first["failed"], third["failed"]) == ([], []) and set(second["failed"]) <= {"StatusCode.UNAVAILABLE"}
    assert report["answered"] == answered == 3 * ASKED and report["failed"] == 0
    by_gateway = {one["gateway"]: one["ended"] for one in report["gateways"]}
    assert sum(by_gateway.values()) == answered and by_gateway["edge"] == ASKED
    assert sum(by_gateway[name] for name in ("gateway-1", "gateway-2", "gateway-3")) == 2 * ASKED


def asked(where: str) -> dict:
    run = subprocess.run(
        [sys.executable, "-c", CLIENT, where, "clients-token-that-is-long"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def through_another_machine(folder: Path, join: str) -> dict:
    """The same through a gateway that joins as one of another machine does."""
    line = ["gateway", "--join", join, "--join-token-file", str(folder / "join.token"), "--name", "edge", "--json"]
    line += ["--token-file", str(folder / "clients.token"), "--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with subprocess.Popen([sys.executable, "-m", "joulery", *line], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            said = json.loads(process.stdout.readline())
            return asked(said["grpc"])
        finally:
            process.terminate()
