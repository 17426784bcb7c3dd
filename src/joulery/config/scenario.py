"""Scenario files: what ``joulery simulate`` runs. One section class a ``kind``, added to ``Scenario`` below."""

from __future__ import annotations

import os
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, model_validator

from joulery.config.arrivals import ArrivalsConfig, ConstantArrivals, RateStep, increasing
from joulery.config.carbon import CarbonFile, CarbonTypical
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import (
    GramsPerKwhAboveZero,
    PerSecond,
    QuantileRatio,
    Ratio,
    Seconds,
    SecondsOrZero,
    Watts,
    WattsAboveZero,
)
from joulery.config.parsing.reading import Document, load_document, with_units
from joulery.config.parsing.section import InputFile, InputFolder, Name, Section, Text
from joulery.config.services import unique
from joulery.domain.serving.service import DEFAULT_QUANTILE, Slo

SchemeText = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]{0,40}(:[a-z_]+=[\w.+-]+){0,12}$")]
"""A scheduler, with parameters where wanted: ``green:theta=0.5``."""


class SyntheticTrace(Section):
    """Synthetic jobs with the published mix of sizes."""

    kind: Literal["synthetic"]
    jobs_per_day: Annotated[int, Field(ge=1, le=100_000)] = 400
    """Submissions a day."""
    mix: Literal["year", "day"] = "year"
    """Sizes of the jobs: as over a year of the PAI trace, or as on the paper's busy testbed day."""
    days: Annotated[int, Field(ge=1, le=3660)] = 365
    """Number of days."""
    gpu_types: dict[Name, Ratio] = Field(default_factory=dict)
    """Share of the jobs that name a GPU type, by type: {a100: 30 %}; the others run on any."""


class RecordedTrace(Section):
    """Jobs of a log."""

    kind: Literal["file"]
    file: InputFile
    """A CSV file with a header: submit_s and duration_s, one row a job in order of submission; num_gpus is used
    too, gpu_type and partition where the cluster has groups (empty for any), gpu_w (W per GPU with its share of the
    node) and speedup (by number of GPUs over the smallest: 1:1 2:1.9 4:3.4) where known."""


class NodeGroupConfig(Section):
    """Equal nodes with GPUs of one type."""

    type: Name
    """Type of the GPUs, as jobs name it (--gres=gpu:TYPE:N)."""
    nodes: Annotated[int, Field(ge=1, le=100_000)]
    """Number of nodes."""
    gpus: Annotated[int, Field(ge=1, le=1024)]
    """GPUs of a node."""
    partition: Name | None = None
    """Slurm's partition of the nodes; jobs that name none may run on them anyway."""
    limit_w: WattsAboveZero = Field(alias="limit", default=350.0)
    """Power limit of a GPU; jobs take the share of it that was measured on an A40 (modelled)."""
    idle_w: Watts = Field(alias="idle", default=25.0)
    """Power of a GPU without a job."""
    static_w: Watts = Field(alias="static", default=60.0)
    """Power of the rest of a node that is awake, by GPU."""
    cpu_w: Watts = Field(alias="cpu", default=60.0)
    """Power of the CPUs that a busy GPU entails."""
    asleep_w: Watts = Field(alias="asleep", default=5.0)
    """Power of a sleeping node, by GPU."""
    speed_ratio: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = Field(alias="speed", default=1.0)
    """Speed of a GPU over that on which the trace's durations hold; stated, not measured."""


class TrainingCluster(Section):
    """The simulated cluster."""

    nodes: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Number of nodes."""
    groups: Annotated[tuple[NodeGroupConfig, ...], Field(max_length=32)] = ()
    """Groups of nodes with different GPU types or sizes, in the order in which jobs that may run on several take them;
    they replace nodes and node_gpus."""
    node_gpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    """GPUs of a node, on which jobs are then placed; when left out two GPUs, which are counted over all nodes."""
    restart_s: SecondsOrZero = Field(alias="restart", default=120.0)
    """Time a checkpoint and restart take."""
    sleep_after_s: SecondsOrZero = Field(alias="sleep_after", default=600.0)
    """Idle time of a node before the schemes that suspend nodes do so."""
    wake_s: SecondsOrZero = Field(alias="wake", default=60.0)
    """Time that a suspended node takes to come back."""

    @model_validator(mode="after")
    def _nodes_or_groups(self) -> TrainingCluster:
        given = sorted({"nodes", "node_gpus"} & self.model_fields_set)
        if self.groups and given:
            raise problem("groups already state the number of nodes", expected="either", at=(given[0],))
        return self


class TrainingGrid(Section):
    """The carbon intensity of one region over the run."""

    name: Name
    """Its name in reports."""
    carbon: Annotated[CarbonFile | CarbonTypical, Field(discriminator="kind")]
    """Its source: a file, or the bundled typical days."""


class CarbonForecastConfig(Section):
    """The schedulers' forecast of carbon intensity; they know the present hour."""

    kind: Literal["oracle", "typical", "error", "recorded"] = "oracle"
    """oracle: the truth; typical: the mean day of the 28 days before; error: a synthetic day-ahead forecast with the
    stated error; recorded: the forecast that each region's carbon section names."""
    error_ratio: Ratio = Field(alias="error", default=0.1)
    """Mean absolute relative error of kind error."""


class TrainingScenario(Section):
    """Schedulers of training jobs, on one workload, one cluster and the carbon intensity of each region."""

    ALIASES: ClassVar = {"foresight": "carbon_forecast"}

    kind: Literal["training"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """Its name in reports."""
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of seeds: each samples other job classes, and another workload where that is synthetic."""
    cluster: TrainingCluster = Field(default_factory=TrainingCluster)
    """The cluster."""
    trace: Annotated[SyntheticTrace | RecordedTrace, Field(discriminator="kind")]
    """The jobs."""
    regions: Annotated[tuple[TrainingGrid, ...], Field(min_length=1)]
    """The grids, one comparison each."""
    month: Annotated[int, Field(ge=1, le=12)] | None = None
    """Use the mean day of this month, repeated; the hours as they come when left out."""
    window_s: Seconds = Field(alias="window", default=86_400.0)
    """Window whose mean separates green from dirty hours."""
    quantum_s: Seconds = Field(alias="quantum", default=1800.0)
    """Interval between scheduling rounds."""
    slack_s: SecondsOrZero = Field(alias="slack", default=0.0)
    """Time by which a job may end later than without any wait; jobs have no deadline when left out."""
    slack_over_s: Seconds = Field(alias="slack_over", default=3600.0)
    """Only jobs that take longer than this on one GPU have a deadline."""
    carbon_forecast: CarbonForecastConfig = Field(default_factory=CarbonForecastConfig)
    """The schedulers' forecast of carbon intensity."""
    policies: Annotated[tuple[SchemeText, ...], Field(min_length=1)] = ("green", "tiresias", "gaia")
    """Schedulers to compare; differences are against the first."""


class OrderingScenario(Section):
    """Orders in which one server answers requests of unknown length, on the same requests."""

    kind: Literal["ordering"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """Name in reports."""
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Number of seeds: each replays other requests at other instants."""
    requests: InputFile | None = None
    """A Parquet log with output_tokens, pred_cls5 and perhaps pred_cls3; made-up requests when left out."""
    count: Annotated[int, Field(ge=200, le=10_000_000)] = 20_000
    """Requests a seed."""
    load_ratio: Ratio = Field(alias="load", default=0.9)
    """Offered load of the server, such as 90 %."""
    cv: Annotated[float, Field(ge=0, le=50, allow_inf_nan=False)] = 1.0
    """Variability of the gaps between arrivals: 1 is Poisson."""
    constant_s: SecondsOrZero = Field(alias="constant", default=0.1)
    """Time of every answer, such as 100 ms."""
    per_token_s: Seconds = Field(alias="per_token", default=0.02)
    """Time of every token, such as 20 ms."""
    policies: Annotated[tuple[Name, ...], Field(min_length=1)] = (
        "fcfs",
        "ssjf",
        "ssjf-delayed",
        "boost",
        "rerank",
        "oracle",
    )
    """Policies compared; differences are taken against the first."""


class ClockLoad(Section):
    """One load of the emulated devices."""

    rate_rps: PerSecond = Field(alias="rate")
    """Requests of all models together, such as 1.5 /s."""
    slo_scale: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
    """The SLO of each model over its latency at the highest clock."""


class ClocksScenario(Section):
    """Clock governors on emulated V100s that share fifteen models."""

    kind: Literal["clocks"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """Name in reports."""
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Number of seeds: each draws other requests."""
    devices: Annotated[int, Field(ge=1, le=15)] = 8
    """Emulated V100s."""
    duration_s: Seconds = Field(alias="duration", default=1800.0)
    """Length of the workload."""
    arrivals: InputFile | None = None
    """A Parquet log with t_s, its pattern brought to each rate; Poisson arrivals when left out."""
    plan: InputFile | None = None
    """A plan of joulery plan --out that says which models share a GPU; balanced by latency when left out."""
    loads: Annotated[tuple[ClockLoad, ...], Field(min_length=1)]
    """The loads to compare under."""
    policies: Annotated[tuple[Name, ...], Field(min_length=1)] = (
        "fixed",
        "best-static",
        "miad",
        "miad-literal",
        "predictive",
    )
    """Policies compared; savings are taken against the first."""


Seeds = Annotated[int, Field(ge=1, le=10_000)]


class TailConfig(Section):
    """A bound on a high quantile of the end-to-end latency."""

    latency_s: Seconds = Field(alias="latency")
    """The bound, such as 10 ms."""
    quantile_ratio: QuantileRatio = Field(alias="quantile", default=DEFAULT_QUANTILE)
    """Quantile, such as 99 %."""

    def as_slo(self) -> Slo:
        """The noun."""
        return Slo(self.latency_s, self.quantile_ratio)


class SimulatedService(Section):
    """A service of the simulated plan."""

    name: Name
    """Its name in the plan and in reports."""
    model: Name
    """Its model in the GPU's profile."""
    slo: TailConfig
    """Service-level objective."""
    rate_rps: PerSecond = Field(alias="rate")
    """The demand to plan for, such as 400 /s."""
    rates: tuple[RateStep, ...] = ()
    """The true demand where it changes over time; the rate above when left out."""
    arrivals: ArrivalsConfig | None = None
    """Arrivals of its requests; as the scenario says when left out."""

    @model_validator(mode="after")
    def _steps_increase(self) -> SimulatedService:
        increasing(self.rates)
        return self


class ListedInstance(Section):
    """One instance of a plan."""

    service: Name
    """The service it belongs to."""
    share_ratio: Ratio = Field(alias="share")
    """Its share of the GPU, such as 37.5 %."""
    batch: Annotated[int, Field(ge=1, le=1024)]
    """Requests in a batch."""

    @model_validator(mode="after")
    def _has_a_share(self) -> ListedInstance:
        if self.share_ratio <= 0:
            raise problem("an instance needs a share of the GPU", at=("share",))
        return self


class PlanConfig(Section):
    """A plan to judge: made by a policy, read from a plan file, or written down."""

    name: Name
    """Name in the comparison."""
    policy: Name | None = None
    """The policy that makes it: best, igniter, ffd, ffd++, gslice, gpulets."""
    file: InputFile | None = None
    """A plan that joulery plan --out wrote."""
    profile: Name | None = None
    """Profile the policy plans with; the scenario's gpu when left out."""
    profile_file: InputFile | None = None
    """A profile of your own for the policy instead: what joulery profile wrote."""
    accounting: Literal["half-slo", "full-slo"] = "half-slo"
    """Share of the SLO that policy best allows a batch."""
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 32
    """Largest batch that the policy may choose."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 4
    """Largest number of equal replicas that policy best chooses."""
    balancer: Literal["turns", "random"] = "turns"
    """Distribution of requests over the replicas of a service that policy best assumes."""
    margin_ratio: Ratio = Field(alias="margin", default=0.0)
    """Margin that policy best adds to latencies and demands, such as 5 %."""
    noise_cv: Ratio = Field(alias="noise", default=0.0)
    """Variation of service times that policy best provides for."""
    gpus: tuple[tuple[ListedInstance, ...], ...] = ()
    """The plan itself: the instances of each GPU."""

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> PlanConfig:
        if (self.policy is not None) + (self.file is not None) + bool(self.gpus) != 1:
            raise problem("a plan names a policy, names a file or lists its gpus, one of the three")
        if self.profile is not None and self.profile_file is not None:
            raise problem("a policy has one profile: from the catalog or from a file", at=("profile_file",))
        for index, gpu in enumerate(self.gpus):
            total = sum(instance.share_ratio for instance in gpu)
            if total > 1 + 1e-9:
                raise problem(f"has shares of {100 * total:g} % of a GPU in all", at=("gpus", index))
        return self


class BatchedServingScenario(Section):
    """Plans for services that share GPUs, judged request by request."""

    kind: Literal["batched-serving"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """Name in reports."""
    seeds: Seeds = 5
    """Number of times each plan is judged, each time on other requests; the same for all plans."""
    gpu: Name = "v100"
    """Profile the policies plan with."""
    gpu_file: InputFile | None = None
    """A profile of your own for the policies instead: what joulery profile wrote."""
    truth: Name = "v100-refit"
    """Profile the simulated GPUs behave by."""
    truth_file: InputFile | None = None
    """A profile of your own for the simulated GPUs instead."""
    balancer: Literal["turns", "random"] = "turns"
    """Distribution of requests over the replicas of a service: in strict turns, or each at random."""
    services: Annotated[tuple[SimulatedService, ...], Field(min_length=1)]
    """The services."""
    arrivals: ArrivalsConfig = Field(default_factory=lambda: ConstantArrivals(kind="constant"))
    """Arrivals of requests."""
    batching_delay_s: SecondsOrZero | None = Field(alias="batching_delay", default=None)
    """Time that the oldest request waits for its batch to fill, 0 s is greedy; as each plan says when left out, which
    is for ever unless policy best planned for random requests."""
    noise_cv: Ratio = Field(alias="noise", default=0.0)
    """Variation of the service time from batch to batch, such as 5 %."""
    neighbours: Literal["always", "busy"] = "always"
    """Times at which a neighbour slows an instance: always (as planners assume), or only while it executes."""
    warmup_s: SecondsOrZero = Field(alias="warmup", default=2.0)
    """Requests before this are served but not counted."""
    length_s: Seconds = Field(alias="length", default=30.0)
    """Time in which requests are counted."""
    plans: Annotated[tuple[PlanConfig, ...], Field(min_length=1)]
    """Plans compared; differences are taken against the first."""

    @model_validator(mode="after")
    def _names_fit(self) -> BatchedServingScenario:
        names = [service.name for service in self.services]
        unique(names, ("services",))
        unique([plan.name for plan in self.plans], ("plans",))
        for number, plan in enumerate(self.plans):
            for index, gpu in enumerate(plan.gpus):
                for place, instance in enumerate(gpu):
                    if instance.service not in names:
                        at = ("plans", number, "gpus", index, place, "service")
                        raise problem("is not a service of this scenario", expected=", ".join(names), at=at)
        return self


class GridConfig(Section):
    """A stretch of carbon intensity."""

    name: Name
    """Name in reports."""
    file: InputFile
    """A CSV file, one row a period in order of time."""
    column: Text = "g_per_kwh"
    """Column of the intensity in g/kWh."""


class VariantsScenario(Section):
    """Schemes that choose variants and partitions as the grid changes, judged on exhaustive profiles."""

    kind: Literal["variants"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """Name in reports."""
    seeds: Seeds = 20
    """Number of runs of each searching scheme."""
    profile: InputFolder | None = None
    """Folder with model.json and exhaustive_SERVICE.csv; the built-in simulated A100 profile when left out."""
    services: tuple[Name, ...] = ()
    """Services of the profile; all when left out."""
    carbon: Annotated[tuple[GridConfig, ...], Field(min_length=1)]
    """The grids."""
    schemes: tuple[Name, ...] = ("base", "co2opt", "blover", "clover", "learning", "oracle")
    """The schemes to compare."""
    lambda_ratios: Annotated[tuple[Ratio, ...], Field(min_length=1, alias="lambda")] = (0.1,)
    """Weights of carbon against accuracy."""
    loss_ratios: tuple[Ratio, ...] = Field(alias="accuracy_loss", default=())
    """Instead of weights: shares of the accuracy that may be lost, such as 0.8 %; then carbon alone counts."""
    gpus_alike: bool = True
    """Whether all GPUs have one configuration (as the paper's searches), or each its own (false; as it describes)."""
    base_g_per_kwh: GramsPerKwhAboveZero = Field(alias="base_intensity", default=250.0)
    """The intensity of the baseline."""
    pue: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)] = 1.5
    """Facility energy per IT energy."""
    replan_ratio: Ratio = Field(alias="replan", default=0.05)
    """Search again when the intensity has moved by this share ..."""
    replan_of: Literal["base", "previous"] = "base"
    """... of base_intensity (the published code), or of the intensity last planned for (the paper's words)."""
    trial_s: Seconds = Field(alias="trial", default=30.0)
    """Assumed duration of a trial."""
    period_s: Seconds = Field(alias="period", default=3600.0)
    """Length of a row of the carbon file."""


class MovedScenario(Section):
    """GREEN's evaluation, which ``python -m reproduce green`` runs now; read for one release to say so."""

    model_config = ConfigDict(extra="ignore")

    kind: Literal["training-figures"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """Name in reports."""


Scenario = (
    BatchedServingScenario | VariantsScenario | TrainingScenario | MovedScenario | OrderingScenario | ClocksScenario
)
_ADAPTER: TypeAdapter[Scenario] = TypeAdapter(Annotated[Scenario, Field(discriminator="kind")])


@cache
def scenario_schema() -> dict[str, Any]:
    """The JSON schema of a scenario file."""
    return with_units(_ADAPTER.json_schema(by_alias=True))


SCENARIO: Document[Scenario] = Document("a scenario file", "kind: batched-serving", _ADAPTER, scenario_schema)


def load_scenario(path: str | os.PathLike[str]) -> Scenario:
    """The scenario file at ``path``, validated.

    Raises:
        ConfigError: The first fault in it, with file, line and pointer.
    """
    return load_document(path, SCENARIO)
