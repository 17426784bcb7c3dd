"""``load``: the requests that ``joulery up`` sends to its own gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import PerSecond, Ratio, Seconds
from joulery.config.parsing.section import InputFile, InputFolder, Name, Section


class LoadBase(Section):
    """Keys of every kind of load."""

    service: Name | None = None
    """Service to call; the first, or the one it stands in, when left out."""
    inputs: InputFolder | None = None
    """A folder of photographs, sent in turn; generated inputs of the model's shape when left out."""
    duration_s: Seconds = Field(alias="duration")
    """Duration of the load, such as 90 s."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of all randomness in the load."""


class _Rated(LoadBase):
    rate_rps: PerSecond | None = Field(alias="rate", default=None)
    """Mean arrival rate, such as 40 /s."""
    utilisation_ratio: Ratio | None = Field(alias="utilisation", default=None)
    """Instead of a rate: the share of what the most accurate variant can serve here, as profiled, such as 45 %."""

    @model_validator(mode="after")
    def _one_of_both(self) -> _Rated:
        if (self.rate_rps is None) is (self.utilisation_ratio is None):
            raise problem("a load needs either rate or utilisation", expected="such as rate: 40 /s")
        if self.utilisation_ratio is not None and not 0 < self.utilisation_ratio <= 0.9:
            raise problem("must be above 0 and at most 90 %", at=("utilisation",))
        return self


class PoissonLoad(_Rated):
    """Independent arrivals: exponential gaps."""

    kind: Literal["poisson"]


class ConstantLoad(_Rated):
    """Equal gaps."""

    kind: Literal["constant"]


class TraceLoad(LoadBase):
    """Recorded arrivals."""

    kind: Literal["trace"]
    path: InputFile
    """A CSV file with a column arrival_s: seconds from the start, not decreasing."""


class LLMLoad(Section):
    """Prompts sent to a language model: independent arrivals, exponential gaps."""

    kind: Literal["poisson"]
    rate_rps: PerSecond = Field(alias="rate")
    """Mean arrival rate, such as 2 /s."""
    duration_s: Seconds = Field(alias="duration")
    """Duration of the load, such as 90 s."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)]
    """Tokens that each request asks for at most."""
    prompts: InputFile | None = None
    """A text file, a prompt a line, sent in turn; a dozen short ones of joulery's own when left out."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of the gaps."""


LoadConfig = Annotated[PoissonLoad | ConstantLoad | TraceLoad, Field(discriminator="kind")]
