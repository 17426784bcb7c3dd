"""Which variants to run: Clover's trade of carbon against accuracy, planned again whenever something moved.

:class:`VariantPolicy` is pure. It sees the grid's intensity, the demand and the latency, and answers with the layout
to run and the reason. Between plans it learns one number: how much slower requests really are than predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError, InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.profile import Profile
from joulery.domain.serving.service import Slo, SloScope
from joulery.perf.layouts import LayoutMetrics, Predictor
from joulery.policies.serving.objective import Objective, rank
from joulery.policies.serving.search import ExhaustiveSearch, trials
from joulery.policies.serving.trial_sample import Sample

SET_LAYOUT = "set_layout"
KEEP_LAYOUT = "keep_layout"
_LONGEST_DELAY_RATIO = 8.0
_LEAST_RPS = 1e-3


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees of one service.

    Attributes:
        now_s: Unix seconds.
        g_per_kwh: Carbon intensity now; NaN while unknown.
        rate_rps: Requests a second since the last observation; NaN while unknown.
        latency_s: The SLO's quantile of the latencies since then; NaN where nothing was answered.
        requests: How many latencies that quantile rests on.
        served: Answers since then, by variant.
        power_w: Power of the machine; NaN while unknown.
        running: The layout that really runs; None while nothing does.
        sample: The requests since that took over; None where nobody asks for it, or none came.
        waits_for: The service whose trials must not be disturbed by trials of this one; empty when it may try.
    """

    now_s: float
    g_per_kwh: float
    rate_rps: float
    latency_s: float
    requests: int
    served: Mapping[str, int]
    power_w: float
    running: Layout | None
    sample: Sample | None = None
    waits_for: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; unknown numbers are null."""
        numbers = {name: getattr(self, name) for name in ("g_per_kwh", "rate_rps", "latency_s", "power_w")}
        return {
            "now_s": self.now_s,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "requests": self.requests,
            "served": dict(self.served),
            "running": None if self.running is None else self.running.names(),
            **({} if self.sample is None else {"sample": self.sample.as_dict()}),
            **({"waits_for": self.waits_for} if self.waits_for else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Observation:
        """The inverse of :meth:`as_dict`."""
        names = ("g_per_kwh", "rate_rps", "latency_s", "power_w")
        numbers = {name: math.nan if data[name] is None else float(data[name]) for name in names}
        return cls(
            now_s=float(data["now_s"]),
            requests=int(data["requests"]),
            served={str(name): int(count) for name, count in data["served"].items()},
            running=None if data["running"] is None else Layout.parse(data["running"]),
            sample=None if data.get("sample") is None else Sample.from_dict(data["sample"]),
            waits_for=str(data.get("waits_for", "")),
            **numbers,
        )


@dataclass(frozen=True, slots=True)
class VariantState:
    """What the policy remembers.

    Attributes:
        layout: The layout last decided on; None before the first plan.
        planned_g_per_kwh: Intensity of the last plan; NaN when it was unknown.
        planned_rps: Demand of the last plan.
        planned_s: When that was.
        predicted_s: Latency the model predicts for ``layout``, before correction.
        delay_ratio: Observed over predicted latency, smoothed; 1 or more.
        rate_rps: Demand, smoothed; NaN before the first.
        seen_s: Time of the last observation.
        planned_terms: What was asked for at the last plan: lambda, latency, quantile, accuracy; empty before the first.
    """

    layout: Layout | None = None
    planned_g_per_kwh: float = math.nan
    planned_rps: float = math.nan
    planned_s: float = -math.inf
    predicted_s: float = math.nan
    delay_ratio: float = 1.0
    rate_rps: float = math.nan
    seen_s: float = -math.inf
    planned_terms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _At:
    """Judges layouts at one demand."""

    predictor: Predictor
    rate_rps: float

    def evaluate(self, candidate: Layout, /) -> LayoutMetrics:
        return self.predictor.predict(candidate, self.rate_rps)


@dataclass(frozen=True, slots=True)
class VariantPolicy:
    """Chooses among layouts of one service by Clover's objective, within its SLO and accuracy floor.

    Attributes:
        service: Whose layouts.
        candidates: The layouts to choose from; in at least one every variant reaches ``minimum_accuracy_ratio``.
        predictor: Judges a layout under a demand.
        objective: Carbon against accuracy.
        slo: Latency to keep.
        rate_rps: Demand to plan for until one has been observed.
        minimum_accuracy_ratio: Layouts below it are never chosen.
        replan_ratio: Plan again when the intensity moved by this share of the objective's base.
        rate_step_ratio: Plan again when the demand left the planned one by this share.
        settle_s: After a change, latencies of the first so many seconds do not count; also the time constant over
            which demand and delay are smoothed.
        fewest: A latency quantile over fewer requests says nothing.
        gain: A new layout must beat the running one's score by this much to be worth changing to.
    """

    service: str
    candidates: tuple[Layout, ...]
    predictor: Predictor
    objective: Objective
    slo: Slo
    rate_rps: float
    minimum_accuracy_ratio: float = 0.0
    replan_ratio: float = 0.05
    rate_step_ratio: float = 0.3
    settle_s: float = 5.0
    fewest: int = 20
    gain: float = 0.0

    name = "variants"

    def __post_init__(self) -> None:
        accuracy = self.predictor.accuracy_ratio
        best = max(min(accuracy[variant] for variant in layout.counts) for layout in self.candidates)
        if best < self.minimum_accuracy_ratio:
            raise InfeasibleError(
                f"{self.service}: no layout is as accurate as {self.minimum_accuracy_ratio:.2%}",
                binding="minimum_accuracy",
                nearest=best,
                hint=f"ask for at most {best:.2%}",
            )

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: all that it takes to decide the same again."""
        predictor, objective, slo = self.predictor, self.objective, self.slo
        numbers = (
            "rate_rps",
            "minimum_accuracy_ratio",
            "replan_ratio",
            "rate_step_ratio",
            "settle_s",
            "fewest",
            "gain",
        )
        return {
            "service": self.service,
            "candidates": [layout.names() for layout in self.candidates],
            "predictor": {
                "profile": predictor.profile.as_dict(),
                "accuracy_ratio": dict(predictor.accuracy_ratio),
                **{name: getattr(predictor, name) for name in ("quantile", "overhead_s", "requests", "seed")},
            },
            "objective": asdict(objective),
            "slo": {"latency_s": slo.latency_s, "quantile": slo.quantile, "scope": slo.scope.value},
            **{name: getattr(self, name) for name in numbers},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VariantPolicy:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: It is not what ``as_dict`` writes.
        """
        try:
            fields = dict(data)
            predictor, slo = dict(fields["predictor"]), dict(fields["slo"])
            fields["candidates"] = tuple(Layout.parse(items) for items in fields["candidates"])
            fields["predictor"] = Predictor(**{**predictor, "profile": Profile.from_dict(predictor["profile"])})
            fields["objective"] = Objective(**fields["objective"])
            fields["slo"] = Slo(**{**slo, "scope": SloScope(slo["scope"])})
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a policy of variants: {error!r}") from error

    def initial(self) -> VariantState:
        """Nothing planned yet."""
        return VariantState()

    def step(self, state: VariantState, observation: Observation, /) -> Step[VariantState]:
        """Learn from the observation; plan again if something moved."""
        state = self._learn(state, observation)
        cause = self._cause(state, observation)
        return Step(state) if cause is None else self._plan(state, observation, *cause)

    def _learn(self, state: VariantState, seen: Observation) -> VariantState:
        elapsed_s = seen.now_s - state.seen_s
        weight = 1.0 if math.isinf(elapsed_s) else -math.expm1(-max(elapsed_s, 0.0) / self.settle_s)
        rate_rps, delay_ratio = state.rate_rps, state.delay_ratio
        if 0 < seen.rate_rps < math.inf:
            rate_rps = seen.rate_rps if math.isnan(rate_rps) else rate_rps + weight * (seen.rate_rps - rate_rps)
        if self._latency_counts(state, seen) and math.isfinite(state.predicted_s):
            ratio = min(max(seen.latency_s / state.predicted_s, 1.0), _LONGEST_DELAY_RATIO)
            delay_ratio += weight * (ratio - delay_ratio)
        return replace(state, rate_rps=rate_rps, delay_ratio=delay_ratio, seen_s=seen.now_s)

    def _latency_counts(self, state: VariantState, seen: Observation) -> bool:
        settled = seen.now_s - state.planned_s >= self.settle_s and seen.running == state.layout
        return settled and seen.requests >= self.fewest and math.isfinite(seen.latency_s)

    @property
    def _terms(self) -> tuple[float, ...]:
        slo = self.slo
        return self.objective.lambda_ratio, slo.latency_s, slo.quantile, self.minimum_accuracy_ratio

    def _demand(self, state: VariantState) -> float:
        return max(_LEAST_RPS, self.rate_rps if math.isnan(state.rate_rps) else state.rate_rps)

    def _cause(self, state: VariantState, seen: Observation) -> tuple[str, str] | None:
        """Why to plan now, as a word and in words; None when nothing calls for it."""
        if state.layout is None:
            return "start", "start"
        if state.planned_terms != self._terms:
            return "terms", "what is asked for changed"
        now_g, then_g = seen.g_per_kwh, state.planned_g_per_kwh
        if math.isfinite(now_g):
            if math.isnan(then_g):
                return "intensity", f"intensity known again, {now_g:.0f} g/kWh"
            if self.objective.calls_for_a_plan(now_g, then_g, self.replan_ratio):
                return "intensity", f"grid {'up' if now_g > then_g else 'down'} from {then_g:.0f} to {now_g:.0f} g/kWh"
        settled = seen.now_s - state.planned_s >= self.settle_s
        if seen.running != state.layout and settled:
            return "unfinished", "what was decided does not run"
        if self._latency_counts(state, seen) and seen.latency_s > self.slo.latency_s:
            return "latency", f"p{100 * self.slo.quantile:g} {1e3 * seen.latency_s:.0f} ms above the SLO"
        ratio = self._demand(state) / state.planned_rps
        if settled and max(ratio, 1 / ratio) > 1 + self.rate_step_ratio:
            direction = "up" if ratio > 1 else "down"
            return "demand", f"demand {direction} from {state.planned_rps:.0f} to {self._demand(state):.0f} /s"
        return None

    def _plan(self, state: VariantState, seen: Observation, cause: str, words: str) -> Step[VariantState]:
        demand_rps = self._demand(state)
        found = trials(ExhaustiveSearch[Layout, LayoutMetrics](self.candidates), _At(self.predictor, demand_rps))
        choices = [trial for trial in found if trial[1].accuracy_ratio >= self.minimum_accuracy_ratio - 1e-12]
        # Without an intensity no carbon can be weighed: accuracy alone decides (Eq. 3 at zero intensity).
        g_per_kwh = seen.g_per_kwh if math.isfinite(seen.g_per_kwh) else 0.0
        best, metrics = max(choices, key=lambda trial: self._key(trial[1], g_per_kwh, state.delay_ratio))
        running = next((trial for trial in choices if trial[0] == seen.running), None)
        if running is not None and self._not_worth_it(running[1], metrics, g_per_kwh, state.delay_ratio):
            best, metrics = running
        decision = Decision(
            kind=KEEP_LAYOUT if best == seen.running else SET_LAYOUT,
            target=self.service,
            value=best.names(),
            policy=self.name,
            reason=self._reason(words, best, metrics, seen, state.delay_ratio, len(found)),
            cause=cause,
        )
        planned = replace(
            state,
            layout=best,
            planned_g_per_kwh=seen.g_per_kwh,
            planned_rps=demand_rps,
            planned_s=seen.now_s,
            predicted_s=metrics.latency_s,
            planned_terms=self._terms,
        )
        return Step(planned, (decision,))

    def _score(self, metrics: LayoutMetrics, g_per_kwh: float) -> float:
        return self.objective.score(metrics.accuracy_ratio, metrics.energy_j, g_per_kwh)

    def _key(self, metrics: LayoutMetrics, g_per_kwh: float, delay_ratio: float) -> tuple[bool, float, float]:
        score, latency_s = self._score(metrics, g_per_kwh), metrics.latency_s * delay_ratio
        # Rounded, so that equal scores are equal: of those the layout with fewer joules wins, or with more room where
        # none keeps the SLO.
        keeps, worth = rank(round(score, 9), latency_s, self.slo.latency_s)
        return keeps, worth, -metrics.energy_j if keeps else -metrics.utilisation_ratio

    def _not_worth_it(self, now: LayoutMetrics, best: LayoutMetrics, g_per_kwh: float, delay_ratio: float) -> bool:
        keeps = now.latency_s * delay_ratio <= self.slo.latency_s
        return keeps and self._score(best, g_per_kwh) - self._score(now, g_per_kwh) <= self.gain

    def _reason(
        self, words: str, layout: Layout, metrics: LayoutMetrics, seen: Observation, delay_ratio: float, tried: int
    ) -> str:
        latency_s = metrics.latency_s * delay_ratio
        limit = f"p{100 * self.slo.quantile:g} {_ms(latency_s)} of {_ms(self.slo.latency_s)}"
        if latency_s > self.slo.latency_s:
            return f"{words}: none of {tried} layouts keeps the SLO; {short(layout)} comes nearest, {limit}"
        accuracy = f"accuracy {100 * self.objective.accuracy_change(metrics.accuracy_ratio):+.1f} %"
        if not math.isfinite(seen.g_per_kwh):
            return f"{words}: intensity unknown, so accuracy alone decides: {short(layout)}, {accuracy}, {limit}"
        carbon = f"carbon {-100 * self.objective.carbon_change(metrics.energy_j, seen.g_per_kwh):+.0f} %"
        return f"{words}: {short(layout)} scores best of {tried}: {carbon}, {accuracy} against the yardstick, {limit}"


def short(layout: Layout) -> str:
    """A layout in as few characters as a person needs: ``lite2+lite0``, ``lite1 (2 cores)``."""
    slices = {item.slice for item in layout.instances}
    names = "+".join(item.variant for item in layout.instances)
    (one,) = slices if len(slices) == 1 else (None,)
    if one is None:
        return "+".join(f"{item.variant}@{item.slice.cores or item.slice}" for item in layout.instances)
    return f"{names} ({one.cores} cores)" if one.cores > 1 else names


def baseline(
    candidates: Sequence[Layout], variant: str, predictor: Predictor, slo: Slo, rate_rps: float
) -> tuple[Layout, LayoutMetrics]:
    """The layout to compare with: one variant on every slice (Clover's BASE).

    Of the partitions that keep the SLO the one with the fewest joules is taken, so that no saving comes from a badly
    cut yardstick; if none keeps it, the fastest.

    Raises:
        InfeasibleError: No candidate runs that variant alone.
    """
    pure = [(layout, predictor.predict(layout, rate_rps)) for layout in candidates if set(layout.counts) == {variant}]
    if not pure:
        raise InfeasibleError(f"no layout runs {variant} alone", binding="candidates")
    return max(
        pure,
        key=lambda trial: (
            *rank(-trial[1].energy_j, trial[1].latency_s, slo.latency_s),
            -trial[1].utilisation_ratio,
        ),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if math.isfinite(seconds) else "unbounded"
