"""Isotonic regression."""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import FloatArray


def isotonic(values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """The non-decreasing sequence nearest in weighted least squares (pool adjacent violators).

    Args:
        values: float64[n].
        weights: float64[n], above 0; 1 each when None.

    Returns:
        float64[n].
    """
    level: list[list[float]] = []
    each = np.ones(len(values)) if weights is None else weights
    for value, weight in zip(values.tolist(), each.tolist(), strict=True):
        level.append([value, weight, 1.0])
        while len(level) > 1 and level[-2][0] > level[-1][0]:
            v, w, n = level.pop()
            below = level[-1]
            below[0] = (below[0] * below[1] + v * w) / (below[1] + w)
            below[1] += w
            below[2] += n
    return np.repeat([value for value, _, _ in level], np.array([n for _, _, n in level], np.int64))
