import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import ModelKind, ModelRef, Outcome, ReplicaSpec, RequestError
from joulery.domain.serving.service import Slice, SliceKind


def test_a_model_is_a_file_or_a_callable() -> None:
    assert ModelRef.parse("models/lite0.onnx") == ModelRef(ModelKind.ONNX, "models/lite0.onnx")
    assert ModelRef.parse("C:x.onnx").kind is ModelKind.ONNX
    assert ModelRef.parse("shop.models:classify").kind is ModelKind.PYTHON
    assert str(ModelRef.parse("shop.models:classify")) == "shop.models:classify"


@pytest.mark.parametrize(
    "text", ["", "lite0", "a:", ":f", "a b:f", "a:b.c", "a..b:f", "model.bin", "transformers:task:"]
)
def test_anything_else_is_not_a_model(text: str) -> None:
    with pytest.raises(ConfigError, match="not a model"):
        ModelRef.parse(text)


def test_replicas_differ_by_what_they_run_and_where() -> None:
    model = ModelRef.parse("m:f")
    whole = ReplicaSpec("photos", "small", Slice(SliceKind.CPU, cores=1), model)
    half = ReplicaSpec("photos", "small", Slice(SliceKind.CPU, cores=1, share_ratio=0.5), model)
    assert whole != half
    assert str(whole) == "photos/small on cpu:1"
    assert str(half) == "photos/small on cpu:1@0.5"
    with pytest.raises(ConfigError, match="negative threads"):
        ReplicaSpec("photos", "small", Slice(SliceKind.CPU, cores=1), model, threads=-1)


def test_a_request_error_says_what_became_of_it() -> None:
    error = RequestError("the queue is full", Outcome.OVERLOADED, retry_after_s=0.5)
    assert error.as_dict()["outcome"] == "overloaded"
    assert str(error) == "the queue is full"


@pytest.mark.parametrize(
    ("text", "kind", "location"),
    [
        ("net.pt", ModelKind.TORCHSCRIPT, "net.pt"),
        ("net.torchscript", ModelKind.TORCHSCRIPT, "net.torchscript"),
        ("net.pt2", ModelKind.TORCH_EXPORT, "net.pt2"),
        ("transformers:fill-mask:./bert", ModelKind.TRANSFORMERS, "./bert"),
        ("transformers:pipeline", ModelKind.PYTHON, "transformers:pipeline"),
    ],
)
def test_the_name_of_a_model_says_how_it_is_loaded(text: str, kind: ModelKind, location: str) -> None:
    found = ModelRef.parse(text)
    assert (found.kind, found.location) == (kind, location)
