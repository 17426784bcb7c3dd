"""Small changes to a pool: another variant on a slice, another partition or clock of a GPU, a GPU more or less.

The relaxation's whole numbers are often one change away from a pool that keeps every limit, or from a better one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from joulery.domain.arrays import IntArray
from joulery.policies.placement.pools.problem import Edges, PoolProblem

PartitionCounts = dict[tuple[int, int, int], int]
State = tuple[PartitionCounts, tuple[IntArray, ...]]
"""GPUs by group, machine and partition; instances of each edge for each service."""
_Slot = tuple[int, int]
"""A service and one of its edges."""


class Changes:
    """Every small change to a pool of one problem."""

    def __init__(self, problem: PoolProblem, edges: Sequence[Edges]) -> None:
        self._problem, self._edges = problem, tuple(edges)
        self._on: dict[tuple[int, int, str], list[_Slot]] = {}
        for service, mine in enumerate(self._edges):
            group = 0 if problem.colocate else service
            for edge in range(len(mine)):
                self._on.setdefault((group, mine.machine[edge], mine.profile[edge]), []).append((service, edge))

    def of(self, state: State, *, partitions: bool = True) -> Iterator[State]:
        """Pools one change away; with ``partitions`` false only those with other variants on the same slices."""
        yield from self._other_variants(state)
        if partitions:
            yield from self._other_partitions(state)
            yield from self._other_clocks(state)

    def _other_variants(self, state: State) -> Iterator[State]:
        gpus, counts = state
        for slots in self._on.values():
            for source in slots:
                if counts[source[0]][source[1]] > 0:
                    for target in slots:
                        if target != source:
                            yield gpus, _moved(counts, [source], [target])

    def _other_clocks(self, state: State) -> Iterator[State]:
        """Pools with one GPU at another clock of its type, its instances unchanged."""
        gpus, counts = state
        machines = self._problem.machines
        for group, old, partition in gpus:
            for new in range(len(machines)):
                if new == old or machines[new].gpu != machines[old].gpu:
                    continue
                leaving = self._leaving(counts, group, old, self._slices((old, partition)))
                if leaving is None:
                    continue
                entering = [self._same_on(slot, group, new) for slot in leaving]
                changed = {**gpus, (group, old, partition): gpus[group, old, partition] - 1}
                changed[group, new, partition] = changed.get((group, new, partition), 0) + 1
                yield {at: n for at, n in changed.items() if n}, _moved(counts, leaving, entering)

    def _same_on(self, slot: _Slot, group: int, machine: int) -> _Slot:
        """The slot of the same variant on the same slice of another machine of the type."""
        service, edge = slot
        mine = self._edges[service]
        return next(
            other
            for other in self._on[group, machine, mine.profile[edge]]
            if other[0] == service and mine.variant[other[1]] == mine.variant[edge]
        )

    def _other_partitions(self, state: State) -> Iterator[State]:
        gpus, _ = state
        for group in range(1 if self._problem.colocate else len(self._edges)):
            olds = [(partition[1], partition[2]) for partition in gpus if partition[0] == group]
            every = [
                (index, number)
                for index, machine in enumerate(self._problem.machines)
                for number in range(len(machine.menu.multisets))
            ]
            for old in [*olds, None]:
                for new in [*every, None]:
                    if old != new and (new is None or new[0] == (old or new)[0]):
                        yield from self._recut(state, group, old, new)

    def _recut(
        self, state: State, group: int, old: tuple[int, int] | None, new: tuple[int, int] | None
    ) -> Iterator[State]:
        """Pools with one GPU partitioned again, added or removed: one kind of instance fills the new slices."""
        gpus, counts = state
        before, after = self._slices(old), self._slices(new)
        machine = (old or new or (0, 0))[0]
        leaving = self._leaving(counts, group, machine, before - after)
        if leaving is None:
            return
        changed = dict(gpus)
        for partition, step in ((old, -1), (new, 1)):
            if partition is not None:
                changed[group, *partition] = changed.get((group, *partition), 0) + step
        changed = {partition: count for partition, count in changed.items() if count}
        if not changed:
            return
        coming = after - before
        for service, variant in self._kinds(group):
            entering = self._entering(group, machine, coming, service, variant)
            if entering is not None:
                yield changed, _moved(counts, leaving, entering)
            if not coming:
                return

    def _slices(self, partition: tuple[int, int] | None) -> Counter[str]:
        return (
            Counter()
            if partition is None
            else Counter(self._problem.machines[partition[0]].menu.multisets[partition[1]])
        )

    def _kinds(self, group: int) -> list[tuple[int, str]]:
        services = range(len(self._edges)) if self._problem.colocate else (group,)
        return [
            (service, variant.name)
            for service in services
            for variant in self._problem.services[service].costs.variants
        ]

    def _leaving(
        self, counts: tuple[IntArray, ...], group: int, machine: int, slices: Counter[str]
    ) -> list[_Slot] | None:
        found: list[_Slot] = []
        for profile, count in slices.items():
            there = [
                slot
                for slot in self._on.get((group, machine, profile), [])
                for _ in range(int(counts[slot[0]][slot[1]]))
            ]
            if len(there) < count:
                return None
            found += there[:count]
        return found

    def _entering(
        self, group: int, machine: int, slices: Counter[str], service: int, variant: str
    ) -> list[_Slot] | None:
        found: list[_Slot] = []
        for profile, count in slices.items():
            slots = self._on.get((group, machine, profile), [])
            fitting = [(s, e) for s, e in slots if s == service and self._edges[s].variant[e] == variant]
            if not fitting:
                return None
            found += fitting * count
        return found


def _moved(counts: tuple[IntArray, ...], leaving: Sequence[_Slot], entering: Sequence[_Slot]) -> tuple[IntArray, ...]:
    made = tuple(np.array(each) for each in counts)
    for service, edge in leaving:
        made[service][edge] -= 1
    for service, edge in entering:
        made[service][edge] += 1
    return made
