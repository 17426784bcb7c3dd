"""``jobs``: training jobs, the backend that runs them and the policy that orders them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from joulery.config.carbon import Url, Variable
from joulery.config.devices import check_limit_times
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import Ratio, Seconds, Watts
from joulery.config.parsing.section import Name, OutputPath, Section, Text


class SlotsConfig(Section):
    """The slots of this machine that jobs run on (backend local)."""

    kind: Literal["cpu", "gpu"] = "cpu"
    """gpu: one GPU a slot; cpu: some cores a slot."""
    count: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Slots in all; as many as the machine has when left out."""
    cores: Annotated[int, Field(ge=1, le=4096)] = 1
    """Cores of a slot of kind cpu."""


class SlotPowerConfig(Section):
    """Stated power of jobs that no meter reads; energy from it is labelled assumed."""

    slot_w: Watts = Field(alias="slot")
    """Power of one busy slot, such as 250 W."""
    share_w: Watts = Field(alias="share", default=0.0)
    """Power of a slot's share of its machine: processors, fans, disks."""


class GreenConfig(Section):
    """GREEN's policy; see docs/how-it-works/scheduling-policy.md for what each key does."""

    ALIASES: ClassVar = {"elders": "oldest_share"}

    kind: Literal["green", "green-paper", "swift", "lean", "frugal"] = "green"
    """green is joulery's improved default, green-paper the rules as published; swift, lean and frugal also limit the
    power of GPUs (jobs.limits) and differ in how readily jobs grow."""
    mu: Annotated[float, Field(ge=1, le=10)] = 2.0
    """Strength of the shift of high-power jobs into green hours; 1 for none."""
    theta: Ratio = 0.3
    """Share of the slots that jobs still being sized may take."""
    gamma: Ratio | None = None
    """Least efficiency relative to one slot at which a job still grows; the policy's own rule when left out."""
    price_ratio: Annotated[float, Field(ge=0, le=10)] | None = None
    """Worth of a second of completion time, as a share of what the average kind of job draws on its fewest slots: a
    measured kind runs on the slots at which work costs least at that price. The kind's own (lean 0.17, else none, jobs
    then grow by gamma) when left out; none with a gamma."""
    cap: Annotated[int, Field(ge=1)] | None = None
    """Most slots a job; max(2, slots / 16), with swift and lean 8, when left out."""
    shift: Literal["mirrored", "paper"] | None = None
    """Table of shifting factors; the kind's own when left out."""
    hysteresis: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor on the priority number of running jobs, 1 for none; the kind's own when left out."""
    profiles: bool | None = None
    """Whether a recurring kind of job starts at the size the last one settled at; the kind's own when left out."""
    carbon_gamma: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Added to gamma in dirty hours and taken off in green ones: jobs run wider when the grid is clean."""
    starve: Annotated[float, Field(gt=0)] | None = None
    """A job that has waited longer than this many times its execution is ranked as new; never when left out."""
    ceiling_s: Seconds | None = Field(alias="ceiling", default=None)
    """Slot time of the average job beyond which more carbon does not rank a job further back; the kind's own (14
    quanta, as published none) when left out."""
    levels: Annotated[int, Field(ge=1, le=16)] | None = None
    """Into how many levels, each a quarter of the one above, carbon below the ceiling is rounded down; the kind's own
    (3, as published every gram counts) when left out."""
    oldest_share: Ratio | None = None
    """Share of the slots that goes to the oldest jobs first, whatever carbon they have caused; more where some jobs are
    wide, unless 0; the kind's own (25 %, as published none) when left out."""
    by_progress: bool | None = None
    """Whether a job that has run for a quantum and reports progress is ranked by the carbon it has still to cause,
    where that is little; the kind's own (true, as published false) when left out."""
    ageing_s: Seconds | None = Field(alias="ageing", default=None)
    """Age from which a job moves forward as it grows older; the kind's own (4 d, as published never) when left out."""
    preempt_after_s: Seconds | None = Field(alias="preempt_after", default=None)
    """Least wait of a job before it takes slots from one that runs; a quantum, as published no time, when left out."""
    delay_ratio: Annotated[float, Field(ge=0)] | None = None
    """A job with a deadline waits for cleaner hours where an hour of delay saves more than this share of what a slot of
    the median job emits in an hour; the kind's own (0.6, as published deadlines are ignored) when left out."""
    order: Literal["observed", "service", "first-come"] | None = None
    """Order of service: by the carbon that jobs have caused (service), by submission (first-come), or by whichever the
    lengths of the jobs that ended call for; the kind's own (observed, as published service) when left out."""
    node_slots: Annotated[int, Field(ge=1)] | None = None
    """Slots of a node: beyond one node jobs grow by whole nodes; slot by slot when left out."""


class PowerLimitsConfig(Section):
    """Power limits of GPUs, learned for each job while it runs (policy kinds swift, lean and frugal, mode act)."""

    max_slowdown: Annotated[float, Field(ge=1, le=3)] = 1.1
    """Most time a job may take over what it takes at full power, trials included."""
    eta: Ratio | None = None
    """Weight of energy against time in the cost of a limit; the kind's own (lean 70 %, else 50 %) when left out."""
    min_ratio: Annotated[Ratio, Field(gt=0, lt=1)] = Field(alias="min", default=0.5)
    """Lowest limit, as a share of the limit that the GPU had before."""
    trial_s: Seconds = Field(alias="trial", default=60.0)
    """Time for which a limit is measured."""
    settle_s: Seconds = Field(alias="settle", default=5.0)
    """Time that a GPU takes to follow a new limit."""
    period_s: Seconds = Field(alias="period", default=2.0)
    """Interval between looks at a job."""
    review_s: Seconds = Field(alias="review", default=3600.0)
    """Time until a limited job is measured at full power again."""
    lease_s: Seconds = Field(alias="lease", default=20.0)
    """Time that a limit stays set after its last renewal."""

    @model_validator(mode="after")
    def _check_consistency(self) -> PowerLimitsConfig:
        check_limit_times(self.period_s, self.trial_s, self.review_s, self.lease_s)
        return self


class SlurmRestConfig(Section):
    """slurmrestd, to read jobs and nodes from; changes still go through scontrol."""

    url: Url | None = None
    """Its address, such as http://127.0.0.1:6820."""
    socket: OutputPath | None = None
    """Its UNIX socket, instead of a url."""
    user: Name | None = None
    """User of the token; the token's own when left out."""
    token_env: Variable = "SLURM_JWT"
    """Environment variable with the token; renewed with scontrol token when it has expired."""

    @model_validator(mode="after")
    def _one_place(self) -> SlurmRestConfig:
        if (self.url is None) == (self.socket is None):
            raise problem("needs either a url or a socket", expected="one of them", at=("url",))
        return self


class SlurmConfig(Section):
    """Slurm jobs to schedule, and how (backend slurm)."""

    conf: Annotated[OutputPath, Field(strict=False)] | None = None
    """Its slurm.conf, for the commands and the agent ($SLURM_CONF); theirs when left out."""
    cluster: Name | None = None
    """ClusterName of its slurm.conf: the scheduler refuses another one, and an agent meters only jobs of it. Under
    clusters it is the entry's name."""
    partitions: tuple[Name, ...] = ()
    """Partitions to schedule; all when left out. Jobs of other partitions are left alone."""
    user_range: bool = True
    """Whether owners set how far their jobs may be resized, with --comment=joulery:min=1,max=4, and when they
    need them, with by=2026-11-27T18:00."""
    meters: OutputPath | None = None
    """Folder on a shared disk where joulery agent on each node leaves the energy of its jobs."""
    progress: OutputPath | None = None
    """Folder on a shared disk where jobs append their progress, each to a file named by its number."""
    priority_step: Annotated[float, Field(ge=0)] = 1000.0
    """Points of Slurm's own priority that make a class: jobs of a higher class go first, carbon and progress decide
    within a class. 0 for one class."""
    resubmit: bool = False
    """Whether a job whose resize Slurm refuses is submitted again in its place, under a new number."""
    reason_in_comment: bool = False
    """Whether the Comment of a held job states why it waits, its rank and its expected start, behind its owner's words;
    removed when it is released."""
    rest: SlurmRestConfig | None = None
    """Read Slurm through slurmrestd; through its commands when left out."""
    timeout_s: Seconds = Field(alias="timeout", default=30.0)
    """Longest time of a command of Slurm."""


class KueueConfig(Section):
    """Kueue jobs to schedule (backend kueue)."""

    kubeconfig: Annotated[OutputPath, Field(strict=False)] | None = None
    """The kubeconfig; $KUBECONFIG, the service account of the container or ~/.kube/config when left out."""
    context: Name | None = None
    """A context of it; its current one when left out."""
    resource: Text = "nvidia.com/gpu"
    """Resource that is a slot: ClusterQueues have quota of it, such as nvidia.com/mig-1g.10gb."""
    queues: tuple[Name, ...] = ()
    """ClusterQueues to schedule; all when left out. Jobs of other queues are left alone."""
    priority_step: Annotated[float, Field(ge=0)] = 1.0
    """Points of Kueue's own priority that make a class: jobs of a higher class go first. 0 for one class."""
    progress: OutputPath | None = None
    """Folder on a shared disk where jobs append their progress, each to a file named by the UID of its Job."""
    timeout_s: Seconds = Field(alias="timeout", default=30.0)
    """Longest time of an answer of the API server."""


class JobsConfig(Section):
    """Training jobs."""

    backend: Literal["local", "slurm", "kueue"] = "local"
    """local: processes of this machine; slurm: the Slurm whose commands are on PATH; kueue: Kueue on Kubernetes."""
    state: Annotated[OutputPath, Field(strict=False)] = Field(default="joulery-jobs", validate_default=True)
    """Folder for the journal, the log and, on this machine, the jobs."""
    quantum_s: Seconds = Field(alias="quantum", default=1800.0)
    """Interval between rounds, in which running jobs may be moved."""
    poll_s: Seconds = Field(alias="poll", default=5.0)
    """Interval between looks at the cluster; waiting jobs also start between rounds."""
    grace_s: Seconds = Field(alias="grace", default=120.0)
    """Time for a job to save itself after SIGTERM (backend local; Slurm has KillWait)."""
    restart_s: Seconds = Field(alias="restart", default=120.0)
    """Time a job loses when it is stopped and started again."""
    measure_s: Seconds = Field(alias="measure", default=300.0)
    """Undisturbed run time after which a job's efficiency counts as known."""
    window_s: Seconds = Field(alias="window", default=86400.0)
    """An hour is green when it is below the mean intensity of this long around it."""
    least_run_s: Seconds | None = Field(alias="least_run", default=None)
    """Run time before a job may be stopped; a quarter of the quantum, at most 5 min, when left out."""
    start_within_s: Seconds = Field(alias="start_within", default=60.0)
    """Time for a released job to start on free slots before its slots go to others (not backend local)."""
    patience_s: Seconds = Field(alias="patience", default=60.0)
    """Time from the scheduler's death until the watchdog releases every held job."""
    output_pattern: Text | None = None
    """A regular expression that finds progress in the output of jobs that report none, such as Epoch (\\d+)/(\\d+)."""
    slots: SlotsConfig = Field(default_factory=SlotsConfig)
    """The slots of this machine."""
    power: SlotPowerConfig | None = None
    """Power to assume where nothing measures a job; without it such a job has no footprint."""
    policy: GreenConfig = Field(default_factory=GreenConfig)
    """The policy."""
    limits: PowerLimitsConfig = Field(default_factory=PowerLimitsConfig)
    """Power limits of the policies that set some."""
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    """Settings for Slurm."""
    kueue: KueueConfig = Field(default_factory=KueueConfig)
    """Settings for Kueue."""

    @model_validator(mode="after")
    def _poll_within_quantum(self) -> JobsConfig:
        if self.poll_s > self.quantum_s:
            raise problem("must not be longer than the quantum", expected=f"at most {self.quantum_s:g} s", at=("poll",))
        return self


class ClusterConfig(Section):
    """One of several clusters."""

    name: Name
    """Name of the cluster and its folders; with backend slurm the ClusterName of its slurm.conf."""
    jobs: JobsConfig
    """Its training jobs, as the section jobs of a site with one cluster."""
