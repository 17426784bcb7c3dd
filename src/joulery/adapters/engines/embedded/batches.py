"""Requests that are answered together: their inputs joined along the first axis, the outputs cut apart again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from joulery.domain.errors import DataError
from joulery.domain.serving.engine import InferRequest
from joulery.domain.serving.tensors import Tensor, TensorSpec


def kind_of(request: InferRequest, declared: Sequence[TensorSpec]) -> Hashable:
    """What requests must have in common to be joined; None where this one cannot be joined with any.

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


def rows_of(request: InferRequest) -> int:
    """Length of the first axis of a request's inputs."""
    return len(next(iter(request.inputs.values())))


def joined(requests: Sequence[InferRequest]) -> dict[str, Tensor]:
    """The inputs of requests of one kind, one after the other along the first axis."""
    return {name: np.concatenate([request.inputs[name] for request in requests]) for name in requests[0].inputs}


def parted(outputs: Mapping[str, Tensor], rows: Sequence[int]) -> list[dict[str, Tensor]]:
    """The outputs of each request of a batch.

    Args:
        outputs: What the model made of all of them.
        rows: How many rows each request had.

    Raises:
        DataError: An output has not a row for every row that went in.
    """
    edges = np.cumsum([0, *rows])
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != edges[-1]:
            raise DataError(f"output {name!r} of shape {list(array.shape)} cannot be cut into {len(rows)} answers")
    return [
        {name: array[start:end] for name, array in outputs.items()}
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
