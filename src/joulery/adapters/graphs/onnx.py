"""Reader of the operators of an ONNX model: shapes are from the file and ONNX's shape inference, without weights."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from joulery.adapters.graphs import rules
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.trace.operators import GraphOperator, OperatorKind, Tensor

_K = OperatorKind
_POOLS = ("AveragePool", "MaxPool", "LpPool")
_RULES = rules(
    {
        (_K.ELEMENTWISE, 1.0): (
            "Abs Add And BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Clip Div "
            "Dropout Equal Floor Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu "
            "Less LessOrEqual Max Mean Min Mod Mul Neg Not Or PRelu QuantizeLinear DequantizeLinear "
            "Reciprocal Relu Round Sign Sub Sum ThresholdedRelu Where Xor BatchNormalization"
        ),
        (_K.ELEMENTWISE, 10.0): (
            "Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp Gelu Log Mish Pow Selu Sigmoid Sin "
            "Sinh Softplus Softsign Sqrt Tan Tanh"
        ),
        (_K.MOVE, 0.0): (
            "Concat Compress DepthToSpace Expand Gather GatherElements GatherND NonZero OneHot Pad "
            "ScatterElements ScatterND Slice SpaceToDepth Split Tile TopK Transpose Trilu Unique Resize "
            "Upsample ReverseSequence"
        ),
        (_K.VIEW, 0.0): "Constant ConstantOfShape Flatten Range Reshape Shape Size Squeeze Unsqueeze",
        (_K.REDUCE, 0.0): "ArgMax ArgMin CumSum GlobalAveragePool GlobalMaxPool",
        (_K.NORM, 0.0): (
            "GroupNormalization InstanceNormalization LayerNormalization LpNormalization "
            "MeanVarianceNormalization RMSNormalization"
        ),
        (_K.SOFTMAX, 0.0): "LogSoftmax Softmax",
    }
)
_HANDED_ON = frozenset({"DequantizeLinear", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_BODIES = frozenset({"If", "Loop", "Scan"})


def read_onnx(path: Path, dimensions: Mapping[str, int]) -> tuple[GraphOperator, ...]:
    """The operators of an ONNX file, in order.

    Args:
        path: The file.
        dimensions: Values of symbolic dimensions by name; an unnamed first dimension of an input is ``batch``.

    Raises:
        CapabilityError: The ``onnx`` package is missing.
        DataError: The file is not an ONNX model, or a shape is not known.
    """
    try:
        import onnx
        from onnx import shape_inference
    except ImportError:
        raise CapabilityError(
            "reading an ONNX model needs the onnx package", resource="onnx", grant="pip install 'joulery[vision]'"
        ) from None
    decode_error: type[Exception] = importlib.import_module("google.protobuf.message").DecodeError
    try:
        model = onnx.load(str(path), load_external_data=False)
        _bind(model, dimensions, path)
        model = shape_inference.infer_shapes(model, data_prop=True)
    except (decode_error, onnx.checker.ValidationError, shape_inference.InferenceError) as error:
        raise DataError(f"not an ONNX model: {error}", file=str(path)) from None
    if not model.graph.node:
        raise DataError("the model has no operators", file=str(path), hint="name an ONNX file with a graph")
    return _Graph(onnx, model.graph, path).operators()


def _bind(model: Any, dimensions: Mapping[str, int], path: Path) -> None:
    """Set the symbolic dimensions of the inputs, and remove stored shapes, which hold for other values."""
    weights = {tensor.name for tensor in model.graph.initializer}
    changed = False
    for value in model.graph.input:
        if value.name in weights:
            continue
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.dim_value > 0:
                continue
            name = dimension.dim_param or ("batch" if axis == 0 else "")
            known = dimensions.get(name, dimensions.get("batch") if axis == 0 else None)
            if known is None:
                raise DataError(
                    f"dimension {axis} of input {value.name} has no size" + (f": {name}" if name else ""),
                    file=str(path),
                    hint=f"add --dim {name}=N" if name else "export the model with that dimension named or fixed",
                )
            dimension.dim_value, changed = known, True
    if changed:
        del model.graph.value_info[:]
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")


class _Graph:
    """Reader of one graph, with the shapes and constants by name."""

    def __init__(self, onnx: Any, graph: Any, path: Path) -> None:
        self.onnx, self.graph, self.path = onnx, graph, path
        self.tensors: dict[str, Tensor] = {}
        for value in (*graph.input, *graph.value_info, *graph.output):
            kind = value.type.tensor_type
            if kind.HasField("shape") and all(axis.HasField("dim_value") for axis in kind.shape.dim):
                shape = tuple(int(axis.dim_value) for axis in kind.shape.dim)
                self.tensors[value.name] = Tensor(shape, self._width(kind.elem_type))
        for weight in graph.initializer:
            self.tensors[weight.name] = Tensor(tuple(weight.dims), self._width(weight.data_type), parameter=True)

    def operators(self) -> tuple[GraphOperator, ...]:
        return tuple(self._operator(index, node) for index, node in enumerate(self.graph.node))

    def _operator(self, index: int, node: Any) -> GraphOperator:
        name = node.name or (node.output[0] if node.output else f"{node.op_type}_{index}")
        if node.op_type in _BODIES:
            raise DataError(
                f"operator {name} is a {node.op_type}: how often its body runs is not in the file",
                file=str(self.path),
                hint="export the model without control flow, or profile its body as a model of its own",
            )
        kind, per_element = self._rule(node.op_type)
        if node.op_type in _HANDED_ON and node.input and node.input[0] in self.tensors:
            self._propagate_weight(node)
        if kind is OperatorKind.VIEW:
            return GraphOperator(name, node.op_type, kind)
        inputs = tuple(self._known(item, name) for item in node.input if item)
        outputs = tuple(self._known(item, name) for item in node.output if item)
        if node.op_type == "Einsum":
            contraction = self._einsum(node, inputs, name)
        else:
            contraction = self._contraction(node, inputs, outputs)
        return GraphOperator(name, node.op_type, kind, inputs, outputs, contraction, per_element)

    def _propagate_weight(self, node: Any) -> None:
        """Mark the output of a node as a weight where its input is one, as in a reshape or transpose."""
        if self.tensors[node.input[0]].parameter and node.output[0] in self.tensors:
            self.tensors[node.output[0]] = replace(self.tensors[node.output[0]], parameter=True)

    def _rule(self, name: str) -> tuple[OperatorKind, float]:
        if name in _RULES:
            return _RULES[name]
        if name.startswith("Conv") or name == "QLinearConv":
            return OperatorKind.CONVOLUTION, 0.0
        if "MatMul" in name or name in ("Gemm", "Einsum"):
            return OperatorKind.DOT, 0.0
        if name.startswith("Reduce") or name in _POOLS:
            return OperatorKind.REDUCE, 0.0
        return OperatorKind.OTHER, 0.0

    def _contraction(self, node: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> float:
        attributes = {item.name: item for item in node.attribute}
        if node.op_type == "ConvTranspose":
            weight = inputs[1].shape
            return inputs[0].elements * math.prod(weight[1:]) / max(outputs[0].elements, 1)
        if node.op_type.startswith("Conv"):
            return float(math.prod(inputs[1].shape[1:]))
        if node.op_type == "QLinearConv":
            return float(math.prod(inputs[3].shape[1:]))
        if node.op_type == "Gemm":
            transposed = "transA" in attributes and attributes["transA"].i
            return float(inputs[0].shape[0 if transposed else -1])
        if "MatMul" in node.op_type:
            return float(inputs[0].shape[-1]) if inputs[0].shape else 1.0
        if node.op_type in _POOLS:
            return float(math.prod(attributes["kernel_shape"].ints))
        return 1.0

    def _einsum(self, node: Any, inputs: tuple[Tensor, ...], name: str) -> float:
        equation = next(item.s.decode() for item in node.attribute if item.name == "equation").replace(" ", "")
        terms, _, result = equation.partition("->")
        if "." in equation or not result:
            raise DataError(
                f"operator {name}: no rule for the equation {equation!r}", file=str(self.path), hint="write a MatMul"
            )
        extent = {
            letter: size
            for term, tensor in zip(terms.split(","), inputs, strict=True)
            for letter, size in zip(term, tensor.shape, strict=True)
        }
        return float(math.prod(size for letter, size in extent.items() if letter not in result))

    def _known(self, item: str, operator: str) -> Tensor:
        if item not in self.tensors:
            constant = next((node for node in self.graph.node if item in node.output), None)
            if constant is not None and constant.op_type == "Constant":
                value = next((a.t for a in constant.attribute if a.name == "value"), None)
                if value is not None:
                    return Tensor(tuple(value.dims), self._width(value.data_type), parameter=True)
            raise DataError(
                f"the shape of {item}, which operator {operator} needs, is not known",
                file=str(self.path),
                hint="give the symbolic dimensions with --dim NAME=N, or export the model with fixed shapes",
            )
        return self.tensors[item]

    def _width(self, element: int) -> float:
        numpy_type = self.onnx.helper.tensor_dtype_to_np_dtype(element) if element else None
        return float(numpy_type.itemsize) if numpy_type is not None else 4.0
