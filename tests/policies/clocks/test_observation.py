"""What a governor is shown of an engine with continuous batching, and what it makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from joulery.domain.serving.service import Slo
from joulery.perf.lengths.step_time import BatchedRequest, StepCost
from joulery.perf.power.clock_scaling import above_idle_ratio, slowdown_ratio
from joulery.policies.clocks.governor import DeviceView, PredictiveGovernor, late_budget
from joulery.policies.clocks.observation import (
    BatchingEngine,
    ClockCurves,
    ColocatedService,
    Pending,
    Work,
    pending_requests,
)

CLOCKS = np.array([200.0, 600.0, 1000.0, 1380.0])
CURVES = ClockCurves(lambda elasticity: slowdown_ratio(CLOCKS, elasticity), above_idle_ratio(CLOCKS))
COST = StepCost(0.02, 0.0002, 0.0, 0.4)


def llm(pending: int, *, slo_s: float, tokens: float = 200.0, running: int | None = None, capacity: int = 4096):
    requests = [
        Pending(0.0, 4.0, 100.0, 0.0, BatchedRequest(tokens, 500.0, running=number < (running or pending)))
        for number in range(pending)
    ]
    work = Work(4.0, 8.0, 100.0, 8, 1.0)
    return ColocatedService(
        "llm", Slo(slo_s), work, requests, [], eventful=True, batch=BatchingEngine(COST, capacity), late_budget=0.0
    )


def clock_of(one: ColocatedService, **governor: bool) -> float:
    waiting, start_s = pending_requests([one], 0.0, CURVES, 1.0)
    hosted = ((one.slo.latency_s, one.work.service_s),)
    view = DeviceView(0.0, "gpu:0", 1380.0, waiting, one.slo.latency_s, (), hosted, start_s=start_s)
    (decision,) = PredictiveGovernor(CLOCKS, knee_mhz=1000.0, **governor).step(
        PredictiveGovernor(CLOCKS).initial(), view
    ).decisions or [None]
    return view.clock_mhz if decision is None else float(decision.value)


@pytest.mark.parametrize("load", [0.13, 0.3, 0.6])
@pytest.mark.parametrize("assumed", [True, False])
def test_a_full_batch_far_from_its_slo_does_not_go_to_the_highest_clock(load: float, assumed: bool) -> None:
    """Sixty-four requests of 5 s in one batch were seen as eight servers with a queue of eight turns."""
    took_s = 200 * COST.step_s(64, 0)
    assert clock_of(llm(64, slo_s=took_s / load), assumed=assumed) <= 1000.0


def test_a_batch_close_to_its_slo_is_raised() -> None:
    took_s = 200 * COST.step_s(64, 0)
    assert clock_of(llm(64, slo_s=took_s * 1.08)) == 1380.0


def test_ends_and_the_next_start_follow_the_batch_and_the_elasticity() -> None:
    one = llm(5, slo_s=100.0, running=4, capacity=4)
    waiting, start_s = pending_requests([one], 0.0, CURVES, 1.0)
    first_s = 200 * COST.step_s(4, 0)
    slowdown = slowdown_ratio(CLOCKS, COST.elasticity_ratio)
    assert waiting[0].finish_s == pytest.approx(first_s * slowdown)
    assert waiting[4].finish_s == pytest.approx((first_s + 200 * COST.step_s(1, 0)) * slowdown)
    assert start_s == pytest.approx(first_s * slowdown)
    roomy = llm(5, slo_s=100.0, running=4, capacity=8)
    assert pending_requests([roomy], 0.0, CURVES, 1.0)[1] == pytest.approx(0.0)


def test_late_answers_are_counted_against_what_the_slo_allows() -> None:
    assert late_budget(0, 0, 0.99) == pytest.approx(1.0)
    assert late_budget(1000, 5, 0.99) == pytest.approx(6.0)
    assert late_budget(1000, 20, 0.99) < 0


def budget_view(late_budget: float) -> DeviceView:
    one = llm(4, slo_s=200 * COST.step_s(4, 0) * 1.05)
    waiting, start_s = pending_requests([one], 0.0, CURVES, 1.0)
    hosted = ((one.slo.latency_s, 4.0),)
    return DeviceView(
        0.0, "gpu:0", 1380.0, waiting, one.slo.latency_s, (), hosted, start_s=start_s, late_budget=late_budget
    )


def test_with_assumed_curves_a_late_answer_is_rescued_only_if_the_slo_allows_no_more() -> None:
    governor = PredictiveGovernor(CLOCKS, knee_mhz=1000.0, assumed=True)
    (decision,) = governor.step(governor.initial(), budget_view(4.0)).decisions
    assert decision.value == 1000.0
    assert "which the SLO allows" in decision.reason
    assert governor.step(governor.initial(), budget_view(3.0)).decisions == ()  # stays at 1380 MHz


def test_with_assumed_curves_it_never_works_below_the_knee() -> None:
    governor = PredictiveGovernor(CLOCKS, knee_mhz=1000.0, assumed=True)
    for slo_s in (1.0, 10.0, 1000.0):
        assert clock_of(llm(3, slo_s=slo_s), assumed=True) >= 1000.0
    (decision,) = governor.step(governor.initial(), DeviceView(0.0, "gpu:0", 1380.0)).decisions
    assert decision.value == 200.0
