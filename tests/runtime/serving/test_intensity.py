import math

import numpy as np
import pytest

from joulery.adapters.carbon.replay import Scripted
from joulery.app.wiring.carbon import carbon_source
from joulery.config.carbon import CarbonConstant, CarbonFile, CarbonTypical, CarbonUk, ReplayConfig
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import DataError
from joulery.domain.serving.timeline import CarbonBasis
from joulery.runtime.serving.intensity import ASK_AGAIN_S, LiveIntensity, held

DAY_S = 1_602_633_600.0  # 2020-10-14T00:00Z


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def typical(clock: Clock) -> LiveIntensity:
    section = CarbonTypical(kind="typical", zone="GB", replay=ReplayConfig(day="2020-10-14", duration=96.0))
    return LiveIntensity(section, lambda config: carbon_source(config, None, now_s=clock), clock)


async def test_a_typical_day_played_back_from_the_beginning_and_again():
    clock = Clock()
    grid = typical(clock)
    assert math.isnan(grid.at(1000.0)), "not asked yet"
    await grid.refresh()
    values = grid.series.g_per_kwh[:24]
    for hour in range(24):
        assert grid.at(1000.0 + 4 * hour + 1) == values[hour] == grid.at(1096.0 + 4 * hour + 1)
    assert math.isnan(grid.at(999.0)), "before it began nothing is known"
    assert grid.grid_s(1000.0) == DAY_S and grid.grid_s(1048.0) == DAY_S + 43200 and grid.grid_s(1096.0) == DAY_S
    label = grid.label()
    assert (label.zone, label.basis, label.speed) == ("GB", CarbonBasis.ASSUMED, 900.0)
    assert "assumed typical day" in label.source
    clock.now_s += 100_000.0
    await grid.refresh()
    assert math.isfinite(grid.at(clock.now_s)), "a service that stays up is never without"


async def test_real_history_played_back_is_called_so(tmp_path):
    file = tmp_path / "day.csv"
    hours = "\n".join(f"2020-10-14T{hour:02d}:00Z,{100 + hour}" for hour in range(24))
    file.write_text(f"timestamp_utc,ci_lifecycle\n{hours}\n")
    section = CarbonFile(kind="file", path=file, zone="GB", replay=ReplayConfig(day="2020-10-14", duration=24.0))
    clock = Clock()
    grid = LiveIntensity(section, lambda config: carbon_source(config, None, now_s=clock), clock)
    await grid.refresh()
    assert grid.at(1005.5) == 105 and grid.label().basis is CarbonBasis.REPLAYED and grid.label().speed == 3600


async def test_without_a_section_nothing_is_known():
    grid = LiveIntensity(None, lambda config: pytest.fail("asked"), Clock())
    await grid.refresh()
    assert math.isnan(grid.at(1.0)) and grid.label() is None and grid.trouble == "" and grid.grid_s(5.0) == 5.0


async def test_a_stated_intensity():
    clock = Clock()
    section = CarbonConstant(kind="constant", intensity=250.0)
    grid = LiveIntensity(section, lambda config: carbon_source(config, None, now_s=clock), clock)
    await grid.refresh()
    assert grid.at(1000.0) == 250.0 and grid.label().basis is CarbonBasis.ASSUMED and grid.label().speed == 1.0


async def test_a_service_is_asked_once_a_minute_and_its_last_value_held():
    clock = Clock(10_000.0)
    source = Scripted([[200.0, 210.0], [220.0, 230.0]], zone="GB")
    grid = LiveIntensity(CarbonUk(kind="uk"), lambda config: source, clock)
    for _ in range(3):
        await grid.refresh()
    assert len(source.asked) == 1 and grid.at(clock.now_s) == 210.0
    assert grid.at(clock.now_s + 100.0) == 210.0, "until it is asked again"
    assert bool(grid.series.estimated[-1])
    clock.now_s += ASK_AGAIN_S
    await grid.refresh()
    assert len(source.asked) == 2 and grid.at(clock.now_s) == 230.0


async def test_a_service_that_does_not_answer_is_trouble_not_the_end():
    clock = Clock(10_000.0)
    source = Scripted([[200.0], DataError("nothing for this hour"), [240.0]], zone="GB")
    grid = LiveIntensity(CarbonUk(kind="uk"), lambda config: source, clock)
    await grid.refresh()
    clock.now_s += ASK_AGAIN_S
    await grid.refresh()
    assert grid.trouble == "carbon intensity: nothing for this hour"
    assert grid.at(clock.now_s) == 200.0, "what was known is held for a while"
    assert math.isnan(grid.at(clock.now_s + 2 * ASK_AGAIN_S)), "and then it is not known"
    clock.now_s += ASK_AGAIN_S
    await grid.refresh()
    assert grid.trouble == "" and grid.at(clock.now_s) == 240.0


async def test_a_source_that_never_answered_has_no_label():
    source = Scripted([DataError("no such day")])
    grid = LiveIntensity(CarbonUk(kind="uk"), lambda config: source, Clock())
    await grid.refresh()
    with pytest.raises(DataError, match="no such day"):
        grid.label()


def test_holding_changes_nothing_that_is_known():
    series = CarbonSeries("X", [0.0, 10.0, 20.0], [1.0, np.nan], source="s")
    longer = held(series, 50.0)
    assert longer.at([5.0])[0] == 1.0 and math.isnan(longer.at([30.0])[0]), "a gap is not held"
    assert held(series, 20.0) is series
