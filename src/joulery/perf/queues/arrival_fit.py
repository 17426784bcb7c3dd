"""The arrival process of a log of requests: its rate, its variation, and the uncertainty of the variation.

Gaps alone hide bursts whose gaps are correlated, so the variation is that of *counts*: the variance of the number of
requests in a window over its mean (the index of dispersion; Cox and Lewis, 1966). A renewal process with squared
coefficient of variation ``scv`` of its gaps has index ``scv`` in long windows. The largest over windows from the SLO to
a hundred times the SLO is what affects a queue with that SLO.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError

REQUESTS_MIN = 100
"""Least number of requests from which their variation is estimated."""
_WINDOWS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Lengths of the windows, as multiples of the SLO."""
_WINDOWS_MIN = 20
"""Least number of windows from which their variance is estimated."""
_PARTS = 8
"""Number of parts of the log whose mean rates are distinguished: a rate that drifts is not a burst."""
_STEADY = 0.02
"""Squared variation of the gaps below which requests count as evenly spaced, apart from rounding of their times."""
_ONE_SIDED_95 = 1.645


class ArrivalFit(NamedTuple):
    """Arrival process fitted to a log of requests.

    Attributes:
        rate_rps: Mean rate of its busiest eighth.
        mean_rps: Mean rate of all of it.
        scv: Index of dispersion of the counts, at the window where it is largest; 0 evenly spaced, 1 Poisson.
        scv_high: Upper end of its one-sided 95 % interval, for planning.
        window_s: The window with that index.
        requests: Requests in the log.
    """

    rate_rps: float
    mean_rps: float
    scv: float
    scv_high: float
    window_s: float
    requests: int


def fit_arrivals(times_s: npt.ArrayLike, slo_s: float) -> ArrivalFit:
    """Rate and variation of the requests of a log.

    Args:
        times_s: Arrival times, seconds, float64[n], in any order.
        slo_s: The latency SLO of the service.

    Raises:
        DataError: There are fewer than :data:`REQUESTS_MIN` requests, or they all arrive at once.
    """
    times = np.sort(np.asarray(times_s, np.float64))
    if len(times) < REQUESTS_MIN:
        raise DataError(f"{len(times)} requests are too few to know how they vary: at least {REQUESTS_MIN} are needed")
    start, length = float(times[0]), float(times[-1] - times[0])
    if length <= 0:
        raise DataError("all requests of the log arrive at the same time")
    mean = (len(times) - 1) / length
    parts = _counts(times, start, length / _PARTS)[:_PARTS] / (length / _PARTS)
    best = (0.0, 0.0, slo_s)
    for scale in _WINDOWS:
        window = scale * slo_s
        if length / window < _WINDOWS_MIN:
            break
        index, high = _dispersion(_counts(times, start, window)[: int(length / window)])
        best = max(best, (high, index, window))
    high, index, window = best
    gaps = np.diff(times)
    of_gaps = float(gaps.var() / gaps.mean() ** 2)
    if not high:  # the log is shorter than a few SLOs: its gaps are all there is
        index, high = of_gaps, of_gaps * (1 + _ONE_SIDED_95 * math.sqrt(2 / len(gaps)))
    if of_gaps < _STEADY:  # counts of whole requests vary a little even so
        index = high = 0.0
    return ArrivalFit(float(parts.max()), mean, index, high, window, len(times))


def _counts(times: FloatArray, start: float, window: float) -> FloatArray:
    return np.bincount(((times - start) / window).astype(np.int64)).astype(np.float64)


def _dispersion(counts: FloatArray) -> tuple[float, float]:
    """The index of dispersion within parts of steady rate, and the upper end of its interval."""
    stretches = np.array_split(counts, min(_PARTS, max(1, len(counts) // _WINDOWS_MIN)))
    squares = math.fsum(float(((part - part.mean()) ** 2).sum()) for part in stretches)
    free = len(counts) - len(stretches)
    mean = float(counts.mean())
    if mean <= 0 or free < 1:
        return 0.0, 0.0
    index = squares / free / mean
    return index, index * (1 + _ONE_SIDED_95 * math.sqrt(2 / free))
