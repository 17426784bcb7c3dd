"""Patterns worth more than their GPU, and a bound on all of them, from the knapsacks of :mod:`neighbourhoods`.

One search keeps its boxes, and what power and cache use cost in each, from call to call: prices of services change
little from round to round of column generation, so what was found for the last ones is nearly right for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import Knapsacks, SizeTable, Worth
from joulery.policies.placement.provisioning.packing import IntArray, Pattern

_SCALE_W, _SCALE_PERCENT = 300.0, 60.0
"""Size of power and cache use on a GPU: makes steps of their prices comparable."""
_PER_W_MAX, _PER_PERCENT_MAX = 0.03, 0.15
"""Highest prices: a whole GPU for a tenth of its power or cache use."""
_STEPS = 5
"""Steps of the prices before the boxes that are still open are cut in two."""
_OPEN_SIDE_W, _OPEN_SIDE_PERCENT = 80.0, 24.0
"""Where an endless box is cut, from its low side."""
_SPEED_PER_W, _STRETCH_PER_PERCENT = 7e-4, 2.2e-3
"""What a watt and a percent change in the time of a process, about: decides along which side a box is cut."""


class Proof(NamedTuple):
    """What a search for a proof found.

    Attributes:
        most: No pattern is worth more, in prices of the GPU.
        patterns: Patterns met on the way.
    """

    most: float
    patterns: set[Pattern]


class BoxSearch:
    """Searches the patterns of one GPU type with two processes and more.

    Args:
        knapsacks: The type and its items.
        true_value: The value of a pattern at given values of the items if it fits, otherwise 0.
    """

    def __init__(self, knapsacks: Knapsacks, true_value: Callable[[Pattern, FloatArray], float]) -> None:
        self._knapsacks, self._true_value = knapsacks, true_value
        self._boxes = knapsacks.boxes()
        self._table = knapsacks.table(self._boxes)
        count = len(self._boxes.processes)
        self._per_w, self._per_percent = np.zeros(count), np.zeros(count)
        self._active: IntArray = np.arange(count)

    def priced_as(self, other: BoxSearch) -> BoxSearch:
        """Itself, its boxes, not cut so far, at the prices that ``other`` found for them."""
        self._per_w, self._per_percent = other._per_w.copy(), other._per_percent.copy()
        return self

    def choose(self, allowed: BoolArray) -> None:
        """Search patterns of these items only, bool[items]."""
        self._knapsacks.choose(allowed)
        self._active = np.arange(len(self._per_w))

    def round(self, values: FloatArray, target: float, *, everywhere: bool = False) -> set[Pattern]:
        """Patterns that may be worth more than ``target``, from the boxes that held some in the last round.

        Args:
            values: Value of each item, in prices of the GPU.
            target: What a pattern must exceed.
            everywhere: Whether every box is searched.
        """
        chosen = np.arange(len(self._per_w)) if everywhere or not len(self._active) else self._active
        worth = self._solve(chosen, values, target, self._per_w[chosen], self._per_percent[chosen])
        self._per_w[chosen], self._per_percent[chosen] = self._stepped(chosen, worth, target, np.ones(len(chosen)))
        self._active = chosen[worth.most > target]
        return {pattern for pattern in worth.patterns if pattern}

    def prove(self, values: FloatArray, target: float, work: int) -> Proof:
        """Bound what any pattern is worth, at ``target`` if possible, by pricing and cutting boxes.

        Args:
            values: Value of each item, in prices of the GPU.
            target: A bound this low is low enough.
            work: Boxes that may be solved, about.
        """
        patterns: set[Pattern] = set()
        most = np.full(len(self._boxes.processes), np.inf)
        fresh: IntArray = np.arange(len(most))
        while True:
            worth = self._solve(fresh, values, target, self._per_w[fresh], self._per_percent[fresh])
            work -= len(fresh) + self._priced(fresh, worth, values, target)
            most[fresh] = worth.most
            for pattern in set(worth.patterns) - patterns - {()}:
                patterns.add(pattern)
                target = max(target, self._true_value(pattern, values))
            open_boxes = np.flatnonzero(most > target * (1 + 1e-9))
            if not len(open_boxes) or work < 0:
                return Proof(float(most.max(initial=target)), patterns)
            most = np.concatenate([np.delete(most, open_boxes), np.full(2 * len(open_boxes), np.inf)])
            self._cut(open_boxes)
            fresh = np.arange(len(most) - 2 * len(open_boxes), len(most))

    def _priced(self, fresh: IntArray, worth: Worth, values: FloatArray, target: float) -> int:
        """Lower the bounds in ``worth`` by better prices of power and cache use; returns how many boxes were solved."""
        work, length = 0, np.ones(len(fresh))
        for _ in range(_STEPS):
            rows = np.flatnonzero(worth.most > target)
            if not len(rows):
                break
            boxes = fresh[rows]
            now = Worth(
                worth.most[rows], [worth.patterns[row] for row in rows], worth.power_w[rows], worth.cache_percent[rows]
            )
            per_w, per_percent = self._stepped(boxes, now, target, length[rows])
            tried = self._solve(boxes, values, target, per_w, per_percent)
            work += len(boxes)
            better = tried.most < now.most
            length[rows] *= np.where(better, 1.0, 0.4)
            for at in np.flatnonzero(better):
                row = rows[at]
                worth.most[row], worth.patterns[row] = tried.most[at], tried.patterns[at]
                worth.power_w[row], worth.cache_percent[row] = tried.power_w[at], tried.cache_percent[at]
            self._per_w[boxes] = np.where(better, per_w, self._per_w[boxes])
            self._per_percent[boxes] = np.where(better, per_percent, self._per_percent[boxes])
        return work

    def _solve(
        self, chosen: IntArray, values: FloatArray, target: float, per_w: FloatArray, per_percent: FloatArray
    ) -> Worth:
        table = SizeTable(self._table.units[chosen], self._table.ability[chosen])
        return self._knapsacks.solve(self._boxes.where(chosen), table, values, per_w, per_percent, target)

    def _stepped(
        self, chosen: IntArray, worth: Worth, target: float, length: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Prices a step further (Polyak, 1969): higher where the best pattern exceeds a limit of its box."""
        boxes = self._boxes.where(chosen)
        per_w, per_percent = self._per_w[chosen], self._per_percent[chosen]
        open_ = worth.most > target
        over_w = np.where(np.isfinite(boxes.power_high_w) & open_, worth.power_w - boxes.power_high_w, 0.0) / _SCALE_W
        over = np.where(np.isfinite(boxes.cache_high) & open_, worth.cache_percent - boxes.cache_high, 0.0)
        over /= _SCALE_PERCENT
        over_w, over = (
            np.where((over_w < 0) & (per_w <= 0), 0, over_w),
            np.where((over < 0) & (per_percent <= 0), 0, over),
        )
        square = over_w**2 + over**2
        step = np.where(square > 1e-12, length * (worth.most - target) / np.maximum(square, 1e-6), 0.0)
        return (
            np.clip(per_w + step * over_w / _SCALE_W, 0.0, _PER_W_MAX),
            np.clip(per_percent + step * over / _SCALE_PERCENT, 0.0, _PER_PERCENT_MAX),
        )

    def _cut(self, chosen: IntArray) -> None:
        """Cut boxes in two; the halves go to the end, with the prices of the whole."""
        boxes, spare_w = self._boxes.where(chosen), self._knapsacks.spare_w
        low_w = np.maximum(boxes.power_low_w, spare_w)
        high_w = np.where(np.isfinite(boxes.power_high_w), boxes.power_high_w, low_w + 2 * _OPEN_SIDE_W)
        low = np.where(np.isfinite(boxes.cache_low), boxes.cache_low, 0.0)
        high = np.where(np.isfinite(boxes.cache_high), boxes.cache_high, low + 2 * _OPEN_SIDE_PERCENT)
        by_power: BoolArray = (high_w - low_w) * _SPEED_PER_W >= (high - low) * _STRETCH_PER_PERCENT
        at_w, at = (low_w + high_w) / 2, (low + high) / 2
        below = boxes._replace(
            power_high_w=np.where(by_power, at_w, boxes.power_high_w),
            cache_high=np.where(by_power, boxes.cache_high, at),
        )
        above = boxes._replace(
            power_low_w=np.where(by_power, at_w, boxes.power_low_w),
            cache_low=np.where(by_power, boxes.cache_low, at),
        )
        halves = below.joined(above)
        table = self._knapsacks.table(halves)
        keep = np.ones(len(self._boxes.processes), bool)
        keep[chosen] = False
        self._boxes = self._boxes.where(keep).joined(halves)
        self._table = SizeTable(
            np.concatenate([self._table.units[keep], table.units]),
            np.concatenate([self._table.ability[keep], table.ability]),
        )
        twice = np.concatenate([chosen, chosen])
        self._per_w = np.concatenate([self._per_w[keep], self._per_w[twice]])
        self._per_percent = np.concatenate([self._per_percent[keep], self._per_percent[twice]])
        self._active = np.arange(len(self._per_w))
