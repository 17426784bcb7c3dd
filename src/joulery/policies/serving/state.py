"""State of a service policy between two steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.mix import OWN, VariantMix, Weights
from joulery.policies.serving.caution import CALM, Caution
from joulery.policies.serving.objective import ServiceObjectives
from joulery.policies.serving.search.trials import MeasuredLayout
from joulery.policies.serving.slo_first import NO_THREAT, Threat

Family = tuple[tuple[str, bool], ...]
"""``((variant, assumed), …)``, sorted: whether the times of a variant are assumed to be those of another."""
_MOST_FAILURES = 2
"""Number of searches in which a layout may fail to start before it is not tried again."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of a PCG64 generator as plain numbers, so that a policy's state holds no generator."""

    state: int
    increment: int
    has_uint32: int = 0
    uinteger: int = 0

    @classmethod
    def seeded(cls, *entropy: int) -> RandomState:
        """The state that ``numpy.random.default_rng`` begins with."""
        return cls.of(np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy))))

    @classmethod
    def of(cls, rng: np.random.Generator) -> RandomState:
        """The present state of a generator."""
        now = rng.bit_generator.state
        inner = now["state"]
        return cls(inner["state"], inner["inc"], now["has_uint32"], now["uinteger"])

    def generator(self) -> np.random.Generator:
        """A generator that continues from this state."""
        bits = np.random.PCG64(0)
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": self.state, "inc": self.increment},
            "has_uint32": self.has_uint32,
            "uinteger": self.uinteger,
        }
        return np.random.Generator(bits)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """State of a service policy.

    Attributes:
        layout: The layout last decided on; None before the first decision.
        whole: The whole layout, where ``layout`` is only its awake part; None where all of it is awake.
        parking: Caution about parking instances of ``layout``.
        leaving: Caution about leaving the leanest layout after a threat.
        roomy_s: Time since which fewer instances suffice; infinite while they do not.
        trying: ``layout`` while it is on trial; None otherwise. A clock governor stays pinned meanwhile.
        decided_s: Time of the decision for ``layout``.
        changed_s: Time of the last decision for a layout that did not run.
        threat: Threat to the SLO in the last observation.
        protecting: Whether the SLO is protected: leaner variants or the leanest layout serve until there is room.
        threat_s: Time of the last threat to the SLO.
        doubted_s: Time of the last sign that a variant whose times are assumed is slow.
        weights: Shares of requests that loaded variants answer while the SLO is protected; empty for the layout's own.
        mix: The mix last decided on, and the inputs that it was computed from.
        admission_ratio: Part of the profiled queue that may wait; below 1 while answers are late in spite of it.
        slowdown_ratio: Service times lately over those of the profile; 1 or more.
        feasible: False when the last search found nothing that keeps the objectives.
        rate_rps: Demand, smoothed; NaN before the first observation of it.
        seen_s: Time of the last observation.
        known_s: Time of the last observation with a known intensity.
        family: The variants that the last step chose from; empty where they never change.
        changes: Changes of the family since the last search, as text; empty for none.
        searches: Searches begun.
        begun_s, cause, cause_text: Time of the last search's start, its cause, and the reason as text.
        g_per_kwh: Intensity at which that search weighs carbon; NaN when it was unknown.
        planned_rps: Demand that the search plans for.
        objectives: Objectives of the search; None before the first search.
        predicted_s: Latency that the model predicts for ``layout``, before correction; NaN where nothing predicts.
        delay_ratio: Observed over predicted latency, smoothed; 1 or more.
        baseline: The first trial, of the most accurate variant everywhere: what the objective compares with.
        known: Every trial so far under the present demand, the newest of each layout.
        known_before: Trials among them that were known when the search began.
        asked: Layouts that the search has asked for since, in order.
        spent: Trials that the search has spent, the baseline's included.
        failures: Layouts that failed to start, once for each search in which they were tried.
        skipped: Layouts that this search does not try again.
        excluded: Layouts that the search never asks for.
        start: The layout that ran when the search began; None where it was on trial or did not keep the objectives.
        deferred: Why a search waits for another service's trials to end; empty where none waits.
        random: Random state at the start of the search; None before the first draw.
        random_after: Random state after its last draw.
    """

    layout: Layout | None = None
    whole: Layout | None = None
    parking: Caution = CALM
    leaving: Caution = CALM
    roomy_s: float = math.inf
    trying: Layout | None = None
    decided_s: float = -math.inf
    changed_s: float = -math.inf
    threat: Threat = NO_THREAT
    protecting: bool = False
    threat_s: float = -math.inf
    doubted_s: float = -math.inf
    weights: Weights = ()
    mix: tuple[VariantMix, object] = (OWN, None)
    admission_ratio: float = 1.0
    slowdown_ratio: float = 1.0
    feasible: bool = True
    rate_rps: float = math.nan
    seen_s: float = -math.inf
    known_s: float = -math.inf
    family: Family = ()
    changes: str = ""
    searches: int = 0
    begun_s: float = -math.inf
    cause: str = ""
    cause_text: str = ""
    g_per_kwh: float = math.nan
    planned_rps: float = math.nan
    objectives: ServiceObjectives | None = None
    predicted_s: float = math.nan
    delay_ratio: float = 1.0
    baseline: MeasuredLayout | None = None
    known: tuple[MeasuredLayout, ...] = ()
    known_before: int = 0
    asked: tuple[Layout, ...] = ()
    spent: int = 0
    failures: tuple[Layout, ...] = ()
    skipped: frozenset[Layout] = frozenset()
    excluded: frozenset[Layout] = frozenset()
    start: Layout | None = None
    deferred: str = ""
    random: RandomState | None = None
    random_after: RandomState | None = None

    def struck(self, now_s: float) -> ServiceState:
        """The state when the SLO begins to be threatened."""
        return replace(self, parking=self.parking.struck(now_s), leaving=self.leaving.struck(now_s))

    def learned(self, measured: MeasuredLayout) -> ServiceState:
        """The state with the outcome of a trial, which replaces an older one of the same layout."""
        instances = measured.layout.instances
        others = [item for item in self.known if item.layout.instances != instances]
        baseline = measured if self.baseline is None else self.baseline
        return replace(self, known=(*others, measured), baseline=baseline)

    def without(self, layout: Layout, *, failed: bool = False) -> ServiceState:
        """The state in which this search does not try a layout again; no trial runs any more."""
        failures = (*self.failures, layout) if failed else self.failures
        return replace(self, trying=None, skipped=self.skipped | {layout}, failures=failures)

    def begun(
        self,
        now_s: float,
        cause: str,
        cause_text: str,
        g_per_kwh: float,
        demand_rps: float,
        objectives: ServiceObjectives,
        retry_s: float,
    ) -> ServiceState:
        """The state at the start of a new search; trials under another demand are dropped.

        While nothing known keeps the SLO, only what violated it within the last ``retry_s`` seconds counts as known:
        a burst of a neighbour's work may have caused an older violation.
        """
        known, limit_s = self.known if cause != "demand" else (), objectives.slo.latency_s
        if not any(item.within(limit_s) for item in known):
            known = tuple(item for item in known if item.above(limit_s) and now_s - item.at_s < retry_s)
        failed = {item for item in self.failures if self.failures.count(item) >= _MOST_FAILURES}
        baseline = set() if self.baseline is None else {self.baseline.layout}
        return replace(
            self,
            trying=None,
            known=known,
            known_before=len(known),
            asked=(),
            spent=0,
            skipped=frozenset(),
            excluded=frozenset(failed - baseline),
            start=(self.whole or self.layout) if self.feasible and self.trying is None else None,
            searches=self.searches + 1,
            begun_s=now_s,
            cause=cause,
            cause_text=cause_text,
            changes="",
            deferred="",
            g_per_kwh=g_per_kwh,
            objectives=objectives,
            planned_rps=demand_rps,
            random=self.random_after,
        )
