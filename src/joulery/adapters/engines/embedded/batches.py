"""Batches: which requests can be joined, their joined inputs, and the split of the answer and its cost."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from joulery.domain.errors import DataError
from joulery.domain.serving.engine import InferRequest
from joulery.domain.serving.tensors import Tensor, TensorSpec


def kind_of(request: InferRequest, declared: Sequence[TensorSpec]) -> Hashable:
    """Properties that requests must share to be joined; None where this one cannot be joined with any.

    Args:
        request: The request; all of its inputs have a first axis of the same length, else it goes alone.
        declared: What the model declares; an input with a fixed first axis cannot be joined.
    """
    if not request.inputs or any(spec.shape and spec.shape[0] != -1 for spec in declared):
        return None
    arrays = request.inputs.values()
    if any(array.ndim == 0 for array in arrays) or len({len(array) for array in arrays}) != 1:
        return None
    shapes = sorted((name, array.dtype.str, array.shape[1:]) for name, array in request.inputs.items())
    return (*shapes, request.outputs)


def joined(requests: Sequence[InferRequest]) -> dict[str, Tensor]:
    """The inputs of requests of one kind, joined along their first axis."""
    return {name: np.concatenate([request.inputs[name] for request in requests]) for name in requests[0].inputs}


def rows_of(requests: Sequence[InferRequest]) -> list[int]:
    """Number of rows of each request of a batch."""
    return [len(next(iter(request.inputs.values()))) for request in requests]


def split_rows(outputs: Mapping[str, Tensor], rows: Sequence[int]) -> list[dict[str, Tensor]]:
    """The outputs of each request of a batch.

    Args:
        outputs: The outputs of all of them.
        rows: Rows of each request.

    Raises:
        DataError: An output does not have one row for each input row.
    """
    edges = np.cumsum([0, *rows])
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != edges[-1]:
            raise DataError(f"output {name!r} of shape {list(array.shape)} cannot be split into {len(rows)} answers")
    return [
        {name: array[start:end] for name, array in outputs.items()}
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]


def divided(total: float, rows: Sequence[int]) -> list[float]:
    """Divide a batch's CPU time by rows, into parts that sum to it exactly; equal parts where it has no rows.

    Args:
        total: CPU seconds of the batch.
        rows: Rows of each request.
    """
    weights = rows if any(rows) else [1] * len(rows)
    every, unit = sum(weights), math.ulp(total)
    units = int(total / unit)  # exact: the unit is a power of two, as are the parts that are multiples of it
    parts = [units * weight // every for weight in weights]
    parts[weights.index(max(weights))] += units - sum(parts)
    return [part * unit for part in parts]
