"""The joint problem the long way: every pattern of a GPU by trying all batches, whole numbers by scipy.

Shares nothing with the planner but the figures of single items and Alg. 2 (:func:`allocate`): no packing bounds, no
pricer, no column generation, no master problem. For small problems only. Used by tests and by ``benchmarks joint``.
"""

import itertools
import random
from collections import Counter

import numpy as np
from scipy.optimize import LinearConstraint, milp

from joulery.domain.gpu.optimum import PlanCertificate, PlanObjective, objective_of
from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.serving.service import Slo
from joulery.perf import catalog
from joulery.perf.instances import clocks_mhz
from joulery.policies.placement.joint.problem import JointFleet, JointProblem, JointRequest, JointService, Variant
from joulery.policies.placement.provisioning.gpu_shares import GpuType, allocate
from joulery.policies.placement.provisioning.options import Rules

PROFILE = catalog.profile("v100-calibrated")
ACCURACY = {"alexnet": 0.565, "resnet50": 0.761, "vgg19": 0.724}


def fleet(levels: int = 2, host_w: float = 0.0, available: int | None = None) -> JointFleet:
    """V100s with a few clocks."""
    return JointFleet(GpuType("V100", PROFILE, 3.06, available), clocks_mhz(PROFILE, levels), host_w)


def service(name: str, model: str, rate_rps: float, slo_ms: float, *others: str, floor: float = 0.0) -> JointService:
    """A service with random requests; other models are variants of it."""
    names = (model, *others)
    variants = tuple(Variant(each, ACCURACY[each]) for each in names) if others or floor else (Variant(model),)
    workload = Workload(name, model, Slo(slo_ms / 1e3, 0.99), rate_rps, Arrivals.poisson())
    return JointService(workload, variants, floor)


def random_request(seed: int, objective: PlanObjective | None = None) -> JointRequest:
    """One or two services, one or two clocks, sometimes with variants and a floor, sometimes host watts."""
    rng = random.Random(seed)
    services = []
    for at in range(rng.randint(1, 2)):
        if rng.random() < 0.3:
            floor = rng.choice([0.6, 0.72, 0.74])
            services.append(service(f"s{at}", "resnet50", rng.uniform(150, 450), 40, "alexnet", floor=floor))
        else:
            model, most_rps, slo_ms = rng.choice([("resnet50", 450, 25), ("vgg19", 300, 30), ("ssd", 180, 45)])
            services.append(service(f"s{at}", model, most_rps * rng.uniform(0.4, 1), slo_ms * rng.uniform(1, 1.5)))
    rules = Rules(max_batch=4, max_replicas=2, margin_ratio=0.05)
    kinds = (fleet(rng.choice([1, 2]), rng.choice([0.0, 60.0])),)
    return JointRequest(tuple(services), kinds, rules, objective or objective_of("energy"))


def every_pattern(problem: JointProblem, machine: int) -> list[tuple[int, ...]]:
    """Every multiset of items that fits on a machine; grown one item at a time, as no superset of a misfit fits."""
    copies = problem.copies(machine)
    found: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    while level:
        level = [
            (*pattern, item)
            for pattern in level
            for item in range(pattern[-1] if pattern else 0, len(problem.items))
            if (*pattern, item).count(item) <= copies[item] and fits(problem, machine, (*pattern, item))
        ]
        found += level
    return found


def fits(problem: JointProblem, machine: int, pattern: tuple[int, ...]) -> bool:
    """Whether memory and replicas that stay apart allow it, and some choice of batches and shares keeps every SLO."""
    if not allowed(problem, machine, pattern):
        return False
    gpu = problem.machines[machine].gpu_type.profile.gpu
    choices = [problem.options[item][machine] for item in pattern]
    if not all(choices) or sum(some[0].units for some in choices) > problem.packings[machine].capacity:
        return False
    return any(
        allocate(gpu, [one.process for one in chosen], [one.units for one in chosen]) is not None
        for chosen in itertools.product(*choices)
    )


def allowed(problem: JointProblem, machine: int, pattern: tuple[int, ...]) -> bool:
    """Whether processes and their standbys fit into memory, and no two replicas that have to be apart are there."""
    items, kind = [problem.items[item] for item in pattern], problem.machines[machine].gpu_type
    owners = [problem.services[item.service] for item in items]
    of = [
        owner.variants[item.variant].memory_bytes or owner.workload.memory_bytes or 0.0
        for owner, item in zip(owners, items, strict=True)
    ]
    if kind.memory_bytes is not None and 2 * sum(of) > kind.memory_bytes:
        return False
    together = problem.request.rules.domain.value == "none"
    return together or len({item.service for item in items}) == len(items)


def optimum(problem: JointProblem) -> float:
    """The least value of any plan."""
    patterns = [(at, one) for at in range(len(problem.machines)) for one in every_pattern(problem, at)]
    flows = sorted({(problem.items[i].service, problem.items[i].variant, at) for at, one in patterns for i in one})
    size = len(patterns) + len(flows)
    cost, rows, low, high = np.zeros(size), [], [], []
    objective = problem.objective
    for at, (machine, pattern) in enumerate(patterns):
        watts = problem.standing_w[machine] + sum(problem.overhead_w[machine, i] for i in pattern)
        usd = problem.fleet[problem.machines[machine].fleet].gpu_type.usd_per_hour
        cost[at] = objective.value(watts, usd, 1)
    for at, (owner, variant, machine) in enumerate(flows):
        model = problem.services[owner].variants[variant].model
        cost[len(patterns) + at] = objective.per_w * problem.machines[machine].clocked.request_j(model)
        row = np.zeros(size)
        row[len(patterns) + at] = -1.0
        for index, (where, pattern) in enumerate(patterns):
            mine = [problem.items[i] for i in pattern if where == machine]
            row[index] = sum(i.rate_rps for i in mine if (i.service, i.variant) == (owner, variant))
        rows.append(row), low.append(0.0), high.append(np.inf)
    for owner, each in enumerate(problem.services):
        demand, gain = np.zeros(size), np.zeros(size)
        for at, (mine, variant, _) in enumerate(flows):
            if mine == owner:
                demand[len(patterns) + at] = 1.0
                if each.floor_ratio:
                    gain[len(patterns) + at] = each.variants[variant].accuracy_ratio - each.floor_ratio
        rows += [demand, gain]
        low += [each.workload.rate_rps, 0.0]
        high += [np.inf, np.inf]
    whole = np.array([1] * len(patterns) + [0] * len(flows))
    found = milp(
        cost, constraints=LinearConstraint(np.array(rows), low, high), integrality=whole, options={"mip_rel_gap": 1e-9}
    )
    return float(found.fun) if found.success else float("inf")


def worth(certificate: PlanCertificate, kind: str, clock_mhz: float, instances: Counter) -> float:
    """What a layout is worth at a certificate's prices, less what it costs; instances: (service, model, rate)."""
    joules = {
        (one.service, one.variant): one
        for one in certificate.costs
        if one.type == kind and abs(one.clock_mhz - clock_mhz) < 1e-6
    }
    per_w = certificate.objective.per_w + certificate.power_price
    value = 0.0
    for (name, model, rate_rps), count in instances.items():
        cost = joules[(name, model)]
        floor = certificate.floors_ratio[name]
        gain = cost.accuracy_ratio - floor if floor else 0.0
        each = certificate.demand_price[name] + certificate.accuracy_price[name] * gain - per_w * cost.request_j
        value += count * rate_rps * max(0.0, each)
    return value


def bound_of(certificate: PlanCertificate) -> float:
    """The bound that a certificate's prices prove, if no layout is worth more than it costs."""
    value = sum(price * certificate.rates_rps[name] for name, price in certificate.demand_price.items())
    value -= certificate.power_price * (certificate.power_cap_w or 0.0)
    for name, price in certificate.pool_price.items():
        if certificate.available[name] is not None:
            value -= price * certificate.available[name]
    return value
