"""The same jobs beside a real Slurm under plain backfill and under joulery: busy GPU-seconds of four plays."""

from __future__ import annotations

from benchmarks import NotRun, Result
from tests.e2e.slurm_plays import Outcome, plays, run_play
from tests.slurm_accounting import accounting_missing
from tests.slurm_cluster import missing

SCALE = 2.0
LEAST_RATIO = 0.98


def run() -> Result:
    """Every play twice; about eight minutes, nearly all of them asleep.

    Raises:
        NotRun: There is no Slurm with accounting here.
    """
    if reason := missing() or accounting_missing():
        raise NotRun(reason)
    rows, checks = [], []
    for play in plays(SCALE):
        plain, scheduled = (run_play(play, scheduled=how) for how in (False, True))
        ratio = scheduled.busy_gpu_s / plain.busy_gpu_s
        gpu_s = 2 * len(play.types) * play.until_s
        rows.append(
            [play.name, _busy(plain, gpu_s), _busy(scheduled, gpu_s), f"{ratio - 1:+.1%}", str(scheduled.stops)]
        )
        checks.append((f"{play.name}: at least {LEAST_RATIO:.0%} of plain backfill: {ratio:.1%}", ratio >= LEAST_RATIO))
        faults = [*plain.faults, *scheduled.faults]
        checks.append((f"{play.name}: no fault {faults}", not faults))
    return Result(
        "Busy beside Slurm",
        ("play", "plain backfill", "joulery", "change", "jobs stopped"),
        rows,
        notes=(
            "Measured: busy GPU-seconds, and as a share of eight GPUs, of the same submissions on Slurm 22.05 with "
            "four nodes of two fake GPUs, jobs of 10 to 26 s, rounds every 10 s, up to 60 s after the first "
            "submission, when jobs still wait. One run each; a requeued job waits 5 s for its credential, KillWait is "
            "3 s.",
        ),
        checks=tuple(checks),
    )


def _busy(outcome: Outcome, gpu_s: float) -> str:
    return f"{outcome.busy_gpu_s:.0f} GPU s ({outcome.busy_gpu_s / gpu_s:.1%})"
