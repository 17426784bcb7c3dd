"""Savings of another scheduler on a cluster's own past jobs, with an interval for what the log does not record.

A log states when a job was submitted, how long it ran and on how many GPUs, but not its kind, its scaling or
the cost of a restart. Each sample draws these (one of the measured kinds of jobs, a restart of 30 to 300 s), turns
elapsed time into work at that scaling, and simulates the log under both schedulers; the interval is over samples. Logs
contain no progress, so no simulated job reports any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, DataError
from joulery.perf.power.training_power import RTX3090_CLASSES, JobClass, power_table
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.streams import Streams
from joulery.sim.training.cluster import TrainingRun
from joulery.sim.training.plant import Jobs
from joulery.sim.training.site_machines import SiteMachines, classes_of
from joulery.sim.training.study import SCHEMES, Setting, run_scheme

_KEEP = (
    *(name for name in SCHEMES if name.startswith("green")), "swift", "lean", "frugal", "fifo", "backfill",
    "tiresias-requested",
)  # fmt: skip
"""Schemes in which a job may keep its GPUs."""
BASE = "fifo"
"""The baseline: first come, first served, on the GPUs that were requested."""
_MOST_GPUS = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a figure over samples.

    Attributes:
        mean: Mean over all samples.
        low, high: 5th and 95th percentile.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Savings:
    """Relative changes; negative where the other scheduler needs less.

    Attributes:
        policy: The other scheduler.
        jobs, gpus: Number of jobs and GPUs.
        samples: Number of samples.
        cluster_carbon, cluster_energy, job_carbon, mean_jct, p99_jct: Changes.
        fragmented: Share of the GPU-time that was free under the other scheduler on too many nodes for any waiting job;
            None where GPUs are counted, not placed.
        energy_by_type: Change of energy on the nodes of each GPU type, idle nodes included; empty without types.
    """

    policy: str
    jobs: int
    gpus: int
    samples: int
    cluster_carbon: Spread
    cluster_energy: Spread
    job_carbon: Spread
    mean_jct: Spread
    p99_jct: Spread
    fragmented: Spread | None = None
    energy_by_type: Mapping[str, Spread] = field(default_factory=dict)
    keeps_gpus: bool = False


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
    samples: int = 10,
    machines: SiteMachines | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Savings:
    """Simulate past jobs under another scheduler.

    Args:
        submit_s: Submissions since the first hour, in order, float64[n].
        elapsed_s: How long each job ran, float64[n].
        gpus: On how many GPUs, int64[n].
        carbon: The intensity from then on.
        policy: As :func:`~joulery.sim.training.study.scheme` reads it.
        cluster_gpus: GPUs of the cluster.
        samples: How often the unrecorded values are drawn.
        machines: Its nodes, and the power of its jobs where known; nodes of two GPUs and drawn powers when None.
        progress: Receives the number of samples done and in all.

    Raises:
        ConfigError: No such scheduler, or one that chooses GPUs for jobs that keep theirs.
        DataError: A job held more GPUs than there are, or there is no job.
    """
    machines = SiteMachines() if machines is None else machines
    _check(len(submit_s), policy, machines)
    nodes = -(-cluster_gpus // machines.node.gpus)
    pairs = []
    for sample in range(samples):
        rng = Streams(sample)("unrecorded")
        restart_s = float(30.0 * 10.0 ** rng.uniform(0.0, 1.0))
        jobs, classes = _sampled_jobs(submit_s, elapsed_s, gpus, rng, machines)
        setting = Setting(nodes=nodes, node=machines.node, restart_s=restart_s, silent=True, classes=classes,
                          placed=machines.placed, groups=machines.groups)  # fmt: skip
        pairs.append((run_scheme(policy, setting, jobs, carbon), run_scheme(BASE, setting, jobs, carbon)))
        progress(sample + 1, samples)

    def change(of: Callable[[TrainingRun], float]) -> Spread:
        return _spread([of(other) / of(base) - 1.0 for other, base in pairs])

    all_gpus = sum(group.gpus for group in machines.groups) or machines.node.gpus * nodes
    lost = [other.fragmented_gpu_s / (all_gpus * other.makespan_s) for other, _ in pairs]
    return Savings(
        policy,
        len(submit_s),
        all_gpus,
        samples,
        change(lambda run: run.cluster_kg),
        change(lambda run: run.cluster_kwh),
        change(lambda run: float(np.sum(run.job_kg))),
        change(lambda run: float(np.mean(run.jct_s))),
        change(lambda run: float(np.quantile(run.jct_s, 0.99))),
        _spread(lost) if machines.placed else None,
        _by_type(pairs),
        machines.keeps_gpus,
    )


def _check(jobs: int, policy: str, machines: SiteMachines) -> None:
    """Raise unless there are jobs, and the scheduler leaves jobs that keep their GPUs unchanged."""
    if not jobs:
        raise DataError("no job held a GPU: nothing can be saved")
    if machines.keeps_gpus and policy.partition(":")[0] not in _KEEP:
        raise ConfigError("this scheduler chooses the GPUs of each job itself", got=policy, expected=", ".join(_KEEP))


def _by_type(pairs: list[tuple[TrainingRun, TrainingRun]]) -> dict[str, Spread]:
    """Changes of energy by GPU type."""
    found: dict[str, list[float]] = {}
    for other, base in pairs:
        for one, before in zip(other.by_type, base.by_type, strict=True):
            found.setdefault(one.type, []).append((one.job_j + one.idle_j) / (before.job_j + before.idle_j) - 1.0)
    return {name: _spread(changes) for name, changes in found.items()}


def _spread(values: list[float]) -> Spread:
    return Spread(float(np.mean(values)), float(np.quantile(values, 0.05)), float(np.quantile(values, 0.95)))


def _sampled_jobs(
    submit_s: FloatArray, elapsed_s: FloatArray, gpus: IntArray, rng: np.random.Generator, machines: SiteMachines
) -> tuple[Jobs, tuple[JobClass, ...]]:
    """Jobs of randomly drawn kinds whose work on one GPU gives the elapsed times on their GPUs; and the kinds."""
    drawn = rng.integers(0, len(RTX3090_CLASSES), len(gpus))
    widest = max(_MOST_GPUS, int(gpus.max()))
    classes, kind = classes_of(drawn, gpus, machines, widest)
    table = power_table(classes, machines.node)
    work_s = elapsed_s * table.speedup[kind, gpus]
    if machines.type_speed is not None:
        work_s = work_s * machines.type_speed
    most, least = (gpus, gpus) if machines.keeps_gpus else (np.maximum(gpus, _MOST_GPUS), None)
    return Jobs(submit_s, work_s, kind, gpus, most, groups=machines.reach, min_gpus=least), classes
