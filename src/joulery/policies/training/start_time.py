"""Finds the start at which a job of known length causes the least carbon, from a forecast.

The mean intensity of a window of fixed length is piecewise linear in its start, with bends where the window begins or
ends at a step of the forecast: the least is at one of those starts, or at either end of what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import DataError

_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class StartTime:
    """The best start of a job, beside starting now.

    Attributes:
        start_s: When to start, Unix seconds.
        duration_s: Length of the job.
        g_per_kwh: Mean intensity over the job if it starts then.
        now_g_per_kwh: The same if it starts now.
        worst_g_per_kwh: The same for the worst start that was judged.
        judged_until_s: Latest end that the forecast allows to judge.
    """

    start_s: float
    duration_s: float
    g_per_kwh: float
    now_g_per_kwh: float
    worst_g_per_kwh: float
    judged_until_s: float

    @property
    def saving_ratio(self) -> float:
        """Share of the grams of starting now that waiting saves; 0 where now is best, NaN without carbon now."""
        if self.now_g_per_kwh <= 0:
            return 0.0 if self.g_per_kwh >= self.now_g_per_kwh else math.nan
        return 1.0 - self.g_per_kwh / self.now_g_per_kwh


def best_start(series: CarbonSeries, now_s: float, duration_s: float, within_s: float) -> StartTime:
    """The start of least mean intensity; the earliest of equals.

    Args:
        series: The forecast.
        now_s: Earliest start, Unix seconds.
        duration_s: Length of the job.
        within_s: The job must end within this time after ``now_s``.

    Raises:
        DataError: The job does not fit, or the forecast does not cover a job that starts now.
    """
    if not 0 < duration_s <= within_s:
        raise DataError(f"a job of {duration_s:g} s does not end within {within_s:g} s")
    now_g_per_kwh = series.mean(now_s, now_s + duration_s)
    if math.isnan(now_g_per_kwh):
        raise DataError(f"{series.zone}: the forecast of {series.source} does not cover a job of that length")
    latest_s = now_s + within_s - duration_s
    edges = np.concatenate((series.edges_s, series.edges_s - duration_s, [now_s, latest_s]))
    starts = np.unique(edges[(edges >= now_s) & (edges <= latest_s)])
    means = np.array([series.mean(start_s, start_s + duration_s) for start_s in starts.tolist()])
    known = ~np.isnan(means)
    least = float(np.min(means[known]))
    at = int(np.argmax(known & (means <= least + _TIE * abs(least))))
    return StartTime(
        float(starts[at]),
        duration_s,
        float(means[at]),
        now_g_per_kwh,
        float(np.max(means[known])),
        float(starts[known][-1]) + duration_s,
    )
