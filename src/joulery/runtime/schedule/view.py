"""What the pure policy sees of a live cluster, and what it decided as targets for the cluster's own numbers of jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from joulery.accounting.training_jobs import Tally
from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobState
from joulery.policies.training.allocation import ClusterView
from joulery.runtime.schedule.intensity import Grid
from joulery.runtime.schedule.state import Memory

_G_PER_KG = 1e3


def kind_of(job: ClusterJob, kinds: list[str]) -> int:
    """The number of a recurring kind of job: same owner, name and least size; a new kind gets the next number."""
    key = f"{job.owner}/{job.name}/{job.min_slots}"
    if key not in kinds:
        kinds.append(key)
    return kinds.index(key)


def capacity(snapshot: ClusterSnapshot, jobs: Sequence[ClusterJob]) -> int:
    """Slots that our jobs may share: all but those of jobs that are left alone."""
    mine = {job.id for job in jobs}
    return snapshot.slots - sum(job.slots for job in snapshot.jobs if job.id not in mine)


def cluster_view(
    snapshot: ClusterSnapshot,
    jobs: Sequence[ClusterJob],
    memory: Memory,
    grid: Grid,
    now_s: float,
    restart_s: float,
) -> ClusterView:
    """The view of a round. Where the intensity is unknown no power is shown either, and nothing shifts.

    Args:
        snapshot: The cluster.
        jobs: Those to schedule.
        memory: What was learnt; new kinds are added.
        grid: Intensities.
        now_s: Unix seconds.
        restart_s: What moving a job costs.
    """
    born = {job.id: memory.born.setdefault(job.id, job.submit_s) for job in jobs}
    ordered = sorted(jobs, key=lambda job: (born[job.id], job.id))
    tallies = [memory.tallies.get(job.id, Tally()) for job in ordered]
    slots = capacity(snapshot, jobs)
    shown_w = [tally.slot_w if grid.known else math.nan for tally in tallies]
    running = [job.slots if job.state is JobState.RUNNING else 0 for job in ordered]
    degradation = [
        tally.degradation(n, job.min_slots) if n else math.nan
        for job, tally, n in zip(ordered, tallies, running, strict=True)
    ]
    return ClusterView(
        now_s=now_s,
        gpus=max(0, slots),
        g_per_kwh=grid.g_per_kwh if grid.known else 0.0,
        mean_g_per_kwh=grid.mean_g_per_kwh if grid.known else 0.0,
        restart_s=restart_s,
        job=np.array([job.id for job in ordered], np.int64),
        submit_s=np.array([born[job.id] for job in ordered], np.float64),
        running=np.array(running, np.int64),
        max_gpus=np.array([job.max_slots for job in ordered], np.int64),
        requested=np.array([job.shape for job in ordered], np.int64),
        kind=np.array([kind_of(job, memory.kinds) for job in ordered], np.int64),
        executed_s=np.array([tally.executed_s for tally in tallies], np.float64),
        attained_gpu_s=np.array([tally.slot_s for tally in tallies], np.float64),
        remaining_s=np.array([tally.remaining_s for tally in tallies], np.float64),
        footprint_kg=np.array([tally.carbon_g / _G_PER_KG for tally in tallies], np.float64),
        degradation=np.array(degradation, np.float64),
        gpu_w=np.array(shown_w, np.float64),
        min_gpus=np.array([job.min_slots for job in ordered], np.int64),
    )
