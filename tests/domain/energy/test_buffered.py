"""A counter that is read seldom, with the shape of the power that its device buffered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.steps import energy_by_bin, power_steps
from joulery.domain.energy.buffered import refined
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.quality import Quality

S, MS = 10**9, 10**6
CHANNEL = Channel("gpu:0", "board", ReadingKind.COUNTER, "nvml", Quality.MEASURED, update_s=0.1)


def counter(times_s: list[float], joules: list[float]) -> PowerTrace:
    return PowerTrace(CHANNEL, [round(t * S) for t in times_s], joules, 0.5)


def square(until_s: float, step_ms: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """700 W in every first half of a second, 100 W in the second one."""
    t_ns = np.arange(0, round(until_s * 1000) + 1, step_ms) * MS
    return t_ns, np.where(t_ns // (500 * MS) % 2 == 0, 700.0, 100.0)


def energy(trace: PowerTrace, *edges_s: float) -> list[float]:
    return energy_by_bin(power_steps(trace), np.array([round(t * S) for t in edges_s]))[0].tolist()


def test_phases_shorter_than_the_distance_of_the_readings_are_distinguished() -> None:
    read = counter([0, 1, 2, 3], [1000, 1400, 1800, 2200])
    assert energy(read, 0, 0.5, 1.0) == pytest.approx([200, 200])
    fine = refined(read, *square(3.0))
    # A step of 600 W between two readings 20 ms apart is known to half of them: 6 J.
    assert energy(fine, 0, 0.5, 1.0, 1.5) == pytest.approx([350, 50, 350], abs=6.01)
    assert fine.period_s == fine.channel.update_s == 0.02
    assert fine.channel.kind is ReadingKind.COUNTER


def where_it_computed(late_ns: int) -> float:
    """Of what an H100 drew above idle, the share that stands where it computed: from 27.2 to 183.9 ms of this clock."""
    at_ms = [-6.7, 13.1, 33.2, 53.3, 76.7, 93.2, 113.2, 133.3, 153.2, 176.2, 193.2, 213.1, 233.1, 253.0]
    watts = np.array([131, 131, 211, 479, 529, 532, 562, 546, 570, 571, 420, 199, 151, 140])
    t_ns = np.array([round((at + 100) * MS) for at in at_ms])
    whole_j = float(np.sum(np.diff(t_ns) / 1e9 * watts[1:]))
    read = PowerTrace(CHANNEL, t_ns[[0, -1]], [0.0, whole_j], 0.5)
    before, during, after = energy(refined(read, t_ns, watts, late_ns), 0.0933, 0.1272, 0.2839, 0.3530)
    above = [before - 131 * 0.0339, during - 131 * 0.1567, after - 131 * 0.0691]
    return above[1] / sum(above)


def test_what_a_board_drew_above_idle_stands_where_it_computed() -> None:
    assert where_it_computed(0) < 0.89 < 0.92 < where_it_computed(16 * MS)


def test_the_energy_is_the_counters() -> None:
    t_ns, watts = square(3.0)
    fine = refined(counter([0, 1.5, 3], [0, 700, 1500]), t_ns, 1.3 * watts)
    assert (fine.values[0], fine.values[-1]) == (0, 1500)
    assert sum(energy(fine, 0, 0.7, 2.2, 3.0)) == pytest.approx(1500)


@given(
    st.lists(st.floats(1, 900), min_size=5, max_size=200),
    st.floats(0.6, 1.8),
    st.lists(st.integers(1, 40_000), min_size=1, max_size=8, unique=True),
)
def test_it_never_falls_and_keeps_what_was_read_every_ten_seconds(
    watts: list[float], factor: float, more_ms: list[int]
) -> None:
    t_ns = np.arange(len(watts)) * 200 * MS
    edges = np.concatenate([[-100 * MS], t_ns[:-1] + 100 * MS, [t_ns[-1] + 100 * MS]])
    joules = np.concatenate([[0.0], np.cumsum(np.diff(edges) / 1e9 * np.array(watts))])
    end = int(t_ns[-1])
    stamps = np.array(sorted({0, end, *(at * MS for at in more_ms if 0 < at * MS < end)}))
    read = PowerTrace(CHANNEL, stamps, factor * np.interp(stamps, edges, joules), 0.5)
    fine = refined(read, t_ns, np.array(watts))
    assert (np.diff(fine.values) >= -1e-9).all()
    assert fine.values[0] == read.values[0] and fine.values[-1] == pytest.approx(read.values[-1], rel=1e-12)
    np.testing.assert_allclose(np.interp(fine.t_ns, edges, factor * joules), fine.values, rtol=1e-9, atol=1e-6)


def parts_off(late_ns: int) -> float:
    """Error of the joules of parts of 35 to 45 ms, weighted by energy: readings of an H100, each the mean of 35 ms."""
    power = np.tile(np.repeat([650.0, 400.0, 550.0], [45, 35, 40]), 40)  # one value a millisecond
    joules = np.concatenate([[0.0], np.cumsum(power / 1e3)])
    at_ms = np.arange(len(joules))
    stamps_ms = np.arange(40.0, len(power) - 10, 19.995)
    ends_ms = np.stack([stamps_ms - 33.5, stamps_ms + 1.5])
    watts = np.diff(np.interp(ends_ms, at_ms, joules), axis=0)[0] / 0.035
    whole = counter([0, len(power) / 1e3], [0, float(joules[-1])])
    fine = refined(whole, (stamps_ms * MS).astype(np.int64), watts, late_ns)
    starts_ms = np.arange(120, len(power) - 120, 120)
    edges = np.sort(np.concatenate([starts_ms, starts_ms + 45, starts_ms + 80, [starts_ms[-1] + 120]])) * MS
    found = energy_by_bin(power_steps(fine), edges)[0].reshape(-1, 3).sum(0)
    true = np.array([29.25, 14.0, 22.0]) * len(starts_ms)
    return float(np.abs(found - true).sum() / true.sum())


def test_a_reading_stands_for_the_time_that_it_averages_not_for_its_stamp() -> None:
    assert parts_off(16 * MS) < 0.07 < 0.1 < parts_off(0)


def test_a_hole_in_the_buffer_leaves_the_counters_own_readings() -> None:
    t_ns, watts = square(30.0)
    there = (t_ns < 12 * S) | (t_ns > 18 * S)
    times = [float(at) for at in range(31)]
    fine = refined(counter(times, [400 * at for at in times]), t_ns[there], watts[there])
    inside = (fine.t_ns > 12 * S) & (fine.t_ns < 18 * S)
    assert (fine.t_ns[inside] % S == 0).all() and inside.sum() == 5
    assert energy(fine, 5, 5.5) == pytest.approx([350], rel=0.03)
    assert energy(fine, 0, 30) == pytest.approx([12_000])


@pytest.mark.parametrize("ratio", [0.3, 3.0])
def test_power_of_something_else_changes_nothing(ratio: float) -> None:
    t_ns, watts = square(3.0)
    read = counter([0, 3], [0, 1200])
    assert refined(read, t_ns, ratio * watts) is read
    assert refined(read, t_ns[:3], watts[:3]) is read
    assert refined(counter([0], [5.0]), t_ns, watts).values.tolist() == [5.0]


def test_missing_readings_and_a_counter_that_began_again_stay() -> None:
    t_ns, watts = square(3.0)
    torn = counter([0, 0.5, 1, 3], [float("nan"), 10, 65, float("nan")])
    fine = refined(torn, t_ns, watts)
    assert np.isnan(fine.values[[0, -1]]).all()
    assert len(fine) > 20
    fallen = counter([0, 3], [500, 20])
    assert refined(fallen, t_ns, watts) is fallen
