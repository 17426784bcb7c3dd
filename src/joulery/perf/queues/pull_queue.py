"""A service's queue: one FIFO from which free instances pull, the longest idle first.

This is Clover's dispatch (SC'23, section 3; specs: one queue, an instance serves one request at a time). Instances may
differ, service times are drawn from measured samples, and an instance runs slower while its neighbours on the device
are busy. No formula covers that, so the queue is played forward, request by request: with arrival k at ``t``, the
instance is the one with the earliest ``free_s`` (the longest idle if any is idle, else the first to become free), it
starts at ``max(t, free_s)``.

Validated against M/M/1, M/M/c and M/D/1 (tests/perf/queues/test_pull_queue.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.serving.profile import SliceProfile, Timings


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What became of each request, in order of arrival.

    Attributes:
        arrival_s: When it came, float64[n].
        server: Which instance answered, index into the layout of its time, int64[n].
        start_s: When it was taken, float64[n].
        service_s: How long it took, float64[n].
        cpu_s: CPU seconds it cost, float64[n].
        epoch: Which layout was in force, index into the sequence given, int64[n].
    """

    arrival_s: FloatArray
    server: IntArray
    start_s: FloatArray
    service_s: FloatArray
    cpu_s: FloatArray
    epoch: IntArray

    @property
    def end_s(self) -> FloatArray:
        """When it was answered, float64[n]."""
        return np.asarray(self.start_s + self.service_s)

    @property
    def latency_s(self) -> FloatArray:
        """Arrival to answer, float64[n]."""
        return np.asarray(self.end_s - self.arrival_s)


def replay(
    arrival_s: FloatArray,
    draws: FloatArray,
    layouts: Sequence[tuple[float, Sequence[SliceProfile]]],
) -> Replay:
    """Play requests through the queue.

    Args:
        arrival_s: Arrival times, not decreasing, float64[n].
        draws: One number in [0, 1) a request that picks its service time; the same draws make comparisons paired.
        layouts: ``(from_s, instances)`` in order of time; the first holds from the beginning. A request is answered by
            the layout in force when it arrives; instances of a new layout start idle.
    """
    n = len(arrival_s)
    server, epoch = np.empty(n, np.int64), np.empty(n, np.int64)
    start_s, service_s, cpu_s = np.empty(n), np.empty(n), np.empty(n)
    arrivals, picks = arrival_s.tolist(), draws.tolist()
    now = -1
    tables: list[_Table] = []
    free: list[tuple[float, int]] = []
    for k in range(n):
        t = arrivals[k]
        while now + 1 < len(layouts) and (now < 0 or layouts[now + 1][0] <= t):
            now += 1
            tables = [_Table.of(item) for item in layouts[now][1]]
            free = [(-math.inf, index) for index in range(len(tables))]
        free_s, index = free[0]
        begin = t if free_s <= t else free_s
        others = sum(1 for until, other in free if until > begin and other != index)
        took, cost = tables[index].draw(picks[k], others / (len(free) - 1) if others else 0.0)
        heapq.heapreplace(free, (begin + took, index))
        server[k], epoch[k], start_s[k], service_s[k], cpu_s[k] = index, now, begin, took, cost
    return Replay(arrival_s, server, start_s, service_s, cpu_s, epoch)


def poisson_arrivals(rate_rps: float, n: int, seed: int) -> FloatArray:
    """``n`` arrival times of a Poisson process from time 0, seconds; the same for the same seed."""
    gaps = np.random.default_rng([seed, 0]).exponential(1.0, n)
    return np.asarray(np.cumsum(gaps) / rate_rps)


def uniform_draws(n: int, seed: int) -> FloatArray:
    """``n`` numbers in [0, 1), independent of :func:`poisson_arrivals` of the same seed."""
    return np.asarray(np.random.default_rng([seed, 1]).random(n))


def capacity_rps(instances: Sequence[SliceProfile]) -> float:
    """Requests a second that the instances can serve when all are busy."""
    return sum(1.0 / item.loaded.mean_s for item in instances)


@dataclass(frozen=True, slots=True)
class _Table:
    """Samples of one instance as plain lists: indexing them costs a tenth of indexing arrays."""

    alone_s: list[float]
    alone_cpu_s: list[float]
    loaded_s: list[float]
    loaded_cpu_s: list[float]

    @classmethod
    def of(cls, item: SliceProfile) -> _Table:
        return cls(*_columns(item.alone), *_columns(item.loaded))

    def draw(self, pick: float, loaded_ratio: float) -> tuple[float, float]:
        """Seconds and CPU seconds of one request, between alone and loaded as the neighbours are."""
        a, b = int(pick * len(self.alone_s)), int(pick * len(self.loaded_s))
        alone_s, cost_s = self.alone_s[a], self.alone_cpu_s[a]
        return (
            alone_s + (self.loaded_s[b] - alone_s) * loaded_ratio,
            cost_s + (self.loaded_cpu_s[b] - cost_s) * loaded_ratio,
        )


def _columns(timings: Timings) -> tuple[list[float], list[float]]:
    order = np.argsort(timings.service_s, kind="stable")
    return timings.service_s[order].tolist(), timings.cpu_s[order].tolist()
