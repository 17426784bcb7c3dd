import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.rollup import hourly
from joulery.app.runs.bookkeeping import book, default_ledger
from joulery.app.runs.recorded import load_run
from joulery.domain.energy.footprint import Footprint
from joulery.domain.errors import DataError
from joulery.domain.serving.timeline import Tick
from joulery.store.ledger import Ledger
from joulery.store.run.directory import create_run
from joulery.store.run.footprints import footprint_to_dict
from tests.ui.demo import SITE, demo_run, footprint

START_S = 1_790_000_000.0


def test_a_run_is_booked_whole(tmp_path):
    view = load_run(demo_run(tmp_path / "run"))
    with Ledger(tmp_path / "l.db") as ledger:
        book(view, ledger)
        book(view, ledger)
        (row,) = ledger.rows("owner")
        assert row.key == "vision"
        assert row.energy_j == pytest.approx(view.footprint.energy_j, rel=1e-12)
        assert row.carbon_g == pytest.approx(view.footprint.carbon_g, rel=1e-12)
        assert [one.key for one in ledger.rows("device")] == ["", "cpu:0", "machine"]
        (run,) = ledger.runs()
        assert (run.id, run.kind, run.state, Path(run.path)) == (view.name, "up", "closed", view.path)
        assert run.ended_s >= run.started_s


def test_charges_are_booked_to_their_owners(tmp_path):
    shared = [
        {"workload": name, "owner": owner, "footprint": footprint_to_dict(footprint())}
        for name, owner in [("photos", "vision"), ("voices", "speech")]
    ]
    with create_run(tmp_path / "run", kind="up") as writer:
        writer.write_report({**footprint_to_dict(footprint() + footprint()), "charges": shared})
    with Ledger(tmp_path / "l.db") as ledger:
        book(load_run(tmp_path / "run"), ledger)
        assert [row.key for row in ledger.rows("owner")] == ["speech", "vision"]
        assert [row.key for row in ledger.rows("workload")] == ["photos", "voices"]


def test_a_killed_run_is_booked_as_far_as_it_came(tmp_path):
    view = load_run(demo_run(tmp_path / "run", state="killed"))
    with Ledger(tmp_path / "l.db") as ledger:
        book(view, ledger)
        (run,) = ledger.runs()
        assert (run.state, run.ended_s) == ("running", None)
        assert ledger.rows("workload")[0].key == SITE.name


def test_the_hours_are_those_of_the_ticks():
    ticks = (Tick(3600.0, 1.0, energy_j=30.0, carbon_g=1.0), Tick(3601.0, 1.0, energy_j=40.0, carbon_g=4.0))
    assert hourly(Footprint(start_s=0.0, end_s=7200.0), ticks) == {0: (0.75, 0.25), 3600: (0.25, 0.75)}


def test_without_grams_the_ticks_spread_grams_as_joules():
    ticks = (Tick(3600.0, 1.0, energy_j=30.0), Tick(3601.0, 1.0, energy_j=40.0))
    assert hourly(Footprint(), ticks) == {0: (0.75, 0.75), 3600: (0.25, 0.25)}


def test_small_amounts_are_shared_too():
    ticks = (Tick(3600.0, 1.0, energy_j=0.3, carbon_g=0.1), Tick(3601.0, 1.0, energy_j=0.4, carbon_g=0.4))
    shares = hourly(Footprint(start_s=0.0, end_s=0.5), ticks)
    assert shares[0] == (pytest.approx(0.75), pytest.approx(0.25))
    assert hourly(Footprint(start_s=3599.75, end_s=3600.25), ()) == {0: (0.5, 0.5), 3600: (0.5, 0.5)}


def test_without_ticks_time_decides():
    assert hourly(Footprint(start_s=1800.0, end_s=5400.0), ()) == {0: (0.5, 0.5), 3600: (0.5, 0.5)}
    assert hourly(Footprint(start_s=1800.0, end_s=1800.0), ()) == {0: (1.0, 1.0)}
    assert hourly(Footprint(start_s=0.0, end_s=3600.0), ()) == {0: (1.0, 1.0)}
    assert hourly(Footprint(), ()) == {}


def test_a_run_of_centuries_is_not_split_into_hours():
    with pytest.raises(DataError, match="is not split into hours"):
        hourly(Footprint(start_s=0.0, end_s=1e10), ())


@pytest.mark.parametrize("window", [{"start_s": 0.0}, {"end_s": 9.0}, {}], ids=["no end", "no start", "neither"])
def test_joules_of_an_unknown_time_are_reported(window):
    assert hourly(Footprint(**window), ()) == {}
    with pytest.raises(DataError, match="5 J of a run"):
        hourly(Footprint(**window, idle_j=5.0), ())


@given(st.floats(0, 1e6), st.floats(0, 1e5))
def test_the_shares_of_time_add_up(start_s, length_s):
    shares = hourly(Footprint(start_s=start_s, end_s=start_s + length_s), ())
    assert math.fsum(share for share, _ in shares.values()) == pytest.approx(1.0, rel=1e-9)


def test_where_the_ledger_lies(monkeypatch):
    monkeypatch.setenv("JOULERY_LEDGER", "/x/l.db")
    assert default_ledger() == Path("/x/l.db")
    monkeypatch.delenv("JOULERY_LEDGER")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_ledger() == Path("/state/joulery/ledger.db")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_ledger() == Path.home() / ".local/state/joulery/ledger.db"


def test_a_run_without_window_has_nothing_to_book(tmp_path):
    with create_run(tmp_path / "run", kind="measure") as writer:
        writer.write_report(footprint_to_dict(replace(Footprint(), duration_s=1.0)))
    with Ledger(tmp_path / "l.db") as ledger:
        book(load_run(tmp_path / "run"), ledger)
        assert len(ledger.runs()) == 1
        assert ledger.rows("owner") == ()
