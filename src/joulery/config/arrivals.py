"""Arrival processes and rates that change over time, as site and scenario files state them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import PerSecondOrZero, SecondsOrZero
from joulery.config.parsing.section import InputFile, Section, Text


class ConstantArrivals(Section):
    """A metronome with a random phase: what iGniter assumes."""

    kind: Literal["constant"]


class PoissonArrivals(Section):
    """Independent users."""

    kind: Literal["poisson"]


class GammaArrivals(Section):
    """Bursts: Gamma-distributed gaps."""

    kind: Literal["gamma"]
    cv: Annotated[float, Field(ge=0, le=50, allow_inf_nan=False)]
    """Coefficient of variation of the gaps: 0 a metronome, 1 Poisson, above 1 bursty."""


class RecordedArrivals(Section):
    """The arrival times of a log."""

    kind: Literal["recorded"]
    file: InputFile
    """A CSV file with a header, one row a request."""
    column: Text = "arrival_s"
    """Column of the times, seconds from the start of the log."""


ArrivalsConfig = Annotated[
    ConstantArrivals | PoissonArrivals | GammaArrivals | RecordedArrivals, Field(discriminator="kind")
]
PlannedArrivals = ArrivalsConfig
"""Arrivals one can plan for; of a log, rate and variation are fitted."""


class RateStep(Section):
    """A rate from a moment on."""

    from_s: SecondsOrZero = Field(alias="from")
    """Begin of the step, such as 30 s; the first begins at 0 s."""
    rate_rps: PerSecondOrZero = Field(alias="rate")
    """The rate, such as 40 /s."""


def increasing(steps: Sequence[RateStep]) -> None:
    """Raise unless the steps begin at 0 s and go forward.

    Raises:
        PydanticCustomError: The first step that does not.
    """
    begins = [step.from_s for step in steps]
    for index, begin in enumerate(begins):
        if (index == 0 and begin != 0) or (index and begin <= begins[index - 1]):
            raise problem("steps begin at 0 s and go forward", at=("rates", index, "from"))
