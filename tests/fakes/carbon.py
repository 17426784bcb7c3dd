"""A scripted source of carbon intensity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from joulery.adapters.carbon.series import Meaning
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import JouleryError
from joulery.domain.quality import Quality


@dataclass(slots=True)
class Scripted:
    """A source that answers from a script: one entry a question, the last one for ever after.

    Attributes:
        answers: Intensities of equal steps over the interval asked for (g/kWh, NaN = gap), or an error to raise.
        zone: Zone of the answers.
        asked: The questions so far: (``history`` or ``forecast``, t0_s, t1_s).
    """

    answers: Sequence[Sequence[float] | JouleryError]
    zone: str = "scripted"
    asked: list[tuple[str, float, float]] = field(default_factory=list)

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The next answer.

        Raises:
            JouleryError: As the script says.
        """
        return self._next("history", t0_s, t1_s, None)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The next answer, issued at the beginning of the interval.

        Raises:
            JouleryError: As the script says.
        """
        return self._next("forecast", t0_s, t1_s, t0_s)

    def _next(self, what: str, t0_s: float, t1_s: float, issued_at_s: float | None) -> CarbonSeries:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append((what, t0_s, t1_s))
        if isinstance(answer, JouleryError):
            raise answer
        meaning = Meaning(self.zone, Signal.AVERAGE, Scope.LIFECYCLE, "scripted", Quality.ASSUMED)
        return meaning.series(np.linspace(t0_s, t1_s, len(answer) + 1), answer, None, issued_at_s)
