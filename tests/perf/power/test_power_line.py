import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.power.power_line import fit_power_line

cores = np.array([0.1, 0.9, 1.8, 1.1])


@given(st.floats(0.5, 300), st.floats(0.5, 30))
def test_a_line_is_found_again(idle_w, active_w):
    line = fit_power_line(cores, idle_w + active_w * cores)
    assert line.idle_w == pytest.approx(idle_w, rel=1e-6)
    assert line.active_w == pytest.approx(active_w, rel=1e-6)
    assert line.residual_ratio < 1e-9 and line.points == 4


def test_a_known_idle_power_is_kept():
    line = fit_power_line(cores, 10 + 5 * cores, idle_w=9.0)
    assert line.idle_w == 9.0 and line.active_w > 5.0 and line.residual_ratio > 0.01
    assert fit_power_line(cores, 10 + 5 * cores, idle_w=10.0).active_w == pytest.approx(5.0)


def test_noise_is_reported():
    noisy = 10 + 5 * cores + np.array([1, -1, 1, -1])
    assert 0.01 < fit_power_line(cores, noisy).residual_ratio < 0.1


def test_missing_intervals_are_left_out():
    gap = np.array([np.nan, 14.5, 19.0, 15.5])
    assert fit_power_line(cores, gap).points == 3
    with pytest.raises(DataError, match="fewer than two"):
        fit_power_line(cores[:1], gap[1:2])


@pytest.mark.parametrize("watts", [np.full(4, 50.0), 50 - cores])
@pytest.mark.parametrize("idle_w", [float("nan"), 60.0])
def test_power_that_does_not_follow_the_load_is_refused(watts, idle_w):
    with pytest.raises(DataError, match="does not rise") as caught:
        fit_power_line(cores, watts, idle_w=idle_w)
    assert "--meter" in caught.value.hint
    with pytest.raises(DataError, match="does not rise"):
        fit_power_line(np.ones(4), np.arange(4.0))


def test_work_too_short_to_be_seen_says_so():
    with pytest.raises(DataError, match=r"no core .*busy in 4 intervals") as caught:
        fit_power_line(np.zeros(4), np.full(4, 20.0), idle_w=20.0)
    assert "--runs" in caught.value.hint


@given(st.floats(0.5, 300), st.floats(0.5, 30), st.floats(0.0, 0.3))
def test_idle_power_is_not_below_what_was_watched_with_no_core_busy(idle_w, active_w, late_ratio):
    """A part of each interval's work is counted one interval late, as on a machine that others keep busy."""
    ran = np.array([0.0, 0.0, 2.0, 0.4, 2.0, 0.4, 2.0])
    counted = ran + late_ratio * (np.roll(ran, 1) - ran)
    counted[:2] = 0.0
    assert fit_power_line(counted, idle_w + active_w * ran).idle_w >= idle_w * (1 - 1e-12)


def test_a_tilted_line_is_held_to_idle_power():
    counted, watts = np.array([0.0, 0.0, 0.5, 0.2, 0.1]), np.array([50.0, 50.0, 250.0, 60.0, 51.0])
    line = fit_power_line(counted, watts)
    assert line.idle_w == 50.0 and line.active_w == pytest.approx((0.5 * 200 + 0.2 * 10 + 0.1 * 1) / 0.3)
    assert fit_power_line(counted[2:], watts[2:]).idle_w < 50.0, "where every interval has work, the line says it"
