"""Plans for many different services in batches, with a bound that holds for all of them together.

A batch holds services of every model in turn, so it contains services that fit beside one another. Room is left on the
last GPUs of each batch. The bound does not come from the batches: every instance pays for the part of its GPU that it
needs alone. No layout can undercut that, because no instance needs less beside others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.optimum import CertifiedPattern, PlanCertificate
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.policies.placement.joint.problem import JointFleet, JointProblem, JointRequest, JointService, problem_of
from joulery.policies.placement.joint.result.planned_gpus import on_hosts_of
from joulery.policies.placement.provisioning.many_kinds.in_batches import each_model_in_turn

BATCH = 48
"""Kinds of services planned at once."""
_METHOD = "planned in batches of {batch} services; every instance pays for the part of a GPU that it needs alone"

Planner = Callable[[JointProblem], ProvisionPlan]


class _PlannedBatch(NamedTuple):
    """A batch, its plan, and what a request a second of each of its services costs at least."""

    problem: JointProblem
    plan: ProvisionPlan
    prices: FloatArray


def plan_joint_batches(request: JointRequest, planner: Planner, batch: int = BATCH) -> ProvisionPlan:
    """A plan for all services, made of plans for batches of them.

    Args:
        request: The request; services that are alike are merged into one already.
        planner: Plans a batch.
        batch: Services of a batch, at most.

    Raises:
        InfeasibleError: There are too few GPUs, or too few watts under the cap, for a batch after the earlier ones.
        ConfigError: As :func:`joulery.policies.placement.joint.problem.problem_of`.
    """
    made: list[_PlannedBatch] = []
    for some in _batches(request.services, batch):
        plans = [plan for _, plan, _ in made]
        problem = problem_of(replace(request, services=some, fleet=_left(request.fleet, plans)))
        problem = replace(problem, request=replace(problem.request, power_cap_w=_watts_left(request, plans)))
        try:
            plan = planner(problem)
        except InfeasibleError as error:
            raise InfeasibleError(
                f"{error.message}; {len(request.services)} services that differ are planned in batches of {batch}, "
                "which takes more GPUs than one plan would",
                binding=error.binding,
                nearest=error.nearest,
                hint=error.hint,
            ) from error
        made.append(_PlannedBatch(problem, plan, least_prices(problem)))
    return _joined(request, made, batch)


def least_prices(problem: JointProblem) -> FloatArray:
    """Least cost of a request a second of each service, float64[services].

    It pays for its joules and, in proportion, for its process and for the part of the GPU that this needs alone.
    """
    objective, prices = problem.objective, np.full(len(problem.services), math.inf)
    for machine, packing in enumerate(problem.packings):
        kind = problem.fleet[problem.machines[machine].fleet].gpu_type
        standing = objective.value(float(problem.standing_w[machine]), kind.usd_per_hour, 1)
        for at, item in enumerate(problem.items):
            if packing.alone[at] <= packing.capacity:
                part = standing * float(packing.alone[at]) / packing.capacity
                process = part + objective.per_w * float(problem.overhead_w[machine, at])
                each = process / item.rate_rps + objective.per_w * float(problem.request_j[machine, at])
                prices[item.service] = min(prices[item.service], each)
    return prices


def _batches(services: Sequence[JointService], batch: int) -> list[tuple[JointService, ...]]:
    """The services in batches, each model in turn."""
    order = [services[at] for at in each_model_in_turn([each.workload.model for each in services])]
    count = math.ceil(len(order) / batch)
    return [tuple(order[at::count]) for at in range(count)]


def _left(fleet: Sequence[JointFleet], plans: Sequence[ProvisionPlan]) -> tuple[JointFleet, ...]:
    """The GPUs that earlier batches have left."""
    used = Counter(gpu.type for plan in plans for gpu in plan.gpus)
    found = []
    for each in fleet:
        most = each.gpu_type.available
        left = None if most is None else most - used[each.gpu_type.name]
        found.append(replace(each, gpu_type=replace(each.gpu_type, available=left)))
    return tuple(found)


def _watts_left(request: JointRequest, plans: Sequence[ProvisionPlan]) -> float | None:
    """Power that earlier batches have left of the cap, at least 1e-6 W; None without a cap."""
    if request.power_cap_w is None:
        return None
    used_w = math.fsum(gpu.power_w for plan in plans for gpu in plan.gpus)
    return max(request.power_cap_w - used_w, 1e-6)


def _joined(request: JointRequest, made: Sequence[_PlannedBatch], batch: int) -> ProvisionPlan:
    """All batches as one plan, with the bound for all of them."""
    gpus = tuple(gpu for _, plan, _ in made for gpu in plan.gpus)
    known = [plan.certificate for _, plan, _ in made if plan.certificate is not None]
    demand = {
        name: float(price)
        for problem, _, prices in made
        for each, price in zip(problem.services, prices.tolist(), strict=True)
        for name in each.names or (each.workload.id,)
    }
    rates = {name: rate for each in known for name, rate in each.rates_rps.items()}
    value = math.fsum(each.value for each in known)
    certificate = PlanCertificate(
        objective=request.objective,
        value=value,
        bound=min(value, math.fsum(demand[name] * rate for name, rate in rates.items())),
        method=f"{_METHOD.format(batch=batch)}; {known[0].method}",
        optimal=False,
        power_w=math.fsum(each.power_w for each in known),
        demand_price=demand,
        accuracy_price=dict.fromkeys(demand, 0.0),
        pool_price={each.gpu_type.name: 0.0 for each in request.fleet},
        rates_rps=rates,
        floors_ratio={name: floor for each in known for name, floor in each.floors_ratio.items()},
        available={each.gpu_type.name: each.gpu_type.available for each in request.fleet},
        power_cap_w=request.power_cap_w,
        carbon_cap_g_per_hour=request.carbon_cap_g_per_hour,
        costs=tuple(cost for each in known for cost in each.costs),
        patterns=tuple(pattern for each in known for pattern in each.patterns if _planned(pattern)),
        alike=tuple(names for each in known for names in each.alike),
    )
    return on_hosts_of(request, replace(made[0][1], gpus=gpus, certificate=certificate))


def _planned(pattern: CertifiedPattern) -> bool:
    return pattern.planned > 0
