"""Services that are alike, planned as one kind: same variants, SLO, rate, arrivals and floor.

Patterns, prices and the bound do not depend on which of them an instance serves: at an optimum their prices are equal,
so a bound for the kinds is one for the services. In whole numbers each service still has its own instances. A
*division* is a set of instances that serves one service within its floor; the solver counts divisions, and each service
gets one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from joulery.policies.placement.joint.problem import JointProblem, JointRequest, JointService

_DIVISIONS_MAX = 400
"""Divisions of one kind, at most: those of the fewest instances."""
_STARTED_MAX = 4000
"""Sets of instances of one size that may grow further, at most."""
_WHOLE = 1 - 1e-9
_PARTS_MAX = 3.0
"""Sum of parts below which a set of items may grow: a service fills all of its instances but at most two."""


class ServiceDivision(NamedTuple):
    """Instances that together serve one service: indices of the service and of the items, in increasing order."""

    service: int
    items: tuple[int, ...]


def grouped(request: JointRequest, services_min: int) -> JointRequest:
    """The request with services that are alike merged into one.

    It is unchanged where there are few services, where GPUs may be partitioned into slices, and where replicas stay
    apart: replicas of different services may share a GPU, but in a kind it is open which service each belongs to.
    """
    services = request.services
    names = [each.workload.id for each in services]
    if len(services) < services_min or len(set(names)) < len(names) or any(each.sliced for each in request.fleet):
        return request
    if request.rules.apart:
        return request
    kinds: list[tuple[JointService, list[str]]] = []
    known: dict[object, int] = {}
    for each in services:
        batches = tuple(sorted(each.batches.items()))
        key = (replace(each.workload, id=""), each.variants, each.floor_ratio, each.margin_ratio, batches)
        if key not in known:
            known[key] = len(kinds)
            kinds.append((each, []))
        kinds[known[key]][1].append(each.workload.id)
    if len(kinds) == len(services):
        return request
    return replace(
        request, services=tuple(replace(each, names=tuple(some)) if len(some) > 1 else each for each, some in kinds)
    )


def divisions_of(problem: JointProblem) -> tuple[tuple[ServiceDivision, ...], bool]:
    """The divisions of every service that stands for several, and whether there are no others."""
    items: dict[int, list[int]] = defaultdict(list)
    for at, item in enumerate(problem.items):
        if problem.services[item.service].count > 1:
            items[item.service].append(at)
    found = {at: _divisions(problem, at, mine) for at, mine in items.items()}
    divisions = tuple(ServiceDivision(at, each) for at, (some, _) in found.items() for each in some)
    return divisions, all(complete for _, complete in found.values())


def _divisions(problem: JointProblem, service: int, items: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
    """Sets of items that serve a service, none of them a superset of another: equal parts first, then all others."""
    gains = {at: problem.gain(problem.items[at]) for at in items}
    parts = {at: problem.items[at].part for at in items}
    floor = problem.services[service].floor_ratio > 0

    def serves(some: tuple[int, ...]) -> bool:
        if sum(parts[at] for at in some) < _WHOLE:
            return False
        return not floor or best_gain([(gains[at], parts[at]) for at in some]) >= -1e-12

    equal = ((at,) * round(1 / parts[at]) for at in items)
    found = dict.fromkeys(each for each in equal if serves(each))
    order = sorted(items, key=lambda at: (-parts[at], at))
    started: list[tuple[int, ...]] = [()]
    while started and len(found) < _DIVISIONS_MAX and len(started) <= _STARTED_MAX:
        grown = []
        for some in started:
            for at in order[order.index(some[-1]) if some else 0 :]:
                more = (*some, at)
                if serves(more):
                    if not any(serves((*more[:one], *more[one + 1 :])) for one in range(len(more))):
                        found[tuple(sorted(more))] = None
                elif sum(parts[one] for one in more) < _PARTS_MAX:
                    grown.append(more)
        started = grown
    return list(found)[:_DIVISIONS_MAX], not started and len(found) <= _DIVISIONS_MAX


def best_gain(offers: Sequence[tuple[float, float]]) -> float:
    """The most accuracy above the floor of one request a second; offers are gains and the parts they can take."""
    left, total = 1.0, 0.0
    for gain, part in sorted(offers, reverse=True):
        taken = min(part, left)
        total += gain * taken
        left -= taken
    return total
