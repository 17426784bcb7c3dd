"""Jobs that keep their GPUs, some of them far wider than others: ``green`` and ``lean`` against FIFO; simulated.

FIFO starts whatever fits, so it leaves the widest jobs waiting. EASY backfill has every length; ``green`` has none,
and no job reports progress. ``python -m benchmarks green_wide`` takes some three minutes of a core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from benchmarks import Result
from benchmarks._wide_jobs import CLASSES, CLUSTER, LENGTHS, NODE, wide_jobs
from joulery.policies.training.baselines import Backfill, Fifo
from joulery.policies.training.green import Green
from joulery.sim.training.cluster import TrainingRun, run_training_cluster
from joulery.sim.training.study import Setting, run_scheme

SEEDS = range(5)
JOBS = {False: 300, True: 1200}
"""Number of jobs by whether they come in arrays: more in arrays of up to 48 tasks, or there would be few arrays."""
LOADS = (
    ("8 to 128", 0.7, 120.0, False),
    ("8 to 128", 0.7, 600.0, False),
    ("8 to 64", 0.9, 120.0, False),
    ("8 to 64", 0.9, 600.0, False),
    ("8 to 64", 1.1, 120.0, False),
    ("8 to 64", 1.1, 600.0, False),
    ("1 to 128", 0.9, 120.0, False),
    ("64 to 128", 0.9, 120.0, False),
    ("one of 64 beside 31 of one", 0.9, 120.0, False),
    ("1 to 128", 0.9, 120.0, True),
)
"""GPUs of a job, load, restart in seconds, whether jobs come in arrays."""

Figures = Mapping[str, tuple[float, float, float]]
"""Changes against FIFO by scheme: mean completion time, p99, and CO2e of the cluster."""


def run() -> Result:
    """Simulate all loads."""
    rows, checks = [], []
    for widths, load, restart_s, arrays in LOADS:
        for lengths in LENGTHS:
            of = f"arrays of {widths}" if arrays else widths
            what = f"{of} GPUs, load {load:g}, restart {restart_s / 60:g} min, {lengths}"
            found = [_against_fifo(widths, lengths, seed, load, restart_s, arrays) for seed in SEEDS]
            rows.append([what, *(_cells(found, name) for name in ("green", "backfill", "lean"))])
            mean = float(np.mean([one["green"][0] for one in found]))
            checks.append((f"{what}: green's mean at most 5 % above FIFO's", mean <= 0.05))
    return Result(
        "GREEN: wide jobs",
        ("jobs of two hours on average", "green: mean (worst seed), p99", "EASY backfill", "lean, with CO2e"),
        rows,
        notes=(
            f"Simulated. {JOBS[False]} made-up jobs, or {JOBS[True]} in arrays of up to 48, on 128 GPUs, against FIFO, "
            f"which starts whatever fits: mean of {len(SEEDS)} seeds. EASY backfill knows all lengths. No job reports "
            "progress.",
        ),
        checks=checks,
    )


def _against_fifo(
    widths: str, lengths: str, seed: int, load: float, restart_s: float, arrays: bool
) -> dict[str, tuple[float, float, float]]:
    jobs, length_s = wide_jobs(widths, lengths, seed, load, JOBS[arrays], arrays)
    cluster = replace(CLUSTER, restart_s=restart_s)
    setting = Setting(CLUSTER.nodes, NODE, restart_s=restart_s, silent=True, classes=CLASSES)
    fifo = run_training_cluster(cluster, jobs, Fifo())
    runs = {
        "green": run_training_cluster(cluster, jobs, Green()),
        "backfill": run_training_cluster(cluster, jobs, Backfill(length_s), period_s=None),
        "lean": run_scheme("lean", setting, jobs, CLUSTER.carbon),
    }
    return {name: _change(one, fifo) for name, one in runs.items()}


def _change(run: TrainingRun, fifo: TrainingRun) -> tuple[float, float, float]:
    def p99(one: TrainingRun) -> float:
        return float(np.quantile(one.jct_s, 0.99))

    return (
        float(run.jct_s.mean() / fifo.jct_s.mean()) - 1.0, p99(run) / p99(fifo) - 1.0,
        _kg(run) / _kg(fifo) - 1.0,
    )  # fmt: skip


def _kg(run: TrainingRun) -> float:
    return float(run.job_kg.sum()) + run.idle_kg


def _cells(found: Sequence[Figures], name: str) -> str:
    mean, p99, kg = np.mean([one[name] for one in found], axis=0)
    worst = max(one[name][0] for one in found)
    grams = f", {kg:+.0%}" if name == "lean" else ""
    return f"{mean:+.0%} ({worst:+.0%}), {p99:+.0%}{grams}"
