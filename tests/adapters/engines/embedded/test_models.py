"""ONNX models and callables, loaded in this process; a worker does the same in its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joulery.adapters.engines.embedded.models import load, one_line, warm_up
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.serving.engine import ModelKind, ModelRef, Outcome, ReplicaSpec, RequestError
from joulery.domain.serving.tensors import TensorSpec
from tests.adapters.engines.support import CORE, ask, running

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'joulery[vision]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'joulery[vision]'")


def graph(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any] = []) -> ModelRef:  # noqa: B006
    """An ONNX file of these nodes."""
    made = onnx.helper.make_graph(nodes, "toy", inputs, outputs, constants)
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return ModelRef.parse(str(path))


def value(name: str, kind: str, shape: list[Any]) -> Any:
    return onnx.helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), shape)


@pytest.fixture
def doubler(tmp_path: Path) -> ModelRef:
    """y = x + x, z = -x, for any number of rows of two."""
    nodes = [onnx.helper.make_node("Add", ["x", "x"], ["y"]), onnx.helper.make_node("Neg", ["x"], ["z"])]
    rows = ["N", 2]
    return graph(
        tmp_path / "doubler.onnx",
        nodes,
        [value("x", "FLOAT", rows)],
        [value("y", "FLOAT", rows), value("z", "FLOAT", rows)],
    )


def test_an_onnx_model_declares_and_computes(doubler: ModelRef) -> None:
    model = load(doubler, threads=1)
    assert model.platform == "onnxruntime_onnx"
    assert model.inputs == (TensorSpec("x", "FP32", (-1, 2)),)
    assert model.outputs == (TensorSpec("y", "FP32", (-1, 2)), TensorSpec("z", "FP32", (-1, 2)))
    for rows in (1, 3):
        x = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        results = model.run({"x": x}, ())
        assert list(results) == ["y", "z"]
        assert results["y"].tolist() == (x + x).tolist()
    assert list(model.run({"x": x}, ("z",))) == ["z"]
    assert warm_up(model) == ""


@pytest.mark.parametrize(
    "inputs", [{}, {"x": np.zeros((1, 2))}, {"x": np.zeros((1, 3), np.float32)}, {"w": np.zeros((1, 2), np.float32)}]
)
def test_inputs_that_do_not_fit_are_the_request_s_fault(doubler: ModelRef, inputs: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        load(doubler, threads=1).run(inputs, ())
    assert caught.value.outcome is Outcome.INVALID


def test_text_goes_in_and_out(tmp_path: Path) -> None:
    shape = ["N"]
    node = onnx.helper.make_node("Identity", ["s"], ["t"])
    model = load(graph(tmp_path / "t.onnx", [node], [value("s", "STRING", shape)], [value("t", "STRING", shape)]), 1)
    assert model.inputs == (TensorSpec("s", "BYTES", (-1,)),)
    assert model.run({"s": np.array(["é".encode(), b"b"], object)}, ())["t"].tolist() == ["é", "b"]
    with pytest.raises(RequestError, match="is none"):
        model.run({"s": np.array([b"\xff"], object)}, ())
    assert warm_up(model) == ""


def test_every_type_of_the_protocol_is_known(tmp_path: Path) -> None:
    kinds = {
        "BOOL": "BOOL",
        "UINT8": "UINT8",
        "UINT16": "UINT16",
        "UINT32": "UINT32",
        "UINT64": "UINT64",
        "INT8": "INT8",
        "INT16": "INT16",
        "INT32": "INT32",
        "INT64": "INT64",
        "FLOAT16": "FP16",
        "FLOAT": "FP32",
        "DOUBLE": "FP64",
    }
    nodes = [onnx.helper.make_node("Identity", [f"i{kind}"], [f"o{kind}"]) for kind in kinds]
    sides = [[value(f"{side}{kind}", kind, [2]) for kind in kinds] for side in "io"]
    model = load(graph(tmp_path / "all.onnx", nodes, *sides), 1)
    assert {spec.name[1:]: spec.datatype for spec in model.inputs} == kinds
    assert warm_up(model) == ""


def test_a_type_the_protocol_cannot_carry_is_refused(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Identity", ["i"], ["o"])
    reference = graph(tmp_path / "b.onnx", [node], [value("i", "BFLOAT16", [1])], [value("o", "BFLOAT16", [1])])
    with pytest.raises(DataError, match="bfloat16"):
        load(reference, 1)


def test_a_warm_up_that_fails_is_reported_and_no_more(tmp_path: Path) -> None:
    """An index that zeros of size 1 do not satisfy: Gather at 3 of a tensor of any length."""
    index = onnx.helper.make_tensor("at", onnx.TensorProto.INT64, [1], [3])
    node = onnx.helper.make_node("Gather", ["x", "at"], ["y"])
    reference = graph(tmp_path / "g.onnx", [node], [value("x", "FLOAT", ["N"])], [value("y", "FLOAT", [1])], [index])
    model = load(reference, 1)
    note = warm_up(model)
    assert note.startswith("the warm-up failed: ")
    assert "\n" not in note
    assert model.run({"x": np.arange(5, dtype=np.float32)}, ())["y"].tolist() == [3.0]


async def test_a_replica_serves_an_onnx_model_and_shows_a_failed_warm_up(doubler: ModelRef, tmp_path: Path) -> None:
    index = onnx.helper.make_tensor("at", onnx.TensorProto.INT64, [1], [3])
    node = onnx.helper.make_node("Gather", ["x", "at"], ["y"])
    picky = graph(tmp_path / "p.onnx", [node], [value("x", "FLOAT", ["N"])], [value("y", "FLOAT", [1])], [index])
    async with running(ReplicaSpec("a", "v", CORE, doubler), ReplicaSpec("b", "v", CORE, picky)) as engine:
        answer = await ask(engine, service="a", x=np.ones((4, 2), np.float32), outputs=("y",))
        assert answer.outputs["y"].tolist() == [[2.0, 2.0]] * 4
        assert [bool(view.last_error) for view in engine.replicas()] == [False, True]
        with pytest.raises(RequestError, match=r"refuses the inputs: InvalidArgument: .*Gather") as caught:
            await ask(engine, service="b", x=np.ones(2, np.float32))
        assert caught.value.outcome is Outcome.INVALID


def test_missing_files_and_garbage(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(ModelRef(ModelKind.ONNX, str(tmp_path / "nothing.onnx")), 1)
    (tmp_path / "g.onnx").write_bytes(b"garbage" * 100)
    with pytest.raises(DataError, match="not an ONNX model"):
        load(ModelRef(ModelKind.ONNX, str(tmp_path / "g.onnx")), 1)


def test_without_onnx_runtime_the_remedy_is_named(doubler: ModelRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(CapabilityError, match="need ONNX Runtime") as caught:
        load(doubler, 1)
    assert caught.value.grant == "pip install 'joulery[vision]'"


def test_an_error_in_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
