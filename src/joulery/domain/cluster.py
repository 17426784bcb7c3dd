"""Training jobs as a cluster shows them, and what may be done to them. Slurm and the local backend speak these."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from joulery.domain.errors import DataError
from joulery.domain.quality import Quality


class JobState(StrEnum):
    """Where a job is in its life."""

    WAITING = "waiting"
    """Has no slots; ``held`` says whether it may start by itself."""
    RUNNING = "running"
    """Has slots and computes."""
    STOPPING = "stopping"
    """Was told to stop and still has its slots."""
    DONE = "done"
    """Ended well."""
    FAILED = "failed"
    """Ended otherwise, by itself."""
    CANCELLED = "cancelled"
    """Ended because somebody said so."""

    @property
    def over(self) -> bool:
        """True once it will never run again."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """One job as the cluster shows it. A slot is a GPU, or a slice of CPU cores where there are no GPUs.

    Attributes:
        id: The cluster's number of it; kept through stops and restarts.
        name, owner, partition: What it is, whose, where.
        submit_s: When it was submitted, Unix seconds.
        state: Where it is in its life.
        slots: Slots it holds now; 0 while it waits.
        shape: Slots it will get when it starts without being resized.
        min_slots, max_slots: Between which its owner lets it be resized; equal when not.
        held_by_us: It waits because this scheduler holds it.
        exempt: Why it is left alone (an array, held by its owner …); empty when it is ours to schedule.
        restarts: How often it was started again.
        progress_ratio: Share of its work that is done, 0 to 1; NaN where it does not say.
        exit_code: How it ended; None before, and where nobody knows.
        follows: The job it was submitted in place of, whose work it goes on with; 0 for none.
    """

    id: int
    name: str
    owner: str
    submit_s: float
    state: JobState
    slots: int = 0
    shape: int = 1
    min_slots: int = 1
    max_slots: int = 1
    partition: str = ""
    held_by_us: bool = False
    exempt: str = ""
    restarts: int = 0
    progress_ratio: float = field(default=float("nan"))
    exit_code: int | None = None
    follows: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_slots <= self.max_slots:
            raise DataError(
                f"job {self.id} may use {self.min_slots} to {self.max_slots} slots, expected at least 1 and min <= max"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job runs on one machine.

    Attributes:
        job: Its number.
        pids: The processes on top of it.
        slots: How many slots of the machine it holds.
        gpus: Which boards are its own.
    """

    job: int
    pids: tuple[int, ...]
    slots: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JobEnergy:
    """What a job drew so far; totals only grow.

    Attributes:
        energy_j: Joules, its share of its machines included.
        slot_j: Joules of its slots alone (GPU boards, or the share of the processor), for power per slot.
        quality: The weakest of its parts.
        source: Who counts; totals of one source only grow, another starts at 0.
    """

    energy_j: float
    slot_j: float
    quality: Quality
    source: str


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster at one moment.

    Attributes:
        slots: Slots of the nodes that are up.
        jobs: Every job that is not over, and those that ended lately; by number.
        notes: What a person should know, one sentence each.
        self_starting: Whether jobs start by themselves unless they are held.
    """

    slots: int
    jobs: tuple[ClusterJob, ...]
    notes: tuple[str, ...] = ()
    self_starting: bool = True

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return max(0, self.slots - sum(job.slots for job in self.jobs))


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep a waiting job from starting by itself."""

    job: int


@dataclass(frozen=True, slots=True)
class Release:
    """Take our hold off a waiting job and leave the rest to the cluster."""

    job: int


@dataclass(frozen=True, slots=True)
class Start:
    """Let a waiting job run on so many slots."""

    job: int
    slots: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Have a running job save itself and wait, held, under the same number."""

    job: int


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which waiting jobs are to start, first first."""

    jobs: tuple[int, ...]


ClusterAction = Hold | Release | Start | Stop | Order


@dataclass(frozen=True, slots=True)
class PastJob:
    """One job as a cluster's accounting remembers it.

    Attributes:
        id: Its number, as text: arrays have ``17_3``.
        name, owner, account, partition: What it was, whose, where.
        state: The accounting's word for how it ended.
        submit_s, start_s, end_s: Unix seconds; NaN where it does not say. ``submit_s`` is when it could start at the
            earliest, where the accounting tells that from its submission.
        elapsed_s: Time it held its resources.
        gpus, cpus, nodes: What it held.
        measured_j: Energy the cluster itself measured; NaN where it did not.
    """

    id: str
    name: str
    owner: str
    account: str
    partition: str
    state: str
    submit_s: float
    start_s: float
    end_s: float
    elapsed_s: float
    gpus: int
    cpus: int
    nodes: int
    measured_j: float = field(default=float("nan"))
