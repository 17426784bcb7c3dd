"""Carbon intensity for the scheduler: now, over the last hours, and the mean that separates green from dirty hours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.ports import CarbonSource

_ASK_S = 300.0
"""Least time between two requests to a source."""


@dataclass(frozen=True, slots=True)
class GridIntensity:
    """Carbon intensity of the grid at one moment.

    Attributes:
        g_per_kwh: Intensity now; NaN when unknown.
        mean_g_per_kwh: Mean of the window; NaN when unknown.
        basis: What the mean is of: ``forecast``, ``history`` or ``nothing``.
        ahead_g_per_kwh: Intensity expected in each hour from now on; None without a forecast.
        expected_g_per_kwh: Forecast intensity of now; NaN without one.
    """

    g_per_kwh: float
    mean_g_per_kwh: float
    basis: str
    ahead_g_per_kwh: FloatArray | None = None
    expected_g_per_kwh: float = math.nan

    @property
    def known(self) -> bool:
        """Whether the hour is known to be green or dirty."""
        return not (math.isnan(self.g_per_kwh) or math.isnan(self.mean_g_per_kwh))


class IntensityTracker:
    """A cached source of intensity; values that the source does not have stay unknown.

    Args:
        source: The source; None where the site has none.
        window_s: Length of the window.
        note: Receives each failure, once a reason.
    """

    def __init__(self, source: CarbonSource | None, window_s: float, note: Callable[[str], None]) -> None:
        self._source, self._window_s, self._note = source, window_s, note
        self._history: CarbonSeries | None = None
        self._grid = GridIntensity(math.nan, math.nan, "nothing")
        self._forecast: CarbonSeries | None = None
        self._asked_s = -math.inf
        self._last_message = ""

    def history(self, now_s: float) -> CarbonSeries | None:
        """Intensity up to now; None where it is unknown."""
        self._refresh(now_s)
        return self._history

    def grid(self, now_s: float) -> GridIntensity:
        """The grid now; unknown where the newest value does not reach now."""
        self._refresh(now_s)
        if self._history is not None:
            here = float(self._history.at(now_s)[0])
            expected = math.nan if self._forecast is None else float(self._forecast.at(now_s)[0])
            return replace(self._grid, g_per_kwh=here, expected_g_per_kwh=expected)
        return self._grid

    def _refresh(self, now_s: float) -> None:
        if self._source is None or 0 <= now_s - self._asked_s < min(_ASK_S, self._window_s / 10):
            return
        self._asked_s = now_s
        hour_s = math.floor(now_s / 3600.0) * 3600.0
        try:
            self._history = self._source.history(hour_s - self._window_s, now_s + min(_ASK_S, 3600.0))
            self._last_message = ""
        except (DataError, CapabilityError) as error:
            self._history = None
            self._grid = GridIntensity(math.nan, math.nan, "nothing")
            self._note_once(f"no intensity, so no grams and no shifting: {error}")
            return
        self._grid = self._mean(now_s)

    def _mean(self, now_s: float) -> GridIntensity:
        assert self._source is not None
        assert self._history is not None
        self._forecast = None
        try:
            ahead = self._source.forecast(now_s, now_s + self._window_s)
            mean = ahead.mean(now_s, now_s + self._window_s)
            if not math.isnan(mean):
                self._forecast = ahead
                return GridIntensity(math.nan, mean, "forecast", _hours(ahead, now_s, self._window_s))
        except (DataError, CapabilityError) as error:
            self._note_once(
                f"no forecast, so the mean of the last {self._window_s / 3600:g} h decides what is green: {error}"
            )
        return GridIntensity(math.nan, self._history.mean(now_s - self._window_s, now_s), "history")

    def _note_once(self, text: str) -> None:
        if text != self._last_message:
            self._last_message = text
            self._note(text)


def _hours(ahead: CarbonSeries, now_s: float, window_s: float) -> FloatArray:
    """Mean intensity of each hour from now on, up to the first hour that the forecast does not cover."""
    hours = np.array([ahead.mean(now_s + at, now_s + at + 3600.0) for at in np.arange(0.0, window_s - 3599.0, 3600.0)])
    unknown = np.flatnonzero(np.isnan(hours))
    return hours[: unknown[0]] if len(unknown) else hours
