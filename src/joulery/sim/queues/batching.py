"""One instance that serves in batches: when each batch forms, starts and finishes.

Requests queue. A batch forms when ``batch`` requests wait (they load while the batch before executes: one batch
executes, one loads), or, if fewer wait, when the instance would otherwise idle and the oldest has waited
``max_delay_s``. Two well-known rules are special cases: an infinite delay is *wait for a full batch*, a delay of zero
is *greedy* batching.

:func:`serve_timed` assumes that the times of a batch depend on its size and its own noise alone (neighbours always
on, as the planner assumes); full batches are then solved in closed form. For neighbours that execute only at times see
:mod:`joulery.sim.placement.colocation`, which runs the same rule event by event.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchRule:
    """Rule for forming a batch.

    Attributes:
        batch: Largest batch, 1 or more.
        max_delay_s: How long the oldest request waits for a batch to fill before a smaller one forms; 0 is greedy,
            infinity waits for a full batch.
    """

    batch: int
    max_delay_s: float = math.inf

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError("a batch holds one request or more", got=str(self.batch))
        if not self.max_delay_s >= 0:
            raise ConfigError("a batching delay is 0 or more", got=f"{self.max_delay_s} s")


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The batches of one instance, in order; requests are served in order, ``size`` at a time.

    Attributes:
        size: Requests in each batch, int64[m].
        start_s: When each begins to execute, float64[m], seconds.
        finish_s: When its answers are back.
    """

    size: IntArray
    start_s: FloatArray
    finish_s: FloatArray

    @property
    def served(self) -> int:
        """Number of answered requests; these are the first to have arrived."""
        return int(self.size.sum())

    def answered_s(self) -> FloatArray:
        """Time at which each answered request was answered, float64[served]."""
        return np.repeat(self.finish_s, self.size)


def serve_timed(
    arrival_s: FloatArray, rule: BatchRule, load_s: Sequence[float], busy_s: Sequence[float], noise: FloatArray
) -> Batches:
    """Serve every request whose batch ever forms.

    Args:
        arrival_s: float64[n], non-decreasing.
        rule: When batches form.
        load_s: Loading time of a batch of 1, 2 ... ``rule.batch`` requests.
        busy_s: Time such a batch occupies the instance.
        noise: Factor on ``busy_s`` of the first, second ... batch, float64[n].

    Returns:
        The batches; with an infinite delay the last few requests may stay unserved.
    """
    if rule.max_delay_s == math.inf:
        return _full_batches(arrival_s, rule.batch, load_s[-1], busy_s[-1], noise)
    return _delayed_batches(arrival_s.tolist(), rule, load_s, busy_s, noise.tolist())


def _full_batches(arrival_s: FloatArray, batch: int, load_s: float, busy_s: float, noise: FloatArray) -> Batches:
    """Lindley's recursion as running sums: a batch may not load before the one before it executes."""
    ready = arrival_s[batch - 1 :: batch] + load_s
    busy = busy_s * noise[: len(ready)]
    pace = np.maximum(busy, load_s)
    before = np.cumsum(pace) - pace
    start = before + np.maximum.accumulate(ready - before) if len(ready) else ready
    return Batches(
        readonly(np.full(len(ready), batch), np.int64), readonly(start, np.float64), readonly(start + busy, np.float64)
    )


def _delayed_batches(
    arrival: list[float], rule: BatchRule, load_s: Sequence[float], busy_s: Sequence[float], noise: list[float]
) -> Batches:
    sizes: list[int] = []
    starts: list[float] = []
    finishes: list[float] = []
    count, batch, delay_s = len(arrival), rule.batch, rule.max_delay_s
    first, start_s, free_s = 0, -math.inf, -math.inf
    while first < count:
        full_s = max(arrival[first + batch - 1], start_s) if first + batch <= count else math.inf
        patience_s = max(free_s, arrival[first] + delay_s)
        if full_s <= patience_s:
            size, formed_s = batch, full_s
        else:
            size, formed_s = bisect_right(arrival, patience_s, first) - first, patience_s
        start_s = max(formed_s + load_s[size - 1], free_s)
        free_s = start_s + busy_s[size - 1] * noise[len(sizes)]
        sizes.append(size)
        starts.append(start_s)
        finishes.append(free_s)
        first += size
    return Batches(readonly(sizes, np.int64), readonly(starts, np.float64), readonly(finishes, np.float64))
