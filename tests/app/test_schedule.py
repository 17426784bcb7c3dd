"""The scheduler of a site: one round, the journal's length, the watchdog's patience."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from joulery.app import schedule
from joulery.runtime.schedule import scheduler
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
