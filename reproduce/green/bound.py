"""A lower bound on the carbon of any schedule of a training workload, at a given mean completion time.

Each job gets the GPUs, the power limit and the start hour that minimise its grams plus a price times its completion
time. Idle nodes are asleep. Jobs do not contend, need no profiling and do not restart. Over all prices, this gives a
curve of grams against mean completion time. Every schedule of uninterrupted runs on the same power model lies above
the curve (Lagrangian relaxation: the sum of the minima is the minimum of the sum).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.perf.power.training_power import POWER_LIMITS, JobClass, NodePower, limited, power_table
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.training.plant import Jobs


@dataclass(frozen=True, slots=True)
class BoundPoint:
    """One point of the curve.

    Attributes:
        mean_jct_s: Mean completion time.
        cluster_kg: Carbon of the whole cluster, kg; the nodes' sleep power counts until the last submission.
    """

    mean_jct_s: float
    cluster_kg: float


def least_grams(
    jobs: Jobs,
    classes: tuple[JobClass, ...],
    cluster: tuple[int, NodePower],
    carbon: Intensity,
    prices_kg_per_h: Sequence[float],
    wait_h: int = 12,
) -> tuple[BoundPoint, ...]:
    """Compute the curve of the bound, one point per price of an hour of completion time.

    Args:
        jobs: The workload.
        classes: The workload's kinds of jobs, at full power.
        cluster: Number of nodes, and the power of one node.
        carbon: The carbon intensity, known in hindsight.
        prices_kg_per_h: What an hour of one job's completion time may cost, kg.
        wait_h: Longest wait for a cleaner hour.
    """
    nodes, node = cluster
    time_s, kg = np.zeros(len(prices_kg_per_h)), np.zeros(len(prices_kg_per_h))
    for kind in range(len(classes)):
        rows = np.flatnonzero(jobs.kind == kind)
        if len(rows):
            best_s, best_kg = _least(jobs, rows, _options(classes[kind], node), carbon, prices_kg_per_h, wait_h)
            time_s, kg = time_s + best_s, kg + best_kg
    floor_w = nodes * node.asleep_w
    last_s = float(jobs.submit_s[-1]) if len(jobs) else 0.0
    floor_kg = floor_w * carbon.integral(last_s) / JOULES_PER_KWH / 1e3
    count = max(1, len(jobs))
    return tuple(BoundPoint(float(t) / count, floor_kg + float(g)) for t, g in zip(time_s, kg, strict=True))


def _options(job: JobClass, node: NodePower) -> list[tuple[float, float]]:
    """Seconds and watts (above those of nodes asleep) per second of work, for each choice that no other one beats."""
    found = []
    for ratio in (1.0, *POWER_LIMITS):
        table = power_table(limited((job,), ratio), node)
        for gpus in range(1, table.speedup.shape[1]):
            slept_w = gpus * node.asleep_w / node.gpus
            found.append((1.0 / float(table.speedup[0, gpus]), float(table.job_w[0, gpus]) - slept_w))
    found.sort()
    kept: list[tuple[float, float]] = []
    for seconds, watts in found:
        if not kept or seconds * watts < kept[-1][0] * kept[-1][1]:
            kept.append((seconds, watts))
    return kept


def _least(
    jobs: Jobs,
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    options: Sequence[tuple[float, float]],
    carbon: Intensity,
    prices_kg_per_h: Sequence[float],
    wait_h: int,
) -> tuple[FloatArray, FloatArray]:
    """Completion time, s, and carbon, kg, of the best choice of each job, summed over the jobs, for each price."""
    submit_s, work_s = jobs.submit_s[rows], jobs.work_s[rows]
    best = np.full((len(prices_kg_per_h), len(rows)), np.inf)
    best_s, best_kg = np.zeros_like(best), np.zeros_like(best)
    for delay_s in 3600.0 * np.arange(wait_h + 1):
        begin = carbon.integrals(submit_s + delay_s)
        for seconds, watts in options:
            takes_s = work_s * seconds
            kg = watts * (carbon.integrals(submit_s + delay_s + takes_s) - begin) / JOULES_PER_KWH / 1e3
            for at, price in enumerate(prices_kg_per_h):
                cost = kg + price / 3600.0 * (delay_s + takes_s)
                better = cost < best[at]
                best[at, better] = cost[better]
                best_s[at, better] = (delay_s + takes_s)[better]
                best_kg[at, better] = kg[better]
    return np.asarray(best_s.sum(axis=1), np.float64), np.asarray(best_kg.sum(axis=1), np.float64)
