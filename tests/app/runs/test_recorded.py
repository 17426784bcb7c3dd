import json
import math

import numpy as np
import pytest

from joulery.app.measuring import open_carbon
from joulery.app.runs.recorded import load_run
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.runtime.measuring.account import account
from joulery.runtime.measuring.terms import Span, Terms
from joulery.store.run.directory import create_run
from joulery.store.run.intensity import write_intensity
from joulery.store.run.readings import RunReadings, save_readings
from joulery.ui.cli import main

T0_S = 1_700_000_000
TERMS = Terms(carbon={"carbon": "250 g/kWh"})
CPU = Channel("cpu:0", "package", ReadingKind.POWER, "fake", Quality.MEASURED, idle_w=10.0)


def measured_run(folder, *, terms=TERMS, state="closed", report=True, logs=("started", "ended")):
    """Ten seconds of 50 W, the run busy for all of what was busy, as ``joulery measure`` leaves them."""
    stamps = ((T0_S + np.arange(0, 10.1, 0.1)) * 1e9).astype(np.int64)
    edges = ((T0_S + np.arange(11)) * 1e9).astype(np.int64)
    readings = RunReadings(
        (PowerTrace(CPU, stamps, np.full(len(stamps), 50.0), 0.1),),
        {"cpu:0": BusyTimes(edges, np.full(10, 0.5), np.full(10, 1.0), 2)},
        offset_ns=0,
        end_ns=int(stamps[-1]),
    )
    details = {"terms": terms.to_dict()}
    writer = create_run(folder, kind="measure", argv=["python", "train.py"], owner="nlp", details=details)
    span = Span(T0_S * 10**9, (T0_S + 10) * 10**9, 0)
    if "started" in logs:
        writer.log("started", t_s=float(T0_S), monotonic_ns=span.start_ns, pid=1)
    if "ended" in logs:
        writer.log("ended", monotonic_ns=span.end_ns, cpu_s=0.0, exit_code=0)
    made = account(readings, span, terms, open_carbon(terms.carbon))
    save_readings(readings, writer)
    if report:
        if made.basis.carbon is not None:
            write_intensity(writer, made.basis.carbon)
        writer.write_report(made.report)
    if state != "running":
        writer.close(state)
    return folder


def test_a_measured_run_has_a_course_that_ends_at_its_charge(tmp_path):
    view = load_run(measured_run(tmp_path / "run"), with_timeline=True)
    assert view.ticks[-1].energy_j == pytest.approx(view.footprint.energy_j, rel=1e-9)
    assert view.ticks[-1].carbon_g == pytest.approx(view.footprint.carbon_g, rel=1e-9)
    assert {round(tick.power_w, 6) for tick in view.ticks} == {30.0}
    assert {tick.g_per_kwh for tick in view.ticks} == {250.0}
    assert (view.site.name, view.site.carbon.basis) == ("python", "assumed")
    assert len(view.ticks) == 25, "four readings to a window"


def test_the_course_is_made_only_when_asked_for(tmp_path):
    assert load_run(measured_run(tmp_path / "run")).ticks == ()


def test_the_course_needs_no_source_again(tmp_path):
    (tmp_path / "ci.csv").write_text("timestamp_utc,g_per_kwh\n2023-11-14T00:00:00Z,100\n2023-11-15T00:00:00Z,100\n")
    folder = measured_run(tmp_path / "run", terms=Terms(carbon={"carbon": str(tmp_path / "ci.csv")}))
    (tmp_path / "ci.csv").unlink()
    view = load_run(folder, with_timeline=True)
    assert view.footprint.carbon_g > 0
    assert view.ticks[-1].carbon_g == pytest.approx(view.footprint.carbon_g, rel=1e-9)


def test_a_run_without_intensity_has_a_course_without_grams(tmp_path):
    view = load_run(measured_run(tmp_path / "run", terms=Terms()), with_timeline=True)
    assert view.site.carbon is None
    assert all(math.isnan(tick.carbon_g) for tick in view.ticks)


def test_the_same_joules_on_another_grid(tmp_path, capsys):
    folder = measured_run(tmp_path / "run")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    own = load_run(folder)
    view = load_run(folder, carbon=open_carbon({"carbon": "500 g/kWh"}))
    assert view.footprint.energy_j == pytest.approx(own.footprint.energy_j, rel=1e-12)
    assert view.footprint.carbon_g == pytest.approx(2 * own.footprint.carbon_g, rel=1e-9)
    assert view.ticks[-1].g_per_kwh == 500.0
    assert main(["report", str(folder), "--zone", "typical:FR", "--json"]) == 0
    french = json.loads(capsys.readouterr().out)
    assert french["energy_j"] == pytest.approx(own.footprint.energy_j)
    assert "typical" in french["carbon_source"] and 0 < french["carbon_g"] < own.footprint.carbon_g
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (tmp_path / "ci.csv").write_text("timestamp_utc,g_per_kwh\n2021-01-01T00:00:00Z,100\n2021-01-01T01:00:00Z,100\n")
    assert main(["report", str(folder), "--carbon", str(tmp_path / "ci.csv"), "--json"]) == 0
    elsewhere = json.loads(capsys.readouterr().out)
    assert elsewhere["carbon_g"] is None and "covers 2021-01-01" in elsewhere["carbon_reason"]


def test_what_cannot_be_counted_again_is_one_clear_error(tmp_path, capsys):
    create_run(tmp_path / "up", kind="up").close()
    assert main(["report", str(tmp_path / "up"), "--carbon", "250 g/kWh"]) == 2
    assert "only the grams of a measured run can be counted again" in capsys.readouterr().err
    folder = measured_run(tmp_path / "run")
    assert main(["report", str(folder), "--carbon", "250 g/kWh", "--by", "module"]) == 2
    assert "the grams of operations stay as recorded" in capsys.readouterr().err
    (folder / "power.parquet").unlink()
    assert main(["report", str(folder), "--carbon", "250 g/kWh"]) == 2
    assert "keeps no readings" in capsys.readouterr().err


def test_a_run_killed_before_its_report_is_accounted_again(tmp_path, capsys):
    folder = measured_run(tmp_path / "run", report=False, state="running", logs=("started",))
    view = load_run(folder)
    assert view.interrupted
    assert view.footprint.energy_j == pytest.approx(300.0, rel=0.03)
    assert view.footprint.carbon_g > 0
    assert main(["report", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["runs"][0]["interrupted"] is True
    assert answer["parts"][0]["quality"] == "measured"
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "interrupted" in out
    assert "the measuring process was killed" in out


def test_a_run_killed_before_its_command_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match="ended before the command started"):
        load_run(measured_run(tmp_path / "run", report=False, state="running", logs=()))


def test_hours_of_a_measured_run(tmp_path, capsys):
    folder = measured_run(tmp_path / "run")
    assert main(["report", str(folder), "--by", "hour", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["hour"] for row in answer["rows"]] == ["2023-11-14T22:00Z"]
    assert answer["rows"][0]["energy_j"] == pytest.approx(answer["energy_j"])


def test_the_page_of_a_measured_run_has_plots_and_notes(tmp_path, capsys):
    folder = measured_run(tmp_path / "run")
    assert main(["report", str(folder), "--html", "-"]) == 0
    page = capsys.readouterr().out
    assert [name in page for name in ('data-chart="power"', 'data-chart="intensity"', 'data-chart="carbon"')] == [
        True
    ] * 3


def test_a_measured_run_whose_readings_were_removed_keeps_its_report(tmp_path):
    folder = measured_run(tmp_path / "run")
    (folder / "power.parquet").unlink()
    view = load_run(folder, with_timeline=True)
    assert (view.ticks, view.footprint.energy_j) == ((), pytest.approx(300.0))


@pytest.mark.parametrize("wrong", ["x" * 8, None, True, 1e300])
def test_a_time_that_is_no_time_is_one_clear_error(tmp_path, wrong):
    folder = measured_run(tmp_path / "run", report=False, state="running", logs=("started",))
    entry = json.loads((folder / "log.jsonl").read_text())
    (folder / "log.jsonl").write_text(json.dumps({**entry, "t_s": wrong}) + "\n")
    with pytest.raises(DataError, match="the readings of the run"):
        load_run(folder)
