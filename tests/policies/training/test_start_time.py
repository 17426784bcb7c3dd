"""The best start of a job: never worse than now, and no start of a fine grid beats it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import DataError
from joulery.policies.training.start_time import best_start

HOUR = 3600.0


def series(*values: float, start_s: float = 0.0) -> CarbonSeries:
    edges = start_s + HOUR * np.arange(len(values) + 1)
    return CarbonSeries("GB", edges, values, source="a forecast", issued_at_s=0.0)


def test_the_window_with_the_least_mean() -> None:
    best = best_start(series(300, 200, 100, 100, 400), 0.0, 2 * HOUR, 5 * HOUR)
    assert (best.start_s, best.g_per_kwh, best.now_g_per_kwh) == (2 * HOUR, 100.0, 250.0)
    assert best.worst_g_per_kwh == 250.0
    assert best.saving_ratio == pytest.approx(0.6)
    assert best.judged_until_s == 5 * HOUR


def test_the_earliest_of_equals_and_now_where_nothing_is_better() -> None:
    assert best_start(series(100, 100, 100), 600.0, HOUR, 2 * HOUR).start_s == 600.0
    rising = best_start(series(100, 200, 300), 0.0, HOUR, 3 * HOUR)
    assert (rising.start_s, rising.saving_ratio) == (0.0, 0.0)


def test_a_job_must_end_within_the_time() -> None:
    assert best_start(series(300, 200, 10), 0.0, HOUR, 2.5 * HOUR).start_s == 1.5 * HOUR
    for duration_s in (0.0, -1.0, 4 * HOUR, math.nan):
        with pytest.raises(DataError):
            best_start(series(300, 200, 10), 0.0, duration_s, 3 * HOUR)


def test_what_a_forecast_does_not_cover_is_not_judged() -> None:
    best = best_start(series(300, 200), 0.0, HOUR, 24 * HOUR)
    assert (best.start_s, best.judged_until_s) == (HOUR, 2 * HOUR)
    gap = best_start(series(300, math.nan, 100, 50), 0.0, HOUR, 4 * HOUR)
    assert (gap.start_s, gap.g_per_kwh) == (3 * HOUR, 50.0)
    with pytest.raises(DataError):
        best_start(series(math.nan, 100), 0.0, HOUR, 2 * HOUR)
    with pytest.raises(DataError):
        best_start(series(100, start_s=HOUR), 0.0, HOUR, 2 * HOUR)


def test_a_grid_without_carbon_now_saves_nothing() -> None:
    assert best_start(series(0, 0), 0.0, HOUR, 2 * HOUR).saving_ratio == 0.0


@given(
    st.lists(st.floats(1, 900), min_size=1, max_size=24),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.lists(st.floats(0, 1), max_size=20),
)
def test_no_other_start_is_better(values: list[float], length: float, room: float, others: list[float]) -> None:
    end_s = len(values) * HOUR
    within_s = room * end_s
    duration_s = length * within_s
    grid = series(*values)
    best = best_start(grid, 0.0, duration_s, within_s)
    assert best.g_per_kwh <= best.now_g_per_kwh * (1 + 1e-9)
    assert best.start_s >= 0.0 and best.start_s + duration_s <= within_s * (1 + 1e-9)
    for ratio in others:
        start_s = ratio * (within_s - duration_s)
        assert best.g_per_kwh <= grid.mean(start_s, start_s + duration_s) * (1 + 1e-9)
