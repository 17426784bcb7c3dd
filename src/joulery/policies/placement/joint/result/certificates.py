"""Certificate of a joint plan, from which others can prove its bound: prices, joules, patterns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from joulery.domain.gpu.optimum import CertifiedCost, CertifiedInstance, CertifiedPattern, PlanCertificate
from joulery.policies.placement.joint.generation import JointProof
from joulery.policies.placement.joint.master import JointMaster, JointSolution, KnownPattern
from joulery.policies.placement.joint.problem import JointProblem
from joulery.policies.placement.joint.result.partitioned_gpus import certified_partitions, certified_slices

_PATTERNS_MAX = 400
"""Patterns exported beside those of the plan, at most."""


def certificate_of(
    problem: JointProblem, master: JointMaster, whole: JointSolution, proof: JointProof
) -> PlanCertificate:
    """The bound and its prices; the plan's own figures are filled in by the caller."""
    duals = proof.duals
    known = master.patterns
    order = [*sorted(whole.counts), *(at for at in range(len(known)) if at not in whole.counts)]
    return PlanCertificate(
        objective=problem.objective,
        value=0.0,
        bound=proof.value,
        method=_method(problem),
        optimal=False,
        power_w=0.0,
        demand_price=_by_service(problem, duals.demand.tolist()),
        accuracy_price=_by_service(problem, duals.accuracy.tolist()),
        pool_price={each.gpu_type.name: price for each, price in zip(problem.fleet, duals.pool.tolist(), strict=True)},
        power_price=duals.power,
        rates_rps=_by_service(problem, [each.workload.rate_rps for each in problem.services]),
        floors_ratio=_by_service(problem, [each.floor_ratio for each in problem.services]),
        available={each.gpu_type.name: each.gpu_type.available for each in problem.fleet},
        power_cap_w=problem.power_cap_w,
        carbon_cap_g_per_hour=problem.request.carbon_cap_g_per_hour,
        costs=_costs(problem),
        patterns=tuple(
            _pattern(problem, known[at], whole.counts.get(at, 0)) for at in order[: len(whole.counts) + _PATTERNS_MAX]
        ),
        slices=certified_slices(problem),
        partitions=certified_partitions(problem, whole),
        alike=tuple(each.names for each in problem.services if each.count > 1),
    )


def _by_service(problem: JointProblem, figures: Sequence[float]) -> dict[str, float]:
    """A figure of each service by name; those that are alike have the same."""
    kinds = zip(problem.services, figures, strict=True)
    return {name: figure for each, figure in kinds for name in each.names or (each.workload.id,)}


def in_whole_gpus(problem: JointProblem, bound: float) -> float:
    """A bound on dollars alone, rounded up to whole GPUs of one price."""
    prices = {each.gpu_type.usd_per_hour for each in problem.fleet}
    objective = problem.objective
    if objective.per_w > 0 or objective.per_gpu > 0 or len(prices) > 1 or not (step := objective.per_usd * min(prices)):
        return bound
    return math.ceil(bound / step - 1e-6) * step


def _method(problem: JointProblem) -> str:
    clocks = max(len(each.clocks_mhz) for each in problem.fleet)
    choices = []
    if problem.items:
        most = max(math.ceil(1 / item.part - 1e-9) for item in problem.items)
        choices.append("services whole" if most == 1 else f"instances for 1/1 to 1/{most} of a service's rate")
    if problem.slices:
        partitions = len({partition.counts for partition in problem.partitions})
        choices.append(
            f"{len(problem.slices)} choices of model, slice, processes and batch, {partitions} MIG partitions of a GPU"
        )
    fast = [each for kind in problem.fleet if kind.sliced is not None for each in kind.sliced.table.implausible]
    if fast:
        choices.append(f"{len(fast)} of them measured implausibly fast, to be measured again, such as {fast[0]}")
    alike = sum(each.count for each in problem.services if each.count > 1)
    if alike:
        kinds = sum(each.count > 1 for each in problem.services)
        choices.append(f"{alike} services of {kinds} kinds, those of a kind alike")
    choices.append("the highest clock" if clocks == 1 else f"{clocks} clocks a GPU")
    if problem.request.alone:
        choices.append("an instance a GPU")
    return f"{', '.join(choices)}; no layout of a GPU is worth more than it costs; within the predictor"


def _costs(problem: JointProblem) -> tuple[CertifiedCost, ...]:
    found: dict[tuple[int, int, int], CertifiedCost] = {}
    for at, machine in enumerate(problem.machines):
        for index, item in enumerate(problem.items):
            if problem.packings[at].alone[index] > problem.packings[at].capacity:
                continue
            service = problem.services[item.service]
            variant = service.variants[item.variant]
            found[(item.service, item.variant, at)] = CertifiedCost(
                service.workload.id,
                variant.model,
                machine.gpu_type.name,
                machine.clocked.clock_mhz,
                float(problem.request_j[at, index]),
                variant.accuracy_ratio,
            )
    return tuple(found.values())


def _pattern(problem: JointProblem, known: KnownPattern, count: int) -> CertifiedPattern:
    machine = problem.machines[known.machine]
    unit = machine.gpu_type.profile.gpu.unit_percent
    instances = []
    for item, option, units in zip(known.layout.pattern, known.layout.options, known.layout.units, strict=True):
        each = problem.items[item]
        service = problem.services[each.service]
        instances.append(
            CertifiedInstance(
                service.workload.id,
                service.variants[each.variant].model,
                each.rate_rps,
                float(problem.overhead_w[known.machine, item]),
                units * unit / 100.0,
                option.process.batch,
            )
        )
    standing_w = float(problem.standing_w[known.machine])
    return CertifiedPattern(machine.gpu_type.name, machine.clocked.clock_mhz, standing_w, count, tuple(instances))
