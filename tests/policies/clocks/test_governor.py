import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.clocks.governor import (
    BusyIdleClocks,
    DeviceView,
    FixedClock,
    GovernorState,
    MiadGovernor,
    Overload,
    PredictiveGovernor,
    Waiting,
)
from joulery.policies.clocks.lowest_clock import PartitionLatency

CLOCKS = np.array([200.0, 800.0, 1380.0])


def waiting(
    deadline_s: float,
    finish_s: float,
    slo_s: float = 1.0,
    energy_j: tuple[float, ...] = (3, 1, 2),
    *,
    queued: bool = False,
) -> Waiting:
    """A request that ends in ``finish_s`` at the highest clock; the energy per work is least at 800 MHz."""
    return Waiting(deadline_s, slo_s, finish_s * 1380.0 / CLOCKS, np.array(energy_j, float), queued)


def clock_for(view: DeviceView, governor: PredictiveGovernor | None = None) -> float:
    governor = governor or PredictiveGovernor(CLOCKS, knee_mhz=800.0)
    step = governor.step(governor.initial(), view)
    return next((d.value for d in step.decisions if d.kind == "set_clock"), view.clock_mhz)


def test_an_idle_device_falls_to_the_idle_clock() -> None:
    view = DeviceView(0.0, "0", 1380.0)
    assert clock_for(view) == 200.0
    assert clock_for(view, PredictiveGovernor(CLOCKS, idle_mhz=800.0)) == 800.0


def test_the_least_energy_wins_not_the_lowest_clock() -> None:
    roomy = DeviceView(0.0, "0", 1380.0, [waiting(100.0, 0.1, 100.0, (1, 2, 3))], shortest_slo_s=100.0)
    assert clock_for(roomy) == 200.0
    costly_crawl = DeviceView(0.0, "0", 1380.0, [waiting(100.0, 0.1, 100.0)], shortest_slo_s=100.0)
    assert clock_for(costly_crawl) == 800.0


def test_the_clock_rises_only_where_that_saves_a_deadline() -> None:
    def chosen(*requests: Waiting) -> float:
        return clock_for(DeviceView(0.0, "0", 200.0, requests, shortest_slo_s=100.0))

    assert chosen(waiting(9.0, 1.0)) == 800.0
    assert chosen(waiting(1.5, 1.0)) == 1380.0  # 1.725 s at 800 MHz
    assert chosen(waiting(1.04, 1.0)) == 1380.0  # in time, though within the guard
    assert chosen(waiting(0.9, 1.0)) == 800.0  # late at every clock: no clock saves it
    assert chosen(waiting(0.5, 1.0), waiting(9.0, 1.5)) == 800.0
    assert chosen(waiting(0.5, 1.0), waiting(2.0, 1.5)) == 1380.0  # saves the second


def test_below_the_knee_the_backlog_leaves_room_for_a_long_request_of_every_hosted_model() -> None:
    def chosen(*hosted: tuple[float, float]) -> float:
        request = waiting(9.0, 0.1, energy_j=(1, 2, 3))
        return clock_for(DeviceView(0.0, "0", 1380.0, [request], shortest_slo_s=0.01, hosted=hosted))

    assert chosen((2.0, 0.5)) == 200.0  # 0.69 s at 200 MHz; 0.95 x 2 - 2 x 0.5 s may pass
    assert chosen((2.0, 0.5), (1.0, 0.15)) == 800.0  # 0.65 s may pass
    assert chosen((2.0, 0.5), (1.0, 0.46)) == 800.0  # no clock leaves that: the knee costs least
    two_slots = DeviceView(
        0.0, "0", 1380.0, [waiting(9.0, 0.1, energy_j=(1, 2, 3))], hosted=((1.0, 0.15),), start_s=np.zeros(3)
    )
    assert clock_for(two_slots) == 200.0  # the next request starts at once beside it


def test_a_queue_that_is_late_at_the_highest_clock_is_drained_at_the_highest_clock() -> None:
    queue = [waiting(0.5, 1.0), waiting(1.0, 2.0, queued=True)]
    assert clock_for(DeviceView(0.0, "0", 200.0, queue, shortest_slo_s=1.0)) == 1380.0


def test_the_floor_holds_while_there_is_work() -> None:
    governor = PredictiveGovernor(CLOCKS, knee_mhz=800.0, floor_mhz=800.0)
    roomy = DeviceView(0.0, "0", 1380.0, [waiting(100.0, 0.1, 100.0, (1, 2, 3))], shortest_slo_s=100.0)
    assert clock_for(roomy, governor) == 800.0
    assert clock_for(DeviceView(0.0, "0", 1380.0), governor) == 200.0


@given(
    st.lists(st.tuples(st.floats(-1, 5), st.floats(0.001, 2), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(CLOCKS.tolist()),
    st.floats(0.1, 10),
)
def test_no_other_clock_keeps_more_deadlines(
    requests: list[tuple[float, float, bool]], clock_mhz: float, shortest_slo_s: float
) -> None:
    queue, end_s = [], 0.0
    for deadline_s, full_s, queued in requests:
        end_s += full_s
        queue.append(waiting(deadline_s, end_s, queued=queued))
    chosen = clock_for(DeviceView(0.0, "0", clock_mhz, queue, shortest_slo_s))
    late = [sum(r.finish_s[k] > r.deadline_s for r in queue) for k in range(len(CLOCKS))]
    assert late[CLOCKS.tolist().index(chosen)] == min(late)


def test_two_clocks_follow_the_work() -> None:
    governor = BusyIdleClocks(800.0, 200.0)
    busy = DeviceView(0.0, "0", 200.0, [waiting(1.0, 0.1)])
    assert [d.value for d in governor.step(governor.initial(), busy).decisions] == [800.0]
    assert [d.value for d in governor.step(governor.initial(), DeviceView(0.0, "0", 800.0)).decisions] == [200.0]
    assert governor.step(governor.initial(), DeviceView(0.0, "0", 200.0)).decisions == ()


def test_overload_is_signalled_once_an_episode_after_its_patience() -> None:
    governor = PredictiveGovernor(CLOCKS, overload=Overload(patience_s=3.0))
    late = [waiting(-1.0, 1.0, queued=True)]
    state, raised = governor.initial(), []
    for now_s in range(8):
        step = governor.step(state, DeviceView(float(now_s), "0", 1380.0, late))
        raised += [now_s for d in step.decisions if d.kind == "scale_out"]
        state = step.state
    assert raised == [3]
    first = governor.step(governor.initial(), DeviceView(5.0, "0", 1380.0, late))
    assert first.wake_s == 8.0
    calm = governor.step(state, DeviceView(9.0, "0", 1380.0, []))
    assert calm.state == GovernorState()


def test_miad_snaps_and_says_why() -> None:
    governor = MiadGovernor(supported_mhz=(200.0, 500.0, 1000.0, 1380.0))
    tight = DeviceView(0.0, "0", 500.0, partitions=[PartitionLatency(1.0, 0.99, 1.0)])
    step = governor.step(governor.initial(), tight)
    assert [(d.kind, d.value) for d in step.decisions] == [("set_clock", 1000.0)]
    assert "1%" in step.decisions[0].reason
    state = governor.initial()
    for now_s in range(4):
        step = governor.step(state, DeviceView(float(now_s), "0", 1380.0, partitions=[PartitionLatency(1.0, 2.0, 1.0)]))
        state = step.state
    assert [d.kind for d in step.decisions] == ["scale_out"]


def test_a_fixed_clock_is_set_once() -> None:
    governor = FixedClock(800.0)
    assert governor.step(governor.initial(), DeviceView(0.0, "0", 1380.0)).decisions[0].value == 800.0
    assert governor.step(governor.initial(), DeviceView(0.0, "0", 800.0)).decisions == ()


def test_bad_governors_are_refused() -> None:
    with pytest.raises(ConfigError, match="ascending"):
        PredictiveGovernor(np.array([2.0, 1.0]))
    with pytest.raises(ConfigError, match="guard below 1"):
        PredictiveGovernor(CLOCKS, guard_ratio=1.0)
