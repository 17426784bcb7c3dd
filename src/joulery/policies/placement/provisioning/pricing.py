"""Which patterns are worth more than a GPU costs: branch and bound over sets of items, a whole level at a time.

Items are taken in one order, those that need most first, so every pattern is met once. A partial pattern is given up
when even the best completion (items cut at will into the room that is left, each as small as it could be there) is
worth no more than the threshold. Without a beam nothing else is given up, so what is found is everything: that makes
the bound of column generation valid. With a beam only the most promising partial patterns of each level go on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.provisioning.packing import NEVER, IntArray, More, Packing, Pattern

_CHUNK = 2_000_000
"""Numbers in the largest intermediate array."""


class Found(NamedTuple):
    """What a search found.

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
        self._rank = np.argsort(self._order)

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
            threshold: What a pattern must exceed.
            beam: Partial patterns kept a level; all when left out.
            nodes_max: Partial patterns looked at before the search is given up as incomplete.
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
                level = level.where(np.sort(np.argpartition(-more, beam)[:beam]))
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
        """What newcomers need and what room is left once the pattern is worth the threshold.

        Only completions worth ``missing`` more matter, and those bring at least so much power, cache use and so many
        processes as the cheapest of the allowed items do for their value.
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
        """Some of them."""
        return _Level(self.patterns[chosen], self.values[chosen])


def _named(level: _Level) -> list[tuple[float, Pattern]]:
    return [
        (float(value), tuple(sorted(map(int, pattern))))
        for value, pattern in zip(level.values, level.patterns, strict=True)
    ]


def _fractional(density: FloatArray, units: IntArray, room: IntArray) -> FloatArray:
    """Value of the room filled by density, items cut at will: the largest ``capacity`` densities suffice."""
    top = min(density.shape[1], 48)
    chosen = np.argpartition(-density, top - 1, axis=1)[:, :top]
    best = np.take_along_axis(density, chosen, axis=1)
    chosen = np.take_along_axis(chosen, np.argsort(-best, axis=1, kind="stable"), axis=1)
    best = np.take_along_axis(density, chosen, axis=1)
    filled = np.minimum(np.cumsum(np.take_along_axis(units, chosen, axis=1), axis=1), room[:, None])
    return np.asarray((np.diff(filled, axis=1, prepend=0) * best).sum(axis=1), np.float64)
