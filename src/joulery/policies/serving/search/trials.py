"""Live trials: the verdict on a sample, the outcome that is kept, and the trial budget of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Layout
from joulery.policies.serving.observation import Sample
from joulery.policies.serving.search.annealing import TrialMetrics

_JUST_ABOVE = 1.001
"""A latency that may keep the limit but is not sure to counts as this multiple of it in a search."""
_UNBOUNDED = 10.0
"""An infinite latency counts as this multiple of the limit in a search: infinity has no logarithm."""


@dataclass(frozen=True, slots=True)
class TrialBudget:
    """Trial budget of one search.

    Attributes:
        count: Largest number of trials.
        count_infeasible: Trials while nothing measured keeps the SLO; ``count`` when None.
        clock_s: Seconds that the search may take, from its first trial.
        longest_s: Seconds that a trial may take.
        min_requests: Requests without which a trial never counts as keeping the SLO.
        energy_tolerance_ratio: Half-width of the joules' interval, relative, that ends a trial early.
        retry_s: After a search that found nothing feasible, seconds before an SLO violation starts another one, and
            before a layout that violated the SLO may be tried again.
    """

    count: int = 10
    clock_s: float = 300.0
    longest_s: float = 30.0
    min_requests: int = 100
    energy_tolerance_ratio: float = 0.05
    retry_s: float = 600.0
    count_infeasible: int | None = None

    @property
    def while_infeasible(self) -> int:
        """Trials while nothing measured keeps the SLO."""
        return self.count if self.count_infeasible is None else self.count_infeasible


class Verdict(StrEnum):
    """Verdict of a sample on its layout."""

    WITHIN = "within"
    """The interval lies within the SLO."""
    ABOVE = "above"
    """The interval lies above the SLO."""
    UNSURE = "unsure"
    """The trial's time ended before the interval lay on one side; it counts as above."""
    NO_DATA = "no data"
    """Too few requests ended."""


@dataclass(frozen=True, slots=True)
class MeasuredLayout:
    """The outcome of a trial.

    Attributes:
        layout: The layout that was tried.
        metrics: Measured metrics; the latency is the estimate.
        latency_low_s, latency_high_s: Confidence interval of the latency.
        requests: Number of requests behind the metrics.
        rate_rps: Demand during the trial.
        at_s: End of the trial, Unix seconds.
    """

    layout: Layout
    metrics: TrialMetrics
    latency_low_s: float
    latency_high_s: float
    requests: int
    rate_rps: float
    at_s: float = 0.0

    @classmethod
    def of(
        cls, sample: Sample, accuracy_ratio: Mapping[str, float], rate_rps: float, at_s: float = 0.0
    ) -> MeasuredLayout:
        """The outcome of a trial that ended at ``at_s``.

        Raises:
            DataError: Nothing was answered, or its joules are not known.
        """
        accuracy, _ = sample.accuracy(accuracy_ratio)
        if not (math.isfinite(accuracy) and 0 < sample.energy_j < math.inf):
            raise DataError(f"a trial of {sample.layout} without answers or joules has no outcome")
        metrics = TrialMetrics(accuracy, sample.latency_s, sample.energy_j)
        return cls(sample.layout, metrics, sample.latency_low_s, sample.latency_high_s, sample.requests, rate_rps, at_s)

    def within(self, limit_s: float) -> bool:
        """Whether the whole interval lies within a latency limit."""
        return self.latency_high_s <= limit_s

    def above(self, limit_s: float) -> bool:
        """Whether the whole interval lies above a latency limit."""
        return self.latency_low_s > limit_s

    def for_search(self, limit_s: float) -> TrialMetrics:
        """The metrics that a search is given: a latency that is not sure to keep the limit lies above it."""
        shown = self.metrics
        if self.within(limit_s):
            return shown
        latency_s = max(shown.latency_s, _JUST_ABOVE * limit_s) if shown.latency_s <= limit_s else shown.latency_s
        if not math.isfinite(latency_s):
            latency_s = _UNBOUNDED * limit_s
        return TrialMetrics(shown.accuracy_ratio, latency_s, shown.energy_j)


def judge(sample: Sample, limit_s: float, budget: TrialBudget, *, time_is_up: bool) -> Verdict | None:
    """The verdict of a sample on its layout; None while more requests are needed.

    Args:
        sample: The trial so far.
        limit_s: The SLO's latency.
        budget: The requests and the precision that a verdict needs.
        time_is_up: The trial ends now in any case.
    """
    if sample.latency_low_s > limit_s and sample.suffices(1):
        return Verdict.ABOVE
    enough = sample.suffices(budget.min_requests)
    if enough and sample.latency_high_s <= limit_s:
        precise = sample.energy_band_j <= budget.energy_tolerance_ratio * sample.energy_j
        return Verdict.WITHIN if time_is_up or precise else None
    if not time_is_up:
        return None
    return Verdict.UNSURE if enough else Verdict.NO_DATA
