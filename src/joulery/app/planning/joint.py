"""Preset joint: plan a site over all settings at once, and check the plan by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from joulery.app.planning.measurements import sliced_gpu_of, undivided_profile
from joulery.app.planning.prices import priced_with_spot
from joulery.app.planning.shares import board_memory, error_margin, gpu_type_of, rules_of, workload_of
from joulery.config.plan import GpuConfig
from joulery.config.services import ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.optimum import PlanObjective, objective_of
from joulery.domain.gpu.plan_moves import PlanMoves
from joulery.domain.gpu.provisioning import ProvisionPlan, Workload
from joulery.perf import catalog
from joulery.perf.instances import clocks_mhz
from joulery.perf.interference.model import InterferenceProfile
from joulery.perf.slice_table import SlicedGpu
from joulery.policies.placement.joint.compare import cheapest_of_all, comparisons, locked, with_power
from joulery.policies.placement.joint.following.warm import replan
from joulery.policies.placement.joint.looser_slos import LooserSlo, looser_slos
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointFleet, JointRequest, JointService, Variant, check_model
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.options import Balancer
from joulery.policies.placement.provisioning.planner import POLICIES, provision
from joulery.sim.placement.plan_judge import PlanVerdict, judge_layouts, judge_plan

KNOBS = "knobs"
"""Name under ``--compare`` of the baselines: dedicated GPUs, single knobs, and one planner after the other."""
_CUTS = 3
"""Number of times that a plan is remade with larger margins while it misses an SLO in simulation."""
_LEAST_CUT = 0.02
"""Smallest increase of a margin."""


@dataclass(frozen=True, slots=True)
class JointSitePlan:
    """A joint plan and what it is compared with.

    Attributes:
        plan: The plan.
        others: Plans to compare with.
        margin_ratio: Safety margin on latencies and demands.
        verdict: Result of simulating the plan; None where the site disables simulation.
        moves: Changes of the running plan; None without one.
        looser_slos: Savings from longer SLOs; empty where they were not requested.
    """

    plan: ProvisionPlan
    others: tuple[ProvisionPlan, ...]
    margin_ratio: float
    verdict: PlanVerdict | None
    moves: PlanMoves | None = None
    looser_slos: tuple[LooserSlo, ...] = ()


def plan_joint_site(
    site: Site,
    objective: str | None = None,
    g_per_kwh: float | None = None,
    lock: Sequence[str] = (),
    compare: Sequence[str] = (),
    *,
    running: ProvisionPlan | None = None,
    max_moves: int | None = None,
    slo_prices: bool = False,
) -> JointSitePlan:
    """Plan a site with preset joint.

    Args:
        site: The site.
        objective: ``energy``, ``carbon`` or ``cost``; the site's when None.
        g_per_kwh: Carbon intensity; the site's when None.
        lock: Knobs to leave alone.
        compare: ``knobs``, or policies of shares.
        running: The running joint plan, which the new plan follows.
        max_moves: Number of instances that the new plan may start, stop or change; None for any number.
        slo_prices: Whether to compute the savings from longer SLOs, by further plans.

    Raises:
        ConfigError: The site lacks a setting that the plan needs, or an option does not apply.
        InfeasibleError: No plan is within the SLOs, the GPUs there are and the power cap.
    """
    request = locked(joint_request(site, objective, g_per_kwh), lock)
    others = _others(request, compare)
    truths = _truths(site) if site.plan.judge else None
    if running is not None and slo_prices:
        raise ConfigError(
            "a plan that follows a running one has no bound, so no price of its SLOs",
            pointer="--slo-prices",
            hint="leave out --running",
        )
    if running is not None:
        followed = replan(request, running, max_moves)
        workloads = [each.workload for each in request.services]
        dealt = request.rules.balancer
        seen = None if truths is None else judge_plan(followed.plan.gpus, workloads, truths, balancer=dealt)
        beside = (*others, followed.plan) if others else ()
        return JointSitePlan(followed.plan, beside, request.rules.margin_ratio, seen, followed.moves)
    plan, request, verdict = _judged(request, truths, others)
    shown = (*others, plan) if others else ()
    looser = looser_slos(request, plan) if slo_prices else ()
    return JointSitePlan(plan, shown, request.rules.margin_ratio, verdict, looser_slos=looser)


def joint_request(site: Site, objective: str | None = None, g_per_kwh: float | None = None) -> JointRequest:
    """Convert a site to a request for a joint plan.

    Raises:
        ConfigError: A service or a GPU type lacks a setting that the plan needs.
        DataError: A profile file cannot be used.
    """
    site, spot = priced_with_spot(site)
    if not site.services or not site.fleet.gpus:
        missing = "services" if not site.services else "fleet.gpus"
        raise ConfigError("there is nothing to plan", pointer=missing, expected="at least one service and GPU type")
    plan = site.plan
    services = tuple(_service(site, index, each) for index, each in enumerate(site.services))
    types = [replace(_gpu_type(index, gpu), spot=gpu.name in spot) for index, gpu in enumerate(site.fleet.gpus)]
    workloads = [each.answered_by(at) for each in services for at in range(len(each.variants))]
    margin = error_margin(workloads, types) if plan.margin_ratio is None else plan.margin_ratio
    fleet = tuple(
        JointFleet(kind, clocks_mhz(kind.profile, gpu.clocks), gpu.host_w, sliced_gpu_of(index, gpu))
        for index, (kind, gpu) in enumerate(zip(types, site.fleet.gpus, strict=True))
    )
    _check_models(site, services, fleet)
    rules = rules_of(site, types, margin)
    power_cap_w, carbon_cap = _caps(site, g_per_kwh)
    wanted = _objective(site, objective, g_per_kwh)
    return JointRequest(services, fleet, rules, wanted, power_cap_w, carbon_cap_g_per_hour=carbon_cap)


def _check_models(site: Site, services: Sequence[JointService], fleet: Sequence[JointFleet]) -> None:
    """Check that some GPU type has a profile of each model.

    Raises:
        ConfigError: No GPU type has one; the error names the key.
    """
    for index, (config, service) in enumerate(zip(site.services, services, strict=True)):
        for at, variant in enumerate(service.variants):
            try:
                check_model(variant.model, fleet)
            except ConfigError as error:
                own = f"variants.{at}.model" if config.variants else "family" if config.model is None else "model"
                error.pointer = f"services.{index}.{own}"
                raise


def _caps(site: Site, g_per_kwh: float | None) -> tuple[float | None, float | None]:
    """The power cap in watts, and the carbon cap in grams per hour that it derives from, where that one binds first.

    Raises:
        ConfigError: Grams are capped, and no intensity is known.
    """
    plan = site.plan
    cap, g_per_kwh = plan.carbon_cap_g_per_hour, plan.g_per_kwh if g_per_kwh is None else g_per_kwh
    if cap is None:
        return plan.power_cap_w, None
    if g_per_kwh is None:
        raise ConfigError(
            "a cap of grams needs a carbon intensity; none is assumed",
            pointer="plan.carbon_cap",
            hint="add plan.intensity, give --intensity 300 g/kWh, or cap watts: power_cap",
        )
    if g_per_kwh == 0:
        return plan.power_cap_w, None
    watts = 1000.0 * cap / (plan.pue * g_per_kwh)
    if plan.power_cap_w is not None and plan.power_cap_w <= watts:
        return plan.power_cap_w, None
    return watts, cap


def _gpu_type(index: int, gpu: GpuConfig) -> GpuType:
    """The GPU type, with coefficients of shares unless only slices of it were measured."""
    if gpu.measurements is None or gpu.profile is not None or gpu.profile_file is not None:
        return gpu_type_of(index, gpu)
    profile = undivided_profile(index, gpu)
    memory = board_memory(gpu, profile)
    return GpuType(gpu.name, profile, gpu.price_usd_per_hour, gpu.available, memory, gpu.per_host)


def _service(site: Site, index: int, config: ServiceConfig) -> JointService:
    if config.variants:
        known = [Variant(each.model, each.accuracy_ratio, each.memory_bytes) for each in config.variants]
        workload = workload_of(site, index, config.model_copy(update={"model": known[0].model}))
    elif config.family_config is not None and config.model is None:
        stated = config.memory_bytes
        known = [Variant(v.name, v.accuracy_ratio, stated or v.memory_bytes or None) for v in config.family.variants]
        workload = workload_of(site, index, config.model_copy(update={"model": known[0].model}))
    else:
        workload = workload_of(site, index, config)
        known = [Variant(workload.model)]
        if config.minimum_accuracy_ratio > 0:
            raise ConfigError(
                f"service {config.name} has an accuracy floor, but its model states no accuracy",
                pointer=f"services.{index}.minimum_accuracy",
                hint="list it under variants: [{model: NAME, accuracy: 76.1 %}], or leave the floor out",
            )
    return JointService(workload, tuple(known), config.minimum_accuracy_ratio)


def _objective(site: Site, name: str | None, g_per_kwh: float | None) -> PlanObjective:
    plan = site.plan
    g_per_kwh = plan.g_per_kwh if g_per_kwh is None else g_per_kwh
    pointer, name = ("plan.objective", plan.objective) if name is None else ("--objective", name)
    if name != "weights":
        try:
            return objective_of(name, g_per_kwh, plan.pue)
        except ConfigError as error:
            error.pointer = pointer
            raise
    weights = plan.weights
    if weights is None:
        raise ConfigError(
            "objective weights needs to know what energy, carbon and rent are worth",
            pointer="plan.weights",
            expected="such as weights: {cost: 1, energy: 0.2, carbon: 0.1}",
            hint="add plan.weights to the site",
        )
    known = {"energy": weights.energy, "carbon": weights.carbon, "cost": weights.cost}
    return objective_of(known, g_per_kwh, plan.pue)


def _others(request: JointRequest, names: Sequence[str]) -> tuple[ProvisionPlan, ...]:
    found: list[ProvisionPlan] = []
    for name in dict.fromkeys(each for each in names if each and each != "joint"):
        if name == KNOBS:
            found += comparisons(request)
            continue
        if name not in POLICIES:
            raise ConfigError(
                "no such policy to compare with", got=name, expected=", ".join((KNOBS, *POLICIES)), pointer="--compare"
            )
        if any(len(each.variants) > 1 for each in request.services):
            raise ConfigError(
                f"policy {name} plans one model a service",
                pointer="--compare",
                hint=f"compare with {KNOBS}, or list one variant a service",
            )
        workloads = [each.answered_by(0) for each in request.services]
        made = provision(name, workloads, [each.gpu_type for each in request.fleet], request.rules)
        found.append(with_power(request, made))
    return tuple(found)


def _judged(
    request: JointRequest, truths: Mapping[str, InterferenceProfile] | None, others: Sequence[ProvisionPlan]
) -> tuple[ProvisionPlan, JointRequest, PlanVerdict | None]:
    """Make the plan, again while services miss their SLO in simulation; return it with its request and verdict."""
    plan = plan_joint(request, others=[*others, *cheapest_of_all(request)])
    if truths is None:
        return plan, request, None
    workloads = [each.workload for each in request.services]
    sliced = {each.gpu_type.name: each.sliced for each in request.fleet if each.sliced is not None}
    verdict = _verdict(plan, workloads, truths, sliced, request.rules.balancer)
    for _ in range(_CUTS):
        if not verdict.violated:
            break
        stricter = _stricter(request, plan, verdict)
        try:
            again = plan_joint(replace(request, services=stricter))
        except InfeasibleError:
            break
        plan, request = again, replace(request, services=stricter)
        verdict = _verdict(plan, workloads, truths, sliced, request.rules.balancer)
    return plan, request, verdict


def _verdict(
    plan: ProvisionPlan,
    workloads: Sequence[Workload],
    truths: Mapping[str, InterferenceProfile],
    sliced: Mapping[str, SlicedGpu],
    balancer: Balancer,
) -> PlanVerdict:
    """Simulated verdict on a plan; equal GPUs are simulated once where services were planned as one kind."""
    if plan.certificate is not None and plan.certificate.alike and not any(gpu.sliced for gpu in plan.gpus):
        return judge_layouts(plan.gpus, workloads, truths, balancer=balancer)
    return judge_plan(plan.gpus, workloads, truths, sliced=sliced, balancer=balancer)


def _stricter(request: JointRequest, plan: ProvisionPlan, verdict: PlanVerdict) -> tuple[JointService, ...]:
    """The services, with a larger margin for those that missed their SLO; services of one kind keep equal margins."""
    groups = plan.certificate.alike if plan.certificate is not None else ()
    of = {name: names for names in groups for name in names}
    found = []
    for each in request.services:
        names = of.get(each.workload.id, (each.workload.id,))
        missed = max(verdict.tail_ratio[name] for name in names)
        found.append(each if missed <= 1 else replace(each, margin_ratio=_margin_ratio(each, missed)))
    return tuple(found)


def _margin_ratio(service: JointService, tail_ratio: float) -> float:
    """New margin of a service that missed its SLO: larger in proportion to the miss."""
    missed = min(tail_ratio, 2.0) - 1.0
    return (1 + service.margin_ratio) * (1 + max(missed, _LEAST_CUT)) - 1


def _truths(site: Site) -> dict[str, InterferenceProfile]:
    """True behaviour of each GPU type in the simulation.

    Raises:
        ConfigError: The catalog has no such profile, or a GPU type has none.
    """
    found = {}
    for index, gpu in enumerate(priced_with_spot(site)[0].fleet.gpus):
        found[gpu.name] = _gpu_type(index, gpu).profile if gpu.truth is None else catalog.profile(gpu.truth)
    return found
