"""A cluster in memory that behaves as Slurm does: jobs start by themselves, stop after a while, may vanish."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterSnapshot,
    Hold,
    JobEnergy,
    JobState,
    Order,
    Release,
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

    def submit(self, number: int, *, least: int = 1, most: int = 1, shape: int | None = None, **more: object) -> None:
        job = ClusterJob(number, "job", "ada", float(number), JobState.WAITING, shape=shape or least,
                         min_slots=least, max_slots=most, progress_ratio=0.0)  # fmt: skip
        self.jobs[number] = replace(job, **more)  # type: ignore[arg-type]

    def snapshot(self) -> ClusterSnapshot:
        if self.away:
            raise CapabilityError("the controller does not answer")
        jobs = tuple(replace(job, blocked=self._verdict(job)) for job in self.jobs.values())
        return ClusterSnapshot(self.slots, jobs, self_starting=self.self_starting)

    def _verdict(self, job: ClusterJob) -> str:
        """Of a job that is not held: a limit of its owner; of jobs in ``never`` it says nothing, as Slurm may."""
        if job.state is not JobState.WAITING or job.held_by_us:
            return ""
        held = sum(other.slots for other in self.jobs.values() if other.owner == job.owner)
        return "QOSMaxGRESPerUser" if held + job.shape > self.limits.get(job.owner, 1_000_000) else ""

    def apply(self, action: ClusterAction, /) -> str:
        if self.away:
            raise CapabilityError("the controller does not answer")
        self.actions.append(action)
        if isinstance(action, Order):
            return ""
        job = self.jobs[action.job]
        if action.job in self.refuse or job.state.over:
            raise ActuationError(f"job {action.job} is refused")
        if isinstance(action, Hold):
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
        for number in sorted(self.stopping_s):
            self.stopping_s[number] -= seconds
            if self.stopping_s[number] <= 0:
                del self.stopping_s[number]
                job = self.jobs[number]
                self.jobs[number] = replace(job, state=JobState.WAITING, slots=0, restarts=job.restarts + 1)
        for number, job in sorted(self.jobs.items()):
            free = self.slots - sum(other.slots for other in self.jobs.values())
            startable = not job.held_by_us and not job.exempt and number not in self.never and not self._verdict(job)
            if job.state is JobState.WAITING and startable and job.shape <= free:
                self.jobs[number] = replace(job, state=JobState.RUNNING, slots=job.shape)
            elif job.state is JobState.RUNNING:
                done = min(1.0, job.progress_ratio + self.rate * job.slots**0.9 * seconds)
                before = self.energy.get(number, JobEnergy(0.0, 0.0, Quality.MEASURED, "fake"))
                used_j = self.watts * job.slots * seconds
                self.energy[number] = replace(before, energy_j=before.energy_j + used_j, slot_j=before.slot_j + used_j)
                over = JobState.DONE if done >= 1.0 else JobState.RUNNING
                self.jobs[number] = replace(
                    job, progress_ratio=done, state=over, slots=0 if over is JobState.DONE else job.slots
                )
        self.busy_slot_s += seconds * sum(self.running().values())
        self.most_used = max(self.most_used, sum(job.slots for job in self.jobs.values()))

    def running(self) -> dict[int, int]:
        """Slots of each running job."""
        return {number: job.slots for number, job in self.jobs.items() if job.state is JobState.RUNNING}

    def held(self) -> set[int]:
        """Jobs held in our name."""
        return {number for number, job in self.jobs.items() if job.held_by_us and job.state is JobState.WAITING}
