import math

import numpy as np
import pytest

from joulery.adapters.carbon.fill import FilePlace, Filled, complete
from joulery.domain.energy.carbon import CarbonSeries, Fill, FillRule
from joulery.domain.errors import CapabilityError, DataError, StaleDataError
from tests.fakes.carbon import Scripted

NAN = math.nan


def series(values: list[float]) -> CarbonSeries:
    return CarbonSeries("GB", 3600.0 * np.arange(len(values) + 1), values, source="test")


def filled(values: list[float], rule: str, t0_h: float = 0.0, t1_h: float | None = None) -> list[float]:
    s = series(values)
    end_s = s.end_s if t1_h is None else 3600 * t1_h
    found = complete(s, 3600 * t0_h, end_s, FillRule.parse(rule))
    gaps = np.isnan(s.g_per_kwh) & ~np.isnan(found.g_per_kwh)
    assert found.estimated.tolist() == gaps.tolist()
    return found.g_per_kwh.tolist()


def test_a_complete_series_stays_as_it_is() -> None:
    for rule in ("error", "gap", "forecast", "previous:1h", "linear:1h"):
        assert filled([1.0, 2.0], rule) == [1.0, 2.0]


def test_a_gap_is_refused_unless_the_user_chose() -> None:
    with pytest.raises(DataError, match="GB from 1970-01-01T01:00:00Z to 1970-01-01T03:00:00Z") as caught:
        filled([1.0, NAN, NAN, 4.0], "error")
    assert not isinstance(caught.value, StaleDataError)
    assert "previous:3h" in caught.value.hint
    with pytest.raises(DataError):
        filled([1.0, NAN, 2.0], "forecast")


def test_values_that_end_too_early_are_stale() -> None:
    with pytest.raises(StaleDataError, match="the newest value ends at 1970-01-01T02:00:00Z"):
        filled([1.0, 2.0, NAN, NAN], "error")
    with pytest.raises(StaleDataError):
        filled([1.0, NAN], "linear:9h")
    with pytest.raises(DataError) as nothing_at_all:
        filled([NAN, NAN], "error")
    assert not isinstance(nothing_at_all.value, StaleDataError)


def test_the_error_names_the_place() -> None:
    with pytest.raises(StaleDataError, match=r"^f\.csv:9: ") as caught:
        complete(series([1.0, NAN]), 0.0, 7200.0, FillRule(), place=lambda step: FilePlace("f.csv", 8 + step))
    assert (caught.value.file, caught.value.row) == ("f.csv", 9)


def test_a_gap_may_be_kept() -> None:
    kept = filled([1.0, NAN, NAN], "gap")
    assert kept[0] == 1.0 and all(map(math.isnan, kept[1:]))


def test_previous_repeats_over_at_most_its_length() -> None:
    assert filled([1.0, NAN, NAN, 4.0, NAN], "previous:2h") == [1.0, 1.0, 1.0, 4.0, 4.0]
    with pytest.raises(DataError, match="from 1970-01-01T01:00:00Z") as caught:
        filled([1.0, NAN, NAN, 4.0], "previous:119min")
    assert "previous:7140s does not bridge it" in caught.value.hint
    with pytest.raises(DataError):
        filled([NAN, 2.0], "previous:9h")


def test_linear_runs_between_the_middles_of_the_known_steps() -> None:
    assert filled([1.0, NAN, NAN, 4.0], "linear:2h") == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(DataError):
        filled([1.0, NAN, NAN, 4.0], "linear:1.9h")
    with pytest.raises(DataError):
        filled([NAN, 2.0], "linear:9h")


def test_linear_over_steps_of_unequal_length() -> None:
    uneven = CarbonSeries("GB", [0.0, 2.0, 3.0, 7.0], [10.0, NAN, 50.0], source="test")
    middle = complete(uneven, 0.0, 7.0, FillRule(Fill.LINEAR, 60.0)).g_per_kwh[1]
    assert middle == pytest.approx(10 + 40 * (2.5 - 1) / (5 - 1))


def test_only_gaps_that_meet_the_interval_count() -> None:
    values = [NAN, 1.0, 2.0, NAN]
    found = complete(series(values), 3600.0, 3 * 3600.0, FillRule())
    assert found.g_per_kwh[1:3].tolist() == [1.0, 2.0]
    assert math.isnan(found.g_per_kwh[0]) and math.isnan(found.g_per_kwh[3])
    with pytest.raises(DataError):
        complete(series(values), 3599.0, 3 * 3600.0, FillRule())
    with pytest.raises(StaleDataError):
        complete(series(values), 3600.0, 3 * 3600.0 + 1, FillRule())


def test_a_filled_source_completes_history_and_leaves_forecasts_alone() -> None:
    source = Filled(Scripted([[1.0, NAN, 3.0]]), FillRule.parse("linear:1h"))
    assert source.history(0.0, 10800.0).g_per_kwh.tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(source.forecast(0.0, 10800.0).g_per_kwh).tolist() == [False, True, False]
    with pytest.raises(CapabilityError):
        Filled(Scripted([CapabilityError("no")]), FillRule()).history(0.0, 1.0)
