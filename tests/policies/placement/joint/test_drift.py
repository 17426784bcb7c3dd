"""When a joint plan is made again, and what corrects its predictor."""

import json
import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.policies.placement.joint.following.drift import (
    CORRECT_PREDICTOR,
    KEEP_PLAN,
    REPLAN,
    DriftObservation,
    PlanDrift,
    ServiceReading,
    WattPrice,
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


def play(policy, loads, every_s=5.0):
    """Decisions over (rate, g/kWh) a few seconds apart, and what a replay of the JSON decides."""
    state, found = policy.initial(), []
    again, same = PlanDrift.from_dict(json.loads(json.dumps(policy.as_dict()))), True
    other = again.initial()
    for index, (rate, g_per_kwh) in enumerate(loads):
        seen = DriftObservation(every_s * index, {"a": ServiceReading(rate, math.nan, 0)}, g_per_kwh)
        step = policy.step(state, seen)
        twin = again.step(other, DriftObservation.from_dict(json.loads(json.dumps(seen.as_dict()))))
        state, other = step.state, twin.state
        same = same and step.decisions == twin.decisions
        found += [(seen.now_s, each) for each in step.decisions]
    assert same, "a replay decides the same"
    return found


NAN = math.nan
SOLD = WattPrice(0.001, 1e-6, 300.0)
"""A watt for 0.1 cents an hour, of which the carbon of 300 g/kWh is 30 %."""


def test_less_load_waits_longer_than_more():
    policy = PlanDrift({"a": 100.0}, {})
    (more, _), *_ = play(policy, [(150.0, NAN)] * 120)
    (less, _), *_ = play(policy, [(50.0, NAN)] * 120)
    assert 60 <= more < 100 and 300 <= less < 340


def test_a_plan_that_did_not_come_into_force_is_asked_for_later_and_later():
    policy = PlanDrift({"a": 100.0}, {}, rates_rps={"a": 150.0}, seen_s=0.0)
    times = [now_s for now_s, _ in play(policy, [(150.0, NAN)] * 1500)]
    assert times[:5] == [60.0, 180.0, 420.0, 900.0, 1860.0]
    higher = [now_s for now_s, _ in play(policy, [(150.0, NAN)] * 120 + [(190.0, NAN)] * 20)]
    assert higher[:3] == times[:3] and 600 < higher[3] < 700, "a rate that rose further does not wait for that"


def test_a_load_that_swings_about_its_plan_is_not_followed():
    swing = [(125.0 if at // 10 % 2 else 75.0, NAN) for at in range(400)]
    assert play(PlanDrift({"a": 100.0}, {}), swing) == [], "a minute up, a minute down"


def test_an_intensity_that_changes_what_a_watt_is_worth_asks_for_a_plan():
    assert play(PlanDrift({"a": 100.0}, {}, watt=SOLD), [(100.0, 390.0)] * 100) == [], "a watt is worth 9 % more"
    ((now_s, decision),) = play(PlanDrift({"a": 100.0}, {}, watt=SOLD), [(100.0, 450.0)] * 100)
    assert now_s == 300 and decision.cause == "intensity" and decision.kind == REPLAN
    assert "115 %" in decision.reason and "450 g/kWh" in decision.reason
    assert play(PlanDrift({"a": 100.0}, {}, watt=SOLD), [(100.0, NAN)] * 100) == [], "unknown is no change"


def test_an_intensity_that_can_change_no_plan_is_said_once():
    fixed = WattPrice(1.0, 0.0, 300.0, "objective energy counts watts alone")
    ((now_s, decision),) = play(PlanDrift({"a": 100.0}, {}, watt=fixed), [(100.0, 310.0)] * 5 + [(100.0, 500.0)] * 200)
    assert (now_s, decision.kind, decision.cause) == (25.0, KEEP_PLAN, "intensity")
    assert "watts alone" in decision.reason


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 300.0), st.one_of(st.just(NAN), st.floats(1.0, 900.0))), min_size=1, max_size=120
    ),
    st.floats(1e-4, 1.0),
)
def test_any_history_is_decided_the_same_again_and_never_flaps(loads, per_w):
    found = play(PlanDrift({"a": 100.0}, {"a": 0.01}, watt=WattPrice(per_w, 1e-6, 300.0)), loads)
    asked = [now_s for now_s, each in found if each.kind == REPLAN]
    assert all(after - before >= 60.0 for before, after in pairwise(asked))
    assert not any(each.kind == REPLAN and now_s < 60.0 for now_s, each in found)
