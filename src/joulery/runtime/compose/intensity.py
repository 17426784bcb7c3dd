"""Hourly carbon intensity for simulated years, from the section that describes it."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from joulery.config.carbon import CarbonFile, CarbonTypical
from joulery.domain.carbon import CarbonSeries
from joulery.domain.errors import DataError
from joulery.runtime.compose.carbon import carbon_source, file_source

_YEAR = (datetime(2023, 1, 1, tzinfo=UTC).timestamp(), datetime(2024, 1, 1, tzinfo=UTC).timestamp())


def hourly_series(config: CarbonFile | CarbonTypical, month: int | None = None) -> CarbonSeries:
    """The whole series of a file, or a year of typical days; the mean day of one month where that is asked for.

    Raises:
        DataError: The steps are not hours, an hour is missing, or the month does not occur.
        ConfigError: As :func:`~joulery.runtime.compose.carbon.carbon_source`.
    """
    start_s, end_s = _YEAR
    if isinstance(config, CarbonFile):
        actual = file_source(config).actual
        start_s, end_s = actual.start_s, actual.end_s
    series = carbon_source(config).history(start_s, end_s)
    if not bool(np.all(np.diff(series.edges_s) == 3600.0)):
        raise DataError(f"{series.source}: the simulation needs hourly intensities", hint="average them to hours")
    return series if month is None else _mean_day(series, month)


def _mean_day(series: CarbonSeries, month: int) -> CarbonSeries:
    stamps = [datetime.fromtimestamp(edge_s, UTC) for edge_s in series.edges_s[:-1]]
    hours = np.array([stamp.hour if stamp.month == month else -1 for stamp in stamps])
    if not all(bool(np.any(hours == hour)) for hour in range(24)):
        raise DataError(f"{series.source} does not hold every hour of the day in month {month}")
    values = [float(np.nanmean(series.g_per_kwh[hours == hour])) for hour in range(24)]
    first_s = float(series.edges_s[int(np.argmax(hours == 0))])
    return CarbonSeries(
        series.zone,
        first_s + np.arange(25) * 3600.0,
        values,
        signal=series.signal,
        scope=series.scope,
        source=f"{series.source}, mean day of month {month}",
        estimated=np.ones(24, bool),
        quality=series.quality,
    )
