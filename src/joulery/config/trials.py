"""``services[].policy.trials``: what a search by live trials may spend."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from joulery.config.parsing.problem import problem
from joulery.config.parsing.quantity import Ratio, Seconds
from joulery.config.parsing.section import Section


class TrialsConfig(Section):
    """Trials on the running service; see docs/how-to/serve-carbon-aware.md."""

    ALIASES: ClassVar = {"fewest": "min_requests"}

    count: Annotated[int, Field(ge=1, le=1000)] = 10
    """Trials a search may make (the paper's 10)."""
    clock_s: Seconds = Field(alias="clock", default=300.0)
    """Longest time of a search, such as 5 min (the paper's)."""
    longest_s: Seconds = Field(alias="longest", default=30.0)
    """Longest time of one trial; what is not known to keep the SLO by then counts as violating it."""
    min_requests: Annotated[int, Field(ge=20, le=1_000_000)] = 100
    """Least number of requests for a trial to count as keeping the SLO."""
    confidence_ratio: Ratio = Field(alias="confidence", default=0.95)
    """Confidence of the intervals around latency and joules by which trials are judged."""
    energy_tolerance_ratio: Ratio = Field(alias="energy_tolerance", default=0.05)
    """Relative uncertainty of the joules a request at which a trial may end early."""
    warm_up_s: Seconds = Field(alias="warm_up", default=0.5)
    """Requests that arrive sooner after a layout took over do not count."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the paper's annealer; the other search uses no randomness."""

    @model_validator(mode="after")
    def _confidence_is_inside(self) -> TrialsConfig:
        if not 0.5 <= self.confidence_ratio < 1:
            raise problem("a confidence lies between 50 % and 100 %", expected="such as 95 %", at=("confidence",))
        if self.longest_s > self.clock_s:
            raise problem("one trial may not take longer than the search", at=("longest",))
        return self
