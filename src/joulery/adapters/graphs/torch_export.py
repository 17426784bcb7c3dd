"""Reader of the operators of a PyTorch program saved by ``torch.export.save`` (``.pt2``), which needs no PyTorch.

The archive contains the FX graph as JSON: one ATen call for each node, and the size and type of every tensor. The
reader does not open the weights and pickles in it.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from joulery.adapters.graphs import rules
from joulery.domain.errors import DataError
from joulery.domain.trace.operators import GraphOperator, OperatorKind, Tensor

_K = OperatorKind
_WIDTH_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 9: 4, 10: 8, 11: 16, 12: 1, 13: 2, 28: 2, 29: 1, 30: 1}
"""Bytes of an element by the number of its ScalarType in the schema of torch.export."""
_RULES = rules(
    {
        (_K.ELEMENTWISE, 1.0): (
            "abs add bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min div dropout eq floor "
            "fmod ge gt hardsigmoid hardswish hardtanh le leaky_relu logical_and logical_not logical_or lt "
            "masked_fill maximum minimum mul native_dropout ne neg reciprocal relu relu6 remainder round "
            "rsub sign sub threshold where to _to_copy batch_norm _native_batch_norm_legit_no_training"
        ),
        (_K.ELEMENTWISE, 10.0): (
            "acos asin atan atan2 cos cosh elu erf exp expm1 gelu log log10 log1p log2 logit mish pow rsqrt "
            "selu sigmoid silu sin sinh softplus sqrt tan tanh"
        ),
        (_K.MOVE, 0.0): (
            "cat clone contiguous constant_pad_nd copy embedding fill flip full full_like gather index "
            "index_put index_select new_zeros ones pad pixel_shuffle repeat roll scatter scatter_add "
            "select_scatter slice_scatter sort stack topk tril triu upsample_bilinear2d upsample_nearest2d "
            "zeros zeros_like arange one_hot"
        ),
        (_K.VIEW, 0.0): (
            "alias chunk detach expand flatten getitem permute reshape select slice split split_with_sizes "
            "squeeze t transpose unbind unflatten unsqueeze view _assert_tensor_metadata sym_size "
            "_unsafe_view lift_fresh_copy"
        ),
        (_K.REDUCE, 0.0): (
            "adaptive_avg_pool2d _adaptive_avg_pool2d amax amin any all argmax argmin cumsum max mean min "
            "prod sum std var avg_pool2d max_pool2d max_pool2d_with_indices"
        ),
        (_K.NORM, 0.0): "group_norm instance_norm layer_norm native_group_norm native_layer_norm rms_norm",
        (_K.SOFTMAX, 0.0): "_log_softmax _safe_softmax _softmax log_softmax softmax",
        (_K.DOT, 0.0): "addmm baddbmm bmm dot linear matmul mm mv",
        (_K.CONVOLUTION, 0.0): "conv1d conv2d conv3d conv_transpose2d convolution",
    }
)


def read_torch_export(path: Path, dimensions: Mapping[str, int]) -> tuple[GraphOperator, ...]:
    """The operators of a ``.pt2`` file, in order.

    Args:
        path: The file.
        dimensions: Values of symbolic sizes by name; others have the size of the example input.

    Raises:
        DataError: The file is not such a program, or a size is not known.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("models/model.json")]
            if not names:
                raise DataError("no graph of torch.export in this archive", file=str(path), hint=_HINT)
            program = json.loads(archive.read(names[0]))
        graph = program["graph_module"]["graph"]
        return _Program(graph, program["graph_module"]["signature"], dimensions, path).operators()
    except (zipfile.BadZipFile, json.JSONDecodeError, OSError) as error:
        raise DataError(f"not a program of torch.export: {error}", file=str(path), hint=_HINT) from None
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"a schema of torch.export this joulery does not know: {error!r}", file=str(path)) from None


_HINT = "write one with torch.export.save(torch.export.export(model, example_inputs), 'model.pt2')"


class _Program:
    """Reader of the operators of one program."""

    def __init__(self, graph: Any, signature: Any, dimensions: Mapping[str, int], path: Path) -> None:
        self.graph, self.dimensions, self.path = graph, dimensions, path
        weights = {
            spec[kind]["arg"]["name"]
            for spec in signature["input_specs"]
            for kind in ("parameter", "buffer", "tensor_constant")
            if kind in spec
        }
        self.tensors = {
            name: Tensor(
                tuple(self._size(extent, name) for extent in value["sizes"]),
                float(_WIDTH_BYTES.get(value["dtype"], 4)),
                parameter=name in weights,
            )
            for name, value in graph["tensor_values"].items()
        }

    def operators(self) -> tuple[GraphOperator, ...]:
        found = tuple(self._operator(node) for node in self.graph["nodes"])
        if not found:
            raise DataError("the program has no operators", file=str(self.path), hint=_HINT)
        return found

    def _operator(self, node: Any) -> GraphOperator:
        target = str(node["target"])
        short = target.removeprefix("torch.ops.").split(".")
        base = short[1] if len(short) > 1 else short[0]
        arguments = {argument["name"]: argument["arg"] for argument in node["inputs"]}
        inputs = tuple(self.tensors[name] for argument in arguments.values() for name in _named(argument))
        outputs = tuple(self.tensors[name] for argument in node["outputs"] for name in _named(argument))
        kind, per_element, contraction = self._rule(base, inputs, outputs, arguments)
        if kind is OperatorKind.VIEW and any(tensor.parameter for tensor in inputs):
            for argument in node["outputs"]:
                for name in _named(argument):
                    self.tensors[name] = replace(self.tensors[name], parameter=True)
        title = node.get("name") or next(iter(_named(node["outputs"][0])), base) if node["outputs"] else base
        return GraphOperator(title, ".".join(short[:2]), kind, inputs, outputs, contraction, per_element)

    def _rule(
        self, base: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], arguments: Mapping[str, Any]
    ) -> tuple[OperatorKind, float, float]:
        base = base.removesuffix("_") if base not in _RULES else base
        if "attention" in base and len(inputs) >= 3:
            return OperatorKind.ATTENTION, 0.0, float(inputs[1].shape[-2])
        if base not in _RULES:
            view = base.startswith(("sym_", "_assert")) or not outputs
            return (OperatorKind.VIEW if view else OperatorKind.OTHER), 0.0, 1.0
        kind, per_element = _RULES[base]
        if kind is OperatorKind.DOT:
            data = inputs[1] if base in ("addmm", "baddbmm") else inputs[0]
            return kind, 0.0, float(data.shape[-1]) if data.shape else 1.0
        if kind is OperatorKind.CONVOLUTION:
            weight, transposed = inputs[1].shape, base == "conv_transpose2d" or _true(arguments.get("transposed"))
            if transposed:
                return kind, 0.0, inputs[0].elements * math.prod(weight[1:]) / max(outputs[0].elements, 1)
            return kind, 0.0, float(math.prod(weight[1:]))
        if base in ("avg_pool2d", "max_pool2d", "max_pool2d_with_indices"):
            window = arguments["kernel_size"]["as_ints"]
            return kind, 0.0, float(math.prod(window) if len(window) > 1 else window[0] ** 2)
        return kind, per_element, 1.0

    def _size(self, extent: Any, tensor: str) -> int:
        if "as_int" in extent:
            return int(extent["as_int"])
        expression = extent["as_expr"]
        for name, value in self.dimensions.items():
            if f"'{name}'" in expression["expr_str"] or expression["expr_str"] == name:
                return value
        if expression.get("hint"):
            return int(expression["hint"]["as_int"])
        raise DataError(
            f"a size of {tensor} is not known: {expression['expr_str']}",
            file=str(self.path),
            hint="add --dim NAME=N, or export the model with fixed sizes",
        )


def _named(argument: Any) -> tuple[str, ...]:
    """Names of the tensors of one argument."""
    if "as_tensor" in argument:
        return (str(argument["as_tensor"]["name"]),)
    if "as_tensors" in argument:
        return tuple(str(item["name"]) for item in argument["as_tensors"])
    if "as_optional_tensor" in argument and "as_tensor" in argument["as_optional_tensor"]:
        return (str(argument["as_optional_tensor"]["as_tensor"]["name"]),)
    if "as_optional_tensors" in argument:
        return tuple(str(item["as_tensor"]["name"]) for item in argument["as_optional_tensors"] if "as_tensor" in item)
    return ()


def _true(argument: Any) -> bool:
    return bool(argument and argument.get("as_bool"))
