"""The scheduler's lock, and the watchdog that releases every held job when the lock stays free.

The kernel frees the lock however its holder ends, so a free lock means that no scheduler runs. A scheduler that takes
the lock in time keeps its holds and starts a watchdog of its own; the older watchdog then ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from joulery.domain.errors import ActuationError, CapabilityError, ConfigError, DataError
from joulery.domain.ports import ClusterBackend
from joulery.runtime.schedule.scheduler import release_all
from joulery.store.files import disk_errors, write_atomically

_LOCK_PATIENCE_S, _LOCK_STEP_S = 3.0, 0.05
_STEP_S = 1.0
_RETRY_S = 5.0


class SchedulerLock:
    """The lock of a state folder: one scheduler at a time.

    Attributes:
        path: The lock file; it contains the number of the process that holds the lock.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "scheduler.lock"
        self._fd = -1

    def take(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: Another scheduler holds it.
            CapabilityError: The disk refuses.
        """
        end_s = time.monotonic() + _LOCK_PATIENCE_S  # the watchdog tries it for a moment, too
        while not self.try_take():
            if time.monotonic() > end_s:
                holder = self.path.read_text().strip() or "another process"
                raise ConfigError(
                    f"{self.path.parent} is scheduled by process {holder} already",
                    hint="stop that one first, or give this site a jobs.state folder of its own",
                )
            time.sleep(_LOCK_STEP_S)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def try_take(self) -> bool:
        """Take the lock if it is free.

        Returns:
            Whether this process holds it now.
        """
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
        """Free the lock; idempotent."""
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


def watch_lock(
    lock: SchedulerLock,
    patience_s: float,
    open_backend: Callable[[], ClusterBackend],
    say: Callable[[str], None],
    *,
    relieved: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
    clock_s: Callable[[], float] = time.monotonic,
) -> int:
    """Wait until the lock was free for ``patience_s``, then release every held job.

    If the cluster does not answer, the watchdog tries again until it does; meanwhile a scheduler may come back.

    Args:
        lock: The scheduler's lock.
        patience_s: How long the scheduler may be gone.
        open_backend: Opens the cluster.
        say: Receives a line for each attempt.
        relieved: Whether another watchdog has taken over.
        sleep, clock_s: Time functions.

    Returns:
        The number of jobs released.
    """
    free_since_s: float | None = None
    step_s = min(_STEP_S, patience_s / 4)
    while not relieved():
        sleep(step_s)
        if not lock.try_take():
            free_since_s = None
            continue
        try:
            free_since_s = clock_s() if free_since_s is None else free_since_s
            if clock_s() - free_since_s < patience_s:
                continue
            released = _release(open_backend, say)
            if released is not None:
                return released
        finally:
            lock.close()
        sleep(_RETRY_S)
    return 0


def take_over(file: Path, pid: int) -> Callable[[], bool]:
    """Make process ``pid`` the watchdog on duty.

    Returns:
        Whether it still is, when called.

    Raises:
        CapabilityError: The disk refuses.
    """
    write_atomically(file, lambda stream: stream.write(str(pid).encode()))
    return lambda: not file.exists() or file.read_text() == str(pid)


def _release(open_backend: Callable[[], ClusterBackend], say: Callable[[str], None]) -> int | None:
    """Release every held job; None where the cluster does not answer or refuses some."""
    try:
        backend = open_backend()
        try:
            released = release_all(backend)
        finally:
            backend.close()
    except (CapabilityError, DataError, ActuationError) as error:
        say(f"the scheduler is gone, and its holds stay until the cluster answers: {error}")
        return None
    say(f"the scheduler is gone: released {len(released)} held jobs")
    return len(released)
