"""The master problem, solved by HiGHS: how many GPUs of each layout serve every service at the least cost.

Rows: for each kind of service, the replicas on all layouts, each counting its part of a service, come to the number of
services of that kind; for each GPU type, the number of GPUs lies in a range. In whole numbers, replicas of each cut
must also make up whole services. A service may go unserved at a prohibitive price, so that there is always a
solution; :attr:`Whole.unserved` says whether that was used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.highs import make_whole, new_model, run
from joulery.policies.placement.provisioning.options import Item
from joulery.policies.placement.provisioning.packing import Layout, Pattern

_UNSERVED = 1e4
"""Price of leaving a service out, in prices of the dearest GPU."""


class PricedPattern(NamedTuple):
    """A pattern of one GPU with its layout: the GPU type, its price, what is on it."""

    type_index: int
    usd_per_hour: float
    layout: Layout


class Relaxation(NamedTuple):
    """The optimum when fractions of GPUs may be rented.

    Attributes:
        usd_per_hour: Its cost, over the patterns there are.
        values: What one more service of each kind would cost, float64[kinds].
        rebates: What one more GPU of each type would cost beyond its price, float64[types]: negative where the range
            allows no more, positive where it demands as many.
        gpus: How many of each type it rents, float64[types].
    """

    usd_per_hour: float
    values: FloatArray
    rebates: FloatArray
    gpus: FloatArray


class Whole(NamedTuple):
    """An optimum in whole numbers.

    Attributes:
        gpus: The type and the pattern of each GPU.
        usd_per_hour: Their cost.
        unserved: Services left out, for each kind: all 0 unless GPUs are limited or the solver reached a limit, so
            no proof that they cannot be served.
    """

    gpus: tuple[tuple[int, Pattern], ...]
    usd_per_hour: float
    unserved: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every service is served."""
        return not any(self.unserved)


Range = tuple[int, int | None]
"""Fewest and most GPUs of a type; None for as many as wanted."""


class Master:
    """The restricted master problem: collects patterns and solves over them.

    Attributes:
        patterns: In the order they were added.
    """

    def __init__(self, items: Sequence[Item], demand: Sequence[int], ranges: Sequence[Range], dearest: float) -> None:
        self._items, self._demand, self._ranges, self._dearest = items, demand, ranges, dearest
        self.patterns: list[PricedPattern] = []
        self._known: set[tuple[int, tuple[int, ...]]] = set()
        self._lp = new_model()
        for services in demand:
            self._lp.addRow(float(services), self._lp.inf, 0, [], [])
        self._add_ranges(self._lp)
        for kind in range(len(demand)):
            self._lp.addCol(_UNSERVED * dearest, 0.0, self._lp.inf, 1, [kind], [1.0])

    def add(self, pattern: PricedPattern) -> bool:
        """Add a pattern; False when it is there already."""
        key = (pattern.type_index, pattern.layout.pattern)
        if key in self._known:
            return False
        self._known.add(key)
        self.patterns.append(pattern)
        served: dict[int, float] = {}
        for item in pattern.layout.pattern:
            kind = self._items[item].kind
            served[kind] = served.get(kind, 0.0) + 1.0 / self._items[item].replicas
        rows = [*served, len(self._demand) + pattern.type_index]
        self._lp.addCol(pattern.usd_per_hour, 0.0, self._lp.inf, len(rows), rows, [*served.values(), 1.0])
        return True

    def restrict(self, ranges: Sequence[Range]) -> None:
        """Another range of GPUs for each type, for the relaxation."""
        for index, (low, high) in enumerate(ranges):
            most = self._lp.inf if high is None else float(high)
            self._lp.changeRowBounds(len(self._demand) + index, float(low), most)

    def relax(self) -> Relaxation:
        """The linear optimum over the patterns so far."""
        run(self._lp)
        solution = self._lp.getSolution()
        duals = np.array(solution.row_dual, np.float64)
        rows = np.array(solution.row_value, np.float64)
        kinds = len(self._demand)
        cost = self._lp.getInfo().objective_function_value
        return Relaxation(cost, np.maximum(duals[:kinds], 0.0), duals[kinds:], rows[kinds:])

    def whole(self, *, seconds: float, branchings: int) -> Whole:
        """The cheapest whole numbers over the patterns so far, within the limits on work."""
        mip = new_model(seconds=seconds, nodes=branchings)
        items, kinds = len(self._items), len(self._demand)
        for _ in range(items):
            mip.addRow(0.0, mip.inf, 0, [], [])
        for services in self._demand:
            mip.addRow(float(services), mip.inf, 0, [], [])
        self._add_ranges(mip)
        for pattern in self.patterns:
            count = Counter(pattern.layout.pattern)
            rows = [*count, items + kinds + pattern.type_index]
            mip.addCol(pattern.usd_per_hour, 0.0, mip.inf, len(rows), rows, [*map(float, count.values()), 1.0])
        for index, item in enumerate(self._items):
            mip.addCol(0.0, 0.0, mip.inf, 2, [index, items + item.kind], [-float(item.replicas), 1.0])
        for kind in range(kinds):
            mip.addCol(_UNSERVED * self._dearest, 0.0, mip.inf, 1, [items + kind], [1.0])
        make_whole(mip, range(mip.getNumCol()))
        run(mip)
        values = np.rint(np.array(mip.getSolution().col_value)).astype(int).tolist()
        if not values:  # a limit was reached before any solution was found
            return Whole((), 0.0, tuple(self._demand))
        chosen = [pattern for pattern, n in zip(self.patterns, values, strict=False) for _ in range(n)]
        gpus = tuple((pattern.type_index, pattern.layout.pattern) for pattern in chosen)
        cost = math.fsum(pattern.usd_per_hour for pattern in chosen)
        return Whole(gpus, cost, tuple(values[len(values) - kinds :]))

    def _add_ranges(self, model: Any) -> None:
        for low, high in self._ranges:
            model.addRow(float(low), model.inf if high is None else float(high), 0, [], [])
