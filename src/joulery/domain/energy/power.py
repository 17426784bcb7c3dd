"""What a meter saw: the channels it offers and the trace it left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import DataError

__all__ = ["Channel", "PowerTrace", "ReadingKind"]

LONGEST_PERIOD_S = 366 * 86400.0
"""A sampling period that is surely wrong."""


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
