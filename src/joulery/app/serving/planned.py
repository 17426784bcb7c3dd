"""``joulery up --plan``: a provisioning plan on this machine, followed as the site file changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from joulery.app.planning.shares import share_request
from joulery.app.serving.gateway_handle import GatewayHandle
from joulery.app.serving.loads import Loads
from joulery.app.serving.service import ServiceSetup, fleet_cores, model_ref
from joulery.app.wiring.gpus import LocalGpus
from joulery.app.wiring.meters import MeterSpec
from joulery.config.services import ServiceConfig
from joulery.config.serving import EmbeddedEngine
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, JouleryError
from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef
from joulery.policies.placement.provisioning.planner import followed
from joulery.runtime.serving.controller import RequestWindow
from joulery.runtime.serving.intensity import Grid
from joulery.runtime.serving.pace import Pace
from joulery.runtime.serving.provisioned import WATCH_S, WINDOW_S, PlanInForce, ProvisionedSession
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.site_watch import SiteWatch
from joulery.runtime.serving.slice_assignment import cores_for
from joulery.store.plans import read_plan
from joulery.store.run.directory import RunWriter
from joulery.ui.reports.up_screen import Screen

_ENOUGH = 50
"""Requests that a quantile of a service should rest on."""


def planned_session(
    site: Site,
    file: Path,
    writer: RunWriter,
    gate: GatewayHandle,
    grid: Grid,
    meters: tuple[MeterSpec, ...] | None,
    pace: Pace,
    cache: Path,
    here: LocalGpus | None,
) -> ProvisionedSession:
    """The session of the plan in a file; its engine runs nothing yet.

    Args:
        here: GPUs of this machine that its processes share; None to have CPU cores stand for them.

    Raises:
        ConfigError: The plan and the site speak of other services or models, or the GPUs are not there to be shared.
        CapabilityError: The plan needs more cores than there are.
        DataError: The file is no plan.
    """
    if not isinstance(site.serving.engine, EmbeddedEngine):
        raise ConfigError(
            "a plan's shares, batches and shadows need the embedded engine",
            pointer="serving.engine",
            got=site.serving.engine.kind,
            expected="embedded",
        )
    gpus = read_plan(file).shares()
    cores, size = fleet_cores(site), _sizes(site)
    models = models_of(site, gpus, cache)
    shared = () if here is None else _shared(site, here)
    hosted = [_hosted(site, config, gpus, cache, shared) for config in site.services]
    slos = {one.name: one.setup.slo for one in hosted}
    if here is None:
        engine: Engine = gate.engine(site, cores)
        stand, plan = cores, PlanInForce.of(gpus, cores_for(gpus, cores, size), models, slos)
    else:
        engine, size, stand = gate.engine(site, cores, here.places), {}, tuple(range(len(here.names)))
        plan = PlanInForce.of(gpus, cores_for(gpus, stand, {}, noun="GPUs"), models, slos, shared)
    return ProvisionedSession(
        site, hosted, writer, engine, meters=meters, grid=grid, pace=pace, plan=plan, size=size, all_cores=stand
    )


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


def tell_plan(screen: Screen, session: ProvisionedSession) -> None:
    """What stands for what, and what waits beside it."""
    for gpu, cores in zip(session.plan.gpus, session.plan.cores, strict=True):
        seats = ", ".join(f"{each.workload} {100 * each.share_ratio:g} % batch {each.batch}" for each in gpu.instances)
        shared = session.plan.shared
        stand = f"on {shared[cores[0]]}" if shared else f"played by CPU core {', '.join(map(str, cores))}"
        screen.fact("plan", f"{gpu.type} {stand}: {seats}")
    shadows = [seat.watched for seat in session.plan.seats if seat.shadow is not None]
    words = ", ".join(f"{one.key} {one.shadow_percent:g} %" for one in shadows)
    screen.fact("shadows", words or "none: the plan leaves nothing for them")


async def follow_site(
    session: ProvisionedSession, loads: Loads, watch: SiteWatch, gate: GatewayHandle, cache: Path
) -> None:
    """Whenever the site file was changed: plan with few moves, go over to that plan. Until cancelled."""
    while True:
        await asyncio.sleep(WATCH_S)
        site, remark = watch.changed()
        if site is None:
            if remark:
                session.warn(remark)
            continue
        try:
            await _follow(session, loads, site, gate, cache)
        except JouleryError as error:
            session.warn(f"the old plan runs on: {error}")


async def _follow(session: ProvisionedSession, loads: Loads, site: Site, gate: GatewayHandle, cache: Path) -> None:
    request = share_request(site)
    gpus = await asyncio.to_thread(
        lambda: followed(session.plan.running, request.workloads, request.types, request.rules).gpus
    )
    known, ran = session.names, {seat.watched.workload for seat in session.plan.seats}
    shared = session.plan.shared
    came = [_hosted(site, config, gpus, cache, shared) for config in site.services if config.name not in known]
    gate.metrics.add([one.name for one in came])
    slos = {config.name: config.slo.as_slo() for config in site.services}
    await session.go_over(gpus, came, models_of(site, gpus, cache), slos)
    for name in ran - slos.keys():
        loads.end(name)
    for one in session.hosted:
        if one.name in slos and one.name not in ran:
            loads.start(one)


def _sizes(site: Site) -> dict[str, int]:
    return {gpu.name: gpu.cpu_cores for gpu in site.fleet.gpus}


def models_of(site: Site, gpus: Sequence[PlannedGpu], cache: Path) -> dict[str, ModelRef]:
    """What each service of a plan loads.

    Raises:
        ConfigError: The plan serves what the site does not, or the other way round.
    """
    planned = {each.workload: each.model for gpu in gpus for each in gpu.instances}
    configs = {config.name: config for config in site.services}
    if strangers := sorted(planned.keys() - configs.keys()):
        raise ConfigError(
            f"the plan serves {', '.join(strangers)}, which the site file does not name", pointer="services"
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
        ConfigError: There is no telling which.
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


def _hosted(
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
