"""Patterns worth more than their GPU, from the knapsacks of :mod:`neighbourhoods`.

A search keeps its boxes, and the prices of power and cache use in each, from call to call: prices of services change
little from round to round of column generation, so the prices of one round are nearly right for the next.
"""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import Knapsacks, SizeTable, Worth
from joulery.policies.placement.provisioning.packing import IntArray, Pattern

_SCALE_W, _SCALE_PERCENT = 300.0, 60.0
"""Size of power and cache use on a GPU: makes steps of their prices comparable."""
_PER_W_MAX, _PER_PERCENT_MAX = 0.03, 0.15
"""Highest prices: a whole GPU for a tenth of its power or cache use."""


class BoxSearch:
    """Searches the patterns of one GPU type with two processes and more.

    Args:
        knapsacks: The type and its items.
    """

    def __init__(self, knapsacks: Knapsacks) -> None:
        self._knapsacks = knapsacks
        self._boxes = knapsacks.boxes()
        self._table = knapsacks.table(self._boxes)
        count = len(self._boxes.processes)
        self._per_w, self._per_percent = np.zeros(count), np.zeros(count)
        self._active: IntArray = np.arange(count)

    def choose(self, allowed: BoolArray) -> None:
        """Search patterns of these items only, bool[items]."""
        self._knapsacks.choose(allowed)
        self._active = np.arange(len(self._per_w))

    def round(self, values: FloatArray, target: float, *, everywhere: bool = False) -> set[Pattern]:
        """Patterns that may be worth more than ``target``, from the boxes that held some in the last round.

        Args:
            values: Value of each item, in prices of the GPU.
            target: Worth that a pattern must exceed.
            everywhere: Whether every box is searched.
        """
        chosen = np.arange(len(self._per_w)) if everywhere or not len(self._active) else self._active
        worth = self._solve(chosen, values, target, self._per_w[chosen], self._per_percent[chosen])
        self._per_w[chosen], self._per_percent[chosen] = self._stepped(chosen, worth, target)
        self._active = chosen[worth.most > target]
        return {pattern for pattern in worth.patterns if pattern}

    def _solve(
        self, chosen: IntArray, values: FloatArray, target: float, per_w: FloatArray, per_percent: FloatArray
    ) -> Worth:
        table = SizeTable(self._table.units[chosen], self._table.ability[chosen])
        return self._knapsacks.solve(self._boxes.where(chosen), table, values, per_w, per_percent, target)

    def _stepped(self, chosen: IntArray, worth: Worth, target: float) -> tuple[FloatArray, FloatArray]:
        """Prices after one more step (Polyak, 1969): higher where the best pattern exceeds a limit of its box."""
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
        step = np.where(square > 1e-12, (worth.most - target) / np.maximum(square, 1e-6), 0.0)
        return (
            np.clip(per_w + step * over_w / _SCALE_W, 0.0, _PER_W_MAX),
            np.clip(per_percent + step * over / _SCALE_PERCENT, 0.0, _PER_PERCENT_MAX),
        )
