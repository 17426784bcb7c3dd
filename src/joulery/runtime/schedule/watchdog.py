"""The watchdog: a process that outlives the scheduler and, when it stays dead, gives every held job back.

``python -m joulery.runtime.schedule.watchdog SITE BACKEND PATIENCE_S``. It knows that the scheduler is alive by the
lock it holds, which the kernel lets go however the scheduler ends; a new scheduler that takes the lock in time keeps
everything as it is, and starts a watchdog of its own, at whose sight the older one ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from joulery.app.schedule import cluster_backend, jobs_of
from joulery.config.parsing.reading import load
from joulery.domain.errors import ActuationError, CapabilityError, DataError
from joulery.domain.ports import ClusterBackend
from joulery.runtime.process import part_environment, process_command
from joulery.runtime.schedule.daemon import release_all
from joulery.runtime.schedule.lock import SchedulerLock
from joulery.store.files import write_atomically

_STEP_S = 1.0
_AGAIN_S = 5.0


def watch(
    lock: SchedulerLock,
    patience_s: float,
    backend: Callable[[], ClusterBackend],
    say: Callable[[str], None],
    *,
    relieved: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
    clock_s: Callable[[], float] = time.monotonic,
) -> int:
    """Wait until nobody has held the lock for ``patience_s``, then release what is held.

    A cluster that does not answer is asked again until it does; meanwhile a scheduler may come back.

    Args:
        lock: Of the scheduler.
        patience_s: How long it may be gone.
        backend: Finds the cluster.
        say: Told what is done.
        relieved: Whether another watchdog has taken over.
        sleep, clock_s: Time.

    Returns:
        How many jobs were released.
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
            released = _release(backend, say)
            if released is not None:
                return released
        finally:
            lock.close()
        sleep(_AGAIN_S)
    return 0


def _release(find: Callable[[], ClusterBackend], say: Callable[[str], None]) -> int | None:
    """Release everything and say how many; None where the cluster does not answer, or keeps some."""
    try:
        backend = find()
        try:
            released = release_all(backend)
        finally:
            backend.close()
    except (CapabilityError, DataError, ActuationError) as error:
        say(f"the scheduler is gone, and its holds stay until the cluster answers: {error}")
        return None
    say(f"the scheduler is gone: released {len(released)} held jobs")
    return len(released)


def start_watchdog(site: Path, backend: str, patience_s: float, log: Path) -> subprocess.Popen[bytes]:
    """The watchdog as a process of a session of its own: what ends the scheduler does not end it."""
    with log.open("ab") as output:
        return subprocess.Popen(
            process_command("joulery.runtime.schedule.watchdog", str(site), backend, str(patience_s)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=part_environment(),
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Be the watchdog of one site."""
    site, kind, patience_s = Path(arguments[0]), arguments[1], float(arguments[2])
    jobs = jobs_of(load(site)).model_copy(update={"backend": kind})
    folder = jobs.state.absolute()
    on_duty = take_over(folder / "watchdog.pid", os.getpid())
    watch(SchedulerLock(folder), patience_s, lambda: cluster_backend(jobs), _say, relieved=lambda: not on_duty())
    return 0


def take_over(file: Path, pid: int) -> Callable[[], bool]:
    """Be the one on duty from now on; the answer tells whether that is still so.

    Raises:
        CapabilityError: The disk refuses.
    """
    write_atomically(file, lambda stream: stream.write(str(pid).encode()))
    return lambda: not file.exists() or file.read_text() == str(pid)


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%FT%TZ', time.gmtime())} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
