"""What a live trial has shown so far, and what is kept of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Layout
from joulery.policies.serving.annealing import TrialMetrics

_JUST_ABOVE = 1.001
"""What is not known to keep a limit is told to a search as breaking it by so much at least."""
_HOPELESS = 10.0
"""A latency beyond so many limits is told as that: what never ends has no logarithm."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The latest requests of a service that arrived since its layout took over.

    Attributes:
        layout: What answered them.
        since_s: Arrivals from then on count, Unix seconds.
        requests: How many ended.
        failed: Those of them that the service owed an answer and gave none; their latency is infinite.
        latency_s, latency_low_s, latency_high_s: The SLO's quantile, and where it surely lies.
        energy_j: Joules a request; NaN where unknown.
        energy_band_j: Half-width of its interval; infinite where too few requests say so.
        served: Answers by variant.
        deaths: Replicas that died since the layout took over; the requests around a death are left out.
    """

    layout: Layout
    since_s: float
    requests: int
    failed: int
    latency_s: float
    latency_low_s: float
    latency_high_s: float
    energy_j: float
    energy_band_j: float
    served: Mapping[str, int]
    deaths: int = 0

    @property
    def answers(self) -> int:
        """Requests that were answered."""
        return sum(self.served.values())

    def tells(self, fewest: int) -> bool:
        """Whether so many requests ended, some were answered, and their joules are known."""
        return self.requests >= fewest and self.answers > 0 and 0 < self.energy_j < math.inf

    def accuracy(self, accuracy_ratio: Mapping[str, float]) -> tuple[float, float]:
        """Mean accuracy over the answers and its standard error; NaN for no answer."""
        answers = self.answers
        if not answers:
            return math.nan, math.nan
        mean = math.fsum(accuracy_ratio[name] * count for name, count in self.served.items()) / answers
        spread = math.fsum(count * (accuracy_ratio[name] - mean) ** 2 for name, count in self.served.items()) / answers
        return mean, math.sqrt(spread / answers)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: NaN is null, an infinite number a word."""
        numbers = {name: _written(getattr(self, name)) for name in _NUMBERS}
        counts = {"requests": self.requests, "failed": self.failed, "deaths": self.deaths}
        return {
            "layout": self.layout.names(),
            "since_s": self.since_s,
            **numbers,
            **counts,
            "served": dict(self.served),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: It is not what ``as_dict`` writes.
        """
        return cls(
            layout=Layout.parse(data["layout"]),
            since_s=float(data["since_s"]),
            requests=int(data["requests"]),
            failed=int(data["failed"]),
            served={str(name): int(count) for name, count in data["served"].items()},
            deaths=int(data["deaths"]),
            **{name: math.nan if data[name] is None else float(data[name]) for name in _NUMBERS},
        )


_NUMBERS = ("latency_s", "latency_low_s", "latency_high_s", "energy_j", "energy_band_j")


def _written(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


class Verdict(StrEnum):
    """What a sample says about its layout."""

    KEEPS = "keeps"
    """It surely keeps the limit."""
    BREAKS = "breaks"
    """It surely does not."""
    UNSURE = "unsure"
    """The time was up before it was sure to; it counts as breaking it."""
    SILENT = "silent"
    """Too few requests came to say anything."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What is kept of a trial.

    Attributes:
        layout: What was tried.
        metrics: What it showed; the latency is the estimate.
        latency_low_s, latency_high_s: Where the latency surely lies.
        requests: On how many requests that rests.
        rate_rps: Under which demand.
        at_s: When, Unix seconds.
    """

    layout: Layout
    metrics: TrialMetrics
    latency_low_s: float
    latency_high_s: float
    requests: int
    rate_rps: float
    at_s: float = 0.0

    @classmethod
    def of(cls, sample: Sample, accuracy_ratio: Mapping[str, float], rate_rps: float, at_s: float = 0.0) -> Tried:
        """The outcome of a trial that ended at a time.

        Raises:
            DataError: Nothing was answered, or its joules are not known.
        """
        accuracy, _ = sample.accuracy(accuracy_ratio)
        if not (math.isfinite(accuracy) and 0 < sample.energy_j < math.inf):
            raise DataError(f"a trial of {sample.layout} without answers or joules has no outcome")
        metrics = TrialMetrics(accuracy, sample.latency_s, sample.energy_j)
        return cls(sample.layout, metrics, sample.latency_low_s, sample.latency_high_s, sample.requests, rate_rps, at_s)

    def keeps(self, limit_s: float) -> bool:
        """Whether it surely keeps a latency."""
        return self.latency_high_s <= limit_s

    def breaks(self, limit_s: float) -> bool:
        """Whether it surely does not keep a latency."""
        return self.latency_low_s > limit_s

    def told(self, limit_s: float) -> TrialMetrics:
        """As a search is told it: what is not sure to keep the limit breaks it."""
        seen = self.metrics
        if self.keeps(limit_s):
            return seen
        latency_s = min(max(seen.latency_s, _JUST_ABOVE * limit_s), _HOPELESS * limit_s)
        return TrialMetrics(seen.accuracy_ratio, latency_s, seen.energy_j)


def judge(
    sample: Sample, limit_s: float, fewest: int, energy_tolerance_ratio: float, *, time_is_up: bool
) -> Verdict | None:
    """What a sample says about its layout; None while more requests may say more.

    Args:
        sample: So far.
        limit_s: The SLO's latency.
        fewest: Requests without which nothing is believed to keep it.
        energy_tolerance_ratio: How far the joules may be off, relative, for a trial to end early.
        time_is_up: The trial ends now in any case.
    """
    if sample.latency_low_s > limit_s and sample.tells(1):
        return Verdict.BREAKS
    enough = sample.tells(fewest)
    if enough and sample.latency_high_s <= limit_s:
        sure = sample.energy_band_j <= energy_tolerance_ratio * sample.energy_j
        return Verdict.KEEPS if time_is_up or sure else None
    if not time_is_up:
        return None
    return Verdict.UNSURE if enough else Verdict.SILENT
