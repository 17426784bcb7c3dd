"""From a cluster's snapshot to the policy's view of it, and from the policy's plan to the next actions.

Both directions are pure. :func:`next_actions` is idempotent: after a crash it gives what is still to be done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.accounting.training_jobs import Tally
from joulery.domain.cluster import ClusterAction, ClusterJob, ClusterSnapshot, Hold, JobState, Release, Start, Stop
from joulery.policies.training.allocation import ClusterView, start_waiting
from joulery.runtime.schedule.intensity import GridIntensity
from joulery.runtime.schedule.state import SchedulerState

_G_PER_KG = 1e3


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One action on one job, and the reason for it.

    Attributes:
        action: The action.
        reason: One sentence.
        new: True when it starts a job that the plan did not run before (passive scheduling).
    """

    action: ClusterAction
    reason: str
    new: bool = False


def schedulable(snapshot: ClusterSnapshot) -> tuple[ClusterJob, ...]:
    """The jobs that are not over and not exempt."""
    return tuple(job for job in snapshot.jobs if not job.state.over and not job.exempt)


def kind_name(job: ClusterJob) -> str:
    """The recurring kind of a job: same owner, name and least size."""
    return f"{job.owner}/{job.name}/{job.min_slots}"


def cluster_view(
    snapshot: ClusterSnapshot,
    jobs: Sequence[ClusterJob],
    state: SchedulerState,
    grid: GridIntensity,
    now_s: float,
    restart_s: float,
) -> ClusterView:
    """The policy's view at a round. Where the intensity is unknown it shows no power either, and nothing shifts.

    Args:
        snapshot: The cluster.
        jobs: The jobs to schedule, each with its kind in ``state.kinds``.
        state: The scheduler's state.
        grid: Intensities.
        now_s: Unix seconds.
        restart_s: Time a job loses when it is moved.
    """
    submitted_s = {job.id: state.submitted_s.get(job.id, job.submit_s) for job in jobs}
    kinds = {name: number for number, name in enumerate(state.kinds)}
    ordered = sorted(jobs, key=lambda job: (submitted_s[job.id], job.id))
    tallies = [state.tallies.get(job.id, Tally()) for job in ordered]
    running = [job.slots if job.state is JobState.RUNNING else 0 for job in ordered]
    degradation = [
        tally.degradation(n, job.min_slots) if n else math.nan
        for job, tally, n in zip(ordered, tallies, running, strict=True)
    ]
    return ClusterView(
        now_s=now_s,
        gpus=max(0, _capacity(snapshot, jobs)),
        g_per_kwh=grid.g_per_kwh if grid.known else 0.0,
        mean_g_per_kwh=grid.mean_g_per_kwh if grid.known else 0.0,
        restart_s=restart_s,
        job=np.array([job.id for job in ordered], np.int64),
        submit_s=np.array([submitted_s[job.id] for job in ordered], np.float64),
        running=np.array(running, np.int64),
        max_gpus=np.array([job.max_slots for job in ordered], np.int64),
        requested=np.array([job.shape for job in ordered], np.int64),
        kind=np.array([kinds.get(kind_name(job), -1) for job in ordered], np.int64),
        executed_s=np.array([tally.executed_s for tally in tallies], np.float64),
        attained_gpu_s=np.array([tally.slot_s for tally in tallies], np.float64),
        remaining_s=np.array([tally.remaining_s for tally in tallies], np.float64),
        footprint_kg=np.array([tally.carbon_g / _G_PER_KG for tally in tallies], np.float64),
        degradation=np.array(degradation, np.float64),
        gpu_w=np.array([tally.slot_w if grid.known else math.nan for tally in tallies], np.float64),
        min_gpus=np.array([job.min_slots for job in ordered], np.int64),
    )


def next_actions(
    snapshot: ClusterSnapshot, target: Mapping[int, int], waiting: Sequence[tuple[int, int]], *, passive: bool
) -> list[PlannedAction]:
    """The next action of every job that is not yet as the plan wants it.

    Running jobs of another size stop first; a stopped job starts again when its slots are free; slots beyond those
    reserved go to the waiting jobs, in order; all other waiting jobs are held.

    Args:
        snapshot: The cluster.
        target: Slots each job is to have; 0 for none, absent where nothing was decided yet.
        waiting: The jobs that may start next, with the slots each wants.
        passive: Whether waiting jobs may start now.
    """
    jobs = schedulable(snapshot)
    actions = [_stop(job, target[job.id]) for job in jobs if _misfit(job, target.get(job.id, job.slots))]
    stopped = {one.action.job for one in actions if isinstance(one.action, Stop)}
    actions += [
        PlannedAction(Release(job.id), "it began before its hold came, which would outlast a requeue")
        for job in jobs
        if job.state is JobState.RUNNING and job.held_by_us and job.id not in stopped
    ]
    free = snapshot.free
    for job in jobs:
        want = target.get(job.id, 0)
        if job.state is not JobState.WAITING or want == 0:
            continue
        if not (job.held_by_us or job.shape != want):
            free -= want  # released: the cluster starts it
        elif want <= free:
            actions.append(PlannedAction(Start(job.id, want), f"its turn, on {want} as planned"))
            free -= want
        else:
            free -= want  # reserved: no other job overtakes it
            if not job.held_by_us:
                actions.append(PlannedAction(Hold(job.id), f"waits for {want} slots"))
    started, _ = start_waiting(_present(jobs, waiting), max(0, free)) if passive else ([], [])
    for number, want in started:
        reason = f"{want} of {snapshot.free} free slots, next in the ranking"
        actions.append(PlannedAction(Start(number, want), reason, new=True))
    starting = {number for number, _ in started}
    for job in jobs:
        idle = job.state is JobState.WAITING and target.get(job.id, 0) == 0 and job.id not in starting
        if idle and not job.held_by_us:
            actions.append(PlannedAction(Hold(job.id), "others go first"))
    return actions


def orphaned_holds(snapshot: ClusterSnapshot, known: frozenset[int]) -> list[PlannedAction]:
    """Releases of the jobs that joulery holds and the journal does not know."""
    if not snapshot.self_starting:
        return []
    return [
        PlannedAction(Release(job.id), "held by joulery, and the journal does not know it")
        for job in snapshot.jobs
        if job.held_by_us and job.state is JobState.WAITING and job.id not in known
    ]


def _capacity(snapshot: ClusterSnapshot, jobs: Sequence[ClusterJob]) -> int:
    """Slots these jobs may share: all but those of the other jobs."""
    own = {job.id for job in jobs}
    return snapshot.slots - sum(job.slots for job in snapshot.jobs if job.id not in own)


def _misfit(job: ClusterJob, want: int) -> bool:
    return job.state is JobState.RUNNING and want != job.slots


def _stop(job: ClusterJob, want: int) -> PlannedAction:
    reason = f"from {job.slots} to {want} slots" if want else f"its {job.slots} slots go to others"
    return PlannedAction(Stop(job.id), reason)


def _present(jobs: Sequence[ClusterJob], waiting: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The entries whose job still waits, each within the slots it may use."""
    by_id = {job.id: job for job in jobs if job.state is JobState.WAITING}
    return [
        (number, min(max(want, by_id[number].min_slots), by_id[number].max_slots))
        for number, want in waiting
        if number in by_id
    ]
