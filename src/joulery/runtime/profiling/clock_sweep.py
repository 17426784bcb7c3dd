"""Measure the latency and power of one model at each of several leased clocks of a real device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.gpu.device import ClockSetting, DeviceSpec
from joulery.domain.ports import Clock, Device, Meter
from joulery.perf.power.sensitivity import MeasuredCurve
from joulery.runtime.leasing.leases import LeaseHolder


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Durations and clocks of a sweep.

    Attributes:
        passes: Passes timed; their median is the latency.
        warm_up: Untimed passes before them.
        settle_s: Seconds to wait after a clock change.
        idle_s: Seconds over which the idle power is measured.
        clocks: Most clocks to try, evenly spaced from the lowest to the highest.
    """

    passes: int = 20
    warm_up: int = 3
    settle_s: float = 0.2
    idle_s: float = 1.0
    clocks: int = 12


class Wall:
    """A monotonic clock."""

    def now_s(self) -> float:
        """Monotonic seconds since an arbitrary moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        time.sleep(seconds)


class PowerWatch:
    """Measures the mean power of one device over an interval, from the readings of its meters.

    Args:
        meters: Meters, some of whose channels may be the device's.
        device: ``gpu:0``; ``cpu`` stands for every socket, or the machine where no socket is read.
    """

    def __init__(self, meters: Sequence[Meter], device: str) -> None:
        found = [
            (meter, index, channel)
            for meter in meters
            for index, channel in enumerate(meter.channels)
            if channel.device == device or (device == "cpu" and channel.device.startswith("cpu"))
        ]
        if not found and device == "cpu":
            found = [
                (meter, index, channel)
                for meter in meters
                for index, channel in enumerate(meter.channels)
                if channel.device == "machine"
            ]
        self._channels = found
        self._marks: list[tuple[float, list[float]]] = []

    @property
    def source(self) -> str:
        """Source and quality of the power: ``power modelled by cpu-model``."""
        named = dict.fromkeys(f"{channel.quality} by {channel.meter}" for _, _, channel in self._channels)
        return f"power {', '.join(named)}" if named else "no meter reads its power"

    def start(self, now_s: float) -> None:
        """Start a new interval."""
        self._marks = []
        self.mark(now_s)

    def mark(self, now_s: float) -> None:
        """Read the meters once."""
        read = {id(meter): meter.read() for meter, _, _ in self._channels}
        self._marks.append((now_s, [read[id(meter)][index] for meter, index, _ in self._channels]))

    def mean_w(self) -> float:
        """Mean watts since the start; NaN where no meter reads the device, or a reading is missing."""
        elapsed_s = self._marks[-1][0] - self._marks[0][0]
        if not self._channels or not elapsed_s > 0:
            return math.nan
        values = np.array([mark for _, mark in self._marks])
        watts = 0.0
        for column, (_, _, channel) in enumerate(self._channels):
            if channel.kind is ReadingKind.COUNTER:
                joules = values[-1, column] - values[0, column]
                watts += joules / elapsed_s if joules >= 0 else math.nan  # a counter that wrapped says nothing
            else:
                watts += float(np.mean(values[1:, column]))
        return float(watts)


def sweep(
    device: Device[ClockSetting],
    spec: DeviceSpec,
    holder: LeaseHolder,
    run: Callable[[], object],
    power: PowerWatch,
    plan: SweepPlan,
    clock: Clock,
) -> MeasuredCurve:
    """Time one pass at several of the device's clocks; the clock is reset when the holder closes.

    Args:
        device: The device whose clock is set.
        spec: Description with which the watchdog opens the device to reset it.
        holder: Leases the clock setting.
        run: One pass of the model, finished when it returns.
        power: Measures the device's power.
        plan: Durations and clocks.
        clock: Time source.

    Raises:
        CapabilityError: The clock may not be set here; the error names what grants it.
        ActuationError: A clock was refused.
        DataError: The device offers fewer than two clocks.
    """
    able = device.capability()
    if not able.settable:
        raise CapabilityError(
            f"the clock of {able.device} ({able.name}) may not be set: {able.detail}",
            resource=able.device,
            grant=able.grant or None,
        )
    clocks = _spread(able.clocks_mhz, plan.clocks)
    if len(clocks) < 2:
        raise DataError(f"{able.device} offers {len(clocks)} clocks: there is nothing to compare")
    rows = []
    for mhz in reversed(clocks):
        holder.set(device, spec, ClockSetting(mhz), f"measuring a model at {mhz:g} MHz")
        clock.sleep(plan.settle_s)
        rows.append((mhz, *_look(holder, run, power, plan, clock)))
    columns = np.array(sorted(rows)).T
    how = f"measured on {able.name}: median of {plan.passes} passes at each clock; {power.source}"
    return MeasuredCurve(able.device, columns[0], columns[1], columns[2], columns[3], how)


def _look(
    holder: LeaseHolder, run: Callable[[], object], power: PowerWatch, plan: SweepPlan, clock: Clock
) -> tuple[float, float, float]:
    """Median latency of a pass in s, mean power while the model runs and mean power while it is idle, in W."""
    for _ in range(plan.warm_up):
        run()
    times = []
    power.start(clock.now_s())
    for _ in range(plan.passes):
        began_s = clock.now_s()
        run()
        times.append(clock.now_s() - began_s)
        power.mark(clock.now_s())
        holder.renew()
    busy_w = power.mean_w()
    power.start(clock.now_s())
    clock.sleep(plan.idle_s)
    power.mark(clock.now_s())
    holder.renew()
    return statistics.median(times), busy_w, power.mean_w()


def _spread(clocks_mhz: Sequence[float], most: int) -> list[float]:
    """At most ``most`` clocks, evenly spaced by rank, including the lowest and the highest."""
    if len(clocks_mhz) <= most:
        return list(clocks_mhz)
    picks = np.unique(np.linspace(0, len(clocks_mhz) - 1, most).round().astype(int))
    return [clocks_mhz[index] for index in picks]
