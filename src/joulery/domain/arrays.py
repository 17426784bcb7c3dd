"""Read-only numpy columns for frozen nouns."""

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
