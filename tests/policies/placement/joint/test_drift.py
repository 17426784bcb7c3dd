"""When a joint plan is made again, and what corrects its predictor."""

import math

from joulery.policies.placement.joint.drift import (
    CORRECT_PREDICTOR,
    REPLAN,
    DriftObservation,
    PlanDrift,
    ServiceReading,
)

POLICY = PlanDrift({"a": 100.0}, {"a": 0.010}, patience_s=30.0, memory_s=10.0)


def run(rates, batch_s=math.nan, batches=0, policy=POLICY):
    """Decisions over readings a second apart."""
    state, found = policy.initial(), []
    for now_s, rate in enumerate(rates):
        seen = DriftObservation(float(now_s), {"a": ServiceReading(rate, batch_s, batches)})
        step = policy.step(state, seen)
        state = step.state
        found += [(now_s, each) for each in step.decisions]
    return found


def test_a_rate_within_its_band_changes_nothing():
    assert run([100 + (9 if now % 2 else -9) for now in range(200)]) == []


def test_a_rate_that_stays_outside_asks_for_a_plan_at_the_measured_rates():
    ((now_s, decision),) = run([130.0] * 45)
    assert decision.kind == REPLAN and decision.cause == "load"
    assert 30 <= now_s <= 40, "after the patience and the average"
    assert 125 < decision.value["a"] <= 130


def test_a_burst_is_waited_out():
    assert run([130.0] * 20 + [100.0] * 100) == []


def test_batches_that_take_longer_correct_the_predictor_once():
    found = run([100.0] * 5, batch_s=0.012, batches=60)
    assert [each.kind for _, each in found] == [CORRECT_PREDICTOR, REPLAN]
    assert found[0][1].value == 0.012 / 0.010 - 1
    assert "12 ms" in found[0][1].reason and "10 ms" in found[0][1].reason


def test_batches_that_take_less_or_are_few_prove_nothing():
    assert run([100.0] * 5, batch_s=0.006, batches=60) == []
    assert run([100.0] * 5, batch_s=0.020, batches=5) == []
    assert run([math.nan] * 5) == []


def test_what_the_plan_has_is_not_corrected_again():
    corrected = PlanDrift({"a": 100.0}, {"a": 0.010}, {"a": 0.2})
    assert run([100.0] * 5, batch_s=0.012, batches=60, policy=corrected) == []
