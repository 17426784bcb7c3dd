"""Polling loops of the scheduler and of the node agent, which a signal ends, and snapshots of a cluster.

A cluster that does not answer is logged once. Without the right to read it, the reader pauses.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from joulery.domain.cluster import ClusterSnapshot
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.ports import ClusterBackend
from joulery.runtime.schedule.energy import JobMeter
from joulery.runtime.schedule.spool import SpoolWriter

if TYPE_CHECKING:
    from joulery.runtime.schedule.scheduler import Scheduler

PAUSE_S = 300.0
"""Seconds for which nothing is tried after a right was missing."""
_SETTLED_TICKS = 2


class SnapshotReader:
    """Reads snapshots of a cluster that may not answer.

    Args:
        backend: The cluster.
        log: Writes ``(kind, fields)`` to the log of the run.
    """

    def __init__(self, backend: ClusterBackend, log: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._backend, self._log = backend, log
        self._error, self._pause_end_s = "", -math.inf

    def read(self, now_s: float) -> ClusterSnapshot | None:
        """The cluster; None where it does not answer, which is logged once, and again where its error changes.

        Args:
            now_s: Unix seconds.
        """
        if 0 < self._pause_end_s - now_s <= PAUSE_S:  # a clock that was set back ends it
            return None
        try:
            snapshot = self._backend.snapshot()
        except (CapabilityError, DataError) as error:
            if str(error) != self._error:
                self._log("unreachable", {"text": str(error)})
            self._error = str(error)
            if isinstance(error, CapabilityError) and error.grant:
                self._pause_end_s = now_s + PAUSE_S
            return None
        if self._error:
            self._log("note", {"text": "the cluster answers again"})
            self._error = ""
        return snapshot


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_scheduler(
    scheduler: Scheduler, poll_s: float, stop: threading.Event, say: Callable[[str], None] = lambda text: None
) -> None:
    """Tick every ``poll_s`` until ``stop`` is set.

    A tick that cannot be written to the disk ends before the action it could not record, and is repeated.

    Args:
        scheduler: The scheduler.
        poll_s: Seconds from one tick to the next.
        stop: Ends the loop.
        say: Receives a message when the disk refuses writes, once, and when it accepts them again.
    """
    before_s: float | None = None
    refused = ""
    while not stop.is_set():
        begun_s = time.monotonic()
        try:
            scheduler.tick(time.time(), 0.0 if before_s is None else begun_s - before_s)
        except CapabilityError as error:
            if not refused:
                say(f"nothing is started or stopped until this can be written: {error}")
            refused = str(error)
        else:
            if refused:
                say("the disk takes writes again: the scheduler continues")
            refused = ""
            before_s = begun_s
        stop.wait(max(0.0, poll_s - (time.monotonic() - begun_s)))


def run_one_round(scheduler: Scheduler, poll_s: float, grace_s: float, stop: threading.Event) -> None:
    """One round at once, then ticks until its actions are done, ``stop`` is set, or twice the grace is over."""
    end_s, settled, first = time.monotonic() + 2 * grace_s + 10 * poll_s, 0, True
    before_s = time.monotonic()
    while not stop.is_set() and settled < _SETTLED_TICKS and time.monotonic() < end_s:
        begun_s = time.monotonic()
        tick = scheduler.tick(time.time(), begun_s - before_s, round_now=first)
        before_s = begun_s
        first = first and not tick.round
        done = tick.settled or all(outcome != "applied" for _, _, outcome in tick.done)
        settled = settled + 1 if done and not first else 0
        if settled < _SETTLED_TICKS:
            stop.wait(poll_s)


@dataclass(frozen=True, slots=True)
class AgentTimes:
    """Times of a node agent.

    Attributes:
        sample_s: Sampling interval.
        rounds: Number of samples to take; None for no limit.
    """

    sample_s: float = 30.0
    rounds: int | None = None


def run_agent(
    meter: JobMeter,
    spool: SpoolWriter,
    times: AgentTimes,
    say: Callable[[Mapping[str, Any]], None],
    stop: threading.Event,
    clock_s: Callable[[], float] = time.time,
) -> None:
    """Sample the energy of each job of this node until ``stop`` is set. A sample that cannot be written is made up for
    by the next, because samples are totals.

    Args:
        meter: Energy of the jobs of this node.
        spool: Where the totals are written.
        times: When to sample.
        say: Receives each sample.
        stop: Ends the loop, after one last sample.
        clock_s: Unix seconds.
    """
    taken = 0
    while not (last := stop.wait(times.sample_s)) or taken == 0:
        taken += 1
        _sample(meter, spool, say, clock_s())
        if last or (times.rounds is not None and taken >= times.rounds):
            return
    _sample(meter, spool, say, clock_s())


def _sample(meter: JobMeter, spool: SpoolWriter, say: Callable[[Mapping[str, Any]], None], now_s: float) -> None:
    totals = meter.update()
    kept = spool.write(now_s, totals)
    say(
        {
            "t_s": now_s,
            "jobs": {str(job): {"energy_j": total.energy_j, "slot_j": total.slot_j} for job, total in totals.items()},
            "machine_j": meter.machine_j,
            "written": kept,
        }
    )
