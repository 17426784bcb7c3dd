"""A cluster in memory that behaves as Slurm does: jobs start by themselves, stop after a while, may vanish.

A scheduling pass goes over the released jobs in the order they were given, else by number, starts every job that fits
and leaves a reason with the others, which stays until the next pass: ``QOSMaxGRESPerUser``, ``Licenses``,
``ReqNodeNotAvail`` in a reservation, else ``Resources``. A held job has no reason, nor one that was just released.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterNode,
    ClusterSnapshot,
    Hold,
    JobEnergy,
    JobState,
    Order,
    Release,
    Split,
    Start,
    Stop,
)
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.quality import Quality


@dataclass
class FakeCluster:
    """Jobs on slots; ``pass_time`` moves it on."""

    slots: int = 4
    stop_s: float = 1.0
    rate: float = 0.01
    jobs: dict[int, ClusterJob] = field(default_factory=dict)
    actions: list[ClusterAction] = field(default_factory=list)
    away: bool = False
    refuse: set[int] = field(default_factory=set)
    rigid: set[int] = field(default_factory=set)
    energy: dict[int, JobEnergy] = field(default_factory=dict)
    watts: float = 100.0
    self_starting: bool = True
    stopping_s: dict[int, float] = field(default_factory=dict)
    most_used: int = 0
    limits: dict[str, int] = field(default_factory=dict)
    never: set[int] = field(default_factory=set)
    busy_slot_s: float = 0.0
    layout: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Pool and slots of each node; one machine of ``slots`` when empty."""
    licenses: dict[str, int] = field(default_factory=dict)
    needs: dict[int, str] = field(default_factory=dict)
    """The license that a job needs."""
    secret: dict[int, frozenset[str]] = field(default_factory=dict)
    """Nodes that a job can really run on, where a snapshot does not show it."""
    reserved_s: tuple[float, float] = (0.0, 0.0)
    """No job starts between these times since the beginning: a reservation for maintenance."""
    pass_s: float = 0.0
    """Time between two scheduling passes; one whenever time passes when 0."""
    now_s: float = 0.0
    passed_s: float = 0.0
    ranks: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    last_number: int = 1000
    shown: dict[int, tuple[ClusterJob, ClusterJob]] = field(default_factory=dict)
    """Each job as it is kept and as the last snapshot showed it: most do not change from one to the next."""

    def submit(self, number: int, *, least: int = 1, most: int = 1, shape: int | None = None, **more: object) -> None:
        job = ClusterJob(number, "job", "ada", float(number), JobState.WAITING, shape=shape or least,
                         min_slots=least, max_slots=most, progress_ratio=0.0)  # fmt: skip
        self.jobs[number] = replace(job, **more)  # type: ignore[arg-type]

    def snapshot(self) -> ClusterSnapshot:
        if self.away:
            raise CapabilityError("the controller does not answer")
        jobs = tuple(self._seen(job) for job in self.jobs.values())
        free = self._free()
        nodes = tuple(ClusterNode(name, slots, free[name], pool) for name, (pool, slots) in self.layout.items())
        return ClusterSnapshot(self.slots, jobs, self_starting=self.self_starting, nodes=nodes)

    def _seen(self, job: ClusterJob) -> ClusterJob:
        reason = self.reasons.get(job.id, "") if job.state is JobState.WAITING and not job.held_by_us else ""
        limits = {f"user {job.owner}"} | ({f"license {self.needs[job.id]}"} if job.id in self.needs else set())
        judged = reason == "Resources"
        blocked = "" if reason == "Resources" else reason
        seen = (job.blocked or blocked, judged, limits)
        last, shown = self.shown.get(job.id, (None, job))
        if last is not job or (shown.blocked, shown.judged, shown.limits) != seen:
            shown = replace(job, blocked=seen[0], judged=judged, limits=frozenset(limits))
            self.shown[job.id] = (job, shown)
        return shown

    def _verdict(self, job: ClusterJob) -> str:
        """Why it would not start even on free slots; of jobs in ``never`` nothing is said, as Slurm may."""
        held = sum(other.slots for other in self.jobs.values() if other.owner == job.owner)
        if held + job.shape > self.limits.get(job.owner, 1_000_000):
            return "QOSMaxGRESPerUser"
        if name := self.needs.get(job.id):
            used = sum(other.slots > 0 and self.needs.get(other.id) == name for other in self.jobs.values())
            if used >= self.licenses.get(name, 0):
                return "Licenses"
        return "ReqNodeNotAvail" if self.reserved_s[0] <= self.now_s < self.reserved_s[1] else ""

    def _free(self) -> dict[str, int]:
        """Free slots of each node; one node ``""`` without a layout."""
        free = {name: slots for name, (_, slots) in self.layout.items()} or {"": self.slots}
        for job in self.jobs.values():
            for at, name in enumerate(job.nodes or ("",)) if job.slots else ():
                each = max(1, len(job.nodes))
                free[name] = free.get(name, 0) - job.slots // each - (at < job.slots % each)
        return free

    def _placed(self, job: ClusterJob) -> tuple[str, ...] | None:
        """The nodes on which it could start, each once; None where it could not."""
        if not self.layout:
            return () if job.shape <= self._free()[""] else None
        free = {
            name: count
            for name, count in self._free().items()
            if self.layout[name][0] == job.pool
            and (job.runs_on is None or name in job.runs_on)
            and name in self.secret.get(job.id, frozenset({name}))
        }
        widest = max((slots for _, slots in self.layout.values()), default=1)
        count = -(-job.shape // widest)
        while job.shape % count:
            count += 1
        fitting = sorted(name for name in free if free[name] >= job.shape // count)[:count]
        return tuple(fitting) if len(fitting) == count else None

    def _pass(self) -> None:
        """One scheduling pass."""
        for number, job in sorted(self.jobs.items(), key=lambda entry: (self.ranks.get(entry[0], 10**6), entry[0])):
            if job.state is not JobState.WAITING or job.held_by_us or job.exempt or job.tasks > 1:
                continue
            self.reasons[number] = self._verdict(job)
            if number in self.never or self.reasons[number]:
                continue
            placed = self._placed(job)
            if placed is None:
                self.reasons[number] = "Resources"
            else:
                self.jobs[number] = replace(job, state=JobState.RUNNING, slots=job.shape, nodes=placed)

    def apply(self, action: ClusterAction, /) -> str:
        if self.away:
            raise CapabilityError("the controller does not answer")
        self.actions.append(action)
        if isinstance(action, Order):
            self.ranks |= {number: rank for rank, number in enumerate(action.jobs)}
            return ""
        job = self.jobs[action.job]
        if action.job in self.refuse or job.state.over:
            raise ActuationError(f"job {action.job} is refused")
        self.reasons.pop(job.id, None)
        if isinstance(action, Split):
            for _ in range(action.count):
                self.last_number += 1
                self.jobs[self.last_number] = replace(job, id=self.last_number, tasks=1, held_by_us=True)
            self.jobs[job.id] = replace(job, tasks=job.tasks - action.count)
        elif isinstance(action, Hold):
            self.jobs[job.id] = replace(job, held_by_us=True)
        elif isinstance(action, Release):
            self.jobs[job.id] = replace(job, held_by_us=False)
        elif isinstance(action, Start):
            if job.state is not JobState.WAITING:
                raise ActuationError(f"job {job.id} is {job.state}")
            if action.job in self.rigid and action.slots != job.shape:
                raise ActuationError(f"job {job.id} keeps its size")
            self.jobs[job.id] = replace(job, held_by_us=False, shape=action.slots)
        elif isinstance(action, Stop):
            self.jobs[job.id] = replace(job, state=JobState.STOPPING, held_by_us=True)
            self.stopping_s[job.id] = self.stop_s
        return ""

    def close(self) -> None:
        return

    def read(self, snapshot: ClusterSnapshot) -> dict[int, JobEnergy]:
        """Energy totals, as an agent would report them."""
        return dict(self.energy)

    def pass_time(self, seconds: float) -> None:
        """Let jobs start, compute, stop and end."""
        self.now_s += seconds
        for number in sorted(self.stopping_s):
            self.stopping_s[number] -= seconds
            if self.stopping_s[number] <= 0:
                del self.stopping_s[number]
                job = self.jobs[number]
                self.jobs[number] = replace(job, state=JobState.WAITING, slots=0, nodes=(), restarts=job.restarts + 1)
        running = [number for number, job in sorted(self.jobs.items()) if job.state is JobState.RUNNING]
        if self.now_s - self.passed_s >= self.pass_s:
            self._pass()
            self.passed_s = self.now_s
        for number in running:
            job = self.jobs[number]
            if job.state is JobState.RUNNING:
                done = min(1.0, job.progress_ratio + self.rate * job.slots**0.9 * seconds)
                before = self.energy.get(number, JobEnergy(0.0, 0.0, Quality.MEASURED, "fake"))
                used_j = self.watts * job.slots * seconds
                self.energy[number] = replace(before, energy_j=before.energy_j + used_j, slot_j=before.slot_j + used_j)
                over = JobState.DONE if done >= 1.0 else JobState.RUNNING
                self.jobs[number] = replace(
                    job, progress_ratio=done, state=over, slots=0 if over is JobState.DONE else job.slots,
                    nodes=() if over is JobState.DONE else job.nodes,
                )  # fmt: skip
        self.busy_slot_s += seconds * sum(self.running().values())
        self.most_used = max(self.most_used, sum(job.slots for job in self.jobs.values()))

    def running(self) -> dict[int, int]:
        """Slots of each running job."""
        return {number: job.slots for number, job in self.jobs.items() if job.state is JobState.RUNNING}

    def held(self) -> set[int]:
        """Jobs held in our name."""
        return {number for number, job in self.jobs.items() if job.held_by_us and job.state is JobState.WAITING}
