"""Lower bound of a plan for many different services: services spread at will over boxes of neighbourhoods.

In a box of :mod:`neighbourhoods` every process has a least size. The relaxation rents fractions of GPUs in each box and
spreads processes over them, so that units, processes, power, cache use and memory of a box suffice in sum over its GPUs
rather than on each. Every plan satisfies these limits, so it costs no less. The linear program has a row for each
service and few for each box, whatever the number of patterns; pricing selects the processes that HiGHS solves it over.

Its dual is the certificate: a price for each resource of each box, at which no box is worth more than its GPU. The
value of a service is then the least price of its needs, and a plan costs no less than the value of all services. Any
prices certify a bound (:meth:`BoxRelaxation.certified`), so those found for a sample of the services are valid for all
of them. Boxes that are used are split in two, from one solution to the next, which raises the bound.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.policies.placement.master import new_model, run
from joulery.policies.placement.provisioning.many_kinds.box_uses import BoxedServices, services_of
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import PROCESSES_MAX, Boxes, Knapsacks
from joulery.policies.placement.provisioning.options import Item
from joulery.policies.placement.provisioning.packing import IntArray, Packing

_ROUNDS = 30
"""Rounds of pricing in one solution, at most."""
_WEIGHT, _WEIGHT_NEAR = 0.3, 0.8
"""Weight of the best prices so far in the next ones: the relaxation over few columns prices boxes at random. More where
the first prices are nearly the best."""
_BOXES_EACH, _NEAR = 6, 1.02
"""Most boxes of a service whose columns are added in one round, and their greatest cost relative to the cheapest."""
_KEPT = 1.01
"""Columns whose process costs more than this, against its service's cheapest, are dropped when boxes are split."""
_CUT_SHARE = 0.95
"""Share of the understatement by low corners that the boxes to be split have together."""
_SPEED_PER_W, _STRETCH_PER_PERCENT = 7e-4, 2.2e-3
"""Approximate change in a process's time by a watt and a percent: decides the boxes to split, and along which side."""
_OPEN_W, _OPEN_PERCENT = 80.0, 24.0
"""Distance from its low side at which a box without an upper limit is split."""
_KINDS_AT_ONCE = 100
"""Services whose uses are held in memory at once in :func:`certified`."""
_COARSE, _FINE = 2e-3, 1e-4
"""Relative gap of bound and optimum at which a solution ends, and the gap while the wanted bound is in reach."""
_AHEAD = 4
"""A bound is out of reach if the optimum misses it even after this many times its rise over as many last solutions."""
_CLOSE = 1.06
"""Items that cost more than this, against their service's cheapest, are left to the certificate in ``for_all``."""
_TINY = 1e-9


class BoxPrices(NamedTuple):
    """Prices of the resources of GPUs in boxes of neighbourhoods: the certificate of a bound.

    Attributes:
        type_index: Index of the GPU type.
        boxes: The boxes; together they hold every neighbourhood of two processes and more.
        prices: Dollars an hour for a unit, for being one of the processes, for a watt, a percent of cache use, and the
            GPU's memory, float64[boxes, 5], each 0 or more.
    """

    type_index: int
    boxes: Boxes
    prices: FloatArray


class Certificate(NamedTuple):
    """A bound and the prices that prove it.

    Attributes:
        usd_per_hour: Lower bound on the cost of any plan.
        values: Least cost of one more service of each kind, float64[kinds].
        prices: The prices for each GPU type.
    """

    usd_per_hour: float
    values: FloatArray
    prices: tuple[BoxPrices, ...]


class Column(NamedTuple):
    """A process placed in a box: indices of the box, the item and the size."""

    box: int
    item: int
    size: int


class BoxRelaxation:
    """The relaxation of one problem; see the module.

    Args:
        packings: The GPU types.
        items: The items, those of a kind side by side.
        demand: Services of each kind.
        knapsacks: Knapsacks of all items, for each GPU type.
        kinds: Most kinds to solve for, chosen evenly by their needs.

    Attributes:
        complete: Whether it is solved for all items of all kinds; if not, only the certificate covers the others.
        value: The optimum over the current columns, in dollars an hour: no bound of these boxes is higher.
    """

    def __init__(
        self,
        packings: Sequence[Packing],
        items: Sequence[Item],
        demand: Sequence[int],
        knapsacks: Sequence[Knapsacks],
        kinds: int,
    ) -> None:
        self._packings, self._items, self._demand, self._all = packings, items, demand, knapsacks
        self.complete, self._weight = len(demand) <= kinds, _WEIGHT
        self._some = self._services(_spread(packings, items, len(demand), kinds))
        self._usd = [packing.gpu_type.usd_per_hour for packing in packings]
        self._boxes = [each.boxes() for each in knapsacks]
        self._prices = [_by_share(*each) for each in zip(packings, self._boxes, strict=True)]
        self._start()

    def _start(self) -> None:
        """Reset the columns; the bound is that of the current prices."""
        self._latest: tuple[Sequence[BoxPrices], FloatArray, FloatArray] | None = None
        self._uses = [self._some.uses(index, boxes) for index, boxes in enumerate(self._boxes)]
        self._bound = self._certificate(self._prices, self._values(self._prices))
        self._known: list[dict[Column, None]] = [{} for _ in self._packings]
        self._gpus = [np.zeros(len(each.processes)) for each in self._boxes]
        self._load = [np.zeros((2, len(each.processes))) for each in self._boxes]
        self.value = np.inf
        self._values_before: list[float] = []

    def certificate(self) -> Certificate:
        """The best bound so far, for all services."""
        if self.complete:
            return self._bound
        return self.certified(self._bound.prices)

    def certified(self, prices: Sequence[BoxPrices]) -> Certificate:
        """The bound that prices prove for all services, whichever services they were found for."""
        values, _ = self._costs_at(prices)
        dear = max(1.0, *(_dearest_worth(self._packings[mine.type_index], mine.boxes, mine.prices) for mine in prices))
        scaled = tuple(mine._replace(prices=mine.prices / dear) for mine in prices)
        return Certificate(float(np.array(self._demand, np.float64) @ values) / dear, values / dear, scaled)

    def for_all(self) -> BoxRelaxation:
        """The relaxation for all kinds, with the boxes and prices of the best bound for the sample.

        It contains only the items that are nearly the cheapest of their kind at these prices, a third of all. Its
        certificate is for every item.
        """
        values, each = self._costs_at(self._bound.prices)
        kind = np.array([item.kind for item in self._items])
        every = copy.copy(self)
        every._weight = _WEIGHT_NEAR
        every._some = self._services(np.arange(len(values)), each <= _CLOSE * values[kind])
        every._boxes = [mine.boxes for mine in self._bound.prices]
        every._prices = [mine.prices for mine in self._bound.prices]
        every._start()
        return every

    def _costs_at(self, prices: Sequence[BoxPrices]) -> tuple[FloatArray, FloatArray]:
        """Least cost of a service of each kind at these prices, and by each item, float64[kinds] and [items]."""
        if self._latest is not None and self._latest[0] is prices:
            return self._latest[1:]
        values, each = np.zeros(len(self._demand)), np.full(len(self._items), np.inf)
        for first in range(0, len(values), _KINDS_AT_ONCE):
            chosen = np.arange(first, min(first + _KINDS_AT_ONCE, len(values)))
            some = self._services(chosen)
            cheapest = np.full(len(some.kind), np.inf)
            for mine in prices:
                cost = some.uses(mine.type_index, mine.boxes).cost(mine.prices)
                cheapest = np.minimum(cheapest, cost.min(axis=(0, 1), initial=np.inf) * some.replicas)
            values[chosen] = np.minimum(some.alone_usd, np.minimum.reduceat(cheapest, some.starts))
            each[some.items] = cheapest
        self._latest = prices, values, each
        return values, each

    def _services(self, kinds: IntArray, close: BoolArray | None = None) -> BoxedServices:
        return services_of(self._packings, self._items, self._demand, self._all, kinds, close)

    def raise_bound(self, wanted_usd: float, cuts: int) -> None:
        """Split boxes until the bound is as high as wanted, until that seems out of reach, or ``cuts`` times.

        Args:
            wanted_usd: The bound wanted, dollars an hour; infinite for the highest that these cuts reach.
            cuts: Most times that boxes are split.
        """
        for _ in range(cuts):
            self.solve(wanted_usd)
            if self._bound.usd_per_hour >= wanted_usd:
                break
            self._values_before.append(self.value)
            rise = self.value - self._values_before[-_AHEAD:][0]
            if len(self._values_before) >= _AHEAD and self.value + _AHEAD * rise < wanted_usd < np.inf:
                break
            self.refine()

    def solve(self, wanted_usd: float = np.inf) -> None:
        """Solve with the current boxes: to a small gap, or until the bound is as high as wanted."""
        model, columns = self._model(), list[tuple[int, Column]]()
        for index, known in enumerate(self._known):
            columns += self._add(model, index, list(known))
        best, prices, self.value = self._certificate(self._prices, self._values(self._prices)), self._prices, np.inf
        for turn in range(_ROUNDS):
            held = [mine.prices for mine in best.prices]
            prices = [self._raised(index, prices[index], held[index]) for index in range(len(prices))]
            if turn:
                prices = [self._weight * old + (1 - self._weight) * new for old, new in zip(held, prices, strict=True)]
            costs = [uses.cost(mine) for uses, mine in zip(self._uses, prices, strict=True)]
            cheapest = [self._some.cheapest(cost) for cost in costs]
            values = self._values(prices, cheapest)
            best = max(best, self._certificate(prices, values), key=_usd)
            gap_ratio = _FINE if self.value >= wanted_usd else _COARSE
            if best.usd_per_hour >= min(wanted_usd, self.value * (1 - gap_ratio)):
                break
            for index, cost in enumerate(costs):
                columns += self._add(model, index, self._near(index, cost, cheapest[index], values))
            run(model)
            prices = self._solution(model, columns)
        self._prices = [mine.prices for mine in best.prices]
        self._bound = max(best, self._bound, key=_usd)

    def refine(self) -> None:
        """Split the boxes in two whose low corners understate the needs of processes most."""
        losses = [self._understated(index) for index in range(len(self._packings))]
        every = np.sort(np.concatenate([np.maximum(*loss) for loss in losses]))[::-1]
        total = np.cumsum(every)
        if not len(every) or total[-1] <= 0:
            return
        least = max(every[int(np.searchsorted(total, _CUT_SHARE * total[-1]))], _TINY)
        for index, (by_power, by_cache) in enumerate(losses):
            chosen = np.flatnonzero(np.maximum(by_power, by_cache) >= least)
            if len(chosen):
                self._cut(index, chosen, by_power[chosen] >= by_cache[chosen])

    def _values(self, prices: Sequence[FloatArray], cheapest: Sequence[FloatArray] | None = None) -> FloatArray:
        """Cost of one more service of each kind at these prices, float64[kinds]."""
        if cheapest is None:
            each = zip(self._uses, prices, strict=True)
            cheapest = [self._some.cheapest(uses.cost(mine)) for uses, mine in each]
        values = self._some.alone_usd
        for mine in cheapest:
            values = np.minimum(values, mine.min(axis=0, initial=np.inf))
        return values

    def _certificate(self, prices: Sequence[FloatArray], values: FloatArray) -> Certificate:
        each = zip(self._packings, self._boxes, prices, strict=True)
        dear = max(1.0, *(_dearest_worth(packing, boxes, mine) for packing, boxes, mine in each))
        made = (BoxPrices(index, self._boxes[index], mine / dear) for index, mine in enumerate(prices))
        return Certificate(float(self._some.demand @ values) / dear, values / dear, tuple(made))

    def _near(self, index: int, cost: FloatArray, cheapest: FloatArray, values: FloatArray) -> list[Column]:
        """The columns of the cheapest boxes of each kind that the master problem does not contain yet."""
        some, known = self._some, self._known[index]
        order = np.argsort(cheapest, axis=0, kind="stable")[:_BOXES_EACH]
        close = np.take_along_axis(cheapest, order, axis=0) <= values * _NEAR
        rank, kind = np.nonzero(close)
        box = order[rank, kind]
        # The items of a kind lie side by side: those of every kind in a row, the last one again where there are fewer.
        ends = np.r_[some.starts[1:], len(some.kind)]
        longest = int((ends - some.starts).max())
        items = np.minimum(some.starts[kind, None] + np.arange(longest), ends[kind, None] - 1)
        each = cost[:, box[:, None], items].min(axis=0) * some.replicas[items]
        item = items[np.arange(len(kind)), each.argmin(axis=1)]
        size = cost[:, box, item].argmin(axis=0)
        found = map(Column, box.tolist(), item.tolist(), size.tolist())
        new = [column for column in dict.fromkeys(found) if column not in known]
        known.update(dict.fromkeys(new))
        return new

    def _raised(self, index: int, prices: FloatArray, best: FloatArray) -> FloatArray:
        """Prices of boxes that are worth less than a GPU, raised by the best prices: this does not lower the bound."""
        usd = self._usd[index]
        spare = np.maximum(usd - _worth(self._packings[index], self._boxes[index], prices), 0.0) / usd
        return np.asarray(prices + spare[:, None] * best, np.float64)

    def _first_row(self, index: int) -> int:
        """The first of the five rows of the first box of a type."""
        return len(self._some.demand) + 5 * sum(len(each.processes) for each in self._boxes[:index])

    def _model(self) -> Any:
        """Rows for kinds, then five for each box; columns for a GPU in each box, then for services on their own."""
        model = new_model(growing=True)
        for services in self._some.demand:
            model.addRow(float(services), model.inf, 0, [], [])
        for _ in range(5 * sum(len(each.processes) for each in self._boxes)):
            model.addRow(0.0, model.inf, 0, [], [])
        for index, (packing, boxes) in enumerate(zip(self._packings, self._boxes, strict=True)):
            row = self._first_row(index)
            for limits in _limits(packing, boxes):
                held = np.flatnonzero(np.isfinite(limits))
                model.addCol(float(self._usd[index]), 0.0, model.inf, len(held), row + held, limits[held])
                row += 5
        for kind, usd in enumerate(self._some.alone_usd.tolist()):
            model.addCol(usd, 0.0, model.inf, 1, [kind], [1.0])
        return model

    def _add(self, model: Any, index: int, columns: Sequence[Column]) -> list[tuple[int, Column]]:
        if not columns:
            return []
        uses, some, count = self._uses[index], self._some, len(columns)
        box, item, size = np.array(columns, np.int64).T
        limited = np.isfinite(_limits(self._packings[index], self._boxes[index]))[box]
        of_each = uses.units[size, box, item], np.ones(count), uses.power_w[size, box, item]
        used = np.stack([*of_each, uses.cache_percent[size, box, item], uses.memory[item]], axis=1)
        # The row of its service first, then those of the limits of its box.
        held = np.concatenate([np.ones((count, 1), np.bool_), limited], axis=1)
        rows = np.concatenate([some.kind[item, None], self._first_row(index) + 5 * box[:, None] + np.arange(5)], axis=1)
        values = np.concatenate([np.ones((count, 1)), -some.replicas[item, None] * used], axis=1)
        starts = np.concatenate([[0], np.cumsum(held.sum(axis=1))[:-1]]).astype(np.int32)
        zero, most = np.zeros(count), np.full(count, model.inf)
        entries = int(held.sum())
        model.addCols(count, zero, zero, most, entries, starts, rows[held].astype(np.int32), values[held])
        return [(index, column) for column in columns]

    def _solution(self, model: Any, columns: Sequence[tuple[int, Column]]) -> list[FloatArray]:
        """Prices of the resources; stores the GPUs, power and cache use of each box."""
        solution, self.value = model.getSolution(), float(model.getInfo().objective_function_value)
        duals, amounts = np.array(solution.row_dual, np.float64), np.array(solution.col_value, np.float64)
        prices, at = list[FloatArray](), 0
        for index, boxes in enumerate(self._boxes):
            count, row = len(boxes.processes), self._first_row(index)
            prices.append(np.maximum(duals[row : row + 5 * count].reshape(count, 5), 0.0))
            self._gpus[index], at = np.maximum(amounts[at : at + count], 0.0), at + count
            self._load[index] = np.zeros((2, count))
        placed = amounts[at + len(self._some.demand) :].tolist()
        for (index, column), amount in zip(columns, placed, strict=True):
            if amount > 0:
                uses, often = self._uses[index], amount * self._some.replicas[column.item]
                held = column.size, column.box, column.item
                self._load[index][:, column.box] += often * uses.power_w[held], often * uses.cache_percent[held]
        return prices

    def _understated(self, index: int) -> tuple[FloatArray, FloatArray]:
        """GPU time that sizing at the low corner leaves out, by power and by cache use, float64[boxes] each."""
        boxes, gpus = self._boxes[index], self._gpus[index]
        power_w, cache_percent = self._load[index] / np.maximum(gpus, _TINY)
        low_w, low = _corner(self._all[index], boxes)
        over_w = np.clip(np.minimum(power_w, boxes.power_high_w) - low_w, 0.0, None)
        over = np.clip(np.minimum(cache_percent, boxes.cache_high) - low, 0.0, None)
        return gpus * over_w * _SPEED_PER_W, gpus * over * _STRETCH_PER_PERCENT

    def _cut(self, index: int, chosen: IntArray, by_power: BoolArray) -> None:
        """Split boxes of a type; the halves come after the others, with the prices and columns of the whole."""
        costs, known, some = self._uses[index].cost(self._prices[index]), self._known[index], self._some
        boxes, mine = self._boxes[index], self._prices[index]
        keep: IntArray = np.setdiff1d(np.arange(len(boxes.processes)), chosen)
        halves = _halves(boxes.where(chosen), by_power, *_corner(self._all[index], boxes.where(chosen)))
        moved: dict[int, tuple[int, ...]] = {int(box): (at,) for at, box in enumerate(keep)}
        behind = len(keep)
        moved |= {int(box): (behind + at, behind + len(chosen) + at) for at, box in enumerate(chosen)}
        self._boxes[index] = boxes.where(keep).joined(halves)
        self._uses[index] = self._uses[index].joined(keep, some.uses(index, halves))
        self._prices[index] = np.concatenate([mine[keep], mine[chosen], mine[chosen]])
        fits = self._uses[index].barred == 0
        self._known[index] = {
            column: None
            for box, item, size in known
            if costs[size, box, item] * some.replicas[item] <= _KEPT * self._bound.values[some.kind[item]]
            for column in (Column(half, item, size) for half in moved[box])
            if fits[column.size, column.box, column.item]
        }
        self._gpus[index] = np.zeros(fits.shape[1])
        self._load[index] = np.zeros((2, fits.shape[1]))


def _spread(packings: Sequence[Packing], items: Sequence[Item], kinds: int, most: int) -> IntArray:
    """At most ``most`` of the kinds, chosen evenly by power and then by the share they need."""
    if kinds <= most:
        return np.arange(kinds)
    share, power_w = np.full(kinds, np.inf), np.full(kinds, np.inf)
    kind = np.array([item.kind for item in items])
    for packing in packings:
        fits = packing.alone <= packing.capacity
        whole = packing.alone * [item.replicas for item in items] / packing.capacity * packing.gpu_type.usd_per_hour
        np.minimum.at(share, kind, np.where(fits, whole, np.inf))
        per_unit = packing.power_w / np.maximum(packing.alone, 1)
        np.minimum.at(power_w, kind, np.where(fits, per_unit, np.inf))
    order = np.lexsort((share, np.round(power_w, 1)))
    return np.sort(order[((np.arange(most) + 0.5) * kinds / most).astype(np.int64)])


def _usd(certificate: Certificate) -> float:
    return certificate.usd_per_hour


def _limits(packing: Packing, boxes: Boxes) -> FloatArray:
    """Amount of each resource of a GPU in each box, float64[boxes, 5]; infinite where there is no limit."""
    count = len(boxes.processes)
    processes = np.where(boxes.processes < PROCESSES_MAX, boxes.processes, np.inf)
    memory = np.full(count, 1.0 if packing.memory_limit_bytes < np.inf else np.inf)
    return np.stack(
        [np.full(count, float(packing.capacity)), processes, boxes.power_high_w, boxes.cache_high, memory], axis=1
    )


def _worth(packing: Packing, boxes: Boxes, prices: FloatArray) -> FloatArray:
    """Worth of all resources of a GPU in each box, float64[boxes]; infinite where one without limit has a price."""
    limits = _limits(packing, boxes)
    return np.asarray(np.multiply(prices, limits, out=np.zeros(prices.shape), where=prices > 0).sum(axis=1))


def _dearest_worth(packing: Packing, boxes: Boxes, prices: FloatArray) -> float:
    """Worth of the resources of the dearest box, in prices of its GPU."""
    return float(_worth(packing, boxes, prices).max(initial=0.0)) / packing.gpu_type.usd_per_hour


def _by_share(packing: Packing, boxes: Boxes) -> FloatArray:
    """Prices of shares alone."""
    prices = np.zeros((len(boxes.processes), 5))
    prices[:, 0] = packing.gpu_type.usd_per_hour / packing.capacity
    return prices


def _corner(knapsacks: Knapsacks, boxes: Boxes) -> tuple[FloatArray, FloatArray]:
    """The low corner of boxes: power from which the clock falls on, and cache use from 0 on."""
    low_w = np.maximum(boxes.power_low_w, knapsacks.spare_w)
    return low_w, np.where(np.isfinite(boxes.cache_low), boxes.cache_low, 0.0)


def _halves(boxes: Boxes, by_power: BoolArray, low_w: FloatArray, low: FloatArray) -> Boxes:
    """The lower halves of boxes that are split by power or by cache use, then the upper halves."""
    high_w = np.where(np.isfinite(boxes.power_high_w), boxes.power_high_w, low_w + 2 * _OPEN_W)
    high = np.where(np.isfinite(boxes.cache_high), boxes.cache_high, low + 2 * _OPEN_PERCENT)
    at_w, at = (low_w + high_w) / 2, (low + high) / 2
    below = boxes._replace(
        power_high_w=np.where(by_power, at_w, boxes.power_high_w), cache_high=np.where(by_power, boxes.cache_high, at)
    )
    above = boxes._replace(
        power_low_w=np.where(by_power, at_w, boxes.power_low_w), cache_low=np.where(by_power, boxes.cache_low, at)
    )
    return below.joined(above)
