"""When a standby takes over, when it may not, and that nothing else ever happens."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance
from joulery.domain.serving.service import Slo
from joulery.policies.placement.standby import (
    ACTIVATE_STANDBY,
    SLO_VIOLATED,
    StandbyObservation,
    StandbyPolicy,
    Tail,
    WatchedInstance,
    watched_instances,
)

W1 = WatchedInstance("W1", 0, 0, 20.0, 30.0, 0.010, 0.99)
W5 = WatchedInstance("W5", 0, 0, 45.0, 55.0, 0.030, 0.99)
FULL = WatchedInstance("W12", 0, 1, 100.0, 100.0, 0.055, 0.99)
POLICY = StandbyPolicy((W1, W5, FULL))


def run(policy: StandbyPolicy, *steps: tuple[float, dict[str, float]], requests: int = 100):
    """The decisions of a policy that sees these tails (ms) at these seconds."""
    state, decisions = policy.initial(), []
    for now_s, tails in steps:
        seen = tuple(Tail(key, ms / 1e3, requests) for key, ms in tails.items())
        step = policy.step(state, StandbyObservation(now_s, seen))
        state = step.state
        decisions += [(now_s, decision) for decision in step.decisions]
    return decisions


def test_the_papers_example_w1_switches_half_a_second_after_it_was_seen_late():
    """Section 5.3, Fig. 17: 15.6 ms at the first second, the standby answers from 1.5 s on."""
    ((at_s, decision),) = run(POLICY, (1.0, {"W1/0": 15.6}), (1.5, {"W1/0": 15.6}), (2.0, {"W1/0": 8.2}))
    assert (at_s, decision.kind, decision.target, decision.value) == (1.5, ACTIVATE_STANDBY, "W1/0", 30.0)
    for fact in ("p99 of W1/0 15.6 ms", "10 ms", "standby with 30 %", "20 %"):
        assert fact in decision.reason


def test_one_late_look_is_not_enough():
    assert run(POLICY, (1.0, {"W1/0": 15.6}), (1.5, {"W1/0": 9.9}), (2.0, {"W1/0": 15.6})) == []
    assert run(POLICY, (1.0, {"W1/0": 10.0}), (1.5, {"W1/0": 10.0})) == [], "a latency equal to the SLO is within it"


def test_a_tail_over_few_requests_says_nothing():
    assert run(POLICY, (1.0, {"W1/0": 15.6}), (1.5, {"W1/0": 15.6}), requests=POLICY.min_requests - 1) == []
    assert run(POLICY, (1.0, {"W1/0": math.nan}), (1.5, {"W1/0": math.nan})) == []


def test_two_standbys_never_share_what_the_plan_left_once():
    """20 + 45 + 25 % of one GPU: the standbys together would need 110 %."""
    third = WatchedInstance("W11", 0, 0, 25.0, 35.0, 0.040, 0.99)
    policy = StandbyPolicy((W1, W5, third))
    late = {"W1/0": 20.0, "W5/0": 40.0}
    decisions = run(policy, (1.0, late), (1.5, late), (2.0, late), (9.0, late))
    assert [(d.kind, d.target) for _, d in decisions[:2]] == [(ACTIVATE_STANDBY, "W1/0"), (SLO_VIOLATED, "W5/0")]
    assert "another standby" in decisions[1][1].reason


def test_what_cannot_be_mended_is_said_once():
    late = {"W12/0": 60.0}
    ((_, decision),) = run(POLICY, (1.0, late), (1.5, late), (2.0, late), (3.0, late))
    assert decision.kind == SLO_VIOLATED and "left nothing of its GPU" in decision.reason
    again = run(POLICY, (1.0, late), (1.5, late), (2.0, {"W12/0": 50.0}), (3.0, late), (3.5, late))
    assert [at_s for at_s, _ in again] == [1.5, 3.5], "and again once it had been kept in between"


def test_a_standby_that_does_not_help_is_said_too():
    late = {"W1/0": 15.0}
    decisions = run(POLICY, *((1 + 0.5 * k, late) for k in range(9)))
    assert [(at_s, d.kind) for at_s, d in decisions] == [(1.5, ACTIVATE_STANDBY), (4.0, SLO_VIOLATED)]
    assert "its standby answers already" in decisions[1][1].reason, "after it had time to work off what had queued up"


def planned(*shares: float) -> PlannedGpu:
    instances = tuple(
        PlannedInstance(f"W{n}", "m", 0, 1, 10.0, share, 2, 0.0, 0.0, LatencyParts(0, 0, 0.01, 0, 0), 0.02, 100.0, 0.04)
        for n, share in enumerate(shares)
    )
    return PlannedGpu("gpu", 1.0, 1.0, 1.0, 1.0, 1.0, instances)


@pytest.mark.parametrize(
    ("shares", "standbys"),
    [((0.2, 0.45, 0.15), [30.0, 55.0, 25.0]), ((0.6, 0.325), [67.5, 40.0]), ((0.925,), [100.0]), ((1.0,), [100.0])],
)
def test_a_standby_has_ten_per_cent_more_or_what_is_left(shares, standbys):
    slos = {f"W{n}": Slo(0.04, 0.99) for n in range(len(shares))}
    found = watched_instances([planned(*shares)], slos)
    assert [one.standby_percent for one in found] == pytest.approx(standbys)
    assert [one.key for one in found] == [f"W{n}/0" for n in range(len(shares))]


TAILS = st.lists(st.tuples(*(st.floats(0.001, 0.1) for _ in range(3)), st.integers(0, 60)), min_size=1, max_size=30)


@given(TAILS, st.lists(st.floats(5, 40), min_size=3, max_size=3))
def test_no_gpu_is_ever_asked_for_more_than_it_has_and_no_standby_twice(seen, shares):
    left = max(0.0, 100 - sum(shares))
    policy = StandbyPolicy(
        tuple(WatchedInstance(f"W{n}", 0, 0, s, s + min(10.0, left), 0.02, 0.99) for n, s in enumerate(shares))
    )
    state, active = policy.initial(), set()
    for number, (*tails, requests) in enumerate(seen):
        observation = StandbyObservation(
            0.5 * number, tuple(Tail(f"W{n}/0", tail, requests) for n, tail in enumerate(tails))
        )
        assert StandbyObservation.from_dict(observation.as_dict()) == observation
        step = policy.step(state, observation)
        state = step.state
        for decision in step.decisions:
            if decision.kind == ACTIVATE_STANDBY:
                assert decision.target not in active
                active.add(decision.target)
        used = sum(one.standby_percent if one.key in active else one.share_percent for one in policy.instances)
        assert used <= max(100.0, sum(shares)) + 1e-6
        assert set(state.active) == active


def test_a_policy_survives_its_log():
    assert StandbyPolicy.from_dict(POLICY.as_dict()) == POLICY
    assert replace(POLICY, min_requests=9) != POLICY
    with pytest.raises(DataError, match="not a standby policy"):
        StandbyPolicy.from_dict({"instances": [{}]})
