import math

import numpy as np
import pytest

from joulery.adapters.carbon.series import Meaning, Reading, assemble, window
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality

NAN = math.nan
MEANING = Meaning("GB", Signal.AVERAGE, Scope.DIRECT, "test", Quality.MODELLED)


def shown(series: CarbonSeries) -> tuple[list[float], list[float | None]]:
    return series.edges_s.tolist(), [None if math.isnan(value) else value for value in series.g_per_kwh.tolist()]


def test_readings_in_any_order_become_a_series() -> None:
    found = assemble([Reading(10, 20, 2.0, True), Reading(0, 10, 1.0)], 0, 20, MEANING, step_s=10, issued_at_s=5.0)
    assert shown(found) == ([0, 10, 20], [1.0, 2.0])
    assert found.estimated.tolist() == [False, True]
    assert (found.zone, found.signal, found.scope, found.source) == ("GB", Signal.AVERAGE, Scope.DIRECT, "test")
    assert (found.quality, found.issued_at_s) == (Quality.MODELLED, 5.0)


def test_time_without_a_reading_is_cut_into_unknown_steps() -> None:
    found = assemble([Reading(30, 40, 3.0)], 5, 60, MEANING, step_s=10)
    assert shown(found) == ([5, 10, 20, 30, 40, 50, 60], [None, None, None, 3.0, None, None])
    assert shown(assemble([], 0, 20, MEANING, step_s=10)) == ([0, 10, 20], [None, None])


def test_an_interval_of_no_length_is_answered_with_the_step_it_lies_in() -> None:
    assert shown(assemble([Reading(0, 10, 1.0)], 5, 5, MEANING, step_s=10)) == ([0, 10], [1.0])
    assert shown(assemble([], 5, 5, MEANING, step_s=10)) == ([5, 10], [None])


def test_readings_elsewhere_are_dropped() -> None:
    readings = [Reading(start, start + 10, float(start)) for start in range(0, 100, 10)]
    assert shown(assemble(readings, 25, 40, MEANING, step_s=10)) == ([20, 30, 40], [20.0, 30.0])


def test_a_step_two_answers_repeat_counts_once() -> None:
    found = assemble(
        [Reading(0, 10, 1.0), Reading(0, 10, 1.0), Reading(10, 20, NAN), Reading(10, 20, NAN)],
        0,
        20,
        MEANING,
        step_s=10,
    )
    assert shown(found) == ([0, 10, 20], [1.0, None])


def test_contradictions_are_refused() -> None:
    with pytest.raises(DataError, match=r"1970-01-01T00:00:00Z: 1\.0 and 2\.0"):
        assemble([Reading(0, 10, 1.0), Reading(0, 10, 2.0)], 0, 10, MEANING, step_s=10)
    with pytest.raises(DataError, match="steps overlap at 1970-01-01T00:00:05Z"):
        assemble([Reading(0, 10, 1.0), Reading(5, 15, 2.0)], 0, 20, MEANING, step_s=10)
    with pytest.raises(DataError, match="before it starts"):
        assemble([Reading(10, 10, 1.0)], 0, 20, MEANING, step_s=10)
    with pytest.raises(DataError, match="asked for 1970-01-01T00:00:20Z to 1970-01-01T00:00:10Z"):
        assemble([], 20, 10, MEANING, step_s=10)


def test_a_window_of_a_series_keeps_what_it_means() -> None:
    series = CarbonSeries(
        "FR", np.arange(4) * 10.0, [1.0, NAN, 3.0], scope=Scope.DIRECT, source="s", issued_at_s=7.0, estimated=[1, 0, 1]
    )
    part = window(series, 12, 45, step_s=10)
    assert shown(part) == ([10, 20, 30, 40, 45], [None, 3.0, None, None])
    assert part.estimated.tolist() == [False, True, False, False]
    assert (part.zone, part.scope, part.source, part.issued_at_s) == ("FR", Scope.DIRECT, "s", 7.0)
    assert part.quality is Quality.MODELLED
