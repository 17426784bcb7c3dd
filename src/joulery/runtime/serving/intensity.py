"""Carbon intensity of a running site, from the source that the site file names."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from joulery.config.carbon import (
    CarbonConfig,
    CarbonElectricityMaps,
    CarbonFile,
    CarbonUk,
    CarbonWattTime,
    ReplayConfig,
)
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import DataError, JouleryError
from joulery.domain.ports import CarbonSource
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import CarbonBasis, CarbonLabel

AHEAD_S = 600.0
ASK_AGAIN_S = 60.0
LOOK_BACK_S = 3600.0


class LiveIntensity:
    """Carbon intensity by time.

    Args:
        config: The carbon section; None for none.
        open_source: Makes the source of a section, beginning now.
        now_s: Unix seconds.

    Attributes:
        source: The source; None without a section.
        series: What is known; None until asked, or without a section.
        trouble: Why the last question failed; empty where it did not.
    """

    def __init__(
        self,
        config: CarbonConfig | None,
        open_source: Callable[[CarbonConfig], CarbonSource],
        now_s: Callable[[], float],
    ) -> None:
        self.source = None if config is None else open_source(config)
        self.series: CarbonSeries | None = None
        self.trouble = ""
        self._config = config
        self._now_s = now_s
        self._begins_s = now_s()
        self._asked_s = -math.inf

    @property
    def remote(self) -> bool:
        """True for a source over a network, which knows the past and the present only."""
        return isinstance(self._config, CarbonUk | CarbonElectricityMaps | CarbonWattTime)

    @property
    def _replay(self) -> ReplayConfig | None:
        return getattr(self._config, "replay", None)

    def at(self, t_s: float) -> float:
        """g/kWh at a time; NaN while unknown."""
        if self.series is None:
            return math.nan
        return float(self.series.at(t_s)[0])

    def grid_s(self, t_s: float) -> float:
        """The grid's own clock: another time where intensities are played back."""
        replay = self._replay
        if replay is None:
            return t_s
        day_s = datetime.fromisoformat(replay.day).replace(tzinfo=UTC).timestamp()
        return day_s + (t_s - self._begins_s) % replay.duration_s * replay.span_s / replay.duration_s

    async def refresh(self) -> None:
        """Ask the source where that is due. A failed question changes ``trouble`` alone."""
        now_s = self._now_s()
        if self.source is None or not self._due(now_s):
            return
        self._asked_s = now_s
        try:
            if self.remote:
                known = await asyncio.to_thread(self.source.history, now_s - LOOK_BACK_S, now_s + 1.0)
                self.series = held(known, now_s + 2 * ASK_AGAIN_S)
            else:
                self.series = self.source.history(self._begins_s, now_s + AHEAD_S)
            self.trouble = ""
        except JouleryError as error:
            self.trouble = f"carbon intensity: {error}"

    def _due(self, now_s: float) -> bool:
        if self.remote or self.trouble:
            return now_s - self._asked_s >= ASK_AGAIN_S
        return self.series is None or self.series.end_s < now_s + AHEAD_S / 2

    def label(self) -> CarbonLabel | None:
        """Zone, source and kind of the intensities; None without a section.

        Raises:
            DataError: The source has not been asked, or had no answer.
        """
        if self.source is None:
            return None
        series, replay = self.series, self._replay
        if series is None:
            raise DataError(self.trouble or "the source of carbon intensity was not asked yet")
        basis = CarbonBasis.ASSUMED if series.quality is Quality.ASSUMED else CarbonBasis.LIVE
        if replay is not None and isinstance(self._config, CarbonFile):
            basis = CarbonBasis.REPLAYED
        speed = 1.0 if replay is None else replay.span_s / replay.duration_s
        return CarbonLabel(series.zone, series.source, basis, series.signal, series.scope, speed)


def held(series: CarbonSeries, until_s: float) -> CarbonSeries:
    """A series that holds its last value until the next question; what is added is flagged as estimated."""
    if series.end_s >= until_s:
        return series
    return CarbonSeries(
        series.zone,
        np.append(series.edges_s, until_s),
        np.append(series.g_per_kwh, series.g_per_kwh[-1]),
        signal=series.signal,
        scope=series.scope,
        source=series.source,
        issued_at_s=series.issued_at_s,
        estimated=np.append(series.estimated, True),
        quality=series.quality,
    )
