"""Carbon intensity of a simulated run: the true hourly values, and a scheduler's forecasts of them."""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import ConfigError, DataError

_HISTORY_DAYS = 28
_PERSISTENCE = 0.9


class Intensity:
    """Carbon intensity from simulated time 0 on, hourly steps, with its running integral: O(1) look-ups.

    Args:
        g_per_kwh: Intensity of each hour, float64[hours]; repeated when the run outlasts it.

    Raises:
        DataError: An hour is missing or negative.
    """

    __slots__ = ("_cumulative", "_total", "hours", "values")

    def __init__(self, g_per_kwh: FloatArray) -> None:
        values = np.asarray(g_per_kwh, np.float64)
        if not len(values) or not bool(np.all(np.isfinite(values) & (values >= 0))):
            at = int(np.argmax(~(np.isfinite(values) & (values >= 0)))) if len(values) else 0
            raise DataError(f"the intensity of hour {at} is missing or negative", hint="fill the series first")
        self.values: list[float] = values.tolist()
        self.hours = len(values)
        cumulative = np.concatenate(([0.0], np.cumsum(values) * 3600.0))
        self._cumulative: list[float] = cumulative.tolist()
        self._total = self._cumulative[-1]

    @classmethod
    def of(cls, series: CarbonSeries) -> Intensity:
        """The intensities of an hourly carbon series.

        Raises:
            DataError: A step is not an hour.
        """
        if not bool(np.all(np.diff(series.edges_s) == 3600.0)):
            raise DataError(f"{series.zone}: the simulation needs hourly intensities")
        return cls(series.g_per_kwh)

    def at(self, t_s: float) -> float:
        """Intensity at a time, g/kWh."""
        return self.values[int(t_s // 3600.0) % self.hours]

    def integral(self, t_s: float) -> float:
        """Integral from 0 to a time, g·s/kWh."""
        hour = int(t_s // 3600.0)
        lap, at = divmod(hour, self.hours)
        return float(lap * self._total + self._cumulative[at] + (t_s - hour * 3600.0) * self.values[at])

    def integrals(self, t_s: FloatArray) -> FloatArray:
        """Integral from 0 to each time, g·s/kWh, float64[n]."""
        edges_s = 3600.0 * np.arange(self.hours + 1)
        lap, rest_s = np.divmod(t_s, edges_s[-1])
        return np.asarray(lap * self._total + np.interp(rest_s, edges_s, self._cumulative), np.float64)

    def mean(self, t0_s: float, t1_s: float) -> float:
        """Mean over a window, g/kWh."""
        return (self.integral(t1_s) - self.integral(t0_s)) / (t1_s - t0_s)


def typical(truth: Intensity) -> Intensity:
    """A forecast from the past alone: each hour is the mean of the same hour over the last 28 days.

    The first day has no past: its forecast equals the truth.
    """
    values = np.array(truth.values)
    expected = values.copy()
    days = len(values) // 24
    for day in range(1, days + (len(values) % 24 > 0)):
        past = values[max(0, day - _HISTORY_DAYS) * 24 : day * 24].reshape(-1, 24).mean(axis=0)
        expected[day * 24 : (day + 1) * 24] = past[: len(values) - day * 24]
    return Intensity(expected)


def day_ahead(truth: Intensity, error_ratio: float, rng: np.random.Generator) -> Intensity:
    """Generate a day-ahead forecast with a given mean absolute relative error.

    The logarithm of forecast over truth is a first-order autoregression that starts afresh at every midnight, when the
    forecast is issued, so that errors grow with the lead and last for hours: measured on a year of forecasts for five
    regions, hour to hour they correlate by 0.85 to 0.93, and their spread grows from a quarter of its final one.

    Args:
        truth: The true intensity.
        error_ratio: Mean of ``|forecast / truth - 1|``; 0.08 for California, 0.27 for Great Britain.
        rng: Randomness.

    Raises:
        ConfigError: The error is negative, or 1 or more.
    """
    if not 0 <= error_ratio < 1:
        raise ConfigError("the error of a forecast is a share", got=f"{error_ratio:g}", expected="0 to 0.99")
    days = -(-truth.hours // 24)
    shocks = rng.standard_normal((days, 24))
    walk = np.zeros((days, 24))
    previous = np.zeros(days)
    for hour in range(24):
        previous = _PERSISTENCE * previous + shocks[:, hour]
        walk[:, hour] = previous
    flat = walk.ravel()[: truth.hours]
    low, high = 0.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.mean(np.abs(np.expm1(middle * flat)))) < error_ratio:
            low = middle
        else:
            high = middle
    return Intensity(np.array(truth.values) * np.exp(low * flat))


def forecast(g_per_kwh: FloatArray, truth: Intensity) -> Intensity:
    """Turn a recorded forecast for the hours of the truth into an intensity.

    Raises:
        DataError: It has another number of hours, or an hour is missing or negative.
    """
    if len(g_per_kwh) != truth.hours:
        raise DataError(
            f"the forecast has {len(g_per_kwh)} hours, the intensity {truth.hours}",
            hint="they must cover the same hours",
        )
    return Intensity(g_per_kwh)
