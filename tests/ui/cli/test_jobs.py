"""``joulery jobs``: the columns that say why a job waits are there while one does."""

import json
import time
from pathlib import Path

import pytest

from joulery.accounting.forecasts import ForecastScore
from joulery.app import schedule
from joulery.runtime.schedule.state import scored_fields
from joulery.store.journal import Journal
from joulery.ui.cli import main
from joulery.ui.cli.schedule import _line

SITE = "joulery: 1\nmeters: {use: [cpu-model]}\njobs: {slots: {count: 2}}\n"
ROW = {
    "job": 1, "name": "toy", "owner": "ada", "state": "running", "slots": 1, "progress_ratio": 0.5, "restarts": 0,
    "energy_j": 2.0, "carbon_g": None, "rank": None, "waits_because": None,
    "expected_start_s": None, "expected_start_low_s": None, "expected_start_high_s": None,
}  # fmt: skip


@pytest.mark.parametrize("waits", [False, True])
def test_why_a_job_waits_is_shown_while_one_does(waits, tmp_path: Path, monkeypatch, capsys):
    rows = [ROW, {**ROW, "job": 2, "state": "waiting", "slots": 0, "rank": 1, "waits_because": "Licenses",
                   "expected_start_s": 1.7e9}]  # fmt: skip
    monkeypatch.setattr(schedule, "list_jobs", lambda site, cluster: rows[: 1 + waits])
    (tmp_path / "site.yaml").write_text(SITE)
    code = main(["jobs", "--site", str(tmp_path / "site.yaml")])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    header, first, *others = printed.out.splitlines()
    assert header.split()[:9] == ["job", "name", "owner", "state", "slots", "done", "restarts", "energy", "carbon"]
    assert header.split()[9:] == (["rank", "reason"] if waits else []) and "50%" in first
    start = time.strftime("about %a %H:%M", time.localtime(1.7e9))
    shown = " ".join(" ".join(others).split())
    assert (start in shown) == waits
    assert ("Licenses" in shown) == waits


def test_a_start_is_shown_with_its_interval_where_one_is_known(tmp_path: Path, monkeypatch, capsys):
    times = {"expected_start_s": 1.7e9, "expected_start_low_s": 1.7e9 - 600, "expected_start_high_s": 1.7e9 + 7200}
    row = {**ROW, "state": "waiting", "slots": 0, "rank": 1, "waits_because": "1 job of its pool before it", **times}
    monkeypatch.setattr(schedule, "list_jobs", lambda site, cluster: [row])
    (tmp_path / "site.yaml").write_text(SITE)
    assert main(["jobs", "--site", str(tmp_path / "site.yaml")]) == 0
    low, high = (
        time.strftime("%a %H:%M", time.localtime(times[f"expected_start_{name}_s"])) for name in ("low", "high")
    )
    assert f"({low} to {high})" in " ".join(capsys.readouterr().out.split())


def test_what_became_of_forecasts_is_reported_and_intervals_that_are_wrong_are_named(tmp_path: Path, capsys):
    (tmp_path / "site.yaml").write_text(SITE)
    words = ["jobs", "--site", str(tmp_path / "site.yaml"), "--forecasts"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[0] == "start: 0 checked; no interval before 19 outcomes are known"
    (tmp_path / "joulery-jobs").mkdir()
    with Journal(tmp_path / "joulery-jobs/journal-act.jsonl") as journal:
        for at in range(40):
            score = ForecastScore("start", 0.1 * (at % 3), at % 2 == 0 if at >= 19 else None)
            journal.append("scored", job=1, **scored_fields(score))
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "start: 40 checked, median error +10%; 10 of 21 within their interval (48%, meant for 90%)"
    assert "too narrow" in lines[1] and lines[2].startswith("end: 0 checked")
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["forecasts"]
    assert [row["kind"] for row in rows] == ["start", "end", "grams"] and rows[0]["reliable"] is False


def two(tmp_path: Path, wrong: str = "") -> list[str]:
    """A site of two clusters on this machine, and one whose Slurm is not there."""
    (tmp_path / "site.yaml").write_text(
        "joulery: 1\nmeters: {use: [cpu-model]}\nclusters:\n- {name: east, jobs: {slots: {count: 2}}}\n"
        f"- {{name: west, jobs: {{slots: {{count: 2}}{wrong}}}}}\n"
    )
    return ["jobs", "--site", str(tmp_path / "site.yaml")]


def test_a_cluster_that_cannot_be_listed_hides_no_other(tmp_path: Path, monkeypatch, capsys):
    words = two(tmp_path, ", backend: slurm, slurm: {conf: nowhere/slurm.conf}")
    real = schedule.list_jobs
    monkeypatch.setattr(
        schedule, "list_jobs", lambda site, cluster: [ROW] if cluster == "east" else real(site, cluster)
    )
    assert main(words) == 2
    said = capsys.readouterr()
    assert "toy" in said.out and said.err.startswith("joulery: west: jobs.slurm.conf: is not a file")
    assert main([*words, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [row["cluster"] for row in document["jobs"]] == ["east"]
    assert [(one["cluster"], one["kind"]) for one in document["problems"]] == [("west", "config")]
    assert main([*words, "--cluster", "east"]) == 0
    assert main([*words, "--cluster", "west"]) == 2
    monkeypatch.setattr(schedule, "list_jobs", lambda site, cluster: [ROW])
    assert main([*two(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["problems"] == []


def test_a_pipe_gets_one_whole_line_a_job_and_no_name_is_markup(tmp_path: Path, monkeypatch, capsys):
    waits = {"state": "waiting", "slots": 0, "rank": 1, "waits_because": "first in its pool, waits for 8 free slots"}
    long = {**ROW, **waits, "name": "[bold]a name as long as people write them[/bold]", "expected_start_s": 1.7e9}
    monkeypatch.setattr(schedule, "list_jobs", lambda site, cluster: [long])
    (tmp_path / "site.yaml").write_text(SITE)
    assert main(["jobs", "--site", str(tmp_path / "site.yaml")]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert long["name"] in line and line.endswith(long["waits_because"]) and "waiting" in line


def test_the_outcome_of_a_forecast_is_a_line_of_the_daemons_output():
    entry = {"kind": "forecast", "job": 3, "of": "start", "expected": 118.3, "outcome": 39.3}
    assert _line(entry) == "forecast: job 3 starts in 1 min 58 s; it was 39.3 s"
    assert _line({**entry, "of": "grams"}) == "forecast: job 3 still causes 118 g; it was 39.3 g"
