"""Derive the next actions from the plan of the last round, on slots that are free or become free.

The functions are pure, and :func:`next_actions` is idempotent: after a crash it returns the remaining actions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterNode,
    ClusterSnapshot,
    Hold,
    JobState,
    Release,
    Split,
    Start,
    Stop,
)
from joulery.runtime.schedule.rounds import StopRules, schedulable

CLEANER = "waits for a cleaner hour, its deadline allows it"
_NEXT_IN_LINE = 4
"""Jobs on a quarter of a pool's slots are next in line."""
_ROUNDING = 1e-9


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


@dataclass(frozen=True, slots=True)
class _Room:
    """Free capacity of a node."""

    slots: int
    cpus: float
    memory_bytes: float

    def holds(self, job: ClusterJob) -> int:
        """Slots of the job that fit here."""
        count = self.slots
        if job.cpus_per_slot > 0 and self.cpus < math.inf:
            count = min(count, int(self.cpus / job.cpus_per_slot + _ROUNDING))
        if job.memory_per_slot_bytes > 0 and self.memory_bytes < math.inf:
            count = min(count, int(self.memory_bytes / job.memory_per_slot_bytes + _ROUNDING))
        return max(0, count)

    def less(self, job: ClusterJob, slots: int) -> _Room:
        """The capacity left without so many slots of the job; a negative number adds slots."""
        return _Room(
            self.slots - slots,
            self.cpus - slots * job.cpus_per_slot,
            self.memory_bytes - slots * job.memory_per_slot_bytes,
        )


class FreeSlots:
    """Free slots by node, for trial placements and for taking.

    A job with ``spread`` false needs the fewest nodes that hold its slots, each with an equal number of them; the
    components of a heterogeneous job need nodes of their own. A job runs only on the nodes of its pool that suit it
    (:attr:`ClusterJob.runs_on`).
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._size: dict[str, int] = {}
        self._free: dict[str, dict[str, _Room]] = {}
        for node in snapshot.nodes or (ClusterNode("", snapshot.slots, snapshot.free),):
            room = _Room(node.free, node.free_cpus, node.free_memory_bytes)
            self._free.setdefault(node.pool, {})[node.name] = room
            self._size[node.pool] = max(self._size.get(node.pool, 1), node.slots)

    def copy(self) -> FreeSlots:
        """A copy of the slots, for trial placements."""
        made = object.__new__(FreeSlots)
        made._size, made._free = self._size, {pool: dict(nodes) for pool, nodes in self._free.items()}
        return made

    def fits(self, job: ClusterJob, slots: int) -> bool:
        """Whether the job could start on so many slots."""
        return self._place(job, slots) is not None

    def take(self, job: ClusterJob, slots: int) -> bool:
        """Take the slots if the job could start on them."""
        placed = self._place(job, slots)
        for node, count in placed or ():
            self._free[job.pool][node] = self._free[job.pool][node].less(job, count)
        return placed is not None

    def reserve(self, job: ClusterJob, slots: int) -> None:
        """Take as many of the slots as there are, so that no other job does."""
        nodes = self._suited(job)
        for node in sorted(nodes, key=lambda node: -nodes[node].slots):
            count = max(0, min(slots, nodes[node].slots))
            self._free[job.pool][node], slots = nodes[node].less(job, count), slots - count

    def narrower(self, job: ClusterJob, slots: int) -> Iterator[int]:
        """Smaller sizes that the job may use, the largest first: whole nodes of its pool, or a part of one."""
        size = self._size.get(job.pool, 1)
        return (fewer for fewer in range(slots - 1, job.min_slots - 1, -1) if fewer < size or fewer % size == 0)

    def give(self, job: ClusterJob) -> None:
        """Add the slots that a job holds, but for those on nodes that are not up."""
        nodes = self._free.setdefault(job.pool, {})
        names = job.nodes or list(nodes)[:1]
        for at, name in enumerate(names):
            if name in nodes:
                nodes[name] = nodes[name].less(job, -(job.slots // len(names) + (at < job.slots % len(names))))

    def _suited(self, job: ClusterJob) -> dict[str, _Room]:
        """The nodes that the job may run on."""
        nodes = self._free.get(job.pool, {})
        return nodes if job.runs_on is None else {name: room for name, room in nodes.items() if name in job.runs_on}

    def _place(self, job: ClusterJob, slots: int) -> list[tuple[str, int]] | None:
        nodes = self._suited(job)
        if not job.parts:
            return self._on_nodes(job, slots, nodes)
        placed: list[tuple[str, int]] = []
        for part in sorted(job.parts, reverse=True):
            used = {name for name, _ in placed}
            others = {name: room for name, room in nodes.items() if name not in used}
            chosen = self._on_nodes(replace(job, spread=False, parts=()), part, others)
            if chosen is None:
                return None
            placed += chosen
        return placed

    def _on_nodes(self, job: ClusterJob, slots: int, nodes: dict[str, _Room]) -> list[tuple[str, int]] | None:
        free = {name: room.holds(job) for name, room in nodes.items()}
        tight = sorted((name for name in free if free[name] > 0), key=lambda name: nodes[name].slots)
        if job.spread:
            placed, left = [], slots
            for name in reversed(tight):
                placed.append((name, min(left, free[name])))
                left -= placed[-1][1]
                if left == 0:
                    return placed
            return None
        count = -(-slots // self._size.get(job.pool, 1))
        while slots % count:
            count += 1
        chosen = [name for name in tight if free[name] >= slots // count][:count]
        return [(name, slots // count) for name in chosen] if len(chosen) == count else None


class LimitGrowth:
    """Growth of each limit's count by the starts in progress.

    Slurm judges one job against what runs. A second job that the same limit counts may exceed it together with the
    first, unless the jobs stopped for it are counted there, too.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}

    def count(self, job: ClusterJob, slots: int) -> None:
        """Count slots of a job that is to start; negative for one that stops."""
        for limit in job.limits:
            self._slots[limit] = self._slots.get(limit, 0) + slots

    def allows(self, job: ClusterJob, victims: list[ClusterJob]) -> bool:
        """Whether the verdict on this job still holds with the starts in progress, once the victims give up slots."""
        return all(
            self._slots.get(limit, 0) <= sum(victim.slots for victim in victims if limit in victim.limits)
            for limit in job.limits
        )


def next_actions(
    snapshot: ClusterSnapshot,
    target: Mapping[int, int],
    waiting: Sequence[tuple[int, int]],
    *,
    passive: bool,
    stops: StopRules | None = None,
    patient: frozenset[int] = frozenset(),
) -> list[PlannedAction]:
    """The next action of every job that does not match the plan yet.

    A running job stops only when its successor could start immediately. The successor is released first, so that the
    cluster judges it. The running jobs stop only if the cluster reports that nothing but slots is missing
    (:attr:`ClusterJob.judged`) and their slots would hold the successor. Of jobs that one limit counts, one starts at a
    time. A job that is resized stops when its new size fits. Slots beyond those reserved go to the waiting jobs, in
    order; a blocked job reserves none. The next in line are released, too, so that they start the moment a job ends;
    all other waiting jobs are held. As many waiting tasks of an array are separated from it as its pool could run.

    Args:
        snapshot: The cluster.
        target: Slots each job is to have, in order of precedence; 0 for none, absent where nothing was decided yet.
        waiting: The jobs that may start next, with the slots each wants.
        passive: Whether waiting jobs may start now.
        stops: Which running jobs may be stopped.
        patient: Jobs that wait for a cleaner hour: those that run stop, whether or not another takes their slots.
    """
    return _Actions(snapshot, target, waiting, stops or StopRules(), patient).made(passive=passive)


class _Actions:
    """The steps of :func:`next_actions`."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        target: Mapping[int, int],
        waiting: Sequence[tuple[int, int]],
        stops: StopRules,
        patient: frozenset[int],
    ) -> None:
        self._snapshot, self._target, self._waiting, self._stops = snapshot, target, waiting, stops
        self._patient = patient
        self._jobs = schedulable(snapshot)
        self._by_id = {job.id: job for job in self._jobs}
        self._free, self._coming, self._growth = FreeSlots(snapshot), FreeSlots(snapshot), LimitGrowth()
        for job in snapshot.jobs:
            if job.state is JobState.STOPPING and target.get(job.id, 0) == 0:
                self._coming.give(job)
                self._growth.count(job, -job.slots)
        self._ready: list[tuple[ClusterJob, int]] = []
        self._granted: set[int] = set()
        self._short: set[str] = set()
        self._next: set[int] = set()
        self._stopped: set[int] = set()
        self._starting: set[int] = set()
        self._made: list[PlannedAction] = []

    def made(self, *, passive: bool) -> list[PlannedAction]:
        """All actions, in the order in which they are to be applied."""
        self._keep_arrays()
        self._stop_patient()
        self._start_planned()
        self._stop_for_ready()
        self._stop_resized()
        self._release_running()
        if passive:
            self._start_waiting()
            self._release_next()
        self._hold_others()
        return self._made

    def _add(self, action: ClusterAction, reason: str, *, new: bool = False) -> None:
        self._made.append(PlannedAction(action, reason, new))
        if isinstance(action, Start):
            self._starting.add(action.job)

    def _keep_arrays(self) -> None:
        """Hold the rest of an array as one job; separate as many waiting tasks as its pool could run, and one more.

        Further tasks are separated in one command once half of these have started. Running tasks do not count: an array
        without a task waiting in line would let later jobs pass.
        """
        for job in self._snapshot.jobs:
            if job.tasks == 1 or job.exempt or job.state is not JobState.WAITING:
                continue
            if not job.held_by_us:
                self._add(Hold(job.id), f"an array with {job.tasks} waiting tasks: they start one by one")
            waiting = sum(
                other.array == job.array and other.tasks == 1 and other.state is JobState.WAITING
                for other in self._jobs
            )
            most = self._snapshot.pools.get(job.pool, 0) // job.shape + 1
            most = min(most, job.most_tasks + 1) if job.most_tasks else most
            count = min(job.tasks - 1, most - waiting) if 2 * waiting <= most else 0
            if count > 0:
                self._add(Split(job.id, count), f"{count} of {job.tasks} waiting tasks, as many as could run next")

    def _stop_patient(self) -> None:
        """Suspend the jobs that wait for a cleaner hour."""
        for job in self._jobs:
            if job.id in self._patient and job.state is JobState.RUNNING and self._stops.allow(job):
                self._stopped.add(job.id)
                self._coming.give(job)
                self._growth.count(job, -job.slots)
                self._add(Stop(job.id), f"suspended: {CLEANER}")

    def _start_planned(self) -> None:
        """Start waiting jobs of the plan: released ones reserve their slots, the others are released where possible."""
        for number, want in self._target.items():
            job = self._by_id.get(number)
            if job is None or want == 0:
                continue
            if job.state is JobState.STOPPING:
                self._free.reserve(job, max(0, want - job.slots))
            if job.state is not JobState.WAITING or job.blocked or self._placed(job, want):
                continue
            tired = self._stops.now_s - job.submit_s > self._stops.patience_s
            if tired and self._narrower(job, want):
                continue
            if not (self._snapshot.self_starting and (job.held_by_us or job.shape != want)):
                self._short.add(job.pool)
            elif tired:
                self._add(Start(job.id, want), f"its turn, and no place for {want}: the cluster keeps one")
            elif not job.held_by_us:
                self._add(Hold(job.id), f"waits for {want} slots")

    def _placed(self, job: ClusterJob, want: int) -> bool:
        """Whether a waiting job gets so many slots: free ones, some becoming free, or those of jobs to stop for it."""
        held = job.held_by_us or job.shape != want
        if self._free.take(job, want):
            self._coming.take(job, want)
            if held:
                self._add(Start(job.id, want), f"its turn, on {want} as planned")
            return True
        if self._coming.take(job, want):
            self._granted.add(job.id)
            self._free.reserve(job, want)
            self._growth.count(job, want)
            self._short.add(job.pool)
            return True
        waits = not (self._snapshot.self_starting and held)
        if waits and job.judged:
            self._ready.append((job, want))
        if not self._needed(job, want, self._victims(job)):
            return False
        self._short.add(job.pool)
        if not waits:
            self._add(Start(job.id, want), f"its turn: released before others stop, on {want} as planned")
        return True

    def _narrower(self, job: ClusterJob, want: int) -> bool:
        """Whether a job gets fewer slots, to grow later, while the jobs to stop do not hold enough slots together.

        Slots that become free one by one on several nodes would never hold its full size.
        """
        if not job.stoppable or self._needed(job, want, self._victims(job, young=True)):
            return False
        return any(self._placed(job, fewer) for fewer in self._free.narrower(job, want))

    def _victims(self, successor: ClusterJob, *, young: bool = False) -> list[ClusterJob]:
        """Running jobs of the pool that the plan no longer runs, last of the ranking first; also ``young`` ones."""
        rank = {number: at for at, (number, _) in enumerate(self._waiting)}
        found = [
            job
            for job in self._jobs
            if job.state is JobState.RUNNING
            and job.pool == successor.pool
            and self._target.get(job.id, job.slots) == 0
            and job.id not in self._stopped
            and self._stops.allow(job, young=young)
        ]
        return sorted(found, key=lambda job: (-rank.get(job.id, len(rank)), -job.id))

    def _stop_for_ready(self) -> None:
        """Stop the jobs whose slots the ready successors need."""
        for successor, want in self._ready:
            if successor.id in self._granted:
                continue
            chosen = self._needed(successor, want, self._victims(successor))
            if not chosen or not self._growth.allows(successor, chosen):
                continue
            if not self._keeps_busy(successor, want, chosen):
                continue
            for job in chosen:
                self._stopped.add(job.id)
                self._coming.give(job)
                self._growth.count(job, -job.slots)
                self._add(Stop(job.id), f"its {job.slots} slots go to job {successor.id}")
            if self._coming.take(successor, want):
                self._granted.add(successor.id)
                self._free.reserve(successor, want)
                self._growth.count(successor, want)

    def _keeps_busy(self, successor: ClusterJob, want: int, victims: list[ClusterJob]) -> bool:
        """Whether the successor and the waiting jobs use as many slots as the victims give up.

        To give up four slots for one is no gain while no job uses the other three.
        """
        without, trial = self._coming.copy(), self._coming.copy()
        for job in victims:
            trial.give(job)
        trial.take(successor, want)
        others = [*((number, slots) for number, slots in self._target.items() if slots), *self._waiting]
        done = {successor.id, *self._granted, *(job.id for job in victims)}
        left = [entry for entry in others if entry[0] not in done]
        gained = want + self._filled(trial, left) - self._filled(without, left)
        return gained >= sum(job.slots for job in victims)

    def _filled(self, trial: FreeSlots, waiting: Sequence[tuple[int, int]]) -> int:
        """Slots that waiting jobs take, each if it fits."""
        return sum(slots for job, slots in self._startable(waiting) if trial.take(job, slots))

    def _startable(self, waiting: Sequence[tuple[int, int]]) -> Iterator[tuple[ClusterJob, int]]:
        """The waiting jobs that nothing but slots keeps from starting, in order, each with the slots it would get."""
        for number, want in waiting:
            job = self._by_id.get(number)
            if job is not None and job.state is JobState.WAITING and not job.blocked and number not in self._starting:
                yield job, min(max(want, job.min_slots), job.max_slots)

    def _needed(self, successor: ClusterJob, want: int, victims: Sequence[ClusterJob]) -> list[ClusterJob]:
        """The fewest of the victims, in order, whose slots hold the successor; empty if those of all do not."""
        trial, chosen = self._coming.copy(), []
        for job in victims:
            chosen.append(job)
            trial.give(job)
            if trial.fits(successor, want):
                break
        else:
            return []
        for job in list(chosen):
            without = self._coming.copy()
            for other in chosen:
                if other is not job:
                    without.give(other)
            if without.fits(successor, want):
                chosen.remove(job)
        return chosen

    def _stop_resized(self) -> None:
        """Stop jobs that are to continue at another size, if that size fits once their own slots are free."""
        for job in self._jobs:
            want = self._target.get(job.id, job.slots)
            if job.state is not JobState.RUNNING or want in (0, job.slots) or not self._stops.allow(job):
                continue
            trial = self._coming.copy()
            trial.give(job)
            if trial.take(job, want):
                self._coming = trial
                self._stopped.add(job.id)
                self._free.reserve(job, max(0, want - job.slots))
                self._add(Stop(job.id), f"from {job.slots} to {want} slots")

    def _release_running(self) -> None:
        for job in self._jobs:
            if job.state is not JobState.RUNNING or job.id in self._stopped:
                continue
            if job.held_by_us:
                self._add(Release(job.id), "it began before its hold came, which would outlast a requeue")
            elif job.marked:
                self._add(Release(job.id), "its mark outlived its hold, and would make an owner's later hold joulery's")

    def _start_waiting(self) -> None:
        """Start waiting jobs, in order, on slots that no planned job needs, each if it fits."""
        for job, slots in self._startable(self._waiting):
            if self._free.take(job, slots):
                free = self._snapshot.free
                self._add(Start(job.id, slots), f"{slots} of {free} free slots, next in the ranking", new=True)

    def _release_next(self) -> None:
        """Release the next in line of each pool where no planned job lacks slots.

        The cluster starts them in order the moment a job ends, without waiting for the next tick. Only jobs are
        released that any running job would make room for: a wider one would keep the cluster from starting others
        behind it. Where it would not, or the first in line has run out of patience, the first is released whatever its
        width: else narrower jobs, which take each slot the moment it becomes free, would overtake it for ever.
        """
        if not self._snapshot.self_starting:
            return
        room = {pool: max(1, slots // _NEXT_IN_LINE) for pool, slots in self._snapshot.pools.items()}
        narrowest: dict[str, int] = {}
        led: set[str] = set()
        for running in self._jobs:
            if running.state is JobState.RUNNING:
                narrowest[running.pool] = min(narrowest.get(running.pool, running.slots), running.slots)
        for job, slots in self._startable(self._waiting):
            tired = job.pool in narrowest and self._stops.now_s - job.submit_s > self._stops.patience_s
            leads = (self._snapshot.overtaking or tired) and job.pool not in led
            led.add(job.pool)
            narrow = slots <= min(room.get(job.pool, 0), narrowest.get(job.pool, 0))
            if job.pool in self._short or job.parts or not (narrow or leads):
                continue
            room[job.pool] = room.get(job.pool, 0) - (slots if narrow else 0)
            self._next.add(job.id)
            if job.held_by_us or job.shape != slots:
                self._add(Start(job.id, slots), "next in line: starts when a job ends")

    def _hold_others(self) -> None:
        for job in self._jobs:
            idle = job.state is JobState.WAITING and self._target.get(job.id, 0) == 0 and job.id not in self._starting
            if job.id in self._next:
                continue
            if idle and not job.held_by_us and not job.blocked:
                self._add(Hold(job.id), CLEANER if job.id in self._patient else "others go first")
