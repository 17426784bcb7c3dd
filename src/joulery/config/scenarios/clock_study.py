"""The section of a scenario file that compares clock governors (``kind: clocks``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from joulery.config.parsing.quantity import PerSecond, Seconds
from joulery.config.parsing.section import InputFile, Name, Section


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
    """What it is called in reports."""
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 2
    """How many seeds: each draws other requests."""
    devices: Annotated[int, Field(ge=1, le=15)] = 8
    """Emulated V100s."""
    duration_s: Seconds = Field(alias="duration", default=1800.0)
    """Length of the workload."""
    arrivals: InputFile | None = None
    """A Parquet log with t_s, its pattern brought to each rate; Poisson arrivals when left out."""
    plan: InputFile | None = None
    """Who shares a GPU: a plan for these models that joulery plan --out wrote; balanced by latency when left out."""
    loads: Annotated[tuple[ClockLoad, ...], Field(min_length=1)]
    """The loads to compare under."""
    policies: Annotated[tuple[Name, ...], Field(min_length=1)] = (
        "fixed",
        "best-static",
        "miad",
        "miad-literal",
        "predictive",
    )
    """What is compared; savings are taken against the first."""
