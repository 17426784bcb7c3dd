"""Column generation: the cheapest mix of patterns of one GPU, and the proof of how cheap any mix could be.

The master problem prices one more service of each kind; a search finds patterns worth more than their GPU at these
prices; they join, until none is left. The bound needs no end of that: scale the prices until no pattern anywhere is
worth more than its GPU, and what they say all services are worth is a cost no plan can go below (Farley, 1990).

Rows of the master problem: for each kind of service, the replicas on all GPUs, each counting its part of a service,
come to the number of services of that kind; for each GPU type, the number of GPUs lies in a range. In whole numbers,
replicas of each division of a service must also make up whole services. A service may go unserved at a prohibitive
price, so that there is always a solution; :attr:`Whole.unserved` says whether that was used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.highs import make_whole, new_model, run
from joulery.policies.placement.provisioning.options import Item
from joulery.policies.placement.provisioning.packing import PackedGpu, Packing, Pattern
from joulery.policies.placement.provisioning.pricing import Pricer

_UNSERVED = 1e4
"""Price of leaving a service out, in prices of the dearest GPU."""


class PricedPattern(NamedTuple):
    """A pattern of one GPU with its layout: the GPU type, its price, what is on it."""

    type_index: int
    usd_per_hour: float
    layout: PackedGpu


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

    def __init__(
        self, items: Sequence[Item], demand: Sequence[int], ranges: Sequence[Range], prices: Sequence[float]
    ) -> None:
        self._items, self._demand, self._ranges, dearest = items, demand, ranges, max(prices)
        self._dearest, self._step = dearest, dearest if len(prices) == 1 else 0.0
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
            if not items.isdisjoint(pattern.layout.pattern):
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
            count = Counter(pattern.layout.pattern)
            rows = [*count, items + kinds + pattern.type_index]
            least = float(done[index])
            most = mip.inf if allowed is None or all(allowed[item] for item in count) else least
            mip.addCol(pattern.usd_per_hour, least, most, len(rows), rows, [*map(float, count.values()), 1.0])
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


_ALMOST = 0.03
"""Patterns that lack this part of the worth of their GPU are added at the end."""
_TRIES = 3
"""Patterns tried for each one wanted; the bound lets some through that do not fit."""
_WIDE = 4
"""How much wider that last search is."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to try. Counts of work rather than seconds, so that the same input gives the same plan.

    Attributes:
        patience: Rounds of column generation that may pass without a gain of a quarter of ``gap_ratio``.
        beam: Partial patterns kept a level while looking for new patterns.
        nodes: Partial patterns looked at for the bound, at most.
        patterns: New patterns a round and GPU type.
        gap_ratio: A bound this close is close enough.
        branchings: After how many the solver of whole numbers stops improving.
        seconds: When it stops at the latest; a plan that took that long may differ on another day.
    """

    patience: int = 5
    beam: int = 200
    nodes: int = 100_000
    patterns: int = 60
    gap_ratio: float = 0.002
    branchings: int = 20_000
    seconds: float = 20.0


class Generator:
    """Patterns, prices and bounds for one set of items on some GPU types.

    With ``replicas_max``, services are cut into no more than that many replicas (more where they have to be); bounds
    hold for such plans only.

    Attributes:
        master: The patterns so far.
    """

    def __init__(
        self,
        packings: Sequence[Packing],
        items: Sequence[Item],
        demand: Sequence[int],
        ranges: Sequence[Range],
        effort: Effort,
        replicas_max: int | None = None,
    ) -> None:
        self._packings, self._effort, self._ranges = packings, effort, tuple(ranges)
        self.master = Master(items, demand, ranges, [packing.gpu_type.usd_per_hour for packing in packings])
        self._demand = np.array(demand, np.float64)
        self._kind = np.array([item.kind for item in items])
        self._part = np.array([1.0 / item.replicas for item in items])
        if replicas_max is not None:
            fewest = [min(item.replicas for item in items if item.kind == kind) for kind in range(len(demand))]
            over = [item.replicas > max(replicas_max, fewest[item.kind]) for item in items]
            self._part[over] = 0.0
        copies = np.array([1 if item.apart else item.replicas * demand[item.kind] for item in items], np.int64)
        self._pricers = [Pricer(packing, np.minimum(copies, packing.capacity)) for packing in packings]
        for index in range(len(packings)):
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
        """A bound by a search that misses nothing, and whether it found patterns that lower the relaxation.

        Args:
            relaxation: The prices to prove with.
            gap_ratio: How much a layout may be worth beyond its GPU; costs the bound as much.

        Returns:
            Dollars an hour that no plan goes below, in whole numbers or not; 0 when the search was given up.
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
        """What no plan costs less than, when no pattern is worth more than its GPU at the values times ``scale``."""
        most = np.array([0.0 if high is None else float(high) for _, high in self._ranges])
        least = np.array([float(low) for low, _ in self._ranges])
        rebates = relaxation.rebates
        ranges = float(np.maximum(rebates, 0.0) @ least + np.minimum(rebates, 0.0) @ most)
        return scale * float(self._demand @ relaxation.values) + ranges

    def whole(self) -> Whole:
        """The cheapest whole numbers over the patterns so far."""
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
        """The GPU types of which there may be any."""
        return [index for index, (_, high) in enumerate(self._ranges) if high != 0]

    def _add(self, index: int, pattern: Pattern) -> bool:
        """Add a pattern to the master problem, if it fits and is new."""
        packing = self._packings[index]
        layout = packing.fit(pattern)
        return layout is not None and self.master.add(PricedPattern(index, packing.gpu_type.usd_per_hour, layout))

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
