"""What the jobs of a scheduler used, from what it wrote down."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.app.runs.job_bookkeeping import book_jobs
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.runtime.schedule import usage
from joulery.runtime.schedule.usage import BY, used_by
from joulery.store.ledger import Budget, Ledger
from joulery.ui.cli import main
from joulery.ui.cli.report_jobs import BY as FLAG_BY
from tests.runtime.schedule.fake_cluster import FakeCluster
from tests.runtime.schedule.test_scheduler import T0_S, World


@pytest.fixture
def folder(tmp_path: Path, played: Path) -> Path:
    """Three jobs that ran under a scheduler in memory: one of bob's is over, one runs, one of ada's runs."""
    return copied(played, tmp_path)


def copied(played: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(played, tmp_path, dirs_exist_ok=True))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path, cluster = tmp_path_factory.mktemp("played"), FakeCluster(rate=0.002)
    cluster.submit(1, owner="bob", partition="gpu")
    cluster.submit(2, owner="ada", partition="gpu")
    world = World(tmp_path, cluster)
    world.run(400)
    cluster.submit(3, owner="bob", partition="big")
    world.run(200)
    world.journal.close()
    (tmp_path / "journal.jsonl").rename(tmp_path / "journal-act.jsonl")
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    over = [{"t_s": T0_S + 600, "kind": kind, **fields} for kind, fields in world.log if kind == "over"]
    text = "".join(json.dumps(entry, default=str) + "\n" for entry in over)
    (run / "log.jsonl").write_text(text + '{"kind": "over", "job": 9, "torn')
    return tmp_path


def test_by_owner_everything_is_counted_once(folder: Path) -> None:
    uses, total = used_by(folder, "owner")
    by_owner = {use.key: use for use in uses}
    assert set(by_owner) == {"ada", "bob"} and total.jobs == 3
    assert (by_owner["bob"].jobs, by_owner["bob"].running, total.running) == (2, 1, 1)
    assert total.energy_j == pytest.approx(sum(use.energy_j for use in uses)) and total.energy_j > 0
    assert total.carbon_g == pytest.approx(total.energy_j * 300 / 3.6e6)
    assert total.quality is Quality.MEASURED
    assert {use.key for use in used_by(folder, "partition")[0]} == {"gpu", "big"}
    assert [use.jobs for use in used_by(folder, "job")[0]] == [1, 1, 1]


def test_a_job_that_ended_twice_cost_both(folder: Path) -> None:
    before = used_by(folder, "job")[1]
    log = folder / "runs" / "one" / "log.jsonl"
    (first,) = [json.loads(line) for line in log.read_text().splitlines()[:1]]
    again = {**first, "state": "failed", "restarts": 1, "energy_j": 1000.0, "t_s": first["t_s"] + 5}
    (folder / "runs" / "two").mkdir()
    later = folder / "runs" / "two" / "log.jsonl"
    later.write_text(json.dumps(again) + "\n")
    uses, total = used_by(folder, "state")
    assert total.jobs == before.jobs and total.energy_j == pytest.approx(before.energy_j + 1000.0)
    assert sum(use.jobs for use in uses if use.key == "failed") == 1, "as it ended last"
    later.write_text('{"kind": "over"}\n{"kind": "over", "job": []}\n')
    with (folder / "journal-act.jsonl").open("a") as journal:
        journal.write('{"kind": "plan"}\n')
    assert used_by(folder, "state")[1] == before, "what is not understood is left out"

    later.write_text(json.dumps({**first, "t_s": first["t_s"] + 5}) + "\n")
    assert used_by(folder, "job")[1] == before, "killed as it wrote that down, it wrote it down again"
    running = used_by(folder, "job", T0_S + 1e6)[0][0]
    later.write_text(json.dumps({**first, "job": int(running.key)}) + "\n")
    assert used_by(folder, "job")[1].running == 0


def test_time_that_nothing_measured_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = folder / "runs" / "one" / "log.jsonl"
    first = json.loads(log.read_text().splitlines()[0])
    log.write_text(json.dumps({**first, "executed_s": 100.0, "unmetered_s": 40.0}) + "\n")
    (folder / "journal-act.jsonl").unlink()
    assert used_by(folder, "owner")[1].unmetered_s == 40.0
    assert main(["report", "--since", "36500d", "--jobs", str(folder)]) == 0
    assert "nothing measured 40.0% of their time" in capsys.readouterr().out


@given(st.lists(st.text(max_size=20), max_size=30), st.integers(1, 64), st.booleans())
def test_a_log_reads_the_same_from_its_end(texts: list[str], block: int, torn: bool) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(usage, "_BLOCK", block)
        log = Path(folder) / "log.jsonl"
        text = "".join(json.dumps({"kind": "note", "text": one}) + "\n" for one in texts)
        log.write_text(text[: -3 if torn else None])
        assert list(usage.lines_backwards(log)) == list(usage.lines(log))[::-1]


def test_of_a_long_log_only_its_end_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = folder / "runs" / "one" / "log.jsonl"
    first = json.loads(log.read_text().splitlines()[0])
    ends = [{**first, "job": number, "t_s": T0_S + number} for number in range(100)]
    log.write_text("".join(json.dumps(end) + "\n" for end in ends))
    read: list[bytes] = []
    parse = usage._entry
    monkeypatch.setattr(usage, "_entry", lambda line: read.append(line) or parse(line))
    assert [end["job"] for end in usage.ended_jobs(folder, T0_S + 97)] == [97, 98, 99]
    assert len(read) < 10
    os.utime(log, (T0_S + 90, T0_S + 90))
    assert usage.ended_jobs(folder, T0_S + 97) == [], "nothing was written since"
    assert len(usage.ended_jobs(folder)) == 100


def test_what_ended_before_is_left_out_and_what_runs_is_not(folder: Path) -> None:
    _, total = used_by(folder, "owner", T0_S + 1e6)
    assert (total.jobs, total.running) == (1, 1)
    (folder / "journal-act.jsonl").unlink()
    with pytest.raises(DataError, match="no job ended since then"):
        used_by(folder, "owner", T0_S + 1e6)


def test_without_a_scheduler_or_with_another_key_it_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path / "nowhere")):
        used_by(tmp_path / "nowhere", "owner")
    with pytest.raises(ConfigError, match="colour"):
        used_by(folder, "colour")
    assert FLAG_BY == BY


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--by", "owner", "--since", "36500d", "--jobs", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["total"]["jobs"] == 3 and {row["key"] for row in document["rows"]} == {"ada", "bob"}
    assert main(["report", "--since", "36500d", "--jobs", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "owner" in said and "total" in said and "measured" in said
    assert main(["report", "--since", "30d", "--jobs", str(folder / "none")]) == 2
    assert str(folder / "none") in capsys.readouterr().err


@pytest.fixture
def months(tmp_path: Path, played_months: Path) -> Path:
    """Two jobs around the end of November 2023; the scheduler was killed at it and after it."""
    return copied(played_months, tmp_path)


@pytest.fixture(scope="module")
def played_months(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path, cluster = tmp_path_factory.mktemp("months"), FakeCluster(rate=0.0012)
    cluster.submit(1, owner="bob", account="vis")
    cluster.submit(2, owner="ada", account="lab")
    world = World(tmp_path, cluster)
    world.now_s = datetime(2023, 12, 1, tzinfo=UTC).timestamp() - 300.0
    world.run(290)
    world.crash()
    world.run(20)
    world.crash()
    world.run(600)
    cluster.submit(3, owner="bob", account="lab")
    world.run(60)
    world.journal.close()
    (tmp_path / "journal.jsonl").rename(tmp_path / "journal-act.jsonl")
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    entries = [{"t_s": world.now_s, "kind": kind, **fields} for kind, fields in world.log if kind in ("over", "month")]
    assert [entry["job"] for entry in entries if entry["kind"] == "month"] == [1, 2], "each job once"
    (run / "log.jsonl").write_text("".join(json.dumps(entry, default=str) + "\n" for entry in entries))
    return tmp_path


def test_the_months_of_scheduled_jobs_add_up(months: Path) -> None:
    folder = months
    whole = used_by(folder, "owner")[1]
    uses, total = used_by(folder, "month,account,owner")
    assert [use.key.partition(" ")[0] for use in uses] == sorted(use.key.partition(" ")[0] for use in uses)
    assert {use.key for use in uses} == {
        "2023-11 / vis / bob", "2023-11 / lab / ada", "2023-12 / vis / bob", "2023-12 / lab / ada",
        "2023-12 / lab / bob",
    }  # fmt: skip
    assert total.jobs == whole.jobs == 3
    for name in ("executed_s", "slot_s", "energy_j", "carbon_g", "carbon_covered_j", "unmetered_s"):
        assert math.fsum(getattr(use, name) for use in uses) == pytest.approx(getattr(whole, name), rel=1e-9)
        assert getattr(total, name) == pytest.approx(getattr(whole, name), rel=1e-9)
    november = used_by(folder, "account", month="2023-11")[1]
    assert (november.jobs, november.running) == (2, 0)
    assert november.executed_s == pytest.approx(2 * 300.0, abs=10.0)
    with pytest.raises(DataError, match="no job ran in 2024-01"):
        used_by(folder, "owner", month="2024-01")


def test_marks_of_an_earlier_job_of_the_number_are_not_this_jobs(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    cost = {"executed_s": 50.0, "slot_s": 50.0, "energy_j": 500.0, "quality": "measured"}
    entries = [
        {"kind": "month", "job": 1, "month": "2023-10", **cost},
        {"kind": "over", "job": 1, "t_s": T0_S, "owner": "ada", **cost, "energy_j": 100.0},
    ]
    (run / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert [(use.key, use.energy_j) for use in used_by(tmp_path, "month")[0]] == [("2023-11", 100.0)]


def test_a_statement_as_a_mail_a_table_and_a_page(
    tmp_path: Path, months: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = months
    flags = ["report", "--month", "2023-11", "--jobs", str(folder), "--by", "account,owner"]
    assert main([*flags, "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# Energy and carbon of scheduled jobs, 2023-11\n\n| account | owner | jobs | slot h |")
    assert main([*flags, "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert {(row["account"], row["owner"]) for row in rows} == {("lab", "ada"), ("vis", "bob")}
    whole = used_by(folder, "owner", month="2023-11")[1]
    assert math.fsum(float(row["energy_kwh"]) for row in rows) == pytest.approx(whole.energy_j / 3.6e6, rel=1e-12)
    assert main([*flags, "--html", str(tmp_path / "s.html")]) == 0
    assert "<strong>total</strong>" in (tmp_path / "s.html").read_text()
    assert main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["account"] in ("lab", "vis")
    assert main(["report", "--jobs", str(folder)]) == 2
    assert "--month 2026-11" in capsys.readouterr().err


def two_clusters(tmp_path: Path) -> Path:
    """State folders of two clusters of a site and of the site before it listed them; every job is number 1."""
    cost = {"executed_s": 50.0, "slot_s": 50.0, "quality": "measured", "owner": "ada", "account": "lab"}
    for folder, energy_j in (("", 100.0), ("east", 300.0), ("west", 0.0)):
        run = tmp_path / "jobs" / folder / "runs" / "one"
        run.mkdir(parents=True)
        entry = {
            "kind": "over",
            "job": 1,
            "t_s": T0_S,
            **cost,
            "energy_j": energy_j,
            "unmetered_s": 50.0 * (not energy_j),
        }
        (run / "log.jsonl").write_text(json.dumps(entry) + "\n")
    return tmp_path / "jobs"


def test_jobs_of_one_number_in_several_clusters_are_several_jobs(tmp_path: Path) -> None:
    folder = two_clusters(tmp_path)
    uses, total = used_by(folder, "cluster")
    assert {use.key: use.energy_j for use in uses} == {"unknown": 100.0, "east": 300.0, "west": 0.0}
    assert (total.jobs, total.energy_j) == (3, 400.0)
    assert [use.key for use in used_by(folder, "job")[0]] == ["east/1", "unknown/1", "west/1"]
    assert [use.key for use in used_by(folder / "east", "job")[0]] == ["1"]
    (one,) = used_by(folder, "month,account")[0]
    assert (one.key, one.jobs, one.energy_j) == ("2023-11 / lab", 3, 400.0)
    named = used_by([folder / "east", folder / "west"], "cluster,job")[0]
    assert [use.key for use in named] == ["east / 1", "west / 1"]
    with pytest.raises(ConfigError, match="no scheduler wrote"):
        used_by([folder / "east", tmp_path / "nowhere"], "cluster")
    with pytest.raises(DataError, match="2024-01") as error:
        used_by(folder, "owner", month="2024-01")
    assert "2023-11" in error.value.hint


def test_energy_that_nothing_counted_has_no_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = two_clusters(tmp_path)
    flags = ["report", "--month", "2023-11", "--jobs", str(folder), "--by", "cluster"]
    assert main([*flags, "--json"]) == 0
    rows = {row["key"]: row["quality"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows == {"east": "measured", "unknown": "measured", "west": None}
    assert main([*flags, "--format", "csv"]) == 0
    rows = {row["cluster"]: row["quality"] for row in csv.DictReader(capsys.readouterr().out.splitlines())}
    assert rows["west"] == "" and rows["east"] == "measured"
    assert main(flags) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("west")]
    assert "measured" not in line


def test_the_ledger_takes_every_cluster_of_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, flags = two_clusters(tmp_path), ["--ledger", str(tmp_path / "l.db")]
    (folder / "new" / "runs").mkdir(parents=True)
    assert main(["ledger", "add", "--jobs", str(folder), *flags]) == 0
    names = [f"jobs:{one}" for one in (folder, folder / "east", folder / "west")]
    assert capsys.readouterr().out.splitlines() == names, "a cluster without a job hinders no other"
    with Ledger(tmp_path / "l.db") as ledger:
        assert [row.energy_j for row in ledger.rows("owner")] == [400.0]
    assert main(["ledger", "add", "--jobs", str(folder / "new"), *flags]) == 2
    assert "no job ran" in capsys.readouterr().err


def test_the_ledger_has_the_jobs_by_owner_month_and_budget(tmp_path: Path, months: Path) -> None:
    folder, now_s = months, datetime(2023, 12, 1, 1, tzinfo=UTC).timestamp()
    december_s = datetime(2023, 12, 1, tzinfo=UTC).timestamp()
    whole = used_by(folder, "owner")
    with Ledger(tmp_path / "l.db") as ledger:
        names = [book_jobs(folder, ledger, now_s) for _ in range(2)]
        assert names[0] == names[1] and len(ledger.runs()) == 1, "recorded again, not twice"
        rows = {row.key: row for row in ledger.rows("owner")}
        for use in whole[0]:
            assert rows[use.key].energy_j == pytest.approx(use.energy_j, rel=1e-9)
            assert rows[use.key].carbon_g == pytest.approx(use.carbon_g, rel=1e-9)
        november = {row.key: row for row in ledger.rows("owner", end_s=december_s)}
        assert set(november) == {"ada", "bob"}
        for use in used_by(folder, "owner", month="2023-11")[0]:
            assert november[use.key].energy_j == pytest.approx(use.energy_j, rel=1e-9)
        ledger.set_budget(Budget("ada", december_s - 3600.0, december_s, 100.0))
        ((_, left_g),) = ledger.budgets(december_s - 1.0)
        assert left_g == pytest.approx(100.0 - november["ada"].carbon_g)
    with Ledger(tmp_path / "none.db") as ledger, pytest.raises(ConfigError, match="no scheduler wrote"):
        book_jobs(tmp_path / "nowhere", ledger, now_s)


def test_ledger_add_takes_runs_or_jobs(tmp_path: Path, months: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = months
    flags = ["--ledger", str(tmp_path / "l.db")]
    assert main(["ledger", "add", "--jobs", str(folder), *flags]) == 0
    assert capsys.readouterr().out == f"jobs:{folder}\n"
    assert main(["ledger", "show", *flags]) == 0
    assert "bob" in capsys.readouterr().out
    assert main(["ledger", "add", *flags]) == 2
    assert "--jobs FOLDER" in capsys.readouterr().err
