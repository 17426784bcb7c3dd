"""Least resource use of processes in boxes of neighbourhoods, and its cost at prices of a GPU's resources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import Boxes, Knapsacks
from joulery.policies.placement.provisioning.options import Item
from joulery.policies.placement.provisioning.packing import NEVER, IntArray, Packing


class BoxUses(NamedTuple):
    """Least needs of processes in each box: float64[sizes, boxes, items]; memory as a ratio, float64[items].

    A process that does not fit has 0 units, and its ``barred``, which is 0 for other processes, is infinite.
    """

    units: FloatArray
    power_w: FloatArray
    cache_percent: FloatArray
    barred: FloatArray
    memory: FloatArray

    def cost(self, prices: FloatArray) -> FloatArray:
        """Cost of every process at resource prices, float64[sizes, boxes, items]; infinite where it does not fit."""
        units, processes, power, cache, memory = (column[:, None] for column in prices.T)
        total = units * self.units
        total += power * self.power_w
        total += cache * self.cache_percent
        total += processes + memory * self.memory
        total += self.barred
        return np.asarray(total, np.float64)

    def joined(self, keep: IntArray, other: BoxUses) -> BoxUses:
        """The uses of some boxes, followed by those of other boxes."""
        pairs = zip(self[:4], other[:4], strict=True)
        units, power_w, cache_percent, barred = (np.concatenate([mine[:, keep], more], axis=1) for mine, more in pairs)
        return BoxUses(units, power_w, cache_percent, barred, self.memory)


class BoxedServices(NamedTuple):
    """Some services with the data of their items.

    Attributes:
        knapsacks: Knapsacks of these items, for each GPU type.
        memory: For each GPU type: memory of each item as a ratio of the GPU's, float64[items].
        demand: Services of each kind, float64[kinds].
        items: Indices of these items among all, int64[items].
        kind, replicas, starts: Kind and replicas of each item; the first item of each kind.
        alone_usd: Least cost of a service of each kind on GPUs of its own, by any of its items, float64[kinds].
    """

    knapsacks: tuple[Knapsacks, ...]
    memory: tuple[FloatArray, ...]
    demand: FloatArray
    items: IntArray
    kind: IntArray
    replicas: FloatArray
    starts: IntArray
    alone_usd: FloatArray

    def uses(self, index: int, boxes: Boxes) -> BoxUses:
        """Least needs of the items in boxes of one type."""
        table, per_item = self.knapsacks[index].table(boxes), self.knapsacks[index].per_item
        slope, offset_w, cache_slope, cache_offset, _ = per_item
        # The last size of the table stands for several copies; here each process has a size of its own.
        units = np.ascontiguousarray(np.moveaxis(table.units[:, :, :-1], 2, 0), np.float64)
        ability = np.ascontiguousarray(np.moveaxis(table.ability[:, :, :-1], 2, 0))
        fits = units < NEVER
        return BoxUses(
            np.where(fits, units, 0.0),
            slope * ability + offset_w,
            cache_slope * ability + cache_offset,
            np.where(fits, 0.0, np.inf),
            self.memory[index],
        )

    def cheapest(self, cost: FloatArray) -> FloatArray:
        """Least cost of a service of each kind in each box, float64[boxes, kinds]."""
        each = cost.min(axis=0) * self.replicas
        return np.asarray(np.minimum.reduceat(each, self.starts, axis=1), np.float64)


def services_of(
    packings: Sequence[Packing],
    items: Sequence[Item],
    demand: Sequence[int],
    knapsacks: Sequence[Knapsacks],
    kinds: IntArray,
    close: BoolArray | None = None,
) -> BoxedServices:
    """Services of some kinds, numbered from 0.

    Args:
        packings: The GPU types.
        items: All items, those of a kind side by side.
        demand: Services of each kind.
        knapsacks: Knapsacks of all items, for each GPU type.
        kinds: The kinds, in increasing order.
        close: Mask of the items to keep, bool[items]; a kind without any keeps its first. All when left out.
    """
    number = {int(kind): at for at, kind in enumerate(kinds)}
    every = np.array([at for at, item in enumerate(items) if item.kind in number], np.int64)
    kind = np.array([number[items[at].kind] for at in every], np.int64)
    replicas = np.array([items[at].replicas for at in every], np.float64)
    alone = np.full(len(kinds), np.inf)
    for packing in packings:
        fits = packing.alone[every] <= packing.capacity
        np.minimum.at(alone, kind, np.where(fits, replicas * packing.gpu_type.usd_per_hour, np.inf))
    keep = np.ones(len(every), np.bool_)
    if close is not None:
        keep = close[every] | ((np.diff(kind, prepend=-1) > 0) & ~np.isin(kind, kind[close[every]]))
    chosen, kind, replicas = every[keep], kind[keep], replicas[keep]
    return BoxedServices(
        tuple(each.of(chosen) for each in knapsacks),
        tuple(packing.memory_bytes[chosen] / packing.memory_limit_bytes for packing in packings),
        np.array(demand, np.float64)[kinds],
        chosen,
        kind,
        replicas,
        np.r_[0, np.flatnonzero(np.diff(kind)) + 1],
        alone,
    )
