"""From what is meant to what is to be done next: idempotent, so that it can be asked again after any crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from joulery.domain.cluster import ClusterAction, ClusterJob, ClusterSnapshot, Hold, JobState, Release, Start, Stop
from joulery.policies.training.allocation import start_waiting


@dataclass(frozen=True, slots=True)
class Todo:
    """What to do about one job, and why.

    Attributes:
        action: The thing itself.
        reason: One sentence.
        new: True when it starts a job that was not meant to run before (passive scheduling).
    """

    action: ClusterAction
    reason: str
    new: bool = False


def ours(snapshot: ClusterSnapshot) -> tuple[ClusterJob, ...]:
    """The jobs that are not over and not to be left alone."""
    return tuple(job for job in snapshot.jobs if not job.state.over and not job.exempt)


def reconcile(
    snapshot: ClusterSnapshot, target: Mapping[int, int], waiting: Sequence[tuple[int, int]], *, passive: bool
) -> list[Todo]:
    """The next step of every job on its way to the plan.

    Running jobs of another size are stopped first; a job that was stopped starts again when its slots are free; what
    is free beyond all that was promised goes to the waiting, in order; whoever else waits is held.

    Args:
        snapshot: What is.
        target: Slots each job is meant to have; 0 for none, absent where nothing was decided yet.
        waiting: Who may start next, with the slots each wants.
        passive: Whether the waiting may start now.
    """
    jobs = ours(snapshot)
    todo = [_stop(job, target[job.id]) for job in jobs if _misfit(job, target.get(job.id, job.slots))]
    stopped = {one.action.job for one in todo if isinstance(one.action, Stop)}
    todo += [
        Todo(Release(job.id), "it began before its hold came, which would outlast a requeue")
        for job in jobs
        if job.state is JobState.RUNNING and job.held_by_us and job.id not in stopped
    ]
    free = snapshot.free
    for job in jobs:
        want = target.get(job.id, 0)
        if job.state is not JobState.WAITING or want == 0:
            continue
        if not (job.held_by_us or job.shape != want):
            free -= want  # on its way: the cluster starts it
        elif want <= free:
            todo.append(Todo(Start(job.id, want), f"its turn, on {want} as planned"))
            free -= want
        else:
            free -= want  # promised: nobody overtakes it
            if not job.held_by_us:
                todo.append(Todo(Hold(job.id), f"waits for {want} slots"))
    started, _ = start_waiting(_present(jobs, waiting), max(0, free)) if passive else ([], [])
    for number, want in started:
        todo.append(Todo(Start(number, want), f"{want} of {snapshot.free} free slots, next in the ranking", new=True))
    going = {number for number, _ in started}
    for job in jobs:
        idle = job.state is JobState.WAITING and target.get(job.id, 0) == 0 and job.id not in going
        if idle and not job.held_by_us:
            todo.append(Todo(Hold(job.id), "others go first"))
    return todo


def strays(snapshot: ClusterSnapshot, known: frozenset[int]) -> list[Todo]:
    """Releases of the jobs that are held in our name and that nothing was ever decided about."""
    if not snapshot.self_starting:
        return []
    return [
        Todo(Release(job.id), "held in our name, and the journal knows nothing of it")
        for job in snapshot.jobs
        if job.held_by_us and job.state is JobState.WAITING and job.id not in known
    ]


def _misfit(job: ClusterJob, want: int) -> bool:
    return job.state is JobState.RUNNING and want != job.slots


def _stop(job: ClusterJob, want: int) -> Todo:
    why = f"from {job.slots} to {want} slots" if want else f"its {job.slots} slots go to others"
    return Todo(Stop(job.id), why)


def _present(jobs: Sequence[ClusterJob], waiting: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The waiting that still wait, each within what it may use."""
    by_id = {job.id: job for job in jobs if job.state is JobState.WAITING}
    return [
        (number, min(max(want, by_id[number].min_slots), by_id[number].max_slots))
        for number, want in waiting
        if number in by_id
    ]
