"""The scheduler as a process: one lock, one journal, one log, a watchdog, a loop that signals end."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.accounting.training_jobs import MeasureRules
from joulery.app.schedule import cluster_backend, energy_source, green_policy, jobs_of, site_intensity
from joulery.config.parsing.reading import load
from joulery.config.site import Mode
from joulery.domain.ports import ClusterBackend
from joulery.runtime.schedule.daemon import Scheduler, SchedulerTiming, Tick, compact, release_all
from joulery.runtime.schedule.intensity import Intensity
from joulery.runtime.schedule.lock import SchedulerLock
from joulery.runtime.schedule.watchdog import start_watchdog
from joulery.store.journal import Journal
from joulery.store.run.directory import create_run, new_run_id

_SETTLED_POLLS = 2
_COMPACT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for on the command line; None where the site file decides.

    Attributes:
        site: The site file.
        backend: ``local`` or ``slurm``.
        mode: advise, shadow or act.
        once: One round, and what it entails, instead of for ever.
        argv: The command line, for the manifest.
    """

    site: Path
    backend: str | None = None
    mode: Mode | None = None
    once: bool = False
    argv: Sequence[str] = ()


def schedule(request: Request, say: Callable[[Mapping[str, Any]], None], stop: threading.Event) -> None:
    """Schedule until told to stop (or once).

    Args:
        request: What to do.
        say: Told every line of the log.
        stop: Ends it.

    Raises:
        ConfigError: The site is wrong, or another scheduler has it.
        CapabilityError: The cluster cannot be used from here.
    """
    site = load(request.site)
    jobs = jobs_of(site)
    if request.backend is not None:
        jobs = jobs.model_copy(update={"backend": request.backend})
        site = site.model_copy(update={"jobs": jobs})
    mode = request.mode or site.mode
    folder = jobs.state.absolute()
    policy = green_policy(jobs)
    with _closing(cluster_backend(jobs)) as backend, SchedulerLock(folder):
        details = {"mode": mode, "backend": jobs.backend, "policy": policy.name, "site": str(request.site)}
        run_folder = folder / "runs" / new_run_id(time.time())
        journal_file = folder / f"journal-{mode}.jsonl"
        with (
            create_run(run_folder, kind="schedule", argv=request.argv, details=details) as run,
            Journal(journal_file) as journal,
        ):

            def log(kind: str, fields: Mapping[str, Any]) -> None:
                run.log(kind, **fields)
                say({"kind": kind, **fields})

            def note(text: str) -> None:
                log("note", {"text": text})

            if journal.damaged:
                note(f"{journal_file.name}: {journal.damaged} damaged lines are left out")
            scheduler = Scheduler(
                backend,
                policy,
                journal,
                energy_source(site, backend, note),
                Intensity(site_intensity(site), jobs.window_s, note),
                log,
                mode=mode,
                rhythm=SchedulerTiming(jobs.quantum_s, jobs.restart_s, MeasureRules(jobs.measure_s)),
            )
            if journal.size_bytes > _COMPACT_BYTES:
                compact(journal, scheduler.memory)
            acts = mode is Mode.ACT and jobs.backend != "local"
            patience_s = 2 * jobs.quantum_s + jobs.patience_s if request.once else jobs.patience_s
            dog = start_watchdog(request.site, jobs.backend, patience_s, folder / "watchdog.log") if acts else None
            if request.once:
                _once(scheduler, jobs.poll_s, jobs.grace_s, stop)
                return
            _loop(scheduler, jobs.poll_s, stop)
            if acts:
                released = release_all(backend)
                note(f"stopped: released {len(released)} held jobs")
                _end(dog)


@contextmanager
def _closing(backend: ClusterBackend) -> Iterator[ClusterBackend]:
    try:
        yield backend
    finally:
        backend.close()


def _loop(scheduler: Scheduler, poll_s: float, stop: threading.Event) -> None:
    before_s: float | None = None
    while not stop.is_set():
        begun_s = time.monotonic()
        _tick(scheduler, begun_s, before_s)
        before_s = begun_s
        stop.wait(max(0.0, poll_s - (time.monotonic() - begun_s)))


def _once(scheduler: Scheduler, poll_s: float, grace_s: float, stop: threading.Event) -> None:
    """One round, then looks until everything it decided is done, or every grace is over."""
    scheduler.memory.next_round_s = float("-inf")
    end_s, before_s, settled = time.monotonic() + 2 * grace_s + 10 * poll_s, None, 0
    while not stop.is_set() and settled < _SETTLED_POLLS and time.monotonic() < end_s:
        begun_s = time.monotonic()
        tick = _tick(scheduler, begun_s, before_s)
        before_s = begun_s
        done = tick.settled or all(outcome != "applied" for _, _, outcome in tick.done)
        settled = settled + 1 if done else 0
        if settled < _SETTLED_POLLS:
            stop.wait(poll_s)


def _tick(scheduler: Scheduler, begun_s: float, before_s: float | None) -> Tick:
    return scheduler.tick(time.time(), 0.0 if before_s is None else begun_s - before_s)


def _end(dog: subprocess.Popen[bytes] | None) -> None:
    """The watchdog has nothing left to watch."""
    if dog is not None:
        dog.terminate()
        with suppress(subprocess.TimeoutExpired):
            dog.wait(5)


def release_now(site_file: Path, backend_kind: str | None) -> list[int]:
    """Release what is held, with nobody scheduling meanwhile.

    Raises:
        ConfigError: A scheduler runs.
    """
    jobs = jobs_of(load(site_file))
    if backend_kind is not None:
        jobs = jobs.model_copy(update={"backend": backend_kind})
    with _closing(cluster_backend(jobs)) as backend, SchedulerLock(jobs.state.absolute()):
        return release_all(backend)
