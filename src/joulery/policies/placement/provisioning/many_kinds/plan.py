"""Preset ``best`` for many services that all differ: patterns and bounds from knapsacks; very many in batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from joulery.domain.gpu.provisioning import Workload
from joulery.policies.placement.provisioning.column_generation import (
    Effort,
    attainable,
    bound_of,
    cost_of,
    cuts_of,
    volume,
)
from joulery.policies.placement.provisioning.gpu_shares import GpuType, Placed
from joulery.policies.placement.provisioning.many_kinds.generation import CAREFUL, QUICK, BoxGenerator
from joulery.policies.placement.provisioning.many_kinds.in_batches import plan_in_batches
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.packing import Problem, Range, problem_of
from joulery.policies.placement.provisioning.planner import (
    EQUAL,
    Solution,
    cheaper,
    placed,
    proven_infeasible,
    too_few_gpus,
    uncut_plan,
)

TOGETHER_KINDS = 250
"""Up to so many different services are planned at once, more in batches."""
_MANY_EFFORT = Effort(branchings=60, seconds=20.0)
"""Effort for the whole numbers of many services."""
_GAP_LARGEST, _GAP_LEAST, _GAP_MIXED = 0.05, 1e-3, 0.005
"""How much a layout may be worth beyond its GPU in a proof for many services: at most, at least, with several types."""
_BOXES, _BOXES_MIN, _ROUNDS_AGAIN = 120_000, 1200, 30
"""Boxes a search for a bound may solve, over services, and at least; rounds of column generation in between."""
_CAREFUL_KINDS, _CUT_KINDS = 100, 60
"""Different services up to which a better bound and plan are searched for, and again with services cut further."""
_GAP_ENOUGH = 0.02
"""A plan for many services this close to the bound is close enough."""
_BEAM_WORK = 16_000
"""Partial patterns a level times different services: bounds the work of one search."""
_BATCH_EFFORT, _BATCH_ROUNDS = Effort(branchings=50, seconds=5.0), 30
"""Effort for one batch of many services, and rounds of column generation."""


def plan_many(problem: Problem, rules: Rules) -> Solution:
    """A plan for many different services, and a bound from knapsacks; in batches, without a search, for very many."""
    relaxed = volume(problem)
    bound = attainable(problem, relaxed, problem.ranges)
    method = f"{cuts_of(problem)}; sum of the shares needed alone"
    if proven_infeasible(problem, bound):
        raise too_few_gpus(problem, bound)
    kinds = len(problem.kinds)
    if kinds > TOGETHER_KINDS:
        gpus = plan_in_batches(problem.workloads, partial(_planned_batch, problem.types, rules))
        if _over(problem, gpus):
            gpus = _within_limits(problem, gpus)
        return Solution(gpus, bound_of(problem, bound, relaxed, method))
    # As many GPUs as wanted: limits only raise what a plan costs, so the bound holds with them too.
    unlimited: list[Range] = [(0, None)] * len(problem.types)
    generator = BoxGenerator(problem, _MANY_EFFORT, ranges=unlimited)
    generator.allow_cuts(False)
    generator.generate(generator.master.relax())
    best = generator.dive(QUICK)
    for cut in (False, True)[: (kinds <= _CAREFUL_KINDS) + (kinds <= _CUT_KINDS)]:
        near = best.complete and best.usd_per_hour <= bound * (1 + _GAP_ENOUGH)
        if near or problem.crossed or proven_infeasible(problem, bound):
            break
        generator.allow_cuts(True)
        relaxation = generator.generate(generator.master.relax(), _ROUNDS_AGAIN, careful=True)
        for gap_ratio in _gaps_to_prove(problem, relaxation.usd_per_hour, bound):
            proven, _ = generator.bound(relaxation, gap_ratio, max(_BOXES_MIN, _BOXES // kinds))
            if proven > relaxed:
                relaxed, method = proven, f"{cuts_of(problem)}; no layout of a GPU is worth more than its price"
                bound = max(bound, attainable(problem, relaxed, problem.ranges))
        if not best.complete or best.usd_per_hour > bound * (1 + _GAP_ENOUGH):
            generator.allow_cuts(cut)
            relaxation = generator.generate(generator.master.relax(), careful=kinds <= _CUT_KINDS)
            generator.enrich(relaxation)
            best = cheaper(best, generator.dive(CAREFUL))
    if proven_infeasible(problem, bound):
        raise too_few_gpus(problem, bound)
    gpus = placed(problem, best.gpus) if best.complete else uncut_plan(problem, _MANY_EFFORT)
    if problem.crossed and cost_of(problem, gpus) > bound * (1 + EQUAL):  # knapsacks know of shares alone
        gpus = min(gpus, uncut_plan(problem, _MANY_EFFORT), key=lambda each: cost_of(problem, each) or math.inf)
    if _over(problem, gpus) and len(problem.types) > 1:
        gpus = _within_limits(problem, gpus)
    return Solution(gpus, bound_of(problem, bound, relaxed, method))


def _gaps_to_prove(problem: Problem, relaxed: float, bound: float) -> tuple[float, ...]:
    """How much may be lost in proofs that raise the bound, one after the other; none where none can.

    The coarse one takes few boxes and raises the bound of many services further. The fine one proves the optimum of few
    and finds patterns that whole numbers need.
    """
    fine = _gap_to_next(problem, relaxed, bound)
    if fine <= 0:
        return ()
    return (fine,) if fine > _GAP_LARGEST / 2 else (_GAP_LARGEST, fine)


def _gap_to_next(problem: Problem, relaxed: float, bound: float) -> float:
    """How much may be lost in a proof that raises the bound as far as the relaxation allows; 0 where it cannot."""
    reachable = attainable(problem, relaxed, [(0, None)] * len(problem.types))
    if reachable <= bound * (1 + EQUAL):
        return 0.0
    if len(problem.types) > 1:
        return _GAP_MIXED
    step = problem.types[0].usd_per_hour
    # Where a number of GPUs is out of reach, as the relaxation needs hardly more than one less, that one less is not.
    for below in (reachable - step, reachable - 2 * step):
        lost = relaxed / below - 1 if below > 0 else math.inf
        if below * (1 + EQUAL) >= bound - step and lost > _GAP_LEAST:
            return min(_GAP_LARGEST, 0.8 * lost)
    return 0.0


def _planned_batch(types: Sequence[GpuType], rules: Rules, workloads: Sequence[Workload]) -> tuple[Placed, ...]:
    problem = problem_of(workloads, types, rules)
    unlimited: list[Range] = [(0, None)] * len(types)
    generator = BoxGenerator(problem, _BATCH_EFFORT, ranges=unlimited)
    generator.allow_cuts(False)
    generator.generate(generator.master.relax(), _BATCH_ROUNDS)
    return placed(problem, generator.dive(QUICK).gpus)


def _over(problem: Problem, gpus: Sequence[Placed]) -> bool:
    """Whether a plan has more GPUs of some type than are available."""
    used = Counter(gpu.type_index for gpu in gpus)
    return any(high is not None and used[index] > high for index, (_, high) in enumerate(problem.ranges))


def _within_limits(problem: Problem, gpus: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """A plan on the GPUs that are available; ``gpus``, which are too many, where the search finds none."""
    effort = Effort(patience=5, beam=max(60, _BEAM_WORK // len(problem.kinds)), branchings=2000, seconds=10.0)
    return uncut_plan(problem, effort, problem.ranges) or gpus
