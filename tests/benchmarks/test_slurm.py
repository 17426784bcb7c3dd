"""The benchmark beside a real Slurm runs the parts that are asked for, and judges every run of a play."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks import chosen, slurm
from tests.e2e.slurm_kills import KillReport
from tests.e2e.slurm_plays import LivePlay, Outcome, plays

ARRAYS = next(play for play in plays(2.0) if play.name == "arrays")


def test_parts_are_chosen_by_name_and_run_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOULERY_BENCH_PARTS", raising=False)
    assert chosen("JOULERY_BENCH_PARTS", ("one", "two", "three")) == ["one", "two", "three"]
    monkeypatch.setenv("JOULERY_BENCH_PARTS", " three,one,")
    assert chosen("JOULERY_BENCH_PARTS", ("one", "two", "three")) == ["one", "three"]


def busy_for(*busy_gpu_s: float) -> Callable[..., Outcome]:
    """Outcomes of one run after another, plain backfill first."""
    left = list(busy_gpu_s)

    def run_play(play: LivePlay, *, scheduled: bool) -> Outcome:
        return Outcome(left.pop(0), {}, stops=int(scheduled))

    return run_play


def test_a_play_is_judged_in_each_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "run_play", busy_for(400.0, 396.0, 400.0, 391.0))
    found = slurm.Found()
    slurm.busy(ARRAYS, 2, found)
    assert found.rows[0] == ["arrays, run 1 of 2", "400 GPU s (83.3%)", "396 GPU s (82.5%)", "-1.0%", "1"]
    assert [held for bar, held in found.checks if "at least" in bar] == [True, False]


def test_parts_that_are_not_asked_for_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "missing", lambda: None)
    monkeypatch.setattr(slurm, "accounting_missing", lambda: None)
    monkeypatch.setattr(slurm, "PARTS", {"arrays": partial(slurm.busy, ARRAYS, 1), "kills": slurm.forty})
    monkeypatch.setattr(slurm, "run_play", busy_for(400.0, 400.0))
    monkeypatch.setenv("JOULERY_BENCH_SLURM", "arrays")
    result = slurm.run()
    assert result.checks[-1] == ("part kills", None) and not result.complete and not result.missed


@pytest.mark.parametrize(("kills", "faults", "held"), [(25, [], True), (24, [], False), (25, ["lost"], False)])
def test_kills_hold_where_all_were_done_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, kills: int, faults: list[str], held: bool
) -> None:
    report = KillReport(23, kills, 7, 5, 3, set(), faults, 120.0)
    monkeypatch.setattr(slurm.slurm_kills, "play", lambda kills, operator: report)
    found = slurm.Found()
    slurm.killed(found, operator=True)
    assert [check for _, check in found.checks] == [held]
    assert "--operator" in found.notes[0] and "5 preemptions" in found.notes[0]


def test_what_came_of_forty_jobs_says_whether_trainings_were_among_them() -> None:
    result: dict[str, Any] = {
        "jobs": 40, "trainings": 6, "restarts_of_trainings": [1, 2], "took_s": 300, "grown": 6, "shrunk": 2,
        "preempted": 39,
    }  # fmt: skip
    assert "6 of them PyTorch trainings that restarted 1, 2 times" in slurm.forty_jobs_note(result)
    assert "torch is not installed" in slurm.forty_jobs_note({**result, "trainings": 0})
