"""The section of a scenario file that compares orders of serving (``kind: ordering``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from joulery.config.parsing.quantity import Ratio, Seconds, SecondsOrZero
from joulery.config.parsing.section import InputFile, Name, Section


class OrderingScenario(Section):
    """Orders in which one server answers requests of unknown length, on the same requests."""

    kind: Literal["ordering"]
    scenario: Literal[1]
    """Version of this format: 1."""
    name: Name = "scenario"
    """What it is called in reports."""
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 6
    """How many seeds: each replays other requests at other instants."""
    requests: InputFile | None = None
    """A Parquet log with output_tokens, pred_cls5 and perhaps pred_cls3; made-up requests when left out."""
    count: Annotated[int, Field(ge=200, le=10_000_000)] = 20_000
    """Requests a seed."""
    load_ratio: Ratio = Field(alias="load", default=0.9)
    """Offered load of the server, such as 90 %."""
    cv: Annotated[float, Field(ge=0, le=50, allow_inf_nan=False)] = 1.0
    """Variability of the gaps between arrivals: 1 is Poisson."""
    constant_s: SecondsOrZero = Field(alias="constant", default=0.1)
    """What every answer takes, such as 100 ms."""
    per_token_s: Seconds = Field(alias="per_token", default=0.02)
    """What every token takes, such as 20 ms."""
    policies: Annotated[tuple[Name, ...], Field(min_length=1)] = (
        "fcfs",
        "ssjf",
        "ssjf-delayed",
        "oracle",
    )
    """What is compared; differences are taken against the first."""
