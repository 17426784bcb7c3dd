"""Control of an NVIDIA GPU's SM clock: a ceiling through NVML's locked clocks (Volta and later, CAP_SYS_ADMIN).

``nvmlDeviceSetGpuLockedClocks(lowest, ceiling)`` bounds the clock from above and lets the driver lower it when the GPU
idles. NVML cannot report the locked clocks, so the device object stores its last setting, and reads the running clock
to verify that a ceiling is effective. The driver keeps the lock: without persistence mode it is lost when the last
program closes the GPU, and always with a reboot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from joulery.adapters.devices.change import Surface, change
from joulery.adapters.devices.nvidia_board import GRANT, HINT, NvidiaBoard, open_board
from joulery.adapters.privileges import may_administer
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.device import ClockSetting, DeviceCapability, DeviceChange, DeviceState, Knob

_TOLERANCE_MHZ = 15.0
"""One step of the clock: the running clock may read that much beside the ceiling."""
_LOOKS = 20
_PAUSE_S = 0.05
"""Interval of looks at the running clock until a new ceiling must have taken."""


class NvidiaClock:
    """The clock of one board. Implements :class:`joulery.domain.ports.Device`.

    Args:
        gpu: Its index or UUID.
        nvml: The module ``pynvml``, or one that behaves like it.
        sleep: Waits between two readings of the running clock.

    Raises:
        CapabilityError: No driver, or no clocks that could be set.
        ConfigError: No such board.
    """

    def __init__(self, gpu: int | str = 0, nvml: Any = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._board: NvidiaBoard = open_board(gpu, nvml)
        self.device = self._board.device
        self._sleep = sleep
        self._ceiling: float | None = None
        try:
            self._clocks = self._supported()
        except self._board.failures as error:
            self._board.close()
            raise self._board.trouble(error) from error

    def capability(self) -> DeviceCapability:
        """The clocks the board lists for its memory clock, and whether this process may set them."""
        board, may = self._board, may_administer()
        try:
            persistent = bool(board.nvml.nvmlDeviceGetPersistenceMode(board.handle))
        except board.failures as error:
            if getattr(error, "value", None) != board.nvml.NVML_ERROR_NOT_SUPPORTED:
                raise board.trouble(error) from error
            persistent = True
        forgets = "" if persistent else "; persistence mode is off, an idle GPU forgets (sudo nvidia-smi -pm 1)"
        return DeviceCapability(
            device=self.device,
            name=board.name,
            knob=Knob.CLOCK,
            settable=may,
            detail=("locked clocks" if may else f"locked clocks need CAP_SYS_ADMIN; {HINT}") + forgets,
            grant="" if may else GRANT,
            clocks_mhz=self._clocks,
            uuid=board.uuid,
        )

    def observe(self) -> DeviceState[ClockSetting]:
        """The latest setting by this object, and the current SM clock."""
        try:
            clock_mhz = self._running_mhz()
        except self._board.failures as error:
            raise self._board.trouble(error) from error
        return DeviceState(ClockSetting(self._ceiling), {"ceiling_mhz": self._ceiling}, clock_mhz)

    def apply(self, wanted: ClockSetting, /) -> DeviceChange[ClockSetting]:
        """Set the ceiling; a clock between two listed ones is rounded up to the higher one."""
        if wanted.boost is not None or wanted.governor:
            raise ConfigError("a GPU has a clock alone to set, no boost and no governor", got=str(wanted))
        return self._change(self._snapped(wanted.clock_mhz), str(wanted))

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[ClockSetting]:
        """Let the driver choose the clock again; NVML cannot report a lock that another process set earlier."""
        ceiling = (memento or {}).get("ceiling_mhz")
        return self._change(self._snapped(ceiling), "what it was", always=True)

    def close(self) -> None:
        """Shut down the connection to the driver; the setting remains."""
        self._board.close()

    def _change(self, new: float | None, asked: str, *, always: bool = False) -> DeviceChange[ClockSetting]:
        old = self._ceiling
        before = ClockSetting(old)
        if old == new and not always:
            return DeviceChange(before, before, 0.0, "it was set so already")
        surface = Surface(
            f"the clock of {self.device}", self._lock, self._held, self._board.failures, self._board.refused
        )
        took_s = change(surface, old, new, asked)
        return DeviceChange(before, ClockSetting(new), took_s)

    def _lock(self, ceiling: float | None) -> None:
        """Lock the clock at a ceiling, or unlock it when None; the setting is stored only after the call succeeds."""
        nvml, handle = self._board.nvml, self._board.handle
        if ceiling is None:
            nvml.nvmlDeviceResetGpuLockedClocks(handle)
        else:
            nvml.nvmlDeviceSetGpuLockedClocks(handle, round(self._clocks[0]), round(ceiling))
        self._ceiling = ceiling

    def _held(self) -> float | None:
        """The effective ceiling: the last setting, or the running clock where the SMs stay faster than it allows."""
        clock_mhz = self._running_mhz()
        if self._ceiling is None:
            return None
        for _ in range(_LOOKS):
            if clock_mhz <= self._ceiling + _TOLERANCE_MHZ:
                return self._ceiling
            self._sleep(_PAUSE_S)
            clock_mhz = self._running_mhz()
        return clock_mhz

    def _running_mhz(self) -> float:
        return float(self._board.nvml.nvmlDeviceGetClockInfo(self._board.handle, self._board.nvml.NVML_CLOCK_SM))

    def _supported(self) -> tuple[float, ...]:
        """Graphics clocks at the highest memory clock, ascending, MHz."""
        nvml, handle = self._board.nvml, self._board.handle
        memory = nvml.nvmlDeviceGetSupportedMemoryClocks(handle)
        clocks = nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, max(memory)) if memory else []
        if not clocks:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        return tuple(sorted(float(clock) for clock in clocks))

    def _snapped(self, clock_mhz: float | None) -> float | None:
        if clock_mhz is None:
            return None
        low, high = self._clocks[0], self._clocks[-1]
        if not low <= clock_mhz <= high or math.isnan(clock_mhz):
            raise ConfigError(
                f"{self.device} has no such clock", got=f"{clock_mhz:g} MHz", expected=f"{low:g} to {high:g} MHz"
            )
        return min(clock for clock in self._clocks if clock >= clock_mhz)
