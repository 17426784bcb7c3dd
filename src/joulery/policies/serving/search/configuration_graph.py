"""Clover's configuration graph (SC'23, section 4.2): which variants run on which slices, as a vector of edge weights.

The graph of a service joins variants with slice types; the weight of an edge states how many instances of the variant
run on slices of that type. In one fixed order the weights are a vector: two GPUs are the sum of two vectors, the
distance of two configurations is the L1 distance of their vectors (the number of edge units that differ), and a
configuration that was met before is an equal vector. An edge whose variant does not fit the slice's memory is left out
of the space, so every proposed configuration can run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement, product

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.mig import A100_40GB, MigMenu

NEIGHBOUR_DISTANCE = 4
"""Clover's threshold: configurations at most this many edge units apart are neighbours."""
_PUBLISHED_REPEATS = (9, 15, 16, 17)
"""Partitions the published search leaves out as repeats. It keeps number 13, which repeats number 12."""

Edge = tuple[str, str]
"""A variant and a slice profile."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphSpace:
    """Every configuration of one or more GPUs, as rows of edge weights.

    Attributes:
        variants: Names, in the order of the vector's blocks.
        profiles: Slice profiles, in the order within a block.
        graphs: int64[n, variants * profiles], rows distinct and sorted, read-only.
    """

    variants: tuple[str, ...]
    profiles: tuple[str, ...]
    graphs: IntArray

    def __len__(self) -> int:
        return len(self.graphs)

    def vector(self, instances: Sequence[Edge]) -> tuple[int, ...]:
        """The edge weights of these instances.

        Raises:
            ConfigError: A variant or profile is not of this space.
        """
        weights = [0] * (len(self.variants) * len(self.profiles))
        for variant, profile in instances:
            weights[self._column(variant, profile)] += 1
        return tuple(weights)

    def index(self, vector: Sequence[int]) -> int:
        """The row of a configuration.

        Raises:
            InfeasibleError: The space does not contain it: no MIG partition has these slices, or a variant does not
                fit.
        """
        found = np.flatnonzero((self.graphs == np.asarray(vector, np.int64)).all(axis=1))
        if len(found) == 0:
            raise InfeasibleError(
                f"no partition carries {self.describe(vector)}",
                binding="partitions and memory",
                hint="choose a configuration of the space",
            )
        return int(found[0])

    def instances(self, vector: Sequence[int]) -> tuple[Edge, ...]:
        """The instances of a configuration, largest slices first, then in order of the variants."""
        found = []
        for column, profile in enumerate(self.profiles):
            for row, variant in enumerate(self.variants):
                found += [(variant, profile)] * int(vector[row * len(self.profiles) + column])
        return tuple(found)

    def describe(self, vector: Sequence[int]) -> str:
        """A configuration as text."""
        return ", ".join(f"{variant} on {profile}" for variant, profile in self.instances(vector))

    def neighbours(self, row: int, distance: int = NEIGHBOUR_DISTANCE) -> IntArray:
        """Rows of all configurations at most ``distance`` edge units away, itself left out, in order."""
        return _neighbours(self, row, distance)

    def plus(self, other: GraphSpace) -> GraphSpace:
        """The configurations of the GPUs of both spaces together: every distinct sum of two.

        Raises:
            ConfigError: The spaces have different variants or slices.
        """
        if (self.variants, self.profiles) != (other.variants, other.profiles):
            raise ConfigError("only spaces over the same variants and slices add up", got=f"{other.variants}")
        left, right = self._packed(other), other._packed(self)
        sums = left[:, None] + right[None, :]
        _, first = np.unique(sums, return_index=True)
        rows = self.graphs[first // len(other)] + other.graphs[first % len(other)]
        return _space(self.variants, self.profiles, rows)

    def _packed(self, other: GraphSpace) -> IntArray:
        """Each row encoded as one integer, such that the sums with rows of ``other`` stay distinct."""
        bases = self.graphs.max(axis=0) + other.graphs.max(axis=0) + 1
        if math.prod(bases.tolist()) >= 1 << 62:
            raise InfeasibleError("too many edges to enumerate every sum", hint="use fewer variants")
        places = np.concatenate(([1], np.cumprod(bases[:-1])))
        return np.asarray(self.graphs @ places, np.int64)

    def _column(self, variant: str, profile: str) -> int:
        if variant not in self.variants or profile not in self.profiles:
            raise ConfigError(
                f"no edge from {variant!r} to {profile!r}",
                expected=f"a variant of {', '.join(self.variants)} on one of {', '.join(self.profiles)}",
            )
        return self.variants.index(variant) * len(self.profiles) + self.profiles.index(profile)


@lru_cache(maxsize=2048)
def _neighbours(space: GraphSpace, row: int, distance: int) -> IntArray:
    apart = np.abs(space.graphs - space.graphs[row]).sum(axis=1)
    found = np.flatnonzero((apart <= distance) & (apart > 0))
    found.flags.writeable = False
    return found


def one_gpu(menu: MigMenu, variants: Sequence[str], disabled: Collection[Edge] = ()) -> GraphSpace:
    """Every configuration of one GPU.

    Args:
        menu: MIG partitions of the GPU.
        variants: Names of the variants.
        disabled: Edges that do not exist, because the variant does not fit the slice's memory.

    Raises:
        InfeasibleError: Every partition has a slice that no variant fits.
    """
    profiles = tuple(profile.name for profile in menu.profiles)
    able = [[(name, profile) not in disabled for name in variants] for profile in profiles]
    rows = {row for partition in menu.multisets for row in _assignments(menu.counts(partition), able)}
    if not rows:
        raise InfeasibleError(
            f"no variant fits a {menu.gpu} with any partition",
            binding="memory",
            hint="serve a smaller variant",
        )
    return _space(tuple(variants), profiles, np.array(sorted(rows), np.int64))


def published_odds(space: GraphSpace, menu: MigMenu) -> FloatArray:
    """Odds of each configuration in the published search: a partition, then a variant for each of its slices.

    Partitions are sampled evenly, one of them twice, and so are strings of variants: configurations of few
    slices are proposed far more often than those of many. Strings with an edge the space does not have never occur.

    Args:
        space: One GPU's configurations.
        menu: Its partitions in the published order.

    Returns:
        float64[len(space)], summing to 1.
    """
    sampled = [menu.counts(partition) for partition in published_partitions(menu)]
    shape = (len(space), len(space.variants), len(space.profiles))
    by_edge = space.graphs.reshape(shape)
    odds = np.zeros(len(space))
    for row, slices in enumerate(by_edge.sum(axis=1).tolist()):
        guises = sampled.count(tuple(slices))
        odds[row] = guises * _strings(by_edge[row].T.tolist()) / len(space.variants) ** sum(slices)
    return np.asarray(odds / odds.sum(), np.float64)


def summed_odds(
    total: GraphSpace, one: GraphSpace, odds: FloatArray, other: GraphSpace, others: FloatArray
) -> FloatArray:
    """Odds of each sum of two GPUs' configurations when each GPU's own is sampled by its odds.

    Args:
        total: ``one.plus(other)``.
        one: The first GPU's configurations.
        odds: Their odds.
        other: The second GPU's.
        others: Their odds.

    Returns:
        float64[len(total)], summing to 1.
    """
    bases = one.graphs.max(axis=0) + other.graphs.max(axis=0) + 1
    places = np.concatenate(([1], np.cumprod(bases[:-1])))
    keys = total.graphs @ places
    order = np.argsort(keys, kind="stable")
    found = np.zeros(len(total))
    left = other.graphs @ places
    for row, key in enumerate((one.graphs @ places).tolist()):
        at = order[np.searchsorted(keys, key + left, sorter=order)]
        np.add.at(found, at, odds[row] * others)
    return np.asarray(found / found.sum(), np.float64)


def published_partitions(menu: MigMenu) -> tuple[tuple[str, ...], ...]:
    """The partitions the published search samples, in order of creation: the menu's, repeats left out but for one.

    A menu other than the published one has no published repeats: each distinct multiset counts once.
    """
    if menu != A100_40GB:
        return menu.multisets
    return tuple(partition for number, partition in enumerate(menu.partitions) if number not in _PUBLISHED_REPEATS)


def _strings(by_profile: Sequence[Sequence[int]]) -> int:
    """Number of orders in which the variants can be assigned to the slices; slices of one profile are distinct."""
    ways = 1
    for counts in by_profile:
        ways *= math.factorial(sum(counts))
        for count in counts:
            ways //= math.factorial(count)
    return ways


def _assignments(counts: Sequence[int], able: Sequence[Sequence[bool]]) -> Iterator[tuple[int, ...]]:
    """Every way to put variants on the given number of slices of each profile, as edge weights."""
    choices = []
    for count, fits in zip(counts, able, strict=True):
        usable = [row for row, fit in enumerate(fits) if fit]
        chosen = combinations_with_replacement(usable, count)
        choices.append([[names.count(row) for row in range(len(fits))] for names in chosen])
    for weights in product(*choices):
        yield tuple(weights[column][row] for row in range(len(able[0])) for column in range(len(counts)))


def _space(variants: tuple[str, ...], profiles: tuple[str, ...], rows: IntArray) -> GraphSpace:
    graphs = np.ascontiguousarray(rows[np.lexsort(rows.T[::-1])], np.int64)
    graphs.flags.writeable = False
    return GraphSpace(variants, profiles, graphs)
