"""Column generation for many different services: patterns from knapsacks, and from exchanges of their items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.master import Relaxation, Whole
from joulery.policies.placement.provisioning.column_generation import Effort, Generator
from joulery.policies.placement.provisioning.many_kinds.box_search import BoxSearch
from joulery.policies.placement.provisioning.many_kinds.exchanges import Exchangeable
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import Knapsacks
from joulery.policies.placement.provisioning.packing import Pattern, Problem, Range

_ABOVE = 1e-4
"""Ratio by which a pattern must be worth more than its GPU to be added."""
_STALE, _STALE_CAREFUL = (6, 1e-3), (12, 4e-4)
"""Rounds and ratio: generation ends when that many rounds lowered the relaxation by less than the ratio."""
_ROUNDS_MAX = 600
_WEIGHT, _WEIGHT_STEP = 0.9, 0.06
"""Weight of the values by shares alone in the first round, and its decrease in each later round."""
_EXCHANGED_FROM, _EXCHANGED_MAX, _CLOSE = 1_500, 30_000, 0.02
"""Most patterns in which a round exchanges items, most new patterns that it checks, and the part of its GPU's price by
which the worth of a pattern may differ."""
_TOGETHER_MAX = 2_500
"""Patterns, those worth most, among which whole numbers are sought at once."""
_REST_KINDS = 40
"""Services without a GPU from which on whole numbers are left to the solver; before, GPUs are settled one by one."""
_SURE = 0.9
"""Part of a GPU in the relaxation from which on a pattern is settled at once."""


class DiveStep(NamedTuple):
    """Step of a dive: how carefully it settles GPUs.

    Attributes:
        settled_ratio: At least this part of those that are left is settled at once.
        rounds: Rounds of column generation in between.
    """

    settled_ratio: float
    rounds: int


QUICK = DiveStep(0.25, 3)
"""The step for a plan in little time."""


class BoxGenerator(Generator):
    """A :class:`Generator` whose work does not depend on the number of patterns."""

    def __init__(self, problem: Problem, effort: Effort, *, ranges: Sequence[Range] | None = None) -> None:
        super().__init__(problem, effort, ranges=ranges)
        self._items, packings, kinds = problem.items, problem.packings, range(len(problem.kinds))
        fewest = [min(item.replicas for item in self._items if item.kind == kind) for kind in kinds]
        self._uncut = np.array([float(item.replicas == fewest[item.kind]) for item in self._items])
        self._open = np.ones(len(self._items))
        self._allowed = self._open.copy()
        self._unfit: list[set[Pattern]] = [set() for _ in packings]
        self._searches = self._box_searches()
        price = [packing.gpu_type.usd_per_hour for packing in packings]
        self._dearest, self._weight = max(price), _WEIGHT
        self._alone = np.full(len(problem.kinds), np.inf)
        for packing in packings:
            share = packing.alone / packing.capacity / self._part * packing.gpu_type.usd_per_hour
            np.minimum.at(self._alone, self._kind, np.where(packing.alone <= packing.capacity, share, np.inf))

    def _box_searches(self) -> list[BoxSearch]:
        demand = self._demand.astype(int).tolist()
        return [
            BoxSearch(Knapsacks(packing, self._items, demand, index)) for index, packing in enumerate(self._packings)
        ]

    def allow_divided(self, allowed: bool) -> None:
        """Allow or forbid that services are divided into more replicas than they need, from now on.

        Without such divisions a service has a sixth of the choices, and GPUs have hardly more room left.
        """
        self._open = np.ones(len(self._items)) if allowed else self._uncut
        self._allowed = self._open.copy()
        for search in self._searches:
            search.choose(self._open > 0)

    def generate(self, relaxation: Relaxation, rounds: int = _ROUNDS_MAX, *, careful: bool = False) -> Relaxation:
        """Add patterns until none is found that is worth its GPU, or the relaxation hardly falls any more."""
        stale_rounds, stale_ratio = _STALE_CAREFUL if careful else _STALE
        history, dry = [relaxation.usd_per_hour], 0
        for _ in range(rounds):
            added = self._round(self._smoothed(relaxation), 1 + _ABOVE, everywhere=dry > 0)
            dry = 0 if added else dry + 1
            if dry > 2:
                break
            if added:
                relaxation = self.master.relax()
            history.append(relaxation.usd_per_hour)
            if len(history) > stale_rounds and history[-1] > history[-stale_rounds] * (1 - stale_ratio):
                break
        return relaxation

    def _smoothed(self, relaxation: Relaxation) -> Relaxation:
        """The relaxation with values drawn towards those proportional to the shares needed alone, less in each round.

        The first relaxations have few patterns, and their values depend more on these patterns than on the services.
        """
        weight, self._weight = self._weight, max(0.0, self._weight - _WEIGHT_STEP)
        total = float(self._demand @ self._alone)
        if weight <= 0 or total <= 0:
            return relaxation
        alone = self._alone * (float(self._demand @ relaxation.values) / total)
        bounded = np.minimum(alone, self._dearest)
        return relaxation._replace(values=weight * bounded + (1 - weight) * relaxation.values)

    def _round(self, relaxation: Relaxation, target: float, *, everywhere: bool) -> int:
        added = 0
        for index in self._wanted():
            values = self._values(relaxation) * self._allowed / self._price(index, relaxation)
            found = self._searches[index].round(values, target, everywhere=everywhere)
            self._packings[index].screen(found)
            exchanged = self._exchanged(index, found, values, target)
            self._packings[index].screen(exchanged)
            added += self._join(index, found | exchanged)
        return added

    def _exchanged(self, index: int, patterns: set[Pattern], values: FloatArray, target: float) -> set[Pattern]:
        """Patterns with one item exchanged for the most valuable other that needs no more units alone.

        Knapsacks hold the most valuable items alone; the relaxation needs patterns of every service. Where the pattern
        does not fit, the other item needs fewer units.
        """
        packing, found, kinds = self._packings[index], set[Pattern](), self._kind.tolist()
        ranked = np.flatnonzero(values > 0)
        ranked = ranked[np.argsort(-values[ranked], kind="stable")]
        value, units = values[ranked], packing.alone[ranked]
        items, kind = ranked.tolist(), self._kind[ranked].tolist()
        for pattern in sorted(patterns):
            spare = 0 if packing.fit(pattern) is not None else 1
            worth = float(values[list(pattern)].sum())
            mine = {kinds[item] for item in pattern}
            for item in set(pattern):
                room = packing.alone[item] - spare
                fitting = np.flatnonzero((units <= room) & (value > target - worth + values[item])).tolist()
                other = next((at for at in fitting if kind[at] not in mine), None)
                if other is not None:
                    rest = list(pattern)
                    rest.remove(item)
                    found.add(tuple(sorted([*rest, items[other]])))
        return found - patterns

    def exchange(self, relaxation: Relaxation) -> Relaxation:
        """Add patterns that differ from known ones by an item and are worth almost their GPU; returns the relaxation.

        That lowers the relaxation where knapsacks no longer do, and whole numbers need such patterns.
        """
        random, added = np.random.default_rng(0), 0
        for index in self._wanted():
            values = self._values(relaxation) * self._allowed / self._price(index, relaxation)
            items = Exchangeable(self._packings[index], self._kind, self._copies, values)
            known = self._most_valuable(items, index, _EXCHANGED_FROM)
            found = items.neighbours(known, 1 - _CLOSE, 1 + _CLOSE)
            if len(found) > _EXCHANGED_MAX:
                chosen = random.choice(len(found), _EXCHANGED_MAX, replace=False)
                found = [found[at] for at in np.sort(chosen).tolist()]
            added += sum(self._add(index, pattern) for pattern in self._packings[index].screen(found))
        return self.master.relax() if added else relaxation

    def _most_valuable(self, items: Exchangeable, index: int, most: int) -> list[Pattern]:
        """The patterns of a type that are worth almost their GPU, the most valuable of them."""
        some = [(items.worth(each.pattern), each.pattern) for each in self.master.patterns if each.type_index == index]
        close = [each for each in some if each[0] > 1 - 1.5 * _CLOSE]
        return [pattern for _, pattern in sorted(close, key=lambda each: (-each[0], each[1]))[:most]]

    def at_once(self, relaxation: Relaxation) -> Whole:
        """Whole numbers over the patterns that are worth most, all settled by the solver."""
        worth = [self._values(relaxation) / self._price(index, relaxation) for index in range(len(self._packings))]
        values = [float(worth[each.type_index][list(each.pattern)].sum()) for each in self.master.patterns]
        chosen = np.sort(np.argsort(-np.array(values), kind="stable")[:_TOGETHER_MAX])
        some = self.master.of(chosen.tolist())
        return some.whole(seconds=self._effort.seconds, branchings=self._effort.branchings)

    def dive(self, step: DiveStep) -> Whole:
        """Whole numbers by a dive: settle the surest GPUs of the relaxation, solve it again, and let the solver end."""
        left = self._demand.copy()
        settled: list[int] = []
        while int((left > 1e-9).sum()) > _REST_KINDS:
            counts = self.master.counts()
            wanted = max(1, round(step.settled_ratio * (float(counts.sum()) - len(settled))))
            chosen = self._settle_surest(counts, settled, left, wanted)
            if not chosen:
                break
            settled += chosen
            self.generate(self.master.relax(), step.rounds)
        whole = self.master.whole(
            seconds=self._effort.seconds, branchings=self._effort.branchings, settled=settled, allowed=self._allowed
        )
        self.master.release()
        self._allowed = self._open.copy()
        return whole

    def _settle_surest(self, counts: FloatArray, settled: list[int], left: FloatArray, wanted: int) -> list[int]:
        """Settle the patterns nearest to a whole GPU; changes ``left`` and the allowed items."""
        already = Counter(settled)
        rest = counts - np.array([already[index] for index in range(len(counts))])
        chosen: list[int] = []
        for index in np.argsort(-rest, kind="stable").tolist():
            if rest[index] < 1e-3 or (rest[index] < _SURE and len(chosen) >= wanted):
                break
            pattern = self.master.patterns[index].pattern
            needs = np.zeros(len(left))
            np.add.at(needs, self._kind[list(pattern)], self._part[list(pattern)])
            if not self._allowed[list(pattern)].all() or (needs > left + 1e-6).any():
                continue
            left -= needs
            chosen.append(index)
            self.master.settle(index)
            for item in set(pattern):
                self._commit(item, left)
        return chosen

    def _commit(self, item: int, left: FloatArray) -> None:
        """Keep a service in the division of its settled replica: forbid the other items of the service."""
        kind = self._kind[item]
        if self._items[item].replicas > 1 and self._demand[kind] == 1 and left[kind] > 1e-9:
            others = np.flatnonzero((self._kind == kind) & (np.arange(len(self._kind)) != item))
            self._allowed[others] = 0.0
            self.master.forbid({int(other) for other in others})

    def _join(self, index: int, patterns: set[Pattern]) -> int:
        added = 0
        for pattern in sorted(patterns - self._unfit[index]):
            if self._packings[index].fit(pattern) is None:
                self._unfit[index].add(pattern)
            else:
                added += self._add(index, pattern)
        return added
