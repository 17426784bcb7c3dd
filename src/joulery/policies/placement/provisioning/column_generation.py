"""Column generation: the cheapest mix of patterns of one GPU, and a proven lower bound on the cost of any mix.

The master problem prices one more service of each kind. A search finds patterns worth more than their GPU at these
prices and adds them, until none is left. The bound does not need that end: the prices are scaled until no pattern is
worth more than its GPU; the worth of all services at these prices is then a lower bound on any plan (Farley, 1990).

The search is branch and bound over sets of items, a whole level at a time. Items are added in one order, those that
need most first, so every pattern is visited once. A partial pattern is dropped when even its best completion (with
fractions of items in the room that is left, each as small as it could be there) is worth no more than the threshold.
Without a beam nothing else is dropped, so the search finds every such pattern: this makes the bound valid. With a beam
only the most promising partial patterns of each level continue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, largest
from joulery.domain.gpu.provisioning import PlanBound
from joulery.policies.placement.master import Master, PricedPattern, Relaxation, Whole
from joulery.policies.placement.provisioning.gpu_shares import Placed
from joulery.policies.placement.provisioning.packing import (
    NEVER,
    IntArray,
    More,
    Packing,
    Pattern,
    Problem,
    Range,
)

_CHUNK = 2_000_000
"""Numbers in the largest intermediate array."""
_ALMOST = 0.03
"""Patterns that are worth less than their GPU by at most this part of its price are added at the end."""
_TRIES = 3
"""Patterns tried for each one wanted; the bound lets some through that do not fit."""
_WIDE = 4
"""Factor on the beam and on the patterns of that last search."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits on the work of a search: counts rather than seconds, so that the same input gives the same plan.

    Attributes:
        patience: Rounds of column generation that may pass without a gain of a quarter of ``gap_ratio``.
        beam: Partial patterns kept a level while looking for new patterns.
        nodes: Partial patterns checked for the bound, at most.
        patterns: New patterns a round and GPU type.
        gap_ratio: Relative gap at which a bound is close enough.
        branchings: Nodes after which the integer solver stops.
        seconds: Time after which it stops at the latest; a plan that took that long may differ between runs.
    """

    patience: int = 5
    beam: int = 200
    nodes: int = 100_000
    patterns: int = 60
    gap_ratio: float = 0.002
    branchings: int = 20_000
    seconds: float = 20.0


class Found(NamedTuple):
    """Result of a search.

    Attributes:
        patterns: Patterns worth more than the threshold, the most valuable first.
        values: Their values.
        complete: Whether there are no others.
    """

    patterns: tuple[Pattern, ...]
    values: tuple[float, ...]
    complete: bool


class Pricer:
    """Searches the patterns of one GPU type.

    Attributes:
        packing: The type and its items.
        copies: How many of each item one pattern may hold, int64[items].
    """

    def __init__(self, packing: Packing, copies: IntArray) -> None:
        self.packing = packing
        self.copies = copies
        fits = np.where(packing.alone < NEVER, packing.alone, -1)
        self._order = np.argsort(-fits, kind="stable")
        self._rank = np.argsort(self._order, kind="stable")

    def search(
        self,
        values: FloatArray,
        threshold: float,
        *,
        beam: int | None = None,
        nodes_max: int = 400_000,
    ) -> Found:
        """Patterns that could fit, by the bound, and are worth more than ``threshold``.

        Args:
            values: Value of each item, float64[items].
            threshold: Value that a pattern must exceed.
            beam: Partial patterns kept a level; all when left out.
            nodes_max: Partial patterns checked before the search is given up as incomplete.
        """
        worth = values > 1e-12
        start = self._order[worth[self._order] & (self.packing.alone[self._order] < NEVER)]
        level = _Level(start[:, None], values[start])
        hits: list[tuple[float, Pattern]] = []
        nodes, complete = 0, True
        while len(level.values):
            nodes += len(level.values)
            if nodes > nodes_max:
                complete = False
                break
            level, more = self._children(level, values, threshold, hits)
            if beam is not None and len(more) > beam:
                complete = False
                level = level.where(largest(more, beam))
        hits.sort(key=lambda hit: (-hit[0], hit[1]))
        return Found(tuple(pattern for _, pattern in hits), tuple(value for value, _ in hits), complete)

    def _children(
        self, level: _Level, values: FloatArray, threshold: float, hits: list[tuple[float, Pattern]]
    ) -> tuple[_Level, FloatArray]:
        """The partial patterns one larger that may still exceed the threshold, and how much they may be worth."""
        size = max(1, _CHUNK // (len(values) * 4))
        levels, bounds = [], []
        for first in range(0, len(level.values), size):
            chunk = level.where(slice(first, first + size))
            room = self.packing.capacity - self.packing.least(chunk.patterns).sum(axis=1)
            memory = self.packing.memory_bytes[chunk.patterns].sum(axis=1)
            fits = (room >= 0) & (memory <= self.packing.memory_limit_bytes)
            chunk, room = chunk.where(fits), room[fits]
            hits += _named(chunk.where(chunk.values > threshold))
            if len(room):
                child, bound = self._grown(chunk, room, values, threshold)
                levels.append(child)
                bounds.append(bound)
        if not levels:
            return level.where(slice(0, 0)), np.empty(0)
        patterns = np.concatenate([child.patterns for child in levels])
        return _Level(patterns, np.concatenate([child.values for child in levels])), np.concatenate(bounds)

    def _grown(self, level: _Level, room: IntArray, values: FloatArray, threshold: float) -> tuple[_Level, FloatArray]:
        needed = self.packing.newcomers(level.patterns)
        left = self._left(level.patterns)
        rank = self._rank[None, :]
        allowed = (rank >= rank[0, level.patterns[:, -1]][:, None]) & (needed <= room[:, None]) & (left > 0)
        allowed &= values[None, :] > 1e-12
        missing = np.maximum(threshold - level.values, 0.0)[:, None]
        if level.patterns.shape[1] > 0:
            needed, room = self._with_company(level, allowed, values, missing, needed, room)
            allowed &= needed <= room[:, None]
        density = np.where(allowed, values[None, :] / needed, 0.0)
        most = level.values + _fractional(density, needed * left, room)
        alive = most > threshold
        level, room, needed, allowed, density = (
            level.where(alive),
            room[alive],
            needed[alive],
            allowed[alive],
            density[alive],
        )
        by_rank = density[:, self._order]
        best_after = np.maximum.accumulate(by_rank[:, ::-1], axis=1)[:, ::-1][:, self._rank]
        bound = level.values[:, None] + values[None, :] + (room[:, None] - needed) * best_after
        parent, item = np.nonzero(allowed & (bound > threshold))
        patterns = np.concatenate([level.patterns[parent], item[:, None]], axis=1)
        return _Level(patterns, level.values[parent] + values[item]), bound[parent, item]

    def _with_company(
        self,
        level: _Level,
        allowed: npt.NDArray[np.bool_],
        values: FloatArray,
        missing: FloatArray,
        needed: IntArray,
        room: IntArray,
    ) -> tuple[IntArray, IntArray]:
        """Units that newcomers need, and the room that is left once the pattern is worth the threshold.

        Only completions worth ``missing`` more matter. They add at least the power, the cache use and the processes
        that the allowed items with the least of each for their value would add.
        """
        packing = self.packing
        worth = np.where(allowed, values[None, :], np.nan)
        none = ~allowed.any(axis=1)
        worth[none] = 1.0
        per_w = np.nanmin(packing.power_w[None, :] / worth, axis=1, keepdims=True)
        per_percent = np.maximum(np.nanmin(packing.cache_percent[None, :] / worth, axis=1, keepdims=True), 0.0)
        room = packing.capacity - packing.least(level.patterns, More(missing * per_w, missing * per_percent, 1)).sum(
            axis=1
        )
        others = np.maximum(missing - values[None, :], 0.0)
        return packing.newcomers(level.patterns, More(others * per_w, others * per_percent, 0)), room

    def _left(self, patterns: IntArray) -> IntArray:
        """Copies of each item that may still join each pattern."""
        used = np.zeros((len(patterns), len(self.copies)), np.int64)
        np.add.at(used, (np.repeat(np.arange(len(patterns)), patterns.shape[1]), patterns.ravel()), 1)
        left = np.asarray(self.copies[None, :] - used, np.int64)
        if self.packing.rivals is not None:
            left[self.packing.rivals[patterns].any(axis=1)] = 0
        return left


class _Level(NamedTuple):
    """Partial patterns of one size, int64[m, n], items in the order of the search, and their values."""

    patterns: IntArray
    values: FloatArray

    def where(self, chosen: slice | npt.NDArray[Any]) -> _Level:
        """The chosen patterns with their values."""
        return _Level(self.patterns[chosen], self.values[chosen])


def _named(level: _Level) -> list[tuple[float, Pattern]]:
    return [
        (float(value), tuple(sorted(map(int, pattern))))
        for value, pattern in zip(level.values, level.patterns, strict=True)
    ]


def _fractional(density: FloatArray, units: IntArray, room: IntArray) -> FloatArray:
    """Value of the room filled by density, with fractions of items: the largest ``capacity`` densities suffice."""
    top = min(density.shape[1], 48)
    chosen = np.sort(np.argpartition(-density, top - 1, axis=1)[:, :top], axis=1)  # the same sums on every processor
    best = np.take_along_axis(density, chosen, axis=1)
    chosen = np.take_along_axis(chosen, np.argsort(-best, axis=1, kind="stable"), axis=1)
    best = np.take_along_axis(density, chosen, axis=1)
    filled = np.minimum(np.cumsum(np.take_along_axis(units, chosen, axis=1), axis=1), room[:, None])
    return np.asarray((np.diff(filled, axis=1, prepend=0) * best).sum(axis=1), np.float64)


class Generator:
    """Patterns, prices and bounds for one problem; ``ranges`` replaces its ranges of GPUs.

    With ``replicas_max``, services are divided into no more than that many replicas (more where they need more);
    bounds hold for such plans only.

    Attributes:
        master: The patterns so far.
    """

    def __init__(
        self,
        problem: Problem,
        effort: Effort,
        *,
        ranges: Sequence[Range] | None = None,
        replicas_max: int | None = None,
    ) -> None:
        items, demand = problem.items, problem.demand
        self._packings, self._effort = problem.packings, effort
        self._ranges = tuple(problem.ranges if ranges is None else ranges)
        prices = [packing.gpu_type.usd_per_hour for packing in self._packings]
        self.master = Master([(item.kind, item.replicas) for item in items], demand, self._ranges, prices)
        self._demand = np.array(demand, np.float64)
        self._kind = np.array([item.kind for item in items])
        self._part = np.array([1.0 / item.replicas for item in items])
        if replicas_max is not None:
            fewest = [min(item.replicas for item in items if item.kind == kind) for kind in range(len(demand))]
            over = [item.replicas > max(replicas_max, fewest[item.kind]) for item in items]
            self._part[over] = 0.0
        self._copies = np.array([1 if item.apart else item.replicas * demand[item.kind] for item in items], np.int64)
        self._pricers = [Pricer(packing, np.minimum(self._copies, packing.capacity)) for packing in self._packings]
        for index in range(len(self._packings)):
            for item in range(len(items)):
                self._add(index, (item,))

    def restrict(self, ranges: Sequence[Range]) -> Relaxation:
        """The relaxation with another range of GPUs for each type."""
        self._ranges = tuple(ranges)
        self.master.restrict(ranges)
        return self.master.relax()

    def generate(self, relaxation: Relaxation) -> Relaxation:
        """Add patterns until a narrow search finds none worth its GPU, or the relaxation hardly falls any more."""
        stale, best = 0, relaxation.usd_per_hour
        while stale < self._effort.patience:
            added = 0
            for index in self._wanted():
                found = self._pricers[index].search(
                    self._values(relaxation), self._price(index, relaxation) * (1 + 1e-6), beam=self._effort.beam
                )
                added += self._add_some(index, found.patterns, self._effort.patterns)
            if not added:
                break
            relaxation = self.master.relax()
            fell = relaxation.usd_per_hour < best * (1 - self._effort.gap_ratio / 4)
            stale, best = (0, relaxation.usd_per_hour) if fell else (stale + 1, best)
        return relaxation

    def prove(self, relaxation: Relaxation, gap_ratio: float) -> tuple[float, bool]:
        """A bound from a complete search, and whether that search found patterns that lower the relaxation.

        Args:
            relaxation: The prices to prove with.
            gap_ratio: Ratio by which a layout may be worth more than its GPU; it lowers the bound as much.

        Returns:
            Lower bound on any plan in dollars an hour, in whole numbers or not; 0 when the search was given up.
        """
        values, scale, added = self._values(relaxation), 1.0, 0
        for index in self._wanted():
            packing, price = self._packings[index], self._price(index, relaxation)
            threshold = price * (1 + gap_ratio)
            found = self._pricers[index].search(values, threshold, nodes_max=self._effort.nodes)
            if not found.complete:
                return 0.0, False
            possible = (
                value for value, one in zip(found.values, found.patterns, strict=True) if not packing.impossible(one)
            )
            scale = min(scale, price / max(threshold, next(possible, 0.0)))
            added += self._add_some(index, found.patterns, self._effort.patterns)
        return self._farley(relaxation, scale), added > 0

    def _farley(self, relaxation: Relaxation, scale: float) -> float:
        """Lower bound of a plan's cost, when no pattern is worth more than its GPU at the values times ``scale``."""
        most = np.array([0.0 if high is None else float(high) for _, high in self._ranges])
        least = np.array([float(low) for low, _ in self._ranges])
        rebates = relaxation.rebates
        ranges = float(np.maximum(rebates, 0.0) @ least + np.minimum(rebates, 0.0) @ most)
        return scale * float(self._demand @ relaxation.values) + ranges

    def whole(self) -> Whole:
        """The cheapest whole numbers of GPUs over the patterns so far."""
        return self.master.whole(seconds=self._effort.seconds, branchings=self._effort.branchings)

    def enrich(self, relaxation: Relaxation) -> int:
        """Add patterns worth almost their GPU, which whole numbers may need; returns how many."""
        added = 0
        for index in self._wanted():
            threshold = self._price(index, relaxation) * (1 - _ALMOST)
            found = self._pricers[index].search(self._values(relaxation), threshold, beam=_WIDE * self._effort.beam)
            added += self._add_some(index, found.patterns, _WIDE * self._effort.patterns)
        return added

    def _wanted(self) -> list[int]:
        """The GPU types that a plan may use."""
        return [index for index, (_, high) in enumerate(self._ranges) if high != 0]

    def _add(self, index: int, pattern: Pattern) -> bool:
        """Add a pattern to the master problem, if it fits and is new."""
        packing = self._packings[index]
        fits = packing.fit(pattern) is not None
        return fits and self.master.add(PricedPattern(index, packing.gpu_type.usd_per_hour, pattern))

    def _add_some(self, index: int, patterns: Sequence[Pattern], most: int) -> int:
        added = 0
        for pattern in patterns[: _TRIES * most]:
            added += self._add(index, pattern)
            if added >= most:
                break
        return added

    def _values(self, relaxation: Relaxation) -> FloatArray:
        return np.asarray(relaxation.values[self._kind] * self._part, np.float64)

    def _price(self, index: int, relaxation: Relaxation) -> float:
        return max(self._packings[index].gpu_type.usd_per_hour - float(relaxation.rebates[index]), 1e-9)


def volume(problem: Problem) -> float:
    """Dollars an hour for the shares or the memory that services need alone, as if GPUs could be divided at will."""
    shares, memory = ([math.inf] * len(problem.kinds) for _ in range(2))
    for index, item in enumerate(problem.items):
        for packing in problem.packings:
            if packing.alone[index] <= packing.capacity:
                usd = packing.gpu_type.usd_per_hour * item.replicas
                share = float(packing.alone[index]) / packing.capacity
                shares[item.kind] = min(shares[item.kind], usd * share)
                memory[item.kind] = min(memory[item.kind], usd * item.memory_bytes / packing.memory_limit_bytes)
    return max(math.fsum(usd * n for usd, n in zip(each, problem.demand, strict=True)) for each in (shares, memory))


def attainable(problem: Problem, usd_per_hour: float, ranges: Sequence[Range]) -> float:
    """The least cost of whole numbers of GPUs within the ranges that is not below ``usd_per_hour``.

    Computed for one or two types; the value itself for more.
    """
    wanted = usd_per_hour * (1 - 1e-9)
    prices = [gpu_type.usd_per_hour for gpu_type in problem.types]
    if len(prices) > 2 or wanted <= 0:
        return usd_per_hour
    (last_low, last_high), last = ranges[-1], prices[-1]
    first_low, first_high = ranges[0] if len(prices) == 2 else (0, 0)
    most = math.ceil(wanted / prices[0])
    costs = []
    for count in range(first_low, max(first_low, most if first_high is None else min(most, first_high)) + 1):
        rest = max(last_low, math.ceil((wanted - count * prices[0]) / last))
        if last_high is None or rest <= last_high:
            costs.append(count * prices[0] * (len(prices) - 1) + rest * last)
    return min(costs, default=usd_per_hour)


def cost_of(problem: Problem, gpus: Sequence[Placed]) -> float:
    """Cost of some GPUs, dollars an hour."""
    return math.fsum(problem.types[gpu.type_index].usd_per_hour for gpu in gpus)


def bound_of(problem: Problem, usd_per_hour: float, relaxed_usd_per_hour: float, method: str) -> PlanBound:
    """The bound on the cost, and on the number of GPUs that follows from it."""
    dearest = max(gpu_type.usd_per_hour for gpu_type in problem.types)
    return PlanBound(math.ceil(usd_per_hour / dearest - 1e-6), usd_per_hour, relaxed_usd_per_hour, method)


def cuts_of(problem: Problem) -> str:
    """The choices within which a bound holds, as text."""
    most = max(item.replicas for item in problem.items)
    return "services whole" if most == 1 else f"up to {most} replicas a service"


def least_gpus(problem: Problem) -> int:
    """Lower bound on the GPUs of any plan: the shares that the services need alone, rounded up."""
    least = [math.inf] * len(problem.kinds)
    for index, item in enumerate(problem.items):
        for packing in problem.packings:
            if packing.alone[index] <= packing.capacity:
                share = float(packing.alone[index]) / packing.capacity * item.replicas
                least[item.kind] = min(least[item.kind], share)
    return math.ceil(math.fsum(share * n for share, n in zip(least, problem.demand, strict=True)) - 1e-9)
