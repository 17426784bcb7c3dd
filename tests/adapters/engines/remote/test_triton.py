"""Triton's configuration, word for word, and the processes that serve a plan."""

import pytest

from joulery.adapters.engines.remote.triton import (
    TritonModel,
    TritonProcess,
    config_text,
    one_server_each,
    processes,
    units,
)
from joulery.domain.errors import ConfigError
from joulery.domain.serving.tensors import TensorSpec

W5 = TritonModel("W5", 9, 0.0133333, 0.45, "onnxruntime", 4)


def test_a_configuration_word_for_word():
    assert (
        config_text(W5)
        == """\
name: "W5"
backend: "onnxruntime"
max_batch_size: 9
dynamic_batching {
  preferred_batch_size: [ 9 ]
  max_queue_delay_microseconds: 13333
}
instance_group [
  {
    count: 1
    kind: KIND_GPU
    gpus: [ 4 ]
    rate_limiter {
      resources [
        { name: "share" count: 450 }
      ]
    }
  }
]
"""
    )


def test_declared_tensors_leave_the_batch_out():
    tensors = (TensorSpec("photo", "UINT8", (-1, 224, 224, 3)), TensorSpec("names", "BYTES", (-1,)))
    text = config_text(TritonModel("m", 1, 0.0, 0.5, "python", None, inputs=tensors, outputs=tensors[:1]))
    assert '{ name: "photo" data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] }' in text
    assert '{ name: "names" data_type: TYPE_STRING dims: [ 1 ] }' in text and text.count("output [") == 1
    assert "KIND_CPU" in text and "gpus" not in text and "dynamic_batching" not in text


@pytest.mark.parametrize("shares", [(0.925,), (0.75, 0.15), (1 / 3, 1 / 3, 1 / 3), (0.1,) * 10, (0.0001,)])
def test_shares_that_fit_on_a_gpu_fit_in_the_rate_limiter(shares):
    assert 0 < sum(map(units, shares)) <= 1000


def test_every_instance_is_a_process_with_its_share_by_mps():
    small = TritonModel("W1", 6, 0.004, 0.2, gpu=4)
    first, second = processes([[W5, small]], "repo", port=9000)
    assert first.environment() == {"CUDA_VISIBLE_DEVICES": "4", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "45"}
    assert (first.port, second.port) == (9000, 9003), "HTTP, gRPC and metrics each"
    assert first.command().startswith("CUDA_VISIBLE_DEVICES=4 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=45 tritonserver ")
    assert "--load-model=W5" in first.arguments() and "--load-model=W1" not in first.arguments()
    assert not any("rate-limit" in argument for argument in first.arguments())


def test_a_whole_gpu_and_a_cpu_need_no_share():
    assert TritonProcess("r", ("m",), 0, 1.0, 8000).environment() == {"CUDA_VISIBLE_DEVICES": "0"}
    assert TritonProcess("r", ("m",), None, 0.5, 8000).environment() == {}


def test_without_mps_one_server_a_gpu_keeps_the_shares_with_the_rate_limiter():
    (server,) = one_server_each([[W5, TritonModel("W1", 6, 0.004, 0.2, gpu=4)], []], "repo")
    assert server.models == ("W5", "W1") and server.environment() == {"CUDA_VISIBLE_DEVICES": "4"}
    assert server.arguments()[-2:] == ["--rate-limit=execution_count", "--rate-limit-resource=share:1000:0"]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"delay_s": float("inf")}, {"share_ratio": 0.0}, {"share_ratio": 1.1}])
def test_what_triton_cannot_serve(wrong):
    with pytest.raises(ConfigError, match="Triton cannot serve this"):
        TritonModel(**({"name": "m", "batch": 1, "delay_s": 0.0, "share_ratio": 0.5} | wrong))
