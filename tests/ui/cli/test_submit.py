"""``joulery submit --by``: when a job is needed, and what is refused."""

import json
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from joulery.store.jobs import JobBook
from joulery.ui.cli import main

SITE = "joulery: 1\nmeters: {use: [cpu-model]}\njobs: {slots: {count: 1}}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(SITE)
    return tmp_path


@pytest.mark.parametrize("by", ["2099-11-27T18:00", "24h"])
def test_a_deadline_is_a_time_or_a_time_from_now(by: str, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before_s = time.time()
    assert main(["submit", "--by", by, "--time", "6h", "--json", "--", "true"]) == 0
    number = json.loads(capsys.readouterr().out)["job"]
    job = JobBook(site / "joulery-jobs").read(number, "job")
    assert job is not None and job["limit_s"] == 6 * 3600.0
    if by == "24h":
        assert before_s <= job["deadline_s"] - 86_400.0 <= time.time()
    else:
        assert job["deadline_s"] == datetime.fromisoformat(by).timestamp()
    assert main(["jobs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["jobs"]
    assert row["deadline_s"] == job["deadline_s"]


@pytest.mark.parametrize(("flag", "text"), [("--by", "2020-01-01"), ("--by", "Friday"), ("--time", "6")])
def test_a_time_that_is_over_or_none_is_refused(
    flag: str, text: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", flag, text, "--", "true"]) == 2
    said = capsys.readouterr().err
    assert flag in said
    assert flag != "--by" or "over" in said or "expected a moment such as 2026-11-27T18:00, or a time from now" in said


@pytest.mark.parametrize(("limit", "late"), [("3h", True), ("1h", False)])
def test_a_job_that_may_end_after_it_is_needed_is_queued_with_a_remark(
    limit: str, late: bool, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--by", "2h", "--time", limit, "--", "true"]) == 0
    said = capsys.readouterr()
    assert said.out == "job 1\n"
    assert said.err == ("joulery: --time 3 h is longer than until --by 2h: the job may end too late\n" if late else "")


def test_a_page_and_json_are_both_written(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--", "true"]) == 0
    capsys.readouterr()
    assert main(["jobs", "--json", "--html", "jobs.html"]) == 0
    assert [row["job"] for row in json.loads(capsys.readouterr().out)["jobs"]] == [1]
    assert (site / "jobs.html").read_text().startswith("<!doctype html>")


def test_a_command_and_an_environment_that_are_no_text_are_kept_byte_by_byte(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = os.fsdecode(b"x\xff")
    monkeypatch.setenv("DATA", raw)
    assert main(["submit", "--name", raw, "--owner", raw, "--", "cat", raw]) == 0
    job = JobBook(site / "joulery-jobs").read(1, "job")
    assert job is not None
    assert (job["command"], job["environment"]["DATA"]) == (["cat", raw], raw)
    assert job["name"] == job["owner"] == "x\\udcff"
    assert main(["jobs"]) == 0
    assert "x\\udcff" in capsys.readouterr().out


def test_a_user_without_a_name_owns_jobs_by_number(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert main(["submit", "--", "true"]) == 0
    job = JobBook(site / "joulery-jobs").read(1, "job")
    assert job is not None and job["owner"] == str(os.getuid())
