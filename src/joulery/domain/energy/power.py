"""Readings of a meter over time, and busy times of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.energy.channel import Channel
from joulery.domain.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

LONGEST_PERIOD_S = 366 * 86400.0
"""Longer sampling periods are rejected."""


@dataclass(frozen=True, slots=True, eq=False)
class PowerTrace:
    """The readings of one channel over time.

    Attributes:
        channel: What the readings mean.
        t_ns: Unix nanoseconds of each reading, strictly increasing, int64[n].
        values: Joules (``COUNTER``, unwrapped or wrapping at ``channel.wrap_j``) or watts, float64[n]; NaN = missing.
        period_s: Nominal sampling period; a value is held at most two periods past the last reading.

    Raises:
        DataError: Lengths differ, stamps do not increase, or a reading is negative or infinite.
    """

    channel: Channel
    t_ns: IntArray
    values: FloatArray
    period_s: float

    def __init__(self, channel: Channel, t_ns: npt.ArrayLike, values: npt.ArrayLike, period_s: float) -> None:
        stamps: npt.NDArray[Any] = readonly(t_ns, np.int64)
        readings: npt.NDArray[Any] = readonly(values, np.float64)
        if len(stamps) != len(readings):
            raise DataError(f"{channel.device}: {len(stamps)} stamps but {len(readings)} readings")
        if len(stamps) > 1 and bool(np.any(np.diff(stamps) <= 0)):
            at = int(np.argmax(np.diff(stamps) <= 0)) + 1
            raise DataError(
                f"{channel.device}: stamps must increase, reading {at} at {int(stamps[at])} ns does not",
                hint="sort the readings by time and keep the last of equal stamps",
            )
        if bool(np.any(np.isinf(readings) | (readings < 0))):
            at = int(np.argmax(np.isinf(readings) | (readings < 0)))
            raise DataError(f"{channel.device}: reading {at} is {float(readings[at])}, expected a finite value >= 0")
        if not 0 < period_s < LONGEST_PERIOD_S:
            raise DataError(f"{channel.device}: sampling period is {period_s} s, expected > 0 and less than a year")
        object.__setattr__(self, "channel", channel)
        object.__setattr__(self, "t_ns", stamps)
        object.__setattr__(self, "values", readings)
        object.__setattr__(self, "period_s", float(period_s))

    def __len__(self) -> int:
        return len(self.t_ns)


@dataclass(frozen=True, slots=True, eq=False)
class BusyTimes:
    """Busy time of one device (a CPU socket, a GPU) and the run's share of it, interval by interval.

    Attributes:
        edges_ns: Unix nanoseconds, strictly increasing, int64[n+1]. One share holds for a whole interval. Kernel ticks
            are 10 ms, so intervals of at least 100 ms are advisable.
        app_s: Busy seconds of the run in each interval, float64[n]; NaN = not known.
        all_s: Busy seconds of all processes, the run included, float64[n]; NaN = not known. Where clocks disagree and
            ``app_s`` is larger, ``app_s`` counts for both.
        cpus: Logical CPUs of the device; needed by ``ShareRule.CAPACITY`` only.

    Raises:
        DataError: Shapes disagree, edges do not increase, or a time is negative or infinite.
    """

    edges_ns: IntArray
    app_s: FloatArray
    all_s: FloatArray
    cpus: int

    def __init__(self, edges_ns: npt.ArrayLike, app_s: npt.ArrayLike, all_s: npt.ArrayLike, cpus: int = 0) -> None:
        edges, app, total = readonly(edges_ns, np.int64), readonly(app_s, np.float64), readonly(all_s, np.float64)
        if not len(app) == len(total) == len(edges) - 1:
            raise DataError(f"{len(edges)} edges, {len(app)} and {len(total)} busy times do not fit")
        if bool(np.any(np.diff(edges) <= 0)):
            raise DataError("the edges of busy times must increase")
        for name, times in (("app_s", app), ("all_s", total)):
            if bool(np.any(np.isinf(times) | (times < 0))):
                raise DataError(f"{name} holds {times[np.isinf(times) | (times < 0)][0]}, expected seconds >= 0")
        for name, value in (("edges_ns", edges), ("app_s", app), ("all_s", total), ("cpus", cpus)):
            object.__setattr__(self, name, value)

    @property
    def app_ratio(self) -> float:
        """The run's share of all busy time, over the intervals where both are known; 0 when nothing was busy."""
        known = ~(np.isnan(self.app_s) | np.isnan(self.all_s))
        total_s = float(np.sum(np.maximum(self.all_s, self.app_s)[known]))
        return float(np.sum(self.app_s[known])) / total_s if total_s > 0 else 0.0
