"""Meter of RAPL, the energy counters of Intel and AMD processors, through the kernel's powercap files.

The meter reads these zones, so that no energy is counted twice:

* ``package-N`` (``package-N-die-D`` where a package has several dies) is the processor. N is the socket; the number in
  the folder's name (``intel-rapl:0``) is not.
* ``dram`` below a package is not part of the package's counter and is added.
* ``core`` and ``uncore`` are part of the package's counter and are left out.
* ``psys`` is the whole platform and contains the packages: used only where there is no package.
* ``intel-rapl-mmio`` repeats the same counters and is left out.

A counter restarts from 0 at ``max_energy_range_uj``. Since Linux 5.10 only root may read the counters (a side channel,
CVE-2020-8694). Other users read them through ``joulery rapl-helper`` where it runs; the error of :func:`open_rapl`
contains the command that grants access.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.domain.quality import Quality

if TYPE_CHECKING:
    from joulery.adapters.meters.rapl_helper import RaplHelperMeter

POWERCAP = Path("/sys/class/powercap")
SOCKET = Path("/run/joulery/rapl.sock")
"""Socket of ``joulery rapl-helper``."""
GRANT = "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"

_ZONE = re.compile(r"intel-rapl:\d+")
_PACKAGE = re.compile(r"package-(\d+)(?:-die-(\d+))?")
_UPDATE_S = 0.001


class RaplMeter:
    """Meter that reads each RAPL counter with one ``pread``."""

    def __init__(
        self, channels: tuple[Channel, ...], file_descriptors: tuple[int, ...], notes: tuple[str, ...]
    ) -> None:
        self._channels = channels
        self._fds = file_descriptors
        self._notes = list(notes)
        self._failed = [False] * len(channels)

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One counter for each package and one for each DRAM domain."""
        return self._channels

    def read(self) -> tuple[float, ...]:
        """Joules; NaN where a counter cannot be read any more."""
        return tuple([self._read(slot, fd) for slot, fd in enumerate(self._fds)])

    def notes(self) -> tuple[str, ...]:
        """New notes on channels that were left out, stopped answering or answer again."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Release the files. Safe to call twice."""
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds = (-1,) * len(self._fds)

    def _read(self, slot: int, fd: int) -> float:
        try:
            joules = int(os.pread(fd, 32, 0)) / 1e6
        except (OSError, ValueError) as error:
            self._mark(slot, failed=True, why=f"cannot be read any more: {error}")
            return math.nan
        if self._failed[slot]:
            self._mark(slot, failed=False, why="can be read again")
        return joules

    def _mark(self, slot: int, *, failed: bool, why: str) -> None:
        if self._failed[slot] is not failed:
            self._failed[slot] = failed
            channel = self._channels[slot]
            self._notes.append(f"{channel.device} {channel.component}: RAPL counter {why}")


def open_rapl(root: Path = POWERCAP, helper: Path | None = SOCKET) -> RaplMeter | RaplHelperMeter:
    """Open the RAPL counters of this machine.

    Args:
        root: The powercap folder.
        helper: Socket of ``joulery rapl-helper``, used where the kernel denies the counters; None for never.

    Raises:
        CapabilityError: There is no counter, or it may not be read; the error contains the command that grants access.
    """
    zones, notes = _energy_zones(root)
    if not zones:
        raise CapabilityError(
            f"no RAPL counters in {root}",
            resource=str(root),
            hint="virtual machines have none; a container hides them (docker: --security-opt systempaths=unconfined, "
            "or measure on the host); on a PC or server load the driver: sudo modprobe intel_rapl_msr",
        )
    channels, fds = [], []
    denied: OSError | None = None
    for device, component, folder in zones:
        try:
            wrap_j = int((folder / "max_energy_range_uj").read_text()) / 1e6
            fd = os.open(folder / "energy_uj", os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError as error:
            denied = error
        except (OSError, ValueError) as error:
            notes.append(f"{device} {component}: RAPL zone {folder.name} is left out: {error}")
        else:
            fds.append(fd)
            channels.append(
                Channel(
                    device, component, ReadingKind.COUNTER, "rapl", Quality.MEASURED, wrap_j=wrap_j, update_s=_UPDATE_S
                )
            )
    if denied is not None:
        for fd in fds:
            os.close(fd)
        if helper is not None and helper.is_socket():
            from joulery.adapters.meters.rapl_helper import RaplHelperMeter

            return RaplHelperMeter(helper)
        raise CapabilityError(
            f"RAPL is here but may not be read: {denied.filename}: permission denied",
            resource=str(denied.filename),
            grant=GRANT,
        )
    if not channels:
        raise CapabilityError(f"no RAPL counter can be read: {'; '.join(notes)}", resource=str(root))
    return RaplMeter(tuple(channels), tuple(fds), tuple(notes))


def _energy_zones(root: Path) -> tuple[list[tuple[str, str, Path]], list[str]]:
    """(device, component, folder) of the zones that together count every joule once, and notes on omitted zones."""
    packages: dict[tuple[str, str], Path] = {}
    platform: list[tuple[str, str, Path]] = []
    notes = []
    for folder in sorted(root.glob("intel-rapl:*"), key=_zone_order):
        match = _PACKAGE.fullmatch(_zone_name(folder)) if _ZONE.fullmatch(folder.name) else None
        if match:
            device, die = f"cpu:{match[1]}", f"-die-{match[2]}" if match[2] is not None else ""
            zones = [(f"package{die}", folder)]
            zones += [(f"dram{die}", sub) for sub in _subzones(root, folder) if _zone_name(sub) == "dram"]
            for component, zone in zones:
                if packages.setdefault((device, component), zone) is not zone:
                    notes.append(f"{device} {component}: RAPL zone {zone.name} shows it a second time and is left out")
        elif _ZONE.fullmatch(folder.name) and _zone_name(folder) == "psys":
            platform = [("machine", "psys", folder)]
    return [(device, component, folder) for (device, component), folder in sorted(packages.items())] or platform, notes


def _subzones(root: Path, zone: Path) -> list[Path]:
    """The zones below one zone, in its folder or in ``root``; each name once."""
    found = {path.name: path for place in (zone, root) for path in place.glob(f"{zone.name}:*")}
    return [found[name] for name in sorted(found)]


def _zone_order(folder: Path) -> tuple[int, str]:
    return len(folder.name), folder.name


def _zone_name(folder: Path) -> str:
    try:
        return (folder / "name").read_text().strip()
    except OSError:
        return ""
