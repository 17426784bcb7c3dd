"""Plan a round of the scheduler: the policy's view of each pool of slots, and the plan made from its decisions.

Each pool is planned by classes of the cluster's own priority, one class after the other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from joulery.accounting.training_jobs import MeasureRules, Tally
from joulery.domain.cluster import ClusterJob, ClusterSnapshot, JobState
from joulery.domain.decisions import Step
from joulery.policies.training.allocation import Allocation, ClusterView
from joulery.runtime.schedule.intensity_tracker import GridIntensity
from joulery.runtime.schedule.state import SchedulerState

_G_PER_KG = 1e3


class JournaledPolicy(Protocol):
    """A training policy whose state can be written to the journal."""

    def initial(self) -> Any:
        """The state before the first round."""
        ...

    def step(self, state: Any, observation: ClusterView, /) -> Step[Any]:
        """One round."""
        ...

    def remember(self, state: Any, /) -> Mapping[str, Any]:
        """The state, JSON-ready."""
        ...

    def recall(self, document: Mapping[str, Any], /) -> Any:
        """The state that :meth:`remember` wrote."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerTiming:
    """The scheduler's times, seconds.

    Attributes:
        quantum_s: Interval between rounds.
        restart_s: Time a job loses when it is moved.
        measure: When an efficiency counts as measured.
        least_run_s: A job that started less than this ago is not stopped.
        start_s: How long a released job may take to start on free slots before it reserves them no longer.
    """

    quantum_s: float
    restart_s: float
    measure: MeasureRules
    least_run_s: float = 0.0
    start_s: float = 60.0


def schedulable(snapshot: ClusterSnapshot) -> tuple[ClusterJob, ...]:
    """The jobs that are not over and not exempt; of an array the tasks that are separated from it."""
    return tuple(job for job in snapshot.jobs if not job.state.over and not job.exempt and job.tasks == 1)


def fresh_tasks(snapshot: ClusterSnapshot) -> dict[int, set[int]]:
    """Waiting tasks that never ran, by array."""
    found: dict[int, set[int]] = {}
    for job in schedulable(snapshot):
        if job.array and job.state is JobState.WAITING and not job.restarts:
            found.setdefault(job.array, set()).add(job.id)
    return found


def kind_name(job: ClusterJob) -> str:
    """The recurring kind of a job: same owner, name and least size."""
    return f"{job.owner}/{job.name}/{job.min_slots}"


def latest_start_s(job: ClusterJob, restart_s: float) -> float:
    """Latest start of a job that never ran to meet its deadline; infinite without one, NaN where it is unknown."""
    return job.deadline_s - job.limit_s * job.shape / job.min_slots - 2 * restart_s


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rules on which running jobs may be stopped now.

    Attributes:
        jobs: Those that the last round moves; None for every job whose size differs from the plan's.
        now_s: Unix seconds.
        least_run_s: A job that started less than this ago runs on.
        patience_s: A planned job that has waited this long and finds no place, and the first in line, are released all
            the same: the cluster keeps a place for them, as it does for the first of its own queue.
    """

    jobs: frozenset[int] | None = None
    now_s: float = math.inf
    least_run_s: float = 0.0
    patience_s: float = math.inf

    def allow(self, job: ClusterJob, *, young: bool = False) -> bool:
        """Whether this running job may be stopped; with ``young``, whether it may be once it has run long enough."""
        too_young = self.now_s - job.start_s < self.least_run_s  # False where the start is unknown
        return job.stoppable and (young or not too_young) and (self.jobs is None or job.id in self.jobs)


def capacity(snapshot: ClusterSnapshot, pool: str, jobs: Sequence[ClusterJob]) -> int:
    """Slots of a pool that these jobs may share: all but those of other jobs."""
    own = {job.id for job in jobs}
    others = sum(job.slots for job in snapshot.jobs if job.id not in own and job.pool == pool)
    return max(0, snapshot.pools.get(pool, 0) - others)


def cluster_view(
    jobs: Sequence[ClusterJob],
    state: SchedulerState,
    grid: GridIntensity,
    now_s: float,
    restart_s: float,
    gpus: int,
    round_s: float = 1800.0,
) -> ClusterView:
    """The policy's view at a round. Where the intensity is unknown it has no power either, and no job is shifted.

    Args:
        jobs: The jobs to rank, each with its kind in ``state.kinds``.
        state: The scheduler's state.
        grid: Intensities.
        now_s: Unix seconds.
        restart_s: Time a job loses when it is moved.
        gpus: Slots these jobs may share.
        round_s: Interval between rounds.
    """
    submitted_s = {job.id: state.submitted_s.get(job.id, job.submit_s) for job in jobs}
    kinds = {name: number for number, name in enumerate(state.kinds)}
    ordered = sorted(jobs, key=lambda job: _place(job, submitted_s[job.id]))
    tallies = [state.tallies.get(job.id, Tally()) for job in ordered]
    running = [job.slots if job.state is JobState.RUNNING else 0 for job in ordered]
    degradation = [
        tally.degradation(n, job.min_slots) if n else math.nan
        for job, tally, n in zip(ordered, tallies, running, strict=True)
    ]
    return ClusterView(
        now_s=now_s,
        gpus=gpus,
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
        **_deadlines(ordered, grid),
        round_s=round_s,
        ended_gpu_s=np.array(state.ended_slot_s, np.float64),
        job_w=np.array([tally.job_w.get(n, math.nan) for tally, n in zip(tallies, running, strict=True)], np.float64),
    )


def _place(job: ClusterJob, submitted_s: float) -> tuple[float, bool, bool, int]:
    """Sort key of a job: of jobs submitted together the running ones go first, so that none stops another.

    The rest of an array has the array's own number, the least of all, and is sorted as its last task.
    """
    return submitted_s, job.state is not JobState.RUNNING, job.id == job.array, job.id


def _deadlines(jobs: Sequence[ClusterJob], grid: GridIntensity) -> dict[str, Any]:
    """The policy's view of deadlines, and of the hours ahead: a job with a deadline may come between rounds."""
    expected = 0.0 if math.isnan(grid.expected_g_per_kwh) else grid.expected_g_per_kwh
    ahead = {"ahead_g_per_kwh": grid.ahead_g_per_kwh if grid.known else None, "expected_g_per_kwh": expected}
    if all(job.deadline_s == math.inf for job in jobs):
        return ahead
    return {
        **ahead,
        "deadline_s": np.array([job.deadline_s for job in jobs], np.float64),
        "longest_s": np.array([job.limit_s * job.shape for job in jobs], np.float64),
    }


class _Plan:
    """The plan of a round while its groups are planned.

    A policy sees the jobs of one group at a time; its state of other jobs stays in its document.
    """

    def __init__(self, policy: Mapping[str, Any] | None) -> None:
        self.policy = policy
        self.target: dict[int, int] = {}
        self.waiting: list[tuple[int, int]] = []
        self.newcomers: dict[int, int] = {}
        self.passive = True
        self.patient: set[int] = set()
        self.hold_slack_s = math.inf
        self.holds: dict[str, int] = {}

    def policy_of(self, members: list[ClusterJob]) -> dict[str, Any] | None:
        """The policy's document with the jobs of a group alone; None before the first round."""
        if self.policy is None:
            return None
        own = {str(job.id) for job in members}
        jobs = {job: entry for job, entry in self.policy.get("jobs", {}).items() if job in own}
        return {**self.policy, "jobs": jobs}

    def remember(self, document: Mapping[str, Any], members: list[ClusterJob]) -> None:
        """Keep the policy's document after the round of a group."""
        own = {str(job.id) for job in members}
        others = {} if self.policy is None else self.policy.get("jobs", {})
        kept = {job: entry for job, entry in others.items() if job not in own}
        self.policy = {**document, "jobs": {**kept, **document.get("jobs", {})}}


class RoundPlanner:
    """Plans rounds.

    Args:
        policy: The training policy.
        timing: Times of the scheduler.
        log: Writes ``(kind, fields)`` to the log of the run.
        priority_step: Points of the cluster's own priority that make a class; 0 for one class.
    """

    def __init__(
        self,
        policy: JournaledPolicy,
        timing: SchedulerTiming,
        log: Callable[[str, Mapping[str, Any]], None],
        priority_step: float,
    ) -> None:
        self._policy, self._timing, self._log, self._priority_step = policy, timing, log, priority_step

    def plan(
        self, state: SchedulerState, snapshot: ClusterSnapshot, grid: GridIntensity, now_s: float
    ) -> dict[str, Any]:
        """The fields of the state that a round changes."""
        jobs, changes = self._plannable(snapshot, now_s), {"next_round_s": now_s + self._timing.quantum_s}
        if not any(slots > 0 for slots in snapshot.pools.values()):
            self._log("round", {"text": "no slots are up: nothing is decided", "jobs": len(jobs)})
            return changes
        plan = _Plan(state.policy)
        left: dict[str, int] = {}
        planned = False
        groups = list(self._groups(state, jobs)) or [(min(snapshot.pools), 0.0, [])]
        for pool, rank, members in groups:
            gpus = left.setdefault(pool, capacity(snapshot, pool, [job for job in jobs if job.pool == pool]))
            where = {"pool": pool, "class": rank} if len(groups) > 1 else {}
            if gpus < 1:
                plan.holds[pool] = 0
                plan.target |= {job.id: 0 for job in members}
                plan.waiting += [(job.id, job.min_slots) for job in members]
                continue
            timing = self._timing
            view = cluster_view(members, state, grid, now_s, timing.restart_s, gpus, timing.quantum_s)
            seen = {**_view_document(snapshot, view, grid.basis), **where}
            left[pool] -= self._plan_group(plan, pool, members, view, seen)
            planned = True
        if not planned:
            reason = "jobs that are left alone hold every slot that is up: the others wait in their order"
            self._log("round", {"text": reason, "jobs": len(jobs)})
        by_id = {job.id: job for job in jobs}
        ranked = dict(self._across_pools(state, by_id, ((job, n) for job, n in plan.target.items() if n)))
        moved = {job.id for job in jobs if job.state is JobState.RUNNING and plan.target.get(job.id) != job.slots}
        return {
            **changes,
            "policy": plan.policy,
            "target": {**ranked, **{job: 0 for job in plan.target if job not in ranked}},
            "waiting": tuple(self.with_blocked(state, snapshot, plan.waiting)),
            "newcomers": plan.newcomers,
            "passive": plan.passive,
            "stops": frozenset(moved),
            "patient": frozenset(plan.patient),
            "hold_slack_s": plan.hold_slack_s,
            "holds": {} if plan.hold_slack_s == math.inf else {**snapshot.pools, **plan.holds},
        }

    def priorities(self, state: SchedulerState, snapshot: ClusterSnapshot) -> dict[int, float]:
        """The cluster's own priority of the jobs whose class it changes.

        A cluster may show no priority of a job that is held or runs. Such a job has that of a job of the same user,
        account, QOS and partition, else the one it had when it was last seen, else that of the rest of its array.
        """
        if not self._priority_step:
            return {}
        shown = {job.id: job.priority for job in snapshot.jobs if not math.isnan(job.priority)}
        alike = {job.limits: job.priority for job in snapshot.jobs if job.id in shown and job.limits}
        found: dict[int, float] = {}
        for job in schedulable(snapshot):
            known = state.priority.get(job.id, math.nan)
            others = (shown.get(job.id), alike.get(job.limits), state.priority.get(job.id), shown.get(job.array))
            priority = next((points for points in others if points is not None), math.nan)
            if not math.isnan(priority) and (math.isnan(known) or self._class(priority) != self._class(known)):
                found[job.id] = priority
        return found

    def place_of(self, state: SchedulerState, job: int, alike: Collection[int] = ()) -> int:
        """Place of a new job among the waiting ones: behind the last one of its class or of a higher one.

        Args:
            state: The scheduler's state.
            job: The job.
            alike: Tasks of its array that wait and never ran: it queues behind the last of them of its class, and jobs
                that came after the array do not pass it.
        """
        rank = self._class(state.priority.get(job, 0.0))
        ranks = [(number, self._class(state.priority.get(number, 0.0))) for number, _ in state.waiting]
        places = [at + 1 for at, (number, other) in enumerate(ranks) if number in alike and other == rank]
        return max(places or (at + 1 for at, (_, other) in enumerate(ranks) if other >= rank), default=0)

    def with_blocked(
        self, state: SchedulerState, snapshot: ClusterSnapshot, waiting: Iterable[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Waiting jobs in order with those the cluster would not start now, each in its turn.

        The policy does not see a blocked job, so it takes no slots; it is placed before the jobs of its pool and class
        that came after it. Without a place it would start last once its limit allows.
        """
        by_id = {job.id: job for job in snapshot.jobs}
        kinds = {name: number for number, name in enumerate(state.kinds)}
        lines: dict[str, list[tuple[int, int]]] = {}
        for entry in waiting:
            if by_id[entry[0]].blocked:
                continue
            lines.setdefault(by_id[entry[0]].pool, []).append(entry)
        for job in schedulable(snapshot):
            if job.blocked and job.state is JobState.WAITING:
                line, turn = lines.setdefault(job.pool, []), self._order_key(state, job)
                later = (at for at, entry in enumerate(line) if self._order_key(state, by_id[entry[0]]) > turn)
                slots = state.newcomers.get(kinds.get(kind_name(job), -1), job.min_slots)
                line.insert(next(later, len(line)), (job.id, slots))
        return list(self._across_pools(state, by_id, [entry for line in lines.values() for entry in line]))

    def _class(self, priority: float) -> float:
        return math.floor(priority / self._priority_step) if self._priority_step else 0.0

    def _plan_group(
        self, plan: _Plan, pool: str, members: list[ClusterJob], view: ClusterView, seen: Mapping[str, Any]
    ) -> int:
        """Plan the jobs of one pool and class.

        Returns:
            The slots they use.
        """
        document = plan.policy_of(members)
        kept = self._policy.initial() if document is None else self._policy.recall(document)
        step = self._policy.step(kept, view)
        plan.remember(self._policy.remember(step.state), members)
        used = 0
        for decision in step.decisions:
            allocation = decision.value
            assert isinstance(allocation, Allocation)
            target = {int(job): int(slots) for job, slots in allocation.run.items()}
            target |= {job.id: 0 for job in members if job.id not in target}
            plan.target |= target
            plan.waiting += [(int(job), int(slots)) for job, slots in allocation.waiting]
            plan.newcomers |= {int(kind): int(slots) for kind, slots in allocation.newcomer_gpus.items()}
            plan.passive = plan.passive and allocation.passive
            plan.patient |= set(map(int, allocation.held))
            plan.hold_slack_s = min(plan.hold_slack_s, allocation.hold_slack_s)
            plan.holds[pool] = min(plan.holds.get(pool, allocation.hold_gpus), allocation.hold_gpus)
            self._log("round", {**seen, "target": target, "text": decision.reason})
            used = sum(target.values())
        return used

    def _across_pools(
        self, state: SchedulerState, by_id: Mapping[int, ClusterJob], planned: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """One order of the jobs of all pools: each pool's own, merged by class and then by submission.

        Pools share limits, such as a user's or that of a license. If pools followed one another, the first would take
        all that the limit leaves.
        """
        lines: dict[str, list[tuple[int, int]]] = {}
        for entry in planned:
            lines.setdefault(by_id[entry[0]].pool, []).append(entry)
        return heapq.merge(*lines.values(), key=lambda entry: self._order_key(state, by_id[entry[0]]))

    def _order_key(self, state: SchedulerState, job: ClusterJob) -> tuple[float, float, int]:
        """Sorts jobs by class, the highest first, and then by submission."""
        return -self._class(state.priority.get(job.id, 0.0)), state.submitted_s.get(job.id, job.submit_s), job.id

    def _plannable(self, snapshot: ClusterSnapshot, now_s: float) -> list[ClusterJob]:
        """The jobs a round ranks: not those the cluster would not start, nor running ones that may not be stopped."""
        rules = StopRules(None, now_s, self._timing.least_run_s)
        return [
            job
            for job in schedulable(snapshot)
            if not job.blocked and (job.state is not JobState.RUNNING or rules.allow(job))
        ]

    def _groups(self, state: SchedulerState, jobs: list[ClusterJob]) -> Iterator[tuple[str, float, list[ClusterJob]]]:
        """Jobs by pool, and within a pool by class of the cluster's own priority, the highest first."""
        groups: dict[tuple[str, float], list[ClusterJob]] = {}
        for job in jobs:
            rank = self._class(state.priority.get(job.id, 0.0))
            groups.setdefault((job.pool, rank), []).append(job)
        for pool, rank in sorted(groups, key=lambda group: (group[0], -group[1])):
            yield pool, rank, groups[pool, rank]


def _view_document(snapshot: ClusterSnapshot, view: ClusterView, basis: str) -> dict[str, Any]:
    """The policy's view, for the log."""
    names = ("job", "submit_s", "running", "max_gpus", "requested", "kind", "executed_s", "attained_gpu_s",
               "remaining_s", "footprint_kg", "degradation", "gpu_w", "min_gpus", "deadline_s", "longest_s",
               "ahead_g_per_kwh", "round_s", "ended_gpu_s", "job_w")  # fmt: skip
    return {
        "view": {
            **{name: getattr(view, name) for name in ("now_s", "gpus", "g_per_kwh", "mean_g_per_kwh", "restart_s")},
            **{name: getattr(view, name) for name in names},
        },
        "mean_of": basis,
        "free": snapshot.free,
        "notes": list(snapshot.notes),
    }
