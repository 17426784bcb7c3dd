"""ONNX models built in the test with the vendor's own package."""

from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.graphs.onnx import read_onnx
from joulery.domain.errors import DataError
from joulery.domain.trace.operators import OperatorKind
from joulery.perf.power.operator_costs import operator_costs

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'joulery[vision]'")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def weight(name: str, *shape: int) -> object:
    return numpy_helper.from_array(np.zeros(shape, np.float32), name)


def saved(folder: Path, nodes: list, inputs: dict, weights: list, output: str = "out") -> Path:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        weights,
    )
    file = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(file))
    return file


@pytest.fixture
def small(tmp_path: Path) -> Path:
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], "conv", kernel_shape=[3, 3], pads=[1] * 4, group=2),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w", "b"], ["g"], "gemm", transB=1),
        helper.make_node("Softmax", ["g"], ["out"], "soft"),
    ]
    weights = [weight("k", 6, 2, 3, 3), weight("w", 5, 96), weight("b", 5)]
    return saved(tmp_path, nodes, {"x": ["N", 4, 8, 8]}, weights)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_work_of_every_operator(small: Path, batch: int) -> None:
    costs = {cost.name: cost for cost in operator_costs(read_onnx(small, {"batch": batch}))}
    assert list(costs) == ["conv", "relu", "pool", "gemm", "soft"]
    assert costs["conv"].flops == 2 * batch * 6 * 64 * 18  # grouped: 2 input channels x 9
    assert costs["conv"].traffic_bytes == 4 * (batch * 4 * 64 + 6 * 18 + batch * 6 * 64)
    assert costs["relu"].flops == batch * 6 * 64
    assert costs["pool"].flops == batch * 6 * 16 * 4
    assert costs["gemm"].flops == 2 * batch * 5 * 96
    assert costs["gemm"].parameter_bytes == 4 * (5 * 96 + 5)
    assert costs["soft"].flops == 11 * batch * 5
    assert costs["gemm"].output_bytes == 4 * batch * 5


def test_a_named_dimension(small: Path) -> None:
    assert operator_costs(read_onnx(small, {"N": 2}))[0].flops == 2 * 2 * 6 * 64 * 18
    with pytest.raises(DataError, match=r"dimension 0 .*input x .*: N") as caught:
        read_onnx(small, {})
    assert caught.value.hint == "add --dim N=N"


def test_products_of_matrices_in_several_forms(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "matmul"),
        helper.make_node("Einsum", ["m", "v"], ["e"], "einsum", equation="bij,jk->bik"),
        helper.make_node("Transpose", ["t"], ["u"], "turned", perm=[1, 0]),
        helper.make_node("MatMul", ["e", "u"], ["out"], "last"),
    ]
    file = saved(tmp_path, nodes, {"x": [2, 3, 4]}, [weight("w", 4, 5), weight("v", 5, 6), weight("t", 7, 6)])
    costs = {cost.name: cost for cost in operator_costs(read_onnx(file, {}))}
    assert costs["matmul"].flops == 2 * (2 * 3 * 5) * 4
    assert costs["einsum"].flops == 2 * (2 * 3 * 6) * 5
    assert costs["last"].flops == 2 * (2 * 3 * 7) * 6
    assert costs["last"].parameter_bytes == 4 * 42  # a weight that was turned is still one


def test_an_operator_without_a_rule_counts_its_traffic_alone(tmp_path: Path) -> None:
    nodes = [helper.make_node("Hardmax", ["x"], ["out"], "odd")]
    (operator,) = read_onnx(saved(tmp_path, nodes, {"x": [2, 3]}, []), {})
    assert operator.kind is OperatorKind.OTHER
    (cost,) = operator_costs([operator])
    assert (cost.flops, cost.traffic_bytes) == (0, 4 * 12)


def test_control_flow_is_refused(tmp_path: Path) -> None:
    body = helper.make_graph([], "body", [], [])
    nodes = [helper.make_node("If", ["x"], ["out"], "branch", then_branch=body, else_branch=body)]
    file = tmp_path / "model.onnx"
    graph = helper.make_graph(nodes, "t", [helper.make_tensor_value_info("x", TensorProto.BOOL, [1])], [])
    onnx.save(helper.make_model(graph), str(file))
    with pytest.raises(DataError, match="operator branch is a If"):
        read_onnx(file, {})


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "not.onnx").write_bytes(b"\x08\x07 this is no protocol buffer \xff\xff")
    with pytest.raises(DataError, match="not an ONNX model"):
        read_onnx(tmp_path / "not.onnx", {})
    with pytest.raises(DataError, match="the model has no operators"):
        read_onnx(saved(tmp_path, [], {"x": [1]}, [], output="x"), {})
