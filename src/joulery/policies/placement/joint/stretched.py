"""The greatest load that the GPUs of a plan serve: the same layouts, their shares and batches chosen again for it.

Shares come in steps and GPUs are rarely full, so layouts that are best at one load serve a little more. What they cost
there follows: GPUs and their clocks stay, requests and their watts grow in proportion.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import NamedTuple

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.plan_envelope import EnvelopePlan
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.policies.placement.joint.master import Flow, KnownPattern
from joulery.policies.placement.joint.planner import patterns_of
from joulery.policies.placement.joint.problem import JointProblem, JointRequest, problem_of
from joulery.policies.placement.joint.result.planned_gpus import gpus_of
from joulery.policies.placement.provisioning.random_limits import KnownLimits

_MOST_RATIO = 0.04
"""Most further load that is tried."""
COARSE_RATIO, FINE_RATIO = 0.001, 0.00005
"""Precision of the greatest load: at first, and where it decides from which load on look-ups are off."""
_FIRST_RATIO = 0.004
"""Further load that is tried first."""
_SAME = 1e-9


class _Layouts(NamedTuple):
    """The layouts of a plan, independent of the load.

    Attributes:
        counts: How many GPUs of each machine and (service, variant, number of equal parts) of its instances.
        flows: Requests a second of every flow at load 1.
    """

    counts: Counter[tuple[int, tuple[tuple[int, int, int], ...]]]
    flows: dict[Flow, float]


def stretched(
    request: JointRequest,
    plan: EnvelopePlan,
    most: float = math.inf,
    known: KnownLimits | None = None,
    finest_ratio: float = COARSE_RATIO,
) -> EnvelopePlan:
    """A plan at the greatest load that its layouts serve.

    Args:
        request: The request at load 1.
        plan: A plan at a load; one with partitioned GPUs, or of services that stand for several, is returned as it is.
        most: Highest load that is tried.
        known: Limits of random requests found before, for other loads.
        finest_ratio: Precision of the greatest load, as a ratio.
    """
    if any(one.slice for gpu in plan.gpus for one in gpu.instances) or any(each.names for each in request.services):
        return plan
    known = known or KnownLimits()
    problem = problem_of(_narrowed(request, plan, plan.load), known)
    layouts = _layouts(problem, plan)
    if layouts is None:
        return plan
    best, fits = plan, plan.load
    fails = min(plan.load * (1 + _MOST_RATIO), most * (1 + _SAME))
    step = _FIRST_RATIO
    while fails > fits * (1 + finest_ratio):
        load = min(fits * (1 + step), (fits + fails) / 2)
        gpus = _gpus(_narrowed(request, plan, load), layouts, load, known)
        found = None if gpus is None else plan._replace(load=load, gpus=gpus, made_load=plan.made_load or plan.load)
        if found is not None and _costs_no_more(request, found, plan):
            best, fits, step = found, load, 2 * step
        else:
            fails = load
    return best


def _costs_no_more(request: JointRequest, found: EnvelopePlan, plan: EnvelopePlan) -> bool:
    """Whether a plan at a higher load takes no more watts at the first plan's load, and is within the cap."""
    capped = request.power_cap_w is not None and found.power_w > request.power_cap_w
    return not capped and found.power_at_w(plan.load) <= plan.power_w * (1 + _SAME)


def _narrowed(request: JointRequest, plan: EnvelopePlan, load: float) -> JointRequest:
    """The request at a load, with only the parts and batches of a plan."""
    used: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    rates = {each.workload.id: each.workload.rate_rps for each in request.services}
    for gpu in plan.gpus:
        for one in gpu.instances:
            used[one.workload][round(plan.load * rates[one.workload] / one.provided_rps)].add(one.batch)
    services = []
    for each in request.services:
        workload = replace(each.workload, rate_rps=load * each.workload.rate_rps)
        batches = {parts: frozenset(some) for parts, some in used[each.workload.id].items()}
        services.append(replace(each, workload=workload, batches=batches or each.batches))
    return replace(request, services=tuple(services))


def _layouts(problem: JointProblem, plan: EnvelopePlan) -> _Layouts | None:
    """The layouts of a plan; None where one is not a choice of the problem."""
    patterns = patterns_of(problem, ProvisionPlan("joint", plan.gpus))
    if len(patterns) != len(plan.gpus):
        return None
    counts: Counter[tuple[int, tuple[tuple[int, int, int], ...]]] = Counter()
    flows: dict[Flow, float] = defaultdict(float)
    owners = {each.workload.id: at for at, each in enumerate(problem.services)}
    for (machine, pattern), gpu in zip(patterns, plan.gpus, strict=True):
        counts[machine, tuple(_key(problem, item) for item in pattern)] += 1
        for one in gpu.instances:
            service = owners[one.workload]
            variant = [each.model for each in problem.services[service].variants].index(one.model)
            flows[Flow(service, variant, machine)] += one.rate_rps / plan.load
    return _Layouts(counts, dict(flows))


def _key(problem: JointProblem, item: int) -> tuple[int, int, int]:
    each = problem.items[item]
    return each.service, each.variant, round(1 / each.part)


def _gpus(request: JointRequest, layouts: _Layouts, load: float, known: KnownLimits) -> tuple[PlannedGpu, ...] | None:
    """The GPUs at a load; None where a layout does not fit."""
    try:
        problem = problem_of(request, known)
    except InfeasibleError:  # the batches of the layouts keep no SLO any more
        return None
    index = {_key(problem, item): item for item in range(len(problem.items))}
    chosen = []
    for (machine, keys), count in layouts.counts.items():
        if not all(key in index for key in keys):
            return None
        layout = problem.packings[machine].fit(tuple(sorted(index[key] for key in keys)))
        if layout is None:
            return None
        chosen.append((KnownPattern(machine, layout), count))
    return gpus_of(problem, chosen, {flow: load * rate for flow, rate in layouts.flows.items()})
