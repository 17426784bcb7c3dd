import numpy as np
import pytest

from joulery.adapters.carbon.replay import ReplayedCarbon
from joulery.domain.energy.carbon import CarbonSeries, Scope
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from tests.fakes.carbon import Scripted

DAY = CarbonSeries(
    "GB", np.arange(25) * 3600.0, np.arange(24.0), scope=Scope.DIRECT, source="day", estimated=np.arange(24) % 2 == 0
)


def replay(**changes: float) -> ReplayedCarbon:
    return ReplayedCarbon(DAY, **{"from_s": 0.0, "span_s": 86400.0, "begins_s": 1000.0, "duration_s": 96.0, **changes})  # type: ignore[arg-type]


def test_a_day_passes_in_seconds() -> None:
    series = replay().history(1000.0, 1096.0)
    assert series.edges_s == pytest.approx(1000 + 4.0 * np.arange(25))
    assert series.g_per_kwh.tolist() == list(range(24))
    assert series.estimated.tolist() == DAY.estimated.tolist()
    assert series.at([1000.0, 1003.9, 1004.1, 1095.9]).tolist() == [0, 0, 1, 23]
    assert (series.zone, series.scope, series.quality, series.issued_at_s) == (
        "GB",
        Scope.DIRECT,
        Quality.ASSUMED,
        None,
    )
    assert series.source == "day, 24 h replayed in 96 s"


def test_after_its_end_it_begins_again() -> None:
    series = replay().history(1090.0, 1296.0)
    assert series.at([1095.0, 1096.5, 1191.9, 1192.1, 1295.0]).tolist() == [23, 0, 23, 0, 1]
    assert not np.isnan(series.g_per_kwh).any()
    assert replay().history(1000.0 + 96e6, 1004.0 + 96e6).g_per_kwh[0] == 0


def test_before_its_beginning_nothing_is_known() -> None:
    series = replay().history(900.0, 1004.0)
    assert np.isnan(series.at(999.0)[0]) and series.at(1000.0)[0] == 0
    assert np.isnan(replay().history(100.0, 200.0).g_per_kwh).all()


def test_a_stretch_that_begins_inside_a_step() -> None:
    series = replay(from_s=1800.0, span_s=7200.0, duration_s=4.0).history(1000.0, 1004.0)
    assert series.edges_s == pytest.approx([1000.0, 1001.0, 1003.0, 1004.0])
    assert series.g_per_kwh.tolist() == [0.0, 1.0, 2.0]


def test_the_forecast_is_without_error_and_says_so() -> None:
    series = replay().forecast(1000.0, 1096.0)
    assert series.issued_at_s == 1000.0
    assert "forecast without error" in series.source
    assert series.g_per_kwh.tolist() == list(range(24))


@pytest.mark.parametrize("changes", [{"span_s": 0.0}, {"duration_s": -1.0}, {"from_s": -1.0}, {"from_s": 1.0}])
def test_replays_that_cannot_be(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replay(**changes)


def test_a_script_answers_in_order_and_repeats_its_last_line() -> None:
    source = Scripted([[1.0, 2.0], DataError("gone"), [3.0]], zone="X")
    first = source.history(0.0, 10.0)
    assert (first.edges_s.tolist(), first.g_per_kwh.tolist(), first.zone) == ([0.0, 5.0, 10.0], [1.0, 2.0], "X")
    assert first.quality is Quality.ASSUMED
    with pytest.raises(DataError, match="gone"):
        source.history(10.0, 20.0)
    assert source.forecast(20.0, 30.0).issued_at_s == 20.0
    assert source.history(30.0, 40.0).g_per_kwh.tolist() == [3.0]
    assert source.asked == [("history", 0, 10), ("history", 10, 20), ("forecast", 20, 30), ("history", 30, 40)]
