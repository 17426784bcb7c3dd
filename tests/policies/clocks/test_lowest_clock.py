import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.policies.clocks.lowest_clock import ClockAction, ClockRange, PartitionLatency, miad_step, snap_clock
from tests.data_folder import data_folder

LIMITS = ClockRange()
partitions = st.lists(
    st.builds(PartitionLatency, slo_s=st.floats(0.1, 5), latency_s=st.floats(0, 6), elasticity=st.floats(0, 1)),
    max_size=4,
)


def test_golden_steps_in_both_modes() -> None:
    for case in json.loads((data_folder("muserve") / "cases_alg3_miad_step_examples.json").read_text()):
        limits = ClockRange(case["min_mhz"], case["max_mhz"], case["step_mhz"], case["guard"])
        resident = [PartitionLatency(p["slo_ms"] / 1e3, p["latency_ms"] / 1e3, p["weight"]) for p in case["partitions"]]
        assert miad_step(case["freq_mhz"], resident, limits) == (case["action"], case["new_freq_mhz"])
        literal = miad_step(case["freq_mhz"], resident, limits, literal=True)
        assert literal == (case["action_paper_literal"], case["new_freq_paper_literal_mhz"])


@given(partitions, st.floats(200, 1380))
def test_the_clock_stays_in_range_and_rises_whenever_the_guard_is_broken(
    resident: list[PartitionLatency], clock_mhz: float
) -> None:
    action, new_mhz = miad_step(clock_mhz, resident, LIMITS)
    assert LIMITS.min_mhz <= new_mhz <= LIMITS.max_mhz
    tight = any(p.slack_ratio < LIMITS.guard_ratio for p in resident)
    assert (action is ClockAction.UP) == tight
    if action is ClockAction.DOWN:
        assert all(p.allows(clock_mhz, LIMITS) for p in resident)
        assert new_mhz == max(200.0, clock_mhz - 100.0)
    if action is ClockAction.SAME:
        assert not all(p.allows(clock_mhz, LIMITS) for p in resident)


def test_one_partition_holds_the_clock_up_except_in_the_literal_loop() -> None:
    resident = [PartitionLatency(1.0, 0.93, 1.0), PartitionLatency(1.0, 0.1, 0.1)]
    assert miad_step(800.0, resident, LIMITS) == (ClockAction.SAME, 800.0)
    assert miad_step(800.0, resident, LIMITS, literal=True) == (ClockAction.DOWN, 700.0)
    assert miad_step(800.0, [], LIMITS) == miad_step(800.0, [], LIMITS, literal=True) == (ClockAction.DOWN, 700.0)


def test_snapping_never_goes_below_the_request() -> None:
    assert snap_clock(801.0, [500.0, 1380.0, 900.0]) == 900.0
    assert snap_clock(900.0, [900.0]) == 900.0
    assert snap_clock(2000.0, [500.0, 1380.0]) == 1380.0
    with pytest.raises(ConfigError, match="no clock"):
        snap_clock(1.0, [])


@pytest.mark.parametrize("bad", [{"min_mhz": 0.0}, {"min_mhz": 2000.0}, {"step_mhz": 0.0}])
def test_a_senseless_range_is_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        ClockRange(**bad)
