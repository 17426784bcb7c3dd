"""``plan``: how services are provisioned, and the GPUs one may rent (``fleet.gpus``)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from joulery.config.arrivals import PlannedArrivals, PoissonArrivals
from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import (
    Bytes,
    BytesPerSecond,
    GramsPerHourAboveZero,
    GramsPerKwhAboveZero,
    PerSecond,
    QuantileRatio,
    Ratio,
    Seconds,
    UsdPerHour,
    Watts,
)
from joulery.config.parsing.section import DataFile, InputFile, Name, Section, Text
from joulery.domain.serving.service import DEFAULT_QUANTILE

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A number from 0."""


class GpuConfig(Section):
    """A kind of GPU one may rent."""

    name: Name
    """Its name in plans."""
    usd_per_hour: UsdPerHour | None = Field(alias="price", default=None)
    """Price of one, such as 3.06 USD/h; that of fleet.prices when left out."""
    available: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Number of GPUs available; as many as wanted when left out."""
    profile: Name | None = None
    """Its coefficients in the catalog, such as v100; the one of its name when left out."""
    cpu_cores: Annotated[int, Field(ge=1, le=4096)] = 1
    """CPU cores of this machine that stand for one of them when joulery up runs a plan here."""
    profile_file: InputFile | None = None
    """A profile of your own instead: what joulery profile --from wrote."""
    measurements: DataFile | None = None
    """For joint: measured batches on MIG slices, a CSV file with the columns model, slice, batch, n_processes_mps and
    throughput_items_per_s_per_process or latency_s; idle and busy state the power. ${NAME:-default} in the path stands
    for an environment variable."""
    memory_bytes: Bytes | None = Field(alias="memory", default=None)
    """Memory of the board; the catalog's when left out."""
    per_host: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of GPUs of a host, for plan.failure_domain host."""
    idle_w: Watts | None = Field(alias="idle", default=None)
    """For columns and joint's measurements: power of an idle GPU, such as 37.6 W; columns takes it from its services'
    costs when left out."""
    busy_w: Watts | None = Field(alias="busy", default=None)
    """For joint's measurements: power of the board while all of it executes at the highest clock, such as 400 W."""
    host_w: Watts = Field(alias="host", default=0.0)
    """For joint and language: watts of the host for each powered GPU, such as 60 W; they move the optimum."""
    speed_ratio: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False, alias="speed")] = 1.0
    """For preset columns: its speed relative to the GPU on which the services' costs were measured."""
    clocks: Annotated[int, Field(ge=1, le=16)] = 1
    """For columns and joint: how many clocks to choose among, from the highest down to where the voltage stops
    falling."""
    truth: Name | None = None
    """For preset joint: coefficients of the catalog that the simulation judging a plan behaves by; those of its
    profile when left out."""

    @property
    def price_usd_per_hour(self) -> float:
        """Dollars an hour; 0 where only fleet.prices, which a plan reads, could say it."""
        return self.usd_per_hour or 0.0


class PipelinesSection(Section):
    """Models divided into stages and shards, placed by their sensitivity to the clock (presets muserve and best)."""

    scores: InputFile | None = None
    """Clock scores of your models: the database that joulery profile MODEL --clocks --scores FILE keeps."""
    devices_per_model: Annotated[int, Field(ge=1, le=32)] = 4
    """Most GPUs one replica of a model may use (the paper's CT)."""
    threshold: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 0.5
    """Distance from a cluster's mean score at which the next one begins (Alg. 1)."""
    link: BytesPerSecond = 12e9
    """Bandwidth between two GPUs, such as 12 GB/s."""
    usable_memory_ratio: Ratio = Field(alias="usable_memory", default=0.8125)
    """Share of a GPU's memory that models may take; the rest is the runtime's (13 of 16 GiB)."""
    requests: Annotated[int, Field(ge=100, le=10_000_000)] = 10_000
    """Length of the workload that judges a plan."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of that workload's arrivals."""
    beam: Annotated[int, Field(ge=0, le=16)] = 0
    """Placements a beam search keeps after the greedy one; 0 for no beam (the paper's is 3)."""


class TokenSloConfig(Section):
    """A bound on a quantile of a latency of tokens."""

    latency_s: Seconds = Field(alias="latency")
    """The bound, such as 50 ms."""
    quantile_ratio: QuantileRatio = Field(alias="quantile", default=DEFAULT_QUANTILE)
    """Quantile that stays below it, such as 99 %."""


class LanguageSloConfig(Section):
    """SLOs of a language model's answers; at least one of the three."""

    ttft: TokenSloConfig | None = None
    """Time to first token."""
    itl: TokenSloConfig | None = None
    """Time between two tokens of an answer."""
    answer_s: Seconds | None = Field(alias="answer", default=None)
    """Mean time of a whole answer, such as 20 s."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> LanguageSloConfig:
        if self.ttft is None and self.itl is None and self.answer_s is None:
            raise problem("an SLO of a language model needs a bound", expected="ttft, itl or answer")
        return self


class ServedModelConfig(Section):
    """A model that may answer."""

    model: Text
    """Its id, such as Qwen/Qwen3-32B: one of the measured runs, or of an architecture and size that joulery knows; any
    other with parameters_billions."""
    parameters_billions: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] | None = None
    """Its parameters, 10^9, where neither the runs nor joulery know it, such as 33; its figures are transferred."""
    active_parameters_billions: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] | None = None
    """Those of them at work on one token; all of them when left out."""
    layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Its blocks; as many as models of its size have when left out."""
    kv_bytes: Bytes | None = Field(alias="kv_cache_per_token", default=None)
    """KV cache of one token at two bytes a value, such as 256 kB; as models of its size have when left out."""
    precision: Name = "bfloat16"
    """Precision of its weights: bfloat16, fp8, fp4, int4 and others."""
    quality_ratio: Ratio | None = Field(alias="quality", default=None)
    """Your own quality score of it, such as 84 %; none is assumed."""
    gpus: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1)] = (1, 2, 4, 8)
    """GPUs that one replica may have."""

    @model_validator(mode="after")
    def _size_is_whole(self) -> ServedModelConfig:
        total, active = self.parameters_billions, self.active_parameters_billions
        beside = {"active_parameters_billions": active, "layers": self.layers, "kv_cache_per_token": self.kv_bytes}
        if total is None:
            alone = next((key for key, value in beside.items() if value is not None), None)
            if alone is not None:
                raise problem("needs parameters_billions beside it", at=(alone,))
        elif active is not None and active > total:
            raise problem("is more than all of its parameters", at=("active_parameters_billions",))
        if self.kv_bytes is not None and not 1 <= self.kv_bytes <= 1e9:
            raise problem("is not the KV cache of a token", expected="1 B to 1 GB", at=("kv_cache_per_token",))
        return self


class LanguageServiceConfig(Section):
    """Requests to provide for."""

    name: Name
    """Its name in plans."""
    rate_rps: PerSecond = Field(alias="rate")
    """Requests a second at the peak, such as 20 /s."""
    input_tokens: Annotated[float, Field(ge=1, le=10_000_000)] = 512
    """Tokens of a prompt, mean."""
    output_tokens: Annotated[float, Field(ge=1, le=1_000_000)] = 400
    """Tokens of an answer, mean."""
    slo: LanguageSloConfig
    """Service-level objectives."""
    minimum_quality_ratio: Ratio = Field(alias="minimum_quality", default=0.0)
    """Quality that every variant in the plan has, such as 80 %."""
    task: Name | None = None
    """Kind of requests in the measured runs, such as lm-arena-chat; that of the runs where they have one only."""
    variants: Annotated[tuple[ServedModelConfig, ...], Field(min_length=1)]
    """Models that may answer."""

    @model_validator(mode="after")
    def _quality_is_known(self) -> LanguageServiceConfig:
        names = [(variant.model, variant.precision) for variant in self.variants]
        for index, variant in enumerate(self.variants):
            if names[index] in names[:index]:
                raise problem("is listed twice; each model and precision once", at=("variants", index))
            if self.minimum_quality_ratio > 0 and variant.quality_ratio is None:
                raise problem(
                    "a minimum quality needs the quality of every variant",
                    expected="your own score, such as quality: 84 %",
                    at=("variants", index, "quality"),
                )
        return self


class LanguagePlanSection(Section):
    """Language models to provide for with the fleet's GPU types."""

    objective: Literal["carbon", "energy", "cost"] = "cost"
    """Quantity to minimise: grams, joules (watts at the stated rates) or dollars an hour."""
    services: Annotated[tuple[LanguageServiceConfig, ...], Field(min_length=1)]
    """Requests to provide for."""
    runs: tuple[InputFile, ...] = ()
    """Measured runs, as joulery profile --from reads them; a published table of three models when left out."""
    max_num_seqs: Annotated[int, Field(ge=1, le=8192)] = 1024
    """Most requests a replica may run at once."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> LanguagePlanSection:
        names = [service.name for service in self.services]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise problem("is listed twice; names must differ", at=("services", index, "name"))
        return self


class ObjectiveWeights(Section):
    """Weights of the objective, in dollars an hour: the sum of what each is worth is minimised."""

    energy: NotNegative = 0.0
    """Dollars a kilowatt-hour."""
    carbon: NotNegative = 0.0
    """Dollars a kilogram of CO2."""
    cost: NotNegative = 0.0
    """Dollars a dollar of rent: 1, or 0 to leave the rent out."""

    @model_validator(mode="after")
    def _check_weights(self) -> ObjectiveWeights:
        if not (self.energy or self.carbon or self.cost):
            raise problem(
                "weighs nothing, so every plan would be as good as any other",
                expected="energy (USD/kWh), carbon (USD/kg) or cost (1 for rent) above 0",
                hint="such as weights: {cost: 1, energy: 0.2, carbon: 0.1}",
            )
        return self


class PlanSection(Section):
    """Constraints and choices of plans."""

    ALIASES: ClassVar = {"lasts": "duration"}
    preset: Literal["best", "igniter", "muserve", "columns", "clover", "joint", "language"] = "best"
    """best: the cheapest fleet found, with a proof (with pipelines, the plan of least power); igniter and muserve: the
    papers' algorithms; columns: which variants on which MIG slices of how many GPUs, with a bound; clover: the paper's
    search for the same; joint: variant, share, batch, clock, GPU type and count at once, for the least watts, grams or
    dollars, with a bound; language: language models alone, as without services. When left out: best, or joint where the
    site states an objective (other than cost), a cap of power or carbon, host watts, lists of variants or measurements
    of slices."""
    objective: Literal["energy", "carbon", "cost", "weights"] = "energy"
    """For joint: what to minimise: watts, grams, dollars, or the dollars that weights state they are worth; the last of
    these where it is left out and weights is stated."""
    weights: ObjectiveWeights | None = None
    """For joint with objective weights: what energy, carbon and rent are worth."""
    g_per_kwh: GramsPerKwhAboveZero | None = Field(alias="intensity", default=None)
    """For joint: carbon intensity to plan for, such as 300 g/kWh; needed for grams, none is assumed."""
    pue: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)] = 1.0
    """For joint: watts of the site for each watt of GPUs and hosts."""
    power_cap_w: Watts | None = Field(alias="power_cap", default=None)
    """For joint: watts of all GPUs and hosts, at most."""
    carbon_cap_g_per_hour: GramsPerHourAboveZero | None = Field(alias="carbon_cap", default=None)
    """For joint: grams an hour of all GPUs and hosts at the intensity, at most."""
    moves: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """For joint: instances that a plan which follows a running one may start, stop or change; any number if left
    out."""
    judge: bool = True
    """For joint: simulate the plan, and plan again with larger margins for services that miss their SLO."""
    colocate: bool = False
    """For columns and joulery up: whether services may share a GPU, a slice each; each has GPUs of its own when not."""
    arrivals: PlannedArrivals = Field(default_factory=lambda: PoissonArrivals(kind="poisson"))
    """Arrivals where a service states none: constant, poisson, or gamma with a cv."""
    accounting: Literal["half-slo", "full-slo"] = "half-slo"
    """For evenly spaced requests, what a batch may take: half the SLO (the paper), or all that its wait leaves."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 4
    """Largest number of equal replicas of a service; more where it cannot be served otherwise, unless this is 1."""
    lasts_s: Seconds | None = Field(alias="duration", default=None)
    """End of series of rates, such as 24 h; the last step lasts as long as the one before it when left out."""
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 32
    """Largest batch; the published profiles reach 32."""
    balancer: Literal["turns", "random"] = "turns"
    """Distribution of requests over the replicas of a service: in strict turns, or each at random."""
    failure_domain: Literal["none", "gpu", "host"] = "none"
    """Unit that no two replicas of a service may share: none, a GPU, or a host (of fleet.gpus[].per_host GPUs)."""
    margin_ratio: Ratio | None = Field(alias="margin", default=None)
    """Safety margin on latencies and demands, such as 5 %; when left out, the errors that the profiles report."""
    pipelines: PipelinesSection | None = None
    """Plan models as pipelines with a clock for each GPU rather than shares of GPUs."""
    language: LanguagePlanSection | None = None
    """Plan language models: which model, on how many GPUs of which type, with how many requests at once."""
    noise_cv: Ratio = Field(alias="noise", default=0.05)
    """Variation of a batch's time from batch to batch that full-slo has to absorb."""

    @model_validator(mode="after")
    def _weights_are_stated(self) -> PlanSection:
        if self.weights is not None and "objective" not in self.model_fields_set:
            object.__setattr__(self, "objective", "weights")  # the section is frozen
            self.model_fields_set.add("objective")
        if self.objective == "weights" and self.weights is None:
            raise problem(
                "needs plan.weights beside it: what energy, carbon and rent are worth",
                expected="such as weights: {cost: 1, energy: 0.2, carbon: 0.1}",
                hint="add weights, or make objective energy, carbon or cost",
                at=("objective",),
            )
        return self
