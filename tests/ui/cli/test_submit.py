"""``joulery submit --by``: when a job is needed, and what is refused."""

import json
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
    assert flag in capsys.readouterr().err
