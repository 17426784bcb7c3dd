"""Master problems of placement: HiGHS set up once, and the cheapest mix of patterns of one GPU.

A status of the solver separates a proof from a limit. :class:`Master` knows patterns as indices of items, each a part
of one service of its kind. Its rows: for each kind of service, the replicas on all GPUs, each counting its part of a
service, come to the number of services of that kind; for each GPU type, the number of GPUs lies in a range. In whole
numbers, replicas of each division of a service must also make up whole services. A service may go unserved at a
prohibitive price, so that there is always a solution; :attr:`Whole.unserved` says whether that was used.
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
"""HiGHS's number of it."""
_UNSERVED = 1e4
"""Price of leaving a service out, in prices of the dearest GPU."""


class SolveStatus(Enum):
    """Proof status of a run of the solver."""

    OPTIMAL = "optimal"
    """The solution is optimal, within the gap asked for."""
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
        growing: Whether a linear program is solved again whenever columns were added: the last solution stays feasible
            then, and the primal simplex method goes on from it.
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
"""Fewest and most GPUs of a type; None for as many as wanted."""


class PricedPattern(NamedTuple):
    """A pattern of one GPU: the GPU type, its price, the indices of the items on it."""

    type_index: int
    usd_per_hour: float
    pattern: tuple[int, ...]


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
        items: Of each item the kind of service, and of how many equal replicas of a service it is one.
        demand: Services of each kind.
        ranges: How many GPUs of each type there may be.
        prices: Of a GPU of each type.

    Attributes:
        patterns: In the order they were added.
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
        """Add a pattern; False when it is there already."""
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
        """A problem with some of the patterns alone, by their indices."""
        some = Master(self._items, self._demand, self._ranges, self._prices)
        for index in chosen:
            some.add(self.patterns[index])
        return some

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

    def counts(self) -> FloatArray:
        """GPUs of each pattern in the last relaxation, float64[patterns]."""
        return np.array(self._lp.getSolution().col_value, np.float64)[len(self._demand) :]

    def settle(self, index: int) -> None:
        """Rent one GPU more of a pattern in every relaxation from now on."""
        self._settled[index] += 1
        self._lp.changeColBounds(len(self._demand) + index, float(self._settled[index]), self._lp.inf)

    def forbid(self, items: set[int]) -> None:
        """Rent no more of the patterns that hold one of these items than are settled."""
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
        """The cheapest whole numbers over the patterns so far, within the limits on work.

        Args:
            seconds, branchings: The limits.
            settled: Patterns that are part of it, repeated where there are several GPUs of one.
            allowed: 0 for items of which there are no more than are settled, float64[items]; all are when left out.
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
