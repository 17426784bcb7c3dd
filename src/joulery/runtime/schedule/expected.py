"""When each waiting job is expected to start, from what is known of those before it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobState
from joulery.runtime.schedule.state import SchedulerState


def expected_starts(
    snapshot: ClusterSnapshot, state: SchedulerState, line: Sequence[ClusterJob], now_s: float
) -> dict[int, float]:
    """Expected start of waiting jobs, Unix seconds: each at its turn, when enough slots of its pool have come free.

    A job ends at its measured rate of progress, else at its time limit. Later arrivals, preemption and jobs that fill
    gaps are not foreseen.

    Args:
        snapshot: The cluster.
        state: The scheduler's state.
        line: The waiting jobs in the order in which they start.
        now_s: Unix seconds.

    Returns:
        By job; without the jobs whose start depends on one of unknown length.
    """
    free = dict(snapshot.pools)
    ends: dict[str, list[tuple[float, int]]] = {}
    for job in snapshot.jobs:
        if job.slots:
            free[job.pool] = free.get(job.pool, 0) - job.slots
            heapq.heappush(ends.setdefault(job.pool, []), (_end_s(job, state, now_s), job.slots))
    found: dict[int, float] = {}
    at_s = dict.fromkeys(free, now_s)
    planned = dict(state.waiting)
    for job in line:
        if job.blocked or job.pool not in free:
            continue
        want = state.target.get(job.id) or planned.get(job.id, job.shape)
        pending = ends.setdefault(job.pool, [])
        while free[job.pool] < want and pending:
            end_s, slots = heapq.heappop(pending)
            at_s[job.pool] = max(at_s[job.pool], end_s)
            free[job.pool] += slots
        if free[job.pool] < want or at_s[job.pool] == math.inf:
            at_s[job.pool] = math.inf  # it is not known when those behind it start either
            continue
        free[job.pool] -= want
        start_s = max(at_s[job.pool], job.eligible_s)
        found[job.id] = start_s
        heapq.heappush(pending, (start_s + _length_s(job, state, want), want))
    return found


def _end_s(job: ClusterJob, state: SchedulerState, now_s: float) -> float:
    """When a job that has slots gives them back; infinite where that is unknown."""
    if job.state is JobState.STOPPING:
        return now_s
    since_s = now_s if math.isnan(job.start_s) else job.start_s
    measured_s = _measured_s(job, state, job.slots)
    end_s = since_s + job.limit_s if math.isnan(measured_s) else now_s + measured_s
    return math.inf if math.isnan(end_s) else max(end_s, now_s)


def _length_s(job: ClusterJob, state: SchedulerState, slots: int) -> float:
    measured_s = _measured_s(job, state, slots)
    length_s = job.limit_s * job.shape / slots if math.isnan(measured_s) else measured_s
    return math.inf if math.isnan(length_s) else length_s


def _measured_s(job: ClusterJob, state: SchedulerState, slots: int) -> float:
    tally = state.tallies.get(job.id)
    return math.nan if tally is None else tally.remaining_s / slots
