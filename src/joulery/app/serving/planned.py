"""``joulery up --plan``: run a provisioning plan on this machine, and follow changes of the site file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from joulery.app.planning.prices import SPOT_SUFFIX
from joulery.app.serving.gateway_handle import AnyGateway
from joulery.app.serving.loads import Loads
from joulery.app.serving.service import fleet_cores
from joulery.app.serving.site_watch import SiteWatch
from joulery.app.wiring.gpus import LocalGpus
from joulery.app.wiring.model_refs import model_ref
from joulery.config.services import ServiceConfig
from joulery.config.serving import EmbeddedEngine
from joulery.config.site import Site
from joulery.domain.errors import CapabilityError, ConfigError, InfeasibleError, JouleryError
from joulery.domain.gpu.device import MigSetting
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef
from joulery.runtime.serving.plans.plan_in_force import MIG, MPS, PlanInForce, cores_for, devices_for
from joulery.runtime.serving.plans.planned import WATCH_S, WINDOW_S, PlanControl
from joulery.runtime.serving.running_service import RunningService, ServiceSetup
from joulery.runtime.serving.session import ServingSession
from joulery.runtime.session.history import SessionHistory
from joulery.runtime.session.requests import RequestWindow
from joulery.steady_time import unix_s
from joulery.store.files import write_named
from joulery.store.plans import read_plan

if TYPE_CHECKING:
    from joulery.app.serving.joint_follower import JointFollower

_JOINT_PRESET = "joint"
_ENOUGH = 50
"""Requests that a quantile of a service should rest on."""


async def plan_file(site: Site, given: Path | None, folder: Path) -> Path | None:
    """The plan to run: the file given, else a plan of preset joint made now and kept in the run folder; else None.

    Raises:
        ConfigError, DataError: The site lacks a setting that preset joint needs.
        InfeasibleError: No plan is within the SLOs.
    """
    if given is not None or site.plan.preset != _JOINT_PRESET or not site.services:
        return given
    from joulery.app.planning.plans import plan_site

    made = await asyncio.to_thread(plan_site, site)
    if made.violates:
        raise InfeasibleError(
            "no plan kept every SLO in simulation",
            binding="SLOs in simulation",
            nearest={"gpus": len(made.document()["gpus"])},
            hint="see joulery plan SITE; raise plan.margin, or relax an SLO",
        )
    file = folder / "plan.json"
    write_named(file, json.dumps(made.document(), indent=1) + "\n")
    return file


def planned_control(
    site: Site,
    file: Path,
    history: SessionHistory,
    gate: AnyGateway,
    cache: Path,
    here: LocalGpus | None,
) -> tuple[dict[str, RunningService], Engine, PlanControl]:
    """Create the services, engine and control of the plan in a file; the engine runs no replicas yet.

    Args:
        here: GPUs of this machine that its processes share; None to use CPU cores in place of GPUs.

    Raises:
        ConfigError: The plan and the site disagree about services or models, or the GPUs may not be shared.
        CapabilityError: The plan needs more cores than there are.
        DataError: The file is not a plan.
    """
    if not isinstance(site.serving.engine, EmbeddedEngine):
        raise ConfigError(
            "a plan's shares, batches and standbys need the embedded engine",
            pointer="serving.engine",
            got=site.serving.engine.kind,
            expected="embedded",
        )
    gpus = read_plan(file).gpus()
    cores, size = fleet_cores(site), _sizes(site)
    models = models_of(site, gpus, cache)
    shared, partitioned = ((), frozenset[str]()) if here is None else _divided(site, here)
    services = {config.name: _running(site, config, gpus, cache, shared) for config in site.services}
    slos = {name: one.setup.slo for name, one in services.items()}
    if here is None:
        _require_no_slices(gpus)
        engine: Engine = gate.engine(site, cores)
        usable, plan = cores, PlanInForce.of(gpus, cores_for(gpus, cores, size), models, slos)
    else:
        engine, size, usable = gate.engine(site, cores, here.places), {}, ()
        plan = PlanInForce.of(gpus, devices_for(gpus, shared, partitioned), models, slos, shared, partitioned)
        _check_partitions(plan, here)
    control = PlanControl(services, engine, history, site.mode, plan=plan, size=size, all_cores=usable)
    made = read_plan(file).plan()
    control.joint = made if isinstance(made, ProvisionPlan) and made.certificate is not None else None
    return services, engine, control


def _divided(site: Site, here: LocalGpus) -> tuple[tuple[str, ...], frozenset[str]]:
    """The GPUs that a plan may run on, and those of them that are in MIG mode.

    Raises:
        ConfigError: A GPU is in another mode.
    """
    for index, device in enumerate(site.fleet.devices):
        if device.mode not in (MPS, MIG):
            raise ConfigError(
                "a plan gives shares of GPUs, which takes MPS, or slices of them, which takes MIG",
                pointer=f"fleet.devices.{index}.mode",
                got=device.mode,
                expected="mps or mig",
            )
    return here.names, frozenset(here.places.mig_devices)


def _require_no_slices(gpus: Sequence[PlannedGpu]) -> None:
    """Raise if a plan has MIG slices, for which there is no GPU."""
    count = sum(gpu.sliced for gpu in gpus)
    if count:
        raise CapabilityError(
            f"the plan has {count} GPUs partitioned into MIG slices, and CPU cores cannot stand in for those",
            resource="MIG",
            hint="name this machine's GPUs: fleet: {devices: [{gpu: 0, mode: mig}]}, or plan without measurements",
        )


def _check_partitions(plan: PlanInForce, here: LocalGpus) -> None:
    """Raise if one of this machine's GPUs cannot have the MIG partition of its GPU in the plan."""
    for gpu, (at,) in zip(plan.gpus, plan.cores, strict=True):
        device = plan.shared[at]
        if device in plan.partitioned:
            here.places.mig_devices[device].price(MigSetting(tuple(each.slice for each in gpu.instances)))


async def follow_site(
    session: ServingSession, control: PlanControl, loads: Loads, watch: SiteWatch, gate: AnyGateway, cache: Path
) -> None:
    """Whenever the site file changes, plan with few migrations and change to that plan. Runs until cancelled.

    A plan that fails is a warning of the session; the old plan then stays in force.

    A joint plan is also made again when rates, batches' times or the carbon intensity are not as planned.

    Args:
        session: The running services.
        control: The plan in force and its replicas.
        loads: The load generators, one a service.
        watch: Reports changes of the site file.
        gate: The gateway, whose metrics are extended to new services.
        cache: Folder of kept profiles.
    """
    from joulery.app.serving.joint_follower import JointFollower

    joint = JointFollower.of(session, control)
    while True:
        await asyncio.sleep(WATCH_S)
        site, remark = watch.changed()
        if site is None and remark:
            session.warn(remark)
        cause = "services" if site is not None or joint is None else joint.look(unix_s())
        if not cause or (site is None and joint is None):
            continue
        try:
            known = session.site if joint is None else joint.site
            await _change_plan(session, control, loads, site or known, gate, cache, joint, cause)
        except JouleryError as error:
            session.warn(f"the old plan stays in force: {error}")


async def _change_plan(
    session: ServingSession,
    control: PlanControl,
    loads: Loads,
    site: Site,
    gate: AnyGateway,
    cache: Path,
    joint: JointFollower | None,
    cause: str,
) -> None:
    running = control.plan
    gpus = await asyncio.to_thread(lambda: _next(site, running) if joint is None else joint.next(site, cause))
    if gpus is None:
        assert joint is not None  # a plan of shares always follows
        joint.stay(unix_s())
        return
    before = {one.watched.workload for one in running.replicas}
    added = [
        _running(site, config, gpus, cache, running.shared)
        for config in site.services
        if config.name not in session.services
    ]
    gate.metrics.add([one.name for one in added])
    slos = {config.name: config.slo.as_slo() for config in site.services}
    why = "" if joint is None else joint.why
    await control.go_over(gpus, added, models_of(site, gpus, cache), slos, cause, why)
    if joint is not None:
        joint.taken_over()
    session.relabel()
    for name in before - slos.keys():
        loads.end(name)
    for one in session.services.values():
        if one.name in slos and one.name not in before:
            loads.start(one)


def _next(site: Site, running: PlanInForce) -> Sequence[PlannedGpu]:
    """Make a plan of shares that follows the running one with few migrations."""
    from joulery.app.planning.shares import share_request
    from joulery.policies.placement.provisioning.planner import followed

    request = share_request(site)
    return followed(running.running, request.workloads, request.types, request.rules).gpus


def _sizes(site: Site) -> dict[str, int]:
    return {name: gpu.cpu_cores for gpu in site.fleet.gpus for name in (gpu.name, gpu.name + SPOT_SUFFIX)}


def models_of(site: Site, gpus: Sequence[PlannedGpu], cache: Path) -> dict[tuple[str, str], ModelRef]:
    """Models loaded for a plan, by service and variant.

    Raises:
        ConfigError: The plan and the site name different services, or variants.
    """
    pairs = dict.fromkeys((each.workload, each.model) for gpu in gpus for each in gpu.instances)
    planned = {name for name, _ in pairs}
    configs = {config.name: config for config in site.services}
    if unknown := sorted(planned - configs.keys()):
        raise ConfigError(
            f"the plan serves {', '.join(unknown)}, which the site file does not name", pointer="services"
        )
    if missing := sorted(configs.keys() - planned):
        raise ConfigError(
            f"the plan does not serve {', '.join(missing)}",
            pointer="services",
            hint="plan again: joulery plan SITE --out plan.json",
        )
    several = {name for name in planned if sum(owner == name for owner, _ in pairs) > 1}
    return {(name, model): _model(configs[name], model, cache, strictly=name in several) for name, model in pairs}


def _model(config: ServiceConfig, name: str, cache: Path, *, strictly: bool = False) -> ModelRef:
    """The variant that a plan refers to: the one of this name, or the only one.

    Raises:
        ConfigError: No variant has that name, and there are several, of the service or of the plan.
    """
    variants = {variant.name: variant for variant in config.family.variants}
    only = next(iter(variants.values())) if len(variants) == 1 and not strictly else None
    chosen = variants.get(name) or only
    if chosen is None:
        raise ConfigError(
            f"service {config.name} has no variant called as the plan's model",
            pointer="services",
            got=name,
            expected=", ".join(variants),
        )
    return model_ref(chosen.model, cache)


def _running(
    site: Site, config: ServiceConfig, gpus: Sequence[PlannedGpu], cache: Path, shared: tuple[str, ...]
) -> RunningService:
    """Create a service of the plan; ``shared`` are the GPUs of this machine that the plan's processes share."""
    mine = [each for gpu in gpus for each in gpu.instances if each.workload == config.name]
    rate_rps = sum(each.rate_rps for each in mine)
    setup = ServiceSetup(
        name=config.name,
        owner=config.owner,
        family=config.family.as_family(config.name),
        models={each.model: _model(config, each.model, cache) for each in mine},
        slo=config.slo.as_slo(),
        cores=(),
        partitions=(),
        candidates=(),
        gpus=shared,
    )
    window = RequestWindow(config.name, max(WINDOW_S, _ENOUGH / rate_rps if rate_rps else WINDOW_S))
    load = site.load_of(config)
    return RunningService(
        setup,
        None,
        None,
        window,
        load,
        "a plan's, of interference",
        planned_rps=rate_rps,
        planned_floor_ratio=config.minimum_accuracy_ratio,
    )
