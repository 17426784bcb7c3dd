"""Replay of requests through a pool of measured instances, with service times sampled from profiles.

The queue is :mod:`joulery.perf.queues.fifo_pool`; an instance runs slower while its neighbours on the device are busy.
Validated against M/M/1, M/M/c and M/D/1 (tests/perf/queues/test_pull_queue.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.serving.profile import SliceProfile, Timings
from joulery.perf.queues.batched_pool import BatchInstance, batch_value, serve_batches
from joulery.perf.queues.fifo_pool import PoolInstance, serve


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Times, instance and CPU seconds of each request, in order of arrival.

    Attributes:
        arrival_s: When it arrived, float64[n].
        server: The instance that answered, index into the layout then in force, int64[n].
        start_s: When it was taken, float64[n].
        service_s: How long it took, float64[n].
        cpu_s: CPU seconds it cost, float64[n].
        epoch: The layout in force, index into the sequence given, int64[n].
    """

    arrival_s: FloatArray
    server: IntArray
    start_s: FloatArray
    service_s: FloatArray
    cpu_s: FloatArray
    epoch: IntArray

    @property
    def end_s(self) -> FloatArray:
        """Time of each answer, float64[n]."""
        return np.asarray(self.start_s + self.service_s)

    @property
    def latency_s(self) -> FloatArray:
        """Arrival to answer, float64[n]."""
        return np.asarray(self.end_s - self.arrival_s)


def replay(
    arrival_s: FloatArray,
    picks: FloatArray,
    layouts: Sequence[tuple[float, Sequence[SliceProfile]]],
    delay_s: float = 0.0,
) -> Replay:
    """Replay requests through the queue, in batches where the profile has times of batches.

    Args:
        arrival_s: Arrival times, not decreasing, float64[n].
        picks: One number in [0, 1) a request that selects its service time; equal picks make comparisons paired.
        layouts: ``(from_s, instances)`` in order of time; the first holds from the beginning. A request is answered by
            the layout in force when it arrives; instances of a new layout start idle.
        delay_s: Time that a batch that is not full waits for more requests.
    """
    n = len(arrival_s)
    server, epoch = np.empty(n, np.int64), np.zeros(n, np.int64)
    start_s, service_s, cpu_s = np.empty(n), np.empty(n), np.empty(n)
    begins = [0, *np.searchsorted(arrival_s, [from_s for from_s, _ in layouts[1:]], "left").tolist(), n]
    for number, (_, items) in enumerate(layouts):
        part = slice(begins[number], max(begins[number], begins[number + 1]))
        part_picks = picks[part]
        if any(item.batches for item in items):
            epoch[part] = number
            found = _replay_batches(arrival_s[part], part_picks, items, delay_s)
            server[part], start_s[part], service_s[part], cpu_s[part] = found
            continue
        tables: dict[int, _Sampled] = {}
        for item in items:
            tables.setdefault(id(item), _Sampled.of(item, part_picks, len(items) - 1))
        mine = [tables[id(item)] for item in items]
        run = serve(arrival_s[part].tolist(), [PoolInstance(one.alone_s, one.stretch_s) for one in mine])
        server[part], epoch[part], start_s[part] = run.instance, number, run.start_s
        service_s[part] = run.service_s
        busy = np.array(run.busy, np.int64)
        for index, one in enumerate(mine):
            here = run.instance == index
            cpu_s[part][here] = one.alone_cpu_s[here] + one.stretch_cpu_s[here] * busy[here]
    return Replay(arrival_s, server, start_s, service_s, cpu_s, epoch)


def _replay_batches(
    arrival_s: FloatArray, picks: FloatArray, items: Sequence[SliceProfile], delay_s: float
) -> tuple[IntArray, FloatArray, FloatArray, FloatArray]:
    """Instance, start, seconds and part of the CPU seconds of each request in one layout with batches."""
    tables: dict[int, tuple[BatchInstance, list[list[float]], float]] = {}
    for item in items:
        if id(item) not in tables:
            sizes = [1, *sorted(item.batches)]
            picked = [_picked(item.batches.get(size, item.loaded), picks) for size in sizes]
            alone_ratio = item.alone.mean_s / item.loaded.mean_s if len(items) > 1 else 1.0
            cpu_ratio = item.alone.mean_cpu_s / item.loaded.mean_cpu_s if item.loaded.mean_cpu_s > 0 else 1.0
            one = BatchInstance(sizes, [times.tolist() for times, _ in picked], alone_ratio)
            tables[id(item)] = one, [cpus.tolist() for _, cpus in picked], cpu_ratio if len(items) > 1 else 1.0
    mine = [tables[id(item)] for item in items]
    run = serve_batches(arrival_s.tolist(), [one for one, _, _ in mine], delay_s)
    cpu_s = np.empty(len(arrival_s))
    for index, first in enumerate(run.first.tolist()):
        one, cpus, cpu_ratio = mine[run.instance[index]]
        size = int(run.batch[index])
        busy = cpu_ratio + (1 - cpu_ratio) * run.busy_ratio[index]
        cpu_s[index] = batch_value(one.sizes, cpus, first, size) * busy / size
    return run.instance, run.start_s, run.service_s, cpu_s


def poisson_arrivals(rate_rps: float, n: int, seed: int) -> FloatArray:
    """``n`` arrival times of a Poisson process from time 0, seconds; the same for the same seed."""
    gaps = np.random.default_rng([seed, 0]).exponential(1.0, n)
    return np.asarray(np.cumsum(gaps) / rate_rps)


def uniform_draws(n: int, seed: int) -> FloatArray:
    """``n`` numbers in [0, 1), independent of :func:`poisson_arrivals` of the same seed."""
    return np.asarray(np.random.default_rng([seed, 1]).random(n))


def capacity_rps(instances: Sequence[SliceProfile]) -> float:
    """Requests a second that the instances can serve when all are busy, in their best batches."""
    return sum(1.0 / item.each_s for item in instances)


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    """Seconds and CPU seconds of each request on one instance: alone, and the increase per busy neighbour."""

    alone_s: list[float]
    stretch_s: list[float]
    alone_cpu_s: FloatArray
    stretch_cpu_s: FloatArray

    @classmethod
    def of(cls, item: SliceProfile, picks: FloatArray, neighbours: int) -> _Sampled:
        """Sample a profile; with every neighbour busy a request takes as long as measured under load."""
        alone_s, alone_cpu_s = _picked(item.alone, picks)
        loaded_s, loaded_cpu_s = _picked(item.loaded, picks)
        each = 1.0 / neighbours if neighbours else 0.0
        stretch_s = ((loaded_s - alone_s) * each).tolist()
        return cls(alone_s.tolist(), stretch_s, alone_cpu_s, (loaded_cpu_s - alone_cpu_s) * each)


def _picked(timings: Timings, picks: FloatArray) -> tuple[FloatArray, FloatArray]:
    order = np.argsort(timings.service_s, kind="stable")
    at = order[(picks * len(order)).astype(np.int64)]
    return timings.service_s[at], timings.cpu_s[at]
