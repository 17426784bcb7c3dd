"""The watchdog process of ``joulery schedule``: it outlives the scheduler and releases its holds.

Run as ``python -m joulery.app.schedule_watchdog SITE BACKEND PATIENCE_S [CLUSTER]``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from joulery.app.wiring.cluster import cluster_backend, jobs_of, one_cluster
from joulery.config.parsing.reading import load
from joulery.runtime.schedule.watchdog import SchedulerLock, take_over, watch_lock


def main(arguments: list[str]) -> int:
    """Watch the scheduler of one site until it has ended or another watchdog takes over."""
    site, kind, patience_s = Path(arguments[0]), arguments[1], float(arguments[2])
    cluster = arguments[3] if len(arguments) > 3 and arguments[3] else None
    jobs = jobs_of(one_cluster(load(site), cluster)).model_copy(update={"backend": kind})
    folder = jobs.state.absolute()
    on_duty = take_over(folder / "watchdog.pid", os.getpid())
    watch_lock(SchedulerLock(folder), patience_s, lambda: cluster_backend(jobs), _say, relieved=lambda: not on_duty())
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%FT%TZ', time.gmtime())} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
