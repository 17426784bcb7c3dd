"""Operators of a model: as a graph states them (shapes), and as work (operations and bytes)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from joulery.domain.errors import ConfigError


class OperatorKind(StrEnum):
    """Kind of an operator, by how its work follows from its shapes."""

    DOT = "dot"
    """A sum of products for each output element."""
    CONVOLUTION = "convolution"
    """A sum of products over a window for each output element."""
    ELEMENTWISE = "elementwise"
    """A function of each element."""
    REDUCE = "reduce"
    """An operation for each input element; for pooling, for each element of a window."""
    SOFTMAX = "softmax"
    """Maximum, exponential, sum and quotient."""
    NORM = "norm"
    """Two reductions and a function of each element."""
    ATTENTION = "attention"
    """Two products with a softmax between them."""
    MOVE = "move"
    """Memory traffic alone: transpose, concatenate, gather."""
    VIEW = "view"
    """Another view of the same memory: no work."""
    FUSION = "fusion"
    """Operators that share one pass over memory."""
    OTHER = "other"
    """No rule is known for its arithmetic: it is counted by its traffic alone, and reported as such."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and size of one operand.

    Attributes:
        shape: Extents, each >= 0.
        element_bytes: Bytes of one element.
        parameter: A weight of the model rather than data of a request.
    """

    shape: tuple[int, ...]
    element_bytes: float = 4.0
    parameter: bool = False

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> float:
        """Bytes it occupies."""
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class GraphOperator:
    """One operator of a graph, in topological order.

    Attributes:
        name: Its name in the graph.
        type: Its type, as the framework names it.
        kind: The rule that gives its work.
        inputs, outputs: Operands, weights among the inputs.
        contraction: Products (dot, convolution) or elements of a window (pooling) for one output element; for
            attention, the number of keys.
        flops_per_element: Operations an output element of an elementwise operator costs.
        inner: Operators of a fusion.
        phase: Part of the model's work it belongs to: ``forward``, ``prefill``, ``decode`` …
        count: How often it runs in one pass of the model.
    """

    name: str
    type: str
    kind: OperatorKind
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    contraction: float = 1.0
    flops_per_element: float = 1.0
    inner: tuple[GraphOperator, ...] = ()
    phase: str = "forward"
    count: float = 1.0


@dataclass(frozen=True, slots=True)
class OperationCost:
    """Work of one operator.

    Attributes:
        name: Operator, for messages.
        flops: Floating-point operations of one call, >= 0.
        traffic_bytes: Bytes read and written by one call, >= 0.
        count: Calls in one pass of the model.
        type: What kind of operator it is.
        phase: Part of the model's work it belongs to.
        parameter_bytes: Weights it holds, >= 0.
        output_bytes: Bytes that one call passes on, >= 0.
        kind: The rule that gave its work; it determines how the operator can be divided among devices.
    """

    name: str
    flops: float
    traffic_bytes: float
    count: float = 1.0
    type: str = ""
    phase: str = "forward"
    parameter_bytes: float = 0.0
    output_bytes: float = 0.0
    kind: OperatorKind = OperatorKind.OTHER

    def __post_init__(self) -> None:
        values = (self.flops, self.traffic_bytes, self.count, self.parameter_bytes, self.output_bytes)
        if not all(0 <= value < math.inf for value in values):
            raise ConfigError(
                "the work of an operator cannot be negative",
                pointer=self.name,
                got=f"{self.flops} flops, {self.traffic_bytes} bytes, {self.count} calls",
            )
