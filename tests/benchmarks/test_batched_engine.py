"""A governed engine with continuous batching: its physics, and the governor against the rule it must beat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks._batched_engine import Answers, BatchedPlant, BatchedRun, run_batched_engine
from joulery.domain.errors import DataError
from joulery.domain.serving.service import Slo
from joulery.perf.lengths.step_time import BatchedRequest, StepCost, batch_finish_s
from joulery.perf.power.clock_curves import V100
from joulery.policies.clocks.governor import BusyIdleClocks, FixedClock, PredictiveGovernor
from joulery.policies.clocks.observation import ClockCurves

CLOCKS = np.array([200.0, 400.0, 600.0, 800.0, 1000.0, 1200.0, 1380.0])
PLANT = BatchedPlant(
    CLOCKS,
    V100.busy_power_w(CLOCKS),
    V100.idle_power_w(CLOCKS),
    StepCost(0.025, 0.0005, 3e-7, 0.3),
    per_read_s=0.0002,
    capacity=32,
    slo=Slo(60.0, 0.99),
)


def load(rate_rps: float = 0.6, count: int = 300, burst: float = 1.0, seed: int = 0) -> Answers:
    random = np.random.default_rng(seed)
    rates = np.where(np.arange(count) % 120 < 60, burst, 1.0) * rate_rps / ((1 + burst) / 2)
    tokens = np.maximum(random.exponential(200.0, count), 1.0)
    predicted = np.maximum(tokens * np.exp(random.normal(0.3, 0.3, count)), 1.0)
    return Answers(np.cumsum(random.exponential(1 / rates)), random.uniform(50, 1500, count), tokens, predicted)


def run(
    governor: object, answers: Answers, plant: BatchedPlant = PLANT, curves: ClockCurves | None = None
) -> BatchedRun:
    return run_batched_engine(plant, answers, governor, duration_s=600.0, curves=curves)  # type: ignore[arg-type]


def measured(plant: BatchedPlant) -> ClockCurves:
    above_w = plant.busy_w - plant.idle_w[0]
    return ClockCurves(lambda elasticity: plant.slowdown, above_w / above_w[-1])


def test_answers_end_as_their_steps_say() -> None:
    answers = Answers(np.zeros(3), np.full(3, 100.0), np.array([50.0, 100.0, 200.0]), np.full(3, 100.0))
    found = run(FixedClock(1380.0), answers).latency_s
    requests = [BatchedRequest(tokens, 100.0, 0.02) for tokens in (50.0, 100.0, 200.0)]
    assert found == pytest.approx(batch_finish_s(PLANT.cost, requests, 32), rel=0.01)


def test_a_lower_clock_slows_by_its_elasticity_and_draws_less() -> None:
    answers = load()
    full, low = run(FixedClock(1380.0), answers), run(FixedClock(600.0), answers)
    assert low.power_w < full.power_w
    quiet = replace(answers, arrival_s=np.arange(300) * 100.0)
    ratio = run(FixedClock(600.0), quiet).latency_s[1:] / run(FixedClock(1380.0), quiet).latency_s[1:]
    assert ratio == pytest.approx(np.full(299, PLANT.slowdown[2]), rel=0.02)


@pytest.mark.parametrize("burst", [1.0, 4.0])
def test_measured_curves_beat_the_rule_of_two_clocks_and_assumed_ones_equal_it(burst: float) -> None:
    answers = load(burst=burst)
    rule = run(BusyIdleClocks(1000.0, 200.0), answers)
    known = run(PredictiveGovernor(CLOCKS, knee_mhz=1004.0), answers, curves=measured(PLANT))
    assumed = run(PredictiveGovernor(CLOCKS, knee_mhz=1004.0, assumed=True), answers)
    assert known.power_w < 0.95 * rule.power_w
    assert known.attainment_ratio(PLANT.slo) >= 0.99
    assert assumed.power_w == pytest.approx(rule.power_w, rel=0.005)
    assert assumed.attainment_ratio(PLANT.slo) >= rule.attainment_ratio(PLANT.slo) >= 0.99


@pytest.mark.parametrize("burst", [1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tight_slo_that_the_rule_of_two_clocks_keeps_is_kept_with_less_energy(burst: float, seed: int) -> None:
    plant = replace(PLANT, slo=Slo(30.0, 0.99))
    answers = load(0.2, 400, burst, seed)
    rule = run(BusyIdleClocks(1000.0, 200.0), answers, plant)
    known = run(PredictiveGovernor(CLOCKS, knee_mhz=1004.0), answers, plant, measured(plant))
    assumed = run(PredictiveGovernor(CLOCKS, knee_mhz=1004.0, assumed=True), answers, plant)
    assert rule.attainment_ratio(plant.slo) >= 0.99
    assert known.attainment_ratio(plant.slo) >= 0.99 and known.power_w < rule.power_w
    assert assumed.attainment_ratio(plant.slo) >= 0.99 and assumed.power_w < 1.01 * rule.power_w


@pytest.mark.slow
@pytest.mark.parametrize("assumed", [True, False])
def test_where_the_rule_breaks_the_slo_the_governor_does_not(assumed: bool) -> None:
    """Work bound by arithmetic, close to what the engine can do: 1000 MHz are too slow."""
    plant = replace(PLANT, cost=replace(PLANT.cost, elasticity_ratio=1.0))
    answers = load(1.6, 600, seed=3)
    rule = run(BusyIdleClocks(1000.0, 200.0), answers, plant)
    governor = PredictiveGovernor(CLOCKS, knee_mhz=1004.0, assumed=assumed)
    found = run(governor, answers, plant, measured(plant))
    full = run(FixedClock(1380.0), answers, plant)
    assert rule.attainment_ratio(plant.slo) < 0.96
    assert found.attainment_ratio(plant.slo) > full.attainment_ratio(plant.slo) - 0.015
    assert found.power_w < full.power_w / 1.1


def test_the_elasticity_is_learned_from_the_steps_that_the_governor_sees() -> None:
    governor = PredictiveGovernor(CLOCKS, knee_mhz=1004.0)
    assert run(governor, load(), curves=measured(PLANT)).learned.elasticity_ratio == pytest.approx(0.3, abs=0.051)


def test_equal_runs_are_equal_and_every_answer_ends() -> None:
    one, other = (run(PredictiveGovernor(CLOCKS, knee_mhz=1004.0), load()) for _ in range(2))
    assert one.latency_s.tobytes() == other.latency_s.tobytes()
    assert not np.isnan(one.latency_s).any()
    with pytest.raises(DataError, match="above 0"):
        Answers(np.zeros(1), np.ones(1), np.zeros(1), np.ones(1))
