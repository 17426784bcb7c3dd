"""A source for demonstrations and tests: a stretch of carbon intensity, replayed in seconds.

It is a product feature; its ``source`` states that the values are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from joulery.adapters.carbon.series import Meaning, window
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality


@dataclass(frozen=True, slots=True)
class ReplayedCarbon:
    """A source that replays a stretch of a series: ``span_s`` seconds in ``duration_s`` seconds, from ``begins_s`` on.

    Real second ``begins_s + x`` has the intensity of ``from_s + (x mod duration_s) * span_s / duration_s``: the replay
    loops. Values before ``begins_s`` are NaN. The forecast is the series itself: one without error,
    as its ``source`` states.

    Attributes:
        series: The series to replay.
        from_s: Unix seconds in the series at which the replay begins.
        span_s: Length of the stretch.
        begins_s: Unix seconds, real time, at which the replay begins.
        duration_s: Real length of one lap.

    Raises:
        ConfigError: A length is not positive, or the series does not cover the stretch.
    """

    series: CarbonSeries
    from_s: float
    span_s: float
    begins_s: float
    duration_s: float

    def __post_init__(self) -> None:
        if not (self.span_s > 0 and self.duration_s > 0):
            raise ConfigError("a replay needs positive lengths", got=f"{self.span_s} s in {self.duration_s} s")
        if self.from_s < self.series.start_s or self.from_s + self.span_s > self.series.end_s:
            raise ConfigError(f"{self.series.source} does not cover the {self.span_s:g} s to replay")

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The replayed steps that meet ``[t0_s, t1_s)``; NaN before the replay begins."""
        return self._shown(t0_s, t1_s, "replayed", None)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The intensity that the replay will show, exactly."""
        return self._shown(t0_s, t1_s, "replayed, forecast without error", self.begins_s)

    def _shown(self, t0_s: float, t1_s: float, how: str, issued_at_s: float | None) -> CarbonSeries:
        stretch = window(self.series, self.from_s, self.from_s + self.span_s, step_s=self.span_s)
        source_s = np.clip(stretch.edges_s, self.from_s, self.from_s + self.span_s)
        edges_s = (source_s - self.from_s) * (self.duration_s / self.span_s)
        first_lap = max(0, int((t0_s - self.begins_s) // self.duration_s))
        laps = np.arange(first_lap, max(first_lap, int((t1_s - self.begins_s) // self.duration_s)) + 1)
        begins_s = self.begins_s + laps * self.duration_s
        every_s = np.append((begins_s[:, None] + edges_s[:-1]).ravel(), begins_s[-1] + self.duration_s)
        hours = self.span_s / 3600.0
        span = f"{hours:g} h" if hours == round(hours) else f"{self.span_s:g} s"
        source = f"{self.series.source}, {span} {how} in {self.duration_s:g} s"
        meaning = Meaning(self.series.zone, self.series.signal, self.series.scope, source, Quality.ASSUMED)
        values, flags = np.tile(stretch.g_per_kwh, len(laps)), np.tile(stretch.estimated, len(laps))
        shown = meaning.series(every_s, values, flags, issued_at_s)
        return window(shown, t0_s, t1_s, step_s=self.duration_s)
