"""A search by prediction: every layout is judged by the measured profile, and none is tried on the service."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.service import Slo
from joulery.perf.layouts import LayoutMetrics, Predictor
from joulery.policies.serving.objective import Objective, ServiceObjectives, rank


@dataclass(frozen=True, slots=True)
class PredictedChoice:
    """The layout that a prediction chooses.

    Attributes:
        layout: The layout.
        metrics: Its prediction; the latency is not corrected.
        latency_s: Latency, corrected by what was observed.
        feasible: Whether this latency keeps the SLO.
        tried: Layouts that were judged.
    """

    layout: Layout
    metrics: LayoutMetrics
    latency_s: float
    feasible: bool
    tried: int


@dataclass(frozen=True, slots=True, eq=False)
class LeanestMemo:
    """Cache of the leanest layouts of one search: a policy needs them every second; they change with the objectives."""

    _found: dict[tuple[float, frozenset[str]], Layout] = field(default_factory=dict)

    def layout(
        self,
        candidates: tuple[Layout, ...],
        predictor: Predictor,
        minimum_accuracy_ratio: float,
        unknown: Collection[str] = (),
    ) -> Layout:
        """See :func:`leanest_layout`; the same candidates and predictor in every call.

        Args:
            candidates: The layouts of the search.
            predictor: The profile of the search.
            minimum_accuracy_ratio: Mean accuracy that the layout keeps when all replicas are busy.
            unknown: Variants of unknown times; their layouts are left out where there are others.
        """
        key = (minimum_accuracy_ratio, frozenset(unknown))
        if key not in self._found:
            known = known_layouts(candidates, unknown)
            self._found[key] = leanest_layout(known, predictor, minimum_accuracy_ratio)
        return self._found[key]


@dataclass(frozen=True, slots=True)
class PredictiveSearch:
    """Chooses the layout with the best predicted score within the SLO and the accuracy floor.

    Attributes:
        candidates: The layouts to choose from.
        predictor: Judges a layout under a demand.
        objective: Carbon against accuracy; its weight is that of the objectives in force.
        min_requests: A latency quantile over fewer requests is not used.
        gain: A new layout must beat the score of the one that runs by this much.
    """

    candidates: tuple[Layout, ...]
    predictor: Predictor
    objective: Objective
    min_requests: int = 20
    gain: float = 0.0
    _leanest: LeanestMemo = field(default_factory=LeanestMemo, init=False, repr=False, compare=False)

    name = "variants"

    @property
    def best_accuracy_ratio(self) -> float:
        """Accuracy of the most accurate layout."""
        accuracy = self.predictor.accuracy_ratio
        return max(min(accuracy[variant] for variant in layout.counts) for layout in self.candidates)

    def as_dict(self) -> dict[str, Any]:
        """The search as a JSON-ready dictionary."""
        return {
            "kind": self.name,
            "candidates": [layout.names() for layout in self.candidates],
            "predictor": self.predictor.as_dict(),
            "objective": asdict(self.objective),
            "min_requests": self.min_requests,
            "gain": self.gain,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PredictiveSearch:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is not what ``as_dict`` writes.
        """
        return cls(
            candidates=tuple(Layout.parse(items) for items in data["candidates"]),
            predictor=Predictor.from_dict(data["predictor"]),
            objective=Objective(**data["objective"]),
            min_requests=int(data["min_requests"]),
            gain=float(data["gain"]),
        )

    def choose(
        self,
        goals: ServiceObjectives,
        rate_rps: float,
        g_per_kwh: float,
        running: Layout | None,
        delay_ratio: float,
        observed_s: float = 0.0,
        slowdown_ratio: float = 1.0,
    ) -> PredictedChoice:
        """The best layout under a demand and an intensity.

        Args:
            goals: Weight of carbon, SLO and accuracy floor.
            rate_rps: Demand.
            g_per_kwh: Intensity; NaN while unknown, then accuracy alone decides (Eq. 3 at zero intensity).
            running: The layout that runs, kept where no other is better by ``gain``.
            delay_ratio: Observed over predicted latency.
            observed_s: Latency that was observed of the running layout; 0 for none.
            slowdown_ratio: Service times now over those of the profile.
        """
        known_g = g_per_kwh if math.isfinite(g_per_kwh) else 0.0
        judged = [
            (layout, self.predictor.predict_slower(layout, rate_rps, slowdown_ratio)) for layout in self.candidates
        ]
        accurate = [one for one in judged if one[1].accuracy_ratio >= goals.minimum_accuracy_ratio - 1e-12]

        def latency_s(one: tuple[Layout, LayoutMetrics]) -> float:
            corrected = one[1].latency_s * delay_ratio
            return max(corrected, observed_s) if one[0] == running else corrected

        best, metrics = max(accurate, key=lambda one: self._key(one[1], goals, known_g, latency_s(one)))
        now = next((one for one in accurate if one[0] == running), None)
        if now is not None and latency_s(now) <= goals.slo.latency_s:
            gained = self._score(metrics, goals, known_g) - self._score(now[1], goals, known_g)
            if gained <= self.gain:
                best, metrics = now
        expected_s = latency_s((best, metrics))
        return PredictedChoice(best, metrics, expected_s, expected_s <= goals.slo.latency_s, len(judged))

    def leanest(self, goals: ServiceObjectives, unknown: Collection[str] = ()) -> Layout:
        """The layout with the largest capacity among those as accurate as the objectives ask.

        Args:
            goals: The objectives.
            unknown: Variants of unknown times; their layouts are left out where there are others.
        """
        return self._leanest.layout(self.candidates, self.predictor, goals.minimum_accuracy_ratio, unknown)

    def _score(self, metrics: LayoutMetrics, goals: ServiceObjectives, g_per_kwh: float) -> float:
        return self.objective.score(metrics.accuracy_ratio, metrics.energy_j, g_per_kwh, goals.lambda_ratio)

    def _key(
        self, metrics: LayoutMetrics, goals: ServiceObjectives, g_per_kwh: float, latency_s: float
    ) -> tuple[bool, float, float]:
        # Rounded, so that equal scores are equal: of those the layout with fewer joules wins, or with more room where
        # none keeps the SLO.
        score = self._score(metrics, goals, g_per_kwh)
        within, worth = rank(round(score, 9), latency_s, goals.slo.latency_s)
        return within, worth, -metrics.energy_j if within else -metrics.utilisation_ratio


def known_layouts(candidates: tuple[Layout, ...], unknown: Collection[str]) -> tuple[Layout, ...]:
    """The layouts without some variants; all of them where there are no others."""
    if not unknown:
        return candidates
    return tuple(one for one in candidates if one.counts.keys().isdisjoint(unknown)) or candidates


def leanest_layout(candidates: Sequence[Layout], predictor: Predictor, minimum_accuracy_ratio: float) -> Layout:
    """The layout with the largest capacity among those that keep an accuracy when all replicas are busy.

    Where none keeps it, the most accurate layout.
    """
    busy = [(layout, predictor.when_busy(layout, 1.0)) for layout in candidates]
    accurate = [one for one in busy if one[1].accuracy_ratio >= minimum_accuracy_ratio - 1e-12]
    if not accurate:
        return max(busy, key=lambda one: one[1].accuracy_ratio)[0]
    return min(accurate, key=lambda one: (one[1].utilisation_ratio, -one[1].accuracy_ratio))[0]


def baseline_layout(
    candidates: Sequence[Layout], variant: str, predictor: Predictor, slo: Slo, rate_rps: float
) -> tuple[Layout, LayoutMetrics]:
    """The layout to compare with: one variant on every slice (Clover's BASE).

    Of the partitions that keep the SLO the one with the fewest joules is taken, so that a weak baseline cannot inflate
    the saving; if none keeps it, the fastest.

    Raises:
        InfeasibleError: No candidate runs that variant alone.
    """
    pure = [(layout, predictor.predict(layout, rate_rps)) for layout in candidates if set(layout.counts) == {variant}]
    if not pure:
        raise InfeasibleError(f"no layout runs {variant} alone", binding="candidates")
    return max(
        pure,
        key=lambda one: (*rank(-one[1].energy_j, one[1].latency_s, slo.latency_s), -one[1].utilisation_ratio),
    )
