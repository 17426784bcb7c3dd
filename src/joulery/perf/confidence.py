"""Confidence intervals of a quantile and a mean of few observations of a running service.

Latencies of one queue are correlated: a slow request is followed by more slow ones. Counted as independent, they would
give intervals that are too narrow. Both intervals therefore use an effective number of observations, found from the
means of consecutive batches (the method of batch means).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray

_BATCHES = 8
"""Least number of batches; observations that give fewer batches count as independent."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval.

    Attributes:
        low: Lower bound; minus infinity where nothing is known.
        point: The estimate; NaN without observations.
        high: Upper bound; infinity where there are too few observations for one.
    """

    low: float
    point: float
    high: float


def effective_size(values: FloatArray, spread: float) -> float:
    """Number of independent observations that determine the mean of ``values`` as well as these.

    Args:
        values: In order of time, float64[n].
        spread: Variance of one observation.

    Returns:
        Between 1 and ``n``.
    """
    n = len(values)
    size = math.isqrt(n)
    batches = n // size if size else 0
    if batches < _BATCHES or not spread > 0:
        return float(n)
    means = values[n - batches * size :].reshape(batches, size).mean(axis=1)
    stretched = size * float(means.var(ddof=1)) / spread
    return float(min(n, max(1.0, n / max(stretched, 1.0))))


def quantile_interval(values: FloatArray, quantile: float, confidence: float) -> Interval:
    """A quantile of observations that may be infinite (a request that was never answered), by order statistics.

    The ``r``-th smallest of ``n`` independent observations lies above the quantile with the probability that a binomial
    of ``n`` and the quantile stays below ``r``. No shape of the distribution is assumed.

    Args:
        values: In order of time, float64[n].
        quantile: Between 0 and 1, both excluded.
        confidence: Probability that the interval contains the quantile, for each interval that is computed.
    """
    from scipy.special import bdtr

    n = len(values)
    if n == 0:
        return Interval(-math.inf, math.nan, math.inf)
    ordered = np.sort(values)
    point = float(ordered[min(n - 1, math.ceil(quantile * n) - 1)])
    above = (values > point).astype(np.float64)
    m = max(1, math.floor(effective_size(above, quantile * (1 - quantile))))
    below = bdtr(np.arange(m, dtype=np.float64), m, quantile)  # P(at most r of m lie below the quantile)
    tail = (1 - confidence) / 2
    low_rank = int(np.searchsorted(below, tail, "right"))  # the most ranks that are surely below it
    high_rank = int(np.searchsorted(below, 1 - tail, "left")) + 1
    low = -math.inf if low_rank == 0 else float(ordered[math.floor(low_rank * n / m) - 1])
    high = math.inf if high_rank > m else float(ordered[math.ceil(high_rank * n / m) - 1])
    return Interval(low, point, high)


def mean_interval(values: FloatArray, confidence: float) -> Interval:
    """The mean of observations, by the normal distribution of batch means.

    Args:
        values: In order of time, float64[n]; finite.
        confidence: Probability that the mean lies within.
    """
    from scipy.special import ndtri

    n = len(values)
    if n < 2:
        return Interval(-math.inf, float(values[0]) if n else math.nan, math.inf)
    mean, spread = float(values.mean()), float(values.var(ddof=1))
    half = float(ndtri((1 + confidence) / 2)) * math.sqrt(spread / effective_size(values, spread))
    return Interval(mean - half, mean, mean + half)


def share_interval(right: int, count: int, confidence: float) -> Interval:
    """A probability, from the frequency of an event, by Wilson's score interval.

    Args:
        right, count: The event happened ``right`` times in ``count`` trials.
        confidence: Probability that the interval contains it.
    """
    from scipy.special import ndtri

    if count == 0:
        return Interval(0.0, math.nan, 1.0)
    z, share = float(ndtri((1 + confidence) / 2)), right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # The share itself lies within, but for rounding: where it is 0 or 1, an end of the interval is.
    return Interval(max(0.0, min(share, centre - half)), share, min(1.0, max(share, centre + half)))


def mixed_interval(parts: Sequence[tuple[float, Interval]]) -> Interval:
    """A weighted mean of independent estimates, from their own intervals (Zou and Donner's MOVER, 2008).

    Args:
        parts: ``(weight, interval)`` of each; the weights are those of the mean.
    """
    point = math.fsum(weight * one.point for weight, one in parts)
    low = math.sqrt(math.fsum((weight * (one.point - one.low)) ** 2 for weight, one in parts))
    high = math.sqrt(math.fsum((weight * (one.high - one.point)) ** 2 for weight, one in parts))
    return Interval(point - low, point, point + high)
