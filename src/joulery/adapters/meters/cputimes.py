"""Busy time of the CPUs of each socket, from ``/proc/stat``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from joulery.domain.errors import CapabilityError


def sockets_of_cpus(sys: Path = Path("/sys")) -> dict[int, int]:
    """The socket of each online logical CPU; only socket 0 where it is not reported (some virtual machines, ARM)."""
    found: dict[int, int] = {}
    for folder in (sys / "devices/system/cpu").glob("cpu[0-9]*"):
        file = folder / "topology/physical_package_id"
        if file.is_file():
            found[int(folder.name.removeprefix("cpu"))] = max(0, int(file.read_text()))
    return dict(sorted(found.items())) or dict.fromkeys(range(os.cpu_count() or 1), 0)


class CpuTimes:
    """Busy CPU seconds of each socket since boot: user, nice, system, irq and softirq.

    User time contains guest time; iowait counts as idle; stolen time is used by another machine. The kernel counts in
    ticks of 10 ms, so differences are meaningful from about 100 ms on.

    Attributes:
        sockets: Socket numbers, sorted; ``read`` returns values in this order.
        cpus: Logical CPUs of each socket.
    """

    def __init__(self, file_descriptor: int, socket_of_cpu: Mapping[int, int], tick_s: float) -> None:
        self.sockets = tuple(sorted(set(socket_of_cpu.values())))
        self.cpus = tuple(sum(1 for s in socket_of_cpu.values() if s == socket) for socket in self.sockets)
        self._fd = file_descriptor
        self._tick_s = tick_s
        self._slot = {b"cpu%d" % cpu: self.sockets.index(socket) for cpu, socket in socket_of_cpu.items()}
        self._ticks = dict.fromkeys(self._slot, 0)
        self._size = 4096 + 160 * len(socket_of_cpu)

    def read(self) -> tuple[float, ...]:
        """Busy seconds of each socket; never less than before. A CPU that went offline keeps its last value."""
        ticks = self._ticks
        for line in os.pread(self._fd, self._size, 0).split(b"\n"):
            if not line.startswith(b"cpu"):
                break
            name, user, nice, system, _, _, irq, softirq, *_ = line.split(None, 8)
            if name in ticks:
                busy = int(user) + int(nice) + int(system) + int(irq) + int(softirq)
                if busy > ticks[name]:
                    ticks[name] = busy
        totals = [0] * len(self.sockets)
        for name, slot in self._slot.items():
            totals[slot] += ticks[name]
        return tuple(total * self._tick_s for total in totals)

    def close(self) -> None:
        """Release the file. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_cpu_times(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> CpuTimes:
    """Open the busy times of this machine's CPUs.

    Raises:
        CapabilityError: ``/proc/stat`` cannot be read.
    """
    file = proc / "stat"
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CapabilityError(f"cannot read {file}: {os.strerror(error.errno or 0)}", resource=str(file)) from error
    return CpuTimes(fd, sockets_of_cpus(sys), 1.0 / os.sysconf("SC_CLK_TCK"))
