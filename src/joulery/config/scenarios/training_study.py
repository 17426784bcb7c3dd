"""The section of a scenario file that compares schedulers of training jobs (``kind: training``)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from joulery.config.carbon import CarbonFile, CarbonTypical
from joulery.config.parsing.quantity import Ratio, Seconds, SecondsOrZero
from joulery.config.parsing.section import InputFile, Name, Section

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


class RecordedTrace(Section):
    """Jobs of a log."""

    kind: Literal["file"]
    file: InputFile
    """A CSV file with a header: submit_s and duration_s, one row a job in order of submission; num_gpus is used too."""


class TrainingCluster(Section):
    """The simulated cluster."""

    nodes: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Number of nodes, of two GPUs each."""
    restart_s: SecondsOrZero = Field(alias="restart", default=120.0)
    """Time a checkpoint and restart take."""
    sleep_after_s: SecondsOrZero = Field(alias="sleep_after", default=600.0)
    """How long a node idles before the schemes that suspend nodes do so."""
    wake_s: SecondsOrZero = Field(alias="wake", default=60.0)
    """How long a suspended node takes to come back."""


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
    cluster: TrainingCluster = TrainingCluster()
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
    carbon_forecast: CarbonForecastConfig = CarbonForecastConfig()
    """The schedulers' forecast of carbon intensity."""
    policies: Annotated[tuple[SchemeText, ...], Field(min_length=1)] = ("green", "tiresias", "gaia")
    """Schedulers to compare; differences are against the first."""
