"""Curves over requests in flight that neither fall nor outrun the load."""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import FloatArray

_ROUNDS = 8


def monotone_times(load: FloatArray, times: FloatArray) -> FloatArray:
    """Logarithms of token times, changed as little as a few projections can, that rise no faster than the load.

    With ``n`` requests in flight and a token every ``t`` seconds for each, ``n / t`` tokens are written a second. So
    the slope of ln t over ln n lies between 0 (more requests make no token faster) and 1 (they cost no
    throughput).

    Args:
        load: Logarithms of requests in flight, ascending, shape (points,).
        times: Logarithms of times, shape (points,).
    """
    found = np.array(times, np.float64)
    for _ in range(_ROUNDS):
        found = load - isotonic(load - isotonic(found))
    for i in range(1, len(found)):
        found[i] = min(max(found[i], found[i - 1]), found[i - 1] + load[i] - load[i - 1])
    return np.asarray(found, np.float64)


def isotonic(values: FloatArray) -> FloatArray:
    """The nearest non-falling sequence (least squares; pool adjacent violators)."""
    levels: list[float] = []
    counts: list[int] = []
    for value in values:
        levels.append(float(value))
        counts.append(1)
        while len(levels) > 1 and levels[-2] > levels[-1]:
            count = counts[-2] + counts[-1]
            levels[-2:] = [(levels[-2] * counts[-2] + levels[-1] * counts[-1]) / count]
            counts[-2:] = [count]
    return np.repeat(levels, counts)
