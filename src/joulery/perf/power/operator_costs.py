"""Floating-point operations and bytes of operators, from their shapes (μ-Serve, ATC'24, section 3.1; HLO cost rules).

A dot is ``2 · outputs · contraction`` operations and reads and writes each operand once; so is a convolution.
Elementwise functions cost their operations an element; reductions one an input element. Softmax and normalisation are
counted as the separate passes that an unfused program runs. A fusion does all its arithmetic in one pass over its
inputs and outputs. Moves cost twice the bytes they produce; views cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from joulery.domain.trace.operators import GraphOperator, OperationCost, OperatorKind

_SOFTMAX_FLOPS = 11.0
"""Maximum 1, exponential 8, sum 1, quotient 1."""
_NORM_FLOPS = 9.0
"""Mean 2, variance 3, function 4."""


def operator_costs(graph: Sequence[GraphOperator]) -> tuple[OperationCost, ...]:
    """The work of each operator that does any, in the order of the graph; views are left out."""
    return tuple(operator_cost(operator) for operator in graph if operator.kind is not OperatorKind.VIEW)


def operator_cost(operator: GraphOperator) -> OperationCost:
    """Work of one operator."""
    return OperationCost(
        name=operator.name,
        flops=_flops(operator),
        traffic_bytes=_traffic_bytes(operator),
        count=operator.count,
        type=operator.type,
        phase=operator.phase,
        parameter_bytes=sum(tensor.size_bytes for tensor in operator.inputs if tensor.parameter),
        output_bytes=sum(tensor.size_bytes for tensor in operator.outputs),
        kind=operator.kind,
    )


def _flops(operator: GraphOperator) -> float:
    outputs = sum(tensor.elements for tensor in operator.outputs[:1])
    largest = max((tensor.elements for tensor in operator.inputs), default=0)
    match operator.kind:
        case OperatorKind.DOT | OperatorKind.CONVOLUTION:
            return 2.0 * outputs * operator.contraction
        case OperatorKind.ELEMENTWISE:
            return outputs * operator.flops_per_element
        case OperatorKind.REDUCE:
            return outputs * operator.contraction if operator.contraction > 1 else float(largest)
        case OperatorKind.SOFTMAX:
            return outputs * _SOFTMAX_FLOPS
        case OperatorKind.NORM:
            return outputs * _NORM_FLOPS
        case OperatorKind.ATTENTION:
            scores = _scores(operator)
            return 4.0 * outputs * operator.contraction + scores * (2.0 + _SOFTMAX_FLOPS)
        case OperatorKind.FUSION:
            return sum(_flops(inner) * inner.count for inner in operator.inner)
        case _:
            return 0.0


def _traffic_bytes(operator: GraphOperator) -> float:
    read = sum(tensor.size_bytes for tensor in operator.inputs)
    written = sum(tensor.size_bytes for tensor in operator.outputs)
    match operator.kind:
        case OperatorKind.MOVE:
            return 2.0 * written
        case OperatorKind.SOFTMAX:
            return 3.0 * (read + written)
        case OperatorKind.NORM:
            return 2.0 * (read + written)
        case OperatorKind.ATTENTION:
            size = operator.outputs[0].element_bytes if operator.outputs else 4.0
            return read + written + 10.0 * _scores(operator) * size
        case OperatorKind.VIEW:
            return 0.0
        case _:
            return read + written


def _scores(operator: GraphOperator) -> float:
    """Elements of the matrix of attention weights: keys for each query of each head."""
    if not operator.outputs or not operator.outputs[0].shape:
        return 0.0
    return operator.outputs[0].elements / operator.outputs[0].shape[-1] * operator.contraction
