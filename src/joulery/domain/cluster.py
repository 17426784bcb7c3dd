"""Training jobs as a cluster reports them, and the actions on them. Every backend uses these types."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from joulery.domain.errors import DataError
from joulery.domain.quality import Quality


class JobState(StrEnum):
    """State of a job."""

    WAITING = "waiting"
    """Has no slots; it does not start by itself while it is held."""
    RUNNING = "running"
    """Has slots and computes."""
    STOPPING = "stopping"
    """Is stopping and still has its slots."""
    DONE = "done"
    """Ended successfully."""
    FAILED = "failed"
    """Ended unsuccessfully, by itself."""
    CANCELLED = "cancelled"
    """Cancelled by a user."""

    @property
    def over(self) -> bool:
        """True once the job will never run again."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job, from a start to the end of its processes.

    Attributes:
        start_s: When it started, Unix seconds. No two runs of a job start at the same time.
        held_s: How long it has held its slots, seconds: until its end, or until now. NaN where the cluster gives the
            start alone.
        slots: Slots it holds or held.
    """

    start_s: float
    held_s: float
    slots: int


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """One job as the cluster reports it. A slot is a GPU, or a slice of CPU cores where there are no GPUs.

    Attributes:
        id: The cluster's number of the job; kept through stops and restarts.
        name, owner, partition: Name, owner and partition.
        submit_s: When it was submitted, Unix seconds.
        state: Its state.
        slots: Slots it holds now; 0 while it waits.
        shape: Slots it will get when it starts without being resized.
        min_slots, max_slots: Range within which it may be resized; equal when it may not.
        held_by_us: Whether joulery holds it.
        marked: Whether it has joulery's mark of a hold; without the hold if the scheduler was killed between the two.
        exempt: Why joulery leaves it alone (interactive, held by its owner …); empty when joulery schedules it.
        restarts: How often it was started again.
        progress_ratio: Share of its work that is done, 0 to 1; NaN where it does not report progress.
        exit_code: How it ended; None before, and where unknown.
        follows: The job it replaces and whose work it continues; 0 for none.
        pool: Name of the pool of slots it can run on.
        nodes: Nodes it runs on; empty where the cluster has no nodes.
        spread: Whether its slots may lie on any nodes of the pool; otherwise on as few as hold them, evenly filled.
        start_s: When it started last, Unix seconds; NaN where unknown.
        eligible_s: Earliest time at which the cluster starts it, Unix seconds.
        priority: The cluster's own priority of it; NaN where unknown.
        blocked: Why the cluster would not start it even on free slots (a limit, a license …); empty where only slots
            are missing, or where that is unknown.
        judged: Whether the cluster has reported that a waiting job lacks slots and nothing else.
        stoppable: Whether it may be stopped while it runs.
        array: Number of the job array it is a task of; 0 for none.
        tasks: Waiting tasks of an array that this entry represents. An entry for several tasks is not started itself:
            tasks are separated from it (:class:`Split`).
        most_tasks: How many tasks of its array may run at once; 0 for no limit.
        parts: Slots of each component of a heterogeneous job; components start together, each on nodes of its own.
            Empty for other jobs.
        runs_on: Names of the nodes it may run on; None for every node of its pool.
        limits: Names of the limits that count it, such as its owner and account: a limit that admits one job need not
            admit a second one.
        cpus_per_slot: CPUs it needs beside each slot.
        memory_per_slot_bytes: Memory it needs beside each slot.
        deadline_s: When its owner needs it at the latest, Unix seconds; infinite for no deadline.
        limit_s: Longest time it runs on its shape, as its owner states; NaN where unknown.
        account: The account that its use is charged to; empty where the cluster has none.
        run: Its present run, or its last one while it waits and when it is over; None where the cluster times no runs.
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
    marked: bool = False
    exempt: str = ""
    restarts: int = 0
    progress_ratio: float = field(default=float("nan"))
    exit_code: int | None = None
    follows: int = 0
    pool: str = ""
    nodes: tuple[str, ...] = ()
    spread: bool = True
    start_s: float = field(default=float("nan"))
    eligible_s: float = 0.0
    priority: float = field(default=float("nan"))
    blocked: str = ""
    judged: bool = True
    stoppable: bool = True
    array: int = 0
    tasks: int = 1
    most_tasks: int = 0
    parts: tuple[int, ...] = ()
    runs_on: frozenset[str] | None = None
    limits: frozenset[str] = frozenset()
    cpus_per_slot: float = 0.0
    memory_per_slot_bytes: float = 0.0
    deadline_s: float = math.inf
    limit_s: float = field(default=float("nan"))
    account: str = ""
    run: JobRun | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_slots <= self.max_slots:
            raise DataError(
                f"job {self.id} may use {self.min_slots} to {self.max_slots} slots, expected at least 1 and min <= max"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a job on one machine.

    Attributes:
        job: Number of the job.
        pids: Its top-level processes.
        slots: How many slots of the machine it holds.
        gpus: Numbers of the boards that it holds.
        nodes: Number of nodes it runs on.
        kind: Name that similar jobs share: owner and name; empty where unknown.
        hosts: The nodes it runs on, its first one first; empty where unknown.
        host: This node among them.
        run: The run of the job; None where the machine times no runs.
        ended: Whether the run is over.
        cpu_s: Processor seconds of a run that is over, all of its processes together; NaN where unknown.
    """

    job: int
    pids: tuple[int, ...]
    slots: int
    gpus: tuple[int, ...] = ()
    nodes: int = 1
    kind: str = ""
    hosts: tuple[str, ...] = ()
    host: str = ""
    run: JobRun | None = None
    ended: bool = False
    cpu_s: float = field(default=float("nan"))


@dataclass(frozen=True, slots=True)
class JobEnergy:
    """Energy of a job so far; totals only grow.

    Attributes:
        energy_j: Joules, its share of its machines included.
        slot_j: Joules of its slots alone (GPU boards, or the share of the processor), for power per slot.
        quality: The weakest of its parts.
        source: Source of the count; totals of one source only grow, another source starts at 0.
        covered_s: Time on slots that these joules cover, seconds; NaN for all time since the source counts the job.
    """

    energy_j: float
    slot_j: float
    quality: Quality
    source: str
    covered_s: float = field(default=float("nan"))


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node that is up.

    Attributes:
        name: Its name.
        slots: Slots it has.
        free: Slots that no job holds.
        pool: The pool it belongs to.
        free_cpus: CPUs that no job holds; infinite where unknown.
        free_memory_bytes: Memory that no job holds; infinite where unknown.
    """

    name: str
    slots: int
    free: int
    pool: str = ""
    free_cpus: float = math.inf
    free_memory_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster at one moment.

    A pool is a set of nodes that jobs compete for: a job of one pool never runs on a node of another.

    Attributes:
        slots: Slots of the nodes that are up.
        jobs: Every job that is not over, and the jobs that ended lately; by number.
        notes: Remarks for the operator, one sentence each.
        self_starting: Whether jobs start by themselves unless they are held.
        overtaking: Whether other jobs may start while a released job does not fit.
        nodes: The nodes that are up; empty where the cluster is one machine.
    """

    slots: int
    jobs: tuple[ClusterJob, ...]
    notes: tuple[str, ...] = ()
    self_starting: bool = True
    nodes: tuple[ClusterNode, ...] = ()
    overtaking: bool = False

    @property
    def pools(self) -> dict[str, int]:
        """Slots of each pool; the one pool ``""`` where the cluster has no nodes."""
        pools: dict[str, int] = {}
        for node in self.nodes:
            pools[node.pool] = pools.get(node.pool, 0) + node.slots
        return pools or {"": self.slots}

    @property
    def free(self) -> int:
        """Slots that no job holds."""
        return max(0, self.slots - sum(job.slots for job in self.jobs))


@dataclass(frozen=True, slots=True)
class Hold:
    """Hold a waiting job, so that the cluster does not start it."""

    job: int


@dataclass(frozen=True, slots=True)
class Release:
    """Remove joulery's hold from a waiting job; the cluster decides when it starts."""

    job: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a waiting job on the given number of slots."""

    job: int
    slots: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a running job, which may save its state; it then waits, held, under the same number."""

    job: int


@dataclass(frozen=True, slots=True)
class Split:
    """Separate ``count`` waiting tasks, held, from an array; each becomes a job with its own number."""

    job: int
    count: int


@dataclass(frozen=True, slots=True)
class Order:
    """Set the order in which waiting jobs start, from the first to the last."""

    jobs: tuple[int, ...]


ClusterAction = Hold | Release | Start | Stop | Split | Order


@dataclass(frozen=True, slots=True)
class PastJob:
    """One job in a cluster's accounting.

    Attributes:
        id: Its number, as text: arrays have ``17_3``.
        name, owner, account, partition: Name, owner, account and partition.
        state: Final state, as the accounting names it.
        submit_s, start_s, end_s: Unix seconds; NaN where unknown. ``submit_s`` is the earliest possible start where
            the accounting gives that beside the submission.
        elapsed_s: Time it held its resources.
        gpus, cpus, nodes: Resources it held.
        measured_j: Energy the cluster itself measured; NaN where it did not.
        gpu_type: Type of its GPUs; empty where the accounting names none, or several.
        any_type: Whether its owner asked for GPUs of any type; False where the accounting does not say.
        cluster: Its cluster, each of which numbers its own jobs; empty where the accounting names none.
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
    gpu_type: str = ""
    any_type: bool = False
    cluster: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        """Cluster and number, shared only by the runs and parts of one job: clusters use the same numbers."""
        return self.cluster, self.id
