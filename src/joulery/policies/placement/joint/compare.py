"""Baselines of the joint plan: fixed knobs, single knobs, and one planner after the other."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.optimum import PlanCertificate, PlanObjective, objective_of
from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance, ProvisionPlan
from joulery.perf.instances import ServingInstance, at_clock, predict_gpu
from joulery.policies.placement.joint.generation import JointEffort
from joulery.policies.placement.joint.master import Flow, KnownPattern
from joulery.policies.placement.joint.planner import patterns_of, plan_joint, quality_of, value_of
from joulery.policies.placement.joint.problem import JointProblem, JointRequest, problem_of
from joulery.policies.placement.joint.result.partitioned_gpus import numbered, sliced_gpu
from joulery.policies.placement.joint.result.planned_gpus import gpus_of, on_hosts_of
from joulery.policies.placement.joint.slice_options import SliceOption
from joulery.policies.placement.provisioning.packing import PackedGpu, Pattern
from joulery.policies.placement.provisioning.planner import provision

KNOBS = ("variant", "share", "batch", "clock", "type", "count")
"""Choices of a plan: which model, whether GPUs are shared, batches, clocks, GPU types, instances of a service."""

_TIE_USD_PER_W = 1e-6
"""Dollars a watt, small enough to decide only between plans of the same rent."""


def locked(request: JointRequest, knobs: Sequence[str]) -> JointRequest:
    """The request with some knobs fixed at their default choices.

    ``variant``: each service's most accurate; ``share``: an instance a GPU; ``batch``: one request at a time;
    ``clock``: the highest; ``type``: the first GPU type; ``count``: one instance a service, where that is possible.

    Raises:
        ConfigError: There is no such knob.
    """
    unknown = [knob for knob in knobs if knob not in KNOBS]
    if unknown:
        raise ConfigError("no such knob to lock", got=", ".join(unknown), expected=", ".join(KNOBS), pointer="--lock")
    if "variant" in knobs:
        request = replace(
            request,
            services=tuple(
                replace(each, variants=(max(each.variants, key=lambda variant: variant.accuracy_ratio),))
                if len(each.variants) > 1
                else each
                for each in request.services
            ),
        )
    if "share" in knobs:
        request = replace(request, alone=True)
    if "batch" in knobs:
        request = replace(request, rules=replace(request.rules, max_batch=1))
    if "clock" in knobs:
        request = replace(
            request, fleet=tuple(replace(each, clocks_mhz=(max(each.clocks_mhz),)) for each in request.fleet)
        )
    if "type" in knobs:
        request = replace(request, fleet=request.fleet[:1])
    if "count" in knobs:
        request = replace(request, rules=replace(request.rules, max_replicas=1))
    return request


def comparisons(request: JointRequest, effort: JointEffort | None = None) -> tuple[ProvisionPlan, ...]:
    """Dedicated GPUs, single knobs on them, and one planner after the other; each named in its ``policy``.

    Raises:
        InfeasibleError: Some baseline cannot serve the services.
    """
    fixed = [knob for knob in ("variant", "share", "clock") if knob != "variant" or _has_variants(request)]
    plans = [_named("dedicated GPUs", locked(request, fixed), effort)]
    for knob in fixed:
        if knob == "clock" and all(len(each.clocks_mhz) == 1 for each in request.fleet):
            continue
        others = [each for each in fixed if each != knob]
        plans.append(_named(f"only {knob}s chosen", locked(request, others), effort))
    plans.append(one_after_the_other(request, effort))
    return tuple(plans)


def _has_variants(request: JointRequest) -> bool:
    return any(len(each.variants) > 1 for each in request.services)


def _named(name: str, request: JointRequest, effort: JointEffort | None) -> ProvisionPlan:
    return replace(plan_joint(request, effort), policy=name)


def one_after_the_other(request: JointRequest, effort: JointEffort | None = None) -> ProvisionPlan:
    """Plan for the fewest dollars at the highest clock, then set the best clock of each GPU, its instances unchanged.

    Where services have a choice of variants, the first step makes it too.
    """
    cheapest = replace(locked(request, ["clock"]), objective=_dollars(request))
    first = plan_joint(cheapest, effort, cheapest_of_all(cheapest))
    problem = problem_of(request)
    replicas: Counter[int] = Counter()
    sliced = [_slower(problem, gpu, replicas) for gpu in first.gpus if gpu.instances[0].slice]
    chosen: Counter[tuple[int, Pattern]] = Counter()
    for machine, pattern in patterns_of(problem, first):
        chosen[(_best_clock(problem, machine, pattern), pattern)] += 1
    known = [(KnownPattern(machine, _layout(problem, machine, pattern)), n) for (machine, pattern), n in chosen.items()]
    totals = {each.workload.id: replicas[at] for at, each in enumerate(problem.services)}
    gpus = (*numbered(sliced, totals), *gpus_of(problem, known, _flows(problem, known)))
    certificate = PlanCertificate(
        request.objective, value_of(problem, gpus), 0.0, "no bound", False, math.fsum(gpu.power_w for gpu in gpus)
    )
    made = ProvisionPlan("one after the other", gpus, quality=quality_of(problem), certificate=certificate)
    return on_hosts_of(request, made)


def _slower(problem: JointProblem, gpu: PlannedGpu, replicas: Counter[int]) -> PlannedGpu:
    """A partitioned GPU at the clock of least watts at which every slice keeps the rate it gets."""
    places: list[tuple[float, int, list[tuple[SliceOption, float]]]] = []
    for machine, held in enumerate(problem.machines):
        if held.gpu_type.name != gpu.type:
            continue
        chosen = [(_alike(problem, machine, each), each.rate_rps) for each in gpu.instances]
        kept = [(one, rate_rps) for one, rate_rps in chosen if one is not None]
        if len(kept) == len(chosen):
            watts = math.fsum(one.request_j * rate_rps for one, rate_rps in kept)
            places.append((float(problem.standing_w[machine]) + watts, machine, kept))
    _, machine, kept = min(places, key=lambda each: each[:2])
    return sliced_gpu(problem, machine, kept, replicas)


def _alike(problem: JointProblem, machine: int, each: PlannedInstance) -> SliceOption | None:
    """The option of least joules of the same service, variant and slice that keeps an instance's rate on a machine."""
    menu = problem.menu(machine)
    found = [
        one
        for one in problem.slices
        if one.machine == machine
        and menu.profiles[one.profile].name == each.slice
        and problem.services[one.service].workload.id == each.workload
        and problem.services[one.service].variants[one.variant].model == each.model
        and one.capacity_rps >= each.rate_rps * (1 - 1e-9)
    ]
    return min(found, key=lambda one: one.request_j, default=None)


def cheapest_of_all(request: JointRequest) -> tuple[ProvisionPlan, ...]:
    """The plan of preset ``best`` for the services, where none has a choice of variants and nothing is locked."""
    if (
        request.alone
        or _has_variants(request)
        or any(each.sliced for each in request.fleet)
        or not request.objective.per_usd > 0
    ):
        return ()
    workloads = [each.answered_by(0) for each in request.services]
    if any(each.margin_ratio > 0 for each in request.services):
        return ()
    plan = provision("best", workloads, [each.gpu_type for each in request.fleet], request.rules)
    return () if plan.violations else (plan,)


def with_power(request: JointRequest, plan: ProvisionPlan) -> ProvisionPlan:
    """A plan of another policy, with its power predicted as for joint plans: clocks at their highest."""
    kinds = {each.gpu_type.name: each for each in request.fleet}
    gpus = []
    for gpu in plan.gpus:
        held = at_clock(kinds[gpu.type].gpu_type.profile, gpu.clock_set_mhz, host_w=kinds[gpu.type].host_w)
        serving = [ServingInstance(e.model, 100 * e.share_ratio, e.batch, e.rate_rps) for e in gpu.instances]
        gpus.append(replace(gpu, power_w=predict_gpu(held, serving).board_w))
    power_w = math.fsum(gpu.power_w for gpu in gpus)
    value = request.objective.value(power_w, plan.usd_per_hour, len(gpus))
    certificate = PlanCertificate(request.objective, value, 0.0, "no bound", False, power_w)
    return replace(plan, gpus=tuple(gpus), certificate=certificate, bound=None)


def _dollars(request: JointRequest) -> PlanObjective:
    of = request.objective
    dollars = objective_of("cost", of.g_per_kwh, of.pue, of.embodied_g_per_hour)
    # Among plans of as many partitioned GPUs the one of least watts: the comparison is not to gain from an idle choice.
    return replace(dollars, per_w=_TIE_USD_PER_W) if any(each.sliced for each in request.fleet) else dollars


def _layout(problem: JointProblem, machine: int, pattern: Pattern) -> PackedGpu:
    layout = problem.packings[machine].fit(pattern)
    assert layout is not None  # only machines on which it fits are chosen
    return layout


def _best_clock(problem: JointProblem, machine: int, pattern: Pattern) -> int:
    """The machine of the same GPU type on which the pattern fits at the least cost."""
    fleet = problem.machines[machine].fleet
    alike = [at for at, each in enumerate(problem.machines) if each.fleet == fleet]
    fitting = [at for at in alike if problem.packings[at].fit(pattern) is not None]

    def watts(at: int) -> float:
        items = [(problem.overhead_w[at, i] + problem.request_j[at, i] * problem.items[i].rate_rps) for i in pattern]
        return float(problem.standing_w[at]) + math.fsum(items)

    return min(fitting, key=watts, default=machine)


def _flows(problem: JointProblem, chosen: Sequence[tuple[KnownPattern, int]]) -> dict[Flow, float]:
    """Every service's requests, spread over its instances in proportion to the rates they are provided for."""
    provided: dict[Flow, float] = defaultdict(float)
    total: dict[int, float] = defaultdict(float)
    for known, count in chosen:
        for index in known.layout.pattern:
            item = problem.items[index]
            provided[Flow(item.service, item.variant, known.machine)] += count * item.rate_rps
            total[item.service] += count * item.rate_rps
    return {
        flow: rate * problem.services[flow.service].workload.rate_rps / total[flow.service]
        for flow, rate in provided.items()
    }
