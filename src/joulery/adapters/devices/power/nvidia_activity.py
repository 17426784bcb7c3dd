"""Counter of the energy and busy cycles of an NVIDIA GPU.

Busy cycles are the SM clock times the utilisation that NVML reports (share of the time in which a kernel ran), summed
over the time between two readings. They approximate the work of a program that does not report its progress: cycles
follow the clock that a power limit lowers, so they overstate the slowdown of a program bound by memory.

Not yet run on hardware: tested against a stand-in with the real module's constants and errors.
"""

from __future__ import annotations

import math
from typing import Any

from joulery.adapters.devices.nvidia_board import NvidiaBoard, open_board


class NvidiaActivity:
    """Counter of the energy and busy cycles of one board.

    Args:
        gpu: Its index or UUID.
        nvml: The module ``pynvml``, or one that behaves like it.

    Raises:
        CapabilityError: No driver.
        ConfigError: No such board.
    """

    def __init__(self, gpu: int | str = 0, nvml: Any = None) -> None:
        self._board: NvidiaBoard = open_board(gpu, nvml)
        self._counts = True
        self._at_s = math.nan
        self._energy_j = self._cycles = 0.0
        self._rates = (math.nan, math.nan)

    def read(self, now_s: float) -> tuple[float, float]:
        """Energy, J, and busy cycles, in millions, since a fixed moment; NaN while the board does not answer.

        Args:
            now_s: Seconds of a monotonic clock.
        """
        board = self._board
        nvml, handle = board.nvml, board.handle
        try:
            power_w = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            clock_mhz = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            busy_ratio = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            counter_j = self._counter_j()
        except board.failures:
            self._at_s = math.nan
            return math.nan, math.nan
        rates = (power_w, clock_mhz * busy_ratio)
        if not math.isnan(self._at_s):
            elapsed_s = now_s - self._at_s
            self._energy_j += elapsed_s * (self._rates[0] + rates[0]) / 2
            self._cycles += elapsed_s * (self._rates[1] + rates[1]) / 2
        self._at_s, self._rates = now_s, rates
        return (self._energy_j if math.isnan(counter_j) else counter_j), self._cycles

    def close(self) -> None:
        """Shut down the connection to the driver."""
        self._board.close()

    def _counter_j(self) -> float:
        """The board's energy counter; NaN on boards without one (before Volta)."""
        nvml = self._board.nvml
        if not self._counts:
            return math.nan
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(self._board.handle)) / 1e3
        except self._board.failures as error:
            if getattr(error, "value", None) != nvml.NVML_ERROR_NOT_SUPPORTED:
                raise
            self._counts = False
            return math.nan
