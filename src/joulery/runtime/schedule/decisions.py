"""From a cluster's snapshot to the policy's view of it, and from the policy's plan to the next actions.

Both directions are pure. :func:`next_actions` is idempotent: after a crash it gives what is still to be done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from joulery.accounting.training_jobs import Tally
from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterSnapshot,
    Hold,
    JobState,
    Release,
    Split,
    Start,
    Stop,
)
from joulery.policies.training.allocation import ClusterView
from joulery.runtime.schedule.free_slots import FreeSlots, LimitGrowth
from joulery.runtime.schedule.intensity import GridIntensity
from joulery.runtime.schedule.state import SchedulerState

_G_PER_KG = 1e3
CLEANER = "waits for a cleaner hour, its deadline allows it"
_NEXT_IN_LINE = 4
"""A quarter of a pool's slots is next in line."""


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
    """The jobs that are not over and not exempt; of an array the tasks that are separated from it."""
    return tuple(job for job in snapshot.jobs if not job.state.over and not job.exempt and job.tasks == 1)


def fresh_tasks(snapshot: ClusterSnapshot) -> dict[int, set[int]]:
    """By array, its tasks that wait and never ran."""
    found: dict[int, set[int]] = {}
    for job in schedulable(snapshot):
        if job.array and job.state is JobState.WAITING and not job.restarts:
            found.setdefault(job.array, set()).add(job.id)
    return found


def kind_name(job: ClusterJob) -> str:
    """The recurring kind of a job: same owner, name and least size."""
    return f"{job.owner}/{job.name}/{job.min_slots}"


def capacity(snapshot: ClusterSnapshot, pool: str, jobs: Sequence[ClusterJob]) -> int:
    """Slots of a pool that these jobs may share: all but those of other jobs."""
    own = {job.id for job in jobs}
    others = sum(job.slots for job in snapshot.jobs if job.id not in own and job.pool == pool)
    return max(0, snapshot.pools.get(pool, 0) - others)


def _place(job: ClusterJob, submitted_s: float) -> tuple[float, bool, bool, int]:
    """Of jobs submitted together those that run go first, so that none stops another.

    What is left of an array has the array's own number, the least of all, and is its last task.
    """
    return submitted_s, job.state is not JobState.RUNNING, job.id == job.array, job.id


def cluster_view(
    jobs: Sequence[ClusterJob],
    state: SchedulerState,
    grid: GridIntensity,
    now_s: float,
    restart_s: float,
    gpus: int,
    round_s: float = 1800.0,
) -> ClusterView:
    """The policy's view at a round. Where the intensity is unknown it shows no power either, and nothing shifts.

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


def _deadlines(jobs: Sequence[ClusterJob], grid: GridIntensity) -> dict[str, Any]:
    """What the policy sees of deadlines, and of the hours ahead: a job with a deadline may come between rounds."""
    expected = 0.0 if math.isnan(grid.expected_g_per_kwh) else grid.expected_g_per_kwh
    ahead = {"ahead_g_per_kwh": grid.ahead_g_per_kwh if grid.known else None, "expected_g_per_kwh": expected}
    if all(job.deadline_s == math.inf for job in jobs):
        return ahead
    return {
        **ahead,
        "deadline_s": np.array([job.deadline_s for job in jobs], np.float64),
        "longest_s": np.array([job.limit_s * job.shape for job in jobs], np.float64),
    }


def latest_start_s(job: ClusterJob, restart_s: float) -> float:
    """When a job that never ran has to start to meet its deadline; infinite without one, NaN where it is unknown."""
    return job.deadline_s - job.limit_s * job.shape / job.min_slots - 2 * restart_s


@dataclass(frozen=True, slots=True)
class StopRules:
    """Which running jobs may be stopped now.

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
        """Whether this running job may be stopped; ``young``: once it has run for a while."""
        too_young = self.now_s - job.start_s < self.least_run_s  # False where the start is unknown
        return job.stoppable and (young or not too_young) and (self.jobs is None or job.id in self.jobs)


def next_actions(
    snapshot: ClusterSnapshot,
    target: Mapping[int, int],
    waiting: Sequence[tuple[int, int]],
    *,
    passive: bool,
    stops: StopRules | None = None,
    patient: frozenset[int] = frozenset(),
) -> list[PlannedAction]:
    """The next action of every job that is not yet as the plan wants it.

    A running job stops only when its successor could start there and then: the successor is released first, so that
    the cluster judges it; only if the cluster says that nothing but slots is missing (:attr:`ClusterJob.judged`) and
    the slots of the jobs to stop would hold it, do they stop; of jobs that one limit counts, one starts at a time. A
    job that is resized stops when its new size fits. Slots beyond those reserved go to the waiting jobs, in order; a
    blocked job reserves none. The next in line are released, too, so that they start the moment a job ends; all other
    waiting jobs are held. Of an array so many waiting tasks are separated as its pool could run.

    Args:
        snapshot: The cluster.
        target: Slots each job is to have, jobs that go first first; 0 for none, absent where nothing was decided yet.
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
        self._free, self._coming = FreeSlots(snapshot), FreeSlots(snapshot)
        for job in snapshot.jobs:
            if job.state is JobState.STOPPING and target.get(job.id, 0) == 0:
                self._coming.give(job)
        self._growth = LimitGrowth()
        for job in snapshot.jobs:
            if job.state is JobState.STOPPING and target.get(job.id, 0) == 0:
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
        """Hold what is left of an array as one, and separate as many waiting tasks as its pool could run, and one more.

        More of them once half have started, in one command. Those that run do not count: with none of its tasks to
        wait in line, an array that came first would let later jobs pass.
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
        """Waiting jobs of the plan: those released reserve their slots, the others are released if there is a way."""
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
        """Whether a waiting job has so many slots: free ones, some that come, or those of jobs to stop for it."""
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
        """Whether a job that may grow later has a place on fewer slots, while no jobs to stop hold so many together.

        Slots that come free one by one on several nodes would never hold it.
        """
        if not job.stoppable or self._needed(job, want, self._victims(job, young=True)):
            return False
        return any(self._placed(job, fewer) for fewer in self._free.narrower(job, want))

    def _victims(self, successor: ClusterJob, *, young: bool = False) -> list[ClusterJob]:
        """Running jobs of the pool that the plan runs no longer, last of the ranking first; also ``young`` ones."""
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

        One slot of four that a job gives up is no gain while the other three find no job.
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
        used = 0
        for number, want in waiting:
            job = self._by_id.get(number)
            if job is None or job.state is not JobState.WAITING or job.blocked or number in self._starting:
                continue
            slots = min(max(want, job.min_slots), job.max_slots)
            used += slots if trial.take(job, slots) else 0
        return used

    def _needed(self, successor: ClusterJob, want: int, victims: Sequence[ClusterJob]) -> list[ClusterJob]:
        """The fewest of the victims, the first of them first, whose slots hold the successor; none if all do not."""
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
        """Stop jobs that go on at another size, if that size fits once their own slots are free."""
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
        """Waiting jobs on slots that no planned job needs, in order, each if it fits."""
        for number, want in self._waiting:
            job = self._by_id.get(number)
            if job is None or job.state is not JobState.WAITING or job.blocked or job.id in self._starting:
                continue
            slots = min(max(want, job.min_slots), job.max_slots)
            if self._free.take(job, slots):
                free = self._snapshot.free
                self._add(Start(number, slots), f"{slots} of {free} free slots, next in the ranking", new=True)

    def _release_next(self) -> None:
        """Release the next in line of each pool where no planned job lacks slots.

        The cluster starts them in order the moment a job ends, without waiting for the next look. Only jobs that any
        running job would make room for: a wider one would keep the cluster from starting others behind it. Where it
        would not, or the first in line has run out of patience, it is released whatever its width: narrower ones, which
        take each slot the moment it comes free, would overtake it for ever.
        """
        if not self._snapshot.self_starting:
            return
        room = {pool: max(1, slots // _NEXT_IN_LINE) for pool, slots in self._snapshot.pools.items()}
        narrowest: dict[str, int] = {}
        led: set[str] = set()
        for running in self._jobs:
            if running.state is JobState.RUNNING:
                narrowest[running.pool] = min(narrowest.get(running.pool, running.slots), running.slots)
        for number, want in self._waiting:
            job = self._by_id.get(number)
            if job is None or job.state is not JobState.WAITING or job.blocked or job.id in self._starting:
                continue
            slots = min(max(want, job.min_slots), job.max_slots)
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
