"""Simulate a training cluster: run one workload under one policy to the end of its last job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.errors import DataError
from joulery.domain.ports import Policy
from joulery.policies.training.allocation import ClusterView
from joulery.sim.core.kernel import Kernel
from joulery.sim.training.mixed_plant import MixedPlant
from joulery.sim.training.plant import Cluster, Jobs, Plant, Watch

_PATIENCE_S = 366 * 86_400.0
"""Time that a cluster may be idle with jobs waiting before the plant gives up."""


@dataclass(frozen=True, slots=True)
class TypeUse:
    """Use of the nodes of one GPU type, until the cluster's last job ended.

    Attributes:
        type: Its name.
        gpus: GPUs of that type.
        job_j, job_kg: Energy and carbon of jobs while they ran there.
        idle_j, idle_kg: Energy and carbon of its GPUs and nodes without a job.
        gpu_s: GPU-seconds that jobs held.
    """

    type: str
    gpus: int
    job_j: float
    job_kg: float
    idle_j: float
    idle_kg: float
    gpu_s: float


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRun:
    """Result of a run.

    Attributes:
        finish_s: When each job ended, float64[n].
        jct_s: Submission to end, float64[n].
        job_j, job_kg: Energy and carbon of each job, float64[n].
        idle_j, idle_kg: Energy and carbon of GPUs and nodes without a job, until the last job ended.
        makespan_s: When the last job ended.
        peak_w: Highest power of the cluster, its first moment included: all nodes awake, no job.
        preemptions, rescales: How often a running job was stopped, and resized.
        most_gpus: Most GPUs in use at once; of several pools, the sum of what each used at most.
        digest: Hash of all decisions; equal for equal schedules.
        fragmented_gpu_s: GPU-seconds that were free in sum, on too many nodes for any waiting job; 0 where GPUs are
            counted.
        power_timeline: Cluster power, ``(from s, W)`` at every change, float64[m, 2]; none unless watched.
        by_type: The same energy and carbon by GPU type; empty where the cluster names no types.
    """

    finish_s: FloatArray
    jct_s: FloatArray
    job_j: FloatArray
    job_kg: FloatArray
    idle_j: float
    idle_kg: float
    makespan_s: float
    peak_w: float
    preemptions: int
    rescales: int
    most_gpus: int
    digest: str
    power_timeline: FloatArray
    fragmented_gpu_s: float = 0.0
    by_type: tuple[TypeUse, ...] = ()

    @property
    def cluster_kwh(self) -> float:
        """Energy of the cluster until the last job ended, kWh."""
        return (float(np.sum(self.job_j)) + self.idle_j) / JOULES_PER_KWH

    @property
    def cluster_kg(self) -> float:
        """Carbon of the cluster until the last job ended, kg."""
        return float(np.sum(self.job_kg)) + self.idle_kg


@dataclass(frozen=True, slots=True, eq=False)
class ClusterPart:
    """A part of a cluster, with its own jobs, which may run only there.

    Attributes:
        cluster: Its nodes.
        jobs: Its jobs.
        numbers: Their places among all jobs, int64[n].
        policy: Decides at every round.
        start_s: Earliest start of a job given its submission and duration; None where it may start at once.
    """

    cluster: Cluster
    jobs: Jobs
    numbers: IntArray
    policy: Policy[Any, ClusterView]
    start_s: Callable[[float, float], float] | None = None


def run_training_cluster(
    cluster: Cluster,
    jobs: Jobs,
    policy: Policy[Any, ClusterView],
    *,
    period_s: float | None = 1800.0,
    start_s: Callable[[float, float], float] | None = None,
    watch: Watch | None = None,
) -> TrainingRun:
    """Run every job to its end under one policy.

    Args:
        cluster: True properties of the cluster.
        jobs: The workload.
        policy: Decides at every round.
        period_s: Interval of the rounds; None to step the policy on every submission and completion.
        start_s: Earliest start of a job given its submission and duration, for schedulers that defer at submission.
        watch: Called at every round; the run then keeps the timeline of its power too.

    Raises:
        DataError: A job can never run, and the plant would not end.
    """
    pool = ClusterPart(cluster, jobs, np.arange(len(jobs)), policy, start_s)
    return run_training_pools((pool,), period_s=period_s, watch=watch)


def run_training_pools(
    pools: Sequence[ClusterPart], *, period_s: float | None = 1800.0, watch: Watch | None = None
) -> TrainingRun:
    """Run the pools of a cluster side by side, on one kernel, until the last job of all ends.

    Args:
        pools: At least one.
        period_s, watch: As for :func:`run_training_cluster`; rounds are watched pool by pool.

    Raises:
        DataError: A job can never run, and the plant would not end.
    """
    kernel, plants = Kernel(), list[Plant]()
    for at, pool in enumerate(pools):
        made = MixedPlant if len(pool.cluster.groups) > 1 else Plant
        tag = f"{at} " if len(pools) > 1 else ""
        plants.append(made(pool.cluster, pool.jobs, pool.policy, period_s, pool.start_s, watch, kernel, tag))
    for plant in plants:
        plant.others = tuple(other for other in plants if other is not plant)
    timeline, first_w = _one_timeline(plants), sum(plant.idle_w() for plant in plants)
    progress_s = 0.0
    while not plants[0].ended:
        before = sum(plant.unfinished for plant in plants)
        kernel.run(until_s=kernel.now_s + 86_400.0)
        unfinished = sum(plant.unfinished for plant in plants)
        busy = any(plant.free < plant.cluster.gpus for plant in plants)
        if unfinished < before or busy or not any(plant.active for plant in plants):
            progress_s = kernel.now_s
        elif kernel.now_s - progress_s > _PATIENCE_S:
            raise DataError(f"{unfinished} jobs never start under this policy")
    return _outcome(pools, plants, timeline, first_w)


def _one_timeline(plants: Sequence[Plant]) -> list[tuple[float, float]]:
    """The list to which all plants append the cluster's power; an unused, empty list where nothing is watched."""
    started = [plant.power_timeline for plant in plants if plant.power_timeline is not None]
    if not started:
        return []
    timeline = [(0.0, sum(entries[0][1] for entries in started))]
    for plant in plants:
        plant.power_timeline = timeline
    return timeline


def _outcome(
    pools: Sequence[ClusterPart], plants: Sequence[Plant], timeline: list[tuple[float, float]], first_w: float
) -> TrainingRun:
    n = sum(len(pool.jobs) for pool in pools)
    finish_s, jct_s, job_j, job_kg = (np.zeros(n) for _ in range(4))
    for pool, plant in zip(pools, plants, strict=True):
        finish_s[pool.numbers], jct_s[pool.numbers] = plant.finish_s, plant.finish_s - pool.jobs.submit_s
        job_j[pool.numbers], job_kg[pool.numbers] = plant.accounts.job_j, plant.accounts.job_kg
    makespan_s = float(np.max(finish_s)) if n else 0.0
    for plant in plants:
        plant.settle(makespan_s)
    digests = [plant.hash.hexdigest() for plant in plants]
    digest = digests[0] if len(digests) == 1 else blake2b("".join(digests).encode(), digest_size=16).hexdigest()
    return TrainingRun(
        finish_s=finish_s,
        jct_s=jct_s,
        job_j=job_j,
        job_kg=job_kg,
        idle_j=sum(plant.idle_j for plant in plants),
        idle_kg=sum(plant.idle_kg for plant in plants),
        makespan_s=makespan_s,
        peak_w=max(first_w, *(plant.peak_w for plant in plants)),
        preemptions=sum(plant.preemptions for plant in plants),
        rescales=sum(plant.rescales for plant in plants),
        most_gpus=sum(plant.most_gpus for plant in plants),
        digest=digest,
        power_timeline=np.array(timeline, np.float64).reshape(-1, 2),
        fragmented_gpu_s=sum(plant.fragmented_gpu_s for plant in plants),
        by_type=_by_type([use for plant in plants for use in _group_uses(plant)]),
    )


def _group_uses(plant: Plant) -> list[TypeUse]:
    """The use of each group of a pool; nothing where its groups are not named."""
    groups = plant.cluster.groups
    if isinstance(plant, MixedPlant):
        columns = (
            plant.group_j, plant.group_kg, plant.group_idle_j, plant.group_idle_kg, plant.group_gpu_s
        )  # fmt: skip
        rows = zip(groups, *(column.tolist() for column in columns), strict=True)
        return [TypeUse(group.type, group.gpus, *values) for group, *values in rows]
    accounts = plant.accounts
    sums = (float(accounts.job_j.sum()), float(accounts.job_kg.sum()), float(plant.idle_j), float(plant.idle_kg))
    return [TypeUse(group.type, group.gpus, *sums, float(accounts.attained_s.sum())) for group in groups]


def _by_type(uses: Sequence[TypeUse]) -> tuple[TypeUse, ...]:
    """Uses of one type added up, in order of the first of each type."""
    found: dict[str, TypeUse] = {}
    for use in uses:
        before = found.get(use.type)
        found[use.type] = use if before is None else TypeUse(
            use.type, before.gpus + use.gpus, before.job_j + use.job_j, before.job_kg + use.job_kg,
            before.idle_j + use.idle_j, before.idle_kg + use.idle_kg, before.gpu_s + use.gpu_s,
        )  # fmt: skip
    return tuple(found.values())
