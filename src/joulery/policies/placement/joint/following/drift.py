"""Triggers for replanning a running joint plan: rates, batch times or the value of a watt differ from the plan.

Rates are averaged over ``memory_s``. More load than planned for is urgent and waits for ``patience_s``; less load, and
another carbon intensity, cost only money, so they wait for longer. A plan that was requested and did not take effect
(there was none, it took too many moves, or it was not worth the change) is requested again after ever longer times,
sooner only if a rate has risen further. A batch that takes longer than predicted corrects the predictor: the service's
latencies are assumed to be longer by as much, from the next plan on. A batch that takes less time corrects nothing,
because few batches are full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from joulery.domain.decisions import Decision, Step
from joulery.domain.json_numbers import known_number, or_nan

CORRECT_PREDICTOR, REPLAN, KEEP_PLAN = "correct_predictor", "replan", "keep_plan"
_ROUNDING_S = 1e-6
_LONGEST_S = 3600.0
"""The longest time between two requests for the same plan."""


class ServiceReading(NamedTuple):
    """Recent readings of one service.

    Attributes:
        rate_rps: Requests a second.
        batch_s: The median time of its batches; NaN for none.
        batches: Number of requests that the median rests on.
    """

    rate_rps: float
    batch_s: float
    batches: int


class DriftObservation(NamedTuple):
    """Every service's reading, and the carbon intensity; NaN while unknown."""

    now_s: float
    readings: Mapping[str, ServiceReading]
    g_per_kwh: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        """The observation as a JSON-ready dictionary."""
        known = {
            name: [known_number(each.rate_rps), known_number(each.batch_s), each.batches]
            for name, each in self.readings.items()
        }
        return {"now_s": self.now_s, "readings": known, "g_per_kwh": known_number(self.g_per_kwh)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DriftObservation:
        """The observation from the output of :meth:`as_dict`."""
        readings = {
            str(name): ServiceReading(or_nan(rate), or_nan(batch_s), int(batches))
            for name, (rate, batch_s, batches) in data["readings"].items()
        }
        return cls(float(data["now_s"]), readings, or_nan(data["g_per_kwh"]))


@dataclass(frozen=True, slots=True)
class WattPrice:
    """Value of a watt to a plan, against dollars and GPUs; it may move with the carbon intensity.

    Attributes:
        per_w: Value of a watt that the plan was made with.
        per_w_per_g: How much more it is for each further g/kWh; 0 where the intensity cannot change the plan.
        g_per_kwh: The intensity that the plan was made for; NaN for none.
        why_fixed: Why the intensity cannot change the plan; empty where it can.
    """

    per_w: float = 1.0
    per_w_per_g: float = 0.0
    g_per_kwh: float = math.nan
    why_fixed: str = ""

    def ratio(self, g_per_kwh: float) -> float:
        """Value of a watt at another intensity, against the plan's; NaN where either is unknown."""
        if self.per_w <= 0:
            return 1.0
        return 1.0 + self.per_w_per_g * (g_per_kwh - self.g_per_kwh) / self.per_w


@dataclass(frozen=True, slots=True)
class DriftState:
    """State of the policy.

    Attributes:
        seen_s: Time of the last observation; NaN before the first.
        rates_rps: Rates, averaged.
        out_since_s: Since when each of ``load`` (more than planned for), ``less`` and ``intensity`` is outside its
            band; without those that are not.
        corrections: By how much predictions are corrected so far, by service.
        asked: Number of requests to replan since this plan came into force.
        asked_s: Time of the last request.
        asked_rps: The rates at that time.
        explained: Whether a decision already reported that the intensity cannot change the plan.
    """

    seen_s: float = math.nan
    rates_rps: Mapping[str, float] = field(default_factory=dict)
    out_since_s: Mapping[str, float] = field(default_factory=dict)
    corrections: Mapping[str, float] = field(default_factory=dict)
    asked: int = 0
    asked_s: float = -math.inf
    asked_rps: Mapping[str, float] = field(default_factory=dict)
    explained: bool = False


@dataclass(frozen=True, slots=True)
class PlanDrift:
    """Policy that decides when to plan again.

    Attributes:
        planned_rps: Rate of each service that the plan is for.
        predicted_s: Predicted time of a full batch of each service, the longest of its instances.
        corrections: Corrections that the plan already has, by service.
        watt: Value of a watt to the plan.
        rates_rps, seen_s: Averages of the rates when it came into force, and when that was; NaN for nothing seen.
        band_ratio: How far a rate, and the value of a watt, may be from the planned one.
        patience_s: How long a higher rate must stay outside; for less load and other intensities ``less_patience_s``.
        memory_s: Time over which rates are averaged.
        least_correction_ratio: Prediction errors smaller than this are within the margin.
        min_batches: Medians over fewer are ignored.
    """

    planned_rps: Mapping[str, float]
    predicted_s: Mapping[str, float]
    corrections: Mapping[str, float] = field(default_factory=dict)
    watt: WattPrice = WattPrice()
    rates_rps: Mapping[str, float] = field(default_factory=dict)
    seen_s: float = math.nan
    band_ratio: float = 0.1
    patience_s: float = 60.0
    less_patience_s: float = 300.0
    memory_s: float = 60.0
    least_correction_ratio: float = 0.05
    min_batches: int = 30
    name: ClassVar[str] = "joint"
    service: ClassVar[str] = "joint"

    def as_dict(self) -> dict[str, Any]:
        """The policy as a JSON-ready dictionary, with all that it takes to repeat its decisions."""
        watt = self.watt
        return {
            **{name: dict(getattr(self, name)) for name in _MAPPINGS},
            **{name: getattr(self, name) for name in _NUMBERS},
            "watt": [watt.per_w, watt.per_w_per_g, known_number(watt.g_per_kwh), watt.why_fixed],
            "seen_s": known_number(self.seen_s),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlanDrift:
        """The policy from the output of :meth:`as_dict`."""
        per_w, per_w_per_g, g_per_kwh, why = data["watt"]
        fields: dict[str, Any] = {name: data[name] for name in _NUMBERS}
        fields |= {name: {str(key): float(value) for key, value in data[name].items()} for name in _MAPPINGS}
        watt = WattPrice(float(per_w), float(per_w_per_g), or_nan(g_per_kwh), str(why))
        return cls(**fields, watt=watt, seen_s=or_nan(data["seen_s"]))

    def initial(self) -> DriftState:
        """State carried over from the plan before."""
        return DriftState(seen_s=self.seen_s, rates_rps=dict(self.rates_rps), corrections=dict(self.corrections))

    def step(self, state: DriftState, observation: DriftObservation, /) -> Step[DriftState]:
        """Average the rates, correct the predictor and request another plan if one is due."""
        now_s = observation.now_s
        state, decisions = self._corrected(self._averaged(state, observation), observation)
        if decisions:
            reason = "the predictor was corrected"
            decisions.append(Decision(REPLAN, "plan", dict(self.planned_rps), self.name, reason, cause="latency"))
        out = self._outside(state, observation)
        state = replace(state, out_since_s={what: state.out_since_s.get(what, now_s) for what in out})
        if not decisions and (what := self._due(state, out, now_s)):
            rates = {**self.planned_rps, **{n: r for n, r in state.rates_rps.items() if n in self.planned_rps}}
            cause = "intensity" if what == "intensity" else "load"
            decisions.append(Decision(REPLAN, "plan", rates, self.name, out[what], cause=cause))
            state = replace(state, asked=state.asked + 1, asked_s=now_s, asked_rps=rates, out_since_s={})
        return Step(*self._explained(state, observation, decisions))

    def rises(self, rates_rps: Mapping[str, float]) -> bool:
        """Whether some rate is above what the plan is for: a new plan is then more than a matter of cost."""
        return any(
            rate > self.planned_rps.get(name, math.inf) * (1 + self.band_ratio) for name, rate in rates_rps.items()
        )

    def _outside(self, state: DriftState, observation: DriftObservation) -> dict[str, str]:
        """Readings outside their band, with a sentence on each."""
        band, found = self.band_ratio, dict[str, str]()
        ratios = {
            name: rate / self.planned_rps[name] for name, rate in state.rates_rps.items() if name in self.planned_rps
        }
        for what, outside in (
            ("load", [name for name, ratio in ratios.items() if ratio > 1 + band]),
            ("less", [name for name, ratio in ratios.items() if ratio < 1 - band]),
        ):
            if outside:
                changes = ", ".join(
                    f"{name} {state.rates_rps[name]:.4g} /s of {self.planned_rps[name]:.4g} /s" for name in outside
                )
                found[what] = f"rates left ±{100 * band:g} % of the plan's: {changes}"
        ratio = self.watt.ratio(observation.g_per_kwh)
        if abs(ratio - 1) > band:
            found["intensity"] = (
                f"a watt is worth {100 * ratio:.0f} % of the plan's: {observation.g_per_kwh:.4g} g/kWh, "
                f"planned for {self.watt.g_per_kwh:.4g}"
            )
        return found

    def _due(self, state: DriftState, out: Mapping[str, str], now_s: float) -> str:
        """The cause to plan again for: the most urgent that has waited long enough; empty for nothing."""
        risen = any(
            rate > state.asked_rps.get(name, math.inf) * (1 + self.band_ratio) for name, rate in state.rates_rps.items()
        )
        for what in ("load", "less", "intensity"):
            if what not in out:
                continue
            wait_s = self.patience_s if what == "load" else self.less_patience_s
            later_s = min(_LONGEST_S, wait_s * 2.0**state.asked) if state.asked else 0.0
            again = now_s - state.asked_s >= later_s - _ROUNDING_S or (what == "load" and risen)
            if again and now_s - state.out_since_s[what] >= wait_s - _ROUNDING_S:
                return what
        return ""

    def _explained(
        self, state: DriftState, observation: DriftObservation, decisions: list[Decision]
    ) -> tuple[DriftState, tuple[Decision, ...]]:
        """Add a decision, once, that reports an intensity change which cannot change the plan."""
        moved = (
            abs(observation.g_per_kwh / self.watt.g_per_kwh - 1) > self.band_ratio if self.watt.g_per_kwh > 0 else False
        )
        if moved and self.watt.why_fixed and not state.explained:
            reason = (
                f"{observation.g_per_kwh:.4g} g/kWh, planned for {self.watt.g_per_kwh:.4g}, changes no plan: "
                f"{self.watt.why_fixed}"
            )
            decisions.append(Decision(KEEP_PLAN, "plan", None, self.name, reason, cause="intensity"))
            state = replace(state, explained=True)
        return state, tuple(decisions)

    def _averaged(self, state: DriftState, observation: DriftObservation) -> DriftState:
        passed_s = 0.0 if math.isnan(state.seen_s) else max(0.0, observation.now_s - state.seen_s)
        weight = 1.0 - math.exp(-passed_s / self.memory_s)
        rates = {}
        for name, reading in observation.readings.items():
            if math.isfinite(reading.rate_rps):
                was = state.rates_rps.get(name, self.planned_rps.get(name, reading.rate_rps))
                rates[name] = was + weight * (reading.rate_rps - was)
            elif name in state.rates_rps:
                rates[name] = state.rates_rps[name]
        return replace(state, seen_s=observation.now_s, rates_rps=rates)

    def _corrected(self, state: DriftState, observation: DriftObservation) -> tuple[DriftState, list[Decision]]:
        decisions, corrections = list[Decision](), dict(state.corrections)
        for name, reading in observation.readings.items():
            predicted_s = self.predicted_s.get(name, math.nan)
            if reading.batches < self.min_batches or not reading.batch_s > 0 or not predicted_s > 0:
                continue
            # What is predicted does not hold the correction: the plan keeps it as a margin.
            longer = reading.batch_s / predicted_s - 1
            if longer < self.least_correction_ratio or longer <= corrections.get(name, 0.0) + 0.02:
                continue
            corrections[name] = longer
            reason = (
                f"batches of {name} took {1e3 * reading.batch_s:.4g} ms (median of {reading.batches}), predicted "
                f"{1e3 * predicted_s:.4g} ms: its latencies are taken to be {100 * longer:.0f} % longer"
            )
            decisions.append(Decision(CORRECT_PREDICTOR, name, longer, self.name, reason, cause="latency"))
        return replace(state, corrections=corrections), decisions


_MAPPINGS = ("planned_rps", "predicted_s", "corrections", "rates_rps")
_NUMBERS = ("band_ratio", "patience_s", "less_patience_s", "memory_s", "least_correction_ratio", "min_batches")
