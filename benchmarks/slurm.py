"""joulery beside a real Slurm: busy GPU-seconds of four plays, a scheduler killed 25 times, forty jobs that checkpoint.

A play is a workload that runs under plain backfill and under joulery. ``python -m benchmarks slurm`` takes about 20
minutes, nearly all of it waiting, and prints the bars of each part at once. ``JOULERY_BENCH_SLURM=arrays,kills`` runs
only those parts, and ``JOULERY_BENCH_SLURM_RUNS=3`` runs each play three times: the bar holds for each run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import NotRun, Result, chosen
from tests.e2e import slurm_forty, slurm_kills
from tests.e2e.slurm_plays import LivePlay, Outcome, plays, run_play
from tests.slurm_accounting import accounting_missing
from tests.slurm_cluster import missing, slurm_cluster

SCALE = 2.0
LEAST_RATIO = 0.98
KILLS, FORTY = 25, 40
_NOTE = (
    "Measured: busy GPU-seconds, and as a share of eight GPUs, of the same submissions on Slurm 22.05 with four nodes "
    "of two fake GPUs, jobs of 10 to 26 s, rounds every 10 s, up to 60 s after the first submission, when jobs still "
    "wait. A requeued job waits 5 s for its credential, KillWait is 3 s."
)


@dataclass
class Found:
    """Results of the parts: rows of the table, paragraphs, bars."""

    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checks: list[tuple[str, bool | None]] = field(default_factory=list)


def run() -> Result:
    """Run the requested parts.

    Raises:
        NotRun: There is no Slurm with accounting here, or no such part.
    """
    wanted = chosen("JOULERY_BENCH_SLURM", PARTS)
    if reason := missing() or accounting_missing():
        raise NotRun(reason)
    found = Found()
    for part in wanted:
        print(f"slurm: {part} …", file=sys.stderr, flush=True)
        before = len(found.checks)
        PARTS[part](found)
        for bar, held in found.checks[before:]:
            print(f"  {bar}: {'holds' if held else 'not run' if held is None else 'missed'}", file=sys.stderr)
        sys.stderr.flush()
    left_out = [(f"part {part}", None) for part in PARTS if part not in wanted]
    return Result(
        "Busy beside Slurm",
        ("play", "plain backfill", "joulery", "change", "jobs stopped"),
        found.rows,
        notes=(_NOTE, *found.notes),
        checks=(*found.checks, *left_out),
    )


def busy(play: LivePlay, runs: int, found: Found) -> None:
    """Run a play under plain backfill and under joulery, ``runs`` times."""
    for number in range(1, runs + 1):
        name = play.name if runs == 1 else f"{play.name}, run {number} of {runs}"
        plain, scheduled = (run_play(play, scheduled=how) for how in (False, True))
        ratio = scheduled.busy_gpu_s / plain.busy_gpu_s
        gpu_s = 2 * len(play.types) * play.until_s
        found.rows.append(
            [name, _busy(plain, gpu_s), _busy(scheduled, gpu_s), f"{ratio - 1:+.1%}", str(scheduled.stops)]
        )
        faults = [*plain.faults, *scheduled.faults]
        found.checks += [
            (f"{name}: at least {LEAST_RATIO:.0%} of plain backfill: {ratio:.1%}", ratio >= LEAST_RATIO),
            (f"{name}: no fault {faults}", not faults),
        ]


def killed(found: Found, *, operator: bool) -> None:
    """Run jobs under a scheduler that is killed again and again."""
    who = "an operator" if operator else "an administrator"
    report = slurm_kills.play(KILLS, operator=operator)
    found.checks.append(
        (
            f"killed {report.kills} times as {who}: no job lost, run twice or left held, no comment changed "
            f"{report.faults}",
            report.kills == KILLS and not report.faults,
        )
    )
    found.notes.append(
        f"Killed (`kill -9`) as {who}, `python -m tests.e2e.slurm_kills{' --operator' * operator}`: {report.kills} "
        f"times in {report.seconds:.0f} s, {report.jobs} jobs, up to {report.held} held at a kill, "
        f"{report.preemptions} preemptions."
    )


def forty(found: Found) -> None:
    """Run forty jobs that checkpoint."""
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder) / "slurm") as cluster:
        result = slurm_forty.play(cluster, slurm_forty.FULL, slurm_forty.torch_interpreter())
    found.checks.append(
        (
            f"{result['jobs']} jobs that checkpoint: none lost, run twice or left held {result['faults']}",
            slurm_forty.good(result) and result["jobs"] == FORTY,
        )
    )
    found.notes.append(forty_jobs_note(result))


def forty_jobs_note(result: Mapping[str, Any]) -> str:
    """One paragraph on the results of the forty jobs."""
    restarts = ", ".join(map(str, result["restarts_of_trainings"]))
    trainings = (
        f"{result['trainings']} of them PyTorch trainings that restarted {restarts} times and "
        "ended with the loss of an uninterrupted one to the bit"
        if result["trainings"]
        else "none of them a training: torch is not installed"
    )
    return (
        f"{result['jobs']} jobs that checkpoint, `python -m tests.e2e.slurm_forty`: quantum 20 s, the scheduler killed "
        f"between stopping a job and starting it wider, slurmctld restarted; {result['took_s']} s, {result['grown']} "
        f"grown, {result['shrunk']} shrunk, {result['preempted']} preempted; {trainings}."
    )


def _busy(outcome: Outcome, gpu_s: float) -> str:
    return f"{outcome.busy_gpu_s:.0f} GPU s ({outcome.busy_gpu_s / gpu_s:.1%})"


_RUNS = int(os.environ.get("JOULERY_BENCH_SLURM_RUNS", "1"))
PARTS: Mapping[str, Callable[[Found], None]] = MappingProxyType(
    {
        **{
            name: partial(busy, play, _RUNS)
            for name, play in zip(("limit", "partitions", "arrays", "qos"), plays(SCALE), strict=True)
        },
        "kills": partial(killed, operator=False),
        "kills-operator": partial(killed, operator=True),
        "forty": forty,
    }
)
"""Parts by name: four plays, and the other tests beside a live Slurm."""
