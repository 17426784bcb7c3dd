"""Joint problems on cut GPUs the long way: every filling of every cut, whole numbers by scipy.

Shares nothing with the planner but the figures of single instances on slices: no master problem, no prices. For small
problems only. Used by tests and by ``benchmarks joint``.
"""

import itertools
import math
import random
from collections import defaultdict

import numpy as np
from scipy.optimize import LinearConstraint, milp

from joulery.domain.gpu.mig import A30_24GB
from joulery.domain.gpu.optimum import PlanCertificate, objective_of
from joulery.domain.gpu.provisioning import Arrivals, Workload
from joulery.domain.serving.service import Slo
from joulery.perf.instances import clocks_mhz
from joulery.perf.interference.model import GpuCoefficients, InterferenceProfile
from joulery.perf.slice_table import BatchCurve, SlicedGpu, SliceTable
from joulery.policies.placement.joint.problem import JointFleet, JointProblem, JointRequest, JointService, Variant
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.options import Rules

UNCUT = InterferenceProfile(GpuCoefficients("A30-24GB", 165.0, 1440.0, 30.0, 1.0, 0.0, 0.0, 0.0, 1.0), {})
MODELS = {"large": (8e-3, 3.0e-3, 0.80), "small": (4e-3, 1.0e-3, 0.74), "other": (5e-3, 2.0e-3, math.nan)}
"""Seconds to launch, kernel seconds of a request on one compute slice of four, accuracy."""


def table(processes: int = 2) -> SliceTable:
    """A made-up table of an A30: launches bound small batches, kernels large ones."""
    curves = {}
    for model, (launch_s, kernel_s, _) in MODELS.items():
        for profile in A30_24GB.profiles:
            item_s = kernel_s * (1 + 0.1 / profile.compute_slices) / profile.compute_slices
            curves[(model, profile.size)] = tuple(
                BatchCurve(p, (1, 2, 4, 8, 16), tuple(max(launch_s, p * item_s * b) for b in (1, 2, 4, 8, 16)))
                for p in range(1, processes + 1)
            )
    return SliceTable("a made-up table", curves)


def fleet(levels: int = 1, host_w: float = 0.0, available: int | None = None, processes: int = 2) -> JointFleet:
    """A30s that can be cut, and have no coefficients for shares."""
    sliced = SlicedGpu(table(processes), A30_24GB, 30.0, 165.0)
    return JointFleet(GpuType("A30-24GB", UNCUT, 1.5, available), clocks_mhz(UNCUT, levels), host_w, sliced)


def service(name: str, model: str, rate_rps: float, slo_ms: float, *others: str, floor: float = 0.0) -> JointService:
    """A service with random requests; other models are variants of it."""
    names = (model, *others)
    variants = tuple(Variant(each, MODELS[each][2]) for each in names) if others or floor else (Variant(model),)
    workload = Workload(name, model, Slo(slo_ms / 1e3, 0.99), rate_rps, Arrivals.poisson())
    return JointService(workload, variants, floor)


def random_request(seed: int) -> JointRequest:
    """One or two services, one or two clocks, sometimes with variants and a floor, sometimes host watts."""
    rng = random.Random(seed)
    services = []
    for at in range(rng.randint(1, 2)):
        rate_rps, slo_ms = rng.uniform(150, 900), rng.uniform(40, 120)
        if rng.random() < 0.5:
            floor = rng.choice([0.75, 0.77, 0.80])
            services.append(service(f"s{at}", "large", rate_rps, slo_ms, "small", floor=floor))
        else:
            services.append(service(f"s{at}", "other", rate_rps, slo_ms))
    objective = objective_of(rng.choice(["energy", "energy", "cost"]))
    kinds = (fleet(rng.choice([1, 2]), rng.choice([0.0, 60.0]), processes=1),)
    return JointRequest(tuple(services), kinds, Rules(max_batch=16, margin_ratio=0.05), objective)


def every_filling(problem: JointProblem) -> list[tuple[int, tuple[int, ...]]]:
    """Every machine with every multiset of options on the slices of every cut."""
    found = set()
    for partition in problem.partitions:
        parts = []
        for profile, slices in enumerate(partition.counts):
            some = [i for i, o in enumerate(problem.slices) if (o.machine, o.profile) == (partition.machine, profile)]
            parts.append(itertools.combinations_with_replacement([-1, *some], slices))
        for chosen in itertools.product(*parts):
            used = tuple(sorted(i for some in chosen for i in some if i >= 0))
            owners = [problem.slices[i].service for i in used]
            apart = problem.request.rules.domain.value != "none"
            if used and not (apart and len(set(owners)) < len(owners)):
                found.add((partition.machine, used))
    return sorted(found)


def optimum(problem: JointProblem) -> float:
    """The least value of any plan."""
    fillings, options = every_filling(problem), problem.slices
    size = len(fillings) + len(options)
    objective = problem.objective
    cost, rows, low, high = np.zeros(size), [], [], []
    by_option = defaultdict(lambda: np.zeros(size))
    for at, (machine, used) in enumerate(fillings):
        usd = problem.fleet[problem.machines[machine].fleet].gpu_type.usd_per_hour
        cost[at] = objective.value(float(problem.standing_w[machine]), usd, 1)
        for i in used:
            by_option[i][at] += options[i].capacity_rps
    for i, one in enumerate(options):
        cost[len(fillings) + i] = objective.per_w * one.request_j
        row = by_option[i]
        row[len(fillings) + i] = -1.0
        rows.append(row), low.append(0.0), high.append(np.inf)
    for owner, each in enumerate(problem.services):
        demand, gain = np.zeros(size), np.zeros(size)
        for i, one in enumerate(options):
            if one.service == owner:
                demand[len(fillings) + i] = 1.0
                if each.floor_ratio:
                    gain[len(fillings) + i] = each.variants[one.variant].accuracy_ratio - each.floor_ratio
        rows += [demand, gain]
        low += [each.workload.rate_rps, 0.0]
        high += [np.inf, np.inf]
    whole = np.array([1] * len(fillings) + [0] * len(options))
    limits = LinearConstraint(np.array(rows), low, high)
    found = milp(cost, constraints=limits, integrality=whole, options={"mip_rel_gap": 1e-9})
    return float(found.fun) if found.success else math.inf


def most_worth(certificate: PlanCertificate) -> float:
    """How much the best filling of any cut is worth at a certificate's prices, over what its GPU costs: at most 1."""
    objective, worst = certificate.objective, 0.0
    per_w = objective.per_w + certificate.power_price
    best: dict[tuple[str, float, str], float] = defaultdict(float)
    for one in certificate.slices:
        floor = certificate.floors_ratio[one.service]
        gain = one.accuracy_ratio - floor if floor else 0.0
        each = certificate.demand_price[one.service] + certificate.accuracy_price[one.service] * gain
        worth = one.capacity_rps * max(0.0, each - per_w * one.request_j)
        key = (one.type, one.clock_mhz, one.slice)
        best[key] = max(best[key], worth)
    for partition in certificate.partitions:
        cost = per_w * partition.standing_w + objective.per_usd * partition.usd_per_hour + objective.per_gpu
        cost += certificate.pool_price[partition.type]
        worst = max(worst, sum(best[(partition.type, partition.clock_mhz, name)] for name in partition.slices) / cost)
    return worst
