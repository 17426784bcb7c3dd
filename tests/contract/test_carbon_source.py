"""What every source of carbon intensity owes its callers, whichever it is."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from joulery.adapters.carbon.cache import Cached
from joulery.adapters.carbon.electricity_maps import ElectricityMaps
from joulery.adapters.carbon.file import SeriesSource
from joulery.adapters.carbon.fill import Filled
from joulery.adapters.carbon.replay import ReplayedCarbon
from joulery.adapters.carbon.stated import Stated, TypicalDay
from joulery.adapters.carbon.uk import UkCarbon
from joulery.adapters.carbon.watttime import WattTime
from joulery.domain.energy.carbon import CarbonSeries, FillRule
from joulery.domain.ports import CarbonSource
from joulery.domain.quality import Quality
from tests.adapters.carbon import test_electricity_maps, test_uk, test_watttime
from tests.adapters.carbon.local import served
from tests.fakes.carbon import Scripted

KINDS = ("file", "uk", "electricity-maps", "watttime", "typical", "stated", "replay", "scripted", "filled", "cached")
NOW = {"uk": test_uk.NOON, "electricity-maps": test_electricity_maps.NOW, "watttime": test_watttime.NOW}


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[CarbonSource, float]]:
    kind: str = request.param
    now_s = NOW.get(kind, 1_000_000_000.0)
    day = CarbonSeries("GB", now_s - 86400 + 3600.0 * np.arange(49), np.arange(48.0), source="a file")
    expected = CarbonSeries("GB", day.edges_s, day.g_per_kwh, source="a file", issued_at_s=day.start_s)
    with ExitStack() as stack:
        sources: dict[str, CarbonSource] = {
            "file": SeriesSource(day, expected),
            "typical": TypicalDay("GB", lambda: now_s),
            "stated": Stated(100.0, now_s=lambda: now_s),
            "replay": ReplayedCarbon(day, day.start_s, 7200.0, now_s - 7200, 600.0),
            "scripted": Scripted([[1.0, 2.0]]),
            "filled": Filled(SeriesSource(day, expected), FillRule()),
            "cached": Cached(SeriesSource(day, expected), tmp_path, 3600.0, now_s=lambda: now_s),
        }
        if kind == "uk":
            local = stack.enter_context(served(test_uk.api))
            sources[kind] = UkCarbon(service=local.service("UK", now_s))
        elif kind == "electricity-maps":
            local = stack.enter_context(served(test_electricity_maps.api))
            sources[kind] = ElectricityMaps("DE", "secret", service=local.service("EM", now_s))
        elif kind == "watttime":
            local = stack.enter_context(served(test_watttime.Api()))
            sources[kind] = WattTime("CAISO_NORTH", "ada", "lovelace", service=local.service("WT", now_s))
        yield sources[kind], now_s


def test_history_covers_what_was_asked(case: tuple[CarbonSource, float]) -> None:
    source, now_s = case
    for length_s in (5400.0, 600.0, 1.0):
        series = source.history(now_s - 5400, now_s - 5400 + length_s)
        assert series.start_s <= now_s - 5400 and series.end_s >= now_s - 5400 + length_s
        assert series.issued_at_s is None, "history is no forecast"
        assert series.covered_s(now_s - 5400, now_s - 5400 + length_s) == pytest.approx(length_s)
        assert series.zone and series.source


def test_a_forecast_says_when_it_was_issued_and_is_never_measured(case: tuple[CarbonSource, float]) -> None:
    source, now_s = case
    series = source.forecast(now_s, now_s + 5400)
    assert series.start_s <= now_s and series.end_s >= now_s + 5400
    assert series.issued_at_s is not None and series.issued_at_s <= now_s
    assert series.quality is not Quality.MEASURED


@pytest.mark.parametrize("case", [kind for kind in KINDS if kind != "scripted"], indirect=True)
def test_parts_of_an_interval_agree_with_the_whole(case: tuple[CarbonSource, float]) -> None:
    """A script answers each question by its own line: it is left out."""
    source, now_s = case
    begin_s, middle_s, end_s = now_s - 7000, now_s - 5000, now_s - 3700
    whole = source.history(begin_s, end_s)
    parts = source.history(begin_s, middle_s).integral(begin_s, middle_s) + source.history(middle_s, end_s).integral(
        middle_s, end_s
    )
    assert parts == pytest.approx(whole.integral(begin_s, end_s), rel=1e-12)
