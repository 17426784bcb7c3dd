"""Control of Intel CPUs' power limit through the kernel's powercap files (``/sys/class/powercap/intel-rapl:N``).

Each package has a constraint named ``long_term``: the average power that the processor keeps over its time window by
lowering its clocks (kernel documentation: power/powercap/powercap.rst). The limit holds while the zone is ``enabled``.
The kernel rounds limits to the unit of the register, an eighth of a watt on most processors. AMD processors count
energy in the same files and have no constraints. Firmware may lock the limits: the kernel then refuses root, too.

Not yet run on hardware: tested against a generated tree of files.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from joulery.adapters.devices.change import Surface, change
from joulery.adapters.devices.cpufreq import TextFiles
from joulery.domain.errors import CapabilityError, ConfigError, JouleryError
from joulery.domain.gpu.device import DeviceCapability, DeviceChange, DeviceState, Knob, PowerSetting

ROOT = "/sys/class/powercap"
GRANT = "sudo -E joulery ..."
_ZONE = re.compile(r"intel-rapl:\d+")
_ROUNDING_UW = 250_000
"""Largest rounding of a limit by the kernel."""
_LOWEST_RATIO = 0.25
"""Lowest limit that is set, as a share of the highest, where the kernel states none: assumed."""

Files = dict[str, str]
"""Contents by path below the root: the limit of each package, and whether its zone is enabled."""
T = TypeVar("T")


class RaplPower:
    """The power limit of every package of this machine. Implements :class:`joulery.domain.ports.Device`.

    Args:
        root: The powercap folder; another one in tests and containers.
        files: Reads and writes the files.

    Raises:
        CapabilityError: There are no RAPL zones, or they have no power limit.
    """

    def __init__(self, root: str = ROOT, files: TextFiles | None = None) -> None:
        self.device = "cpu"
        self._root, self._files = Path(root), files or TextFiles()
        zones = [zone for zone in sorted(self._root.glob("intel-rapl:*")) if self._is_package(zone)]
        if not zones:
            raise CapabilityError(
                "CPU power limits cannot be set: no RAPL zones (usual in a virtual machine)", resource=str(root)
            )
        constraints = {zone.name: self._long_term(zone) for zone in zones}
        self._constraints = {zone: number for zone, number in constraints.items() if number is not None}
        if not self._constraints:
            raise CapabilityError(
                "CPU power limits cannot be set: the RAPL zones have no long_term constraint (AMD's only count)",
                resource=str(zones[0]),
            )

    def capability(self) -> DeviceCapability:
        """The limits that every package accepts, and whether this process may set them."""
        settable = all(os.access(self._root / path, os.W_OK) for path in self._limits())
        low_w, high_w = (watts / 1e6 for watts in self._guarded(self._range_uw))
        default_uw = [self._max_uw(zone) for zone in self._constraints]
        return DeviceCapability(
            device=self.device,
            name="RAPL",
            knob=Knob.POWER,
            settable=settable,
            detail=f"power limit of each of {len(self._constraints)} packages, long term"
            + ("" if settable else "; needs root"),
            grant="" if settable else GRANT,
            limits_w=(low_w, high_w),
            default_w=min(default_uw) / 1e6 if min(default_uw) > 0 else math.nan,
            parts=len(self._constraints),
        )

    def observe(self) -> DeviceState[PowerSetting]:
        """The highest limit of all packages."""
        files = self._guarded(self._look)
        return DeviceState(self._setting(files), {"files": files})

    def apply(self, wanted: PowerSetting, /) -> DeviceChange[PowerSetting]:
        """Set the same limit for every package."""
        old = self._guarded(self._look)
        if wanted.limit_w is None:
            return self._change(old, self._factory(old), str(wanted))
        low_uw, high_uw = self._guarded(self._range_uw)
        limit_uw = round(1e6 * wanted.limit_w)
        if not low_uw <= limit_uw <= high_uw:
            raise ConfigError(
                "the CPU takes no such power limit",
                got=f"{wanted.limit_w:g} W",
                expected=f"{low_uw / 1e6:g} to {high_uw / 1e6:g} W for each package",
            )
        new = {path: str(limit_uw) if path.endswith("_uw") else "1" for path in old}
        return self._change(old, new, str(wanted))

    def reset(self, memento: Mapping[str, Any] | None = None, /) -> DeviceChange[PowerSetting]:
        """Restore the observed contents of the files; the processor's own limit when None."""
        old = self._guarded(self._look)
        known = {path: text for path, text in (memento or {}).get("files", {}).items() if path in old}
        return self._change(old, {**old, **known} if memento else self._factory(old), "what it was")

    def _change(self, old: Files, new: Files, asked: str) -> DeviceChange[PowerSetting]:
        before, after = self._setting(old), self._setting(new)
        if old == new:
            return DeviceChange(before, before, 0.0, "it was set so already")
        surface = Surface(
            "the CPU power limit", self._write, lambda: self._settled(new, old), (OSError,), self._refused
        )
        return DeviceChange(before, after, change(surface, old, new, asked))

    def _write(self, wanted: Files) -> None:
        for path, text in wanted.items():
            if self._files.read(self._root / path) != text:
                self._files.write(self._root / path, text)

    def _settled(self, new: Files, old: Files) -> Files:
        """The current setting; a limit that the kernel rounded slightly counts as the requested one."""
        found = self._look()
        for path, text in found.items():
            for asked in (new, old):
                if path.endswith("_uw") and abs(int(text) - int(asked[path])) <= _ROUNDING_UW:
                    found[path] = asked[path]
                    break
        return found

    def _factory(self, old: Files) -> Files:
        new = dict(old)
        for zone, number in self._constraints.items():
            if (most_uw := self._max_uw(zone)) <= 0:
                raise CapabilityError(
                    "the kernel does not state the factory's power limit of the CPU", resource=str(self._root / zone)
                )
            new[f"{zone}/constraint_{number}_power_limit_uw"] = str(most_uw)
        return new

    def _setting(self, files: Files) -> PowerSetting:
        limits = [(int(files[path]), self._max_uw(path.split("/")[0])) for path in files if path.endswith("_uw")]
        free = all(0 < most <= limit for limit, most in limits)
        return PowerSetting(None if free else max(limit for limit, _ in limits) / 1e6)

    def _look(self) -> Files:
        """The current contents of all files that this class sets.

        Raises:
            OSError: A file cannot be read.
        """
        names = [*self._limits(), *(f"{zone}/enabled" for zone in self._constraints)]
        names = [name for name in names if not name.endswith("enabled") or (self._root / name).exists()]
        found = {name: self._files.read(self._root / name) for name in names}
        for path, content in found.items():
            if not content.isdigit() or (path.endswith("_uw") and int(content) == 0):
                raise OSError(errno.EIO, f"{path} reads {content!r}")
        return found

    def _limits(self) -> list[str]:
        return [f"{zone}/constraint_{number}_power_limit_uw" for zone, number in self._constraints.items()]

    def _range_uw(self) -> tuple[int, int]:
        """The lowest and highest limit that every package accepts, microwatts.

        Raises:
            OSError: A file cannot be read.
        """
        found = []
        for zone, number in self._constraints.items():
            set_uw = int(self._files.read(self._root / f"{zone}/constraint_{number}_power_limit_uw"))
            high = max(self._max_uw(zone), set_uw)
            low = self._number(f"{zone}/constraint_{number}_min_power_uw") or round(_LOWEST_RATIO * high)
            found.append((low, high))
        return max(low for low, _ in found), min(high for _, high in found)

    def _max_uw(self, zone: str) -> int:
        """The processor's own limit, microwatts; 0 where the kernel does not state it."""
        return self._number(f"{zone}/constraint_{self._constraints[zone]}_max_power_uw")

    def _number(self, path: str) -> int:
        try:
            text = (self._root / path).read_text(encoding="ascii").strip()
        except OSError:
            return 0
        return int(text) if text.isdigit() else 0

    def _is_package(self, zone: Path) -> bool:
        """Whether a zone is a package, and not a sub-zone, the whole platform, or a second view of a package."""
        return bool(_ZONE.fullmatch(zone.name)) and self._text(zone / "name").startswith("package-")

    def _long_term(self, zone: Path) -> int | None:
        for number in range(3):
            if self._text(zone / f"constraint_{number}_name") == "long_term":
                return number
        return None

    def _text(self, file: Path) -> str:
        try:
            return file.read_text(encoding="ascii").strip()
        except OSError:
            return ""

    def _guarded(self, look: Callable[[], T]) -> T:
        try:
            return look()
        except OSError as error:
            gone = CapabilityError(
                f"the CPU power limit cannot be read: {error.strerror or error}", resource=str(error.filename or ROOT)
            )
            raise self._refused(error) or gone from error

    def _refused(self, error: Exception) -> JouleryError | None:
        code = getattr(error, "errno", None)
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            root = os.geteuid() == 0
            return CapabilityError(
                "the firmware locks the CPU power limit" if root else "this process may not set the CPU power limit",
                resource=str(self._root),
                grant=None if root else GRANT,
                hint="unlock it in the firmware's settings (BIOS)" if root else "the files are root's",
            )
        return None
