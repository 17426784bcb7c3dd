"""Reader of the operators of XLA programs in HLO text (``jax.jit(f).lower(x).compile().as_text()`` or XLA's dumps).

A fusion counts its own inputs and outputs; its arithmetic is that of all operators inside. The body of a loop counts
with XLA's known trip count, and once where XLA states none. Several programs in one file are phases of one model, named
after their modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.adapters.graphs import rules
from joulery.adapters.hlo_text import HloInstruction, HloModule, hlo_modules
from joulery.domain.errors import DataError
from joulery.domain.trace.operators import GraphOperator, OperatorKind, Tensor

_K = OperatorKind
_OPERATION = re.compile(r"(\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)|(?<![\w.\-\]\[{},=])([A-Za-z_][\w.\-]*)(?=\s*[,)])")
_CALLED = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_WIDTH_BYTES = {"pred": 1.0, "s4": 0.5, "u4": 0.5, "bf16": 2.0, "token": 0.0, "opaque": 0.0}

_RULES = rules(
    {
        (_K.ELEMENTWISE, 1.0): (
            "abs add and ceil clamp compare convert divide floor is-finite maximum minimum multiply negate "
            "not or popcnt remainder round-nearest-afz round-nearest-even select shift-left "
            "shift-right-arithmetic shift-right-logical sign subtract xor batch-norm-inference real imag complex map"
        ),
        (_K.ELEMENTWISE, 10.0): (
            "atan2 cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic power rsqrt "
            "sine sqrt tan tanh"
        ),
        (_K.MOVE, 0.0): (
            "broadcast concatenate copy copy-start dynamic-slice gather iota pad reverse rng "
            "rng-bit-generator scatter slice sort transpose all-gather all-reduce all-to-all collective-permute "
            "reduce-scatter"
        ),
        (_K.VIEW, 0.0): (
            "after-all bitcast bitcast-convert constant copy-done domain get-tuple-element "
            "optimization-barrier parameter partition-id replica-id reshape tuple get-dimension-size add-dependency"
        ),
        (_K.REDUCE, 0.0): "reduce reduce-window select-and-scatter",
        (_K.DOT, 0.0): "dot",
        (_K.CONVOLUTION, 0.0): "convolution",
    }
)


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    opcode: str
    outputs: tuple[Tensor, ...]
    operands: tuple[str, ...]
    text: str


def read_hlo(path: Path) -> tuple[GraphOperator, ...]:
    """The operators of every program in a file, in order.

    Weights are recognised by their use: an argument of the program or a constant that is the second operand of a
    dot or a convolution.

    Raises:
        DataError: The file cannot be read, or contains no program.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read: {error}", file=str(path)) from None
    modules = [module for module in hlo_modules(text) if module.entry]
    found: list[GraphOperator] = []
    for module in modules:
        phase = module.name if len(modules) > 1 else "forward"
        found += [replace(operator, phase=phase) for operator in _Reader(module, path).operators(module.entry)]
    if not found:
        raise DataError(
            "no HLO program with operators in this file",
            file=str(path),
            hint="write one with jax.jit(f).lower(x).compile().as_text()",
        )
    return tuple(found)


def _computation(lines: Sequence[HloInstruction]) -> list[_Instruction]:
    return [_instruction(line.name, match) for line in lines if (match := _OPERATION.match(line.text))]


def _instruction(name: str, match: re.Match[str]) -> _Instruction:
    rest = match[3]
    operands = tuple(first or second for first, second in _OPERAND.findall(rest[: _closing(rest)] + ")"))
    return _Instruction(name, match[2], _tensors(match[1]), operands, rest)


def _closing(text: str) -> int:
    """The index of the bracket that closes one opened before the text; the text's length without one."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at
    return len(text)


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(tuple(int(extent.lstrip("<=")) for extent in extents.split(",") if extent), _width(kind))
        for kind, extents in _SHAPE.findall(text)
    )


def _width(kind: str) -> float:
    digits = re.match(r"[a-z]+(\d+)", kind)
    return _WIDTH_BYTES.get(kind, int(digits[1]) / 8 if digits else 4.0)


class _Reader:
    """Reader of the operators of one module."""

    def __init__(self, module: HloModule, path: Path) -> None:
        self.computations = {name: _computation(lines) for name, lines in module.computations.items()}
        self.path = path

    def operators(self, computation: str, count: float = 1.0) -> list[GraphOperator]:
        instructions = self.computations.get(computation)
        if instructions is None:
            raise DataError(f"computation {computation} is called but not in the file", file=str(self.path))
        known = {each.name: each for each in instructions}
        found: list[GraphOperator] = []
        for each in instructions:
            found += self._expanded(each, known, count)
        return found

    def _expanded(self, each: _Instruction, known: Mapping[str, _Instruction], count: float) -> list[GraphOperator]:
        if each.opcode == "while":
            trips = _TRIPS.search(each.text)
            body = re.search(r"\bbody=%?([\w.\-]+)", each.text)
            return self.operators(body[1], count * float(trips[1] if trips else 1)) if body else []
        if each.opcode in ("call", "async-start"):
            called = _CALLED.search(each.text)
            return self.operators(called[1], count) if called else []
        if each.opcode == "conditional":
            branches = [name for many, one in _BRANCHES.findall(each.text) for name in (many or one).split(",")]
            lists = [self.operators(name.strip().lstrip("%"), count) for name in branches if name.strip()]
            return max(lists, key=len, default=[])
        operator = self._operator(each, known)
        return [replace(operator, count=count)] if operator.kind is not OperatorKind.VIEW else []

    def _operator(self, each: _Instruction, known: Mapping[str, _Instruction]) -> GraphOperator:
        if each.opcode == "fusion":
            called = _CALLED.search(each.text)
            inner = tuple(self.operators(called[1])) if called else ()
            names = {operator.type for operator in inner}
            title = "fusion of " + (", ".join(sorted(names)) if len(names) <= 3 else f"{len(names)} operators")
            inputs = self._inputs(each, known, OperatorKind.FUSION)
            return GraphOperator(each.name, title, OperatorKind.FUSION, inputs, each.outputs, inner=inner)
        kind, per_element, outputs = *self._rule(each), each.outputs
        if each.opcode == "custom-call" and kind is not OperatorKind.OTHER:
            outputs = outputs[:1]  # the others are scratch
        if each.opcode == "dynamic-update-slice" and len(each.operands) > 1 and each.operands[1] in known:
            outputs = known[each.operands[1]].outputs  # in place: what is written is the update
        inputs = self._inputs(each, known, kind)
        contraction = self._contraction(each, kind, inputs)
        type_ = each.opcode
        if target := _TARGET.search(each.text):
            type_ = target[1]
        return GraphOperator(each.name, type_, kind, inputs, outputs, contraction, per_element)

    def _rule(self, each: _Instruction) -> tuple[OperatorKind, float]:
        if each.opcode == "dynamic-update-slice":
            return OperatorKind.MOVE, 0.0
        if each.opcode == "custom-call":
            target = _TARGET.search(each.text)
            name = target[1].lower() if target else ""
            if "conv" in name and _LABELS.search(each.text):
                return OperatorKind.CONVOLUTION, 0.0
            if any(word in name for word in ("gemm", "matmul", "dot")):
                return OperatorKind.DOT, 0.0
            return OperatorKind.OTHER, 0.0
        if each.opcode.endswith(("-done", "-update")):
            return OperatorKind.VIEW, 0.0
        return _RULES.get(each.opcode, (OperatorKind.OTHER, 0.0))

    def _inputs(self, each: _Instruction, known: Mapping[str, _Instruction], kind: OperatorKind) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for index, name in enumerate(each.operands):
            if name not in known:
                continue
            source = known[name]
            fixed = kind in (OperatorKind.DOT, OperatorKind.CONVOLUTION, OperatorKind.FUSION) and index > 0
            while source.opcode in ("bitcast", "copy", "reshape", "transpose", "convert") and source.operands:
                if source.operands[0] not in known:
                    break
                source = known[source.operands[0]]
            weight = fixed and source.opcode in ("parameter", "constant")
            found += [replace(tensor, parameter=weight) for tensor in known[name].outputs]
        return tuple(found)

    def _contraction(self, each: _Instruction, kind: OperatorKind, inputs: Sequence[Tensor]) -> float:
        if kind is OperatorKind.DOT and inputs:
            match = _CONTRACTED.search(each.text)
            axes = [int(axis) for axis in re.findall(r"\d+", match[1])] if match else [len(inputs[0].shape) - 1]
            return float(math.prod(inputs[0].shape[axis] for axis in axes if axis < len(inputs[0].shape)))
        if kind is OperatorKind.CONVOLUTION and len(inputs) > 1:
            labels = _LABELS.search(each.text)
            axis = labels[1].index("o") if labels and "o" in labels[1] else len(inputs[1].shape) - 1
            return inputs[1].elements / max(inputs[1].shape[axis], 1)
        if each.opcode == "reduce-window":
            window = _WINDOW.search(each.text)
            return float(math.prod(int(size) for size in window[1].split("x"))) if window else 1.0
        return 1.0
