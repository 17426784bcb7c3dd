"""Control of an NVIDIA GPU's power limit (``nvidia-smi -pl``): NVML's power management limit, CAP_SYS_ADMIN.

The driver holds the average draw of the board at the limit by lowering its clocks. It refuses limits outside its
constraints and reports the current limit, so that every change is verified. The driver keeps the limit: without
persistence mode it returns to the default when the last program closes the GPU, and always with a reboot. All calls
count in mW.

Not yet run on hardware: tested against a stand-in with the real module's constants and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from joulery.adapters.devices.change import Surface, change
from joulery.adapters.devices.nvidia_board import GRANT, HINT, NvidiaBoard, open_board
from joulery.adapters.privileges import may_administer
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.device import DeviceCapability, DeviceChange, DeviceState, Knob, PowerSetting


class NvidiaPower:
    """The power limit of one board. Implements :class:`joulery.domain.ports.Device`.

    Args:
        gpu: Its index or UUID.
        nvml: The module ``pynvml``, or one that behaves like it.

    Raises:
        CapabilityError: No driver, or a board without power management.
        ConfigError: No such board.
    """

    def __init__(self, gpu: int | str = 0, nvml: Any = None) -> None:
        self._board: NvidiaBoard = open_board(gpu, nvml)
        self.device = self._board.device
        nvml, handle = self._board.nvml, self._board.handle
        try:
            low, high = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            self._range_mw = (int(low), int(high))
            self._default_mw = int(nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
        except self._board.failures as error:
            trouble = self._board.trouble(error)
            self._board.close()
            raise trouble from error

    def capability(self) -> DeviceCapability:
        """The limits that the board accepts, its default, and whether this process may set one."""
        board, may = self._board, may_administer()
        try:
            enforced_mw = int(board.nvml.nvmlDeviceGetEnforcedPowerLimit(board.handle))
            persistent = bool(board.nvml.nvmlDeviceGetPersistenceMode(board.handle))
        except board.failures as error:
            if getattr(error, "value", None) != board.nvml.NVML_ERROR_NOT_SUPPORTED:
                raise board.trouble(error) from error
            enforced_mw, persistent = self._limit_mw(), True
        details = ["power limit" if may else f"power limit needs CAP_SYS_ADMIN; {HINT}"]
        if enforced_mw < self._limit_mw():
            details.append(f"another limit of the machine holds it at {enforced_mw / 1e3:g} W")
        if not persistent:
            details.append("persistence mode is off, an idle GPU forgets (sudo nvidia-smi -pm 1)")
        return DeviceCapability(
            device=self.device,
            name=board.name,
            knob=Knob.POWER,
            settable=may,
            detail="; ".join(details),
            grant="" if may else GRANT,
            uuid=board.uuid,
            limits_w=(self._range_mw[0] / 1e3, self._range_mw[1] / 1e3),
            default_w=self._default_mw / 1e3,
        )

    def observe(self) -> DeviceState[PowerSetting]:
        """The limit that the driver reports."""
        limit_mw = self._looked()
        return DeviceState(self._setting(limit_mw), {"limit_mw": limit_mw})

    def apply(self, wanted: PowerSetting, /) -> DeviceChange[PowerSetting]:
        """Set the limit, rounded to a whole watt; None restores the factory's limit."""
        limit_w = wanted.limit_w
        if limit_w is None:
            return self._change(self._default_mw, str(wanted))
        low, high = self._range_mw
        limit_mw = 1000 * round(limit_w) if low <= 1000 * round(limit_w) <= high else round(1e3 * limit_w)
        if not low <= limit_mw <= high:
            raise ConfigError(
                f"{self.device} takes no such power limit",
                got=f"{limit_w:g} W",
                expected=f"{low / 1e3:g} to {high / 1e3:g} W",
            )
        return self._change(limit_mw, str(wanted))

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[PowerSetting]:
        """Restore the observed limit; the factory's limit when None."""
        limit_mw = (memento or {}).get("limit_mw")
        return self._change(self._default_mw if limit_mw is None else int(limit_mw), "what it was")

    def close(self) -> None:
        """Shut down the connection to the driver; the setting remains."""
        self._board.close()

    def _change(self, new_mw: int, asked: str) -> DeviceChange[PowerSetting]:
        old_mw = self._looked()
        before = self._setting(old_mw)
        if old_mw == new_mw:
            return DeviceChange(before, before, 0.0, "it was set so already")
        surface = Surface(
            f"the power limit of {self.device}", self._set, self._limit_mw, self._board.failures, self._board.refused
        )
        took_s = change(surface, old_mw, new_mw, asked)
        return DeviceChange(before, self._setting(new_mw), took_s)

    def _set(self, limit_mw: int) -> None:
        self._board.nvml.nvmlDeviceSetPowerManagementLimit(self._board.handle, limit_mw)

    def _limit_mw(self) -> int:
        return int(self._board.nvml.nvmlDeviceGetPowerManagementLimit(self._board.handle))

    def _looked(self) -> int:
        try:
            return self._limit_mw()
        except self._board.failures as error:
            raise self._board.trouble(error) from error

    def _setting(self, limit_mw: int) -> PowerSetting:
        return PowerSetting(None if limit_mw == self._default_mw else limit_mw / 1e3)
