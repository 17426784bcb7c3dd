"""When a running joint plan is to be made again: its services' rates, or their batches' times, are not as planned.

Rates are averaged over ``memory_s``. A batch that takes longer than predicted corrects the predictor: the service's
latencies are taken to be longer by as much, from the next plan on. A batch that takes less proves nothing, for few
batches are full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from joulery.domain.decisions import Decision, Step

CORRECT_PREDICTOR, REPLAN = "correct_predictor", "replan"


class ServiceReading(NamedTuple):
    """What one service saw lately.

    Attributes:
        rate_rps: Requests a second.
        batch_s: The median time of its batches; NaN for none.
        batches: How many requests that rests on.
    """

    rate_rps: float
    batch_s: float
    batches: int


class DriftObservation(NamedTuple):
    """Every service's reading."""

    now_s: float
    readings: Mapping[str, ServiceReading]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        known = {
            name: [each.rate_rps, None if math.isnan(each.batch_s) else each.batch_s, each.batches]
            for name, each in self.readings.items()
        }
        return {"now_s": self.now_s, "readings": known}


@dataclass(frozen=True, slots=True)
class DriftState:
    """What the policy remembers.

    Attributes:
        seen_s: When it last looked; NaN before.
        rates_rps: Rates, averaged.
        out_since_s: Since when some rate is outside its band; None while none is.
        corrections: By how much predictions are corrected so far, by service.
    """

    seen_s: float = math.nan
    rates_rps: Mapping[str, float] = field(default_factory=dict)
    out_since_s: float | None = None
    corrections: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanDrift:
    """Says when to plan again.

    Attributes:
        planned_rps: Rate of each service that the plan is for.
        predicted_s: Predicted time of a full batch of each service, the longest of its instances.
        corrections: Corrections that the plan already has, by service.
        band_ratio: How far a rate may be from the planned one.
        patience_s: How long it must stay outside.
        memory_s: Over which rates are averaged.
        least_correction_ratio: Prediction errors smaller than this are within the margin.
        min_batches: A median over fewer says nothing.
    """

    planned_rps: Mapping[str, float]
    predicted_s: Mapping[str, float]
    corrections: Mapping[str, float] = field(default_factory=dict)
    band_ratio: float = 0.1
    patience_s: float = 60.0
    memory_s: float = 60.0
    least_correction_ratio: float = 0.05
    min_batches: int = 30
    name: ClassVar[str] = "joint"
    service: ClassVar[str] = "joint"

    def initial(self) -> DriftState:
        """Nothing seen."""
        return DriftState(corrections=dict(self.corrections))

    def step(self, state: DriftState, observation: DriftObservation, /) -> Step[DriftState]:
        """Average the rates; correct the predictor; ask for another plan."""
        now_s = observation.now_s
        state, decisions = self._corrected(self._averaged(state, observation), observation)
        out = {
            name: rate
            for name, rate in state.rates_rps.items()
            if name in self.planned_rps and abs(rate / self.planned_rps[name] - 1) > self.band_ratio
        }
        if not out:
            state = replace(state, out_since_s=None)
        elif state.out_since_s is None:
            state = replace(state, out_since_s=now_s)
        elif now_s - state.out_since_s >= self.patience_s - 1e-6:
            said = ", ".join(f"{name} {rate:.4g} /s of {self.planned_rps[name]:.4g} /s" for name, rate in out.items())
            rates = {**self.planned_rps, **{n: r for n, r in state.rates_rps.items() if n in self.planned_rps}}
            reason = f"rates left ±{100 * self.band_ratio:g} % of the plan's: {said}"
            decisions.append(Decision(REPLAN, "plan", rates, self.name, reason, cause="load"))
            state = replace(state, out_since_s=None)
        if decisions and decisions[-1].kind == CORRECT_PREDICTOR:
            reason = "the predictor was corrected"
            decisions.append(Decision(REPLAN, "plan", dict(self.planned_rps), self.name, reason, cause="latency"))
        return Step(state, tuple(decisions))

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
