"""The watchdog: a process that outlives the scheduler and, when it stays dead, gives every held job back.

``python -m joulery.runtime.schedule.watchdog SITE BACKEND PATIENCE_S``. It knows that the scheduler is alive by the
lock it holds, which the kernel lets go however the scheduler ends; a new scheduler that takes the lock in time keeps
everything as it is, and starts a watchdog of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from joulery.config.reading import load
from joulery.domain.errors import ActuationError, CapabilityError, DataError
from joulery.domain.ports import ClusterBackend
from joulery.runtime.compose.schedule import cluster_backend, jobs_of
from joulery.runtime.schedule.daemon import release_all
from joulery.runtime.schedule.lock import SchedulerLock

_STEP_S = 1.0
_TRIES = 60


def watch(
    lock: SchedulerLock,
    patience_s: float,
    backend: Callable[[], ClusterBackend],
    say: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock_s: Callable[[], float] = time.monotonic,
) -> int:
    """Wait until nobody has held the lock for ``patience_s``, then release what is held.

    Returns:
        How many jobs were released.
    """
    free_since_s: float | None = None
    step_s = min(_STEP_S, patience_s / 4)
    while True:
        sleep(step_s)
        if not lock.try_take():
            free_since_s = None
            continue
        free_since_s = clock_s() if free_since_s is None else free_since_s
        if clock_s() - free_since_s >= patience_s:
            break
        lock.close()
    try:
        return _release(backend(), say, sleep)
    finally:
        lock.close()


def _release(backend: ClusterBackend, say: Callable[[str], None], sleep: Callable[[float], None]) -> int:
    """Release everything; a cluster that does not answer is asked again for a while."""
    for attempt in range(_TRIES):
        try:
            released = release_all(backend)
            say(f"the scheduler is gone: released {len(released)} held jobs")
            return len(released)
        except (CapabilityError, DataError, ActuationError) as error:
            say(f"attempt {attempt + 1}: {error}")
            sleep(_STEP_S * 5)
    return 0


def start_watchdog(site: Path, backend: str, patience_s: float, log: Path) -> subprocess.Popen[bytes]:
    """The watchdog as a process of a session of its own: what ends the scheduler does not end it."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "joulery.runtime.schedule.watchdog", str(site), backend, str(patience_s)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Be the watchdog of one site."""
    site, kind, patience_s = Path(arguments[0]), arguments[1], float(arguments[2])
    jobs = jobs_of(load(site)).model_copy(update={"backend": kind})
    watch(SchedulerLock(jobs.state.absolute()), patience_s, lambda: cluster_backend(jobs), _say)
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%FT%TZ', time.gmtime())} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
