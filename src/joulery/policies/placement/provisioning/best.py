"""Preset ``best``: the cheapest GPUs that are within every SLO, with a proof of how much cheaper any plan could be.

A few services that may not be cut: exact, by :mod:`exact`. Otherwise column generation with :mod:`columns`, whole
numbers by HiGHS, and searches that miss nothing to raise the bound until it meets the plan. Many services that all
differ: patterns from knapsacks, a bound from prices of boxes (:mod:`many_kinds`), and batches for very many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import PlanBound, Workload
from joulery.policies.placement.provisioning import exact
from joulery.policies.placement.provisioning.column_generation import (
    Effort,
    Generator,
    PricedPattern,
    Range,
    Relaxation,
    Whole,
)
from joulery.policies.placement.provisioning.many_kinds.generation import CAREFUL, QUICK, BoxGenerator
from joulery.policies.placement.provisioning.many_kinds.in_batches import plan_in_batches, replan_worst
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import Knapsacks
from joulery.policies.placement.provisioning.many_kinds.relaxation import BoxRelaxation
from joulery.policies.placement.provisioning.packing import Pattern
from joulery.policies.placement.provisioning.predict import GpuType, Placed, Share
from joulery.policies.placement.provisioning.problem import (
    Problem,
    attainable,
    bound_of,
    cost_of,
    cuts_of,
    least_gpus,
    problem_of,
    volume,
)
from joulery.policies.placement.provisioning.rules import Rules
from joulery.policies.placement.provisioning.sizes import ReplicaLoad

PROVEN_KINDS = 12
"""Up to so many different services a search for a proof is worth its time."""
TOGETHER_KINDS = 250
"""Up to so many different services are planned at once, more in batches."""
_MANY_EFFORT = Effort(branchings=60, seconds=20.0)
"""Effort for the whole numbers of many services."""
_BOX_CUTS, _BOX_CUTS_SAMPLE, _SAMPLE_KINDS = 24, 9, 100
"""How often boxes are cut for a bound at most; how often, and for how many services, where they are a sample."""
_CAREFUL_KINDS, _CUT_KINDS = 100, 60
"""Different services up to which a better plan is searched for, and again with services cut further."""
_REPLANNED_GPUS, _REPLANS = 12, 3
"""How many of the GPUs worth least are planned again at once, for more services than that, and how often."""
_GAP_ENOUGH = 0.02
"""A plan for many services this close to the bound is close enough."""
_BEAM_WORK = 16_000
"""Partial patterns a level times different services: bounds the work of one search."""
_GAPS = (0.1, 0.03, 0.01, 0.002, 1e-5)
"""How much a layout may be worth beyond its GPU, in the searches that raise the bound one after the other."""
_BATCH_EFFORT, _BATCH_ROUNDS = Effort(branchings=50, seconds=5.0), 30
"""Effort for one batch of many services, and rounds of column generation."""
_CASES_MAX = 24
"""Cases of a mixed fleet that are looked at."""
_CUTS_MAX = 4
"""How many limits on the number of replicas are tried in the search for a cheaper plan."""
_EQUAL = 1e-6
"""Costs closer than this, as a ratio, are equal."""
_UNSERVED_FACTOR = 100
"""Bounds beyond so many times the price of the fleet contain the price of unserved services."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan and what is proven about it.

    Attributes:
        gpus: The GPUs.
        bound: No plan within the rules is cheaper.
    """

    gpus: tuple[Placed, ...]
    bound: PlanBound


def plan(
    workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules, effort: Effort | None = None
) -> Solution:
    """The cheapest plan that was found, and a bound on any.

    Args:
        workloads: The services.
        types: The GPU types with their prices.
        rules: What has to be kept, and what may be chosen.
        effort: How hard to try.

    Raises:
        InfeasibleError: A service can be served on none of the types, or the GPUs there are do not suffice.
        ConfigError: No GPU types, two services of one name, or a model that no type knows.
    """
    problem = problem_of(workloads, types, rules)
    if not workloads:
        return Solution((), PlanBound(0, 0.0, 0.0, "nothing to serve"))
    uncut = rules.max_replicas == 1 and all(item.replicas == 1 for item in problem.items)
    unlimited = all(high is None for _, high in problem.ranges)
    if uncut and unlimited and len(workloads) == len(problem.kinds) <= exact.SERVICES_MAX:
        solution = _exactly(problem)
        if solution is not None:
            return solution
    if len(problem.kinds) <= PROVEN_KINDS:
        return _by_patterns(problem, effort or Effort())
    return _many(problem, rules)


class _Proof:
    """The bound on a plan for many services: the shares needed alone first, more where a plan asks for it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._boxes: BoxRelaxation | None = None
        self.relaxed = volume(problem)
        self.bound = attainable(problem, self.relaxed, problem.ranges)
        self.method = f"{cuts_of(problem)}; sum of the shares needed alone"
        self.values: FloatArray | None = None

    def near(self, usd_per_hour: float) -> bool:
        """Whether a plan at this price needs no better bound."""
        return usd_per_hour <= self.bound * (1 + _GAP_ENOUGH)

    def raise_for(self, usd_per_hour: float) -> None:
        """Raise the bound until it is near a plan at this price, as far as that seems in reach."""
        if self.near(usd_per_hour):
            return
        self._boxes = self._boxes or self._relaxation()
        sample = not self._boxes.complete
        wanted = math.inf if sample else self._wanted(usd_per_hour)
        self._boxes.raise_bound(wanted, _BOX_CUTS_SAMPLE if sample else _BOX_CUTS)
        certificate = self._boxes.certificate()
        self.values = certificate.values
        if certificate.usd_per_hour > self.relaxed:
            self.relaxed = certificate.usd_per_hour
            self.method = f"{cuts_of(self._problem)}; no layout of a GPU is worth more than its price"
            self.bound = max(self.bound, attainable(self._problem, self.relaxed, self._problem.ranges))

    def _wanted(self, usd_per_hour: float) -> float:
        """The bound without rounding that is near a plan at this price once it is rounded to whole GPUs."""
        near = usd_per_hour / (1 + _GAP_ENOUGH)
        if len(self._problem.types) > 1:
            return near
        step = self._problem.types[0].usd_per_hour
        return (math.ceil(near / step - _EQUAL) - 1) * step * (1 + _EQUAL)

    def _relaxation(self) -> BoxRelaxation:
        packings, items, demand = self._problem.packings, self._problem.items, self._problem.demand
        knapsacks = [Knapsacks(packing, items, demand, index) for index, packing in enumerate(packings)]
        kinds = len(demand) if len(demand) <= TOGETHER_KINDS else _SAMPLE_KINDS
        return BoxRelaxation(packings, items, demand, knapsacks, kinds)


def _many(problem: Problem, rules: Rules) -> Solution:
    """A plan for many different services, and a bound on any; in batches for very many."""
    proof = _Proof(problem)
    if _proven_infeasible(problem, proof.bound):
        raise _too_few_gpus(problem, proof.bound)
    batches = len(problem.kinds) > TOGETHER_KINDS
    if batches:
        gpus = plan_in_batches(problem.workloads, partial(_planned_batch, problem.types, rules))
        proof.raise_for(cost_of(problem, gpus))
    else:
        gpus = _together(problem, rules, proof)
    if _proven_infeasible(problem, proof.bound):
        raise _too_few_gpus(problem, proof.bound)
    if _over(problem, gpus) and (batches or len(problem.types) > 1):
        gpus = _within_limits(problem, gpus)
    return Solution(gpus, bound_of(problem, proof.bound, proof.relaxed, proof.method))


def _together(problem: Problem, rules: Rules, proof: _Proof) -> tuple[Placed, ...]:
    """The best plan found for services that are planned at once, on as many GPUs as it needs; raises the bound."""
    # Limits on GPUs only raise what a plan costs, so the bound holds with them too.
    kinds, unlimited = len(problem.kinds), list[Range]([(0, None)] * len(problem.types))
    generator = BoxGenerator(problem.packings, problem.items, problem.demand, unlimited, _MANY_EFFORT)
    generator.allow_cuts(False)
    generator.generate(generator.master.relax())
    best = generator.dive(QUICK)
    for cut in (False, True)[: (kinds <= _CAREFUL_KINDS) + (kinds <= _CUT_KINDS)]:
        if best.complete:
            proof.raise_for(best.usd_per_hour)
        near = best.complete and proof.near(best.usd_per_hour)
        if near or problem.crossed or _proven_infeasible(problem, proof.bound):
            break
        generator.allow_cuts(cut)
        generator.enrich(generator.generate(generator.master.relax(), careful=kinds <= _CUT_KINDS))
        best = _cheaper(best, generator.dive(CAREFUL))
    gpus = placed(problem, best.gpus) if best.complete else _uncut(problem, _MANY_EFFORT)
    proof.raise_for(cost_of(problem, gpus))
    if problem.crossed and cost_of(problem, gpus) > proof.bound * (1 + _EQUAL):  # knapsacks know of shares alone
        gpus = min(gpus, _uncut(problem, _MANY_EFFORT), key=lambda each: cost_of(problem, each) or math.inf)
    planner = partial(_planned_batch, problem.types, rules)
    for _ in range(_REPLANS if kinds > _CAREFUL_KINDS and not problem.crossed else 0):
        if proof.near(cost_of(problem, gpus)) or proof.values is None:
            break
        gpus = replan_worst(problem, gpus, proof.values, planner, _REPLANNED_GPUS)
        proof.raise_for(cost_of(problem, gpus))
    return gpus


def _uncut(problem: Problem, effort: Effort, ranges: Sequence[Range] | None = None) -> tuple[Placed, ...]:
    """A plan with services whole where they can be: cutting them gains little here and multiplies the patterns.

    Without ``ranges`` it has as many GPUs of each type as it needs, whatever is available.
    """
    unlimited = [(0, None)] * len(problem.types)
    generator = Generator(
        problem.packings, problem.items, problem.demand, unlimited if ranges is None else ranges, effort, replicas_max=1
    )
    generator.generate(generator.master.relax())
    found = generator.whole()
    return () if not found.complete else placed(problem, found.gpus)


def _planned_batch(types: Sequence[GpuType], rules: Rules, workloads: Sequence[Workload]) -> tuple[Placed, ...]:
    problem = problem_of(workloads, types, rules)
    unlimited: list[Range] = [(0, None)] * len(types)
    generator = BoxGenerator(problem.packings, problem.items, problem.demand, unlimited, _BATCH_EFFORT)
    generator.allow_cuts(False)
    generator.generate(generator.master.relax(), _BATCH_ROUNDS)
    return placed(problem, generator.dive(QUICK).gpus)


def _over(problem: Problem, gpus: Sequence[Placed]) -> bool:
    """Whether a plan has more GPUs of some type than are available."""
    used = Counter(gpu.type_index for gpu in gpus)
    return any(high is not None and used[index] > high for index, (_, high) in enumerate(problem.ranges))


def _proven_infeasible(problem: Problem, bound: float) -> bool:
    """Whether the services provably need more than the GPUs that are available, in shares or in price."""
    there = [high for _, high in problem.ranges]
    if None in there:
        return False
    count = sum(high for high in there if high is not None)
    price = math.fsum((high or 0) * kind.usd_per_hour for high, kind in zip(there, problem.types, strict=True))
    return least_gpus(problem) > count or bound > price * (1 + _EQUAL)


def _within_limits(problem: Problem, gpus: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """A plan on the GPUs that are available; ``gpus``, which are too many, where the search finds none."""
    effort = Effort(patience=5, beam=max(60, _BEAM_WORK // len(problem.kinds)), branchings=2000, seconds=10.0)
    return _uncut(problem, effort, problem.ranges) or gpus


def _exactly(problem: Problem) -> Solution | None:
    """The optimum by trying every set of services; None when a set was too large to be sure of."""
    chosen = exact.cheapest(problem.packings, len(problem.workloads))
    if chosen is None or any(packing.unsure for packing in problem.packings):
        return None
    gpus = placed(problem, [(gpu.type_index, gpu.pattern) for gpu in chosen])
    cost = cost_of(problem, gpus)
    relaxed = _relaxed(problem)
    return Solution(
        gpus, bound_of(problem, cost, relaxed, "services whole; every set of them that fits on one GPU was tried")
    )


def _relaxed(problem: Problem) -> float:
    """The optimum if fractions of GPUs could be rented, over every set that fits."""
    effort = Effort()
    master = Generator(problem.packings, problem.items, problem.demand, problem.ranges, effort).master
    for index, packing in enumerate(problem.packings):
        for pattern in exact.fitting_sets(packing, len(problem.items)):
            layout = packing.fit(pattern)
            if layout is not None:
                master.add(PricedPattern(index, packing.gpu_type.usd_per_hour, layout))
    return master.relax().usd_per_hour


def _by_patterns(problem: Problem, effort: Effort) -> Solution:
    """Column generation; whole numbers and bounds in turn until they meet, or the last gap has been searched."""
    relaxed = volume(problem)
    bound = attainable(problem, relaxed, problem.ranges)
    uncut = Generator(problem.packings, problem.items, problem.demand, problem.ranges, effort, replicas_max=1)
    uncut.generate(uncut.master.relax())
    best = uncut.whole()
    generator = Generator(problem.packings, problem.items, problem.demand, problem.ranges, effort)
    relaxation = generator.master.relax()
    if not best.complete or best.usd_per_hour > bound * (1 + _EQUAL):
        relaxation = generator.generate(relaxation)
        best = _cheaper(best, generator.whole())
    for gap_ratio in _GAPS:
        reachable = attainable(problem, relaxation.usd_per_hour, problem.ranges)
        if best.usd_per_hour <= bound * (1 + _EQUAL) or reachable <= bound * (1 + _EQUAL):
            break
        proven, relaxation, grew = _proven(generator, relaxation, gap_ratio)
        if proven == 0.0:  # too many patterns at this gap, and a smaller gap lets more through
            break
        relaxed = max(relaxed, proven)
        bound = max(bound, attainable(problem, relaxed, problem.ranges))
        if grew and best.usd_per_hour > bound * (1 + _EQUAL):
            best = _cheaper(best, generator.whole())
    if best.usd_per_hour > bound * (1 + _EQUAL) and len(problem.types) > 1:
        best, bound = branch(problem, generator, effort, best, bound)
    if best.usd_per_hour > bound * (1 + _EQUAL):
        best = _insist(problem, effort, best, bound)
    if not best.complete:
        if _proven_infeasible(problem, max(bound, relaxed)):
            raise _too_few_gpus(problem, max(bound, relaxed), best.unserved)
        gpus = _uncut(problem, effort)
    else:
        gpus = placed(problem, best.gpus)
    searched = relaxed > volume(problem)
    proof = "no layout of a GPU is worth more than its price" if searched else "sum of the shares needed alone"
    method = f"{cuts_of(problem)}; {proof}"
    return Solution(gpus, bound_of(problem, bound, relaxed, method))


def _insist(problem: Problem, effort: Effort, best: Whole, bound: float) -> Whole:
    """Look for a cheaper plan among fewer choices, wider: few replicas first, then more."""
    wide = replace(effort, beam=3 * effort.beam, patience=3 * effort.patience)
    for replicas_max in sorted({item.replicas for item in problem.items})[:_CUTS_MAX]:
        narrow = Generator(problem.packings, problem.items, problem.demand, problem.ranges, wide, replicas_max)
        narrow.enrich(narrow.generate(narrow.master.relax()))
        best = _cheaper(best, narrow.whole())
        if best.usd_per_hour <= bound * (1 + _EQUAL):
            break
    return best


def _cheaper(best: Whole, other: Whole) -> Whole:
    if other.complete != best.complete:
        return other if other.complete else best
    return other if other.usd_per_hour < best.usd_per_hour * (1 - _EQUAL) else best


def _proven(generator: Generator, relaxation: Relaxation, gap_ratio: float) -> tuple[float, Relaxation, bool]:
    """The best bound at one gap, the relaxation it ended with, and whether columns were found on the way."""
    best, more, grew = 0.0, True, False
    while more:
        proven, more = generator.prove(relaxation, gap_ratio)
        best = max(best, proven)
        if more:
            grew, relaxation = True, generator.generate(generator.master.relax())
    return best, relaxation, grew


def branch(problem: Problem, generator: Generator, effort: Effort, best: Whole, bound: float) -> tuple[Whole, float]:
    """Raise the bound of a mixed fleet by settling how many GPUs of each type there are, a case at a time.

    Fractions of a dear GPU are what makes the relaxation cheap; in each case their number is whole.
    """
    cases: list[tuple[float, tuple[Range, ...]]] = [(bound, tuple(problem.ranges))]
    for _ in range(_CASES_MAX):
        cases.sort(key=lambda case: case[0])
        lowest, ranges = cases[0]
        if lowest * (1 + _EQUAL) >= best.usd_per_hour:
            break
        relaxation = generator.generate(generator.restrict(ranges))
        proven, relaxation, _ = _proven(generator, relaxation, effort.gap_ratio)
        lowest = max(lowest, attainable(problem, proven, ranges))
        best = _cheaper(best, generator.whole())
        if lowest * (1 + _EQUAL) >= best.usd_per_hour:
            cases[0] = (lowest, ranges)
            continue
        cut = _most_fractional(relaxation.gpus)
        if cut is None:
            break
        low, high = ranges[cut]
        whole = math.floor(relaxation.gpus[cut])
        cases[0] = (lowest, (*ranges[:cut], (low, whole), *ranges[cut + 1 :]))
        cases.append((lowest, (*ranges[:cut], (whole + 1, high), *ranges[cut + 1 :])))
    generator.restrict(problem.ranges)
    return best, min(best.usd_per_hour, *(lowest for lowest, _ in cases))


def _most_fractional(gpus: FloatArray) -> int | None:
    """The dearest of the types with a fractional number of GPUs, None when all are whole."""
    part = np.abs(gpus - np.rint(gpus))
    return int(np.argmax(part)) if float(part.max()) > 1e-6 else None


def volume_bound(workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> PlanBound:
    """The bound that needs no search: :func:`volume`, in whole GPUs."""
    problem = problem_of(workloads, types, rules)
    relaxed = volume(problem)
    return bound_of(
        problem,
        attainable(problem, relaxed, problem.ranges),
        relaxed,
        f"{cuts_of(problem)}; sum of the shares needed alone",
    )


def placed(problem: Problem, gpus: Sequence[tuple[int, Pattern]]) -> tuple[Placed, ...]:
    """Name the replicas, drop those beyond what whole services need, and tighten the shares of what is left."""
    free = _parts(problem, gpus)
    kept: list[tuple[int, Pattern, list[ReplicaLoad]]] = []
    for type_index, pattern in sorted(gpus, key=lambda gpu: (-len(gpu[1]), gpu)):
        named = [(item, free[item].pop()) for item in pattern if free[item]]
        if named:
            kept.append((type_index, tuple(item for item, _ in named), [part for _, part in named]))
    result = []
    for type_index, pattern, parts in kept:
        layout = problem.packings[type_index].tightest(pattern)
        assert layout is not None  # it fitted before replicas were dropped
        unit = problem.types[type_index].profile.gpu.unit_percent
        shares = [
            Share(part, units * unit, option.process.batch)
            for part, units, option in zip(parts, layout.units, layout.options, strict=True)
        ]
        shares.sort(key=lambda share: (-share.share_percent, share.part))
        result.append(Placed(type_index, tuple(shares)))
    result.sort(key=lambda gpu: (-problem.types[gpu.type_index].usd_per_hour, gpu.shares[0].part))
    return tuple(result)


def _parts(problem: Problem, gpus: Sequence[tuple[int, Pattern]]) -> list[list[ReplicaLoad]]:
    """For each item the replicas it has to provide: members of its kind, as many as it makes up whole, in order."""
    count = Counter(item for _, pattern in gpus for item in pattern)
    waiting = [list(reversed(kind.members)) for kind in problem.kinds]
    parts: list[list[ReplicaLoad]] = []
    for index, item in enumerate(problem.items):
        mine: list[ReplicaLoad] = []
        for _ in range(count[index] // item.replicas):
            if waiting[item.kind]:
                member = waiting[item.kind].pop()
                rate_rps = problem.workloads[member].rate_rps / item.replicas
                mine += [ReplicaLoad(member, replica, item.replicas, rate_rps) for replica in range(item.replicas)]
        parts.append(mine[::-1])
    return parts


def _too_few_gpus(problem: Problem, bound: float, unserved: Sequence[int] = ()) -> InfeasibleError:
    """The proven error; ``unserved``: services of each kind that the best plan on these GPUs leaves out."""
    left = [problem.workloads[problem.kinds[kind].members[0]].id for kind, n in enumerate(unserved) if n]
    there = ", ".join(f"{gpu_type.available} {gpu_type.name}" for gpu_type in problem.types)
    dearest = max(gpu_type.usd_per_hour for gpu_type in problem.types)
    count = math.fsum(gpu_type.available or 0 for gpu_type in problem.types)
    # The price of services left out stands in a bound on plans that may leave some out: no number of GPUs then.
    priced = math.ceil(bound / dearest - 1e-6) if bound < count * dearest * _UNSERVED_FACTOR else 0
    needed = max(least_gpus(problem), priced, int(count) + 1)
    return InfeasibleError(
        f"{len(problem.workloads)} services need at least {needed} GPUs, and the fleet has {there}",
        binding="number of GPUs",
        nearest={"gpus": needed, **({"unserved": left} if left else {})},
        hint=f"raise `available` in the fleet to {needed} or more, or relax the SLOs",
    )
