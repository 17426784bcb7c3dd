"""The joint plan that follows a running one, from known patterns and running instances, within a limit on moves.

Only the batches that the running plan's best patterns use are sized again for today's rates; column generation then
starts from those patterns. Where moves are limited, every running GPU has a list of possible successors (module
``successors``), and one program chooses for all of them. A change of clock is not a move. GPUs that are partitioned
into slices keep their partitions (module ``running_slices``).

The plan has no bound of its own: sizes and parts that the running plan did not use are not considered. Where it cannot
serve everything, and where shares compete with slices, the plan is made afresh.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.optimum import CertifiedPattern, PlanCertificate
from joulery.domain.gpu.plan_moves import PlanMoves, continued, moves_between
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.policies.placement.joint.following.running_slices import next_on_slices, sliced_problem
from joulery.policies.placement.joint.following.successors import (
    GpuSuccessor,
    KeptLimits,
    RunningGroup,
    groups_of,
    successors,
)
from joulery.policies.placement.joint.generation import JointEffort, JointGenerator
from joulery.policies.placement.joint.master import Duals, Flow, JointMaster, JointSolution, KnownPattern
from joulery.policies.placement.joint.planner import plan_joint, quality_of, value_of
from joulery.policies.placement.joint.problem import JointProblem, JointRequest, JointService, problem_of
from joulery.policies.placement.joint.result.planned_gpus import gpu_of, gpus_of, on_hosts_of
from joulery.policies.placement.master import add_row, make_whole, new_model, run
from joulery.policies.placement.provisioning.packing import Pattern

Sizes = dict[str, dict[int, set[int]]]
"""Largest batches by service and by the number of equal parts of its rate."""

NO_BOUND = "warm: known patterns and running instances; no bound"
_SIZES = 60
"""Best patterns of the running plan whose batches are sized again."""
_SLACK = 0.005
"""Excess of a pattern's cost over its worth, as a ratio of the relaxation, up to which it is a candidate."""
_ENOUGH = 0.02
"""Excess over the relaxation up to which a plan of those candidates is taken; else all known patterns are tried."""
_SUCCESSORS = 150
"""Patterns to choose from, at most."""
_SERVICES = 100
"""Services for which a plan is made from the running one; more are planned afresh."""
_NO_BETTER = 0.002
"""Least saving of another plan on slices; with no more than this the running one is kept."""
_UNSERVED_RPS = 1e-6
_TINY = 1e-7
_UNSERVED = 1e3
"""Price of leaving a service out, as a multiple of the greatest cost of a choice."""


@dataclass(frozen=True, slots=True)
class WarmEffort:
    """Limits on the work of a search.

    Attributes:
        generation: Limits of column generation.
        gap_ratio: Relative gap at which whole numbers are good enough.
        branchings, seconds: Limits of the solver of whole numbers.
    """

    generation: JointEffort = field(default_factory=lambda: JointEffort(patience=2))
    gap_ratio: float = 0.002
    branchings: int = 100
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """A plan that follows another.

    Attributes:
        plan: The plan; GPUs that continue come first, in their order.
        moves: The changes.
        fresh: Whether it had to be made afresh.
    """

    plan: ProvisionPlan
    moves: PlanMoves
    fresh: bool = False


def replan(
    request: JointRequest, before: ProvisionPlan, max_moves: int | None = None, effort: WarmEffort | None = None
) -> WarmPlan:
    """The plan for today's rates that follows a running one.

    Args:
        request: Today's request.
        before: The running joint plan.
        max_moves: Most instances that may be started, stopped or changed; None for any number.
        effort: Limits on the work.

    Raises:
        InfeasibleError: No plan was found within the GPUs, the power cap and the moves.
        ConfigError: As :func:`joulery.policies.placement.joint.planner.plan_joint`.
    """
    effort = effort or WarmEffort()
    if any(kind.sliced is not None for kind in request.fleet):
        plan = _on_slices(request, before, max_moves, effort)
        return _new_plan(request, before, max_moves) if plan is None else plan
    if len(request.services) > _SERVICES:  # many services are planned afresh in less time
        return _new_plan(request, before, max_moves)
    try:
        problem = problem_of(narrowed(request, before))
    except InfeasibleError:  # the sizes that were used do not serve today's rates
        return _new_plan(request, before, max_moves)
    generator = _generated(problem, before, effort)
    duals = generator.master.relax()
    generator.enrich(duals, _SLACK * duals.value)
    patterns = _promising(generator, duals)
    found = _unlimited(problem, generator, before, patterns, duals.value * (1 + _ENOUGH), effort)
    if max_moves is not None and (found is None or found.moves.moves > max_moves):
        found = _limited(problem, before, patterns, max_moves, effort)
    return _new_plan(request, before, max_moves) if found is None else found


def _on_slices(
    request: JointRequest, before: ProvisionPlan, max_moves: int | None, effort: WarmEffort
) -> WarmPlan | None:
    """The next plan on MIG slices; None where it has to be made afresh."""
    try:
        problem = sliced_problem(request, before)
    except InfeasibleError:  # the choices that were used do not serve today's rates
        return None
    if problem is None:
        return None

    def made(most: int | None, *, standing: bool = False) -> WarmPlan | None:
        limits = effort.gap_ratio, effort.branchings, effort.seconds
        gpus = next_on_slices(problem, before, most, *limits, standing=standing)
        return _followed(problem, before, gpus) if gpus else None

    free = made(None)
    if free is None:
        return None
    # Slices that continue may stand on other GPUs of the same partition: moves that the program does not count.
    still, kept = made(0, standing=True), made(0)
    if kept is None or kept.moves.moves > 0:
        kept = still
    tries = [free, kept, still]
    if max_moves is not None and free.moves.moves > max_moves > 0:
        tries += [made(max_moves), made(max_moves // 2)]
    within = [each for each in tries if each is not None and (max_moves is None or each.moves.moves <= max_moves)]
    if not within:
        raise _too_many_moves(free.moves, len(free.plan.gpus), max_moves or 0)
    best = min(within, key=_value)
    return kept if kept in within and _value(kept) <= _value(best) * (1 + _NO_BETTER) else best


def _value(found: WarmPlan) -> float:
    assert found.plan.certificate is not None  # joint plans have one
    return found.plan.certificate.value


def _unlimited(
    problem: JointProblem,
    generator: JointGenerator,
    before: ProvisionPlan,
    patterns: Sequence[KnownPattern],
    enough: float,
    effort: WarmEffort,
) -> WarmPlan | None:
    """The best plan over the promising patterns, or over all where that is dearer; None where none serves all."""
    few = JointMaster(problem)
    for known in patterns:
        few.add(known.machine, known.layout)
    best: tuple[float, JointMaster, JointSolution] | None = None
    for master in (few, generator.master):
        found = master.whole(gap_ratio=effort.gap_ratio, seconds=effort.seconds, branchings=effort.branchings)
        serves = bool(np.all(found.unserved <= _UNSERVED_RPS)) and math.isfinite(found.value)
        if serves and (best is None or found.value < best[0]):
            best = found.value, master, found
        if best is not None and best[0] <= enough:
            break
    if best is None:
        return None
    _, master, found = best
    chosen = [(master.patterns[at], count) for at, count in sorted(found.counts.items())]
    return _followed(problem, before, gpus_of(problem, chosen, found.flows))


def narrowed(request: JointRequest, before: ProvisionPlan) -> JointRequest:
    """The request with only the parts and batches that the best known patterns of a plan use."""
    return request if before.certificate is None else narrowed_to(request, sizes_of(before.certificate))


def sizes_of(certificate: PlanCertificate) -> Sizes:
    """The parts and batches that the best known patterns of a plan use."""
    known: Sizes = defaultdict(lambda: defaultdict(set))
    for pattern in best_patterns(certificate, _SIZES):
        for each in pattern.instances:
            known[each.service][round(certificate.rates_rps[each.service] / each.capacity_rps)].add(each.batch)
    for names in certificate.alike:
        known.update(dict.fromkeys(names[1:], known[names[0]]))
    return known


def narrowed_to(request: JointRequest, *sizes: Sizes) -> JointRequest:
    """The request with only the parts and batches among some sizes; a service without sizes keeps all of its own."""

    def narrow(service: JointService) -> JointService:
        known: dict[int, frozenset[int]] = defaultdict(frozenset)
        for some in sizes:
            for parts, batches in some.get(service.workload.id, {}).items():
                known[parts] |= batches
        return replace(service, batches=dict(known)) if known else service

    return replace(request, services=tuple(narrow(each) for each in request.services))


def best_patterns(certificate: PlanCertificate, most: int) -> list[CertifiedPattern]:
    """The patterns of the plan, and those that cost least beyond their worth at the plan's prices."""
    objective = certificate.objective
    per_w = objective.per_w + certificate.power_price
    joules = {(one.service, one.variant, one.type, one.clock_mhz): one for one in certificate.costs}

    def excess(pattern: CertifiedPattern) -> float:
        cost = per_w * (pattern.standing_w + math.fsum(each.overhead_w for each in pattern.instances))
        worth = 0.0
        for each in pattern.instances:
            known = joules.get((each.service, each.variant, pattern.type, pattern.clock_mhz))
            if known is None:
                return math.inf
            floor = certificate.floors_ratio.get(each.service, 0.0)
            gain = known.accuracy_ratio - floor if floor > 0 else 0.0
            price = certificate.demand_price[each.service] + certificate.accuracy_price.get(each.service, 0.0) * gain
            worth += max(0.0, price - per_w * known.request_j) * each.capacity_rps
        return (cost - worth) / cost if cost > 0 else -worth

    planned = [pattern for pattern in certificate.patterns if pattern.planned]
    others = sorted((pattern for pattern in certificate.patterns if not pattern.planned), key=excess)
    return [*planned, *others[: max(0, most - len(planned))]]


def _generated(problem: JointProblem, before: ProvisionPlan, effort: WarmEffort) -> JointGenerator:
    """A generator with patterns for today's rates, from the known ones on."""
    generator = JointGenerator(problem, effort.generation)
    known = [] if before.certificate is None else _known(problem, before.certificate)
    for machine, packing in enumerate(problem.packings):
        packing.screen(pattern for at, pattern in known if at == machine)
    for machine, pattern in known:
        generator.add(machine, pattern)
    generator.generate(generator.master.relax())
    return generator


def _known(problem: JointProblem, certificate: PlanCertificate) -> list[tuple[int, Pattern]]:
    """Machines and patterns of the best patterns of a plan, as far as they are choices of the problem."""
    index = {(item.service, item.variant, round(1 / item.part)): at for at, item in enumerate(problem.items)}
    names = {each.workload.id: at for at, each in enumerate(problem.services)}
    found: list[tuple[int, Pattern]] = []
    for pattern in _by_name(certificate, best_patterns(certificate, _SIZES)):
        items = []
        for each in pattern.instances:
            at = names.get(each.service, -1)
            models = [variant.model for variant in problem.services[at].variants] if at >= 0 else []
            parts = round(certificate.rates_rps[each.service] / each.capacity_rps)
            if each.variant in models:
                items.append(index.get((at, models.index(each.variant), parts), -1))
        if len(items) == len(pattern.instances) and min(items) >= 0:
            machines = (at for at, one in enumerate(problem.machines) if one.gpu_type.name == pattern.type)
            found += [(machine, tuple(sorted(items))) for machine in machines]
    return found


def _by_name(certificate: PlanCertificate, patterns: Sequence[CertifiedPattern]) -> list[CertifiedPattern]:
    """The patterns, and the same for the other services of kinds that were planned as one: first, second and so on."""
    found = list(patterns)
    for at in range(1, max((len(names) for names in certificate.alike), default=1)):
        others = {names[0]: names[at % len(names)] for names in certificate.alike}
        for pattern in patterns:
            renamed = tuple(one._replace(service=others.get(one.service, one.service)) for one in pattern.instances)
            found.append(pattern._replace(instances=renamed))
    return found


def _followed(problem: JointProblem, before: ProvisionPlan, gpus: Sequence[PlannedGpu]) -> WarmPlan:
    plan = planned_from(problem, continued(before.gpus, gpus))
    assert plan.certificate is not None
    if before.certificate is not None:
        plan = replace(plan, certificate=_carried(plan.certificate, before.certificate))
    return WarmPlan(plan, moves_between(before.gpus, plan.gpus))


def planned_from(problem: JointProblem, gpus: Sequence[PlannedGpu]) -> ProvisionPlan:
    """A plan of some GPUs, its value and watts; it has no bound."""
    certificate = PlanCertificate(
        objective=problem.objective,
        value=value_of(problem, gpus),
        bound=0.0,
        method=NO_BOUND,
        optimal=False,
        power_w=math.fsum(gpu.power_w for gpu in gpus),
        rates_rps={each.workload.id: each.workload.rate_rps for each in problem.services},
        floors_ratio={each.workload.id: each.floor_ratio for each in problem.services},
        available={each.gpu_type.name: each.gpu_type.available for each in problem.fleet},
        power_cap_w=problem.power_cap_w,
        carbon_cap_g_per_hour=problem.request.carbon_cap_g_per_hour,
    )
    return on_hosts_of(
        problem.request, ProvisionPlan("joint", tuple(gpus), quality=quality_of(problem), certificate=certificate)
    )


def _carried(new: PlanCertificate, old: PlanCertificate) -> PlanCertificate:
    """The known patterns and their prices for the next plan: the same parts of today's rates. They prove no bound."""
    rates = new.rates_rps
    served = set(rates) & set(old.rates_rps)
    patterns = tuple(
        pattern._replace(
            instances=tuple(
                one._replace(capacity_rps=one.capacity_rps * rates[one.service] / old.rates_rps[one.service])
                for one in pattern.instances
            )
        )
        for pattern in old.patterns
        if all(one.service in served for one in pattern.instances)
    )
    return replace(
        new,
        demand_price={name: old.demand_price.get(name, 0.0) for name in rates},
        accuracy_price={name: old.accuracy_price.get(name, 0.0) for name in rates},
        pool_price=dict(old.pool_price),
        power_price=old.power_price,
        costs=tuple(each for each in old.costs if each.service in served),
        patterns=patterns,
        slices=tuple(each for each in old.slices if each.service in served),
    )


def _new_plan(request: JointRequest, before: ProvisionPlan, max_moves: int | None) -> WarmPlan:
    """A plan made afresh, its GPUs in the order of those that it continues.

    Raises:
        InfeasibleError: There is no plan, or it takes too many moves.
    """
    plan = plan_joint(request)
    plan = replace(plan, gpus=continued(before.gpus, plan.gpus))
    moves = moves_between(before.gpus, plan.gpus)
    if max_moves is not None and moves.moves > max_moves:
        raise _too_many_moves(moves, len(plan.gpus), max_moves)
    return WarmPlan(plan, moves, fresh=True)


def _too_many_moves(moves: PlanMoves, gpus: int, max_moves: int) -> InfeasibleError:
    return InfeasibleError(
        f"no plan for these rates was found within {max_moves} moves; one takes {moves.moves}",
        binding="moves",
        nearest={"gpus": gpus, "moves": moves.moves},
        hint="raise plan.moves",
    )


def _limited(
    problem: JointProblem,
    before: ProvisionPlan,
    patterns: Sequence[KnownPattern],
    max_moves: int,
    effort: WarmEffort,
) -> WarmPlan | None:
    """The best plan within the moves; None where no plan serves everything."""
    groups, others = groups_of(problem, before.gpus)
    left = max_moves - sum(len(gpu.instances) for gpu in others)
    limits = KeptLimits(problem, {} if before.certificate is None else before.certificate.rates_rps)
    choices = successors(problem, groups, patterns, limits)
    counts, flows = choose(problem, groups, choices, left, effort) if left >= 0 else ({}, {})
    return _followed(problem, before, chosen_gpus(problem, choices, counts, flows)) if counts else None


def _promising(generator: JointGenerator, duals: Duals) -> list[KnownPattern]:
    """The known patterns that cost little beyond what they are worth today, the best first."""
    master, problem = generator.master, generator.problem
    per_w = problem.objective.per_w + duals.power

    def excess(known: KnownPattern) -> float:
        worth = 0.0
        for index in known.layout.pattern:
            item = problem.items[index]
            price = float(duals.demand[item.service] + duals.accuracy[item.service] * problem.gain(item))
            worth += max(0.0, price - per_w * float(problem.request_j[known.machine, index])) * item.rate_rps
        pool = float(duals.pool[problem.machines[known.machine].fleet])
        return master.pattern_cost(known) + duals.power * master.pattern_w(known) + pool - worth

    found = sorted(((excess(known), at) for at, known in enumerate(master.patterns)))
    near = [at for value, at in found if value <= _SLACK * duals.value]
    return [master.patterns[at] for at in near[:_SUCCESSORS]]


def choose(
    problem: JointProblem,
    groups: Sequence[RunningGroup],
    choices: Sequence[GpuSuccessor],
    max_moves: int | None,
    effort: WarmEffort,
) -> tuple[dict[int, int], dict[Flow, float]]:
    """Number of GPUs of each choice, by its index, and the flows; both empty where not everything can be served."""
    flows = list(dict.fromkeys(Flow(e.service, e.variant, c.machine) for c in choices for e in c.placed))
    rates = [each.workload.rate_rps for each in problem.services]
    model = new_model(gap_ratio=effort.gap_ratio, seconds=effort.seconds, nodes=effort.branchings)
    dear = _UNSERVED * max((each.cost for each in choices), default=1.0) + 1.0
    joules = [
        problem.machines[flow.machine].clocked.request_j(problem.services[flow.service].variants[flow.variant].model)
        for flow in flows
    ]
    costs = [problem.objective.per_w * each for each in joules] + [dear / rate for rate in rates]
    costs += [each.cost for each in choices]
    most = [model.inf] * len(flows) + rates + [model.inf] * len(choices)
    for cost, high in zip(costs, most, strict=True):
        model.addCol(cost, 0.0, high, 0, np.zeros(0, np.int32), np.zeros(0))
    first = len(flows) + len(rates)
    _add_flow_rows(problem, model, flows, choices, first)
    for source, group in enumerate(groups):
        mine = [first + at for at, each in enumerate(choices) if each.source == source]
        add_row(model, group.gpus, group.gpus, mine, [1.0] * len(mine))
    for at, kind in enumerate(problem.fleet):
        if kind.gpu_type.available is not None:
            mine = [first + i for i, c in enumerate(choices) if c.placed and problem.machines[c.machine].fleet == at]
            add_row(model, -model.inf, kind.gpu_type.available, mine, [1.0] * len(mine))
    if problem.power_cap_w is not None:
        columns = [*range(len(flows)), *range(first, first + len(choices))]
        add_row(model, -model.inf, problem.power_cap_w, columns, [*joules, *(each.power_w for each in choices)])
    if max_moves is not None:
        columns = list(range(first, first + len(choices)))
        add_row(model, -model.inf, max_moves, columns, [float(each.moves) for each in choices])
    make_whole(model, range(first, first + len(choices)))
    run(model)
    values = np.array(model.getSolution().col_value, np.float64)
    if not len(values) or not math.isfinite(model.getInfo().objective_function_value):
        return {}, {}
    if bool(np.any(values[len(flows) : first] > _UNSERVED_RPS)):
        return {}, {}
    counts = {at: int(n) for at, n in enumerate(np.rint(values[first:])) if n > 0}
    return counts, {flow: float(x) for flow, x in zip(flows, values, strict=False) if x > _TINY}


def _add_flow_rows(
    problem: JointProblem, model: object, flows: Sequence[Flow], choices: Sequence[GpuSuccessor], first: int
) -> None:
    """Add rows: flows stay within the provided rates, serve the services' rates and keep the floors."""
    provided: dict[Flow, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for at, each in enumerate(choices):
        for one in each.placed:
            provided[Flow(one.service, one.variant, each.machine)][first + at] += one.provided_rps
    inf = model.inf  # type: ignore[attr-defined]
    for at, flow in enumerate(flows):
        add_row(model, 0.0, inf, [at, *provided[flow]], [-1.0, *provided[flow].values()])
    for at, service in enumerate(problem.services):
        mine = [i for i, flow in enumerate(flows) if flow.service == at]
        add_row(model, service.workload.rate_rps, inf, [*mine, len(flows) + at], [1.0] * (len(mine) + 1))
        if service.floor_ratio > 0:
            gains = [service.variants[flows[i].variant].accuracy_ratio - service.floor_ratio for i in mine]
            add_row(model, 0.0, inf, mine, gains)


def chosen_gpus(
    problem: JointProblem, choices: Sequence[GpuSuccessor], counts: dict[int, int], flows: dict[Flow, float]
) -> tuple[PlannedGpu, ...]:
    """The GPUs of some choices; flows are spread over their instances by the rates they are provided for.

    An instance without requests continues: stopping it would be a move.
    """
    provided: dict[Flow, float] = defaultdict(float)
    replicas: dict[int, int] = defaultdict(int)
    for at, count in counts.items():
        for one in choices[at].placed:
            provided[Flow(one.service, one.variant, choices[at].machine)] += count * one.provided_rps
            replicas[one.service] += count
    gpus = []
    for at, count in counts.items():
        choice = choices[at]
        for _ in range(count if choice.placed else 0):
            placed = []
            for one in choice.placed:
                flow = Flow(one.service, one.variant, choice.machine)
                rate = one.provided_rps * min(1.0, flows.get(flow, 0.0) / provided[flow])
                placed.append(one._replace(rate_rps=rate, replicas=replicas[one.service]))
            gpus.append(gpu_of(problem, choice.machine, placed))
    return tuple(gpus)
