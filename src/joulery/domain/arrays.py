"""Read-only NumPy columns for frozen data classes, and the largest values, chosen alike on every processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]
    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
else:  # their kinds are for the type checker: numpy.typing is not imported to run
    FloatArray = IntArray = BoolArray = np.ndarray


def readonly(values: npt.ArrayLike, dtype: type[Any]) -> npt.NDArray[Any]:
    """A contiguous one-dimensional read-only copy of ``values``.

    Raises:
        ValueError: ``values`` is not one-dimensional.
    """
    column = np.array(values, dtype=dtype, order="C", copy=True)
    if column.ndim != 1:
        raise ValueError(f"expected one dimension, got shape {column.shape}")
    column.flags.writeable = False
    return column


def largest(values: FloatArray, count: int) -> IntArray:
    """Indices of the ``count`` largest values, ascending; of equal values the first, on every processor.

    ``numpy.argpartition`` chooses among equal values depending on the processor's instruction set, so a plan that uses
    it differs from machine to machine.

    Args:
        values: Values, float64[n], no NaN.
        count: Number of indices, at least 1; all are returned where there are no more.

    Returns:
        Indices, int64[min(count, n)].
    """
    if count >= len(values):
        return np.arange(len(values))
    least = np.partition(values, len(values) - count)[len(values) - count]
    above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))
