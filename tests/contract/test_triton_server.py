"""The real Triton server, on the CPU: it takes the configuration written for it and answers joulery's client.

The server comes with ``pip install nvidia-pytriton``. It is found in this Python, or in the folder that
``JOULERY_TRITON`` names (``…/site-packages/pytriton/tritonserver``).
"""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.engines.remote.open_inference import OpenInferenceEngine
from joulery.adapters.engines.remote.triton import TritonModel, TritonProcess, config_text
from joulery.domain.errors import ActuationError
from joulery.domain.serving.engine import InferRequest, ModelRef, Outcome, ReplicaSpec, RequestError
from joulery.domain.serving.service import Slice, SliceKind
from joulery.domain.serving.tensors import TensorSpec
from tests.waiting import PATIENCE_S, wait_until

MODEL = """
import json
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.02)
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if (x < 0).any():
                answers.append(pb_utils.InferenceResponse([], pb_utils.TritonError("negative")))
                continue
            together = np.full((len(x), 1), len(requests), np.int64)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2), pb_utils.Tensor("n", together)]))
        return answers
"""
TOY = TritonModel(
    "toy",
    4,
    0.05,
    0.45,
    "python",
    None,
    (TensorSpec("x", "FP32", (-1, 2)),),
    (TensorSpec("y", "FP32", (-1, 2)), TensorSpec("n", "INT64", (-1, 1))),
)


def home() -> Path:
    """The server's folder."""
    named = os.environ.get("JOULERY_TRITON")
    if named:
        return Path(named)
    found = importlib.util.find_spec("pytriton")
    if found is None or found.origin is None:
        pytest.skip("no Triton here: pip install nvidia-pytriton, or name its folder in JOULERY_TRITON")
    return Path(found.origin).parent / "tritonserver"


def stub(triton: Path) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return triton / "python_backend_stubs" / version / "triton_python_backend_stub"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that holds the model and has not loaded it; its address."""
    triton, folder = home(), tmp_path_factory.mktemp("triton")
    if not (triton / "bin" / "tritonserver").exists() or not stub(triton).exists():
        pytest.skip(f"no Triton for Python {sys.version_info.major}.{sys.version_info.minor} in {triton}")
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (*(triton / "backends" / "python").iterdir(), stub(triton)):
        (backend / file.name).symlink_to(file)
    (folder / "models" / "toy" / "1").mkdir(parents=True)
    (folder / "models" / "toy" / "config.pbtxt").write_text(config_text(TOY))
    (folder / "models" / "toy" / "1" / "model.py").write_text(MODEL)
    process = TritonProcess(str(folder / "models"), (), None, 1.0, free_ports())
    line = [*process.arguments(str(triton / "bin" / "tritonserver")), f"--backend-directory={folder / 'backends'}"]
    library = sysconfig.get_config_var("LIBDIR")
    environment = {
        **os.environ,
        "PATH": f"{triton.parents[3] / '..' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(triton.parents[1]),
        "LD_LIBRARY_PATH": f"{library}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(line, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_ready(f"http://127.0.0.1:{process.port}", running, folder / "log")
        yield f"http://127.0.0.1:{process.port}"
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def free_ports() -> int:
    """The first of three ports in a row that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
        try:
            for number in (port, port + 1, port + 2):
                socket.create_server(("127.0.0.1", number)).close()
        except OSError:
            continue
        return port


def wait_ready(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    def ready() -> bool:
        assert running.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=PATIENCE_S):
                return True
        except (urllib.error.URLError, OSError):
            return False

    wait_until(ready, "a Triton that is ready")


def got(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return bytes(answer.read())


def spec(url: str, model: str = "toy") -> ReplicaSpec:
    return ReplicaSpec("toy", "toy", Slice(SliceKind.WHOLE), ModelRef.parse(f"{url}/{model}"))


def asked(value: float, **options: object) -> InferRequest:
    return InferRequest({"x": np.full((1, 2), value, np.float32)}, **options)


async def test_triton_loads_batches_answers_refuses_and_unloads(server: str) -> None:
    engine = OpenInferenceEngine()
    try:
        await engine.apply([spec(server)])
        (view,) = engine.replicas()
        assert view.inputs == TOY.inputs and set(view.outputs) == set(TOY.outputs) and view.platform == "python"
        config = json.loads(await asyncio.to_thread(got, f"{server}/v2/models/toy/config"))
        answers = await asyncio.gather(*(engine.infer("toy", asked(k, timeout_s=20.0)) for k in range(12)))
        with pytest.raises(RequestError, match="negative") as failed:
            await engine.infer("toy", asked(-1.0))
        wrong = InferRequest({"z": np.zeros((1, 2), np.float32)})
        with pytest.raises(RequestError) as refused:
            await engine.infer("toy", wrong)
    finally:
        await engine.close()
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["preferred_batch_size"] == [4]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 50000
    (group,) = config["instance_group"]
    assert (group["kind"], group["count"]) == ("KIND_CPU", 1)
    assert group["rate_limiter"]["resources"] == [{"name": "share", "global": False, "count": 450}]
    assert [answer.outputs["y"].tolist() for answer in answers] == [[[2.0 * k, 2.0 * k]] for k in range(12)]
    assert max(int(answer.outputs["n"][0, 0]) for answer in answers) > 1, "some were answered together"
    assert failed.value.outcome is Outcome.FAILED and refused.value.outcome is Outcome.INVALID
    with pytest.raises(urllib.error.HTTPError) as gone:
        await asyncio.to_thread(got, f"{server}/v2/models/toy/ready")
    gone.value.close()


async def test_a_model_that_triton_does_not_have(server: str) -> None:
    engine = OpenInferenceEngine()
    with pytest.raises(ActuationError, match="does not load it"):
        await engine.apply([spec(server, "nothing")])
    await engine.close()
