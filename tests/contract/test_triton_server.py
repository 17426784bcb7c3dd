"""The real Triton server, on the CPU: it takes the configuration written for it and answers joulery's client."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from joulery.adapters.engines.remote.open_inference import OpenInferenceEngine
from joulery.adapters.engines.remote.triton import TritonModel
from joulery.domain.errors import ActuationError
from joulery.domain.serving.engine import InferRequest, ModelRef, Outcome, ReplicaSpec, RequestError
from joulery.domain.serving.service import Slice, SliceKind
from joulery.domain.serving.tensors import TensorSpec
from tests.triton_server import triton_server
from tests.waiting import PATIENCE_S

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that holds the model and has not loaded it; its address."""
    with triton_server(tmp_path_factory.mktemp("triton"), {TOY: MODEL}) as url:
        yield url


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
