"""An emulated clock that needs no privileges, for machines whose real clock cannot be set.

The device keeps the requested clock, in a file if one is named, so that leases and their watchdog can be tested across
processes. No work runs slower: :mod:`joulery.perf.power.clock_curves` gives time and power at the clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joulery.adapters.devices.change import Surface, change
from joulery.domain.errors import CapabilityError, ConfigError, JouleryError
from joulery.domain.gpu.device import ClockSetting, DeviceCapability, DeviceChange, DeviceState, Knob


class EmulatedClock:
    """A clock that only stores its setting. Implements :class:`joulery.domain.ports.Device`.

    Args:
        name: Name of the emulated device.
        clocks_mhz: Its clocks, MHz.
        device: Its name as a device.
        state: File that keeps the setting; kept in memory when None.

    Raises:
        ConfigError: There are no clocks, or one is not positive.
    """

    def __init__(
        self,
        name: str = "emulated",
        clocks_mhz: Sequence[float] = (1000.0,),
        device: str = "emulated:0",
        state: str | None = None,
    ) -> None:
        if not clocks_mhz or min(clocks_mhz) <= 0:
            raise ConfigError("an emulated device needs positive clocks", got=str(list(clocks_mhz)))
        self.device = device
        self._name = name
        self._clocks = tuple(sorted(float(clock) for clock in clocks_mhz))
        self._file = None if state is None else Path(state)
        self._ceiling: float | None = None

    def capability(self) -> DeviceCapability:
        """The clocks, which are always settable because no real device is set."""
        return DeviceCapability(
            self.device, self._name, Knob.CLOCK, True, "emulated", clocks_mhz=self._clocks, emulated=True
        )

    def observe(self) -> DeviceState[ClockSetting]:
        """The latest setting; the clock runs at exactly that."""
        ceiling = self._guarded()
        running = self._clocks[-1] if ceiling is None else ceiling
        return DeviceState(ClockSetting(ceiling), {"ceiling_mhz": ceiling}, running)

    def apply(self, wanted: ClockSetting, /) -> DeviceChange[ClockSetting]:
        """Store the setting; a clock between two listed ones is rounded up to the higher one."""
        asked = wanted.clock_mhz
        if asked is not None:
            above = [clock for clock in self._clocks if clock >= asked]
            if not above or asked < self._clocks[0]:
                raise ConfigError(
                    f"{self.device} has no such clock",
                    got=f"{asked:g} MHz",
                    expected=f"{self._clocks[0]:g} to {self._clocks[-1]:g} MHz",
                )
            asked = above[0]
        return self._change(asked, str(wanted))

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[ClockSetting]:
        """Restore the observed setting; full clock when None."""
        return self._change((memento or {}).get("ceiling_mhz"), "what it was")

    def _change(self, new: float | None, asked: str) -> DeviceChange[ClockSetting]:
        old = self._guarded()
        surface = Surface(self.device, self._set, self._get, (OSError,), _refused)
        took_s = change(surface, old, new, asked) if old != new else 0.0
        return DeviceChange(ClockSetting(old), ClockSetting(new), took_s, "emulated")

    def _set(self, ceiling: float | None) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            draft.write_text(json.dumps({"ceiling_mhz": ceiling}))
            draft.replace(self._file)
        self._ceiling = ceiling

    def _get(self) -> float | None:
        if self._file is None or not self._file.exists():
            return self._ceiling if self._file is None else None
        ceiling: float | None = json.loads(self._file.read_text())["ceiling_mhz"]
        return ceiling

    def _guarded(self) -> float | None:
        try:
            return self._get()
        except OSError as error:
            raise CapabilityError(f"{self.device} cannot be read: {error.strerror}", resource=self.device) from error


def _refused(error: Exception) -> JouleryError | None:
    if isinstance(error, PermissionError):
        return CapabilityError(f"the state of an emulated device may not be written: {error}", resource=error.filename)
    return None
