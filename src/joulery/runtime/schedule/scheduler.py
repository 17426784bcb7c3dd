"""The scheduler: one look at the cluster after another, a round of the policy every quantum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson

from joulery.accounting.training_jobs import Look, MeasureRules, Tally, observe
from joulery.config.site import Mode
from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterSnapshot,
    JobEnergy,
    JobState,
    Order,
    Release,
    Start,
)
from joulery.domain.decisions import Step
from joulery.domain.errors import ActuationError, CapabilityError, DataError
from joulery.domain.ports import ClusterBackend
from joulery.domain.quality import Quality
from joulery.policies.training.allocation import Allocation, ClusterView
from joulery.runtime.schedule.decisions import (
    PlannedAction,
    cluster_view,
    kind_name,
    next_actions,
    orphaned_holds,
    schedulable,
)
from joulery.runtime.schedule.energy import NO_TOTALS, energy_delta
from joulery.runtime.schedule.intensity import IntensityTracker
from joulery.runtime.schedule.state import (
    SchedulerState,
    apply_event,
    compacted,
    job_document,
    plan_event,
    replay,
    tallies_event,
)
from joulery.store.journal import Journal, read_back

COMPACT_BYTES = 8 << 20
"""A journal longer than this is rewritten as the two events that give the same state."""


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


class EnergySource(Protocol):
    """Counts the energy of jobs."""

    def read(self, snapshot: ClusterSnapshot) -> Mapping[int, JobEnergy]:
        """Totals of the jobs it measures."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerTiming:
    """The scheduler's times, seconds.

    Attributes:
        quantum_s: Interval between rounds.
        restart_s: Time a job loses when it is moved.
        measure: When an efficiency counts as measured.
    """

    quantum_s: float
    restart_s: float
    measure: MeasureRules


@dataclass(slots=True)
class TickResult:
    """The result of one look at the cluster.

    Attributes:
        snapshot: The cluster; None when it did not answer.
        round: Whether the policy made a round.
        unreachable: Whether the cluster stopped answering during the actions; no further action was tried.
        done: Actions in order: action, reason, outcome (``applied``, ``advised``, ``shadow``, ``failed``).
    """

    snapshot: ClusterSnapshot | None = None
    round: bool = False
    unreachable: bool = False
    done: list[tuple[ClusterAction, str, str]] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """True when no action was due and no job is stopping."""
        jobs = () if self.snapshot is None else self.snapshot.jobs
        return self.snapshot is not None and not self.done and all(j.state is not JobState.STOPPING for j in jobs)


class Scheduler:
    """Drives on a real cluster the same policy object that simulations drive.

    Args:
        backend: The cluster.
        policy: Decides.
        journal: Events so far; every further event is appended before it is acted on.
        energy: Counts the energy of jobs.
        intensity: Carbon intensity of the grid.
        log: Writes ``(kind, fields)`` to the log of the run.
        mode: ``act`` applies actions, ``shadow`` plays them through without applying any, ``advise`` logs them once a
            round and journals nothing.
        timing: Times.

    Attributes:
        state: The fold of the journal's events.
    """

    def __init__(
        self,
        backend: ClusterBackend,
        policy: JournaledPolicy,
        journal: Journal,
        energy: EnergySource,
        intensity: IntensityTracker,
        log: Callable[[str, Mapping[str, Any]], None],
        *,
        mode: Mode,
        timing: SchedulerTiming,
    ) -> None:
        self._backend, self._policy, self._journal, self._energy = backend, policy, journal, energy
        self._intensity, self._log, self._mode, self._timing = intensity, log, mode, timing
        self.state, unread = replay(journal.entries)
        if unread:
            log("note", {"text": f"{unread} journal events cannot be read and are left out"})
        self._check_policy()
        self._looked_s, self._compact_bytes = math.nan, COMPACT_BYTES
        self._first = True
        self._shadowed: dict[int, ClusterAction] = {}

    def tick(self, now_s: float, elapsed_s: float | None = None, *, round_now: bool = False) -> TickResult:
        """Look at the cluster, count energy, make a round if one is due, and apply the actions that are due.

        A cluster that does not answer is left unchanged until it does; a failed action is tried again at the next tick.

        Args:
            now_s: Unix seconds.
            elapsed_s: Time since the last tick by a monotonic clock; from ``now_s`` when not given.
            round_now: Make a round even if none is due.
        """
        tick = TickResult()
        try:
            tick.snapshot = snapshot = self._backend.snapshot()
        except (CapabilityError, DataError) as error:
            self._log("unreachable", {"text": str(error)})
            self._looked_s = math.nan
            return tick
        if self._first:
            self._first = False
            for planned in orphaned_holds(snapshot, frozenset(j.id for j in snapshot.jobs if self.state.knows(j.id))):
                self._do(planned, tick)
            if tick.done and self._mode is Mode.ACT:
                return tick
        self._inherit(snapshot)
        self._meet(snapshot)
        self._count(snapshot, now_s, elapsed_s)
        self._forget(snapshot)
        if round_now or self._due(now_s):
            tick.round = True
            self._round(snapshot, now_s)
        self._queue_new(snapshot)
        if self._mode is not Mode.ADVISE or tick.round:
            self._act(snapshot, tick)
        if self._mode is not Mode.ADVISE and self._journal.size_bytes > self._compact_bytes:
            self._journal.replace(compacted(self.state))
            self._compact_bytes = max(COMPACT_BYTES, 2 * self._journal.size_bytes)
        return tick

    def record(self, kind: str, **fields: Any) -> None:
        """Append an event to the journal and apply it; in mode ``advise`` only apply it."""
        journaled = self._mode is not Mode.ADVISE
        event = self._journal.append(kind, **fields) if journaled else read_back(kind, fields)
        self.state = apply_event(self.state, event)

    def _check_policy(self) -> None:
        """Start the policy anew where it cannot read its state in the journal."""
        if self.state.policy is None:
            return
        try:
            self._policy.recall(self.state.policy)
        except DataError as error:
            self._log("note", {"text": f"the policy begins anew: {error}"})
            self.record("plan", **plan_event(self.state, policy=None))

    def _act(self, snapshot: ClusterSnapshot, tick: TickResult) -> None:
        state = self.state
        for planned in next_actions(snapshot, state.target, state.waiting, passive=state.passive):
            if not tick.unreachable:
                self._do(planned, tick)
        if tick.round and not tick.unreachable and snapshot.self_starting:
            self._do(PlannedAction(self._order(snapshot), "the ranking of this round"), tick)

    def _due(self, now_s: float) -> bool:
        """Whether a round is due; a clock that was set back delays it by at most a quantum."""
        return not now_s < self.state.next_round_s or self.state.next_round_s - now_s > self._timing.quantum_s

    def _inherit(self, snapshot: ClusterSnapshot) -> None:
        """A job that continues under another number keeps its place, its cost and the policy's state of it."""
        for job in snapshot.jobs:
            if job.follows and not self.state.knows(job.id) and self.state.knows(job.follows):
                self.record("follows", job=job.id, after=job.follows)

    def _meet(self, snapshot: ClusterSnapshot) -> None:
        """Record the first submission of new jobs, and kinds of job not seen before."""
        state = self.state
        new = [job for job in schedulable(snapshot) if job.id not in state.submitted_s]
        new.sort(key=lambda job: (job.submit_s, job.id))
        kinds = [kind for kind in dict.fromkeys(map(kind_name, new)) if kind not in state.kinds]
        if new:
            self.record("known", jobs={str(job.id): job.submit_s for job in new}, kinds=kinds)

    def _count(self, snapshot: ClusterSnapshot, now_s: float, elapsed_s: float | None) -> None:
        """Record the tallies that changed since the last tick."""
        if elapsed_s is None:
            elapsed_s = 0.0 if math.isnan(self._looked_s) else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        totals, carbon, state = self._energy.read(snapshot), self._intensity.history(now_s), self.state
        ended = (job for job in snapshot.jobs if job.state.over and job.id in state.tallies)
        tallies, seen, who, changed = dict(state.tallies), dict(state.energy_seen), dict(state.who), []
        for job in (*schedulable(snapshot), *ended):
            energy_j, slot_j, quality = math.nan, math.nan, Quality.MEASURED
            if (total := totals.get(job.id)) is not None:
                energy_j, slot_j, seen[job.id] = energy_delta(seen.get(job.id, NO_TOTALS), total)
                quality = total.quality
            look = Look(now_s, elapsed_s, job.slots, job.restarts, job.progress_ratio, energy_j, slot_j, quality)
            tallies[job.id] = observe(tallies.get(job.id, Tally()), look, self._timing.measure, carbon)
            who[job.id] = (job.owner, job.name, job.partition)
            changed.append(job.id)
        new = replace(state, tallies=tallies, energy_seen=seen, who=who)
        changed = [job for job in changed if job not in state.tallies or _differs(state, new, job)]
        if changed:
            self.record("tallies", **tallies_event(new, changed))

    def _forget(self, snapshot: ClusterSnapshot) -> None:
        """Jobs that are over, or that the cluster no longer knows, leave the state; their cost goes to the log."""
        alive = {job.id for job in snapshot.jobs if not job.state.over}
        ended = {job.id: job for job in snapshot.jobs if job.state.over}
        state = self.state
        tracked = {*state.target, *state.tallies, *state.submitted_s, *(job for job, _ in state.waiting)}
        for number in sorted(tracked - alive):
            if number in state.tallies or state.knows(number):
                self._log("over", {"job": number, **_facts(ended.get(number)), **_cost(state.tallies.get(number))})
            self.record("gone", job=number)

    def _round(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """One round of the policy; its plan is recorded."""
        grid, jobs, state = self._intensity.grid(now_s), schedulable(snapshot), self.state
        view = cluster_view(snapshot, jobs, state, grid, now_s, self._timing.restart_s)
        next_round_s = now_s + self._timing.quantum_s
        if view.gpus < 1:
            self._log("round", {"text": "no slots are up: nothing is decided", "jobs": len(jobs)})
            self.record("plan", **plan_event(state, next_round_s=next_round_s))
            return
        before = self._policy.initial() if state.policy is None else self._policy.recall(state.policy)
        step = self._policy.step(before, view)
        changes: dict[str, Any] = {"policy": self._policy.remember(step.state), "next_round_s": next_round_s}
        for decision in step.decisions:
            allocation = decision.value
            assert isinstance(allocation, Allocation)
            target = {int(job): int(allocation.run.get(job, 0)) for job in view.job.tolist()}
            changes |= {
                "target": target,
                "waiting": tuple((int(job), int(slots)) for job, slots in allocation.waiting),
                "newcomers": dict(allocation.newcomer_gpus),
                "passive": allocation.passive,
            }
            self._log("round", {**_seen(snapshot, view, grid.basis), "target": target, "text": decision.reason})
        self.record("plan", **plan_event(state, **changes))

    def _queue_new(self, snapshot: ClusterSnapshot) -> None:
        """Jobs submitted since the last round queue behind the ranked ones, at the size their kind starts with."""
        state = self.state
        known = {*state.target, *(job for job, _ in state.waiting)}
        kinds = {name: number for number, name in enumerate(state.kinds)}
        for job in sorted(schedulable(snapshot), key=lambda job: (job.submit_s, job.id)):
            if job.id in known:
                continue
            if job.state is not JobState.WAITING:
                self.record("started", job=job.id, slots=job.slots)
            else:
                slots = state.newcomers.get(kinds.get(kind_name(job), -1), job.min_slots)
                self.record("arrived", job=job.id, slots=slots)

    def _order(self, snapshot: ClusterSnapshot) -> Order:
        state = self.state
        ranked = [job for job, slots in state.target.items() if slots] + [job for job, _ in state.waiting]
        waiting = {job.id for job in schedulable(snapshot) if job.state is JobState.WAITING}
        return Order(tuple(job for job in dict.fromkeys(ranked) if job in waiting))

    def _do(self, planned: PlannedAction, tick: TickResult) -> None:
        """One action: recorded, applied in mode ``act``, and logged with its outcome."""
        action = planned.action
        if isinstance(action, Order) and not action.jobs:
            return
        if self._mode is Mode.SHADOW and self._repeats(action):
            return
        outcome, remark = ("advised", "") if self._mode is Mode.ADVISE else ("shadow", "")
        if isinstance(action, Start) and planned.new and self._mode is not Mode.ADVISE:
            self.record("started", job=action.job, slots=action.slots)
        if self._mode is Mode.ACT:
            try:
                outcome, remark = "applied", self._backend.apply(action)
            except (ActuationError, CapabilityError, DataError) as error:
                outcome, remark = "failed", str(error)
                tick.unreachable = not isinstance(error, ActuationError)
                if isinstance(action, Start) and not tick.unreachable:
                    self._keep_shape(action, tick)
        tick.done.append((action, planned.reason, outcome))
        jobs = {"jobs": list(action.jobs)} if isinstance(action, Order) else {"job": action.job}
        slots = {"slots": action.slots} if isinstance(action, Start) else {}
        fields = {"reason": planned.reason, "outcome": outcome, "remark": remark}
        self._log("action", {"do": type(action).__name__.lower(), **jobs, **slots, **fields})

    def _keep_shape(self, refused: Start, tick: TickResult) -> None:
        """Plan a job at its own size until the next round where the cluster refuses to resize it."""
        assert tick.snapshot is not None
        shape = next((job.shape for job in tick.snapshot.jobs if job.id == refused.job), refused.slots)
        if shape != refused.slots:
            self.record("started", job=refused.job, slots=shape)

    def _repeats(self, action: ClusterAction) -> bool:
        """Whether this repeats the last shadow action on the job: in shadow mode the cluster never follows."""
        job = 0 if isinstance(action, Order) else action.job
        if self._shadowed.get(job) == action:
            return True
        self._shadowed[job] = action
        return False


def release_all(backend: ClusterBackend) -> list[int]:
    """Release every job that joulery holds, and return their numbers.

    Raises:
        CapabilityError: The cluster does not answer.
        ActuationError: Some could not be released.
    """
    released, left = [], []
    snapshot = backend.snapshot()
    for job in snapshot.jobs if snapshot.self_starting else ():
        if job.held_by_us and not job.state.over:
            try:
                backend.apply(Release(job.id))
                released.append(job.id)
            except ActuationError as error:
                left.append(f"job {job.id}: {error}")
    if left:
        raise ActuationError(
            f"{len(left)} jobs stay held",
            applied=tuple(f"released {job}" for job in released),
            left_dirty=tuple(left),
            hint="scontrol release JOB",
        )
    return released


def _differs(old: SchedulerState, new: SchedulerState, job: int) -> bool:
    """Whether the documents of a job differ; compared as JSON, where NaN equals NaN."""
    return orjson.dumps(job_document(old, job)) != orjson.dumps(job_document(new, job))


def _facts(job: ClusterJob | None) -> dict[str, Any]:
    if job is None:
        return {"state": "unknown"}
    who = {"name": job.name, "owner": job.owner, "partition": job.partition}
    return {"state": job.state, **who, "restarts": job.restarts}


def _cost(tally: Tally | None) -> dict[str, Any]:
    tally = Tally() if tally is None else tally
    return {
        "executed_s": tally.executed_s,
        "slot_s": tally.slot_s,
        "energy_j": tally.energy_j,
        "carbon_g": tally.carbon_g,
        "carbon_covered_j": tally.carbon_covered_j,
        "unmetered_s": tally.unmetered_s,
        "quality": tally.quality,
    }


def _seen(snapshot: ClusterSnapshot, view: ClusterView, basis: str) -> dict[str, Any]:
    """The policy's view, for the log."""
    names = ("job", "submit_s", "running", "max_gpus", "requested", "kind", "executed_s", "attained_gpu_s",
               "remaining_s", "footprint_kg", "degradation", "gpu_w", "min_gpus")  # fmt: skip
    return {
        "view": {
            **{name: getattr(view, name) for name in ("now_s", "gpus", "g_per_kwh", "mean_g_per_kwh", "restart_s")},
            **{name: getattr(view, name) for name in names},
        },
        "mean_of": basis,
        "free": snapshot.free,
        "notes": list(snapshot.notes),
    }
