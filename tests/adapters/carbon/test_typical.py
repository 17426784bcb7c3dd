import json
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.carbon.file import read_carbon_file
from joulery.adapters.carbon.stated import TypicalDay, typical_table
from joulery.adapters.carbon.timestamps import instant_s
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality
from tests.data_folder import data_folder

ROOT = Path(__file__).parents[3]


def test_the_resource_cites_its_source() -> None:
    assert "Let's Wait Awhile" in typical_table()["source"]
    assert "ENTSO-E" in typical_table()["source"] and "IPCC" in typical_table()["source"]
    assert "MIT" in typical_table()["licence"]
    assert list(typical_table()["zones"]) == ["GB", "FR", "DE"]
    for months in typical_table()["zones"].values():
        values = np.array(months)
        assert values.shape == (12, 24)
        assert np.array_equal(values, np.round(values, 1)) and values.min() > 0


def test_each_hour_is_that_of_its_month_and_utc_hour() -> None:
    series = TypicalDay("DE").history(instant_s("2031-07-31T22:30Z"), instant_s("2031-08-01T01:30Z"))
    july, august = (typical_table()["zones"]["DE"][month] for month in (6, 7))
    assert series.start_s == instant_s("2031-07-31T22:00Z")
    assert series.g_per_kwh.tolist() == [july[22], july[23], august[0], august[1]]
    assert np.diff(series.edges_s).tolist() == [3600.0] * 4
    assert TypicalDay("DE").history(0.0, 0.0).g_per_kwh.tolist() == [typical_table()["zones"]["DE"][0][0]]


def test_it_is_labelled_assumed_and_estimated() -> None:
    series = TypicalDay("GB").history(0.0, 7200.0)
    assert (series.quality, series.signal, series.scope) == (Quality.ASSUMED, Signal.AVERAGE, Scope.LIFECYCLE)
    assert series.estimated.all() and "assumed typical day of 2020" in series.source
    forecast = TypicalDay("GB", now_s=lambda: 5.0).forecast(0.0, 7200.0)
    assert (forecast.issued_at_s, forecast.quality) == (5.0, Quality.ASSUMED)
    assert forecast.g_per_kwh.tolist() == series.g_per_kwh.tolist()


@pytest.mark.parametrize("zone", ["SE", "gb", ""])
def test_other_zones_are_refused(zone: str) -> None:
    with pytest.raises(ConfigError, match="no typical day") as caught:
        TypicalDay(zone)
    assert caught.value.expected == "GB, FR, DE"


def test_the_resource_is_what_the_tool_derives() -> None:
    tool = runpy.run_path(str(ROOT / "tools/typical_day.py"))
    assert tool["TARGET"].read_text() == tool["render"](data_folder("carbon"))
    assert json.loads(tool["TARGET"].read_text()) == typical_table()


def test_the_mean_of_the_typical_year_is_that_of_2020() -> None:
    begin, end = instant_s("2020-01-01T00:00Z"), instant_s("2021-01-01T00:00Z")
    for zone in ("GB", "FR", "DE"):
        real = read_carbon_file(data_folder("carbon") / f"{zone}_2020_letswaitawhile.csv")
        typical = TypicalDay(zone).history(begin, end)
        assert Counter(typical.estimated.tolist()) == {True: 8784}
        assert typical.mean(begin, end) == pytest.approx(real.mean(begin, end), abs=0.05)
