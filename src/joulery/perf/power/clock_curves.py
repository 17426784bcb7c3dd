"""Latency and power of a GPU against its clock: an emulator where clocks cannot be set (μ-Serve, ATC'24, section 3.1).

An operation takes the longest of its launch, its arithmetic (which scales with the clock) and its memory traffic (which
depends on the clock only when it is low). Board power follows clock × voltage²; the voltage is flat below a knee. The
V100 curves are fitted to measured data (Wang & Chu, ICPADS'18, at 877 MHz memory clock); their results are *modelled*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality
from joulery.domain.trace.operators import OperationCost


@dataclass(frozen=True, slots=True)
class ClockModel:
    """Emulator of one GPU type: latency and power against the clock.

    Attributes:
        name: GPU type.
        min_mhz, max_mhz: Range of the SM clock.
        knee_mhz: Clock up to which the voltage is flat.
        flat_voltage_ratio: That voltage, as a ratio of the voltage at ``max_mhz``.
        bandwidth_mhz, bandwidth_ratio: Achieved memory bandwidth against the clock, as a ratio of that at ``max_mhz``;
            interpolated linearly.
        peak_flops: Peak floating-point rate at ``max_mhz``, flop/s.
        peak_bandwidth: Peak memory bandwidth, bytes/s.
        compute_efficiency, memory_efficiency: Achieved share of the peaks.
        launch_s: Floor of an operation (launch on the host), independent of the clock.
        busy_w, busy_dynamic_w: Board power when busy: ``busy_w + busy_dynamic_w · g(f)``.
        idle_w, idle_dynamic_w: The same when idle.
        cap_w: Power limit of the board.
        memory_bytes: Memory of the board.
        source: Where the numbers come from.
        quality: How well the curves are known: modelled where they are fitted to measurements, else assumed.
    """

    name: str
    min_mhz: float
    max_mhz: float
    knee_mhz: float
    flat_voltage_ratio: float
    bandwidth_mhz: tuple[float, ...]
    bandwidth_ratio: tuple[float, ...]
    peak_flops: float
    peak_bandwidth: float
    compute_efficiency: float
    memory_efficiency: float
    launch_s: float
    busy_w: float
    busy_dynamic_w: float
    idle_w: float
    idle_dynamic_w: float
    cap_w: float
    memory_bytes: float
    source: str
    quality: Quality = Quality.MODELLED

    def voltage_ratio(self, clock_mhz: npt.ArrayLike) -> FloatArray:
        """Core voltage at each clock, as a ratio of that at the highest clock."""
        clock = self._checked(clock_mhz)
        slope = (1.0 - self.flat_voltage_ratio) / (self.max_mhz - self.knee_mhz)
        return np.asarray(self.flat_voltage_ratio + slope * np.maximum(clock - self.knee_mhz, 0.0), np.float64)

    def dynamic_ratio(self, clock_mhz: npt.ArrayLike) -> FloatArray:
        """``g(f) = (f / f_max) · v(f)²``: dynamic power at each clock, as a ratio of that at the highest clock."""
        return np.asarray(self._checked(clock_mhz) / self.max_mhz * self.voltage_ratio(clock_mhz) ** 2, np.float64)

    def bandwidth(self, clock_mhz: npt.ArrayLike) -> FloatArray:
        """Achieved memory bandwidth at each clock, bytes/s."""
        ratio = np.interp(self._checked(clock_mhz), self.bandwidth_mhz, self.bandwidth_ratio)
        return np.asarray(self.memory_efficiency * self.peak_bandwidth * ratio, np.float64)

    def busy_power_w(self, clock_mhz: npt.ArrayLike) -> FloatArray:
        """Board power at each clock while busy, W, at most the power limit."""
        return np.minimum(self.busy_w + self.busy_dynamic_w * self.dynamic_ratio(clock_mhz), self.cap_w)

    def idle_power_w(self, clock_mhz: npt.ArrayLike) -> FloatArray:
        """Board power at each clock while idle, W."""
        return np.asarray(self.idle_w + self.idle_dynamic_w * self.dynamic_ratio(clock_mhz), np.float64)

    def operation_s(self, operations: Sequence[OperationCost], clock_mhz: npt.ArrayLike) -> FloatArray:
        """Time of one call of each operation at each clock, s, shape [operations, clocks].

        The longest of launch, arithmetic and traffic: a launch-bound step does not depend on the clock.
        """
        clock = self._checked(clock_mhz)
        flops = np.array([operation.flops for operation in operations], np.float64)[:, None]
        traffic = np.array([operation.traffic_bytes for operation in operations], np.float64)[:, None]
        arithmetic_s = flops / (self.compute_efficiency * self.peak_flops * clock / self.max_mhz)
        return np.maximum(np.maximum(arithmetic_s, traffic / self.bandwidth(clock)), self.launch_s)

    def latency_s(self, operations: Sequence[OperationCost], clock_mhz: npt.ArrayLike) -> FloatArray:
        """Time of one pass over all operations at each clock, s, shape [clocks]; not yet calibrated to a model."""
        count = np.array([operation.count for operation in operations], np.float64)
        return np.asarray(count @ self.operation_s(operations, clock_mhz), np.float64)

    def _checked(self, clock_mhz: npt.ArrayLike) -> FloatArray:
        clock = np.atleast_1d(np.asarray(clock_mhz, np.float64))
        if not bool(np.all((clock > 0) & (clock <= self.max_mhz * (1 + 1e-9)))):
            raise ConfigError(
                f"{self.name} cannot run at this clock",
                got=f"{float(clock.min()):g} to {float(clock.max()):g} MHz",
                expected=f"above 0, at most {self.max_mhz:g} MHz",
            )
        return clock


V100 = ClockModel(
    name="V100",
    min_mhz=200.0,
    max_mhz=1380.0,
    knee_mhz=1004.0,
    flat_voltage_ratio=0.827,
    bandwidth_mhz=(200.0, 217.0, 500.0, 597.0, 703.0, 801.0, 944.0, 1086.0, 1380.0),
    bandwidth_ratio=(0.40, 0.411, 0.483, 0.509, 0.707, 0.841, 0.993, 1.0, 1.0),
    peak_flops=14.13e12,
    peak_bandwidth=900e9,
    compute_efficiency=0.60,
    memory_efficiency=0.80,
    launch_s=10e-6,
    busy_w=41.9,
    busy_dynamic_w=196.9,
    idle_w=26.0,
    idle_dynamic_w=27.0,
    cap_w=300.0,
    memory_bytes=16 * 2.0**30,
    source="clock and voltage: fit to Wang & Chu, ICPADS'18; busy power: the two points of μ-Serve Fig. 2 (214 W at "
    "1300 MHz, 120 W at 800 MHz); idle power: 53 W at the highest clock, 29 W at the lowest",
)
"""Emulated NVIDIA V100 (SM clock 200 to 1380 MHz, memory 877 MHz)."""


def sensitivity_score(latency_full_s: npt.ArrayLike, latency_half_s: npt.ArrayLike) -> FloatArray:
    """Relative latency growth per relative clock loss, from full to half the clock (μ-Serve, section 3.1).

    0 for launch-bound work, about 0.9 for memory-bound, 2 for compute-bound. Both deltas are relative: only so is the
    paper's "insensitive: below 1" meaningful.

    Args:
        latency_full_s: Latency at the highest clock, > 0.
        latency_half_s: Latency at half of it.
    """
    full = np.asarray(latency_full_s, np.float64)
    return np.asarray(2.0 * (np.asarray(latency_half_s, np.float64) / full - 1.0), np.float64)


def operation_scores(model: ClockModel, operations: Sequence[OperationCost]) -> FloatArray:
    """Sensitivity score of each operation on an emulated GPU."""
    times = model.operation_s(operations, [model.max_mhz, model.max_mhz / 2])
    return sensitivity_score(times[:, 0], times[:, 1])
