"""The scheduler: one look at the cluster after the other, a round of the policy every quantum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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
from joulery.runtime.schedule.energy_delta import NOBODY, drawn
from joulery.runtime.schedule.intensity import Intensity
from joulery.runtime.schedule.reconcile import Todo, ours, reconcile, strays
from joulery.runtime.schedule.state import Memory, remembered, renamed
from joulery.runtime.schedule.view import cluster_view, kind_of
from joulery.store.journal import Journal

TALLY_S = 30.0
"""How often the tallies are written down."""


class RememberingPolicy(Protocol):
    """A training policy whose state can be written down."""

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
        """The state again."""
        ...


class EnergySource(Protocol):
    """Who knows what jobs draw."""

    def read(self, snapshot: ClusterSnapshot) -> Mapping[int, JobEnergy]:
        """Totals of the jobs it knows."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerTiming:
    """Times the scheduler goes by, seconds.

    Attributes:
        quantum_s: Distance of the rounds.
        restart_s: What moving a job costs.
        measure: When an efficiency counts as measured.
    """

    quantum_s: float
    restart_s: float
    measure: MeasureRules


@dataclass(slots=True)
class Tick:
    """What one look came to.

    Attributes:
        snapshot: What was seen; None when the cluster did not answer.
        round: True when the policy was asked.
        away: True when the cluster stopped answering meanwhile: nothing more was tried.
        done: What was done, in order: action, reason, outcome (``applied``, ``advised``, ``shadow``, ``failed``).
    """

    snapshot: ClusterSnapshot | None = None
    round: bool = False
    away: bool = False
    done: list[tuple[ClusterAction, str, str]] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """True when nothing was to be done and nothing is on its way."""
        jobs = () if self.snapshot is None else self.snapshot.jobs
        return self.snapshot is not None and not self.done and all(j.state is not JobState.STOPPING for j in jobs)


class Scheduler:
    """Drives the policy that simulations drive with what a real cluster shows.

    Args:
        backend: The cluster.
        policy: Decides.
        journal: What was meant before; everything meant from now on.
        energy: What jobs draw.
        intensity: The grid.
        log: Writes ``(kind, fields)`` to the log of the run.
        mode: ``act`` does it, ``shadow`` plays it through without doing it, ``advise`` says it once a round.
        rhythm: Times.

    Attributes:
        memory: The plan in force.
    """

    def __init__(
        self,
        backend: ClusterBackend,
        policy: RememberingPolicy,
        journal: Journal,
        energy: EnergySource,
        intensity: Intensity,
        log: Callable[[str, Mapping[str, Any]], None],
        *,
        mode: Mode,
        rhythm: SchedulerTiming,
    ) -> None:
        self._backend, self._policy, self._journal, self._energy = backend, policy, journal, energy
        self._intensity, self._log, self._mode, self._rhythm = intensity, log, mode, rhythm
        self.memory, strange = remembered(journal.entries)
        if strange:
            log("note", {"text": f"{strange} lines of the journal are not understood and left out"})
        self._state = self._recalled()
        self._looked_s, self._told_s = math.nan, -math.inf
        self._first = True
        self._shadowed: dict[int, ClusterAction] = {}

    def _recalled(self) -> Any:
        """What the policy knew; what it does not understand it learns anew."""
        if self.memory.policy is None:
            return self._policy.initial()
        try:
            return self._policy.recall(self.memory.policy)
        except DataError as error:
            self._log("note", {"text": f"the policy begins anew: {error}"})
            return self._policy.initial()

    def tick(self, now_s: float, elapsed_s: float | None = None) -> Tick:
        """Look, count, decide if it is time, and do what is due.

        A cluster that does not answer is left as it is until it does; a thing that fails is tried again next time.

        Args:
            now_s: Unix seconds.
            elapsed_s: Time since the last look by a clock that nobody sets; by ``now_s`` when not given.
        """
        tick = Tick()
        try:
            tick.snapshot = snapshot = self._backend.snapshot()
        except (CapabilityError, DataError) as error:
            self._log("unreachable", {"text": str(error)})
            self._looked_s = math.nan
            return tick
        if self._first:
            self._first = False
            for todo in strays(snapshot, frozenset(job.id for job in snapshot.jobs if self.memory.knows(job.id))):
                self._do(todo, tick)
            if tick.done and self._mode is Mode.ACT:
                return tick
        self._inherit(snapshot)
        self._count(snapshot, now_s, elapsed_s)
        self._forget(snapshot)
        if self._due(now_s):
            tick.round = True
            self._round(snapshot, now_s)
        self._welcome(snapshot)
        memory = self.memory
        if self._mode is not Mode.ADVISE or tick.round:
            for todo in reconcile(snapshot, memory.target, memory.waiting, passive=memory.passive):
                if not tick.away:
                    self._do(todo, tick)
            if tick.round and not tick.away and snapshot.self_starting:
                self._do(Todo(self._order(snapshot), "the ranking of this round"), tick)
        return tick

    def release_all(self) -> list[int]:
        """Give every job held in our name back to the cluster; says which."""
        return release_all(self._backend)

    def _due(self, now_s: float) -> bool:
        """Whether it is time for a round; a clock that was set back does not put it off for longer than a quantum."""
        return not now_s < self.memory.next_round_s or self.memory.next_round_s - now_s > self._rhythm.quantum_s

    def _inherit(self, snapshot: ClusterSnapshot) -> None:
        """Jobs that go on under another number keep their place, their cost and what the policy knows of them."""
        for job in snapshot.jobs:
            if not job.follows or self.memory.knows(job.id) or not self.memory.knows(job.follows):
                continue
            self._write("follows", job=job.id, after=job.follows)
            self.memory.inherit(job.follows, job.id)
            self._state = self._policy.recall(renamed(self._policy.remember(self._state), job.follows, job.id))

    def _count(self, snapshot: ClusterSnapshot, now_s: float, elapsed_s: float | None) -> None:
        """Bring the tallies up to date."""
        if elapsed_s is None:
            elapsed_s = 0.0 if math.isnan(self._looked_s) else max(0.0, now_s - self._looked_s)
        totals, carbon = self._energy.read(snapshot), self._intensity.history(now_s)
        ended = (job for job in snapshot.jobs if job.state.over and job.id in self.memory.tallies)
        for job in (*ours(snapshot), *ended):
            energy_j, slot_j, quality = self._drawn(job.id, totals.get(job.id))
            look = Look(now_s, elapsed_s, job.slots, job.restarts, job.progress_ratio, energy_j, slot_j, quality)
            self.memory.who[job.id] = (job.owner, job.name, job.partition)
            before = self.memory.tallies.get(job.id, Tally())
            self.memory.tallies[job.id] = observe(before, look, self._rhythm.measure, carbon)
        self._looked_s = now_s
        if not 0 <= now_s - self._told_s < TALLY_S and self._mode is not Mode.ADVISE:
            self._told_s = now_s
            self._journal.append("tallies", **self.memory.costs())

    def _drawn(self, job: int, total: JobEnergy | None) -> tuple[float, float, Quality]:
        """What a job drew since the look before."""
        if total is None:
            return math.nan, math.nan, Quality.MEASURED
        energy_j, slot_j, self.memory.seen[job] = drawn(self.memory.seen.get(job, NOBODY), total)
        return energy_j, slot_j, total.quality

    def _forget(self, snapshot: ClusterSnapshot) -> None:
        """Jobs that are over, or that the cluster no longer knows, leave the plan; their cost goes to the log."""
        alive = {job.id: job for job in snapshot.jobs if not job.state.over}
        ended = {job.id: job for job in snapshot.jobs if job.state.over}
        meant = {*self.memory.target, *self.memory.tallies, *(job for job, _ in self.memory.waiting)}
        for number in sorted(meant - alive.keys()):
            tally = self.memory.tallies.get(number, Tally())
            self._log("over", {"job": number, **_facts(ended.get(number)), **_cost(tally)})
            self.memory.forget(number)
            self._write("gone", job=number)

    def _round(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Ask the policy, and mean what it says."""
        grid, jobs, memory = self._intensity.grid(now_s), ours(snapshot), self.memory
        view = cluster_view(snapshot, jobs, memory, grid, now_s, self._rhythm.restart_s)
        memory.next_round_s = now_s + self._rhythm.quantum_s
        if view.gpus < 1:
            self._log("round", {"text": "no slots are up: nothing is decided", "jobs": len(jobs)})
            self._write("plan", **memory.plan())
            return
        step = self._policy.step(self._state, view)
        self._state = step.state
        for decision in step.decisions:
            allocation = decision.value
            assert isinstance(allocation, Allocation)
            memory.target = {int(n): int(allocation.run.get(n, 0)) for n in view.job.tolist()}
            memory.waiting = [(int(job), int(slots)) for job, slots in allocation.waiting]
            memory.newcomers, memory.passive = dict(allocation.newcomer_gpus), allocation.passive
            self._log("round", {**_seen(snapshot, view, grid.basis), "target": memory.target, "text": decision.reason})
        memory.policy = self._policy.remember(step.state)
        self._write("tallies", **memory.costs())  # what this plan rests on
        self._write("plan", **memory.plan())

    def _welcome(self, snapshot: ClusterSnapshot) -> None:
        """Jobs submitted since the last round queue behind those it ranked, at the size their kind starts with."""
        known = {*self.memory.target, *(job for job, _ in self.memory.waiting)}
        for job in sorted(ours(snapshot), key=lambda job: (job.submit_s, job.id)):
            if job.id in known:
                continue
            if job.state is not JobState.WAITING:
                self.memory.target[job.id] = job.slots
                self._write("started", job=job.id, slots=job.slots)
                continue
            size = self.memory.newcomers.get(kind_of(job, self.memory.kinds), job.min_slots)
            self.memory.waiting.append((job.id, size))
            self._write("arrived", job=job.id, slots=size)

    def _order(self, snapshot: ClusterSnapshot) -> Order:
        ranked = [job for job, slots in self.memory.target.items() if slots] + [job for job, _ in self.memory.waiting]
        waiting = {job.id for job in ours(snapshot) if job.state is JobState.WAITING}
        return Order(tuple(job for job in dict.fromkeys(ranked) if job in waiting))

    def _do(self, todo: Todo, tick: Tick) -> None:
        """One thing: written down, done if this is for real, logged with how it went."""
        action = todo.action
        if isinstance(action, Order) and not action.jobs:
            return
        if self._mode is Mode.SHADOW and self._repeats(action):
            return
        outcome, remark = ("advised", "") if self._mode is Mode.ADVISE else ("shadow", "")
        if isinstance(action, Start) and todo.new and self._mode is not Mode.ADVISE:
            self.memory.fold({"kind": "started", "job": action.job, "slots": action.slots})
            self._write("started", job=action.job, slots=action.slots)
        if self._mode is Mode.ACT:
            try:
                outcome, remark = "applied", self._backend.apply(action)
            except (ActuationError, CapabilityError, DataError) as error:
                outcome, remark = "failed", str(error)
                tick.away = not isinstance(error, ActuationError)
                if isinstance(action, Start) and not tick.away:
                    self._as_it_is(action, tick)
        tick.done.append((action, todo.reason, outcome))
        what = {"jobs": list(action.jobs)} if isinstance(action, Order) else {"job": action.job}
        slots = {"slots": action.slots} if isinstance(action, Start) else {}
        verb = type(action).__name__.lower()
        self._log("action", {"do": verb, **what, **slots, "reason": todo.reason, "outcome": outcome, "remark": remark})

    def _as_it_is(self, refused: Start, tick: Tick) -> None:
        """A size that the cluster refuses is not asked for again before the next round: the job goes on as it is."""
        assert tick.snapshot is not None
        shape = next((job.shape for job in tick.snapshot.jobs if job.id == refused.job), refused.slots)
        if shape != refused.slots:
            self.memory.fold({"kind": "started", "job": refused.job, "slots": shape})
            self._write("started", job=refused.job, slots=shape)

    def _repeats(self, action: ClusterAction) -> bool:
        """Whether this is what was said of the job last: in shadow the cluster never follows."""
        job = 0 if isinstance(action, Order) else action.job
        if self._shadowed.get(job) == action:
            return True
        self._shadowed[job] = action
        return False

    def _write(self, kind: str, **fields: Any) -> None:
        """A line of the journal; advice is not meant and not written down."""
        if self._mode is not Mode.ADVISE:
            self._journal.append(kind, **fields)


def release_all(backend: ClusterBackend) -> list[int]:
    """Give every job held in our name back to the cluster; says which.

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


def compact(journal: Journal, memory: Memory) -> None:
    """Let the journal say in two lines what all its lines say."""
    journal.replace([{"kind": "plan", **memory.plan()}, {"kind": "tallies", **memory.costs()}])


def _facts(job: ClusterJob | None) -> dict[str, Any]:
    if job is None:
        return {"state": "unknown"}
    who = {"name": job.name, "owner": job.owner, "partition": job.partition}
    return {"state": job.state, **who, "restarts": job.restarts}


def _cost(tally: Tally) -> dict[str, Any]:
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
    """The observation, for the log."""
    columns = ("job", "submit_s", "running", "max_gpus", "requested", "kind", "executed_s", "attained_gpu_s",
               "remaining_s", "footprint_kg", "degradation", "gpu_w", "min_gpus")  # fmt: skip
    return {
        "view": {
            **{name: getattr(view, name) for name in ("now_s", "gpus", "g_per_kwh", "mean_g_per_kwh", "restart_s")},
            **{name: getattr(view, name) for name in columns},
        },
        "mean_of": basis,
        "free": snapshot.free,
        "notes": list(snapshot.notes),
    }
