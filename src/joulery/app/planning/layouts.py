"""Presets columns and clover: plan the variants that run on the MIG slices of a site's GPUs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from joulery.app.planning.shares import planned_rate_rps
from joulery.config.plan import GpuConfig
from joulery.config.services import CloverPolicy, ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.layout_plan import (
    LayoutBaseline,
    LayoutBound,
    LayoutInstance,
    LayoutPlan,
    LayoutService,
    PlannedLayout,
    PoolOfSize,
)
from joulery.domain.gpu.mig import MENUS, MigMenu, menu_for
from joulery.perf.catalog.clock_models import clock_model
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.perf.queues.pull_costs import ServiceCosts
from joulery.perf.queues.pull_document import from_document
from joulery.policies.placement.pools.pool import Pool, Used, cost_w, idle_shares_w
from joulery.policies.placement.pools.problem import Machine, PoolProblem, PoolService, at_clocks, edges_of, prices
from joulery.policies.placement.pools.search import Judge, PoolEffort, PoolPlan, infeasible, plan_pool
from joulery.policies.serving.objective import Objective
from joulery.policies.serving.search.annealing import TrialMetrics, annealing_search
from joulery.policies.serving.search.layout_space import LayoutSpace
from joulery.sim.core.streams import Streams
from joulery.sim.placement.pool_trial import judge
from joulery.store.files import require_json

_MAX_BASELINE_GPUS = 64
"""Largest number of whole GPUs of a baseline."""


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """Input of a layout plan.

    Attributes:
        problem: Input of the optimiser.
        baselines: Baseline of each service.
        g_per_kwh: Carbon intensity planned for, where a service weighs carbon; None where none does.
        usd_per_hour: Price of each GPU type.
        objectives: Objective (Eq. 3) of each service that weighs carbon against accuracy, by name.
    """

    problem: PoolProblem
    baselines: tuple[LayoutBaseline, ...]
    g_per_kwh: float | None
    usd_per_hour: Mapping[str, float]
    objectives: Mapping[str, Objective]


def layout_request(site: Site, g_per_kwh: float | None = None) -> LayoutRequest:
    """Convert a site to a request for layouts.

    Args:
        site: The site.
        g_per_kwh: Intensity to plan for; the services' base intensity when None.

    Raises:
        ConfigError: A service or a GPU type lacks a setting that the plan needs.
        DataError: A file of costs cannot be used.
    """
    if not site.services or not site.fleet.gpus:
        raise ConfigError(
            "a pool needs services and GPU types",
            pointer="services" if not site.services else "fleet.gpus",
            hint="such as fleet: {gpus: [{name: A100-40GB, price: 4.10 USD/h}]}",
        )
    costs = [_costs(index, service) for index, service in enumerate(site.services)]
    machines = tuple(
        machine for index, gpu in enumerate(site.fleet.gpus) for machine in _machines(index, gpu, costs[0].idle_w)
    )
    there = machines[0].available
    share = None if there is None else max(1, there // len(costs))
    services, baselines, intensities = [], [], []
    objectives: dict[str, Objective] = {}
    for index, (config, cost) in enumerate(zip(site.services, costs, strict=True)):
        service = _service(index, config, cost)
        base = baseline(service, machines[0], share)
        baselines.append(base)
        policy = config.policy
        if isinstance(policy, CloverPolicy) and policy.accuracy_loss_ratio is None:
            intensities.append(policy.base_g_per_kwh)
            objectives[config.name] = Objective(
                policy.lambda_ratio, service.base_accuracy_ratio, base.energy_j, policy.base_g_per_kwh
            )
        services.append(service)
    planned_g = None if not objectives else max(intensities) if g_per_kwh is None else g_per_kwh
    priced = tuple(_priced(service, objectives.get(service.name), planned_g) for service in services)
    problem = PoolProblem(machines, priced, site.plan.colocate)
    prices_usd = {gpu.name: gpu.price_usd_per_hour for gpu in site.fleet.gpus}
    return LayoutRequest(problem, tuple(baselines), planned_g, prices_usd, objectives)


def _priced(service: PoolService, objective: Objective | None, g_per_kwh: float | None) -> PoolService:
    """The service with its price of accuracy at an intensity, in joules per request."""
    if objective is None or g_per_kwh is None:
        return service
    weight, worth = prices(objective, g_per_kwh)
    return replace(service, accuracy_price_j=worth / weight)


def _costs(index: int, service: ServiceConfig) -> ServiceCosts:
    known: Mapping[str, ServiceCosts] = CLOVER_SERVICES
    if service.profile is not None:
        known = from_document(require_json(Path(service.profile)), file=str(service.profile))
    name = service.model or service.name
    if name not in known:
        raise ConfigError(
            f"no costs of requests are known for service {service.name}",
            pointer=f"services.{index}.model",
            got=name,
            expected=", ".join(known),
            hint="name a service of the profile, or write a profile with joulery profile --fit DIR -o FILE",
        )
    return known[name]


def _service(index: int, config: ServiceConfig, costs: ServiceCosts) -> PoolService:
    rate_rps = planned_rate_rps(index, config)
    best = max(variant.accuracy_ratio for variant in costs.variants)
    policy, least = config.policy, config.minimum_accuracy_ratio
    if isinstance(policy, CloverPolicy) and policy.accuracy_loss_ratio is not None:
        least = max(least, best * (1.0 - policy.accuracy_loss_ratio))
    elif least <= 0 and not isinstance(policy, CloverPolicy):
        raise ConfigError(
            f"service {config.name} has several variants and does not state the value of accuracy",
            pointer=f"services.{index}.policy",
            expected="minimum_accuracy, or policy {kind: clover} with lambda or accuracy_loss",
        )
    slo = config.slo
    return PoolService(config.name, costs, rate_rps, slo.latency_s, best, least, quantile=slo.quantile_ratio)


def _machines(index: int, gpu: GpuConfig, idle_w: float) -> tuple[Machine, ...]:
    menu: MigMenu | None = menu_for(gpu.name)
    if menu is None:
        raise ConfigError(
            f"no MIG partitions are known for a {gpu.name}",
            pointer=f"fleet.gpus.{index}.name",
            got=gpu.name,
            expected=", ".join(known.gpu for known in MENUS),
        )
    machine = Machine(
        gpu=gpu.name,
        menu=menu,
        idle_w=idle_w if gpu.idle_w is None else gpu.idle_w,
        available=gpu.available,
        time_ratio=1.0 / gpu.speed_ratio,
    )
    return at_clocks(machine, clock_model(menu.gpu.partition("-")[0]), gpu.clocks) if gpu.clocks > 1 else (machine,)


def baseline(service: PoolService, machine: Machine, gpus: int | None = None) -> LayoutBaseline:
    """The baseline of a service, found by simulation: its most accurate variant on whole GPUs.

    Args:
        service: The service.
        machine: The GPU type, whole.
        gpus: Number of GPUs; None for the fewest within the SLO, or the nearest to it.
    """
    best = max(service.costs.variants, key=lambda variant: variant.accuracy_ratio)
    trial = judge((service,), (machine,), Streams(0))
    whole = (0, machine.menu.profiles[0].name, best.name)
    busy = service.rate_rps * (best.host_s + best.gpu_s * machine.time_ratio)
    fewest = max(1, math.ceil(busy))
    found = []
    for count in range(fewest, fewest + _MAX_BASELINE_GPUS) if gpus is None else (gpus,):
        shown = trial(0, (whole,) * count, count * machine.idle_w)
        found.append(LayoutBaseline(best.name, count, shown.energy_j, shown.latency_s))
        if shown.latency_s <= service.limit_s or count > 4 * busy + 4:
            break
    kept = [each for each in found if each.latency_s <= service.limit_s]
    return kept[0] if kept else min(found, key=lambda each: each.latency_s)


def plan_layouts(preset: str, request: LayoutRequest) -> LayoutPlan:
    """Plan with preset ``columns`` or ``clover``; candidates are judged by event simulation.

    Raises:
        InfeasibleError: No layouts keep the latency and accuracy limits.
        ConfigError: The preset is clover, and the site does not state the number of GPUs.
    """
    problem = request.problem
    trial = judge(problem.services, problem.machines, Streams(0))
    found = plan_pool(problem, trial) if preset == "columns" else _annealed(problem, trial)
    return _as_plan(preset, request, found)


def _annealed(problem: PoolProblem, trial: Judge) -> PoolPlan:
    """Search as in the Clover paper: one GPU's configuration, used on every GPU of the service's share."""
    machine = problem.machines[0]
    if machine.available is None:
        raise ConfigError(
            "preset clover fills every GPU there is", pointer="fleet.gpus.0.available", expected="how many there are"
        )
    gpus = max(1, machine.available // len(problem.services))
    partitions: dict[tuple[int, int, int], int] = {}
    used: list[Used] = []
    trials = 0
    for number, service in enumerate(problem.services):
        edges = edges_of(service, (machine,))
        names = tuple(
            sorted((v.name for v in service.costs.variants), key=lambda name: service.costs[name].accuracy_ratio)
        )
        fits = set(zip(edges.variant, edges.profile, strict=True))
        disabled = {(name, profile.name) for name in names for profile in machine.menu.profiles} - fits
        layouts = LayoutSpace.of(machine.menu, names, disabled, gpus)
        space = layouts.graph

        def score(metrics: TrialMetrics, one: PoolService = service) -> float:
            lost = max(one.base_accuracy_ratio - metrics.accuracy_ratio, 0.0)
            return -(problem.energy_weight * metrics.energy_j + one.accuracy_price_j * lost)

        start = space.index(space.vector([(names[-1], machine.menu.profiles[0].name)]))
        search = annealing_search(
            layouts,
            start,
            {},
            score,
            service.limit_s,
            Streams(0)("search", service.name),
            least_accuracy_ratio=service.minimum_accuracy_ratio,
        )
        while (row := search.ask()) is not None:
            instances = [(0, profile, variant) for variant, profile in space.instances(space.graphs[row])]
            search.tell(row, trial(number, tuple(instances * gpus), gpus * machine.idle_w))
        trials += len(search.trials)
        if search.settled is None:
            raise infeasible(problem, PoolEffort())
        chosen = space.graphs[search.settled]
        used.append(tuple((0, profile, variant) for variant, profile in space.instances(chosen)) * gpus)
        slices = tuple(np.reshape(chosen, (len(names), -1)).sum(axis=0).tolist())
        at = next(at for at, multiset in enumerate(machine.menu.multisets) if machine.menu.counts(multiset) == slices)
        partitions[number, 0, at] = gpus
    idle = idle_shares_w(problem, partitions, used)
    metrics = tuple(trial(at, mine, idle[at]) for at, mine in enumerate(used))
    pool = Pool(partitions, tuple(used), metrics, cost_w(problem, metrics), judged=True)
    return PoolPlan(pool, 0.0, 0.0, {pool.gpus: pool}, 0, trials)


def _as_plan(preset: str, request: LayoutRequest, found: PoolPlan) -> LayoutPlan:
    problem, pool = request.problem, found.pool
    idle_w = idle_shares_w(problem, pool.partitions, pool.used)
    bound = LayoutBound(found.bound_w, found.gap_ratio, found.corrected_bound_w, found.corrected_gap_ratio)
    return LayoutPlan(
        policy=preset,
        layouts=_layouts(request, pool),
        services=tuple(_planned_service(request, pool, number, idle_w[number]) for number in range(len(pool.used))),
        gpus_off=max(0, sum(base.gpus for base in request.baselines) - pool.gpus),
        cost_w=pool.cost_w,
        idle_w=math.fsum(idle_w),
        g_per_kwh=request.g_per_kwh,
        bound=bound if found.bound_w > 0 else None,
        boxes=found.boxes,
        trials=found.trials,
        by_gpus=tuple(
            PoolOfSize(
                gpus,
                one.cost_w,
                tuple(metrics.accuracy_ratio for metrics in one.metrics),
                tuple(metrics.latency_s for metrics in one.metrics),
            )
            for gpus, one in found.by_gpus.items()
        ),
    )


def _layouts(request: LayoutRequest, pool: Pool) -> tuple[PlannedLayout, ...]:
    """Layouts of the GPUs in use, with the number of equal ones."""
    problem = request.problem
    waiting: dict[tuple[int, int, str], list[tuple[str, str]]] = {}
    for number, service in enumerate(problem.services):
        group = 0 if problem.colocate else number
        for machine, profile, variant in pool.used[number]:
            waiting.setdefault((group, machine, profile), []).append((service.name, variant))
    found: Counter[tuple[int, tuple[LayoutInstance, ...]]] = Counter()
    for (group, machine, partition), count in sorted(pool.partitions.items()):
        for _ in range(count):
            slices = problem.machines[machine].menu.multisets[partition]
            placed = tuple(LayoutInstance(each, *waiting[group, machine, each].pop(0)) for each in slices)
            found[machine, placed] += 1
    return tuple(
        PlannedLayout(
            problem.machines[machine].gpu,
            problem.machines[machine].clock_mhz,
            count,
            placed,
            request.usd_per_hour.get(problem.machines[machine].gpu, 0.0),
        )
        for (machine, placed), count in found.items()
    )


def _planned_service(request: LayoutRequest, pool: Pool, number: int, idle_w: float) -> LayoutService:
    """Planned allocation of a service; ``idle_w`` is the idle power of its GPUs in the plan."""
    service, base, shown = request.problem.services[number], request.baselines[number], pool.metrics[number]
    base_idle_w = base.gpus * request.problem.machines[0].idle_w
    same_gpus_j = shown.energy_j + max(base_idle_w - idle_w, 0.0) / service.rate_rps
    lost = service.base_accuracy_ratio - shown.accuracy_ratio
    objective = request.objectives.get(service.name)
    return LayoutService(
        service=service.name,
        rate_rps=service.rate_rps,
        accuracy_ratio=shown.accuracy_ratio,
        minimum_accuracy_ratio=service.minimum_accuracy_ratio,
        loss_points=100.0 * lost,
        loss_ratio=lost / service.base_accuracy_ratio,
        latency_s=shown.latency_s,
        limit_s=service.limit_s,
        energy_j=shown.energy_j,
        saving_ratio=1.0 - shown.energy_j / base.energy_j,
        saving_same_gpus_ratio=1.0 - same_gpus_j / base.energy_j,
        objective=None
        if objective is None or request.g_per_kwh is None
        else objective.score(shown.accuracy_ratio, shown.energy_j, request.g_per_kwh),
        baseline=base,
    )
