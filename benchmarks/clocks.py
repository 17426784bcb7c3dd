"""The live clock governor against rules without a controller: emulated V100s, smooth arrivals and bursts; simulated.

Two worlds: fifteen models on eight GPUs that answer one request at a time (:mod:`joulery.sim.clocks.governor_study`),
and one language model under continuous batching, bound by memory or by arithmetic
(:mod:`benchmarks._batched_engine`). The governor is the object that ``joulery serve`` runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import Result
from benchmarks._batched_engine import Answers, BatchedPlant, run_batched_engine
from joulery.domain.arrays import FloatArray
from joulery.domain.ports import Policy
from joulery.domain.serving.service import Slo
from joulery.perf.lengths.step_time import StepCost
from joulery.perf.power.clock_curves import V100
from joulery.policies.clocks.governor import (
    BusyIdleClocks,
    DeviceView,
    FixedClock,
    GovernorState,
    PredictiveGovernor,
)
from joulery.policies.clocks.observation import ClockCurves
from joulery.sim.clocks.governor_study import ClockCase, run_schemes, workload
from joulery.sim.core.streams import Streams

SEEDS = (0, 1)
RULES = ("fixed", "static-1000", "race-to-idle", "power-cap", "busy-idle", "predictive", "predictive-assumed")
RULE = "busy-idle"
"""The rule to beat: 1000 MHz while there is work, 200 MHz while there is none."""
KEPT_RATIO = 0.99
ARRIVALS = {"smooth": 1.0, "bursts x 4": 4.0}
CASES = ((5.0, 0.5), (5.0, 1.0), (10.0, 0.5), (10.0, 1.0), (10.0, 1.5), (10.0, 3.0))
"""SLO over the latency at full clock, and requests a second, of the fifteen models."""
DURATION_S = 900.0
CLOCKS = np.array([200.0, 400.0, 600.0, 800.0, 1000.0, 1200.0, 1380.0])
ANSWERS, BATCH, SLO_S, RATES_RPS = 400, 32, (30.0, 60.0), (0.2, 0.4, 0.6)
COST = StepCost(0.025, 0.0005, 3e-7)
BOUND = {"memory (elasticity 0.3)": 0.3, "arithmetic (1.0)": 1.0}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Mean power of a GPU, W, and the share of requests within their SLO."""

    power_w: float
    kept_ratio: float


Trace = Mapping[str, Outcome]


def run() -> Result:
    """Simulate every rule on every trace."""
    rows: list[list[str]] = []
    checks: list[tuple[str, bool | None]] = []
    figures: dict[str, object] = {}
    for world, traces in (("one at a time", _models), *((f"batch, {name}", _batched(e)) for name, e in BOUND.items())):
        for arrivals, factor in ARRIVALS.items():
            played = list(traces(factor))
            where = f"{world}, {arrivals}"
            rows += [[where, rule, *_cells(played, rule)] for rule in RULES]
            checks += _judged(where, played)
            figures[where] = [{rule: (one.power_w, one.kept_ratio) for rule, one in each.items()} for each in played]
    return Result(
        title="The clock governor against rules without a controller",
        columns=("world", "rule", "saving, mean", "saving, least", "in time, mean", "in time, least"),
        rows=rows,
        checks=checks,
        notes=[
            f"Simulated on emulated V100s. One at a time: fifteen models on eight GPUs, {DURATION_S:g} s, SLO and rate "
            f"{', '.join(f'{scale:g} x at {rate:g} /s' for scale, rate in CASES)}. Batch: {ANSWERS} answers of 200 "
            f"tokens in the mean (exponential), up to {BATCH} at once, SLO {SLO_S[0]:g} and {SLO_S[1]:g} s (99 %), "
            f"{', '.join(f'{rate:g}' for rate in RATES_RPS)} /s. Two seeds each. In bursts the rate is four times as "
            "high for a sixth (one at a time) or a fifth (batch) of the time, at the same mean rate.",
            "`busy-idle` is 1000 MHz while there is work and 200 MHz while there is none, `power-cap` 1000 MHz and the "
            "highest, `race-to-idle` the highest and 200. `predictive` has measured curves, `predictive-assumed` those "
            "of a device without a profile. A trace is judged if `busy-idle` keeps 99 % on it.",
        ],
        figures=figures,
    )


def _judged(where: str, played: list[Trace]) -> Iterator[tuple[str, bool | None]]:
    """The bars, on the traces on which :data:`RULE` keeps 99 % within the SLO; not run if there is no such trace."""
    judged = [each for each in played if each[RULE].kept_ratio >= KEPT_RATIO]
    for rule in ("predictive", "predictive-assumed"):
        kept = [each[rule].kept_ratio for each in judged]
        power = [each[rule].power_w / each[RULE].power_w for each in judged]
        claim = f"{where}: {rule} keeps 99 % on all of {len(judged)} traces"
        yield f"{claim} ({100 * min(kept, default=math.nan):.2f} %)", min(kept) >= KEPT_RATIO if judged else None
        claim = f"{where}: {rule} draws at most the power of {RULE}"
        text = (
            f"mean {100 * float(np.mean(power)) - 100:+.1f} %, worst {100 * max(power) - 100:+.2f} %" if power else ""
        )
        yield f"{claim} ({text})", max(power) <= 1.0 if judged else None


def _cells(played: list[Trace], rule: str) -> list[str]:
    saving = [each["fixed"].power_w / each[rule].power_w for each in played]
    kept = [100 * each[rule].kept_ratio for each in played]
    return [
        *(f"{value:.2f} x" for value in (float(np.mean(saving)), min(saving))),
        *(f"{value:.2f} %" for value in (float(np.mean(kept)), min(kept))),
    ]


def _models(burst: float) -> Iterator[Trace]:
    """Simulate every rule on fifteen models on eight GPUs."""
    for seed, (scale, rate) in itertools.product(SEEDS, CASES):
        case = ClockCase(rate, scale, DURATION_S)
        arrival_s = None if burst == 1.0 else _bursts(rate, burst, seed)
        found = run_schemes(RULES, case, workload(case, Streams(seed), arrival_s))
        yield {rule: Outcome(one.power_w, one.attainment_ratio) for rule, one in found.items()}


def _bursts(rate_rps: float, factor: float, seed: int) -> FloatArray:
    """Arrivals of bursts of 20 s in the mean, 100 s apart, at the stated mean rate."""
    random, now_s = np.random.default_rng(seed), 0.0
    calm_rps = rate_rps / (1.0 + (factor - 1.0) / 6.0)
    found: list[FloatArray] = []
    while now_s < DURATION_S:
        for mean_s, rps in ((100.0, calm_rps), (20.0, factor * calm_rps)):
            lasts_s = random.exponential(mean_s)
            found.append(now_s + np.sort(random.uniform(0.0, lasts_s, random.poisson(rps * lasts_s))))
            now_s += lasts_s
    arrival_s = np.concatenate(found)
    return np.asarray(arrival_s[arrival_s < DURATION_S], np.float64)


def _batched(elasticity: float) -> Callable[[float], Iterator[Trace]]:
    """A function that simulates every rule on one language model under continuous batching."""
    busy_w, idle_w = V100.busy_power_w(CLOCKS), V100.idle_power_w(CLOCKS)
    cost = replace(COST, elasticity_ratio=elasticity)

    def traces(burst: float) -> Iterator[Trace]:
        for seed, slo_s, rate in itertools.product(SEEDS, SLO_S, RATES_RPS):
            plant = BatchedPlant(CLOCKS, busy_w, idle_w, cost, 0.0002, BATCH, Slo(slo_s, KEPT_RATIO))
            answers = _answers(rate, burst, seed)
            yield {rule: _outcome(rule, plant, answers) for rule in RULES}

    return traces


def _answers(rate_rps: float, burst: float, seed: int) -> Answers:
    """Answers of exponential lengths, predicted too long by a third and within a factor of 1.35 (one deviation)."""
    random = np.random.default_rng(seed)
    rates = np.where(np.arange(ANSWERS) % 120 < 60, burst, 1.0) * rate_rps * (1 + 1 / burst) / 2
    tokens = np.maximum(random.exponential(200.0, ANSWERS), 1.0)
    predicted = np.maximum(tokens * np.exp(random.normal(0.3, 0.3, ANSWERS)), 1.0)
    arrival_s = np.cumsum(random.exponential(1 / rates))
    return Answers(arrival_s, random.uniform(50, 1500, ANSWERS), tokens, predicted)


def _outcome(rule: str, plant: BatchedPlant, answers: Answers) -> Outcome:
    above_w = plant.busy_w - plant.idle_w[0]
    measured = ClockCurves(lambda elasticity: plant.slowdown, above_w / above_w[-1])
    top, knee, idle = float(CLOCKS[-1]), 1000.0, float(CLOCKS[0])
    rules: Mapping[str, Policy[GovernorState, DeviceView]] = {
        "fixed": FixedClock(top),
        "static-1000": FixedClock(knee),
        "race-to-idle": BusyIdleClocks(top, idle),
        "power-cap": BusyIdleClocks(knee, top),
        "busy-idle": BusyIdleClocks(knee, idle),
        "predictive": PredictiveGovernor(CLOCKS, knee_mhz=V100.knee_mhz),
        "predictive-assumed": PredictiveGovernor(CLOCKS, knee_mhz=V100.knee_mhz, assumed=True),
    }
    curves = measured if rule == "predictive" else None
    duration_s = float(answers.arrival_s[-1]) + 60.0
    found = run_batched_engine(plant, answers, rules[rule], duration_s=duration_s, curves=curves)
    return Outcome(found.power_w, found.attainment_ratio(plant.slo))
