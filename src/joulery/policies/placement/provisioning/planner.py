"""Plans by policy name, with their predictions and SLO violations; preset ``best`` is planned here.

Preset ``best`` finds the cheapest GPUs that are within every SLO, with a lower bound on the cost of any plan. A few
services that may not be divided are planned exactly, by :mod:`exact`. Otherwise :mod:`column_generation` finds
patterns, HiGHS finds whole numbers, and complete searches raise the bound until it meets the plan. Many services that
all differ are planned by :mod:`many_kinds.planner`.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.plan_change import RunningGpu
from joulery.domain.gpu.provisioning import PlanBound, PlannedGpu, ProvisionPlan, Violation, Workload
from joulery.domain.quality import Quality, weakest
from joulery.policies.placement.master import PricedPattern, Relaxation, Whole
from joulery.policies.placement.provisioning import exact, igniter
from joulery.policies.placement.provisioning.baselines import BASELINES
from joulery.policies.placement.provisioning.column_generation import (
    Effort,
    Generator,
    attainable,
    bound_of,
    cost_of,
    cuts_of,
    least_gpus,
    volume,
)
from joulery.policies.placement.provisioning.gpu_shares import (
    GpuType,
    Placed,
    ReplicaLoad,
    Share,
    on_hosts,
    predict,
    shared_domains_of,
    shortages_of,
    violations_of,
)
from joulery.policies.placement.provisioning.options import BatchLimits, FailureDomain, Rules, may_use, spot_only_error
from joulery.policies.placement.provisioning.packing import Pattern, Problem, Range, problem_of
from joulery.policies.placement.provisioning.replan import follow

POLICIES = ("best", "igniter", *BASELINES)
"""Names of the policies."""
PROVEN_KINDS = 12
"""Most different services for which patterns are searched with a proof."""
_GAPS = (0.1, 0.03, 0.01, 0.002, 1e-5)
"""Worth of a layout beyond its GPU, at most, in the successive searches that raise the bound."""
_CASES_MAX = 24
"""Most cases of a mixed fleet that are checked."""
_CUTS_MAX = 4
"""Number of limits on the number of replicas that are tried in the search for a cheaper plan."""
EQUAL = 1e-6
"""Costs closer than this, as a ratio, are equal."""
_UNSERVED_FACTOR = 100
"""Bounds beyond this many times the price of the fleet contain the price of unserved services."""


def provision(
    policy: str,
    workloads: Sequence[Workload],
    types: Sequence[GpuType],
    rules: Rules | None = None,
    effort: Effort | None = None,
) -> ProvisionPlan:
    """Plan a fleet.

    ``best`` mixes GPU types; every other policy plans each type by itself and takes the cheapest, as the paper does
    (section 5.3).

    Args:
        policy: One of :data:`POLICIES`.
        workloads: The services.
        types: GPU types with prices.
        rules: Constraints, and the choices of ``best``; the paper's constraints when left out.
        effort: Limits on the work of ``best``.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: No such policy, no GPU type, two services of one name, or a model unknown to all types.
    """
    rules = rules or Rules()
    _check(policy, workloads, types)
    quality = weakest([Quality.MODELLED, *(gpu_type.profile.quality for gpu_type in types)])
    if policy == "best":
        solution = best_plan(workloads, types, rules, effort)
        gpus, violations = _predicted(solution.gpus, workloads, types, rules)
        violations = (*violations, *shortages_of(gpus, types))
        return ProvisionPlan("best", gpus, violations, solution.bound, quality)
    candidates: list[ProvisionPlan] = []
    reasons: list[InfeasibleError | ConfigError] = []
    for index, gpu_type in enumerate(types):
        barred = next((workload for workload in workloads if not may_use(workload, gpu_type)), None)
        if barred is not None:
            reasons.append(spot_only_error(barred))
            continue
        try:
            placed = _one_type(policy, workloads, gpu_type, index, rules.max_batch)
        except (InfeasibleError, ConfigError) as error:
            reasons.append(error)
            continue
        gpus, violations = _predicted(placed, workloads, types, rules)
        candidates.append(ProvisionPlan(policy, gpus, violations, None, quality))
    if not candidates:
        raise reasons[0]
    return min(candidates, key=lambda plan: (bool(plan.violations), plan.usd_per_hour))


def followed(
    running: Sequence[RunningGpu],
    workloads: Sequence[Workload],
    types: Sequence[GpuType],
    rules: Rules | None = None,
    max_migrations: int = 0,
) -> ProvisionPlan:
    """A plan for the new services that follows the running one with few migrations; see :func:`replan.follow`.

    Raises:
        InfeasibleError: A service can be served on none of the types, or there are too few GPUs.
        ConfigError: As :func:`provision`.
    """
    rules = rules or Rules()
    _check("best", workloads, types)
    placed = follow(running, workloads, types, rules, max_migrations)
    gpus, violations = _predicted(placed, workloads, types, rules)
    bound = volume_bound(workloads, types, rules)
    quality = weakest([Quality.MODELLED, *(gpu_type.profile.quality for gpu_type in types)])
    return ProvisionPlan("follow", gpus, violations, bound, quality)


def _predicted(
    placed: Sequence[Placed], workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules
) -> tuple[tuple[PlannedGpu, ...], tuple[Violation, ...]]:
    """The GPUs of a plan, on hosts where they matter, and the predicted violations."""
    gpus = predict(placed, workloads, types, BatchLimits(workloads, types, rules))
    if rules.domain is FailureDomain.HOST:
        gpus = on_hosts(gpus, types)
    return gpus, (*violations_of(gpus), *(shared_domains_of(gpus, types) if rules.apart else ()))


def lower_bound(workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> PlanBound:
    """Lower bound of any plan's cost, services undivided where they can be; for policies that prove no bound.

    Exact for a few services; the sum of the shares needed alone for many.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: As :func:`provision`.
    """
    uncut = replace(rules, max_replicas=1)
    if len(workloads) <= exact.SERVICES_MAX:
        try:
            return best_plan(workloads, types, uncut).bound
        except InfeasibleError:
            return best_plan(workloads, types, rules).bound
    return volume_bound(workloads, types, rules)


def _one_type(
    policy: str, workloads: Sequence[Workload], gpu_type: GpuType, index: int, max_batch: int
) -> list[Placed]:
    plan = igniter.plan if policy == "igniter" else BASELINES[policy]
    placed = [Placed(index, shares) for shares in plan(workloads, gpu_type.profile, max_batch) if shares]
    if gpu_type.available is not None and len(placed) > gpu_type.available:
        raise InfeasibleError(
            f"{policy} needs {len(placed)} {gpu_type.name}, but there are {gpu_type.available}",
            binding=f"number of {gpu_type.name}",
            nearest={"gpus": len(placed)},
            hint="raise `available` in the fleet, or let preset best choose",
        )
    return placed


def _check(policy: str, workloads: Sequence[Workload], types: Sequence[GpuType]) -> None:
    if policy not in POLICIES:
        near = difflib.get_close_matches(policy, POLICIES, n=1)
        raise ConfigError(
            "no such provisioning policy",
            got=policy,
            expected=", ".join(POLICIES),
            hint=f"did you mean {near[0]}?" if near else "",
        )
    if not types:
        raise ConfigError("the fleet has no GPU type", expected="at least one", hint="add one under fleet.gpus")
    names = [workload.id for workload in workloads]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise ConfigError("two services have the same name", got=twice)


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan and its proven bound.

    Attributes:
        gpus: The GPUs.
        bound: Lower bound on any plan within the rules.
    """

    gpus: tuple[Placed, ...]
    bound: PlanBound


def best_plan(
    workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules, effort: Effort | None = None
) -> Solution:
    """The cheapest plan that was found, and a lower bound on any plan.

    Args:
        workloads: The services.
        types: The GPU types with their prices.
        rules: Constraints and choices.
        effort: Limits on the work.

    Raises:
        InfeasibleError: A service can be served on none of the types, or there are too few GPUs.
        ConfigError: No GPU types, two services of one name, or a model unknown to all types.
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
    # Imported on use: it builds on this module, and most sites need none of it.
    from joulery.policies.placement.provisioning.many_kinds.planner import plan_many

    return plan_many(problem)


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
    master = Generator(problem, effort).master
    for index, packing in enumerate(problem.packings):
        for pattern in exact.fitting_sets(packing, len(problem.items)):
            if packing.fit(pattern) is not None:
                master.add(PricedPattern(index, packing.gpu_type.usd_per_hour, pattern))
    return master.relax().usd_per_hour


def _by_patterns(problem: Problem, effort: Effort) -> Solution:
    """Plan by column generation: whole numbers and bounds in turn, until they meet or the last gap was searched."""
    relaxed = volume(problem)
    bound = attainable(problem, relaxed, problem.ranges)
    uncut = Generator(problem, effort, replicas_max=1)
    uncut.generate(uncut.master.relax())
    best = uncut.whole()
    generator = Generator(problem, effort)
    relaxation = generator.master.relax()
    if not best.complete or best.usd_per_hour > bound * (1 + EQUAL):
        relaxation = generator.generate(relaxation)
        best = cheaper(best, generator.whole())
    for gap_ratio in _GAPS:
        reachable = attainable(problem, relaxation.usd_per_hour, problem.ranges)
        if best.usd_per_hour <= bound * (1 + EQUAL) or reachable <= bound * (1 + EQUAL):
            break
        proven, relaxation, grew = _proven(generator, relaxation, gap_ratio)
        if proven == 0.0:  # too many patterns at this gap, and a smaller gap lets more through
            break
        relaxed = max(relaxed, proven)
        bound = max(bound, attainable(problem, relaxed, problem.ranges))
        if grew and best.usd_per_hour > bound * (1 + EQUAL):
            best = cheaper(best, generator.whole())
    if best.usd_per_hour > bound * (1 + EQUAL) and len(problem.types) > 1:
        best, bound = branch(problem, generator, effort, best, bound)
    if best.usd_per_hour > bound * (1 + EQUAL):
        best = _search_wider(problem, effort, best, bound)
    if not best.complete:
        if proven_infeasible(problem, max(bound, relaxed)):
            raise too_few_gpus(problem, max(bound, relaxed), best.unserved)
        gpus = undivided_plan(problem, effort)
    else:
        gpus = placed(problem, best.gpus)
    searched = relaxed > volume(problem)
    proof = "no layout of a GPU is worth more than its price" if searched else "sum of the shares needed alone"
    method = f"{cuts_of(problem)}; {proof}"
    return Solution(gpus, bound_of(problem, bound, relaxed, method))


def _search_wider(problem: Problem, effort: Effort, best: Whole, bound: float) -> Whole:
    """Look for a cheaper plan by wider searches among fewer choices: few replicas first, then more."""
    wide = replace(effort, beam=3 * effort.beam, patience=3 * effort.patience)
    for replicas_max in sorted({item.replicas for item in problem.items})[:_CUTS_MAX]:
        narrow = Generator(problem, wide, replicas_max=replicas_max)
        narrow.enrich(narrow.generate(narrow.master.relax()))
        best = cheaper(best, narrow.whole())
        if best.usd_per_hour <= bound * (1 + EQUAL):
            break
    return best


def cheaper(best: Whole, other: Whole) -> Whole:
    """The cheaper of two; a complete one before one that leaves services out."""
    if other.complete != best.complete:
        return other if other.complete else best
    return other if other.usd_per_hour < best.usd_per_hour * (1 - EQUAL) else best


def _proven(generator: Generator, relaxation: Relaxation, gap_ratio: float) -> tuple[float, Relaxation, bool]:
    """The best bound at one gap, the relaxation it ended with, and whether new patterns were found."""
    best, more, grew = 0.0, True, False
    while more:
        proven, more = generator.prove(relaxation, gap_ratio)
        best = max(best, proven)
        if more:
            grew, relaxation = True, generator.generate(generator.master.relax())
    return best, relaxation, grew


def branch(problem: Problem, generator: Generator, effort: Effort, best: Whole, bound: float) -> tuple[Whole, float]:
    """Raise the bound of a mixed fleet by branching on the number of GPUs of a type, one case at a time.

    Fractions of a dear GPU are what makes the relaxation cheap; in each case their number is whole.
    """
    cases: list[tuple[float, tuple[Range, ...]]] = [(bound, tuple(problem.ranges))]
    for _ in range(_CASES_MAX):
        cases.sort(key=lambda case: case[0])
        lowest, ranges = cases[0]
        if lowest * (1 + EQUAL) >= best.usd_per_hour:
            break
        relaxation = generator.generate(generator.restrict(ranges))
        proven, relaxation, _ = _proven(generator, relaxation, effort.gap_ratio)
        lowest = max(lowest, attainable(problem, proven, ranges))
        best = cheaper(best, generator.whole())
        if lowest * (1 + EQUAL) >= best.usd_per_hour:
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
    """Index of the type whose number of GPUs is farthest from a whole number; None when all are whole."""
    part = np.abs(gpus - np.rint(gpus))
    return int(np.argmax(part)) if float(part.max()) > 1e-6 else None


def volume_bound(workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> PlanBound:
    """The bound from :func:`volume`, in whole GPUs; it needs no search."""
    problem = problem_of(workloads, types, rules)
    relaxed = volume(problem)
    return bound_of(
        problem,
        attainable(problem, relaxed, problem.ranges),
        relaxed,
        f"{cuts_of(problem)}; sum of the shares needed alone",
    )


def undivided_plan(problem: Problem, effort: Effort, ranges: Sequence[Range] | None = None) -> tuple[Placed, ...]:
    """A plan with services whole where they can be: dividing them gains little here and multiplies the patterns.

    Without ``ranges`` it has as many GPUs of each type as it needs, whatever is available.
    """
    unlimited = [(0, None)] * len(problem.types)
    generator = Generator(problem, effort, ranges=unlimited if ranges is None else ranges, replicas_max=1)
    generator.generate(generator.master.relax())
    found = generator.whole()
    return () if not found.complete else placed(problem, found.gpus)


def placed(problem: Problem, gpus: Sequence[tuple[int, Pattern]]) -> tuple[Placed, ...]:
    """Assign replicas to the items, drop those beyond whole services, and tighten the shares of the rest."""
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
    """For each item, the replicas to place: those of as many services of its kind as it serves wholly, in order."""
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


def proven_infeasible(problem: Problem, bound: float) -> bool:
    """Whether the services provably need more than the GPUs that are available, in shares or in price."""
    there = [high for _, high in problem.ranges]
    if None in there:
        return False
    count = sum(high for high in there if high is not None)
    price = math.fsum((high or 0) * kind.usd_per_hour for high, kind in zip(there, problem.types, strict=True))
    return least_gpus(problem) > count or bound > price * (1 + EQUAL)


def too_few_gpus(problem: Problem, bound: float, unserved: Sequence[int] = ()) -> InfeasibleError:
    """The error for a proven lack of GPUs; ``unserved``: services of each kind that the best plan leaves out."""
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
