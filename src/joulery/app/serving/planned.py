"""``joulery up --plan``: a provisioning plan on this machine, followed as the site file changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from joulery.app.planning.plans import JOINT_PRESET, plan_site
from joulery.app.planning.prices import SPOT_SUFFIX
from joulery.app.planning.shares import share_request
from joulery.app.serving.gateway_handle import GatewayHandle
from joulery.app.serving.joint_follower import JointFollower
from joulery.app.serving.loads import Loads
from joulery.app.serving.service import fleet_cores
from joulery.app.serving.site_watch import SiteWatch
from joulery.app.wiring.gpus import LocalGpus
from joulery.app.wiring.model_refs import model_ref
from joulery.config.services import ServiceConfig
from joulery.config.serving import EmbeddedEngine
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, InfeasibleError, JouleryError
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef
from joulery.policies.placement.provisioning.planner import followed
from joulery.runtime.serving.history import SessionHistory
from joulery.runtime.serving.planned import WATCH_S, WINDOW_S, PlanControl, PlanInForce, cores_for
from joulery.runtime.serving.requests import RequestWindow
from joulery.runtime.serving.running_service import RunningService, ServiceSetup
from joulery.runtime.serving.session import ServingSession
from joulery.steady_time import unix_s
from joulery.store.files import write_named
from joulery.store.plans import read_plan

_ENOUGH = 50
"""Requests that a quantile of a service should rest on."""


async def plan_file(site: Site, given: Path | None, folder: Path) -> Path | None:
    """The plan to run: the file given, else a plan of preset joint made now and kept in the run folder; else None.

    Raises:
        ConfigError, DataError: The site says too little for preset joint.
        InfeasibleError: No plan is within the SLOs.
    """
    if given is not None or site.plan.preset != JOINT_PRESET or not site.services:
        return given
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
    gate: GatewayHandle,
    cache: Path,
    here: LocalGpus | None,
) -> tuple[dict[str, RunningService], Engine, PlanControl]:
    """The services, engine and control of the plan in a file; the engine runs nothing yet.

    Args:
        here: GPUs of this machine that its processes share; None to have CPU cores stand for them.

    Raises:
        ConfigError: The plan and the site disagree about services or models, or the GPUs may not be shared.
        CapabilityError: The plan needs more cores than there are.
        DataError: The file is no plan.
    """
    if not isinstance(site.serving.engine, EmbeddedEngine):
        raise ConfigError(
            "a plan's shares, batches and standbys need the embedded engine",
            pointer="serving.engine",
            got=site.serving.engine.kind,
            expected="embedded",
        )
    gpus = read_plan(file).shares()
    cores, size = fleet_cores(site), _sizes(site)
    models = models_of(site, gpus, cache)
    shared = () if here is None else _shared(site, here)
    services = {config.name: _running(site, config, gpus, cache, shared) for config in site.services}
    slos = {name: one.setup.slo for name, one in services.items()}
    if here is None:
        engine: Engine = gate.engine(site, cores)
        usable, plan = cores, PlanInForce.of(gpus, cores_for(gpus, cores, size), models, slos)
    else:
        engine, size, usable = gate.engine(site, cores, here.places), {}, tuple(range(len(here.names)))
        plan = PlanInForce.of(gpus, cores_for(gpus, usable, {}, noun="GPUs"), models, slos, shared)
    control = PlanControl(services, engine, history, site.mode, plan=plan, size=size, all_cores=usable)
    made = read_plan(file).plan()
    control.joint = made if isinstance(made, ProvisionPlan) and made.certificate is not None else None
    return services, engine, control


def _shared(site: Site, here: LocalGpus) -> tuple[str, ...]:
    """The GPUs that processes share.

    Raises:
        ConfigError: One is used in another way.
    """
    for index, device in enumerate(site.fleet.devices):
        if device.mode != "mps":
            raise ConfigError(
                "a plan gives shares of GPUs, which takes MPS",
                pointer=f"fleet.devices.{index}.mode",
                got=device.mode,
                expected="mps",
            )
    return here.names


async def follow_site(
    session: ServingSession, control: PlanControl, loads: Loads, watch: SiteWatch, gate: GatewayHandle, cache: Path
) -> None:
    """Whenever the site file changes, plan with few migrations and change to that plan. Runs until cancelled.

    A plan that fails is a warning of the session; the old plan then stays in force.

    A joint plan is also made again when its services' rates or their batches' times are not as planned.

    Args:
        session: The running services.
        control: The plan in force and its replicas.
        loads: The load generators, one a service.
        watch: Reports changes of the site file.
        gate: The gateway, which learns of new services.
        cache: Folder of kept profiles.
    """
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
            await _go_over(session, control, loads, site or session.site, gate, cache, joint, cause)
        except JouleryError as error:
            session.warn(f"the old plan runs on: {error}")


async def _go_over(
    session: ServingSession,
    control: PlanControl,
    loads: Loads,
    site: Site,
    gate: GatewayHandle,
    cache: Path,
    joint: JointFollower | None,
    cause: str,
) -> None:
    running = control.plan
    gpus = await asyncio.to_thread(lambda: _next(site, running) if joint is None else joint.next(site, cause))
    before = {one.watched.workload for one in running.replicas}
    added = [
        _running(site, config, gpus, cache, running.shared)
        for config in site.services
        if config.name not in session.services
    ]
    gate.metrics.add([one.name for one in added])
    slos = {config.name: config.slo.as_slo() for config in site.services}
    await control.go_over(gpus, added, models_of(site, gpus, cache), slos, cause)
    if joint is not None:
        joint.taken_over()
    session.relabel()
    for name in before - slos.keys():
        loads.end(name)
    for one in session.services.values():
        if one.name in slos and one.name not in before:
            loads.start(one)


def _next(site: Site, running: PlanInForce) -> Sequence[PlannedGpu]:
    """A plan of shares that follows the running one with few migrations."""
    request = share_request(site)
    return followed(running.running, request.workloads, request.types, request.rules).gpus


def _sizes(site: Site) -> dict[str, int]:
    return {name: gpu.cpu_cores for gpu in site.fleet.gpus for name in (gpu.name, gpu.name + SPOT_SUFFIX)}


def models_of(site: Site, gpus: Sequence[PlannedGpu], cache: Path) -> dict[str, ModelRef]:
    """The model of each service of a plan.

    Raises:
        ConfigError: The plan and the site name different services.
    """
    planned: dict[str, str] = {}
    for each in (one for gpu in gpus for one in gpu.instances):
        if planned.setdefault(each.workload, each.model) != each.model:
            raise ConfigError(
                f"the plan serves {each.workload} with several variants, whose shares of the requests are not kept yet",
                pointer="services",
                got=f"{planned[each.workload]}, {each.model}",
                expected="one variant a service",
                hint="plan again with --lock variant",
            )
    configs = {config.name: config for config in site.services}
    if unknown := sorted(planned.keys() - configs.keys()):
        raise ConfigError(
            f"the plan serves {', '.join(unknown)}, which the site file does not name", pointer="services"
        )
    if missing := sorted(configs.keys() - planned.keys()):
        raise ConfigError(
            f"the plan does not serve {', '.join(missing)}",
            pointer="services",
            hint="plan again: joulery plan SITE --out plan.json",
        )
    return {name: _model(configs[name], model, cache) for name, model in planned.items()}


def _model(config: ServiceConfig, name: str, cache: Path) -> ModelRef:
    """The variant that a plan means: the one of its name, or the only one.

    Raises:
        ConfigError: No variant has that name, and there are several.
    """
    variants = {variant.name: variant for variant in config.family.variants}
    chosen = variants.get(name) or (next(iter(variants.values())) if len(variants) == 1 else None)
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
    """A service as the plan runs it; ``shared``: GPUs of this machine that the plan's processes share."""
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
    return RunningService(setup, None, None, window, load, "a plan's, of interference", planned_rps=rate_rps)
