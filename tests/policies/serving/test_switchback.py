import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Layout
from joulery.policies.serving.observation import SET_LAYOUT, Observation
from joulery.policies.serving.switchback import AUDIT, AuditedPolicy, BaselinePeriod, Switchback
from tests.policies.serving.test_predictive_policy import policy

BASE = Layout.parse(["lite2 on cpu:1", "lite2 on cpu:1"])


def audited(share=0.1, **changes) -> AuditedPolicy:
    audit = Switchback(BASE, share, trim_s=1.0, period_s=4.0, **changes)
    return AuditedPolicy(policy(requests=300), audit)


class Service:
    """Runs a policy second by second; each decision is carried out before the next observation."""

    def __init__(self, made, g_per_kwh=600.0):
        self.made, self.state, self.running = made, made.initial(), None
        self.g_per_kwh, self.now_s, self.decisions, self.log = g_per_kwh, 0.0, [], []
        self.periods: list[BaselinePeriod] = []

    def second(self, rate_rps=60.0, **seen):
        observation = Observation(
            self.now_s, self.g_per_kwh, rate_rps, math.nan, 0, {}, math.nan, self.running, arrival_rps=rate_rps
        )
        observation = replace(observation, **seen)
        step = self.made.step(self.state, observation)
        self.state = step.state
        for decision in step.decisions:
            self.decisions.append((self.now_s, decision))
            self.running = Layout.parse(decision.value)
        if self.state.latest is not None and self.state.latest not in self.periods[-1:]:
            self.periods.append(self.state.latest)
        self.log.append((observation, step.decisions))
        self.now_s += 1.0
        return step.decisions

    def until_baseline(self, **seen):
        for _ in range(2000):
            if self.running == BASE:
                return
            self.second(**seen)
        raise AssertionError("the baseline never served")


def test_the_baseline_serves_its_share_in_short_periods():
    service = Service(audited())
    for _ in range(1000):
        service.second()
    tally = service.state.tally
    assert 14 <= tally.periods <= 17, "six seconds, one of them until it is seen, in each sixty but the first"
    assert tally.share_ratio == pytest.approx(0.09, abs=0.02) and not tally.withheld and not tally.cut
    audits = [decision for _, decision in service.decisions if decision.cause == AUDIT]
    assert all(decision.kind == SET_LAYOUT for decision in audits) and len(audits) in (
        2 * tally.periods,
        2 * tally.periods + 1,
    )
    assert all(4.0 <= one.until_s - one.from_s <= 6.0 for one in service.periods)
    assert "the baseline" in audits[0].reason and Layout.parse(audits[1].value) != BASE


@pytest.mark.slow
def test_begins_are_spread_evenly_over_their_blocks():
    offsets = []
    for seed in range(300):
        service = Service(audited(seed=seed))
        service.second()
        service.second()
        state = service.state
        offsets.append((state.due_at - state.block_at) / (state.block_requests - state.planned_requests))
    counts, _ = np.histogram(offsets, 10, (0.0, 1.0))
    assert counts.sum() == 300 and np.sum((counts - 30) ** 2 / 30) < 27.9, "chi-square of 9 degrees, 0.1 %"


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@example([20.0, 33.0, 74.0, 82.0, 87.0, 31.0, 55.0, 20.0, 20.0, 20.0, 20.0, 20.0], 0.109375, 20)
@example([20.0, 61.5, 23.5, 72.0, 50.5, 60.75, 90.0, 20.0, 75.25, 90.0, 20.0, 90.0], 0.05, 10)
@given(st.lists(st.floats(20, 90), min_size=12, max_size=12), st.floats(0.05, 0.2), st.integers(0, 99))
def test_the_budget_holds_at_any_time_up_to_one_period(rates, share, seed):
    """A run may end at any second. Demand that rises within a period makes it larger, by half at most.

    A period is planned where it begins: one of a block with more demand is larger than those of the next block. The
    second before it is seen and the one in which it ends are counted in full.
    """
    service, period = Service(audited(share, seed=seed)), 0.0
    for rate in rates:
        for _ in range(20):
            if any(decision.cause == AUDIT for decision in service.second(rate)) and service.running == BASE:
                period = service.state.planned_requests
            tally = service.state.tally
            assert tally.requests <= share * tally.arrived + 1.5 * period + 2 * 90
    first = next((at for at, decision in service.decisions if decision.cause == AUDIT), None)
    assert first is None or first >= 5 / share * min(rates) / max(rates), "a whole block is saved up first"


def test_no_period_begins_while_the_slo_is_threatened_and_that_is_said():
    service = Service(audited())
    for _ in range(300):
        service.second(queued=3, oldest_wait_s=0.06)
    assert not any(decision.cause == AUDIT for _, decision in service.decisions)
    tally = service.state.tally
    assert tally.periods == 0 and tally.withheld == {"the SLO was threatened": tally.blocks} and tally.blocks >= 4


def test_a_running_period_ends_at_once_when_the_queue_grows():
    service = Service(audited())
    service.until_baseline()
    service.second()
    decisions = service.second(queued=8, oldest_wait_s=0.06)
    assert [Layout.parse(one.value) != BASE for one in decisions] == [True]
    assert "ended early" in decisions[0].reason and service.state.tally.cut == 1
    assert service.running == service.state.service.layout


def test_a_threat_during_a_period_goes_straight_to_the_leanest_layout():
    service = Service(audited(), g_per_kwh=0.0)
    service.until_baseline(g_per_kwh=600.0)
    decisions = service.second(queued=100, oldest_wait_s=0.5)
    assert "SLO threatened" in decisions[0].reason and set(service.running.counts) == {"lite0"}


def test_no_period_where_the_baseline_would_violate_the_slo():
    service = Service(audited())
    for _ in range(400):
        service.second(220.0)  # two of lite2 serve 230 a second
    tally = service.state.tally
    assert not tally.periods and set(tally.withheld) == {"the baseline would not keep the SLO"}


def test_a_baseline_that_serves_anyway_costs_nothing():
    service = Service(audited(), g_per_kwh=0.0)
    for _ in range(300):
        service.second()
    tally = service.state.tally
    assert tally.periods >= 5 and tally.requests == 0.0
    assert not any(decision.cause == AUDIT for _, decision in service.decisions)


def test_a_free_period_ends_when_the_policy_decides():
    service = Service(audited(), g_per_kwh=0.0)
    while math.isnan(service.state.serving_s):
        service.second()
    service.second()
    service.second()
    service.g_per_kwh = 600.0
    decisions = service.second()
    assert decisions and decisions[0].cause == "intensity" and math.isnan(service.state.asked_s)


def test_gpus_are_not_partitioned_for_it():
    whole = Layout.parse(["lite2 on cpu:2"])
    made = AuditedPolicy(policy(requests=300), Switchback(whole, 0.1, 1.0, 4.0, fixed_slices=True))
    service = Service(made)
    for _ in range(200):
        service.second()
    if sorted(service.running.slices) != sorted(whole.slices):
        assert set(service.state.tally.withheld) == {"the GPUs would be partitioned again"}
    else:
        assert service.state.tally.periods


def test_a_log_is_decided_again_from_the_policy_as_written():
    service = Service(audited(seed=3))
    for _ in range(200):
        service.second()
    again = AuditedPolicy.from_dict(json.loads(json.dumps(service.made.as_dict())))
    state = again.initial()
    for observation, decisions in service.log:
        step = again.step(state, observation)
        state = step.state
        assert step.decisions == decisions
    assert state.tally == service.state.tally


def test_shares_outside_the_range_are_refused():
    for share in (0.0, 0.6):
        with pytest.raises(DataError, match="share of the requests"):
            Switchback(BASE, share, 1.0, 4.0)
    with pytest.raises(DataError, match="not an audit"):
        Switchback.from_dict({"share_ratio": 0.1})
