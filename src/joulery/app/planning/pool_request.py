"""What a site file asks of the column optimiser: GPUs that can be cut, services with variants, what is worth what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from joulery.app.planning.request import planned_rate_rps
from joulery.config.plan import GpuConfig
from joulery.config.services import CloverPolicy, ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.mig import MENUS, MigMenu, menu_for
from joulery.perf.catalog.clock_models import clock_model
from joulery.perf.catalog.clover_services import CLOVER_SERVICES
from joulery.perf.queues.pull_costs import ServiceCosts
from joulery.perf.queues.pull_document import from_document
from joulery.policies.placement.pools.problem import Machine, PoolProblem, PoolService, at_clocks, prices
from joulery.policies.serving.objective import Objective
from joulery.sim.core.streams import Streams
from joulery.sim.placement.pool_trial import judge
from joulery.store.files import require_json

_MOST_BASE = 64
"""Whole GPUs that the yardstick may take, at most."""


@dataclass(frozen=True, slots=True)
class PoolBaseline:
    """What a service is compared with: its most accurate variant on whole GPUs, all of them powered.

    Its share of the GPUs there are, or, where that is not said, as few as keep the latency.

    Attributes:
        variant: The variant.
        gpus: How many.
        energy_j: Joules a request, all of them powered.
        idle_w: Idle power of them all.
        latency_s: The latency they show.
    """

    variant: str
    gpus: int
    energy_j: float
    idle_w: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What is to be planned.

    Attributes:
        problem: For the optimiser.
        baselines: For each service.
        g_per_kwh: Carbon intensity planned for, where a service weighs carbon; NaN where none does.
        objectives: Eq. 3 of each service that weighs carbon against accuracy, by name.
    """

    problem: PoolProblem
    baselines: tuple[PoolBaseline, ...]
    g_per_kwh: float
    objectives: Mapping[str, Objective]


def pool_request_of(site: Site, g_per_kwh: float | None = None) -> PoolRequest:
    """Read a site as a request for layouts.

    Args:
        site: The site.
        g_per_kwh: Intensity to plan for; the services' base intensity when None.

    Raises:
        ConfigError: A service or a GPU type says too little.
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
    planned_g = math.nan if not objectives else max(intensities) if g_per_kwh is None else g_per_kwh
    priced = tuple(_priced(service, objectives.get(service.name), planned_g) for service in services)
    problem = PoolProblem(machines, priced, site.plan.colocate)
    return PoolRequest(problem, tuple(baselines), planned_g, objectives)


def _priced(service: PoolService, objective: Objective | None, g_per_kwh: float) -> PoolService:
    """The service with what accuracy is worth to it at an intensity, in joules a request."""
    if objective is None:
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
            f"service {config.name} has several variants and does not say what accuracy is worth",
            pointer=f"services.{index}.policy",
            expected="minimum_accuracy, or policy {kind: clover} with lambda or accuracy_loss",
        )
    slo = config.slo
    return PoolService(config.name, costs, rate_rps, slo.latency_s, best, least, quantile=slo.quantile_ratio)


def _machines(index: int, gpu: GpuConfig, idle_w: float) -> tuple[Machine, ...]:
    menu: MigMenu | None = menu_for(gpu.name)
    if menu is None:
        raise ConfigError(
            f"no way is known to cut a {gpu.name}",
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


def baseline(service: PoolService, machine: Machine, gpus: int | None = None) -> PoolBaseline:
    """The yardstick of a service, found by simulation.

    Args:
        service: Whose.
        machine: The GPU type, whole.
        gpus: How many; None for the fewest that keep the latency, or that come nearest to it.
    """
    best = max(service.costs.variants, key=lambda variant: variant.accuracy_ratio)
    trial = judge((service,), (machine,), Streams(0))
    whole = (0, machine.menu.profiles[0].name, best.name)
    busy = service.rate_rps * (best.host_s + best.gpu_s * machine.time_ratio)
    fewest = max(1, math.ceil(busy))
    found = []
    for count in range(fewest, fewest + _MOST_BASE) if gpus is None else (gpus,):
        shown = trial(0, (whole,) * count, count * machine.idle_w)
        found.append(PoolBaseline(best.name, count, shown.energy_j, count * machine.idle_w, shown.latency_s))
        if shown.latency_s <= service.limit_s or count > 4 * busy + 4:
            break
    kept = [each for each in found if each.latency_s <= service.limit_s]
    return kept[0] if kept else min(found, key=lambda each: each.latency_s)
