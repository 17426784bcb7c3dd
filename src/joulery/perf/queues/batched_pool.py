"""A pool of instances that pull batches from one FIFO: the dispatch of the embedded engine with ``max_batch``.

The instance that is idle longest takes the oldest request and with it those that wait behind it, up to its batch. With
a batching delay a batch that is not full waits until its oldest request has waited for so long. Without batches this is
:mod:`joulery.perf.queues.fifo_pool`.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class BatchInstance:
    """One instance's service times.

    Attributes:
        sizes: Measured sizes of a batch, increasing from 1; the last is its largest batch.
        work_s: Of each size, the seconds of a batch while every neighbour is busy, one for each request that may begin
            it.
        alone_ratio: The same while every neighbour is idle, as a ratio.
    """

    sizes: Sequence[int]
    work_s: Sequence[Sequence[float]]
    alone_ratio: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class BatchRun:
    """Times, instance and batch of each request, in order of arrival.

    Attributes:
        start_s: When an instance took it, float64[n], seconds.
        service_s: How long its batch took, float64[n], seconds.
        instance: The instance that served it, int64[n].
        batch: Requests in its batch, int64[n].
        first: The request that began its batch, int64[n].
        busy_ratio: Share of the neighbours that were busy as it started, float64[n].
    """

    start_s: FloatArray
    service_s: FloatArray
    instance: IntArray
    batch: IntArray
    first: IntArray
    busy_ratio: FloatArray


def serve_batches(arrival_s: Sequence[float], instances: Sequence[BatchInstance], delay_s: float = 0.0) -> BatchRun:
    """Serve every request; none is lost, none is served twice.

    Args:
        arrival_s: When each request arrives, seconds, not decreasing.
        instances: The pool, one or more; at equal idle time the first listed goes first.
        delay_s: How long a batch that is not full waits for more requests.
    """
    requests, neighbours = len(arrival_s), max(1, len(instances) - 1)
    free = sorted((-math.inf, index) for index in range(len(instances)))
    rows: list[tuple[float, float, int, int, int, float]] = []
    at = 0
    while at < requests:
        free_s, server = free.pop(0)
        one, arrival = instances[server], arrival_s[at]
        full = at + one.sizes[-1] - 1
        filled_s = arrival_s[full] if full < requests else math.inf
        start_s = max(free_s, min(filled_s, arrival + delay_s))
        end = min(bisect_right(arrival_s, start_s, at), at + one.sizes[-1])
        busy = (len(free) - bisect_right(free, (start_s, len(instances)))) / neighbours
        service_s = batch_value(one.sizes, one.work_s, at, end - at) * (one.alone_ratio + (1 - one.alone_ratio) * busy)
        insort(free, (start_s + service_s, server))
        rows += [(start_s, service_s, server, end - at, at, busy)] * (end - at)
        at = end
    start, service, server_of, batch, first, crowd = np.array(rows, np.float64).reshape(-1, 6).T
    whole = [column.astype(np.int64) for column in (server_of, batch, first)]
    return BatchRun(start, service, whole[0], whole[1], whole[2], crowd)


def batch_value(sizes: Sequence[int], values: Sequence[Sequence[float]], request: int, batch: int) -> float:
    """A batch's value, interpolated linearly between measured sizes.

    Args:
        sizes: Measured sizes, increasing from 1.
        values: Values of each size, one for each request that may begin a batch.
        request: The request that begins it.
        batch: Requests in it, at most the largest size.
    """
    upper = next(index for index, size in enumerate(sizes) if size >= batch)
    high = values[upper][request]
    if sizes[upper] == batch:
        return high
    low, step = values[upper - 1][request], sizes[upper] - sizes[upper - 1]
    return low + (high - low) * (batch - sizes[upper - 1]) / step
