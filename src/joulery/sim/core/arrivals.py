"""Arrival times: renewal processes at constant or changing rates, and recorded times. All vectorised.

A renewal process has independent gaps of one coefficient of variation ``cv``: 0 is a metronome, 1 is Poisson, above 1
is bursty (Gamma-distributed gaps). A rate that changes over time stretches and squeezes the same process: it runs in
operational time, where its rate is one, and its instants are mapped back through the integral of the rate. For
``cv = 1`` that is exactly the non-homogeneous Poisson process.

Processes start in equilibrium: the first gap is the time from a random moment to the next arrival, so the expected
number of arrivals in any window is exactly the integral of the rate, bursty or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, readonly
from joulery.domain.errors import DataError

_BLOCK = 8192
"""Gaps drawn at a time: fixed, so that sums round alike in windows of any length."""
_CV_MAX = 50.0
"""Beyond this a Gamma renewal process has almost all of its arrivals in one instant."""


class ArrivalSource(Protocol):
    """A source of arrival times."""

    def times_s(self, end_s: float, rng: np.random.Generator) -> FloatArray:
        """Arrival times in ``[0, end_s)``, seconds, float64[n], non-decreasing."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RateSeries:
    """A rate that is constant on each step ``[edges_s[i], edges_s[i+1])`` and holds its last value ever after.

    Attributes:
        edges_s: Seconds, float64[n], strictly increasing from 0.
        rate_rps: Arrivals per second from each edge on, float64[n], 0 or more.

    Raises:
        DataError: Shapes disagree, edges do not increase from 0, a rate is negative or not finite.
    """

    edges_s: FloatArray
    rate_rps: FloatArray

    def __init__(self, edges_s: npt.ArrayLike, rate_rps: npt.ArrayLike) -> None:
        edges, rates = readonly(edges_s, np.float64), readonly(rate_rps, np.float64)
        if len(edges) == 0 or len(edges) != len(rates):
            raise DataError(f"a rate series needs one rate per edge, got {len(edges)} edges and {len(rates)} rates")
        if edges[0] != 0 or not bool(np.all(np.isfinite(edges)) and np.all(np.diff(edges) > 0)):
            raise DataError("the edges of a rate series start at 0 s and increase")
        bad = ~(np.isfinite(rates) & (rates >= 0))
        if bool(np.any(bad)):
            at = int(np.argmax(bad))
            raise DataError(f"rate {at} of the series is {float(rates[at])} per second, expected 0 or more")
        object.__setattr__(self, "edges_s", edges)
        object.__setattr__(self, "rate_rps", rates)

    @classmethod
    def constant(cls, rate_rps: float) -> RateSeries:
        """A constant rate."""
        return cls([0.0], [rate_rps])

    def expected(self, t_s: npt.ArrayLike) -> FloatArray:
        """Expected arrivals in ``[0, t_s)``, for each time: the integral of the rate."""
        times = np.asarray(t_s, np.float64)
        step = np.clip(np.searchsorted(self.edges_s, times, "right") - 1, 0, None)
        result: FloatArray = self._at_edges()[step] + self.rate_rps[step] * (times - self.edges_s[step])
        return result

    def times_of(self, expected: npt.ArrayLike) -> FloatArray:
        """Inverse of :meth:`expected`: when each expected count is reached, seconds; infinity when it never is."""
        counts = np.asarray(expected, np.float64)
        at_edges = self._at_edges()
        step = np.clip(np.searchsorted(at_edges, counts, "right") - 1, 0, None)
        rate = self.rate_rps[step]
        with np.errstate(divide="ignore"):
            wait = np.where(rate > 0, (counts - at_edges[step]) / np.where(rate > 0, rate, 1.0), math.inf)
        return np.asarray(self.edges_s[step] + wait, np.float64)

    def _at_edges(self) -> FloatArray:
        counts: FloatArray = np.concatenate(([0.0], np.cumsum(np.diff(self.edges_s) * self.rate_rps[:-1])))
        return counts


@dataclass(frozen=True, slots=True)
class Renewal:
    """A renewal process: independent gaps of one coefficient of variation, at a constant or changing rate.

    Attributes:
        rate: Arrivals per second over time.
        cv: Coefficient of variation of the gaps in operational time: 0 metronome, 1 Poisson, other values Gamma.
    """

    rate: RateSeries
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.cv <= _CV_MAX:
            raise DataError(f"the coefficient of variation of the gaps is {self.cv}, expected 0 to {_CV_MAX:g}")

    def times_s(self, end_s: float, rng: np.random.Generator) -> FloatArray:
        """Arrival times in ``[0, end_s)``; a longer window continues a shorter one of the same stream."""
        total = float(self.rate.expected(end_s))
        times = self.rate.times_of(unit_renewal(total, self.cv, rng))
        return times[times < end_s]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Arrival times of a log, unchanged.

    Attributes:
        recorded_s: Seconds from the start of the log, float64[n], non-decreasing, 0 or more.

    Raises:
        DataError: Times are out of order, negative or not finite; the message names the first offending row.
    """

    recorded_s: FloatArray

    def __init__(self, recorded_s: npt.ArrayLike) -> None:
        times = readonly(recorded_s, np.float64)
        bad = ~np.isfinite(times) | (np.diff(times, prepend=0.0) < 0)
        if bool(np.any(bad)):
            at = int(np.argmax(bad))
            raise DataError(
                f"arrival {at} is at {float(times[at])} s, expected a time no earlier than the one before it",
                row=at + 1,
                hint="sort the log by arrival time and count seconds from its start",
            )
        object.__setattr__(self, "recorded_s", times)

    def times_s(self, end_s: float, rng: np.random.Generator) -> FloatArray:
        """The recorded times before ``end_s``; draws nothing."""
        return self.recorded_s[: int(np.searchsorted(self.recorded_s, end_s, "left"))]


def constant(rate_rps: float) -> Renewal:
    """Evenly spaced arrivals with a random phase."""
    return Renewal(RateSeries.constant(rate_rps), cv=0.0)


def poisson(rate_rps: float) -> Renewal:
    """Poisson arrivals: exponential gaps, as of independent users."""
    return Renewal(RateSeries.constant(rate_rps), cv=1.0)


def gamma(rate_rps: float, cv: float) -> Renewal:
    """Gamma-distributed gaps: bursty above ``cv`` 1, smoother than Poisson below."""
    return Renewal(RateSeries.constant(rate_rps), cv)


def unit_renewal(end: float, cv: float, rng: np.random.Generator) -> FloatArray:
    """Instants in ``[0, end)`` of an equilibrium renewal process of rate one.

    Args:
        end: Length of the window in mean gaps.
        cv: Coefficient of variation of the gaps.
        rng: Generator of the gaps, which are drawn in order: a longer window only draws more.
    """
    if not end > 0:
        return np.empty(0)
    phase = rng.random()
    if cv == 0:
        return np.arange(phase, end, 1.0)
    # A random moment falls into a gap with probability proportional to its length: Gamma(k) becomes Gamma(k + 1).
    shape = 1.0 / (cv * cv)
    last = phase * rng.standard_gamma(shape + 1.0) / shape
    blocks = [np.array([last])]
    while last < end:
        block = last + np.cumsum(rng.standard_gamma(shape, _BLOCK) / shape)
        last = float(block[-1])
        blocks.append(block)
    instants = np.concatenate(blocks)
    return instants[: int(np.searchsorted(instants, end, "left"))]
