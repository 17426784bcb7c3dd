import json
import math
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joulery.adapters.carbon.cache import Cached, provider_folder
from joulery.adapters.carbon.series import Meaning, Reading, assemble
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality

HOUR, DAY = 3600.0, 86400.0
NOW = 20_000 * DAY + 12.5 * HOUR
MEANING = Meaning("GB", Signal.AVERAGE, Scope.DIRECT, "grid", Quality.MEASURED)


@dataclass
class Grid:
    """Hourly; the value is the number of the hour. From ``unknown`` on nothing is out, ``estimated`` are estimates."""

    now: list[float] = field(default_factory=lambda: [NOW])
    unknown: float = NOW
    estimated: tuple[float, ...] = ()
    shift: float = 0.0
    asked: list[tuple[str, float, float]] = field(default_factory=list)

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        self.asked.append(("history", t0_s, t1_s))
        return self._series(t0_s, t1_s, self.unknown, None)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        self.asked.append(("forecast", t0_s, t1_s))
        return self._series(t0_s, t1_s, math.inf, self.now[0])

    def _series(self, t0_s: float, t1_s: float, unknown: float, issued_at_s: float | None) -> CarbonSeries:
        starts = np.arange(t0_s // HOUR * HOUR, t1_s, HOUR).tolist()
        readings = [
            Reading(t, t + HOUR, t / HOUR + self.shift, t in self.estimated) for t in starts if t + HOUR <= unknown
        ]
        return assemble(readings, t0_s, t1_s, MEANING, step_s=HOUR, issued_at_s=issued_at_s)


def cached(grid: Grid, folder: Path, **fields: Any) -> Cached:
    return Cached(grid, folder / "c", HOUR, now_s=lambda: grid.now[0], **fields)


def same(a: CarbonSeries, b: CarbonSeries) -> bool:
    meant = [(s.zone, s.signal, s.scope, s.source, s.quality, s.issued_at_s) for s in (a, b)]
    return (
        meant[0] == meant[1]
        and a.edges_s.tolist() == b.edges_s.tolist()
        and np.array_equal(a.g_per_kwh, b.g_per_kwh, equal_nan=True)
        and a.estimated.tolist() == b.estimated.tolist()
    )


def test_settled_history_is_asked_once_and_for_good(tmp_path: Path) -> None:
    grid = Grid()
    first = cached(grid, tmp_path).history(NOW - 3 * DAY, NOW - DAY)
    grid.now[0] += 365 * DAY
    again = cached(grid, tmp_path).history(NOW - 3 * DAY, NOW - DAY)
    part = cached(grid, tmp_path).history(NOW - 2 * DAY, NOW - 1.5 * DAY)
    assert len(grid.asked) == 1
    assert same(first, Grid().history(NOW - 3 * DAY, NOW - DAY)) and same(again, first)
    assert same(part, Grid().history(NOW - 2 * DAY, NOW - 1.5 * DAY))
    assert len(list((tmp_path / "c").glob("*.json"))) == 3


def test_a_step_over_midnight_is_found_from_both_days(tmp_path: Path) -> None:
    @dataclass
    class Odd(Grid):
        def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
            self.asked.append(("history", t0_s, t1_s))
            return MEANING.series(NOW - 12.75 * HOUR + HOUR * np.arange(4), [1.0, 2.0, 3.0])

    grid, midnight = Odd(), NOW - 12.5 * HOUR
    source = cached(grid, tmp_path)
    for t0_s in (midnight - 600.0, midnight, midnight + 600.0):
        assert source.history(t0_s, midnight + 1200.0).at(midnight + 700.0).tolist() == [1.0]
    assert len(grid.asked) == 1


def test_only_the_missing_stretch_is_asked_for(tmp_path: Path) -> None:
    grid = Grid()
    source = cached(grid, tmp_path)
    source.history(NOW - 50 * HOUR, NOW - 40 * HOUR)
    joined = source.history(NOW - 60 * HOUR, NOW - 45 * HOUR)
    wider = source.history(NOW - 70 * HOUR, NOW - 30 * HOUR)
    half = 0.5 * HOUR
    assert grid.asked == [
        ("history", NOW - 50 * HOUR, NOW - 40 * HOUR),
        ("history", NOW - 60 * HOUR, NOW - 50 * HOUR - half),
        ("history", NOW - 70 * HOUR, NOW - 30 * HOUR),
    ]
    assert same(joined, Grid().history(NOW - 60 * HOUR, NOW - 45 * HOUR))
    assert same(wider, Grid().history(NOW - 70 * HOUR, NOW - 30 * HOUR))
    source.history(NOW - 70 * HOUR, NOW - 20 * HOUR)
    assert grid.asked[-1] == ("history", NOW - 30 * HOUR + half, NOW - 20 * HOUR)


def test_estimates_are_asked_again_when_no_longer_fresh(tmp_path: Path) -> None:
    hour = NOW - 5.5 * HOUR
    grid = Grid(estimated=(hour,))
    source = cached(grid, tmp_path, fresh_s=600.0)
    assert source.history(hour - HOUR, hour + HOUR).estimated.tolist() == [False, True]
    grid.now[0] += 599.0
    cached(grid, tmp_path, fresh_s=600.0).history(hour - HOUR, hour + HOUR)
    assert len(grid.asked) == 1
    grid.now[0] += 1.0
    grid.estimated, grid.shift = (), 100.0
    settled = source.history(hour - HOUR, hour + HOUR)
    assert grid.asked[1] == ("history", hour, hour + HOUR)
    assert settled.estimated.tolist() == [False, False]
    assert settled.g_per_kwh.tolist() == [hour / HOUR - 1, hour / HOUR + 100]
    grid.now[0] += DAY
    assert same(source.history(hour - HOUR, hour + HOUR), settled)
    assert len(grid.asked) == 2


def test_a_step_that_was_not_over_is_not_settled(tmp_path: Path) -> None:
    grid = Grid(unknown=math.inf)
    source = cached(grid, tmp_path, fresh_s=600.0)
    source.history(NOW - 1.5 * HOUR, NOW)
    grid.now[0] += 600.0
    source.history(NOW - 1.5 * HOUR, NOW)
    assert grid.asked[1:] == [("history", NOW - 0.5 * HOUR, NOW)]


def test_a_step_that_ends_as_it_is_fetched_is_settled(tmp_path: Path) -> None:
    grid = Grid(now=[NOW - 0.5 * HOUR], unknown=math.inf)
    source = cached(grid, tmp_path)
    source.history(NOW - 1.5 * HOUR, NOW - 0.5 * HOUR)
    grid.now[0] += DAY
    source.history(NOW - 1.5 * HOUR, NOW - 0.5 * HOUR)
    assert len(grid.asked) == 1


@pytest.mark.parametrize(("later_s", "asks"), [(0.0, 1), (599.0, 1), (600.0, 2), (-1.0, 2)])
@pytest.mark.parametrize("what", ["estimate", "missing", "forecast"])
def test_what_is_not_settled_counts_for_a_while_by_a_clock_that_goes_forward(
    tmp_path: Path, what: str, later_s: float, asks: int
) -> None:
    hour = NOW - 1.5 * HOUR
    grid = Grid(estimated=(hour,) if what == "estimate" else (), unknown=hour if what == "missing" else math.inf)
    source = cached(grid, tmp_path, fresh_s=600.0)
    ask = source.forecast if what == "forecast" else source.history
    ask(hour - HOUR, hour + HOUR)
    grid.now[0] += later_s
    ask(hour - HOUR, hour + HOUR)
    assert len(grid.asked) == asks


def test_what_was_just_missing_is_not_asked_again_at_once(tmp_path: Path) -> None:
    grid = Grid(unknown=NOW - 0.5 * HOUR)
    source = cached(grid, tmp_path, fresh_s=60.0)
    first = source.history(NOW - 1.5 * HOUR, NOW)
    assert np.isnan(first.g_per_kwh).tolist() == [False, True]
    grid.now[0] += 59.0
    assert same(source.history(NOW - 1.5 * HOUR, NOW), first)
    assert len(grid.asked) == 1
    source.history(NOW - 1.5 * HOUR, NOW + 59.0)
    assert grid.asked[1] == ("history", NOW - 0.5 * HOUR, NOW + 59.0), "a longer stretch is a new question"
    grid.now[0] += 60.0
    grid.unknown = math.inf
    assert not np.isnan(source.history(NOW - 1.5 * HOUR, NOW).g_per_kwh).any()
    assert len(grid.asked) == 3


def test_a_forecast_is_kept_for_a_while_and_never_serves_as_history(tmp_path: Path) -> None:
    grid = Grid(unknown=NOW - 0.5 * HOUR)
    source = cached(grid, tmp_path, fresh_s=600.0)
    forecast = source.forecast(NOW, NOW + 10 * HOUR)
    grid.now[0] += 599.0
    part = cached(grid, tmp_path, fresh_s=600.0).forecast(NOW + HOUR, NOW + 2 * HOUR)
    assert len(grid.asked) == 1
    assert (forecast.issued_at_s, part.issued_at_s) == (NOW, NOW)
    assert part.g_per_kwh[0] == (NOW + 0.5 * HOUR) / HOUR
    source.forecast(NOW, NOW + 11 * HOUR)
    source.forecast(NOW - HOUR, NOW + 11 * HOUR)
    assert len(grid.asked) == 3, "a longer stretch is asked for"
    grid.now[0] += 10 * HOUR
    history = source.history(NOW, NOW + 2 * HOUR)
    assert grid.asked[-1][0] == "history"
    assert np.isnan(history.g_per_kwh).all()
    source.forecast(NOW, NOW + 10 * HOUR)
    assert grid.asked[-1][0] == "forecast"


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"schema": "joulery.carbon-cache/0"}',
        b'{"schema": "joulery.carbon-cache/1"}',
        "nan",
        "backwards",
        "short",
        "overlap",
        "meaning",
        "steps",
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("name", ["day", "forecast"])
def test_a_damaged_entry_is_an_absent_one(tmp_path: Path, damage: bytes | str, name: str) -> None:
    grid = Grid()
    source = cached(grid, tmp_path)
    ask = source.history if name == "day" else source.forecast
    good = ask(NOW - 4.5 * HOUR, NOW - 0.5 * HOUR)
    (path,) = (tmp_path / "c").glob("*.json")
    entry = json.loads(path.read_text())
    if damage == "nan":
        entry["steps"][0][2] = None
    elif damage == "backwards":
        entry["steps"][0][1] = entry["steps"][0][0]
    elif damage == "short":
        entry["steps"][0] = entry["steps"][0][:3]
    elif damage == "overlap":
        entry["steps"][1][0] -= 60.0
    elif damage == "meaning":
        entry["scope"] = "sideways"
    elif damage == "steps":
        entry["steps"] = 5
    path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(entry).encode())
    assert same(ask(NOW - 4.5 * HOUR, NOW - 0.5 * HOUR), good)
    assert len(grid.asked) == 2
    assert same(ask(NOW - 4.5 * HOUR, NOW - 0.5 * HOUR), good)
    assert len(grid.asked) == 2, "mended by the second answer"


def test_a_cache_that_cannot_be_written_does_not_stand_in_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "c").write_text("a file where the folder should be")
    grid = Grid()
    source = cached(grid, tmp_path)
    assert len(source.history(NOW - 2 * HOUR, NOW - HOUR)) == 2
    assert "could not be cached" in caplog.text
    source.history(NOW - 2 * HOUR, NOW - HOUR)
    assert len(grid.asked) == 2


def test_a_write_that_fails_leaves_the_entry_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid()
    source = cached(grid, tmp_path)
    source.history(NOW - 2.5 * HOUR, NOW - 1.5 * HOUR)
    (path,) = (tmp_path / "c").iterdir()
    before = path.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    source.history(NOW - 8.5 * HOUR, NOW - 1.5 * HOUR)
    assert [one.name for one in (tmp_path / "c").iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_an_error_of_the_source_is_passed_on_and_not_kept(tmp_path: Path) -> None:
    @dataclass
    class Down(Grid):
        def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
            raise DataError("down")

    with pytest.raises(DataError, match="down"):
        cached(Down(), tmp_path).history(NOW - DAY, NOW)
    assert not (tmp_path / "c").exists()
    assert len(cached(Grid(), tmp_path).history(NOW - DAY, NOW)) == 25


def test_a_new_meaning_replaces_the_old_steps_it_overlaps(tmp_path: Path) -> None:
    """A service that changes its step length must not leave a cache that contradicts it."""
    grid = Grid()
    source = cached(grid, tmp_path)
    source.history(NOW - 6.5 * HOUR, NOW - 2.5 * HOUR)

    @dataclass
    class Quarters(Grid):
        def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
            edges = np.arange(NOW - 12.5 * HOUR, NOW, 900.0)
            return MEANING.series(edges, np.ones(len(edges) - 1))

    series = cached(Quarters(), tmp_path).history(NOW - 8.5 * HOUR, NOW - 2.5 * HOUR)
    assert set(np.diff(series.edges_s).tolist()) == {900.0}


def test_folders_keep_sources_apart_and_inside_the_root(tmp_path: Path) -> None:
    folders = {provider_folder(tmp_path, "uk", zone) for zone in ("GB", "gb", "GB-1", "../..", "a/b", "..")}
    assert len(folders) == 6
    assert all(folder.parent == tmp_path / "carbon" for folder in folders)


def test_entries_are_private_to_the_user(tmp_path: Path) -> None:
    cached(Grid(), tmp_path).history(NOW - 2.5 * HOUR, NOW - 1.5 * HOUR)
    (path,) = (tmp_path / "c").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
