"""Governors stepped once a period, and the floor at the voltage knee."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from joulery.policies.clocks.governor import (
    AboveKnee,
    ArrivalForecast,
    DeviceView,
    FixedClock,
    GovernorState,
    MiadGovernor,
    PredictiveGovernor,
    Waiting,
)
from joulery.policies.clocks.lowest_clock import ClockRange, PartitionLatency

CLOCKS = np.array([200.0, 600.0, 1000.0, 1380.0])


def steady(tails: list[float], energy: list[float] | None = None) -> ArrivalForecast:
    return ArrivalForecast(np.array(tails), np.array(energy or [1.0, 2.0, 3.0, 4.0]))


def clock_of(view: DeviceView, governor: object = None) -> float:
    policy = governor or PredictiveGovernor(CLOCKS)
    step = policy.step(GovernorState(), view)  # type: ignore[attr-defined]
    wanted = [decision.value for decision in step.decisions if decision.kind == "set_clock"]
    return float(wanted[0]) if wanted else view.clock_mhz


def test_between_two_requests_the_clock_stays_where_the_next_ones_will_be_in_time() -> None:
    quiet = DeviceView(0.0, "cpu", 1380.0, steady=steady([3.0, 0.97, 0.6, 0.3]))
    assert clock_of(quiet) == 1000.0
    assert clock_of(DeviceView(0.0, "cpu", 1380.0, steady=steady([0.8, 0.7, 0.6, 0.3]))) == 200.0
    assert clock_of(DeviceView(0.0, "cpu", 200.0, steady=steady([9.0, 9.0, 9.0, 0.95]))) == 1380.0
    assert clock_of(DeviceView(0.0, "cpu", 1380.0)) == 200.0


def test_least_energy_among_the_clocks_in_time() -> None:
    costly_crawl = steady([0.5, 0.5, 0.5, 0.5], [9.0, 5.0, 2.0, 4.0])
    assert clock_of(DeviceView(0.0, "cpu", 1380.0, steady=costly_crawl)) == 1000.0


def test_what_waits_and_what_comes_both_have_to_fit() -> None:
    one = Waiting(10.0, 10.0, np.array([0.4, 0.2, 0.1, 0.05]), np.array([1.0, 1.0, 1.0, 1.0]))
    alone = DeviceView(0.0, "cpu", 1380.0, [one], 10.0)
    assert clock_of(alone) == 200.0
    coming = DeviceView(0.0, "cpu", 1380.0, [one], 10.0, steady=steady([2.0, 2.0, 0.5, 0.1]))
    assert clock_of(coming) == 1000.0


def test_overload_that_comes_without_a_queue_asks_for_help_too() -> None:
    governor = PredictiveGovernor(CLOCKS)
    state = governor.initial()
    kinds = []
    for second in range(6):
        view = DeviceView(float(second), "cpu", 1380.0, steady=steady([9.0, 9.0, 9.0, 1.5]))
        step = governor.step(state, view)
        state = step.state
        kinds += [decision.kind for decision in step.decisions]
    assert kinds == ["scale_out"]


@given(
    clock=st.sampled_from(CLOCKS.tolist()),
    tails=st.lists(st.floats(0, 5), min_size=4, max_size=4),
    late=st.floats(0, 3),
    kind=st.sampled_from(["predictive", "miad", "fixed"]),
    knee=st.floats(150, 1380),
)
def test_never_below_the_knee_while_there_is_work(
    clock: float, tails: list[float], late: float, kind: str, knee: float
) -> None:
    inner = {
        "predictive": PredictiveGovernor(CLOCKS),
        "miad": MiadGovernor(ClockRange(200.0, 1380.0, 400.0), tuple(CLOCKS)),
        "fixed": FixedClock(200.0),
    }[kind]
    policy = AboveKnee(inner, CLOCKS, knee)
    partitions = (PartitionLatency(1.0, late, 1.0),)
    busy = DeviceView(0.0, "cpu", clock, steady=steady(tails), partitions=partitions)
    floor = float(CLOCKS[np.searchsorted(CLOCKS, knee)])
    assert clock_of(busy, policy) >= floor
    assert clock_of(busy, policy) == max(floor, clock_of(busy, inner))
    idle = DeviceView(0.0, "cpu", clock)
    assert clock_of(idle, policy) == clock_of(idle, inner)


def test_a_governor_that_is_content_below_the_knee_is_raised_when_work_comes() -> None:
    policy = AboveKnee(FixedClock(600.0), CLOCKS, 900.0)
    view = DeviceView(0.0, "cpu", 600.0, steady=steady([1.0] * 4))
    (decision,) = policy.step(GovernorState(), view).decisions
    assert (decision.value, decision.policy) == (1000.0, "fixed")
    assert "voltage knee at 900 MHz" in decision.reason
    assert policy.step(GovernorState(), DeviceView(0.0, "cpu", 1000.0, steady=steady([1.0] * 4))).decisions == ()
