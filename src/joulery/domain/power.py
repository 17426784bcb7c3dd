"""What a meter saw: the channels it offers and the trace it left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality


class ReadingKind(StrEnum):
    """What one reading of a channel means (specs: right-continuous, piecewise-constant power)."""

    COUNTER = "counter"
    """Cumulative joules; the difference belongs to the interval that ended at the later reading."""
    POWER = "power"
    """Instantaneous watts; held until the next reading."""
    AVERAGE = "average"
    """Watts averaged over the ``averaging_s`` before the reading."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One stream of readings of one meter.

    Attributes:
        device: ``cpu:0`` (socket), ``gpu:0`` (board), ``machine``.
        component: ``package``, ``dram``, ``board`` ...; components of one device never overlap.
        kind: What a reading means.
        meter: Name of the meter (``rapl``, ``nvml``, ``cpu-model``, ``replay``, ``fake``).
        quality: Measured, modelled or assumed.
        averaging_s: Window of an ``AVERAGE`` reading; 0 otherwise.
        wrap_j: Value at which a counter starts again from 0; 0 when it does not.
        max_w: Power the device cannot exceed, which tells a counter's wrap from a reset; NaN when unknown.
        idle_w: Power the model or the user gives for the idle device; NaN when unknown.
        band_ratio: Half-width of the uncertainty of a modelled channel, as a ratio of the reading; 0 when not stated.
    """

    device: str
    component: str
    kind: ReadingKind
    meter: str
    quality: Quality
    averaging_s: float = 0.0
    wrap_j: float = 0.0
    idle_w: float = float("nan")
    band_ratio: float = 0.0
    max_w: float = float("nan")


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
        if not (period_s > 0 and np.isfinite(period_s)):
            raise DataError(f"{channel.device}: sampling period is {period_s} s, expected > 0")
        object.__setattr__(self, "channel", channel)
        object.__setattr__(self, "t_ns", stamps)
        object.__setattr__(self, "values", readings)
        object.__setattr__(self, "period_s", float(period_s))

    def __len__(self) -> int:
        return len(self.t_ns)
