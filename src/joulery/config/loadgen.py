"""``load``: the requests that ``joulery up`` sends to its own gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from joulery.config.quantity import PerSecond, Seconds
from joulery.config.section import InputFile, InputFolder, Name, Section


class LoadBase(Section):
    """What every kind of load has."""

    service: Name | None = None
    """Which service to call; the first when left out."""
    inputs: InputFolder | None = None
    """A folder of inputs (photographs), sent in turn; the bundled ones when left out."""
    duration_s: Seconds = Field(alias="duration")
    """How long to send, such as 90 s."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of all randomness in the load."""


class PoissonLoad(LoadBase):
    """Independent arrivals: exponential gaps."""

    kind: Literal["poisson"]
    rate_rps: PerSecond = Field(alias="rate")
    """Mean arrival rate, such as 40 /s."""


class ConstantLoad(LoadBase):
    """Equal gaps."""

    kind: Literal["constant"]
    rate_rps: PerSecond = Field(alias="rate")
    """Arrival rate, such as 40 /s."""


class TraceLoad(LoadBase):
    """Recorded arrivals."""

    kind: Literal["trace"]
    path: InputFile
    """A CSV file with one column, arrival_s: seconds from the start, not decreasing."""


LoadConfig = Annotated[PoissonLoad | ConstantLoad | TraceLoad, Field(discriminator="kind")]
