import math

import numpy as np
import pytest

from joulery.accounting.steps import PowerSteps, energy_by_bin, power_steps, to_ns
from joulery.domain.errors import DataError
from tests.accounting.readings import S, average, channel, counter, power

NAN = math.nan
CHANNEL = channel()


def shape(steps: PowerSteps) -> list[tuple[float, float, float]]:
    """(start, end, watts) of every covered step, seconds."""
    edges = (steps.edges_ns / S).tolist()
    rows = zip(edges[:-1], edges[1:], steps.watts.tolist(), strict=True)
    return [row for row in rows if not math.isnan(row[2])]


def test_a_power_reading_holds_to_the_next_and_the_last_for_two_periods() -> None:
    assert shape(power_steps(power([0, 1, 4], [10, 20, 30]))) == [(0, 1, 10), (1, 4, 20), (4, 6, 30)]
    assert shape(power_steps(power([5], [7], period_s=0.25))) == [(5, 5.5, 7)]


def test_a_hole_is_not_filled_with_the_reading_before_it() -> None:
    jitter = power_steps(power([0, 10], [10, 20]))
    assert shape(jitter) == [(0, 10, 10), (10, 12, 20)]
    assert jitter.faults == ()
    hole = power_steps(power([0, 1, 12, 100], [10, 20, 30, 40]))
    assert shape(hole) == [(0, 1, 10), (1, 3, 20), (12, 14, 30), (100, 102, 40)]
    assert hole.faults == ("cpu:0: no reading for 95 s in 2 hole(s), energy there not counted",)


def test_a_missing_power_reading_is_a_gap_to_the_next() -> None:
    assert shape(power_steps(power([0, 1, 2, 3], [10, NAN, 30, 40]))) == [(0, 1, 10), (2, 3, 30), (3, 5, 40)]
    assert shape(power_steps(power([0, 1], [10, NAN]))) == [(0, 1, 10)]
    assert shape(power_steps(power([0], [NAN]))) == []


def test_an_average_belongs_to_the_time_before_it() -> None:
    steps = power_steps(average([10, 11, 12], [100, 200, 300], window_s=1.0))
    assert shape(steps) == [(9.5, 10.5, 100), (10.5, 11.5, 200), (11.5, 13.5, 300)]


def test_a_counter_difference_belongs_to_the_interval_that_ended_with_it() -> None:
    assert shape(power_steps(counter([0, 1, 3], [5, 15, 25]))) == [(0, 1, 10), (1, 3, 5)]


def test_a_counter_is_never_extrapolated() -> None:
    assert len(power_steps(counter([0], [5]))) == 0
    assert len(power_steps(counter([], []))) == 0
    assert len(power_steps(power([], []))) == 0


def test_a_repeated_counter_reading_was_not_yet_updated() -> None:
    steps = power_steps(counter([0, 1, 2, 3, 4, 5], [0, 0, 20, 20, 20, 50]))
    assert shape(steps) == [(0, 2, 10), (2, 5, 10)]
    trailing = power_steps(counter([0, 1, 2, 3], [0, 10, 10, 10]))
    assert shape(trailing) == [(0, 1, 10)]
    assert shape(power_steps(counter([0, 1, 2], [7, 7, 7]))) == []


def test_a_missing_counter_reading_is_bridged() -> None:
    assert shape(power_steps(counter([0, 1, 2], [0, NAN, 20]))) == [(0, 2, 10)]


def test_a_wrap_is_undone_on_the_difference() -> None:
    steps = power_steps(counter([0, 1, 2, 3], [80, 90, 5, 15], wrap_j=100.0))
    assert shape(steps) == [(0, 1, 10), (1, 2, 15), (2, 3, 10)]
    assert steps.faults == ()
    assert shape(power_steps(counter([0, 1], [95, 5], wrap_j=100.0))) == [(0, 1, 10)]


def test_a_counter_that_does_not_wrap_was_reset() -> None:
    steps = power_steps(counter([0, 1, 2, 3], [80, 90, 5, 15]))
    assert shape(steps) == [(0, 1, 10), (2, 3, 10)]
    assert steps.faults == ("cpu:0 package: the counter ran backwards (a reset); 1 interval(s) left out",)


def test_a_reset_is_not_mistaken_for_a_wrap() -> None:
    readings = [1000.0, 1010.0, 1020.0, 3.0, 13.0]
    steps = power_steps(counter(range(5), readings, wrap_j=262144.0))
    assert shape(steps) == [(0, 1, 10), (1, 2, 10), (3, 4, 10)]
    assert "ran backwards by more than a wrap explains" in steps.faults[0]
    below = power_steps(counter([0, 1, 2], [880, 890, 0], wrap_j=990.0))
    assert shape(below) == [(0, 1, 10), (1, 2, 100)], "ten times the power seen may still be a wrap"
    above = power_steps(counter([0, 1, 2], [880, 890, 0], wrap_j=990.5))
    assert shape(above) == [(0, 1, 10)]


def test_the_power_limit_of_the_device_settles_what_a_wrap_may_be() -> None:
    readings = [880.0, 890.0, 0.0]
    assert shape(power_steps(counter(range(3), readings, wrap_j=990.0, max_w=99.0))) == [(0, 1, 10)]
    assert len(shape(power_steps(counter(range(3), readings, wrap_j=2000.0, max_w=1110.0)))) == 2
    alone = counter([0, 1], [100.0, 3.0], wrap_j=262144.0, max_w=500.0)
    assert shape(power_steps(alone)) == []


def test_a_counter_lower_than_its_range_allows_is_a_reset() -> None:
    steps = power_steps(counter([0, 1, 2], [0, 300, 100], wrap_j=100.0))
    assert shape(steps) == [], "a jump over the range itself cannot be distinguished from several wraps"


def test_a_pause_long_enough_for_two_wraps_is_a_gap() -> None:
    steps = power_steps(counter([0, 1, 11, 12], [0, 10, 40, 50], wrap_j=100.0))
    assert shape(steps) == [(0, 1, 10), (11, 12, 10)], "at 10 W ten seconds fill the range of 100 J"
    assert "may have wrapped more than once" in steps.faults[0]
    shorter = power_steps(counter([0, 1, 10, 11], [0, 10, 40, 50], wrap_j=100.0))
    assert shape(shorter)[1] == (1, 10, 30 / 9)
    limited = power_steps(counter([0, 1, 5, 6], [0, 10, 40, 50], wrap_j=100.0, max_w=25.0))
    assert shape(limited) == [(0, 1, 10), (5, 6, 10)]


def test_a_reset_in_a_long_pause_is_reported_once() -> None:
    steps = power_steps(counter([0, 1, 100], [50, 90, 5], wrap_j=100.0, max_w=50.0))
    assert len(steps.faults) == 1
    assert "more than once" in steps.faults[0]


def test_power_at_a_time() -> None:
    steps = power_steps(power([0, 1, 2], [10, NAN, 30]))
    assert steps.at([0, S - 1, 2 * S, 4 * S - 1]).tolist() == [10, 10, 30, 30]
    assert np.isnan(steps.at([-1, S, 2 * S - 1, 4 * S, 10 * S])).all()
    assert np.isnan(PowerSteps(CHANNEL, [], []).at(0)).all()


def test_the_part_below_a_limit() -> None:
    steps = power_steps(power([0, 1, 2], [10, NAN, 30])).capped(20.0)
    assert shape(steps) == [(0, 1, 10), (2, 4, 20)]


def test_energy_by_bin_counts_overlaps() -> None:
    steps = PowerSteps(CHANNEL, [0, S, 2 * S, 4 * S], [10.0, NAN, 30.0])
    bins = np.array([-S, 0, S // 2, 3 * S, 3 * S, 9 * S])
    energy_j, covered_s = energy_by_bin(steps, bins)
    assert energy_j.tolist() == [0, 5, 35, 0, 30]
    assert covered_s.tolist() == [0, 0.5, 1.5, 0, 1]


@pytest.mark.parametrize("bins", [[5, 9], [-9, -5], [-9, 0], [4, 9], [3], []])
def test_bins_outside_the_steps_hold_nothing(bins: list[int]) -> None:
    energy_j, covered_s = energy_by_bin(PowerSteps(CHANNEL, [0, 4], [1e9]), np.array(bins, np.int64))
    assert energy_j.tolist() == covered_s.tolist() == [0.0] * max(0, len(bins) - 1)
    empty = energy_by_bin(PowerSteps(CHANNEL, [], []), np.array(bins, np.int64))
    assert empty[0].tolist() == energy_j.tolist()


def test_many_steps_in_few_bins_and_few_steps_in_many_bins() -> None:
    count = 300_000
    steps = PowerSteps(CHANNEL, np.arange(count + 1) * S, np.arange(count, dtype=np.float64))
    energy_j, covered_s = energy_by_bin(steps, np.array([0, 131072, 131073, 262145, count]) * S)
    sums = [131072 * 131071 / 2, 131072.0]
    assert energy_j.tolist()[:2] == sums
    assert float(energy_j.sum()) == count * (count - 1) / 2
    assert covered_s.tolist() == [131072, 1, 131072, count - 262145]
    single = energy_by_bin(PowerSteps(CHANNEL, [0, 1000 * S], [2.0]), np.arange(1001) * S)
    assert single[0].tolist() == [2.0] * 1000


@pytest.mark.parametrize(("edges", "watts"), [([0, 1], []), ([0, 0], [1.0]), ([0], []), ([[0, 1]], [1.0])])
def test_steps_that_do_not_fit_are_refused(edges: list[int], watts: list[float]) -> None:
    with pytest.raises(DataError):
        PowerSteps(CHANNEL, edges, watts)


def test_steps_are_read_only() -> None:
    steps = PowerSteps(CHANNEL, [0, 1], [1.0])
    with pytest.raises(ValueError, match="read-only"):
        steps.watts[0] = 2.0


def test_seconds_become_the_nearest_nanosecond() -> None:
    assert to_ns(1_700_000_000.5).tolist() == 1_700_000_000_500_000_000
    assert to_ns([-0.25, 0.1]).tolist() == [-250_000_000, 100_000_000]
    for nonsense in (NAN, math.inf, 1e10, [0.0, -1e10]):
        with pytest.raises(DataError, match="expected Unix seconds"):
            to_ns(nonsense)
