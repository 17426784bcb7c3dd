"""CPU time of every thread of a run, and the time it was ready and waited for a CPU, from the kernel's scheduler.

Source: ``/proc/PID/task/TID/schedstat``, nanoseconds.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

NS_PER_S = 1_000_000_000


class ThreadTable:
    """Reader of the CPU seconds of the threads of processes. Files stay open while their threads live.

    Args:
        proc: Mount point of the kernel's ``/proc``.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = str(proc)
        self._open: dict[tuple[int, int], int] = {}

    def read(self, pids: Collection[int]) -> list[tuple[int, int, float, float]]:
        """(process, thread, CPU seconds, seconds ready) so far of every living thread; ended ones are left out."""
        found: list[tuple[int, int, float, float]] = []
        alive: dict[tuple[int, int], int] = {}
        for pid in pids:
            for thread in self._threads(pid):
                key = pid, thread
                fd = self._open.pop(key, -1)
                fd = self._adopt(key) if fd < 0 else fd
                times_ns = _times_ns(fd)
                if times_ns is None:
                    _close(fd)
                    continue
                alive[key] = fd
                found.append((pid, thread, times_ns[0] / NS_PER_S, times_ns[1] / NS_PER_S))
        for fd in self._open.values():
            _close(fd)
        self._open = alive
        return found

    def close(self) -> None:
        """Release the files. Safe to call twice."""
        for fd in self._open.values():
            _close(fd)
        self._open = {}

    def _threads(self, pid: int) -> list[int]:
        try:
            return [int(name) for name in os.listdir(f"{self._proc}/{pid}/task")]  # noqa: PTH208  # 50 times a second
        except OSError:  # the process ended meanwhile
            return []

    def _adopt(self, key: tuple[int, int]) -> int:
        try:
            return os.open(f"{self._proc}/{key[0]}/task/{key[1]}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it ended meanwhile, or the kernel keeps no schedstat
            return -1


def _times_ns(fd: int) -> tuple[int, int] | None:
    """The nanoseconds that a thread ran, and that it was ready and waited; None where the thread has ended."""
    if fd < 0:
        return None
    try:
        spent, ready, *_ = os.pread(fd, 128, 0).split()
    except (ProcessLookupError, ValueError):
        return None
    return int(spent), int(ready)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
