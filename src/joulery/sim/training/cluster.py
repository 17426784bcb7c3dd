"""Runs of a training cluster: one workload to the end of its last job under one policy, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.errors import DataError
from joulery.domain.ports import Policy
from joulery.policies.training.allocation import ClusterView
from joulery.sim.training.plant import Cluster, Jobs, Plant, Watch

_PATIENCE_S = 366 * 86_400.0
"""How long a cluster may stand idle with jobs waiting before the plant gives up."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRun:
    """What happened.

    Attributes:
        finish_s: When each job ended, float64[n].
        jct_s: Submission to end, float64[n].
        job_j, job_kg: Energy and carbon of each job, float64[n].
        idle_j, idle_kg: Energy and carbon of GPUs and nodes without a job, until the last job ended.
        makespan_s: When the last job ended.
        peak_w: Highest power of the cluster.
        preemptions, rescales: How often a running job was stopped, and resized.
        most_gpus: Most GPUs in use at once.
        digest: Hash of all decisions; equal for equal schedules.
        fragmented_gpu_s: GPU-seconds that were free in sum, on too many nodes for any waiting job; 0 where GPUs are
            counted.
        power_timeline: Cluster power, ``(from s, W)`` at every change, float64[m, 2]; none unless watched.
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

    @property
    def cluster_kwh(self) -> float:
        """Energy of the cluster until the last job ended, kWh."""
        return (float(np.sum(self.job_j)) + self.idle_j) / JOULES_PER_KWH

    @property
    def cluster_kg(self) -> float:
        """Carbon of the cluster until the last job ended, kg."""
        return float(np.sum(self.job_kg)) + self.idle_kg


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
        cluster: The truth.
        jobs: The workload.
        policy: Decides at every round.
        period_s: Distance of the rounds; None to step the policy on every submission and completion.
        start_s: Earliest start of a job given its submission and duration, for schedulers that defer at submission.
        watch: Called at every round; the run then keeps the timeline of its power too.

    Raises:
        DataError: A job can never run, and the plant would not end.
    """
    plant = Plant(cluster, jobs, policy, period_s, start_s, watch)
    progress_s = 0.0
    while plant.unfinished:
        before = plant.unfinished
        plant.kernel.run(until_s=plant.kernel.now_s + 86_400.0)
        if plant.unfinished < before or plant.free < cluster.gpus or not plant.active:
            progress_s = plant.kernel.now_s
        elif plant.kernel.now_s - progress_s > _PATIENCE_S:
            raise DataError(f"{plant.unfinished} jobs never start under this policy")
    makespan_s = float(np.max(plant.finish_s)) if len(jobs) else 0.0
    return TrainingRun(
        finish_s=plant.finish_s,
        jct_s=plant.finish_s - jobs.submit_s,
        job_j=plant.job_j,
        job_kg=plant.job_kg,
        idle_j=plant.idle_j,
        idle_kg=plant.idle_kg,
        makespan_s=makespan_s,
        peak_w=plant.peak_w,
        preemptions=plant.preemptions,
        rescales=plant.rescales,
        most_gpus=plant.most_gpus,
        digest=plant.hash.hexdigest(),
        power_timeline=np.array(plant.power_timeline or [], np.float64).reshape(-1, 2),
        fragmented_gpu_s=plant.fragmented_gpu_s,
    )
