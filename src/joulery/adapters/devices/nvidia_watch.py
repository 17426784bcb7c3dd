"""Power and clock of an NVIDIA board during profiling, and its constants."""

from __future__ import annotations

import time
from typing import Any

from joulery.adapters.devices.nvidia_board import NvidiaBoard, open_board

_PCIE_SHARE = 0.635
"""Share of a PCIe link's speed that transfers reach: iGniter measured 10 of 15.75 GB/s on a V100's PCIe 3.0 x16."""
_PCIE_GT_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""Transfers a second and lane of each generation, 10^9 (PCI-SIG)."""


class NvidiaBoardWatch:
    """Reader of one board's mean power and clock between two moments.

    Args:
        gpu: Its index or UUID.
        nvml: The module ``pynvml``, or one that behaves like it.

    Raises:
        CapabilityError: No driver, or it does not answer.
        ConfigError: No such board.
    """

    def __init__(self, gpu: int | str = 0, nvml: Any = None) -> None:
        self._board: NvidiaBoard = open_board(gpu, nvml)
        self._powers: list[float] = []
        self._clocks: list[float] = []
        self._energy_j: float | None = None
        self._since_s = 0.0

    @property
    def device(self) -> str:
        """``gpu:0`` ..."""
        return self._board.device

    @property
    def name(self) -> str:
        """The vendor's name of the board."""
        return self._board.name

    def limits(self) -> tuple[float, float]:
        """The enforced power limit, W, and the highest SM clock, MHz.

        Raises:
            CapabilityError: The board does not report them.
        """
        nvml, handle = self._board.nvml, self._board.handle
        try:
            cap_w = float(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1e3
            return cap_w, float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        except self._board.failures as error:
            raise self._board.trouble(error) from error

    def pcie_bytes_per_ms(self) -> float:
        """Assumed speed of transfers to the board, bytes/ms: a fixed share of its link's speed.

        Raises:
            CapabilityError: The board does not report its link.
        """
        nvml, handle = self._board.nvml, self._board.handle
        try:
            generation = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
            width = int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
        except self._board.failures as error:
            raise self._board.trouble(error) from error
        coding = 0.8 if generation < 3 else 128 / 130
        per_s = _PCIE_GT_S.get(generation, _PCIE_GT_S[3]) * 1e9 / 8 * coding * width
        return per_s * _PCIE_SHARE / 1e3

    def begin(self) -> None:
        """Begin a measurement: discard earlier readings."""
        self._powers, self._clocks, self._since_s = [], [], time.monotonic()
        self._energy_j = self._counter_j()

    def look(self) -> None:
        """Read the clock and the power once.

        Raises:
            CapabilityError: The board cannot be read.
        """
        nvml, handle = self._board.nvml, self._board.handle
        try:
            self._clocks.append(float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
            self._powers.append(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        except self._board.failures as error:
            raise self._board.trouble(error) from error

    def end(self) -> tuple[float, float]:
        """Mean power, W, and mean SM clock, MHz, since :meth:`begin`.

        The power is from the energy counter where the board has one that advanced, else the mean of the readings.
        """
        self.look()
        now_j, elapsed_s = self._counter_j(), time.monotonic() - self._since_s
        power_w = sum(self._powers) / len(self._powers)
        if now_j is not None and self._energy_j is not None and now_j > self._energy_j and elapsed_s > 0:
            power_w = (now_j - self._energy_j) / elapsed_s
        return power_w, sum(self._clocks) / len(self._clocks)

    def close(self) -> None:
        """Shut down the connection to the driver."""
        self._board.close()

    def _counter_j(self) -> float | None:
        nvml = self._board.nvml
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(self._board.handle)) / 1e3
        except self._board.failures as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise self._board.trouble(error) from error
