"""The scheduler: reads the cluster at every tick, and makes a round of the policy every quantum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC
from typing import Any, Protocol, runtime_checkable

from joulery.accounting.training_jobs import Tally, observe
from joulery.config.site import Mode
from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterSnapshot,
    Hold,
    JobEnergy,
    JobState,
    Order,
    Release,
    Split,
    Start,
)
from joulery.domain.errors import ActuationError, CapabilityError, DataError
from joulery.domain.ports import ClusterBackend
from joulery.months import month_of
from joulery.runtime.schedule.actions import PlannedAction, next_actions
from joulery.runtime.schedule.energy import NO_TOTALS, look_at
from joulery.runtime.schedule.expected import held_because, new_forecasts, outcomes
from joulery.runtime.schedule.intensity_tracker import IntensityTracker
from joulery.runtime.schedule.polling import PAUSE_S, SnapshotReader
from joulery.runtime.schedule.released import ReleasedJobs, orphaned_holds
from joulery.runtime.schedule.rounds import (
    JournaledPolicy,
    RoundPlanner,
    SchedulerTiming,
    StopRules,
    fresh_tasks,
    kind_name,
    latest_start_s,
    schedulable,
)
from joulery.runtime.schedule.state import (
    apply_event,
    compacted,
    differs,
    end_facts,
    forecast_event,
    job_cost,
    plan_event,
    replay_events,
    scored_fields,
    tallies_event,
)
from joulery.store.journal import Journal, read_back

COMPACT_BYTES = 8 << 20
"""A journal longer than this is rewritten as the two events that give the same state."""

_MEASUREMENTS = ("tallies", "forecast", "scored")
_REFUSED_QUANTA = 4
_PATIENCE_QUANTA = 3
_LEAST_PROGRESS = 0.02
"""Progress below this is not checked for loss."""


class EnergySource(Protocol):
    """Counts the energy of jobs."""

    def read(self, snapshot: ClusterSnapshot) -> Mapping[int, JobEnergy]:
        """Totals of the jobs it measures."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A cluster that shows its users why jobs wait."""

    def explain(self, texts: Mapping[int, str]) -> str:
        """Show the text of each held job; return the reason where that fails, once, else an empty text."""
        ...


@dataclass(slots=True)
class TickResult:
    """The result of one tick of the scheduler.

    Attributes:
        snapshot: The cluster; None when it did not answer.
        round: Whether the policy made a round.
        reorder: Whether the order of the waiting jobs changed.
        unreachable: Whether the cluster stopped answering during the actions; no further action was tried.
        refused: The error, where the cluster refuses changes by this user.
        done: Actions in order: action, reason, outcome (``applied``, ``advised``, ``shadow``, ``failed``).
    """

    snapshot: ClusterSnapshot | None = None
    round: bool = False
    reorder: bool = False
    unreachable: bool = False
    refused: str = ""
    done: list[tuple[ClusterAction, str, str]] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """True when no action was due and no job is stopping."""
        jobs = () if self.snapshot is None else self.snapshot.jobs
        return self.snapshot is not None and not self.done and all(j.state is not JobState.STOPPING for j in jobs)


class Scheduler:
    """Runs on a real cluster the same policy object that simulations run.

    Args:
        backend: The cluster.
        policy: The training policy.
        journal: Events so far; every further event is appended before it is acted on.
        energy: Counts the energy of jobs.
        intensity: Carbon intensity of the grid.
        log: Writes ``(kind, fields)`` to the log of the run.
        mode: ``act`` applies actions, ``shadow`` plays them through without applying any, ``advise`` logs them once a
            round and journals nothing.
        timing: Times.
        priority_step: Points of the cluster's own priority that make a class; jobs of a higher class go first. 0 for
            one class.

    Attributes:
        state: State after the journal's events.
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
        priority_step: float = 0.0,
    ) -> None:
        self._backend, self._policy, self._journal, self._energy = backend, policy, journal, energy
        self._intensity, self._log, self._mode, self._timing = intensity, log, mode, timing
        self._planner = RoundPlanner(policy, timing, log, priority_step)
        self.state, unread = replay_events(journal.entries)
        if unread:
            log("note", {"text": f"{unread} journal events cannot be read and are left out"})
        self._check_policy()
        self._looked_s, self._compact_bytes = math.nan, COMPACT_BYTES
        self._first, self._pause_end_s = True, -math.inf
        self._reader = SnapshotReader(backend, log)
        self._shadowed: dict[int, ClusterAction] = {}
        self._released = ReleasedJobs(timing.start_s)
        self._ranked: frozenset[int] = frozenset()
        self._texts, self._explain_next = dict[int, str](), ""
        self._grams_of: dict[str, str] = {}
        self._unrecorded: dict[int, JobEnergy] = {}

    def tick(self, now_s: float, elapsed_s: float | None = None, *, round_now: bool = False) -> TickResult:
        """Read the cluster, count energy, make a round if one is due, and apply the actions that are due.

        A cluster that does not answer is left unchanged until it does; a failed action is tried again at the next tick.

        Args:
            now_s: Unix seconds.
            elapsed_s: Time since the last tick by a monotonic clock; from ``now_s`` when not given.
            round_now: Make a round even if none is due.
        """
        tick = TickResult()
        if (snapshot := self._reader.read(now_s)) is None:
            self._looked_s = math.nan
            return tick
        tick.snapshot = snapshot
        if self._first:
            self._first = False
            for planned in orphaned_holds(snapshot, frozenset(j.id for j in snapshot.jobs if self.state.knows(j.id))):
                self._do(planned, tick)
            if tick.done and self._mode is Mode.ACT:
                return tick
        self._inherit(snapshot)
        self._record_new_jobs(snapshot)
        self._check_starts(snapshot, now_s)
        tick.snapshot = snapshot = self._judged(snapshot, now_s)
        self._close_month(now_s)
        self._count(snapshot, now_s, elapsed_s)
        self._check_forecasts(snapshot, now_s)
        self._forget(snapshot)
        if round_now or self._due(now_s):
            tick.round = True
            changes = self._planner.plan(self.state, snapshot, self._intensity.grid(now_s), now_s)
            self.record("plan", **plan_event(self.state, **changes))
        ahead = self._queue_new(snapshot, now_s)
        tick.reorder = tick.round or ahead or self._has_returned(snapshot)
        self._adopt(snapshot)
        paused = 0 < self._pause_end_s - now_s <= PAUSE_S  # a clock that was set back ends it
        if (self._mode is not Mode.ADVISE or tick.round) and not paused:
            if tick.round and self._mode is Mode.ACT:
                g_per_kwh = self._intensity.grid(now_s).mean_g_per_kwh
                for job, forecast in new_forecasts(snapshot, self.state, g_per_kwh, now_s):
                    self.record(**forecast_event(job, forecast))
            self._act(snapshot, now_s, tick)
            if tick.refused:
                self._pause_end_s = now_s + PAUSE_S
                self._log("note", {"text": f"no rights: nothing is tried for {PAUSE_S:g} s. {tick.refused}"})
        self._explain(snapshot, now_s, tick)
        if self._mode is not Mode.ADVISE and self._journal.size_bytes > self._compact_bytes:
            self._journal.replace(compacted(self.state))
            self._compact_bytes = max(COMPACT_BYTES, 2 * self._journal.size_bytes)
        return tick

    def record(self, kind: str, **fields: Any) -> None:
        """Append an event to the journal and apply it; in mode ``advise`` only apply it.

        Decisions are on the disk before they are acted on; measurements reach it with the next decision.
        """
        journaled = self._mode is not Mode.ADVISE
        sync = kind not in _MEASUREMENTS
        event = self._journal.append(kind, sync=sync, **fields) if journaled else read_back(kind, fields)
        self.state = apply_event(self.state, event)

    def _check_policy(self) -> None:
        """Reset the policy where it cannot read its state in the journal."""
        if self.state.policy is None:
            return
        try:
            self._policy.recall(self.state.policy)
        except DataError as error:
            self._log("note", {"text": f"the policy starts from its initial state: {error}"})
            self.record("plan", **plan_event(self.state, policy=None))

    def _act(self, snapshot: ClusterSnapshot, now_s: float, tick: TickResult) -> None:
        """Apply the ranking of a new round first, so that freed slots go to the right jobs; then the other actions."""
        state = self.state
        if tick.reorder and snapshot.self_starting:
            came = (
                "a stopped job is back" if self._has_returned(snapshot) else "a job of a higher class of priority came"
            )
            self._do(PlannedAction(self._order(snapshot), "the ranking of this round" if tick.round else came), tick)
            self._ranked = _waiting(snapshot)
        patience_s = _PATIENCE_QUANTA * self._timing.quantum_s
        rules = StopRules(state.stops, now_s, self._timing.least_run_s, patience_s)
        planned_actions = next_actions(
            snapshot, state.target, state.waiting, passive=state.passive, stops=rules, patient=state.patient
        )
        for planned in planned_actions:
            if not tick.unreachable:
                self._do(planned, tick)

    def _explain(self, snapshot: ClusterSnapshot, now_s: float, tick: TickResult) -> None:
        """Show in the cluster why jobs wait: one tick after each round, and after a hold for jobs without a text."""
        if not isinstance(self._backend, Explains) or self._mode is not Mode.ACT or tick.unreachable:
            return
        if self._explain_next:
            texts = held_because(snapshot, self.state, now_s)
            self._texts = texts if self._explain_next == "all" else {**texts, **self._texts}
        holds = any(isinstance(action, Hold) for action, _, _ in tick.done)
        self._explain_next = "all" if tick.round else "new" if holds else ""
        with suppress(CapabilityError):  # the next look says that the cluster does not answer
            if text := self._backend.explain(self._texts):
                self._log("note", {"text": text})

    def _due(self, now_s: float) -> bool:
        """Whether a round is due; a clock that was set back delays it by at most a quantum."""
        return not now_s < self.state.next_round_s or self.state.next_round_s - now_s > self._timing.quantum_s

    def _inherit(self, snapshot: ClusterSnapshot) -> None:
        """Transfer the place, the cost and the policy's state of a job that continues under another number."""
        for job in snapshot.jobs:
            if job.follows and not self.state.knows(job.id) and self.state.knows(job.follows):
                self.record("follows", job=job.id, after=job.follows)

    def _record_new_jobs(self, snapshot: ClusterSnapshot) -> None:
        """Record the first submission of new jobs, and kinds of job not seen before."""
        state = self.state
        new = [job for job in schedulable(snapshot) if job.id not in state.submitted_s]
        new.sort(key=lambda job: (job.submit_s, job.id))
        kinds = [kind for kind in dict.fromkeys(map(kind_name, new)) if kind not in state.kinds]
        if new:
            self.record("known", jobs={str(job.id): job.submit_s for job in new}, kinds=kinds, priority={})
        if changed := self._planner.priorities(self.state, snapshot):
            self.record("known", jobs={}, kinds=[], priority={str(job): p for job, p in changed.items()})

    def _check_starts(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Refuse slots for four quanta to released jobs that the cluster does not start on free slots."""
        if self._mode is not Mode.ACT or not snapshot.self_starting:
            return
        refused = self._released.look(snapshot, self.state.target, now_s, lambda job: self._released_s(job, now_s))
        for job, text in refused.items():
            self._refuse(job, now_s, text)

    def _released_s(self, job: int, now_s: float) -> float:
        """Time at which a job was first seen released; recorded at that tick."""
        if job not in self.state.released_s:
            self.record("released", job=job, at_s=now_s)
        return self.state.released_s[job]

    def _refuse(self, job: int, now_s: float, text: str) -> None:
        self.record("refused", job=job, until_s=now_s + _REFUSED_QUANTA * self._timing.quantum_s, text=text)
        self._log("note", {"text": f"job {job} {text}: its slots go to others", "job": job})

    def _judged(self, snapshot: ClusterSnapshot, now_s: float) -> ClusterSnapshot:
        """The snapshot with jobs marked that do not start, and those that lose their progress when stopped."""
        refused, unsaved = self.state.refused, self.state.unsaved
        if not refused and not unsaved:
            return snapshot
        jobs = []
        for job in snapshot.jobs:
            until_s, text = refused.get(job.id, (-math.inf, ""))
            if now_s < until_s and job.state is JobState.WAITING and not job.held_by_us:
                job = replace(job, blocked=job.blocked or text)
            jobs.append(replace(job, stoppable=False) if job.id in unsaved else job)
        return replace(snapshot, jobs=tuple(jobs))

    def _adopt(self, snapshot: ClusterSnapshot) -> None:
        """Adopt the size of running jobs that differ from the plan and that the round does not move."""
        stops = self.state.stops
        for job in schedulable(snapshot):
            running = job.state is JobState.RUNNING and self.state.target.get(job.id) != job.slots
            if stops is not None and running and job.id not in stops:
                self.record("started", job=job.id, slots=job.slots)

    def _close_month(self, now_s: float) -> None:
        """Log the cost of each job as of the last tick of a month that is over: statements divide jobs there."""
        month, before = month_of(now_s, UTC), self.state.month
        if month <= before:  # also where the clock was set back
            return
        for job, tally in self.state.tallies.items() if before else ():
            if tally.executed_s > 0:
                self._log("month", {"month": before, "job": job, **job_cost(tally), **self._grams_of})
        self.record("month", month=month)

    def _count(self, snapshot: ClusterSnapshot, now_s: float, elapsed_s: float | None) -> None:
        """Record the tallies that changed since the last tick."""
        if elapsed_s is None:
            elapsed_s = 0.0 if math.isnan(self._looked_s) else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        # Totals of a job that is over are read once: they are kept until they are recorded.
        totals = self._unrecorded = {**self._unrecorded, **self._energy.read(snapshot)}
        carbon, state = self._intensity.history(now_s), self.state
        self._grams_of = {} if carbon is None else {"signal": carbon.signal.value, "scope": carbon.scope.value}
        ended = (job for job in snapshot.jobs if job.state.over and job.id in state.tallies)
        tallies, seen, who, changed = dict(state.tallies), dict(state.energy_seen), dict(state.who), []
        for job in (*schedulable(snapshot), *ended):
            look, totals_seen = look_at(job, now_s, elapsed_s, totals.get(job.id), seen.get(job.id, NO_TOTALS))
            if totals_seen:
                seen[job.id] = totals_seen
            self._check_saved(job)
            tallies[job.id] = observe(tallies.get(job.id, Tally()), look, self._timing.measure, carbon)
            who[job.id] = (job.owner, job.name, job.partition, job.account)
            changed.append(job.id)
        new = replace(state, tallies=tallies, energy_seen=seen, who=who)
        changed = [job for job in changed if job not in state.tallies or differs(state, new, job)]
        if changed:
            self.record("tallies", **tallies_event(new, changed))
        self._unrecorded = {}

    def _check_saved(self, job: ClusterJob) -> None:
        """Record a job that lost most of its progress when it was stopped, so that it is never stopped again."""
        before = self.state.tallies.get(job.id)
        if before is None or before.progress_ratio < _LEAST_PROGRESS or job.id in self.state.unsaved:
            return
        if job.progress_ratio < before.progress_ratio / 2 and job.restarts:
            self.record("unsaved", job=job.id)
            self._log("note", {"text": f"job {job.id} saves no progress: it is not stopped again", "job": job.id})

    def _check_forecasts(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Record and log the outcomes of forecasts."""
        for known in outcomes(snapshot, self.state, now_s):
            self.record("scored", job=known.job, **scored_fields(known.score))
            self._log("forecast", known.as_dict())

    def _forget(self, snapshot: ClusterSnapshot) -> None:
        """Remove jobs that are over, or that the cluster no longer lists, from the state; log their cost."""
        alive = {job.id for job in snapshot.jobs if not job.state.over}
        ended = {job.id: job for job in snapshot.jobs if job.state.over}
        state = self.state
        tracked = {*state.target, *state.tallies, *state.submitted_s, *(job for job, _ in state.waiting)}
        for number in sorted(tracked - alive):
            if number in state.tallies or state.knows(number):
                cost = {**job_cost(state.tallies.get(number)), **self._grams_of}
                facts = end_facts(ended.get(number), state.tallies.get(number))
                self._log("over", {"job": number, **facts, **cost})
            self.record("gone", job=number)

    def _queue_new(self, snapshot: ClusterSnapshot, now_s: float) -> bool:
        """Queue jobs submitted since the last round, at the size their kind starts with.

        They queue behind the ranked ones of their class of priority, tasks of an array behind its others. In a dirty
        hour a job whose deadline is far enough waits for the next round instead.

        Returns:
            Whether one came ahead of another.
        """
        known = {*self.state.target, *(job for job, _ in self.state.waiting)}
        kinds = {name: number for number, name in enumerate(self.state.kinds)}
        tasks, ahead = fresh_tasks(snapshot), False
        for job in sorted(schedulable(snapshot), key=lambda job: (job.submit_s, job.id)):
            if job.id in known:
                continue
            if job.state is not JobState.WAITING:
                self.record("started", job=job.id, slots=job.slots)
                continue
            if job.deadline_s < math.inf and self.state.holds.get(job.pool, 0) > 0:
                waits = latest_start_s(job, self._timing.restart_s) - now_s > self.state.hold_slack_s
                self.record("patient", job=job.id, pool=job.pool, waits=waits)
                if waits:
                    continue
            slots = self.state.newcomers.get(kinds.get(kind_name(job), -1), job.min_slots)
            place = self._planner.place_of(self.state, job.id, tasks.get(job.array, ()))
            ahead = ahead or place < len(self.state.waiting)
            self.record("arrived", job=job.id, slots=slots, place=place)
        return ahead

    def _has_returned(self, snapshot: ClusterSnapshot) -> bool:
        """Whether a stopped job waits again since the last ranking: its old rank might put it before its successor."""
        back = (job.id for job in snapshot.jobs if job.restarts and job.id not in self._ranked)
        return snapshot.self_starting and not _waiting(snapshot).isdisjoint(back)

    def _order(self, snapshot: ClusterSnapshot) -> Order:
        state, waiting = self.state, _waiting(snapshot)
        ranked = {job: slots for job, slots in state.target.items() if slots} | dict(state.waiting)
        entries = self._planner.with_blocked(state, snapshot, ((j, n) for j, n in ranked.items() if j in waiting))
        return Order(tuple(job for job, _ in entries))

    def _do(self, planned: PlannedAction, tick: TickResult) -> None:
        """Record an action, apply it in mode ``act``, and log it with its outcome."""
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
                tick.refused = str(error) if isinstance(error, CapabilityError) and error.grant else ""
                if isinstance(action, Start) and not tick.unreachable:
                    self._keep_shape(action, tick)
        tick.done.append((action, planned.reason, outcome))
        jobs = {"jobs": list(action.jobs)} if isinstance(action, Order) else {"job": action.job}
        slots = {"slots": action.slots} if isinstance(action, Start) else {}
        slots |= {"tasks": action.count} if isinstance(action, Split) else {}
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


def _waiting(snapshot: ClusterSnapshot) -> frozenset[int]:
    return frozenset(job.id for job in schedulable(snapshot) if job.state is JobState.WAITING)


def release_all(backend: ClusterBackend) -> list[int]:
    """Release every job that joulery holds, and return their numbers.

    A mark without a hold is removed, too: its owner's own hold would be taken for joulery's.

    Raises:
        CapabilityError: The cluster does not answer.
        ActuationError: Some could not be released.
    """
    released, left = [], []
    snapshot = backend.snapshot()
    for job in snapshot.jobs if snapshot.self_starting else ():
        if (job.held_by_us or job.marked) and not job.state.over:
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
            hint="scontrol release JOB; with Kueue: kubectl edit workload NAME, spec.active: true",
        )
    return released
