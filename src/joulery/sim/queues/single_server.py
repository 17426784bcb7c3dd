"""One server that serves one job at a time, uninterrupted, in any order: the queue of every per-model replica.

:func:`fcfs` is first come first served in closed form (Lindley's recursion as two running sums). :func:`by_key` serves
the waiting job with the smallest static key, O(log n) a job: shortest job first with the predicted length as key, the
same with linear aging with ``predicted + alpha * arrival`` (waiting lowers the keys of all alike, so the order of two
jobs never changes). :func:`by_queue` takes any queue that can push and pop, for orders that change while jobs wait.

None of them needs the event kernel (:mod:`joulery.sim.core.kernel`): with one server the next event is always the end
of the job that runs, so a loop over jobs takes the place of the heap of events.

A job that arrives at the instant at which the server becomes free is queued before the server chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.errors import DataError


class JobQueue(Protocol):
    """The waiting jobs of one server; chooses the next job."""

    def push(self, job: int, arrival_s: float) -> None:
        """Add a job to the queue."""
        ...

    def pop(self, now_s: float) -> int:
        """Remove and return the job to serve next; called only while jobs wait."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ServedQueue:
    """Times and order of the jobs, in order of arrival.

    Attributes:
        arrival_s: When each job arrived, float64[n], seconds.
        start_s: When its service began.
        finish_s: When it was done.
        order: Jobs in the order in which they were served, int64[n].
    """

    arrival_s: FloatArray
    start_s: FloatArray
    finish_s: FloatArray
    order: IntArray

    @property
    def wait_s(self) -> FloatArray:
        """Arrival to start."""
        return self.start_s - self.arrival_s

    @property
    def sojourn_s(self) -> FloatArray:
        """Arrival to finish: the job completion time."""
        return self.finish_s - self.arrival_s


def fcfs(arrival_s: npt.ArrayLike, service_s: npt.ArrayLike) -> ServedQueue:
    """Serve jobs first come, first served.

    Args:
        arrival_s: float64[n], non-decreasing.
        service_s: float64[n], 0 or more.

    Raises:
        DataError: Shapes disagree, arrivals are out of order, a service time is negative or not finite.
    """
    arrivals, services = checked_columns(arrival_s, service_s)
    after = np.cumsum(services)
    before = after - services
    start = np.maximum(before + np.maximum.accumulate(arrivals - before), arrivals) if len(arrivals) else arrivals
    return _served(arrivals, start, services, np.arange(len(arrivals)))


def by_key(arrival_s: npt.ArrayLike, service_s: npt.ArrayLike, key: npt.ArrayLike) -> ServedQueue:
    """Serve the waiting job with the smallest key first; equal keys in order of arrival.

    Args:
        arrival_s: float64[n], non-decreasing.
        service_s: float64[n], 0 or more.
        key: float64[n], finite; smaller is served earlier.

    Raises:
        DataError: As :func:`fcfs`, or a key is not finite.
    """
    keys = readonly(key, np.float64)
    if not bool(np.all(np.isfinite(keys))) or len(keys) != len(np.asarray(arrival_s)):
        raise DataError(f"expected one finite key for each of {len(np.asarray(arrival_s))} jobs, got {len(keys)} keys")
    return by_queue(arrival_s, service_s, _StaticKeys(keys.tolist()))


class _StaticKeys:
    """A heap of ``(key, job)``; jobs are numbered in order of arrival, which breaks ties."""

    __slots__ = ("_keys", "_waiting")

    def __init__(self, keys: list[float]) -> None:
        self._keys = keys
        self._waiting: list[tuple[float, int]] = []

    def push(self, job: int, arrival_s: float) -> None:
        heappush(self._waiting, (self._keys[job], job))

    def pop(self, now_s: float) -> int:
        return heappop(self._waiting)[1]


def by_queue(arrival_s: npt.ArrayLike, service_s: npt.ArrayLike, queue: JobQueue) -> ServedQueue:
    """Serve jobs in the order that ``queue`` chooses; the queue must be empty at the start.

    Args:
        arrival_s: float64[n], non-decreasing.
        service_s: float64[n], 0 or more.
        queue: Receives every arrival, and names the next job whenever the server is free and a job waits.

    Raises:
        DataError: As :func:`fcfs`, or the queue returned a job that was not waiting.
    """
    arrivals, services = checked_columns(arrival_s, service_s)
    arrival, service, count = arrivals.tolist(), services.tolist(), len(arrivals)
    push, pop = queue.push, queue.pop
    order: list[int] = []
    start: list[float] = []
    free_s, arrived = 0.0, 0
    for served in range(count):
        if served == arrived:
            free_s = max(free_s, arrival[arrived])
        while arrived < count and arrival[arrived] <= free_s:
            push(arrived, arrival[arrived])
            arrived += 1
        job = pop(free_s)
        order.append(job)
        start.append(free_s)
        free_s += service[job]
    return _in_order(arrivals, services, order, start)


def checked_columns(arrival_s: npt.ArrayLike, service_s: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Check arrival and service times, and return both as arrays.

    Raises:
        DataError: As :func:`fcfs`.
    """
    arrivals, services = readonly(arrival_s, np.float64), readonly(service_s, np.float64)
    if len(arrivals) != len(services):
        raise DataError(f"expected one service time for each of {len(arrivals)} jobs, got {len(services)}")
    if not bool(np.all(np.isfinite(arrivals)) and np.all(np.diff(arrivals, prepend=0.0) >= 0)):
        raise DataError("arrival times must be finite, start at 0 s or later and never step back")
    if not bool(np.all(np.isfinite(services) & (services >= 0))):
        raise DataError("service times must be finite and 0 s or more")
    return arrivals, services


def _in_order(arrivals: FloatArray, services: FloatArray, order: list[int], start: list[float]) -> ServedQueue:
    jobs = np.array(order, np.int64)
    start_s = np.full(len(arrivals), -np.inf)
    start_s[jobs] = start
    if bool(np.any(start_s < arrivals)):
        job = int(np.argmax(start_s < arrivals))
        raise DataError(f"the queue never served job {job}, or served it before it came")
    return _served(arrivals, start_s, services, jobs)


def _served(arrivals: FloatArray, start: FloatArray, services: FloatArray, order: IntArray) -> ServedQueue:
    return ServedQueue(
        arrivals, readonly(start, np.float64), readonly(start + services, np.float64), readonly(order, np.int64)
    )
