"""One scheduler a state folder: a lock that the kernel lets go when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from joulery.domain.errors import ConfigError
from joulery.store.files import disk_errors

_RETRY_S, _STEP_S = 3.0, 0.05


class SchedulerLock:
    """The lock of a state folder.

    Attributes:
        path: The lock file; it holds the number of the process that has it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "scheduler.lock"
        self._fd = -1

    def take(self) -> None:
        """Have the lock.

        Raises:
            ConfigError: Another scheduler has it.
            CapabilityError: The disk refuses.
        """
        end_s = time.monotonic() + _RETRY_S  # the watchdog tries it for a moment, too
        while not self.try_take():
            if time.monotonic() > end_s:
                holder = self.path.read_text().strip() or "another process"
                raise ConfigError(
                    f"{self.path.parent} is scheduled by process {holder} already",
                    hint="stop that one first, or give this site a jobs.state folder of its own",
                )
            time.sleep(_STEP_S)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def try_take(self) -> bool:
        """Have the lock if nobody has."""
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def close(self) -> None:
        """Let go. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
