"""What another scheduler would have saved on a cluster's own past jobs, with an interval for what nobody recorded.

A log says when a job was submitted, how long it ran and on how many GPUs; not what it was, how it scales, what a
restart of it costs. Each draw makes these up anew (one of the measured kinds of jobs, a restart of 30 to 300 s), turns
elapsed time into work at that scaling, and plays the month under both schedulers; the interval is over draws. Nor does
it say that a job told anybody its progress: none does here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError
from joulery.perf.power.training_power import RTX3090_CLASSES, power_table, widened
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import TrainingRun
from joulery.sim.training.study import Setting, run_scheme
from joulery.sim.training.workload import Jobs

BASE = "fifo"
"""What is compared with: first come, first served, on the GPUs that were asked for."""
_MOST_GPUS = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over draws.

    Attributes:
        mean: Over all.
        low, high: Between which nine of ten lie.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Savings:
    """The answer; changes are relative, negative where it is less.

    Attributes:
        policy: The other scheduler.
        jobs, gpus: How many of which.
        draws: How many draws.
        cluster_carbon, cluster_energy, job_carbon, mean_jct, p99_jct: Changes.
    """

    policy: str
    jobs: int
    gpus: int
    draws: int
    cluster_carbon: Spread
    cluster_energy: Spread
    job_carbon: Spread
    mean_jct: Spread
    p99_jct: Spread


def most_at_once(start_s: FloatArray, elapsed_s: FloatArray, gpus: IntArray) -> int:
    """The most GPUs that were held at one time."""
    times = np.concatenate((start_s + elapsed_s, start_s))
    change = np.concatenate((-gpus, gpus))
    order = np.lexsort((change, times))
    return int(np.max(np.cumsum(change[order]), initial=0))


def savings(
    submit_s: FloatArray,
    elapsed_s: FloatArray,
    gpus: IntArray,
    carbon: Intensity,
    policy: str,
    cluster_gpus: int,
    draws: int = 10,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Savings:
    """Play the past under another scheduler.

    Args:
        submit_s: Submissions since the first hour, in order, float64[n].
        elapsed_s: How long each job ran, float64[n].
        gpus: On how many GPUs, int64[n].
        carbon: The intensity from then on.
        policy: As :func:`~joulery.sim.training.study.scheme` reads it.
        cluster_gpus: GPUs of the cluster, two a node.
        draws: How often what was not recorded is drawn.
        told: Told how many draws are done.

    Raises:
        ConfigError: No such scheduler.
        DataError: A job held more GPUs than there are, or there is no job.
    """
    if not len(submit_s):
        raise DataError("no job held a GPU: nothing can be saved")
    nodes = -(-cluster_gpus // 2)
    pairs = []
    for draw in range(draws):
        rng = Streams(draw)("unrecorded")
        setting = Setting(nodes=nodes, restart_s=float(30.0 * 10.0 ** rng.uniform(0.0, 1.0)), silent=True)
        jobs = _drawn(submit_s, elapsed_s, gpus, rng)
        pairs.append((run_scheme(policy, setting, jobs, carbon), run_scheme(BASE, setting, jobs, carbon)))
        told(draw + 1, draws)

    def change(of: Callable[[TrainingRun], float]) -> Spread:
        ratios = [of(mine) / of(base) - 1.0 for mine, base in pairs]
        return Spread(float(np.mean(ratios)), float(np.quantile(ratios, 0.05)), float(np.quantile(ratios, 0.95)))

    return Savings(
        policy,
        len(submit_s),
        2 * nodes,
        draws,
        change(lambda run: run.cluster_kg),
        change(lambda run: run.cluster_kwh),
        change(lambda run: float(np.sum(run.job_kg))),
        change(lambda run: float(np.mean(run.jct_s))),
        change(lambda run: float(np.quantile(run.jct_s, 0.99))),
    )


def _drawn(submit_s: FloatArray, elapsed_s: FloatArray, gpus: IntArray, rng: np.random.Generator) -> Jobs:
    """Jobs of made-up kinds whose work on one GPU gives the elapsed times on the GPUs they had."""
    kind = rng.integers(0, len(RTX3090_CLASSES), len(gpus))
    widest = max(_MOST_GPUS, int(gpus.max()))
    table = power_table(widened(RTX3090_CLASSES, widest), Setting().node)
    work_s = elapsed_s * table.speedup[kind, gpus]
    return Jobs(submit_s, work_s, kind, gpus, np.maximum(gpus, _MOST_GPUS))
