"""The section of a scenario file that runs GREEN's whole evaluation (``kind: training-figures``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from joulery.config.parsing.quantity import Seconds
from joulery.config.parsing.section import Name, Section
from joulery.config.scenarios.training_study import RecordedTrace, SyntheticTrace, TrainingCluster, TrainingGrid

_Trace = Annotated[SyntheticTrace | RecordedTrace, Field(discriminator="kind")]


class BurstDay(Section):
    """The testbed's day: Figs. 8 to 11 and 13, Tables 2 and 4."""

    trace: _Trace
    """The jobs."""
    month: Annotated[int, Field(ge=1, le=12)] = 8
    """Its mean day is repeated."""
    window_s: Seconds = Field(alias="window", default=172_800.0)
    """Window whose mean tells green hours from dirty ones."""


class LongYear(Section):
    """The year: Fig. 12, Table 3 and the frontier."""

    trace: _Trace
    """The jobs."""
    frontier_days: Annotated[int, Field(ge=1, le=3660)] = 60
    """How many of its first days the frontier is drawn for."""


class TrainingFiguresScenario(Section):
    """GREEN's evaluation, and grams against completion time for every scheduler."""

    kind: Literal["training-figures"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """What it is called in reports."""
    seeds: Annotated[int, Field(ge=1, le=100)] = 3
    """How many seeds the day is run with."""
    cluster: TrainingCluster = TrainingCluster()
    """The cluster."""
    day: BurstDay
    """The burst of one day."""
    year: LongYear
    """The long run."""
    regions: Annotated[tuple[TrainingGrid, ...], Field(min_length=1)]
    """The grids; pictures over time are of the first."""
