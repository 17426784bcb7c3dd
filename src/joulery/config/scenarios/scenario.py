"""Scenario files: what ``joulery simulate`` runs. One section class a ``kind``, added to ``Scenario`` below."""

from __future__ import annotations

import os
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from joulery.config.arrivals import ArrivalsConfig, ConstantArrivals, RateStep, increasing
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import (
    GramsPerKwhAboveZero,
    PerSecond,
    Ratio,
    Seconds,
    SecondsOrZero,
)
from joulery.config.parsing.reading import Document, load_document, with_units
from joulery.config.parsing.section import InputFile, InputFolder, Name, Section, Text
from joulery.config.scenarios.clock_study import ClocksScenario
from joulery.config.scenarios.ordering_study import OrderingScenario
from joulery.config.scenarios.training_study import TrainingScenario
from joulery.config.services import unique
from joulery.domain.serving.service import Slo

Seeds = Annotated[int, Field(ge=1, le=10_000)]


class TailConfig(Section):
    """A bound on a high quantile of the end-to-end latency."""

    latency_s: Seconds = Field(alias="latency")
    """The bound, such as 10 ms."""
    quantile_ratio: Ratio = Field(alias="quantile", default=0.99)
    """Which quantile, such as 99 %."""

    @model_validator(mode="after")
    def _quantile_is_inside(self) -> TailConfig:
        if not 0 < self.quantile_ratio < 1:
            raise problem("a quantile lies between 0 and 1, both excluded", expected="such as 99 %", at=("quantile",))
        return self

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
    """How its requests follow one another; as the scenario says when left out."""

    @model_validator(mode="after")
    def _steps_increase(self) -> SimulatedService:
        increasing(self.rates)
        return self


class PlacedInstance(Section):
    """One instance of a plan."""

    service: Name
    """The service it belongs to."""
    share_ratio: Ratio = Field(alias="share")
    """Its share of the GPU, such as 37.5 %."""
    batch: Annotated[int, Field(ge=1, le=1024)]
    """Requests in a batch."""

    @model_validator(mode="after")
    def _has_a_share(self) -> PlacedInstance:
        if self.share_ratio <= 0:
            raise problem("an instance needs a share of the GPU", at=("share",))
        return self


class PlanConfig(Section):
    """A plan to judge: made by a policy, or written down."""

    name: Name
    """Name in the comparison."""
    policy: Name | None = None
    """The policy that makes it: best, igniter, ffd, ffd++, gslice, gpulets."""
    profile: Name | None = None
    """Profile the policy plans with; the scenario's gpu when left out."""
    accounting: Literal["half-slo", "full-slo"] = "half-slo"
    """Share of the SLO that policy best allows a batch."""
    margin_ratio: Ratio = Field(alias="margin", default=0.0)
    """What policy best adds to latencies and demands, such as 5 %."""
    noise_cv: Ratio = Field(alias="noise", default=0.0)
    """Variation of service times that policy best provides for."""
    gpus: tuple[tuple[PlacedInstance, ...], ...] = ()
    """The plan itself: the instances of each GPU."""

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> PlanConfig:
        if (self.policy is None) == (not self.gpus):
            raise problem("a plan names a policy or lists its gpus, one of the two")
        for index, gpu in enumerate(self.gpus):
            total = sum(instance.share_ratio for instance in gpu)
            if total > 1 + 1e-9:
                raise problem(f"gives away {100 * total:g} % of a GPU", at=("gpus", index))
        return self


class BatchedServingScenario(Section):
    """Plans for services that share GPUs, judged request by request."""

    kind: Literal["batched-serving"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """Name in reports."""
    seeds: Seeds = 5
    """How many times each plan is judged, each time on other requests; the same for all plans."""
    gpu: Name = "v100"
    """Profile the policies plan with."""
    truth: Name = "v100-refit"
    """Profile the simulated GPUs behave by."""
    services: Annotated[tuple[SimulatedService, ...], Field(min_length=1)]
    """What is served."""
    arrivals: ArrivalsConfig = ConstantArrivals(kind="constant")
    """How requests follow one another."""
    batching_delay_s: SecondsOrZero | None = Field(alias="batching_delay", default=None)
    """How long the oldest request waits for its batch to fill, 0 s is greedy; as each plan says when left out, which is
    for ever unless policy best planned for random requests."""
    noise_cv: Ratio = Field(alias="noise", default=0.0)
    """Variation of the service time from batch to batch, such as 5 %."""
    neighbours: Literal["always", "busy"] = "always"
    """When a neighbour slows an instance: always (as planners assume), or only while it executes."""
    warmup_s: SecondsOrZero = Field(alias="warmup", default=2.0)
    """Requests before this are served but not counted."""
    length_s: Seconds = Field(alias="length", default=30.0)
    """How long requests are counted."""
    plans: Annotated[tuple[PlanConfig, ...], Field(min_length=1)]
    """What is compared; differences are taken against the first."""

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
                        raise problem("is no service of this scenario", expected=", ".join(names), at=at)
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
    """How many times each searching scheme runs."""
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
