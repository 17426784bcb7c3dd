import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.clocks.governor import (
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


def waiting(deadline_s: float, full_s: float, slo_s: float = 1.0, energy_j: tuple[float, ...] = (1, 2, 3)) -> Waiting:
    return Waiting(deadline_s, slo_s, full_s * 1380.0 / CLOCKS, np.array(energy_j, float))


def clock_for(view: DeviceView, governor: PredictiveGovernor | None = None) -> float:
    governor = governor or PredictiveGovernor(CLOCKS)
    step = governor.step(governor.initial(), view)
    return next((d.value for d in step.decisions if d.kind == "set_clock"), view.clock_mhz)


def test_an_idle_device_falls_to_the_idle_clock() -> None:
    view = DeviceView(0.0, "0", 1380.0)
    assert clock_for(view) == 200.0
    assert clock_for(view, PredictiveGovernor(CLOCKS, idle_mhz=800.0)) == 800.0


def test_the_least_energy_in_time_wins_not_the_lowest_clock() -> None:
    roomy = DeviceView(0.0, "0", 1380.0, [waiting(100.0, 0.1, 100.0)], shortest_slo_s=100.0)
    assert clock_for(roomy) == 200.0
    costly_crawl = DeviceView(0.0, "0", 1380.0, [waiting(100.0, 0.1, 100.0, (9, 2, 3))], shortest_slo_s=100.0)
    assert clock_for(costly_crawl) == 800.0


def test_deadline_guard_and_reserve_each_raise_the_clock() -> None:
    assert clock_for(DeviceView(0.0, "0", 200.0, [waiting(0.69 + 0.1, 0.1)], shortest_slo_s=100.0)) == 200.0
    assert clock_for(DeviceView(0.0, "0", 200.0, [waiting(0.69 + 0.09, 0.1)], shortest_slo_s=100.0)) == 800.0
    assert clock_for(DeviceView(0.0, "0", 200.0, [waiting(9.0, 0.1)], shortest_slo_s=1.0)) == 800.0
    assert clock_for(DeviceView(0.0, "0", 200.0, [waiting(9.0, 0.1)] * 2, shortest_slo_s=1.0)) == 800.0
    assert clock_for(DeviceView(0.0, "0", 200.0, [waiting(9.0, 0.1)] * 3, shortest_slo_s=1.0)) == 1380.0


def test_room_is_kept_for_a_long_request_of_every_hosted_model() -> None:
    def chosen(*hosted: tuple[float, float]) -> float:
        return clock_for(DeviceView(0.0, "0", 1380.0, [waiting(9.0, 0.1)], shortest_slo_s=0.01, hosted=hosted))

    assert chosen((2.0, 0.5)) == 200.0  # 0.69 s at 200 MHz; 0.9 x 2 - 2 x 0.5 s may pass
    assert chosen((2.0, 0.5), (1.0, 0.15)) == 800.0  # 0.6 s may pass, and 0.17 do
    assert chosen((2.0, 0.5), (1.0, 0.43)) == 1380.0  # 0.04 s: no clock leaves that


@given(
    st.lists(st.tuples(st.floats(-1, 5), st.floats(0.001, 2)), max_size=6),
    st.sampled_from(CLOCKS.tolist()),
    st.floats(0.1, 10),
)
def test_a_clock_below_the_highest_keeps_every_deadline(
    requests: list[tuple[float, float]], clock_mhz: float, shortest_slo_s: float
) -> None:
    queue = [waiting(deadline_s, full_s) for deadline_s, full_s in requests]
    chosen = clock_for(DeviceView(0.0, "0", clock_mhz, queue, shortest_slo_s))
    index = CLOCKS.tolist().index(chosen)
    if index < len(CLOCKS) - 1:
        finish_s = np.cumsum([request.remaining_s[index] for request in queue])
        assert all(f <= r.deadline_s - 0.1 * r.slo_s + 1e-12 for f, r in zip(finish_s, queue, strict=True))


def test_overload_is_signalled_once_an_episode_after_its_patience() -> None:
    governor = PredictiveGovernor(CLOCKS, overload=Overload(patience_s=3.0))
    late = [waiting(-1.0, 1.0)]
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
