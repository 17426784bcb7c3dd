"""Master problems of placement: helpers for HiGHS models, and the cheapest mix of patterns of one GPU.

:class:`SolveStatus` separates a proof from a limit. A pattern of :class:`Master` holds the indices of items; an item is
one replica of a service of its kind. For each kind of service, a row requires that the replicas on all GPUs, each
counted as its fraction of a service, cover the services of that kind. For each GPU type, a row limits the GPUs to a
range. In whole numbers, replicas of each division of a service must also make up whole services. A service may go
unserved at a prohibitive price, so that there is always a solution; :attr:`Whole.unserved` counts such services.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray

_PRIMAL_SIMPLEX = 4
"""HiGHS's option value for the primal simplex method."""
_UNSERVED = 1e4
"""Price of leaving a service out, as a multiple of the price of the dearest GPU."""


class SolveStatus(Enum):
    """Proof status of a run of the solver."""

    OPTIMAL = "optimal"
    """The solution is optimal, within the requested gap."""
    INFEASIBLE = "infeasible"
    """Proven: there is no solution."""
    OPEN = "open"
    """A limit on time or nodes ended the run: its best solution, if any, proves nothing."""


def new_model(
    *, gap_ratio: float = 1e-9, seconds: float | None = None, nodes: int | None = None, growing: bool = False
) -> Any:
    """An empty single-threaded model that prints nothing.

    Args:
        gap_ratio: Relative gap at which a solution in whole numbers is optimal.
        seconds, nodes: Limits of the run; None for none.
        growing: Whether the linear program is solved again after columns are added: the last solution then stays
            feasible, and the primal simplex method continues from it.
    """
    import highspy

    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", gap_ratio)
    if growing:
        model.setOptionValue("simplex_strategy", _PRIMAL_SIMPLEX)
    if seconds is not None:
        model.setOptionValue("time_limit", seconds)
    if nodes is not None:
        model.setOptionValue("mip_max_nodes", nodes)
    return model


def add_row(model: Any, low: float, high: float, columns: Sequence[int], values: Sequence[float]) -> None:
    """Add ``low <= values @ x[columns] <= high``; infinite limits are allowed."""
    low, high = max(-model.inf, low), min(model.inf, high)
    model.addRow(low, high, len(columns), np.asarray(columns, np.int32), np.asarray(values, np.float64))


def make_whole(model: Any, columns: Iterable[int]) -> None:
    """Require whole numbers of some columns."""
    import highspy

    indices = np.fromiter(columns, np.int32)
    model.changeColsIntegrality(len(indices), indices, np.full(len(indices), highspy.HighsVarType.kInteger))


def run(model: Any) -> SolveStatus:
    """Solve the model."""
    import highspy

    model.run()
    status = model.getModelStatus()
    if status == highspy.HighsModelStatus.kOptimal:
        return SolveStatus.OPTIMAL
    return SolveStatus.INFEASIBLE if status == highspy.HighsModelStatus.kInfeasible else SolveStatus.OPEN


Range = tuple[int, int | None]
"""Fewest and most GPUs of a type; None for no upper limit."""


class PricedPattern(NamedTuple):
    """A pattern of one GPU: the GPU type, its price, the indices of the items on it."""

    type_index: int
    usd_per_hour: float
    pattern: tuple[int, ...]


class Relaxation(NamedTuple):
    """The optimum when fractions of GPUs may be rented.

    Attributes:
        usd_per_hour: Its cost, over the patterns added so far.
        values: What one more service of each kind would cost, float64[kinds].
        rebates: What one more GPU of each type would cost beyond its price, float64[types]: negative where the range
            allows no more, positive where it demands as many.
        gpus: GPUs of each type that it rents, float64[types].
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
        unserved: Services left out, for each kind: all 0 unless GPUs are limited or the solver reached a limit. They
            do not prove that these services cannot be served.
    """

    gpus: tuple[tuple[int, tuple[int, ...]], ...]
    usd_per_hour: float
    unserved: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every service is served."""
        return not any(self.unserved)


class Master:
    """The restricted master problem: collects patterns and solves over them.

    Args:
        items: For each item, the kind of service, and the number of equal replicas that serve one such service.
        demand: Services of each kind.
        ranges: Fewest and most GPUs of each type.
        prices: Price of a GPU of each type.

    Attributes:
        patterns: The patterns, in the order they were added.
    """

    def __init__(
        self, items: Sequence[tuple[int, int]], demand: Sequence[int], ranges: Sequence[Range], prices: Sequence[float]
    ) -> None:
        self._items, self._demand, self._ranges, self._prices = items, demand, ranges, prices
        self._dearest = dearest = max(prices)
        self._step = dearest if len(prices) == 1 else 0.0
        self.patterns: list[PricedPattern] = []
        self._known: set[tuple[int, tuple[int, ...]]] = set()
        self._settled: Counter[int] = Counter()
        self._lp = new_model()
        for services in demand:
            self._lp.addRow(float(services), self._lp.inf, 0, [], [])
        self._add_ranges(self._lp)
        for kind in range(len(demand)):
            self._lp.addCol(_UNSERVED * dearest, 0.0, self._lp.inf, 1, [kind], [1.0])

    def add(self, pattern: PricedPattern) -> bool:
        """Add a pattern; return False when it was added before."""
        key = (pattern.type_index, pattern.pattern)
        if key in self._known:
            return False
        self._known.add(key)
        self.patterns.append(pattern)
        served: dict[int, float] = {}
        for item in pattern.pattern:
            kind, replicas = self._items[item]
            served[kind] = served.get(kind, 0.0) + 1.0 / replicas
        rows = [*served, len(self._demand) + pattern.type_index]
        self._lp.addCol(pattern.usd_per_hour, 0.0, self._lp.inf, len(rows), rows, [*served.values(), 1.0])
        return True

    def of(self, chosen: Iterable[int]) -> Master:
        """A master problem with only the chosen patterns, given by their indices."""
        some = Master(self._items, self._demand, self._ranges, self._prices)
        for index in chosen:
            some.add(self.patterns[index])
        return some

    def restrict(self, ranges: Sequence[Range]) -> None:
        """Set another range of GPUs for each type, for the relaxation."""
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

    def counts(self) -> FloatArray:
        """GPUs of each pattern in the last relaxation, float64[patterns]."""
        return np.array(self._lp.getSolution().col_value, np.float64)[len(self._demand) :]

    def settle(self, index: int) -> None:
        """Require one more GPU of a pattern in every later relaxation."""
        self._settled[index] += 1
        self._lp.changeColBounds(len(self._demand) + index, float(self._settled[index]), self._lp.inf)

    def forbid(self, items: set[int]) -> None:
        """Limit each pattern that holds one of these items to its settled number of GPUs."""
        for index, pattern in enumerate(self.patterns):
            if not items.isdisjoint(pattern.pattern):
                settled = float(self._settled[index])
                self._lp.changeColBounds(len(self._demand) + index, settled, settled)

    def release(self) -> None:
        """Undo :meth:`settle` and :meth:`forbid`."""
        self._settled.clear()
        for index in range(len(self.patterns)):
            self._lp.changeColBounds(len(self._demand) + index, 0.0, self._lp.inf)

    def whole(
        self,
        *,
        seconds: float,
        branchings: int,
        settled: Sequence[int] = (),
        allowed: FloatArray | None = None,
    ) -> Whole:
        """The cheapest whole numbers of GPUs over the patterns so far, within the limits on work.

        Args:
            seconds, branchings: Limits on the time and on the nodes of the solver.
            settled: Patterns that the solution must contain, repeated where it must contain several GPUs of one.
            allowed: 0 for items of which the solution has no more than are settled, float64[items]; None allows all.
        """
        mip = new_model(seconds=seconds, nodes=branchings)
        # Costs differ by a GPU at least: closer than that is optimal.
        mip.setOptionValue("mip_abs_gap", 0.999 * self._step)
        done = Counter(settled)
        items, kinds = len(self._items), len(self._demand)
        for _ in range(items):
            mip.addRow(0.0, mip.inf, 0, [], [])
        for services in self._demand:
            mip.addRow(float(services), mip.inf, 0, [], [])
        self._add_ranges(mip)
        for index, pattern in enumerate(self.patterns):
            count = Counter(pattern.pattern)
            rows = [*count, items + kinds + pattern.type_index]
            least = float(done[index])
            most = mip.inf if allowed is None or all(allowed[item] for item in count) else least
            mip.addCol(pattern.usd_per_hour, least, most, len(rows), rows, [*map(float, count.values()), 1.0])
        for index, (kind, replicas) in enumerate(self._items):
            mip.addCol(0.0, 0.0, mip.inf, 2, [index, items + kind], [-float(replicas), 1.0])
        for kind in range(kinds):
            mip.addCol(_UNSERVED * self._dearest, 0.0, mip.inf, 1, [items + kind], [1.0])
        make_whole(mip, range(mip.getNumCol()))
        run(mip)
        values = np.rint(np.array(mip.getSolution().col_value)).astype(int).tolist()
        if not values:  # a limit was reached before any solution was found
            return Whole((), 0.0, tuple(self._demand))
        chosen = [pattern for pattern, n in zip(self.patterns, values, strict=False) for _ in range(n)]
        gpus = tuple((pattern.type_index, pattern.pattern) for pattern in chosen)
        cost = math.fsum(pattern.usd_per_hour for pattern in chosen)
        return Whole(gpus, cost, tuple(values[len(values) - kinds :]))

    def _add_ranges(self, model: Any) -> None:
        for low, high in self._ranges:
            model.addRow(float(low), model.inf if high is None else float(high), 0, [], [])
