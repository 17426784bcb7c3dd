"""Forecasts of jobs' starts, ends and remaining footprint, and the outcomes of these forecasts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from joulery.accounting.forecasts import ForecastScore, JobForecast, scored, with_interval
from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobState
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.runtime.schedule.actions import CLEANER
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
    """Time at which a job that has slots releases them; infinite where that is unknown."""
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


def waiting_line(jobs: Sequence[ClusterJob], state: SchedulerState) -> list[ClusterJob]:
    """The waiting jobs in the order in which they start: those of the plan, then the other ranked ones."""
    waiting = {job.id: job for job in jobs if job.state is JobState.WAITING and not job.exempt}
    ranked = [job for job, slots in state.target.items() if slots] + [job for job, _ in state.waiting]
    return [waiting[job] for job in dict.fromkeys(ranked) if job in waiting]


def why_waits(
    job: ClusterJob, state: SchedulerState, line: Sequence[ClusterJob], now_s: float
) -> tuple[int | None, str]:
    """Rank of a waiting job, from 1, None where it has none, and the reason why it waits.

    Args:
        job: The job.
        state: The scheduler's state.
        line: All waiting jobs in the order in which they start.
        now_s: Unix seconds.
    """
    rank = next((at for at, other in enumerate(line, 1) if other.id == job.id), None)
    ahead = 0 if rank is None else sum(other.pool == job.pool for other in line[: rank - 1])
    until_s, refused = state.refused.get(job.id, (-math.inf, ""))
    if job.exempt or job.blocked:
        reason = job.exempt or f"the cluster does not start it: {job.blocked}"
    elif now_s < until_s:
        reason = refused
    elif job.id in state.patient:
        reason = CLEANER
    elif rank is None:
        acts = math.isfinite(state.next_round_s)
        reason = "not ranked yet: it came after the last round" if acts else "not ranked: no scheduler has acted here"
    elif ahead:
        reason = f"{ahead} job{'s' if ahead > 1 else ''} of its pool before it"
    else:
        reason = f"first in its pool, waits for {job.shape} free slot{'s' if job.shape > 1 else ''}"
    return rank, reason


def held_because(snapshot: ClusterSnapshot, state: SchedulerState, now_s: float) -> dict[int, str]:
    """Text for the cluster on each ranked job that waits: its rank, why it waits, and its expected start, UTC."""
    line = waiting_line(snapshot.jobs, state)
    starts = expected_starts(snapshot, state, line, now_s)
    texts = {}
    for job in line:
        rank, reason = why_waits(job, state, line, now_s)
        start_s = starts.get(job.id, math.inf)
        when = "" if start_s == math.inf else f", expected start {datetime.fromtimestamp(start_s, UTC):%Y-%m-%dT%H:%MZ}"
        texts[job.id] = f"rank {rank} of {len(line)}: {reason}{when}"
    return texts


def job_forecasts(
    snapshot: ClusterSnapshot, state: SchedulerState, g_per_kwh: float, now_s: float
) -> dict[int, tuple[JobForecast, ...]]:
    """Forecasts of every job of which something is known, each with its interval.

    The start of jobs that have not run yet; the end of running jobs that report progress; the grams that these will
    still cause, at their joules a slot-second so far and one intensity.

    Args:
        snapshot: The cluster.
        state: The scheduler's state.
        g_per_kwh: Intensity expected on the mean; NaN where unknown.
        now_s: Unix seconds.
    """
    found: dict[int, list[JobForecast]] = {}

    def add(job: int, kind: str, amount: float, before: float = 0.0) -> None:
        if 0.0 <= amount < math.inf:
            low, high = with_interval(kind, amount, state.scores)
            found.setdefault(job, []).append(JobForecast(kind, now_s, amount, low, high, before))

    starts_s = expected_starts(snapshot, state, waiting_line(snapshot.jobs, state), now_s)
    for job, start_s in starts_s.items():
        first = (tally := state.tallies.get(job)) is None or tally.executed_s == 0.0
        if first and start_s > now_s:  # a job that starts at once is no forecast
            add(job, "start", start_s - now_s)
    for running in snapshot.jobs:
        tally = state.tallies.get(running.id)
        if running.state is not JobState.RUNNING or tally is None or not running.slots:
            continue
        add(running.id, "end", tally.remaining_s / running.slots)
        if tally.slot_s > 0.0 and tally.energy_j > 0.0:
            joules = tally.remaining_s * tally.energy_j / tally.slot_s
            add(running.id, "grams", joules * g_per_kwh / JOULES_PER_KWH, tally.carbon_g)
    return {job: tuple(made) for job, made in found.items()}


def new_forecasts(
    snapshot: ClusterSnapshot, state: SchedulerState, g_per_kwh: float, now_s: float
) -> Iterator[tuple[int, JobForecast]]:
    """The first forecast of each kind of each job (:func:`job_forecasts`), to be compared with its outcome."""
    for job, made in job_forecasts(snapshot, state, g_per_kwh, now_s).items():
        known = {forecast.kind for forecast in state.forecasts.get(job, ())}
        yield from ((job, forecast) for forecast in made if forecast.kind not in known)


@dataclass(frozen=True, slots=True)
class ForecastOutcome:
    """A forecast whose outcome is known now.

    Attributes:
        job: The job.
        forecast: What was expected.
        outcome: Actual value, in the same unit.
        score: The comparison.
    """

    job: int
    forecast: JobForecast
    outcome: float
    score: ForecastScore

    def as_dict(self) -> dict[str, Any]:
        """The log entry: the expected value, when it was predicted, and the outcome."""
        made = self.forecast
        interval = {"low": made.low, "high": made.high, "inside": self.score.inside}
        fields = {"made_s": made.made_s, "expected": made.amount, "outcome": self.outcome}
        return {"job": self.job, "of": made.kind, **fields, **interval}


def outcomes(snapshot: ClusterSnapshot, state: SchedulerState, now_s: float) -> Iterator[ForecastOutcome]:
    """Forecasts whose outcome is known: of jobs that started, and of jobs that ended well."""
    jobs = {job.id: job for job in snapshot.jobs if job.id in state.forecasts}
    for number, job in jobs.items():
        for forecast in state.forecasts[number]:
            outcome = math.nan
            if forecast.kind == "start" and job.state is JobState.RUNNING:
                outcome = (now_s if math.isnan(job.start_s) else job.start_s) - forecast.made_s
            elif forecast.kind == "end" and job.state is JobState.DONE:
                outcome = now_s - forecast.made_s
            elif forecast.kind == "grams" and job.state is JobState.DONE and number in state.tallies:
                outcome = state.tallies[number].carbon_g - forecast.before
            if not math.isnan(outcome):
                outcome = max(0.0, outcome)
                yield ForecastOutcome(number, forecast, outcome, scored(forecast, outcome))
