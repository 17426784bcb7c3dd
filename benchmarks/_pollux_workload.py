"""Pollux's policy on its artifact's own workload: 160 jobs on 16 nodes of four T4 GPUs, goodput as measured there."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.perf.power.training_power import JobClass, NodePower, PowerTable
from joulery.policies.training.pollux import Pollux
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.cluster import run_training_cluster
from joulery.sim.training.plant import Cluster, Jobs

ARTIFACT_JCT_S = 2446.0
"""Mean completion time of Pollux on workload 6 in the artifact's README, within 5 %."""
_GPUS = 64
_RESTART_S, _ROUND_S = 30.0, 60.0


def mean_jct_s(data: Path, workload: str = "6") -> float:
    """Mean completion time, s, of one of the artifact's workloads.

    A job's work is the samples its training takes at its first batch size; its goodput on so many GPUs is the best over
    batch sizes of measured throughput (GPUs packed by fours) times measured statistical efficiency.
    """
    jobs = [
        row for row in _rows(data / "pollux_workloads.csv") if row["set"] == "workloads" and row["workload"] == workload
    ]
    names = sorted({row["application"] for row in jobs})
    efficiency = {name: _efficiency(data, name) for name in names}
    goodput = np.array([_goodput(data, name, *efficiency[name][:2]) for name in names])
    submit_s = np.array([float(row["submit_s"]) for row in jobs])
    order = np.argsort(submit_s, kind="stable")
    kind = np.array([names.index(row["application"]) for row in jobs])[order]
    work_s = np.array([efficiency[name][2] / goodput[at, 1] for at, name in enumerate(names)])[kind]
    requested = np.array([int(row["num_replicas"]) for row in jobs])[order]
    speedup = goodput / goodput[:, 1][:, None]
    flat = np.ones_like(speedup)
    table = PowerTable(tuple(JobClass(name, 70.0, np.ones(_GPUS)) for name in names), speedup, flat, flat, flat)
    cluster = Cluster(16, NodePower(gpus=4), table, Intensity(np.ones(24)), restart_s=_RESTART_S)
    widest = np.full(len(jobs), _GPUS)
    work = Jobs(submit_s[order], work_s, kind, requested, widest)
    run = run_training_cluster(cluster, work, Pollux(speedup, cap=_GPUS), period_s=_ROUND_S)
    return float(run.jct_s.mean())


def training_s(data: Path, name: str) -> float:
    """Seconds that one T4 takes to train one of the artifact's applications, from its first batch size on."""
    points, first, whole = _efficiency(data, name)
    return whole / float(_goodput(data, name, points, first)[1])


def _efficiency(data: Path, name: str) -> tuple[list[tuple[float, float]], float, float]:
    """Statistical efficiency by batch size, the first batch size, and the samples of a training at it."""
    rows = sorted(
        (row for row in _rows(data / "pollux_stat_efficiency.csv") if row["app"] == name),
        key=lambda row: int(row["batch_size"]),
    )
    first = float(rows[0]["batch_size"])
    whole = float(rows[0]["iterations"]) * first
    points = [(float(r["batch_size"]), whole / (float(r["iterations"]) * float(r["batch_size"]))) for r in rows]
    return points, first, float(rows[0]["progress_init_bsz_iters"]) * first


def _goodput(data: Path, name: str, points: list[tuple[float, float]], first: float) -> FloatArray:
    """Samples of progress a second on 0 to 64 GPUs, float64[65]; interpolated between measured numbers of GPUs."""
    sizes, values = np.log([size for size, _ in points]), [value for _, value in points]
    best: dict[int, float] = {}
    for row in _rows(data / "scaling_pollux_t4.csv"):
        gpus = int(row["num_gpus"])
        batch = gpus * float(row["local_bsz"])
        packed = gpus <= 4 or set(row["placement"][:-1]) == {"4"}
        if row["app"] == name and packed and first <= batch <= points[-1][0]:
            rate = float(row["throughput_samples_s"]) * float(np.interp(np.log(batch), sizes, values))
            best[gpus] = max(best.get(gpus, 0.0), rate)
    known = sorted(best)
    rates = np.maximum.accumulate([best[gpus] for gpus in known])
    return np.concatenate(([0.0], np.interp(np.arange(1, _GPUS + 1), known, rates)))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as lines:
        yield from csv.DictReader(lines)
