"""``joulery jobs``: the columns that say why a job waits are there while one does."""

import time
from pathlib import Path

import pytest

from joulery.app import schedule
from joulery.ui.cli import main

SITE = "joulery: 1\nmeters: {use: [cpu-model]}\njobs: {slots: {count: 2}}\n"
ROW = {
    "job": 1, "name": "toy", "owner": "ada", "state": "running", "slots": 1, "progress_ratio": 0.5, "restarts": 0,
    "energy_j": 2.0, "carbon_g": None, "rank": None, "waits_because": None,
    "expected_start_s": None,
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
