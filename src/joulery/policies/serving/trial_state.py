"""What a search by live trials may spend, what is asked of it, and what it remembers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.service import Slo
from joulery.policies.serving.trial_sample import Tried

_MOST_FAILURES = 2
"""A layout that could not be run in so many searches is not tried again."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one search may spend on trials.

    Attributes:
        count: Trials.
        clock_s: Seconds, from its first trial.
        longest_s: Seconds a trial.
        fewest: Requests without which a trial is not believed to keep the SLO.
        energy_tolerance_ratio: How far the joules may be off for a trial to end before its time.
        retry_s: After a search that found nothing, a service that still breaks its promise is left alone for so long;
            and then what broke it may be tried again.
    """

    count: int = 10
    clock_s: float = 300.0
    longest_s: float = 30.0
    fewest: int = 100
    energy_tolerance_ratio: float = 0.05
    retry_s: float = 600.0


@dataclass(frozen=True, slots=True)
class TrialTerms:
    """What a person asks for, and may change while the service runs.

    Attributes:
        lambda_ratio: Weight of carbon against accuracy, 0 to 1.
        slo: Latency to keep.
        minimum_accuracy_ratio: Mean accuracy never to go below.
    """

    lambda_ratio: float
    slo: Slo
    minimum_accuracy_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialState:
    """What the policy remembers.

    Attributes:
        layout: The layout last decided on; None before the first decision.
        trying: The same while it is on trial; None otherwise. A governor of clocks stays pinned meanwhile.
        decided_s: When it was decided on.
        yardstick: The first trial, of the most accurate variant everywhere: what the objective compares with.
        known: Every trial so far under the present demand, the newest of each layout.
        before: How many of them were known when the search began.
        asked: What the search asked for since, in order.
        spent: Trials it has spent, the yardstick's included.
        failures: Layouts that could not be run, once for each search in which they were tried.
        skipped: Layouts that this search does not try again.
        excluded: Layouts that it never asks for.
        searches: Searches begun.
        begun_s, cause, words: When and why the last one began.
        owed: Why a search waits until another service has ended its trials; empty where none does.
        g_per_kwh: Intensity it weighs carbon at; NaN when that was unknown.
        terms: What was asked for then; None before the first.
        planned_rps: Demand then.
        feasible: False after a search that found nothing that keeps the promise.
        rate_rps: Demand, smoothed; NaN before the first.
        seen_s: Time of the last observation.
    """

    layout: Layout | None = None
    trying: Layout | None = None
    decided_s: float = -math.inf
    yardstick: Tried | None = None
    known: tuple[Tried, ...] = ()
    before: int = 0
    asked: tuple[Layout, ...] = ()
    spent: int = 0
    failures: tuple[Layout, ...] = ()
    skipped: frozenset[Layout] = frozenset()
    excluded: frozenset[Layout] = frozenset()
    searches: int = 0
    begun_s: float = -math.inf
    cause: str = ""
    words: str = ""
    owed: str = ""
    g_per_kwh: float = math.nan
    terms: TrialTerms | None = None
    planned_rps: float = math.nan
    feasible: bool = True
    rate_rps: float = math.nan
    seen_s: float = -math.inf

    def learned(self, tried: Tried) -> TrialState:
        """With the outcome of a trial, in the place of an older one of the same layout."""
        others = tuple(item for item in self.known if item.layout != tried.layout)
        yardstick = tried if self.yardstick is None else self.yardstick
        return replace(self, known=(*others, tried), yardstick=yardstick)

    def without(self, layout: Layout, *, failed: bool = False) -> TrialState:
        """With a layout that is not tried again in this search; nothing is on trial any more."""
        failures = (*self.failures, layout) if failed else self.failures
        return replace(self, trying=None, skipped=self.skipped | {layout}, failures=failures)

    def begun(
        self,
        now_s: float,
        cause: str,
        words: str,
        g_per_kwh: float,
        demand_rps: float,
        terms: TrialTerms,
        retry_s: float,
    ) -> TrialState:
        """At the start of a new search: what is known is kept unless the demand is another.

        While nothing known keeps the SLO, only what surely breaks it, and did so within ``retry_s``, need not be tried
        again: what a neighbour's burst of work spoiled gets another chance.
        """
        known, limit_s = self.known if cause != "demand" else (), terms.slo.latency_s
        if not any(item.keeps(limit_s) for item in known):
            known = tuple(item for item in known if item.breaks(limit_s) and now_s - item.at_s < retry_s)
        failed = {item for item in self.failures if self.failures.count(item) >= _MOST_FAILURES}
        yardstick = set() if self.yardstick is None else {self.yardstick.layout}
        return replace(
            self,
            trying=None,
            known=known,
            before=len(known),
            asked=(),
            spent=0,
            skipped=frozenset(),
            excluded=frozenset(failed - yardstick),
            searches=self.searches + 1,
            begun_s=now_s,
            cause=cause,
            words=words,
            owed="",
            g_per_kwh=g_per_kwh,
            terms=terms,
            planned_rps=demand_rps,
        )
