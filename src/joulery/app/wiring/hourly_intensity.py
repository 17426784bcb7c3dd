"""Hourly carbon intensity for simulated years, from the section that describes it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from joulery.app.wiring.carbon import carbon_source, file_source
from joulery.config.carbon import CarbonFile, CarbonTypical
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import ConfigError, DataError
from joulery.tabular import csv_header

_YEAR = (datetime(2023, 1, 1, tzinfo=UTC).timestamp(), datetime(2024, 1, 1, tzinfo=UTC).timestamp())


def hourly_series(config: CarbonFile | CarbonTypical, month: int | None = None) -> CarbonSeries:
    """The whole series of a file, or a year of typical days; with ``month``, the mean day of that month.

    Raises:
        DataError: The steps are not hours, an hour is missing, or the month does not occur.
        ConfigError: As :func:`~joulery.app.wiring.carbon.carbon_source`.
    """
    start_s, end_s = _YEAR
    if isinstance(config, CarbonFile):
        actual = file_source(config).actual
        start_s, end_s = actual.start_s, actual.end_s
    series = carbon_source(config).history(start_s, end_s)
    if not bool(np.all(np.diff(series.edges_s) == 3600.0)):
        raise DataError(f"{series.source}: the simulation needs hourly intensities", hint="average them to hours")
    return series if month is None else _mean_day(series, month)


def forecast_hours(config: CarbonFile, truth: CarbonSeries, month: int | None = None) -> FloatArray:
    """The forecast of a file for the hours of a series, g/kWh, float64[hours].

    Raises:
        ConfigError: The section names no forecast.
        DataError: The forecast does not cover the series.
    """
    if config.forecast is None:
        raise ConfigError("this region's carbon section names no forecast", pointer="carbon.forecast")
    column = config.forecast_column or _forecast_column(config.forecast)
    forecast_config = config.model_copy(update={"path": config.forecast, "column": column, "forecast": None})
    hours = file_source(forecast_config).actual
    if month is not None:
        return _mean_day(hours, month).g_per_kwh
    first = int(np.searchsorted(hours.edges_s, truth.edges_s[0]))
    found = hours.g_per_kwh[first : first + len(truth.g_per_kwh)]
    if len(found) < len(truth.g_per_kwh) or hours.edges_s[first] != truth.edges_s[0]:
        raise DataError("the forecast does not cover the hours of the intensity", file=str(config.forecast))
    return found


def _forecast_column(path: Path) -> str:
    """Name of the first column that contains ``forecast``; else of the last column."""
    names = csv_header(path)
    if not names:
        raise DataError("the file is empty", file=str(path))
    return next((name for name in names if "forecast" in name.lower()), names[-1])


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
