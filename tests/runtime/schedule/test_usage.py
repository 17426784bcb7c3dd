"""What the jobs of a scheduler used, from what it wrote down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.runtime.schedule.usage import BY, used_by
from joulery.ui.cli import main
from joulery.ui.cli.report_jobs import BY as FLAG_BY
from tests.runtime.schedule.fake_cluster import FakeCluster
from tests.runtime.schedule.test_scheduler import T0_S, World


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three jobs that ran under a scheduler in memory: one of bob's is over, one runs, one of ada's runs."""
    cluster = FakeCluster(rate=0.002)
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
