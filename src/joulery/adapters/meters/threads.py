"""CPU time of every thread of a run, in nanoseconds of the scheduler, from ``/proc/PID/task/TID/schedstat``."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

NS_PER_S = 1_000_000_000


class ThreadTable:
    """CPU seconds of the threads of some processes. Files stay open while their threads live.

    Args:
        proc: Where the kernel shows its processes.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = str(proc)
        self._open: dict[tuple[int, int], int] = {}

    def read(self, pids: Collection[int]) -> list[tuple[int, int, float]]:
        """(process, thread, CPU seconds so far) of every living thread; threads that ended are left out."""
        found: list[tuple[int, int, float]] = []
        alive: dict[tuple[int, int], int] = {}
        for pid in pids:
            for thread in self._threads(pid):
                key = pid, thread
                fd = self._open.pop(key, -1)
                fd = self._adopt(key) if fd < 0 else fd
                spent_ns = _spent_ns(fd)
                if spent_ns is None:
                    _close(fd)
                    continue
                alive[key] = fd
                found.append((pid, thread, spent_ns / NS_PER_S))
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


def _spent_ns(fd: int) -> int | None:
    """Nanoseconds on a CPU; None where the thread has ended."""
    if fd < 0:
        return None
    try:
        spent, _, _ = os.pread(fd, 128, 0).partition(b" ")
    except ProcessLookupError:
        return None
    return int(spent) if spent else None


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
