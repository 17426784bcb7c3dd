"""Clocks of devices whose own curves are not known."""

from __future__ import annotations

import numpy as np
import pytest

from joulery.domain.errors import ConfigError
from joulery.perf.power.clock_curves import V100
from joulery.perf.power.clock_scaling import above_idle_ratio, scaled_knee_mhz, slowdown_ratio, tail_s


def test_time_follows_the_clock_as_far_as_the_work_feels_it() -> None:
    assert slowdown_ratio([800.0, 1600.0]).tolist() == [2.0, 1.0]
    assert slowdown_ratio([800.0, 1600.0], 0.5).tolist() == [1.5, 1.0]
    assert slowdown_ratio([800.0, 1600.0], 0.0).tolist() == [1.0, 1.0]


def test_energy_of_the_same_work_falls_to_the_knee_and_rises_below() -> None:
    clocks = np.linspace(200.0, 1380.0, 60)
    energy = above_idle_ratio(clocks) * slowdown_ratio(clocks)
    least = float(clocks[int(np.argmin(energy))])
    assert abs(least - V100.knee_mhz) < 25
    assert energy[-1] == pytest.approx(1.0)


def test_the_curve_is_stretched_over_another_chips_clocks() -> None:
    assert scaled_knee_mhz(2760.0) == pytest.approx(2 * V100.knee_mhz)
    doubled = above_idle_ratio([400.0, 1000.0, 2760.0])
    assert doubled == pytest.approx(above_idle_ratio([200.0, 500.0, 1380.0]))


def test_the_tail_is_that_of_a_queue() -> None:
    """M/M/1 with service 1 s at 50 %: P(wait > t) = 0.5 exp(-t/2), so its 95th percentile is 2 ln 10."""
    assert tail_s([1.0], [0.0], 0.5, 1, 0.95)[0] == pytest.approx(2 * np.log(10.0))
    assert tail_s([1.0], [3.0], 0.5, 1, 0.95)[0] == pytest.approx(3 + 2 * np.log(10.0))
    assert tail_s([1.0], [3.0], 0.0, 1, 0.95)[0] == 3.0
    assert tail_s([2.0], [0.0], 0.5, 2, 0.95)[0] == pytest.approx(2 * np.log(10.0))
    assert tail_s([0.96, 0.5], [1.0, 1.0], 1.0, 1, 0.95)[0] == np.inf
    assert tail_s([0.1], [1.0], 0.1, 1, 0.95)[0] == 1.0
    with pytest.raises(ConfigError):
        tail_s([1.0], [1.0], 1.0, 0, 0.95)
