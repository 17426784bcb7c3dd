"""Triton's own gRPC client, unchanged, against ``joulery serve``."""

import importlib.util
import json
import signal
import subprocess
import sys

import httpx
import pytest

from tests.e2e.test_serving import TOYS, serve
from tests.waiting import PATIENCE_S

# Both sides register messages of the same names, which one process cannot hold: the client has one of its own.
CLIENT = """
import json, sys
import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("toy")
about = client.get_model_metadata("toy", as_json=True)
array = np.arange(6, dtype=np.float32).reshape(3, 2)
given = triton.InferInput("x", array.shape, "FP32")
given.set_data_from_numpy(array)
answers = [client.infer("toy", [given], request_id=str(number)) for number in range(20)]
outputs = about["outputs"]
names = [one["name"] for one in outputs] or [answers[0].get_response().outputs[0].name]
assert all(np.array_equal(one.as_numpy(names[0]), 2 * array) for one in answers)
variants = {one.get_response().parameters["x-joulery-variant"].string_param for one in answers}
try:
    client.infer("toys", [given])
except triton.InferenceServerException as error:
    refused = [error.status(), error.message()]
print(json.dumps({"variants": sorted(variants), "refused": refused}))
"""


@pytest.mark.e2e
def test_tritons_client_is_answered_and_counted() -> None:
    for name in ("grpc", "tritonclient"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    with serve("--model", f"toy={TOYS}:double", "--grpc", "127.0.0.1:0") as (process, said):
        run = subprocess.run([sys.executable, "-c", CLIENT, said["grpc"]], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
        assert found["refused"][0] == "StatusCode.NOT_FOUND"
        assert "toys" in found["refused"][1]
        text = httpx.get(f"{said['url']}/metrics", trust_env=False, timeout=PATIENCE_S).text
        ok = [
            line for line in text.splitlines() if line.startswith("joulery_requests_total") and 'outcome="ok"' in line
        ]
        assert sum(float(line.split()[-1]) for line in ok) == 20
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
