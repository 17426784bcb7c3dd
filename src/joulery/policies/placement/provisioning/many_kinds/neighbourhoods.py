"""Upper bounds on the worth of a GPU: a knapsack of shares in each box of neighbourhoods.

The needs of a process on a shared GPU follow from three numbers: how many processes there are, and their power and
cache use in all. In a box (a number of processes, and ranges of power and cache use) every item has a least share, and
the most valuable pattern within the GPU's units is a knapsack. The box's upper limits on power and cache use are
priced (Lagrange), so each knapsack bounds the worth of any pattern of the box. The work depends neither on the number
of patterns nor, beyond a sorting, on the number of services: of all items that need the same units, a GPU with ``n``
processes can prefer only the ``n`` most valuable.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.perf.interference.model import launch_delay_ms
from joulery.policies.placement.provisioning.options import Item
from joulery.policies.placement.provisioning.packing import NEVER, IntArray, Packing, Pattern

PROCESSES_MAX = 8
"""Processes from which on they are not counted: the launch delay is that of this number."""
_SLOTS = 3
"""Ways to size an item that are distinguished in a box: fewer units, or less work for the GPU."""
_SPEED_MIN = 0.05
"""Slowest clock that is distinguished, as a ratio of the fastest."""
_POWER_CUTS_W, _CACHE_CUTS_PERCENT = (0.0, 25.0, 50.0, 80.0, 120.0), (10.0, 20.0, 32.0, 48.0)
"""Lower ends of the first boxes: power above the cap, and cache use."""
_CHUNK = 60_000
"""Numbers in one array of the knapsacks and tables: few enough for a processor's cache."""


class Boxes(NamedTuple):
    """Boxes of neighbourhoods, one entry each; power and cache use as sums over all processes.

    Attributes:
        processes: Number of processes, float64[n], whole numbers.
        power_low_w, power_high_w, cache_low, cache_high: Limits, float64[n]; cache use in percent.
    """

    processes: FloatArray
    power_low_w: FloatArray
    power_high_w: FloatArray
    cache_low: FloatArray
    cache_high: FloatArray

    def where(self, chosen: npt.NDArray[np.bool_] | IntArray) -> Boxes:
        """The chosen boxes."""
        return Boxes(*(column[chosen] for column in self))

    def joined(self, other: Boxes) -> Boxes:
        """These boxes, followed by others."""
        return Boxes(*(np.concatenate([a, b]) for a, b in zip(self, other, strict=True)))


class SizeTable(NamedTuple):
    """Ways to put each item into each box.

    Attributes:
        units: int64[boxes, items, slots], increasing; ``NEVER`` where there is none.
        ability: Requests/s that the process could serve with them, float64, decreasing.
    """

    units: IntArray
    ability: FloatArray


class Choices(NamedTuple):
    """Choices of a kind for a GPU: one of these, or nothing.

    Attributes:
        item: Index of the item, int64[choices].
        copies: Number of copies of it.
        slot: Slot of its size.
        group: At most one choice of a group, in increasing order.
    """

    item: IntArray
    copies: IntArray
    slot: IntArray
    group: IntArray


class Worth(NamedTuple):
    """The solution of the knapsacks of some boxes.

    Attributes:
        most: Upper bound on the worth of any pattern of the box, float64[boxes].
        patterns: The pattern that attains it within the relaxation.
        power_w, cache_percent: Least power and cache use of that pattern in the box.
    """

    most: FloatArray
    patterns: list[Pattern]
    power_w: FloatArray
    cache_percent: FloatArray


class Knapsacks:
    """Bounds and patterns of one GPU type.

    Args:
        packing: The type and its items.
        items: The items.
        demand: Services of each kind.

    Attributes:
        per_item: Slope and offset of power, slope and offset of cache use, and cache sensitivity, float64[5, items].
    """

    def __init__(self, packing: Packing, items: Sequence[Item], demand: Sequence[int], type_index: int) -> None:
        self.packing, self._gpu = packing, packing.gpu
        self._demand = demand
        self._items = items
        rows = [item.options[type_index] for item in items]
        longest = max((len(some) for some in rows), default=0) or 1
        names = ("limit_ms", "launch_ms", "kernels", "work", "k4", "k5", "ability")
        table = np.zeros((len(names) + 1, len(rows), longest))
        table[0] = -1.0
        table[3:6] = 1.0
        table[7] = NEVER
        per_item = np.zeros((5, len(rows)))
        for index, some in enumerate(rows):
            for at, option in enumerate(some):
                one = option.process
                table[:, index, at] = (*(getattr(one, name) for name in names), option.units)
            if some:
                one = some[0].process
                per_item[:, index] = (
                    one.power_slope,
                    one.power_offset_w,
                    one.cache_slope,
                    one.cache_offset_percent,
                    one.cache_sensitivity,
                )
        self._options, self.per_item = table, per_item
        self._least_cache = float(np.minimum(per_item[3], 0.0).min(initial=0.0))
        self._choices: dict[int, Choices] = {}
        self._members: dict[int, list[int]] = {}
        self.choose(np.ones(len(items), bool))

    def choose(self, allowed: BoolArray) -> None:
        """Fill knapsacks with these items only, bool[items]."""
        self._choices, self._members = {}, {}
        for index in np.flatnonzero(allowed).tolist():
            self._members.setdefault(self._items[index].kind, []).append(index)

    def of(self, items: IntArray) -> Knapsacks:
        """The knapsacks of some items, for :meth:`table` alone; neighbours may be any of all items."""
        some = copy.copy(self)
        some._options, some.per_item = self._options[:, items], self.per_item[:, items]
        some._items = [self._items[index] for index in items.tolist()]
        return some

    @property
    def spare_w(self) -> float:
        """Power of processes from which on the clock falls."""
        return self._gpu.power_cap_w - self._gpu.idle_w

    def boxes(self) -> Boxes:
        """Boxes that together hold every neighbourhood of two processes and more."""
        power = [-np.inf, *(self.spare_w + cut for cut in _POWER_CUTS_W), np.inf]
        cache = [-np.inf, *_CACHE_CUTS_PERCENT, np.inf]
        least = max(1, int(self.packing.alone.min(initial=NEVER)))
        most = min(PROCESSES_MAX, self.packing.capacity // least)
        made = [
            (n, *p, *c)
            for n in range(2, most + 1)
            for p in itertools.pairwise(power)
            for c in itertools.pairwise(cache)
        ]
        columns = np.array(made, np.float64).reshape(-1, 5).T
        return Boxes(*columns)

    def table(self, boxes: Boxes) -> SizeTable:
        """The least units of every item at the low corner of every box."""
        count, size = len(boxes.processes), max(1, _CHUNK // max(1, self._options[0].size))
        if not count:
            blank = (0, len(self._items), _SLOTS + 1)
            return SizeTable(np.zeros(blank, np.int64), np.zeros(blank))
        parts = [
            self._table(boxes.where(np.arange(first, min(first + size, count)))) for first in range(0, count, size)
        ]
        return SizeTable(np.concatenate([p.units for p in parts]), np.concatenate([p.ability for p in parts]))

    def _table(self, boxes: Boxes) -> SizeTable:
        gpu = self._gpu
        limit, launch, kernels, work, k4, k5, ability, alone = self._options
        _, _, slope, offset, sensitivity = (column[:, None] for column in self.per_item)
        excess_w = np.maximum(gpu.idle_w + boxes.power_low_w - gpu.power_cap_w, 0.0)
        speed = np.maximum(1.0 + gpu.clock_mhz_per_w / gpu.clock_max_mhz * excess_w, _SPEED_MIN)[:, None, None]
        delay_ms = np.array([launch_delay_ms(gpu, int(n)) for n in boxes.processes])[:, None, None]
        least = self._least_cache
        floor = np.minimum(boxes.processes - 1, 40)[:, None, None] * least
        low = np.maximum(boxes.cache_low[:, None, None], floor + least)
        budget = limit * speed - launch - kernels * delay_ms
        # Others use what the box has at least, less the process's own, which follows from its share.
        active = (budget + sensitivity * slope * ability) / np.maximum(1 + sensitivity * (low - offset), 1e-9)
        active = np.minimum(active, budget / np.maximum(1 + sensitivity * floor, 1e-9))
        room = active - k5
        share = work / np.maximum(room, 1e-12) - k4
        units = np.ceil(np.minimum(share / gpu.unit_percent, NEVER) - 1e-9)
        units = np.where((room > 0) & (budget > 0), np.maximum(units, alone), NEVER)
        able = ability / (work / (np.minimum(units, 1e4) * gpu.unit_percent + k4) + k5)
        able = np.where(units < NEVER, able, np.inf)
        return _sizes(units, able)

    def choices(self, processes: int) -> Choices:
        """Choices of each kind for a GPU with ``processes`` processes."""
        if processes not in self._choices:
            most = processes if processes < PROCESSES_MAX else self.packing.capacity
            rows: list[tuple[int, int, int, int]] = []
            group = 0
            for kind, mine in self._members.items():
                for _ in range(min(self._demand[kind], most)):
                    rows += [(*choice, group) for index in mine for choice in self._ways(index, most)]
                    group += 1
            self._choices[processes] = Choices(*np.array(rows, np.int64).reshape(-1, 4).T)
        return self._choices[processes]

    def _ways(self, index: int, most: int) -> list[tuple[int, int, int]]:
        """The choices of an item that a GPU may hold: the item, its number of copies and its slot."""
        alone, capacity = int(self.packing.alone[index]), self.packing.capacity
        copies_max = min(self._items[index].replicas, most, capacity // alone)
        single = [(index, 1, slot) for slot in range(_SLOTS)] if copies_max else []
        return single + [(index, copies, _SLOTS) for copies in range(2, copies_max + 1)]

    def solve(
        self,
        boxes: Boxes,
        table: SizeTable,
        values: FloatArray,
        per_w: FloatArray,
        per_percent: FloatArray,
        target: float,
    ) -> Worth:
        """Solve the knapsack of each box.

        Args:
            boxes, table: The boxes and their :meth:`table`.
            values: Value of each item, float64[items], in prices of the GPU.
            per_w, per_percent: Price of power and of cache use in each box, float64[boxes]; any from 0 gives a bound.
            target: Bounds below it are given as ``target``, without a pattern.
        """
        n = len(boxes.processes)
        # Where prices make every process a loss, the knapsack is empty and the rent of its box is all it says.
        worth = Worth(np.maximum(target, _rent(boxes, per_w, per_percent)), [()] * n, np.zeros(n), np.zeros(n))
        offers = [
            offer
            for processes in np.unique(boxes.processes)
            for offer in self._offers(int(processes), boxes, table, values, per_w, per_percent, target)
        ]
        offers.sort(key=lambda offer: len(offer.units))
        size = max(1, _CHUNK // (PROCESSES_MAX * (self.packing.capacity + 1)))
        for start in range(0, len(offers), size):
            self._fill(offers[start : start + size], target, worth)
        return worth

    def _offers(
        self,
        processes: int,
        boxes: Boxes,
        table: SizeTable,
        values: FloatArray,
        per_w: FloatArray,
        per_percent: FloatArray,
        target: float,
    ) -> list[_Offer]:
        """Choices of the knapsacks of boxes with ``processes`` processes, without those worth less than ``target``."""
        mine = np.flatnonzero(boxes.processes == processes)
        choices, capacity = self.choices(processes), self.packing.capacity
        slope, offset_w, cache_slope, cache_offset, _ = self.per_item
        per_w, per_percent = per_w[mine], per_percent[mine]
        rent = _rent(boxes.where(mine), per_w, per_percent)
        flat = choices.item * (_SLOTS + 1) + choices.slot
        units = table.units[mine].reshape(len(mine), -1)[:, flat] * choices.copies
        able = table.ability[mine].reshape(len(mine), -1)[:, flat]
        an_ability = per_w[:, None] * slope + per_percent[:, None] * cache_slope
        a_process = per_w[:, None] * offset_w + per_percent[:, None] * cache_offset
        gain = (values[choices.item] - a_process[:, choices.item] - an_ability[:, choices.item] * able) * choices.copies
        # A larger size of an item is of use only where it is worth more.
        larger = np.flatnonzero((choices.slot > 0) & (choices.slot < _SLOTS))
        gain[:, larger] = np.where(gain[:, larger] > gain[:, larger - 1] * (1 + 1e-12), gain[:, larger], 0.0)
        keep = _worthwhile(units, gain, choices, capacity, processes, target - rent)
        counts = choices.copies if processes < PROCESSES_MAX else np.zeros_like(choices.copies)
        found = []
        for at in np.flatnonzero(keep.any(axis=1)):
            some = np.flatnonzero(keep[at])
            item, copies = choices.item[some], choices.copies[some]
            power_w = (slope[item] * able[at, some] + offset_w[item]) * copies
            cache = (cache_slope[item] * able[at, some] + cache_offset[item]) * copies
            found.append(
                _Offer(
                    int(mine[at]),
                    min(processes, PROCESSES_MAX - 1),
                    float(rent[at]),
                    units[at, some],
                    gain[at, some],
                    counts[some],
                    choices.group[some],
                    item,
                    copies,
                    power_w,
                    cache,
                )
            )
        return found

    def _fill(self, offers: Sequence[_Offer], target: float, worth: Worth) -> None:
        """Solve some knapsacks together and store their solutions in ``worth``."""
        longest = max(len(offer.units) for offer in offers)

        def padded(name: str, blank: float) -> Any:
            some = [getattr(offer, name) for offer in offers]
            table = np.full((len(some), longest), blank, some[0].dtype)
            for row, one in zip(table, some, strict=True):
                row[: len(one)] = one
            return table

        most = np.array([offer.processes for offer in offers])
        total, taken = _knapsack(
            padded("units", 0),
            padded("gain", -1.0),
            padded("counts", 0),
            padded("group", -1),
            self.packing.capacity,
            most,
        )
        for offer, sum_, picked in zip(offers, total, taken, strict=True):
            if sum_ + offer.rent <= target:
                continue
            worth.most[offer.box] = sum_ + offer.rent
            worth.patterns[offer.box] = tuple(sorted(np.repeat(offer.item[picked], offer.copies[picked]).tolist()))
            worth.power_w[offer.box] = offer.power_w[picked].sum()
            worth.cache_percent[offer.box] = offer.cache[picked].sum()


def _sizes(units: FloatArray, able: FloatArray) -> SizeTable:
    """The sizes of each item from its options, [boxes, items, options]: the fewest units, then ever less ability.

    The last slot stands for all of them: the fewest units and the least ability of any.
    """
    shape = (*units.shape[:2], _SLOTS + 1)
    kept_units, kept_able = np.full(shape, NEVER, np.int64), np.zeros(shape)
    fewest = units.min(axis=2)
    fits = fewest < NEVER
    least = np.where(units <= fewest[:, :, None], able, np.inf).min(axis=2)
    kept_units[:, :, 0], kept_able[:, :, 0] = fewest, np.where(fits, least, 0.0)
    kept_units[:, :, -1], kept_able[:, :, -1] = fewest, np.where(fits, able.min(axis=2), 0.0)
    left = np.where(fits, least, 0.0) * (1 - 1e-9)
    box, item = np.nonzero(kept_able[:, :, -1] < left)
    for slot in range(1, _SLOTS):
        # Few items have another size, fewer a third one.
        mine, can = units[box, item], able[box, item]
        better = can < left[box, item][:, None]
        fewest = np.where(better, mine, NEVER).min(axis=1)
        among = better if slot == _SLOTS - 1 else better & (mine <= fewest[:, None])
        least = np.where(among, can, np.inf).min(axis=1)
        kept_units[box, item, slot], kept_able[box, item, slot] = fewest, least
        left[box, item] = least * (1 - 1e-9)
        more = kept_able[box, item, -1] < left[box, item]
        box, item = box[more], item[more]
    return SizeTable(kept_units, kept_able)


def _rent(boxes: Boxes, per_w: FloatArray, per_percent: FloatArray) -> FloatArray:
    """Worth of the limits of boxes at their prices; a price is 0 where there is no limit."""
    power = np.multiply(per_w, boxes.power_high_w, out=np.zeros(len(per_w)), where=per_w > 0)
    return power + np.multiply(per_percent, boxes.cache_high, out=np.zeros(len(per_w)), where=per_percent > 0)


class _Offer(NamedTuple):
    """Choices of one knapsack; ``rent`` is added to its gain, ``counts`` are the processes that are counted."""

    box: int
    processes: int
    rent: float
    units: IntArray
    gain: FloatArray
    counts: IntArray
    group: IntArray
    item: IntArray
    copies: IntArray
    power_w: FloatArray
    cache: FloatArray


def _worthwhile(
    units: IntArray, gain: FloatArray, choices: Choices, capacity: int, processes: int, cutoff: FloatArray
) -> BoolArray:
    """Mask of the choices that a knapsack worth more than ``cutoff`` may hold, bool[boxes, choices].

    A choice is left out when the least others leave it too little room, when no filling of the rest by density makes it
    worthwhile, and when more services than could stand beside it are worth as much in no more units, each as a single
    process: one of those is free to take its place.
    """
    fits = units <= capacity
    # Others count here that gain nothing at these prices: a pattern may hold them, though a knapsack leaves them out.
    least = np.where(fits, units, capacity).min(axis=1, initial=capacity)[:, None]
    usable, room = fits & (gain > 1e-12), capacity - units
    usable &= room >= (processes - choices.copies) * least
    density = np.where(usable, gain / np.maximum(units, 1), 0.0)
    rest = np.clip(room, 0, capacity)
    usable &= gain + np.take_along_axis(_filled(density, units, capacity), rest, axis=1) > cutoff[:, None]
    most = processes - 1 if processes < PROCESSES_MAX else capacity
    beside = np.minimum(most, (capacity - np.arange(capacity + 1)) // least)
    enough = _ranked(units, np.where(usable & (choices.copies == 1), gain, -np.inf), choices.group, beside)
    return usable & (gain >= np.take_along_axis(enough, np.minimum(units, capacity), axis=1))


def _ranked(units: IntArray, gain: FloatArray, group: IntArray, beside: IntArray) -> FloatArray:
    """Gain that ``beside + 1`` groups reach with single processes of at most 0, 1 ... units, float64[boxes, units]."""
    boxes, lengths = beside.shape
    groups = int(group.max()) + 1
    best = np.full((boxes, groups, lengths), -np.inf)
    row, choice = np.nonzero(np.isfinite(gain))
    at = (row * groups + group[choice]) * lengths + units[row, choice]
    np.maximum.at(best.reshape(-1), at, gain[row, choice])
    np.maximum.accumulate(best, axis=2, out=best)
    at = np.minimum(beside, groups - 1)
    # Only the best few are asked for: sorting them alone, the largest first, takes a fraction of the time.
    few = int(at.max()) + 1
    if few < groups:
        best = np.partition(best, groups - few, axis=1)[:, groups - few :]
    best = -np.sort(-best, axis=1)
    enough = np.take_along_axis(best, at[:, None, :], axis=1)[:, 0, :]
    return np.asarray(np.where(beside < groups, enough, -np.inf), np.float64)


def _filled(density: FloatArray, units: IntArray, capacity: int) -> FloatArray:
    """Most gain of 0, 1 ... ``capacity`` units filled with fractions of choices, float64[boxes, capacity + 1]."""
    top = min(density.shape[1], capacity)  # a choice takes a unit at least
    chosen = np.sort(np.argpartition(-density, top - 1, axis=1)[:, :top], axis=1)  # the same sums on every processor
    best = np.take_along_axis(density, chosen, axis=1)
    by_density = np.argsort(-best, axis=1, kind="stable")
    best = np.take_along_axis(best, by_density, axis=1)
    taken = np.take_along_axis(np.take_along_axis(units, chosen, axis=1), by_density, axis=1)
    upto = np.cumsum(np.where(best > 0, taken, 0), axis=1)
    room = np.arange(capacity + 1)[None, :, None]
    used = np.minimum(upto[:, None, :], room)
    return np.asarray((np.diff(used, axis=2, prepend=0) * best[:, None, :]).sum(axis=2), np.float64)


def _knapsack(
    units: IntArray, gain: FloatArray, copies: IntArray, group: IntArray, capacity: int, most: IntArray
) -> tuple[FloatArray, list[IntArray]]:
    """The best choices, at most one of a group, for each box: their total gain and their indices.

    Args:
        units, gain, copies, group: [boxes, choices], choices of a group side by side.
        capacity: Units of a GPU.
        most: Most processes in each box.
    """
    n, longest = units.shape
    pad, width = int(copies.max(initial=0)), 2 * (capacity + 1)
    rows, height = int(most.max()) + 1, int(most.max()) + 1 + pad
    base = np.full((n, height, width), -np.inf)
    base[:, pad:, capacity + 1 :] = 0.0
    now = base.copy()
    inner = now[:, pad:, capacity + 1 :]
    flat = base.reshape(-1)
    at = (
        np.arange(n)[:, None, None] * (height * width)
        + (np.arange(rows) + pad)[None, :, None] * width
        + (np.arange(capacity + 1) + capacity + 1)[None, None, :]
    )
    back = copies * width + units
    improved = np.zeros((longest, *inner.shape), bool)
    new = np.ones(group.shape, bool)
    new[:, 1:] = group[:, 1:] != group[:, :-1]
    for step in range(longest):
        fresh = new[:, step].nonzero()[0]
        base[fresh] = now[fresh]
        tried = flat.take(at - back[:, step, None, None])
        tried += gain[:, step, None, None]
        np.greater(tried, inner, out=improved[step])
        np.maximum(inner, tried, out=inner)
    boxes = np.arange(n)
    n_left, u_left = most.copy(), np.full(n, capacity)
    done = np.full(n, -2)
    taken: list[list[int]] = [[] for _ in range(n)]
    for step in range(longest - 1, -1, -1):
        hit = improved[step, boxes, n_left, u_left] & (group[:, step] != done)
        for row in hit.nonzero()[0]:
            taken[row].append(step)
            n_left[row] -= copies[row, step]
            u_left[row] -= units[row, step]
            done[row] = group[row, step]
    return inner[boxes, most, capacity].copy(), [np.array(some, np.int64) for some in taken]
