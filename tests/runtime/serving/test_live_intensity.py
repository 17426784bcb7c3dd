import asyncio
import math
import os
import threading
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.app.wiring.carbon import carbon_source, live_carbon_source
from joulery.config.carbon import CarbonConstant, CarbonFile, CarbonTypical, CarbonUk, ReplayConfig
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import DataError
from joulery.domain.serving.timeline import CarbonBasis, CarbonFeed
from joulery.runtime.serving import live_intensity
from joulery.runtime.serving.live_intensity import ASK_AGAIN_S, LiveIntensity, held, merged
from joulery.steady_time import unix_s
from tests.fakes.carbon import Scripted

DAY_S = 1_602_633_600.0  # 2020-10-14T00:00Z


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Answers come at once here; on a busy machine their threads do not."""
    monkeypatch.setattr(live_intensity, "PATIENCE_S", 120.0)
    monkeypatch.setattr(live_intensity, "LATER_S", 120.0)


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


async def test_a_source_that_never_answered_has_no_label_and_no_grams():
    source = Scripted([DataError("no such day")])
    clock = Clock()
    grid = LiveIntensity(CarbonUk(kind="uk"), lambda config: source, clock)
    await grid.refresh()
    assert grid.label() is None and math.isnan(grid.at(clock.now_s))
    assert grid.feed(clock.now_s) == CarbonFeed(False, 0.0, "carbon intensity: no such day")
    with pytest.raises(DataError, match="no such day"):
        grid.history(1000.0, 1010.0)


async def test_a_source_that_hangs_stops_nothing(monkeypatch):
    """The question goes on behind; its answer counts once it is there."""
    monkeypatch.setattr(live_intensity, "PATIENCE_S", 0.0)
    answered, clock = threading.Event(), Clock(10_000.0)

    class Hanging(Scripted):
        def history(self, t0_s, t1_s):
            assert answered.wait(30.0)
            return super().history(t0_s, t1_s)

    grid = LiveIntensity(CarbonUk(kind="uk"), lambda config: Hanging([[200.0]]), clock)
    await grid.refresh()
    assert math.isnan(grid.at(clock.now_s)) and "has not answered" in grid.trouble
    (question,) = [task for task in asyncio.all_tasks() if task.get_name() == "carbon"]
    answered.set()
    await question
    await grid.refresh()
    assert grid.at(clock.now_s) == 200.0 and grid.trouble == ""


async def test_an_outage_of_a_day_is_unknown_and_what_was_known_before_stays():
    clock, source = Clock(10_000.0), Scripted([[200.0], DataError("down")])
    grid = LiveIntensity(CarbonUk(kind="uk"), lambda config: source, clock)
    await grid.refresh()
    for _ in range(24 * 60):
        clock.now_s += 60.0
        await grid.refresh()
    assert math.isnan(grid.at(clock.now_s)) and not grid.feed(clock.now_s).known
    series = grid.history(10_000.0, clock.now_s)
    assert series.at(10_000.5)[0] == 200.0 and 100.0 < series.covered_s(10_000.0, clock.now_s) <= 180.0
    source.answers = [[300.0]]
    clock.now_s += ASK_AGAIN_S
    await grid.refresh()
    known = grid.series
    assert grid.at(clock.now_s) == 300.0 and known.at(10_000.5)[0] == 200.0
    assert math.isnan(known.at(50_000.0)[0]), "the outage stays unknown"


class Growing:
    """A file of one hour's steps, at a clock of its own."""

    def __init__(self, folder, clock, **options):
        self.path = folder / "grid.csv"
        self.section = CarbonFile(kind="file", path=self.path, zone="GB", **options)
        self.grid = None
        self.clock, self.versions = clock, 0

    def write(self, *rows, header="timestamp_utc,ci_lifecycle"):
        lines = [f"{datetime.fromtimestamp(t_s, UTC):%Y-%m-%dT%H:%MZ},{value}" for t_s, value in rows]
        self.path.write_text("\n".join((header, *lines)) + "\n")
        self.versions += 1
        os.utime(self.path, ns=(self.versions, self.versions))

    def open(self):
        self.grid = LiveIntensity(self.section, live_carbon_source, self.clock)
        return self.grid

    async def look(self, seconds=2):
        for _ in range(seconds):
            self.clock.now_s += 1.0
            await self.grid.refresh()
        return self.grid.at(self.clock.now_s)


async def test_a_replay_is_known_from_the_first_moment_on_though_the_wall_clock_was_put_forward(monkeypatch):
    monkeypatch.setattr("joulery.app.wiring.carbon.time.time", lambda: unix_s() + 5.0)
    replay = ReplayConfig(day="2020-10-14", duration="1000 h")
    grid = LiveIntensity(CarbonTypical(kind="typical", zone="GB", replay=replay), live_carbon_source, unix_s)
    await grid.refresh()
    assert grid.trouble == "" and grid.at(unix_s()) > 0


HOUR_S = 3600.0
NOON_S = 1_602_676_800.0


async def test_a_file_that_grows_is_followed(tmp_path):
    file = Growing(tmp_path, Clock(NOON_S + 10))
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110))
    grid = file.open()
    assert await file.look() == 110
    file.clock.now_s = NOON_S + HOUR_S + 5
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110), (NOON_S + HOUR_S, 120))
    assert await file.look(1) == 110, "held until two looks found the same file"
    assert await file.look(1) == 120
    assert grid.feed(file.clock.now_s).age_s == 0.0 and grid.warnings(file.clock.now_s) == []


async def test_a_file_that_holds_only_the_past_is_held_with_its_age(tmp_path):
    file = Growing(tmp_path, Clock(NOON_S + 26 * HOUR_S))
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110))
    grid = file.open()
    for _ in range(3):
        assert await file.look(1) == 110
        file.clock.now_s += HOUR_S
    feed = grid.feed(NOON_S + 28 * HOUR_S + 3)
    assert feed.known and feed.age_s == 27 * HOUR_S + 3
    (text,) = grid.warnings(file.clock.now_s - HOUR_S)
    assert "2020-10-14T13:00Z" in text and "held" in text
    series = grid.history(NOON_S + 26 * HOUR_S, NOON_S + 28 * HOUR_S)
    assert bool(series.estimated.all()) and set(series.g_per_kwh) == {110.0}
    assert grid.held_s > HOUR_S


async def test_a_held_value_gives_way_to_a_newer_one_that_has_ended_too(tmp_path):
    file = Growing(tmp_path, Clock(NOON_S + 5 * HOUR_S))
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110))
    file.open()
    assert await file.look() == 110
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110), (NOON_S + HOUR_S, 120))
    assert await file.look() == 120


@pytest.mark.parametrize(("fill", "known_h"), [("gap", 0.0), ("previous:3h", 3.0), ("error", 99.0)])
async def test_the_rule_for_gaps_bounds_how_long_a_value_is_held(tmp_path, fill, known_h):
    file = Growing(tmp_path, Clock(NOON_S + HOUR_S + 10), fill=fill)
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110))
    file.open()
    for hours in (1, 2, 3, 4, 5):
        file.clock.now_s = NOON_S + hours * HOUR_S + 10
        value = await file.look()
        assert (value == 110) is (hours - 1 < known_h), (hours, value)


async def test_a_file_that_comes_later_is_taken_up_at_once(tmp_path):
    file = Growing(tmp_path, Clock(NOON_S + 10))
    grid = file.open()
    assert math.isnan(await file.look()) and "grid.csv" in grid.trouble and grid.label() is None
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110))
    assert await file.look() == 110
    assert grid.trouble == "" and grid.label().zone == "GB"
    series = grid.history(NOON_S + 10, NOON_S + 20)
    assert series.covered_s(NOON_S + 10, NOON_S + 20) == 10, "the file says it for the time before it came, too"


async def test_a_rewritten_file_counts_and_what_it_left_out_stays_known(tmp_path):
    file = Growing(tmp_path, Clock(NOON_S + 10))
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110), (NOON_S + HOUR_S, 120))
    grid = file.open()
    await file.look()
    file.clock.now_s = NOON_S + 2 * HOUR_S - 10
    file.write((NOON_S + HOUR_S, 220), (NOON_S + 2 * HOUR_S, 230))
    assert await file.look() == 220, "the newest answer counts"
    assert grid.series.at(NOON_S + 20)[0] == 110, "of the time that it left out, the older one"


async def test_a_damaged_file_is_trouble_and_its_mending_ends_it(tmp_path):
    file = Growing(tmp_path, Clock(NOON_S + 10))
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110))
    grid = file.open()
    await file.look()
    file.write((NOON_S - HOUR_S, 100), (NOON_S, "many"), (NOON_S + HOUR_S, 1))
    assert await file.look() == 110 and "not a number" in grid.trouble
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 111))
    assert await file.look() == 111 and grid.trouble == ""
    file.path.unlink()
    await file.look()
    assert "cannot be read" in grid.trouble
    file.clock.now_s = NOON_S + 2 * HOUR_S
    assert math.isnan(await file.look()), "an absent file is no answer: nothing is held for long"


async def test_a_hole_in_a_followed_file_is_unknown_for_its_time(tmp_path):
    file = Growing(tmp_path, Clock(NOON_S + 10))
    file.write((NOON_S - HOUR_S, 100), (NOON_S, ""), (NOON_S + HOUR_S, 120))
    grid = file.open()
    assert math.isnan(await file.look()) and grid.trouble == ""
    file.clock.now_s = NOON_S + HOUR_S + 10
    assert await file.look() == 120


def test_a_file_with_rows_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    file = Growing(tmp_path, Clock(), column="missing")
    file.write((NOON_S - HOUR_S, 100), (NOON_S, 110))
    with pytest.raises(DataError, match="no column missing"):
        file.open()


@given(
    old=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 500)), min_size=2, max_size=8, unique_by=lambda p: p[0]),
    new=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 500)), min_size=2, max_size=8, unique_by=lambda p: p[0]),
)
def test_merged_series_say_what_the_new_one_says_and_before_it_what_the_old_one_said(old, new):
    def made(points):
        ordered = sorted(points)
        edges = [float(t) for t, _ in ordered]
        return CarbonSeries("X", edges, [float(v) for _, v in ordered[:-1]], source="s")

    one, other = made(old), made(new)
    both = merged(one, other)
    for t_s in np.arange(-0.5, 41.0, 0.5):
        expected = other.at(t_s)[0] if t_s >= other.start_s else one.at(t_s)[0]
        assert np.array_equal(both.at(t_s)[0], expected, equal_nan=True)


def test_holding_changes_nothing_that_is_known():
    series = CarbonSeries("X", [0.0, 10.0, 20.0], [1.0, np.nan], source="s")
    longer = held(series, 50.0)
    assert longer.at([5.0])[0] == 1.0 and math.isnan(longer.at([30.0])[0]), "a gap is not held"
    assert held(series, 20.0) is series
