"""The scheduler of a site: one round, the journal's length, the watchdog's patience."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from joulery.app import schedule
from joulery.domain.cluster import ClusterJob, JobState
from joulery.runtime.schedule import scheduler
from joulery.runtime.schedule.state import SchedulerState
from tests.runtime.schedule.fake_cluster import FakeCluster


@pytest.fixture
def slurm_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site beside a cluster in memory, without a watchdog."""
    cluster = FakeCluster()
    site = tmp_path / "site.yaml"
    site.write_text(
        "joulery: 1\nmode: act\njobs: {backend: slurm, quantum: 300 s, poll: 10 ms, patience: 10 s, state: state}\n"
    )
    monkeypatch.setattr(schedule, "cluster_backend", lambda jobs: cluster)
    monkeypatch.setattr(schedule, "start_watchdog", lambda *_: None)
    return site


def test_a_round_that_is_asked_for_comes_at_once(slurm_site: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        schedule.run_schedule(
            schedule.ScheduleRequest(slurm_site, once=True), lambda entry: said.append(entry["kind"]), threading.Event()
        )
    assert said.count("round") == 2


def test_a_journal_that_is_long_is_made_short_and_damage_is_said(
    slurm_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = slurm_site.parent / "state" / "journal-act.jsonl"
    file.parent.mkdir()
    file.write_text('{"kind": "started", "job": 7, "slots": 2}\n' * 50 + "nonsense\n")
    monkeypatch.setattr(scheduler, "COMPACT_BYTES", 1000)
    said: list[str] = []
    schedule.run_schedule(
        schedule.ScheduleRequest(slurm_site, once=True),
        lambda entry: said.append(str(entry.get("text"))),
        threading.Event(),
    )
    assert "journal-act.jsonl: 1 damaged lines are left out" in said
    assert file.read_text().count("started") == 0 and "nonsense" not in file.read_text()


@pytest.mark.parametrize(("once", "patience_s"), [(True, 70.0), (False, 10.0)])
def test_after_one_round_the_watchdog_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: bool, patience_s: float
) -> None:
    begun: list[float] = []

    def start(site: Path, backend: str, patience_s: float, log: Path) -> None:
        begun.append(patience_s)
        stop.set()

    stop, cluster = threading.Event(), FakeCluster()
    site = tmp_path / "site.yaml"
    site.write_text(
        "joulery: 1\nmode: act\njobs: {backend: slurm, quantum: 30 s, poll: 1 s, patience: 10 s, state: state}\n"
    )
    monkeypatch.setattr(schedule, "cluster_backend", lambda jobs: cluster)
    monkeypatch.setattr(schedule, "start_watchdog", start)
    schedule.run_schedule(schedule.ScheduleRequest(site, once=once), lambda entry: None, stop)
    assert begun == [patience_s]


def test_waiting_jobs_have_a_rank_and_a_reason() -> None:
    def job(number: int, **more: Any) -> ClusterJob:
        return ClusterJob(number, "job", "ada", 0.0, JobState.WAITING, **more)

    jobs = (
        job(1, pool="a"), job(2, pool="a", shape=2, max_slots=2), job(3, pool="b"), job(4, blocked="Licenses"),
        job(5, exempt="held by its owner"), job(6), replace(job(7), state=JobState.RUNNING, slots=1), job(8, pool="a"),
    )  # fmt: skip
    refused = {8: (float("inf"), "lacks resources")}
    state = SchedulerState(target={1: 1, 7: 1}, waiting=((3, 1), (2, 2), (4, 1), (8, 1)), refused=refused)
    line = schedule.waiting_line(jobs, state)
    shown = {one.id: tuple(schedule._wait(one, state, line).values()) for one in jobs}

    assert {number: rank for number, (rank, _) in shown.items()} == {
        1: 1, 2: 3, 3: 2, 4: 4, 5: None, 6: None, 7: None, 8: 5,
    }  # fmt: skip
    assert "first in its pool" in shown[1][1] and "first in its pool" in shown[3][1]
    assert "1 job of its pool" in shown[2][1]
    assert "Licenses" in shown[4][1] and "owner" in shown[5][1] and "lacks" in shown[8][1]
    assert shown[6][1] == "not ranked: no scheduler has acted here" and shown[7][1] is None
    acted = replace(state, next_round_s=1e9)
    assert schedule._wait(jobs[5], acted, line)["waits_because"].startswith("not ranked yet")
