"""``plan``: how services are provisioned, and the GPUs one may rent (``fleet.gpus``)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from joulery.config.arrivals import PlannedArrivals, PoissonArrivals
from joulery.config.parsing.quantity import (
    Bytes,
    BytesPerSecond,
    GramsPerKwhAboveZero,
    Ratio,
    Seconds,
    UsdPerHour,
    Watts,
)
from joulery.config.parsing.section import InputFile, Name, Section

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A number from 0."""


class GpuConfig(Section):
    """A kind of GPU one may rent."""

    name: Name
    """Its name in plans."""
    usd_per_hour: UsdPerHour = Field(alias="price")
    """Price of one, such as 3.06 USD/h."""
    available: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """How many there are; as many as wanted when left out."""
    profile: Name | None = None
    """Its coefficients in the catalog, such as v100; the one of its name when left out."""
    cpu_cores: Annotated[int, Field(ge=1, le=4096)] = 1
    """CPU cores of this machine that stand for one of them when joulery up runs a plan here."""
    profile_file: InputFile | None = None
    """A profile of your own instead: what joulery profile --from wrote."""
    memory_bytes: Bytes | None = Field(alias="memory", default=None)
    """Memory of the board, for plans of pipelines; the catalog's when left out."""
    idle_w: Watts | None = Field(alias="idle", default=None)
    """For preset columns: power of an idle GPU, such as 37.6 W; from its services' costs when left out."""
    speed_ratio: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False, alias="speed")] = 1.0
    """For preset columns: its speed relative to the GPU on which the services' costs were measured."""
    clocks: Annotated[int, Field(ge=1, le=16)] = 1
    """For columns and joint: how many clocks to choose among, from the highest down to where the voltage stops
    falling."""
    host_w: Watts = Field(alias="host", default=0.0)
    """For preset joint: watts of the host for each powered GPU, such as 60 W; they move the optimum."""
    truth: Name | None = None
    """For preset joint: coefficients of the catalog that the simulation judging a plan behaves by; those of its
    profile when left out."""


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


class ObjectiveWeights(Section):
    """What a plan minimises, in dollars an hour: the sum of what each is worth."""

    energy: NotNegative = 0.0
    """Dollars a kilowatt-hour."""
    carbon: NotNegative = 0.0
    """Dollars a kilogram of CO2."""
    cost: NotNegative = 0.0
    """Dollars a dollar of rent: 1, or 0 to leave the rent out."""


class PlanSection(Section):
    """What plans have to keep and what they may choose."""

    ALIASES: ClassVar = {"lasts": "duration"}
    preset: Literal["best", "igniter", "muserve", "columns", "clover", "joint"] = "best"
    """best: the cheapest fleet found, with a proof (with pipelines, the plan of least power); igniter and muserve: the
    papers' algorithms; columns: which variants on which MIG slices of how many GPUs, with a bound; clover: the paper's
    search for the same; joint: variant, share, batch, clock, GPU type and count at once, for the least watts, grams or
    dollars, with a bound."""
    objective: Literal["energy", "carbon", "cost", "weights"] = "energy"
    """For joint: what to minimise: watts, grams, dollars, or the dollars that weights says they are worth."""
    weights: ObjectiveWeights | None = None
    """For joint with objective weights: what energy, carbon and rent are worth."""
    g_per_kwh: GramsPerKwhAboveZero | None = Field(alias="intensity", default=None)
    """For joint: carbon intensity to plan for, such as 300 g/kWh; needed for grams, none is assumed."""
    pue: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)] = 1.0
    """For joint: watts of the site for each watt of GPUs and hosts."""
    power_cap_w: Watts | None = Field(alias="power_cap", default=None)
    """For joint: watts of all GPUs and hosts, at most."""
    judge: bool = True
    """For joint: simulate the plan, and plan again with larger margins for services that miss their SLO."""
    colocate: bool = False
    """For columns and joulery up: whether services may share a GPU, a slice each; each has GPUs of its own when not."""
    arrivals: PlannedArrivals = PoissonArrivals(kind="poisson")
    """How requests arrive where a service does not say: constant, poisson, or gamma with a cv."""
    accounting: Literal["half-slo", "full-slo"] = "half-slo"
    """For evenly spaced requests, what a batch may take: half the SLO (the paper), or all that its wait leaves."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 4
    """Largest number of equal replicas of a service; more where it cannot be served otherwise, unless this is 1."""
    lasts_s: Seconds | None = Field(alias="duration", default=None)
    """When series of rates end, such as 24 h; the last step lasts as long as the one before it when left out."""
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 32
    """Largest batch; the published profiles reach 32."""
    margin_ratio: Ratio | None = Field(alias="margin", default=None)
    """Safety margin on latencies and demands, such as 5 %; when left out, the errors that the profiles report."""
    pipelines: PipelinesSection | None = None
    """Plan models as pipelines with a clock for each GPU rather than shares of GPUs."""
    noise_cv: Ratio = Field(alias="noise", default=0.05)
    """Variation of a batch's time from batch to batch that full-slo has to absorb."""
