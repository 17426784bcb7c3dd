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
