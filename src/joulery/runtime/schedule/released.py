"""Find released jobs that the cluster does not start, whose slots go to others, and holds that are to be released."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobState, Release
from joulery.runtime.schedule.actions import FreeSlots, PlannedAction


@dataclass(frozen=True, slots=True)
class _Fit:
    """Time since which a released job fits, and whether the cluster had judged it by then."""

    since_s: float
    judged: bool


@dataclass(slots=True)
class ReleasedJobs:
    """Tracks planned jobs that are released, from one snapshot of the cluster to the next.

    Jobs are checked in order, and each takes its slots before the next one is checked: a job that waits for earlier
    ones does not count as one that the cluster does not start. A job has ``start_s`` from the snapshot in which its
    slots were first free: slots may take longer to become free, where a stopped job uses its grace.

    Args:
        start_s: How long a job may take to start on free slots.
    """

    start_s: float
    _fits: dict[int, _Fit] = field(default_factory=dict)
    _waited: frozenset[int] = frozenset()

    def look(
        self, snapshot: ClusterSnapshot, target: Mapping[int, int], now_s: float, released_s: Callable[[int], float]
    ) -> dict[int, str]:
        """The jobs that give their slots to others, and why.

        A job gives them up at once where the cluster judged it while they were free, or started a job that was not
        before it on them; else after ``start_s``: a verdict from before they were free is not counted.

        Args:
            snapshot: The cluster.
            target: Slots planned for each job, in order of precedence; 0 for none.
            now_s: Unix seconds.
            released_s: Returns when a job was first seen released, Unix seconds; called for every released job.
        """
        free, before, refused = FreeSlots(snapshot), self._fits, dict[int, str]()
        waited, self._fits, overtaken = self._waited, {}, True
        self._waited = frozenset(job.id for job in snapshot.jobs if job.state is JobState.WAITING)
        jobs = {job.id: job for job in snapshot.jobs}
        for number in (number for number, slots in target.items() if slots > 0 and number in jobs):
            job = jobs[number]
            if job.state is JobState.STOPPING:
                free.reserve(job, max(0, target[number] - job.slots))
            if number in waited and number not in self._waited:
                overtaken = False  # it started before those that follow, and the cluster may have placed it elsewhere
            if job.state is not JobState.WAITING or job.blocked:
                continue
            # One that is held still is released next, and nothing is expected of the cluster before.
            since_s = now_s if job.held_by_us else max(released_s(number), job.eligible_s)
            fits = free.take(job, job.shape)
            if job.held_by_us or now_s < job.eligible_s:
                continue
            fit = before.get(number)
            if not fits and fit is not None and overtaken:
                refused[number] = "was passed over: another job started on its slots"
            elif fits and (reason := self._late(job, fit, since_s, now_s)):
                refused[number] = reason
        return refused

    def _late(self, job: ClusterJob, before: _Fit | None, since_s: float, now_s: float) -> str:
        """Reason why a job that fits gives its slots up; empty where it does not."""
        fit = self._fits[job.id] = before or _Fit(now_s, job.judged)
        if job.judged and not fit.judged:
            return "lacks resources other than free slots, reports the cluster"
        late = now_s - max(since_s, fit.since_s) > self.start_s
        return f"did not start on free slots within {self.start_s:g} s" if late else ""


def orphaned_holds(snapshot: ClusterSnapshot, known: frozenset[int]) -> list[PlannedAction]:
    """Releases of the jobs that joulery holds and that are not in the journal."""
    if not snapshot.self_starting:
        return []
    return [
        PlannedAction(Release(job.id), "held by joulery, and the journal does not know it")
        for job in snapshot.jobs
        if job.held_by_us and job.state is JobState.WAITING and job.id not in known and job.tasks == 1
    ]
