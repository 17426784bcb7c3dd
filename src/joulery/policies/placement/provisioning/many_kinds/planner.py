"""Preset ``best`` for many services that all differ.

Knapsacks find the patterns, and prices of boxes of neighbourhoods prove a bound. Very many services are planned in
batches; a search then removes GPUs from that plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.master import Whole
from joulery.policies.placement.provisioning.column_generation import (
    Effort,
    attainable,
    bound_of,
    cost_of,
    cuts_of,
    volume,
)
from joulery.policies.placement.provisioning.gpu_shares import Placed
from joulery.policies.placement.provisioning.many_kinds.fewer_gpus import with_fewer_gpus
from joulery.policies.placement.provisioning.many_kinds.generation import QUICK, BoxGenerator
from joulery.policies.placement.provisioning.many_kinds.in_batches import plan_in_batches, replan_worst
from joulery.policies.placement.provisioning.many_kinds.neighbourhoods import Knapsacks
from joulery.policies.placement.provisioning.many_kinds.relaxation import BoxRelaxation
from joulery.policies.placement.provisioning.packing import Problem, Range, part_of
from joulery.policies.placement.provisioning.planner import (
    EQUAL,
    Solution,
    cheaper,
    placed,
    proven_infeasible,
    too_few_gpus,
    undivided_plan,
)

TOGETHER_KINDS = 250
"""Most different services that are planned at once; more are planned in batches."""
_MANY_EFFORT = Effort(branchings=60, seconds=120.0, nodes=30_000)
"""Effort for the whole numbers of many services, and for a search of all patterns. The limit on branchings ends it, as
the limit in seconds depends on the clock: on a busy machine a second of work takes ten of them."""
_SEARCHED_KINDS, _SEARCHES = 30, 3
"""Different services up to which all patterns are searched for a bound, and how often."""
_BOX_CUTS, _BOX_CUTS_SAMPLE, _SAMPLE_KINDS = 24, 9, 100
"""Most times that boxes are split for a bound; the same for a sample of services, and its size."""
_BOX_CUTS_ALL, _ALL_KINDS = 3, 500
"""Most times that boxes are then split for all services, and the number of services up to which this is done."""
_CAREFUL_KINDS, _CUT_KINDS = 100, 60
"""Different services up to which a better plan is searched for, and again with services divided further."""
_EXCHANGES = 4
"""Most exchanges of items of patterns for that."""
_REPLANNED_GPUS, _REPLANS = 12, 3
"""Number of the GPUs worth least that are planned again at once, for more services than that, and how often."""
_GAP_ENOUGH = 0.02
"""Relative gap to the bound at which a plan for many services is good enough."""
_BEAM_WORK = 16_000
"""Partial patterns a level times different services: bounds the work of one search."""
_BATCH_EFFORT, _BATCH_ROUNDS = Effort(branchings=50, seconds=600.0), 30
"""Effort for one batch of many services, and rounds of column generation."""


class _Proof:
    """The bound on a plan for many services: the shares needed alone at first, a higher one where a plan needs it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._boxes: BoxRelaxation | None = None
        self.relaxed = volume(problem)
        self.bound = attainable(problem, self.relaxed, problem.ranges)
        self.method = f"{cuts_of(problem)}; sum of the shares needed alone"
        self.values: FloatArray | None = None

    def near(self, usd_per_hour: float) -> bool:
        """Whether a plan at this price needs no better bound."""
        return usd_per_hour <= self.enough()

    def enough(self) -> float:
        """The price up to which a plan needs no better bound."""
        return self.bound * (1 + _GAP_ENOUGH)

    def raise_for(self, usd_per_hour: float) -> None:
        """Raise the bound until it is near a plan at this price, as far as that seems in reach."""
        if self.near(usd_per_hour):
            return
        self._boxes = self._boxes or self._relaxation()
        if self._boxes.complete:
            self._boxes.raise_bound(self._wanted(usd_per_hour), _BOX_CUTS)
            self._certify(self._boxes)
            return
        self._boxes.raise_bound(math.inf, _BOX_CUTS_SAMPLE)
        self._certify(self._boxes)
        if not self.near(usd_per_hour) and len(self._problem.kinds) <= _ALL_KINDS:
            every = self._boxes.for_all()
            every.raise_bound(self._wanted(usd_per_hour), _BOX_CUTS_ALL)
            self._certify(every)

    def _certify(self, boxes: BoxRelaxation) -> None:
        certificate = boxes.certificate()
        self.values = certificate.values
        self._raise(certificate.usd_per_hour)

    def search_for(self, usd_per_hour: float, generator: BoxGenerator) -> None:
        """Raise the bound to near a plan at this price by a search of all patterns, if that takes little work."""
        wanted = self._wanted(usd_per_hour)
        for _ in range(_SEARCHES):
            relaxation = generator.generate(generator.master.relax())
            gap_ratio = relaxation.usd_per_hour / wanted - 1
            if self.near(usd_per_hour) or gap_ratio <= EQUAL:
                return
            proven, more = generator.prove(relaxation, gap_ratio * (1 - EQUAL))
            self._raise(proven)
            if not more:
                return

    def _raise(self, usd_per_hour: float) -> None:
        if usd_per_hour > self.relaxed:
            self.relaxed = usd_per_hour
            self.method = f"{cuts_of(self._problem)}; no layout of a GPU is worth more than its price"
            self.bound = max(self.bound, attainable(self._problem, self.relaxed, self._problem.ranges))

    def _wanted(self, usd_per_hour: float) -> float:
        """The bound without rounding that is near a plan at this price once it is rounded to whole GPUs."""
        near = usd_per_hour / (1 + _GAP_ENOUGH)
        if len(self._problem.types) > 1:
            return near
        step = self._problem.types[0].usd_per_hour
        return (math.ceil(near / step - EQUAL) - 1) * step * (1 + EQUAL)

    def _relaxation(self) -> BoxRelaxation:
        packings, items, demand = self._problem.packings, self._problem.items, self._problem.demand
        knapsacks = [Knapsacks(packing, items, demand, index) for index, packing in enumerate(packings)]
        kinds = len(demand) if len(demand) <= TOGETHER_KINDS else _SAMPLE_KINDS
        return BoxRelaxation(packings, items, demand, knapsacks, kinds)


def plan_many(problem: Problem) -> Solution:
    """A plan for many different services, and a lower bound on any plan; in batches for very many."""
    proof = _Proof(problem)
    if proven_infeasible(problem, proof.bound):
        raise too_few_gpus(problem, proof.bound)
    batches = len(problem.kinds) > TOGETHER_KINDS
    if batches:
        gpus = plan_in_batches([each.model for each in problem.workloads], partial(_planned_batch, problem))
        proof.raise_for(cost_of(problem, gpus))
        if proof.values is not None:
            gpus = with_fewer_gpus(problem, gpus, proof.values, proof.enough())
    else:
        gpus = _together(problem, proof)
    if proven_infeasible(problem, proof.bound):
        raise too_few_gpus(problem, proof.bound)
    if _over(problem, gpus) and (batches or len(problem.types) > 1):
        gpus = _within_limits(problem, gpus)
    return Solution(gpus, bound_of(problem, proof.bound, proof.relaxed, proof.method))


def _together(problem: Problem, proof: _Proof) -> tuple[Placed, ...]:
    """The best plan found for services that are planned at once, on as many GPUs as it needs; raises the bound."""
    # Limits on GPUs only raise what a plan costs, so the bound holds with them too.
    kinds, unlimited = len(problem.kinds), list[Range]([(0, None)] * len(problem.types))
    generator = BoxGenerator(problem, _MANY_EFFORT, ranges=unlimited)
    generator.allow_divided(False)
    relaxation = generator.generate(generator.master.relax())
    if kinds <= _CAREFUL_KINDS:
        generator.exchange(relaxation)
    best = generator.dive(QUICK)
    for cut in (False, True)[: (kinds <= _CAREFUL_KINDS) + (kinds <= _CUT_KINDS)]:
        if best.complete:
            proof.raise_for(best.usd_per_hour)
        near = best.complete and proof.near(best.usd_per_hour)
        if near or problem.crossed or proven_infeasible(problem, proof.bound):
            break
        generator.allow_divided(cut)
        best = cheaper(best, _exchanged(problem, generator, careful=kinds <= _CUT_KINDS))
    gpus = placed(problem, best.gpus) if best.complete else undivided_plan(problem, _MANY_EFFORT)
    proof.raise_for(cost_of(problem, gpus))
    if kinds <= _SEARCHED_KINDS and not proof.near(cost_of(problem, gpus)):
        generator.allow_divided(True)
        proof.search_for(cost_of(problem, gpus), generator)
    if problem.crossed and cost_of(problem, gpus) > proof.bound * (1 + EQUAL):  # knapsacks know of shares alone
        gpus = min(gpus, undivided_plan(problem, _MANY_EFFORT), key=lambda each: cost_of(problem, each) or math.inf)
    planner = partial(_planned_batch, problem)
    for _ in range(_REPLANS if kinds > _CAREFUL_KINDS and not problem.crossed else 0):
        if proof.near(cost_of(problem, gpus)) or proof.values is None:
            break
        gpus = replan_worst(problem, gpus, proof.values, planner, _REPLANNED_GPUS)
        proof.raise_for(cost_of(problem, gpus))
    return gpus


def _exchanged(problem: Problem, generator: BoxGenerator, *, careful: bool) -> Whole:
    """The cheapest whole numbers over patterns; exchanges add patterns until the cost reaches the relaxation's."""
    relaxation, best = generator.generate(generator.master.relax(), careful=careful), None
    for _ in range(_EXCHANGES):
        relaxation = generator.exchange(relaxation)
        found = generator.at_once(relaxation)
        best = found if best is None else cheaper(best, found)
        least = attainable(problem, relaxation.usd_per_hour, problem.ranges)
        if best.complete and best.usd_per_hour <= least * (1 + EQUAL):
            break
    assert best is not None
    return best


def _planned_batch(whole: Problem, services: Sequence[int]) -> tuple[Placed, ...]:
    problem = part_of(whole, services)
    unlimited: list[Range] = [(0, None)] * len(whole.types)
    generator = BoxGenerator(problem, _BATCH_EFFORT, ranges=unlimited)
    generator.allow_divided(False)
    generator.exchange(generator.generate(generator.master.relax(), _BATCH_ROUNDS))
    return placed(problem, generator.dive(QUICK).gpus)


def _over(problem: Problem, gpus: Sequence[Placed]) -> bool:
    """Whether a plan has more GPUs of some type than are available."""
    used = Counter(gpu.type_index for gpu in gpus)
    return any(high is not None and used[index] > high for index, (_, high) in enumerate(problem.ranges))


def _within_limits(problem: Problem, gpus: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """A plan on the GPUs that are available; ``gpus``, which are too many, where the search finds none."""
    effort = Effort(patience=5, beam=max(60, _BEAM_WORK // len(problem.kinds)), branchings=2000, seconds=10.0)
    return undivided_plan(problem, effort, problem.ranges) or gpus
