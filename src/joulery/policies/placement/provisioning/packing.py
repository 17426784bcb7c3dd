"""Replicas that fit on one GPU together, and a lower bound of the units they need there.

:meth:`Packing.fit` finds batches and shares that are within every SLO: its result can be run. :meth:`Packing.least`
bounds from below the units that *any* choice of batches needs: a pattern that it rules out is impossible, so proofs may
rest on it. The units of both only grow when a replica is added, so no superset of a set that does not fit can fit.

The bound takes each neighbour at the least power and cache use it could ever have. What an option needs then follows
from three numbers of the neighbourhood: the speed of the clock, the stretch by the cache, the delay of launches. Within
a box of these, an option that needs more than another at all eight corners needs more everywhere (the comparison is
linear in each), so it is left out of the bound; neighbourhoods outside the box are taken as the nearest inside.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.gpu.provisioning import Workload
from joulery.perf.interference.model import GpuCoefficients, launch_delay_ms
from joulery.policies.placement.provisioning.gpu_shares import GpuType, allocate, units_of
from joulery.policies.placement.provisioning.options import Item, Kind, Option, Rules, kinds_of

NEVER = 10**6
"""Units of a replica that no share makes fast enough."""
_SPEED_MIN, _STRETCH_MAX, _NEIGHBOURS_MAX = 0.75, 1.4, 8
"""The box of neighbourhoods in which options are compared."""
_COMBINATIONS_MAX = 2000
"""Combinations of batches tried for one pattern."""

IntArray = npt.NDArray[np.int64]
Pattern = tuple[int, ...]
"""Indices of items on one GPU, in increasing order, repeated where one item is there more than once."""
Range = tuple[int, int | None]
"""Fewest and most GPUs of a type; None for no upper limit."""


class PackedGpu(NamedTuple):
    """A GPU with a pattern on it.

    Attributes:
        pattern: The items.
        options: The batch chosen for each.
        units: The share of each, in units.
    """

    pattern: Pattern
    options: tuple[Option, ...]
    units: tuple[int, ...]

    @property
    def total(self) -> int:
        """Units of all processes."""
        return sum(self.units)


class More(NamedTuple):
    """Processes that will join a pattern, described only by lower bounds.

    Attributes:
        power_w, cache_percent: Least sums, float64 that broadcasts against [patterns, items].
        processes: Least number of processes.
    """

    power_w: FloatArray
    cache_percent: FloatArray
    processes: int


class Packing:
    """One GPU type and the items that may be put on it.

    Attributes:
        gpu_type: The type.
        capacity: Units of a whole GPU.
        alone: Units each item needs alone, int64[items]; ``NEVER`` where it does not fit.
        power_w, cache_percent: Least power and cache use of each item, float64[items].
        memory_bytes: Memory of each item and its standby, float64[items]; 0 where unknown.
        memory_limit_bytes: Memory of the GPU; infinite where unknown.
        rivals: Pairs of items that no GPU may hold together, bool[items, items]; None where there are none.
        unsure: Patterns that were not found to fit, without a proof that they do not.
    """

    def __init__(self, gpu_type: GpuType, type_index: int, items: Sequence[Item]) -> None:
        self.gpu_type = gpu_type
        self.gpu = gpu_type.profile.gpu
        self.capacity = units_of(self.gpu)
        self._options = [item.options[type_index] for item in items]
        self._kind, self._apart = [item.kind for item in items], [item.apart for item in items]
        self.rivals = _rivals(items)
        self.memory_bytes = np.array([item.memory_bytes for item in items], np.float64)
        self.memory_limit_bytes = math.inf if gpu_type.memory_bytes is None else gpu_type.memory_bytes
        self._may_bar = self.memory_limit_bytes < math.inf or any(self._apart)
        self.alone = np.array([some[0].units if some else NEVER for some in self._options], np.int64)
        self.power_w = np.array([min((o.figures[1] for o in some), default=0.0) for some in self._options])
        self.cache_percent = np.array([min((o.figures[2] for o in some), default=0.0) for some in self._options])
        self._kept = [_undominated(self.gpu, some) for some in self._options]
        self._rows = _rows(self._kept, self.power_w)
        self._fits: dict[Pattern, PackedGpu | None] = {}
        self._tightest: dict[Pattern, PackedGpu | None] = {}
        self.unsure: set[Pattern] = set()
        self._tables: dict[int, FloatArray] = {}

    def newcomers(self, patterns: IntArray, more: More | None = None) -> IntArray:
        """Units each item needs at least when it joins each pattern, int64[patterns, items].

        Args:
            patterns: Items of each pattern, int64[patterns, n], n at least 1.
            more: Processes that will be there at least, beside the pattern and the item itself.
        """
        power_w = self.power_w[patterns].sum(axis=1)[:, None]
        cache_percent = self.cache_percent[patterns].sum(axis=1)[:, None]
        processes = patterns.shape[1] + 1
        if more is not None:
            power_w, cache_percent = power_w + more.power_w, cache_percent + more.cache_percent
            processes += more.processes
        needed = _needed(self.gpu, self._rows, power_w[:, :, None], cache_percent[:, :, None], processes)
        return np.asarray(needed.min(axis=2), np.int64)

    def least(self, patterns: IntArray, more: More | None = None) -> IntArray:
        """Units each item of each pattern needs at least, int64[patterns, n]; with ``more`` beside the pattern."""
        if patterns.shape[1] == 1 and more is None:
            return self.alone[patterns]
        return np.asarray(self._needed_by(patterns, more).min(axis=2), np.int64)

    def _needed_by(self, patterns: IntArray, more: More | None = None) -> FloatArray:
        """Units each batch of each item of each pattern needs at least, float64[patterns, n, batches]."""
        power_w, cache_percent = self.power_w[patterns], self.cache_percent[patterns]
        others_w = power_w.sum(axis=1, keepdims=True) - power_w
        others_percent = cache_percent.sum(axis=1, keepdims=True) - cache_percent
        processes = patterns.shape[1]
        if more is not None:
            others_w, others_percent = others_w + more.power_w, others_percent + more.cache_percent
            processes += more.processes
        rows = self._rows.of(patterns)
        return _needed(self.gpu, rows, others_w[:, :, None], others_percent[:, :, None], processes)

    def tightest(self, pattern: Pattern) -> PackedGpu | None:
        """As :meth:`fit`, with the fewest units there are among the combinations of batches tried."""
        if pattern not in self._tightest:
            self._tightest[pattern] = self._tighten(pattern, self.fit(pattern))
        return self._tightest[pattern]

    def _tighten(self, pattern: Pattern, best: PackedGpu | None) -> PackedGpu | None:
        if best is None or len(pattern) == 1:
            return best
        for options in itertools.islice(self._combinations(pattern), _COMBINATIONS_MAX):
            best = self._allocated(pattern, options, best.total - 1) or best
        return best

    def fit(self, pattern: Pattern) -> PackedGpu | None:
        """Batches and shares with which the pattern is within every SLO; None when none were found."""
        if pattern not in self._fits:
            self._fits[pattern] = self._search(pattern)
        return self._fits[pattern]

    def known(self, pattern: Pattern) -> bool:
        """Whether the pattern was found to fit before."""
        return self._fits.get(pattern) is not None

    def screen(self, patterns: Iterable[Pattern]) -> list[Pattern]:
        """Settle :meth:`fit` of many patterns at once, as far as the least units of their items can settle it.

        Patterns that need more than a GPU at least do not fit. Of the others, the batches that need least are tried.

        Returns:
            The patterns that this call found to fit, without those that were settled before.
        """
        found: list[Pattern] = []
        by_size: dict[int, list[Pattern]] = {}
        for pattern in patterns:
            if len(pattern) > 1 and pattern not in self._fits:
                by_size.setdefault(len(pattern), []).append(pattern)
        for some in by_size.values():
            needed = self._needed_by(np.array(some))
            least, best = needed.min(axis=2).astype(np.int64), needed.argmin(axis=2)
            for pattern, start, chosen in zip(some, least.tolist(), best.tolist(), strict=True):
                if sum(start) > self.capacity or self._barred(pattern):
                    self._fits[pattern] = None
                    continue
                options = tuple([self._kept[item][at] for item, at in zip(pattern, chosen, strict=True)])
                # Every batch needs this much beside the others at least, so the least shares are the same from here.
                units = allocate(self.gpu, [option.process for option in options], start, self.capacity)
                if units is not None:
                    self._fits[pattern] = PackedGpu(pattern, options, tuple(units))
                    found.append(pattern)
        return found

    def impossible(self, pattern: Pattern) -> bool:
        """Whether it is proven that no batches make the pattern fit."""
        return self.fit(pattern) is None and pattern not in self.unsure

    def _barred(self, pattern: Pattern) -> bool:
        """Whether memory, or replicas of one service that must not share a GPU, rule the pattern out."""
        if not self._may_bar:
            return False
        if math.fsum(self.memory_bytes[item] for item in pattern) > self.memory_limit_bytes:
            return True
        alike = Counter(self._kind[item] for item in pattern)
        return any(alike[self._kind[item]] > 1 for item in pattern if self._apart[item])

    def _search(self, pattern: Pattern) -> PackedGpu | None:
        if self._barred(pattern):
            return None
        if len(pattern) == 1:
            first = self._options[pattern[0]][:1]
            return self._allocated(pattern, first, self.capacity) if first else None
        if not all(self._options[item] for item in pattern):
            return None
        combinations = self._combinations(pattern)
        for options in itertools.islice(combinations, _COMBINATIONS_MAX):
            layout = self._allocated(pattern, options, self.capacity)
            if layout is not None:
                return layout
        if next(combinations, None) is not None:
            self.unsure.add(pattern)
        return None

    def _combinations(self, pattern: Pattern) -> Iterator[tuple[Option, ...]]:
        hopeful = self._possible_options(pattern)
        return _combinations(hopeful, pattern, self.capacity) if all(hopeful) and hopeful else iter(())

    def _possible_options(self, pattern: Pattern) -> list[list[tuple[int, Option]]]:
        """For each item the options that could be part of a fit, with the units each needs at least; fewest first.

        Each option is checked against the least that the other items could be, until no option is ruled out any more.
        """
        tables = [self._table(item) for item in pattern]
        table = np.concatenate(tables, axis=1)
        starts = np.cumsum([0] + [each.shape[1] for each in tables[:-1]])
        member = np.repeat(np.arange(len(pattern)), [each.shape[1] for each in tables])
        units = table[_UNITS]
        while True:
            least = np.minimum.reduceat(units, starts)
            hopeless = units > self.capacity - (least.sum() - least[member])
            if bool(np.any(np.logical_and.reduceat(hopeless, starts))):
                return []
            ability = table[_ABILITY] / (table[_WORK] / (units * self.gpu.unit_percent + table[_K4]) + table[_K5])
            power_w = table[_POWER_SLOPE] * ability + table[_POWER_OFFSET]
            cache_percent = table[_CACHE_SLOPE] * ability + table[_CACHE_OFFSET]
            least_w = np.minimum.reduceat(np.where(hopeless, np.inf, power_w), starts)
            least_percent = np.minimum.reduceat(np.where(hopeless, np.inf, cache_percent), starts)
            rows = _Columns(*table[: len(_Columns._fields)])._replace(power_w=power_w, units=units)
            others_w, others_percent = least_w.sum() - least_w, least_percent.sum() - least_percent
            grown = _needed(self.gpu, rows, others_w[member], others_percent[member], len(pattern))
            if bool(np.all((grown == units) | hopeless)):
                break
            units = np.where(hopeless, units, grown)
        return [
            sorted(
                ((int(n), option) for n, out, option in zip(some, outs, self._options[item], strict=True) if not out),
                key=lambda hopeful: hopeful[0],
            )
            for item, some, outs in zip(
                pattern, np.split(units, starts[1:]), np.split(hopeless, starts[1:]), strict=True
            )
        ]

    def _table(self, item: int) -> FloatArray:
        """Constants of all options of an item, float64[constants, options]."""
        if item not in self._tables:
            self._tables[item] = np.array([_table_row(option) for option in self._options[item]], np.float64).T
        return self._tables[item]

    def _allocated(self, pattern: Pattern, options: tuple[Option, ...], most: int) -> PackedGpu | None:
        units = allocate(self.gpu, [o.process for o in options], [o.units for o in options], most)
        return None if units is None else PackedGpu(pattern, options, tuple(units))


def _rivals(items: Sequence[Item]) -> npt.NDArray[np.bool_] | None:
    """Pairs of replicas of one service that must not share a GPU; an item is a rival of its own copies."""
    if not any(item.apart for item in items):
        return None
    kind, apart = np.array([item.kind for item in items]), np.array([item.apart for item in items])
    return np.asarray((kind[:, None] == kind[None, :]) & (apart[:, None] | apart[None, :]))


def _combinations(
    hopeful: Sequence[Sequence[tuple[int, Option]]], pattern: Pattern, capacity: int
) -> Iterator[tuple[Option, ...]]:
    """Every choice of one option for each item whose least units fit together; equal items in one order only."""
    rest = [0] * (len(pattern) + 1)
    for at in range(len(pattern) - 1, -1, -1):
        rest[at] = rest[at + 1] + hopeful[at][0][0]

    def chosen(at: int, first: int, room: int) -> Iterator[tuple[Option, ...]]:
        if at == len(pattern):
            yield ()
            return
        for place in range(first, len(hopeful[at])):
            units, option = hopeful[at][place]
            if units + rest[at + 1] > room:
                break
            again = at + 1 < len(pattern) and pattern[at + 1] == pattern[at]
            for others in chosen(at + 1, place if again else 0, room - units):
                yield (option, *others)

    return chosen(0, 0, capacity)


class _Columns(NamedTuple):
    """Constants of options as arrays of one shape; ``power_w`` is the least power of the item they belong to."""

    limit: FloatArray
    launch: FloatArray
    kernels: FloatArray
    work: FloatArray
    k4: FloatArray
    k5: FloatArray
    sensitivity: FloatArray
    power_w: FloatArray
    units: FloatArray

    def of(self, items: IntArray) -> _Columns:
        """The constants of some items."""
        return _Columns(*(column[items] for column in self))


_UNFIT = (-1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, float(NEVER))
"""Constants of an option that never fits: pads rows to one length."""


def _constants(option: Option, power_w: float) -> tuple[float, ...]:
    one = option.process
    return (
        one.limit_ms,
        one.launch_ms,
        one.kernels,
        one.work,
        one.k4,
        one.k5,
        one.cache_sensitivity,
        power_w,
        float(option.units),
    )


_WORK, _K4, _K5, _UNITS = (_Columns._fields.index(name) for name in ("work", "k4", "k5", "units"))
_ABILITY, _POWER_SLOPE, _POWER_OFFSET, _CACHE_SLOPE, _CACHE_OFFSET = range(9, 14)
"""Rows of a table that hold the constants of an option."""


def _table_row(option: Option) -> tuple[float, ...]:
    one = option.process
    return (
        *_constants(option, option.figures[1]),
        one.ability,
        one.power_slope,
        one.power_offset_w,
        one.cache_slope,
        one.cache_offset_percent,
    )


def _rows(kept: Sequence[Sequence[Option]], power_w: FloatArray) -> _Columns:
    """The options of every item that the bound needs, float64[items, longest] each."""
    longest = _longest(kept)
    table = np.array(
        [
            [*(_constants(o, float(least_w)) for o in some), *[_UNFIT] * (longest - len(some))]
            for some, least_w in zip(kept, power_w, strict=True)
        ],
        np.float64,
    ).reshape(len(kept), longest, len(_UNFIT))
    return _Columns(*np.moveaxis(table, 2, 0))


def _longest(kept: Sequence[Sequence[Option]]) -> int:
    return max((len(some) for some in kept), default=0) or 1


def _undominated(gpu: GpuCoefficients, options: Sequence[Option]) -> list[Option]:
    """The options that some neighbourhood of the box makes best, judged by the share they need.

    Option A needs no more than B wherever (w_A L_B - w_B L_A) s <= (w_A - w_B)(l + k5 z), with work w, limit L, speed
    s, launch delay l and stretch z; linear in each of s, l and z, so the corners decide. A must also need no more units
    than B when alone.
    """
    kept: list[Option] = []
    for option in options:
        if not any(_dominates(gpu, other, option) for other in kept):
            kept = [other for other in kept if not _dominates(gpu, option, other)]
            kept.append(option)
    return kept


def _dominates(gpu: GpuCoefficients, a: Option, b: Option) -> bool:
    one, other = a.process, b.process
    if a.units > b.units:
        return False
    cross, more = one.work * other.limit_ms - other.work * one.limit_ms, one.work - other.work
    most_ms = one.launch_ms + one.kernels * launch_delay_ms(gpu, _NEIGHBOURS_MAX)
    return all(
        cross * speed <= more * (launch_ms + one.k5 * stretch)
        for speed in (_SPEED_MIN, 1.0)
        for launch_ms in (one.launch_ms, most_ms)
        for stretch in (1.0, _STRETCH_MAX)
    )


def _needed(
    gpu: GpuCoefficients,
    rows: _Columns,
    others_w: FloatArray | float,
    others_percent: FloatArray | float,
    processes: int,
) -> FloatArray:
    """Units options need at least beside others of at least this power and cache use, ``processes`` in all."""
    excess_w = np.maximum(gpu.idle_w + others_w + rows.power_w - gpu.power_cap_w, 0.0)
    speed = np.maximum(1.0 + gpu.clock_mhz_per_w / gpu.clock_max_mhz * excess_w, _SPEED_MIN)
    stretch = np.minimum(1 + rows.sensitivity * others_percent, _STRETCH_MAX)
    delay_ms = launch_delay_ms(gpu, min(processes, _NEIGHBOURS_MAX))
    active_ms = (rows.limit * speed - rows.launch - rows.kernels * delay_ms) / stretch - rows.k5
    share_percent = rows.work / np.maximum(active_ms, 1e-12) - rows.k4
    units = np.ceil(np.minimum(share_percent / gpu.unit_percent, NEVER) - 1e-9)
    return np.asarray(np.where(active_ms > 0, np.maximum(units, rows.units), NEVER))


@dataclass(frozen=True, slots=True)
class Problem:
    """Services and GPU types, with the kinds, items and packings derived from them and the rules."""

    workloads: Sequence[Workload]
    types: Sequence[GpuType]
    kinds: tuple[Kind, ...]
    items: tuple[Item, ...]
    packings: tuple[Packing, ...]

    @property
    def demand(self) -> list[int]:
        """Services of each kind."""
        return [len(kind.members) for kind in self.kinds]

    @property
    def crossed(self) -> bool:
        """Whether more than shares limits the processes of a GPU: memory, or replicas that stay apart."""
        known = any(packing.memory_limit_bytes < math.inf for packing in self.packings)
        return any(item.apart or (known and item.memory_bytes > 0) for item in self.items)

    @property
    def ranges(self) -> list[Range]:
        """Range of the number of GPUs of each type."""
        return [(0, gpu_type.available) for gpu_type in self.types]


def problem_of(workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> Problem:
    """Derive the kinds, items and packings of a problem.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: No GPU types, two services of one name, or a model unknown to all types.
    """
    return _problem(workloads, types, kinds_of(workloads, types, rules))


def part_of(problem: Problem, services: Sequence[int]) -> Problem:
    """The problem of some of the services alone, by their indices: the same as :func:`problem_of` derives for them."""
    kind_of = {member: kind for kind in problem.kinds for member in kind.members}
    members: dict[int, list[int]] = {}
    for index, service in enumerate(services):
        members.setdefault(kind_of[service].items[0].kind, []).append(index)
    kinds = tuple(
        Kind(tuple(mine), tuple(item._replace(kind=number) for item in problem.kinds[kind].items))
        for number, (kind, mine) in enumerate(members.items())
    )
    return _problem([problem.workloads[service] for service in services], problem.types, kinds)


def _problem(workloads: Sequence[Workload], types: Sequence[GpuType], kinds: tuple[Kind, ...]) -> Problem:
    items = tuple(item for kind in kinds for item in kind.items)
    packings = tuple(Packing(gpu_type, index, items) for index, gpu_type in enumerate(types))
    return Problem(workloads, types, kinds, items, packings)
