import dataclasses
import json
from pathlib import Path

import pytest

from joulery.domain.decisions import Decision
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import (
    CarbonBasis,
    CarbonLabel,
    DecisionRecord,
    NowSnapshot,
    ServiceLabel,
    ServiceTick,
    SiteLabel,
    Tick,
)
from joulery.store.run.directory import create_run, open_run
from joulery.store.run.timeline import (
    log_decision,
    log_tick,
    read_decisions,
    read_site,
    read_ticks,
    write_site,
    write_ticks,
)

SITE = SiteLabel(
    name="quickstart",
    mode="act",
    carbon=CarbonLabel("GB", "a file", CarbonBasis.REPLAYED, Signal.MARGINAL, Scope.DIRECT, speed=960.0),
    services=(ServiceLabel("photos", 0.08, 0.95, (("lite0", 0.751), ("lite2", 0.776)), 0.74),),
)
TICKS = (
    Tick(100.0, 1.0),
    Tick(
        101.0,
        1.0,
        power_w=42.5,
        power_band_w=12.0,
        quality=Quality.MODELLED,
        g_per_kwh=180.0,
        grid_s=960.0,
        energy_j=42.5,
        carbon_g=0.002,
        baseline_g=0.003,
        baseline_low_g=0.0025,
        baseline_high_g=0.0035,
        services=(
            ServiceTick("photos", 40, 1, 0.061, 0.975, 0.76, (("lite0", 0.6), ("lite2", 0.4))),
            ServiceTick("idle", 0),
        ),
    ),
)
DECISION = DecisionRecord(101.5, Decision("set_mix", "photos", {"lite0": 2}, "clover", "intensity rose"), "applied")


def plain(value):
    """Comparable although NaN is not equal to itself."""
    return json.dumps(dataclasses.asdict(value), default=str)


def same(ticks, others):
    return [plain(t) for t in ticks] == [plain(t) for t in others]


def recorded(folder: Path, *, closed: bool) -> Path:
    run = create_run(folder, kind="up")
    write_site(run, SITE)
    for tick in TICKS:
        log_tick(run, tick)
    log_decision(run, DECISION)
    if closed:
        write_ticks(run, TICKS)
        run.close()
    return folder


@pytest.mark.parametrize("closed", [True, False])
def test_what_was_recorded_comes_back(tmp_path, closed):
    run = open_run(recorded(tmp_path / "run", closed=closed))
    assert read_site(run) == SITE
    assert same(read_ticks(run), TICKS)
    assert read_decisions(run) == (DECISION,)
    assert ("timeline" in run.series_names) is closed


def test_a_run_without_ticks_has_none(tmp_path):
    with create_run(tmp_path / "run", kind="measure") as writer:
        writer.log("note", text="hello")
    run = open_run(tmp_path / "run")
    assert (read_site(run), read_ticks(run), read_decisions(run)) == (None, (), ())


def test_series_without_rows_come_back_empty(tmp_path):
    with create_run(tmp_path / "run", kind="up") as writer:
        write_ticks(writer, ())
    assert read_ticks(open_run(tmp_path / "run")) == ()


def test_corrected_ticks_take_the_place_of_logged_ones(tmp_path):
    with create_run(tmp_path / "run", kind="up") as writer:
        log_tick(writer, TICKS[1])
        write_ticks(writer, [dataclasses.replace(TICKS[1], baseline_g=9.0)])
    assert read_ticks(open_run(tmp_path / "run"))[0].baseline_g == 9.0


@pytest.mark.parametrize("entry", ['{"t_s":1,"kind":"tick"}', '{"t_s":1,"kind":"tick","period_s":"x","services":[]}'])
def test_damaged_ticks_are_one_clear_error(tmp_path, entry):
    create_run(tmp_path / "run", kind="up").close()
    (tmp_path / "run" / "log.jsonl").write_text(entry + "\n")
    with pytest.raises(DataError, match="ticks"):
        read_ticks(open_run(tmp_path / "run"))


def test_damaged_decisions_and_labels_are_one_clear_error(tmp_path):
    with create_run(tmp_path / "run", kind="up", details={"site": {"name": "x"}}) as writer:
        writer.log("decision", decision={"wrong": 1})
    run = open_run(tmp_path / "run")
    with pytest.raises(DataError, match="decisions: KeyError"):
        read_decisions(run)
    with pytest.raises(DataError, match="site: KeyError"):
        read_site(run)


def test_a_tick_needs_a_period():
    with pytest.raises(DataError, match="positive period, got 0"):
        Tick(1.0, 0.0)


def test_a_snapshot_starts_empty():
    assert NowSnapshot(SITE, 0.0, 0.0).ticks == ()
