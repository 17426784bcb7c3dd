"""Plans with fewer GPUs: a GPU is removed, and chains of exchanges make room for its services on the others.

A good plan leaves a little room on every GPU. All of it together would hold the services of one GPU, but no GPU has
room for one of them. So a GPU is removed, and its services are unserved until chains of exchanges serve them:

- A service takes the place of another, that one the place of a third on another GPU, and so on, until the last one
  joins a GPU or is worth less than the first. Each exchange uses room that its GPU had left.
- Two unserved services take the place of one or two, or one that of two.
- Where no such move makes the unserved ones worth less, chains gather room on one GPU: it loses a service and gets a
  smaller one back. When that ends as well, the unserved services count for more, so that others are left out.

The worth of services comes from the prices of the bound: no GPU holds more than its price, so sets worth more need not
be tried. Only sets that fit by :meth:`Packing.screen` are used, so every GPU is within its SLOs at any time. A limit
on the sets tried ends the search. A GPU is removed from the plan once all are served; a plan is never made worse.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.provisioning.column_generation import cost_of
from joulery.policies.placement.provisioning.gpu_shares import Placed
from joulery.policies.placement.provisioning.packing import IntArray, Pattern, Problem
from joulery.policies.placement.provisioning.planner import placed

WORK = 320_000
"""Sets of services tried, at most."""
_STEP_WORK = 100
"""Work counted for a step beside the sets it tries."""
_LOSS = 0.02
"""Most by which a replaced service may be worth more than the service that takes its place, in prices of a GPU."""
_CHAIN_MAX = 20
"""Exchanges in one chain, at most."""
_GATHERED = 0.002
"""Room that a chain gathers on a GPU at least, in prices of a GPU."""
_GATHERED_TRIES, _GPUS_TRIED = 3, 3
"""Smaller services tried for each service that a GPU loses, and GPUs tried in one step."""
_RAISED = 1.03
"""Factor on the weights of unserved services where no move helps."""
_TINY = 1e-9


class _Chain(NamedTuple):
    """A chain in which each service takes the place of the next.

    Attributes:
        gain: Weight by which the unserved services count less.
        services: From the first, which has no place, to the last, which loses its own.
        joins: The GPU that the last one joins; None where it stays without a place.
    """

    gain: float
    services: Pattern
    joins: int | None


class _Exchange(NamedTuple):
    """An exchange of services for others on one GPU.

    Attributes:
        gain: Weight by which the unserved services count less.
        gpu: The GPU.
        leaves, joins: The services.
    """

    gain: float
    gpu: int
    leaves: Pattern
    joins: Pattern


def with_fewer_gpus(
    problem: Problem, gpus: tuple[Placed, ...], values: FloatArray, wanted_usd: float, work: int = WORK
) -> tuple[Placed, ...]:
    """The plan without the GPUs that the search saves; the plan as it was where it saves none.

    Services of several replicas, or that are alike, stay where they are, with all that share their GPU.

    Args:
        problem: The problem.
        gpus: The plan.
        values: What one more service of each kind costs at least, float64[kinds]; no GPU holds more than its price.
        wanted_usd: A plan this cheap is good enough.
        work: Sets of services tried, at most.
    """
    if cost_of(problem, gpus) <= wanted_usd:
        return gpus
    kind_of = {member: at for at, kind in enumerate(problem.kinds) for member in kind.members}
    item_of = {item.kind: at for at, item in enumerate(problem.items) if item.replicas == 1}
    free = [
        all(s.part.replicas == 1 and len(problem.kinds[kind_of[s.part.workload]].members) == 1 for s in gpu.shares)
        for gpu in gpus
    ]
    movable = [gpu for gpu, is_free in zip(gpus, free, strict=True) if is_free]
    fixed = [gpu for gpu, is_free in zip(gpus, free, strict=True) if not is_free]
    patterns = [
        (gpu.type_index, tuple(sorted(item_of[kind_of[share.part.workload]] for share in gpu.shares)))
        for gpu in movable
    ]
    search, best = _Search(problem, patterns, values, work), gpus
    while cost_of(problem, best) > wanted_usd and search.give_up_one():
        best = (*fixed, *placed(problem, search.patterns()))
    return best


class _Search:
    """GPUs, the services on them and the unserved ones; a service is identified by its one item."""

    def __init__(self, problem: Problem, gpus: Sequence[tuple[int, Pattern]], values: FloatArray, work: int) -> None:
        self._packings, self._work = problem.packings, work
        self._price = [packing.gpu_type.usd_per_hour for packing in self._packings]
        self._services: IntArray = np.array(sorted(item for _, pattern in gpus for item in pattern), np.int64)
        self._worth: FloatArray = values[[item.kind for item in problem.items]]
        self._weight = self._worth.copy()
        self._type = [type_index for type_index, _ in gpus]
        self._on: list[Pattern] = [pattern for _, pattern in gpus]
        self._where = {service: gpu for gpu, mine in enumerate(self._on) for service in mine}
        self._unserved: list[int] = []
        self._tried: list[set[Pattern]] = [set() for _ in self._packings]
        # Whether the row's service fits in place of the column's, and which fit on a GPU beside all that is there.
        self._instead = np.zeros((len(problem.items), len(problem.items)), np.bool_)
        self._beside: list[list[int]] = [[] for _ in gpus]
        self._exchanges: dict[tuple[int, Pattern, Pattern], list[Pattern]] = {}
        self._gathering: int | None = None
        self._gathered = set[int]()
        self._look(range(len(gpus)))

    def patterns(self) -> list[tuple[int, Pattern]]:
        """The GPUs that are used: the type and the items of each."""
        return [(self._type[gpu], mine) for gpu, mine in enumerate(self._on) if mine]

    def give_up_one(self) -> bool:
        """Remove the GPU that is worth least for its price; return whether all can be served without it."""
        used = [gpu for gpu, mine in enumerate(self._on) if mine]
        if not used:
            return False
        self._put(min(used, key=lambda gpu: (self._worth_of(self._on[gpu]) / self._price[self._type[gpu]], gpu)), ())
        self._weight, self._gathering = self._worth.copy(), None
        self._gathered.clear()
        least = np.inf
        while self._unserved:
            if self._work <= 0:
                return False
            self._work -= _STEP_WORK
            if not self._improve() and not self._gather():
                self._weight[self._unserved] *= _RAISED
            if self._worth_of(self._unserved) < least - _TINY:
                least = self._worth_of(self._unserved)
                self._gathered.clear()
        return True

    def _improve(self) -> bool:
        """Make the move after which the unserved services count least; False where none makes them count less."""
        chain, exchange = self._best_chain(), self._best_exchange()
        if exchange is not None and (chain is None or exchange.gain > chain.gain):
            rest = [service for service in self._on[exchange.gpu] if service not in exchange.leaves]
            self._put(exchange.gpu, (*rest, *exchange.joins))
            self._look([exchange.gpu])
        elif chain is not None:
            self._follow(chain)
        return exchange is not None or chain is not None

    def _best_chain(self) -> _Chain | None:
        joinable: dict[int, list[int]] = {}
        for gpu, some in enumerate(self._beside):
            for service in some:
                joinable.setdefault(service, []).append(gpu)
        chains = [chain for first in self._unserved if (chain := self._chain(first, joinable)) is not None]
        return max(chains, key=lambda chain: chain.gain, default=None)

    def _chain(self, first: int, joinable: dict[int, list[int]]) -> _Chain | None:
        """The chain from an unserved service to a GPU with room, else to the service that counts least."""
        best, gain = None, _TINY
        for service, before in self._reached(first, None).items():
            gpus = {self._where[each] for each in before[1:]}
            room = next((gpu for gpu in joinable.get(service, ()) if gpu not in gpus), None)
            if room is not None:
                return _Chain(float(self._weight[first]), before, room)
            if self._weight[first] - self._weight[service] > gain:
                gain = float(self._weight[first] - self._weight[service])
                best = _Chain(gain, before, None)
        return best

    def _reached(self, first: int, barred: int | None) -> dict[int, Pattern]:
        """The services that lose their place at the end of a chain, and the shortest chain to each, nearest first.

        Every chain changes a GPU once, and ``barred`` not at all.
        """
        chains: dict[int, Pattern] = {first: (first,)}
        waiting = deque([first])
        while waiting:
            last = waiting.popleft()
            chain = chains[last]
            if len(chain) > _CHAIN_MAX:
                continue
            changed = {barred, *(self._where[service] for service in chain[1:])}
            for service in np.flatnonzero(self._instead[last]).tolist():
                if service not in chains and self._where[service] not in changed:
                    chains[service] = (*chain, service)
                    waiting.append(service)
        return chains

    def _follow(self, chain: _Chain) -> None:
        """Exchange along a chain; its first service has no place."""
        changed = [self._where[service] for service in chain.services[1:]]
        for gpu, joins, leaves in zip(changed, chain.services, chain.services[1:], strict=False):
            self._put(gpu, (*(service for service in self._on[gpu] if service != leaves), joins))
        if chain.joins is not None:
            self._put(chain.joins, (*self._on[chain.joins], chain.services[-1]))
            changed.append(chain.joins)
        self._look(changed)

    def _best_exchange(self) -> _Exchange | None:
        joining: list[Pattern] = [(one,) for one in self._unserved]
        joining += itertools.combinations(self._unserved, 2)
        self._try_exchanges(joining)
        best = None
        for joins in joining:
            count = sum(self._weight[service] for service in joins)
            for gpu, mine in enumerate(self._on):
                for leaves in self._exchanges.get((self._type[gpu], mine, joins), ()):
                    gain = float(count - sum(self._weight[service] for service in leaves))
                    if gain > (_TINY if best is None else best.gain):
                        best = _Exchange(gain, gpu, leaves, joins)
        return best

    def _try_exchanges(self, joining: Sequence[Pattern]) -> None:
        """Store, for every GPU, the one or two services that each of these may replace."""
        made: list[tuple[tuple[int, Pattern, Pattern], list[tuple[Pattern, Pattern]]]] = []
        for gpu, mine in enumerate(self._on):
            for joins in joining if mine else ():
                key = self._type[gpu], mine, joins
                if key not in self._exchanges:
                    made.append((key, list(self._exchangeable(gpu, joins))))
        for index in range(len(self._packings)):
            self._settle(index, (after for key, some in made if key[0] == index for _, after in some))
        for key, some in made:
            self._exchanges[key] = [leaves for leaves, after in some if self._packings[key[0]].known(after)]

    def _exchangeable(self, gpu: int, joins: Pattern) -> Iterable[tuple[Pattern, Pattern]]:
        mine, index = self._on[gpu], self._type[gpu]
        most, alone, price = self._packings[index].capacity, self._packings[index].alone, self._price[index]
        for size in (1, 2) if len(joins) == 2 else (2,):  # a chain exchanges one for one
            for leaves in itertools.combinations(mine, size):
                after = tuple(sorted({*mine, *joins}.difference(leaves)))
                gained = self._worth_of(joins) - self._worth_of(leaves)
                fits = alone[list(after)].sum() <= most and self._worth_of(after) <= price * (1 + _TINY)
                if fits and gained > -1.5 * _LOSS * price:
                    yield leaves, after

    def _gather(self) -> bool:
        """Gather room on a GPU: a chain from one of its services ends at a smaller one, which takes its place.

        The GPU worth least comes first, again and again until no chain leaves it more room, then the next.
        """
        for _ in range(_GPUS_TRIED):
            if self._gathering is None or not self._on[self._gathering]:
                left = [gpu for gpu, mine in enumerate(self._on) if mine and gpu not in self._gathered]
                if not left:
                    self._gathered.clear()
                    return False
                self._gathering = min(
                    left, key=lambda gpu: (self._worth_of(self._on[gpu]) - self._price[self._type[gpu]], gpu)
                )
            gpu = self._gathering
            best = max(
                (chain for given in self._on[gpu] if (chain := self._smaller(gpu, given)) is not None),
                key=lambda chain: chain.gain,
                default=None,
            )
            if best is not None:
                self._put(gpu, tuple(service for service in self._on[gpu] if service != best.services[0]))
                self._follow(best)
                return True
            self._gathered.add(gpu)
            self._gathering = None
        return False

    def _smaller(self, gpu: int, given: int) -> _Chain | None:
        """The chain that begins with a service of a GPU and ends with the smallest that could take its place."""
        rest = tuple(service for service in self._on[gpu] if service != given)
        index = self._type[gpu]
        most = self._worth[given] - _GATHERED * self._price[index]
        chains = self._reached(given, gpu)
        smaller = sorted((service for service in chains if self._worth[service] < most), key=self._worth.__getitem__)
        for service in smaller[:_GATHERED_TRIES]:
            after = tuple(sorted((*rest, service)))
            self._settle(index, [after])
            if self._packings[index].known(after):
                return _Chain(float(self._worth[given] - self._worth[service]), chains[service], gpu)
        return None

    def _put(self, gpu: int, services: Iterable[int]) -> None:
        """Put services on a GPU in place of those that are there; those without a GPU are unserved."""
        before, after = set(self._on[gpu]), set(services)
        for service in before - after:
            del self._where[service]
            self._instead[:, service] = False
        self._on[gpu] = tuple(sorted(after))
        self._where.update(dict.fromkeys(self._on[gpu], gpu))
        if not after:
            self._beside[gpu] = []
        self._unserved = sorted({*self._unserved, *before, *after}.difference(self._where))

    def _look(self, gpus: Iterable[int]) -> None:
        """Determine the services that fit on GPUs in place of each of theirs, and beside all of them."""
        tried: list[tuple[int, int | None, int, Pattern]] = []
        for gpu in dict.fromkeys(gpus):
            mine, index = self._on[gpu], self._type[gpu]
            if mine:
                for leaves in (None, *mine):
                    rest = tuple(service for service in mine if service != leaves)
                    least = 0.0 if leaves is None else self._worth[leaves] - _LOSS * self._price[index]
                    tried += [
                        (gpu, leaves, service, tuple(sorted((*rest, service))))
                        for service in self._candidates(index, rest, least)
                        if service not in mine
                    ]
            self._beside[gpu] = []
            self._instead[:, list(mine)] = False
        for index in range(len(self._packings)):
            self._settle(index, (after for gpu, _, _, after in tried if self._type[gpu] == index))
        for gpu, leaves, service, after in tried:
            if self._packings[self._type[gpu]].known(after):
                if leaves is None:
                    self._beside[gpu].append(service)
                else:
                    self._instead[service, leaves] = True

    def _candidates(self, index: int, rest: Pattern, least: float) -> list[int]:
        """Services worth this at least that may fit beside others: by the shares needed alone, and by their worth."""
        alone, worth, chosen = self._packings[index].alone, self._worth, list(rest)
        room = self._packings[index].capacity - alone[chosen].sum()
        most = self._price[index] * (1 + _TINY) - worth[chosen].sum()
        alone, worth = alone[self._services], worth[self._services]
        return list(self._services[(alone <= room) & (worth <= most) & (worth >= least)].tolist())

    def _settle(self, index: int, some: Iterable[Pattern]) -> None:
        """Determine which sets of services fit on a GPU of a type; each new set counts as work."""
        packing, tried = self._packings[index], self._tried[index]
        new = [mine for mine in dict.fromkeys(some) if mine not in tried]
        tried.update(new)
        self._work -= len(new)
        packing.screen(new)
        for mine in new:
            if len(mine) == 1:
                packing.fit(mine)

    def _worth_of(self, services: Sequence[int]) -> float:
        return float(self._worth[list(services)].sum())
