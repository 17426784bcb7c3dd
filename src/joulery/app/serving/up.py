"""``joulery up`` from a site file to its summary: found, profiled, served, loaded, accounted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.app.serving.facts import tell_clock, tell_machine, tell_profile, tell_service, tell_serving
from joulery.app.serving.gateway_handle import GatewayHandle, front
from joulery.app.serving.governed import govern, join_keepers
from joulery.app.serving.llm_site import mount_llms, settle_llm_meter, start_llms
from joulery.app.serving.loads import Loads, longest_s, scaled, text_key
from joulery.app.serving.planned import follow_site, planned_session, tell_plan
from joulery.app.serving.service import ServiceSetup, choose, service_setup
from joulery.app.wiring.carbon import carbon_source
from joulery.app.wiring.gpu_groups import pods_of
from joulery.app.wiring.gpus import LocalGpus, local_gpus
from joulery.app.wiring.leases import held_leases
from joulery.app.wiring.meters import MeterSpec
from joulery.app.wiring.models import cache_folder
from joulery.app.wiring.site_meters import meter_specs
from joulery.config.carbon import CarbonConfig
from joulery.config.services import ServiceConfig
from joulery.config.site import Mode, Site
from joulery.domain.errors import ConfigError
from joulery.runtime.llm.statistics import LLMUsage
from joulery.runtime.measuring.measure import RUNS
from joulery.runtime.profiling.obtain import Obtained, obtain_profile
from joulery.runtime.runs.recorded import load_run
from joulery.runtime.serving.controller import RequestWindow
from joulery.runtime.serving.finish import Finished, finish
from joulery.runtime.serving.governing import ClockController
from joulery.runtime.serving.intensity import Grid
from joulery.runtime.serving.live_sample import LiveSample
from joulery.runtime.serving.loading import LoadResult
from joulery.runtime.serving.pace import Pace
from joulery.runtime.serving.provisioned import ProvisionedSession
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import Session
from joulery.runtime.serving.site_watch import SiteWatch
from joulery.store.files import write_atomically
from joulery.store.run.directory import RunWriter, create_run, new_run_id
from joulery.ui.reports.html import render_html
from joulery.ui.reports.table import roll_up
from joulery.ui.reports.up_screen import Screen


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for.

    Attributes:
        site: The site.
        duration_s: How long to run; the load's own duration when None.
        stay: Go on serving after the load has ended, until interrupted.
        out: The run directory; a new one in ``runs/`` when None.
        fresh: Profile even where a profile is kept.
        argv: The command line, for the manifest.
        send: Send the loads of the site file.
        file: The site file, watched for changes; None for one that is not.
        plan: Run this plan, of joulery plan --out, instead of the services' own policies.
    """

    site: Site
    duration_s: float | None = None
    stay: bool = False
    out: Path | None = None
    fresh: bool = False
    argv: tuple[str, ...] = ()
    send: bool = True
    file: Path | None = None
    plan: Path | None = None


class Interrupted(Exception):  # noqa: N818 - it ends a run, it is no error
    """Somebody asked for the end before anything was served."""


async def up(options: Options, screen: Screen, stop: asyncio.Event) -> dict[str, Any]:
    """Run a site; returns its report once everything has ended.

    Args:
        options: What was asked for.
        screen: Where to speak.
        stop: Set when somebody asks for the end.

    Raises:
        Interrupted: The end was asked for before anything was served.
        JouleryError: Something is not to be had; nothing is left running.
    """
    site = scaled(options.site, options.duration_s)
    configs, cache = the_services(site), cache_folder()
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(_run(options, site))
        gate = await stack.enter_async_context(front(site, [config.name for config in configs], writer))
        await tell_machine(screen)
        meters, pace = meter_specs(site.meters), Pace.over(longest_s(site))
        grid = Grid(site.carbon, _opened, time.time)
        session: Session
        gpus = await _gpus(site, stack, screen)
        if options.plan is not None:
            session = planned_session(site, options.plan, writer, gate, grid, meters, pace, cache, gpus)
            tell_plan(screen, session)
        else:
            hosted = await _chosen(options, site, meters, pace, cache, screen, stop, gpus)
            cores = tuple(sorted({core for one in hosted for core in one.setup.cores}))
            engine = gate.engine(site, cores, None if gpus is None else gpus.places)
            session = Session(site, hosted, writer, engine, meters=meters, grid=grid, pace=pace)
            if options.file is not None:
                session.follow(SiteWatch(options.file))
        stack.push_async_callback(session.engine.close)
        stack.push_async_callback(session.stop)
        keepers = await govern(session, stack, lambda clock: tell_clock(screen, clock, site.mode))
        await _unless_stopped(session.serve(), stop)
        gate.open_to(session)
        ledger = LLMUsage({model.name: model.owner for model in site.language_models})
        await _language_models(site, gate, ledger, keepers, stack, stop)
        tell_serving(screen, session, gate.server)
        results = await _serve(options, session, gate, screen, stop)
        await gate.server.stop()
        await session.stop()
        client = LoadResult.together(list(results.values()))
        finished = finish(session, load_cpu_s=client.cpu_s, language_models=ledger.figures())
    return _with_page(finished, results, session.hosted, dashboard=f"{gate.server.url}/dashboard")


async def _language_models(
    site: Site,
    gate: GatewayHandle,
    ledger: LLMUsage,
    keepers: Sequence[ClockController],
    stack: AsyncExitStack,
    stop: asyncio.Event,
) -> None:
    """Put the site's language models beside its services; each has its own queue and meter."""
    if not site.language_models:
        return
    text = mount_llms(site, gate.gateway, gate.metrics, stack, gate.workers_log, ledger)
    join_keepers(keepers, text)
    await _unless_stopped(start_llms(text), stop)
    keeping = asyncio.create_task(settle_llm_meter(text), name="text meter")
    stack.callback(keeping.cancel)


async def _chosen(
    options: Options,
    site: Site,
    meters: tuple[MeterSpec, ...] | None,
    pace: Pace,
    cache: Path,
    screen: Screen,
    stop: asyncio.Event,
    gpus: LocalGpus | None,
) -> list[RunningService]:
    """The services, profiled, each with its policy."""
    pods = {} if gpus is None else pods_of(site, gpus)
    setups = [service_setup(site, config, cache, pods.get(config.name)) for config in site.services]
    hosted = []
    for config, setup in zip(site.services, setups, strict=True):
        tell_service(screen, setup)
        load = site.load_of(config)
        folder = None if load is None else load.inputs
        pod = pods.get(config.name)
        obtained = await _unless_stopped(_profile(options, config, setup, folder, meters, cache, screen, pod), stop)
        tell_profile(screen, obtained, setup)
        hosted.append(_hosted(site, config, setup, obtained, pace))
    return hosted


def the_services(site: Site) -> tuple[ServiceConfig, ...]:
    """The services to run.

    Raises:
        ConfigError: There is none.
    """
    if not site.services:
        raise ConfigError(
            "the site has no service to run",
            pointer="services",
            hint="list at least one service, with its models; language models alone are run by joulery serve",
        )
    return site.services


@contextmanager
def _run(options: Options, site: Site) -> Iterator[RunWriter]:
    """The run directory; closed as failed when something raises."""
    folder = options.out or RUNS / new_run_id(time.time())
    zone = getattr(site.carbon, "zone", None)
    owners = {service.owner for service in site.services}
    owner = owners.pop() if len(owners) == 1 else None
    with create_run(folder, kind="up", argv=options.argv, zone=zone, owner=owner) as writer:
        yield writer


async def _profile(
    options: Options,
    config: ServiceConfig,
    setup: ServiceSetup,
    folder: Path | None,
    meters: tuple[MeterSpec, ...] | None,
    cache: Path,
    screen: Screen,
    gpus: LocalGpus | None,
) -> Obtained:
    return await obtain_profile(
        setup,
        given=config.profile,
        cache=cache,
        folder=folder,
        meters=meters,
        fresh=options.fresh,
        progress=screen.progress,
        places=None if gpus is None else gpus.places,
    )


def _hosted(site: Site, config: ServiceConfig, setup: ServiceSetup, obtained: Obtained, pace: Pace) -> RunningService:
    """A service with its policy."""
    chosen = choose(site, config, setup, obtained.profile)
    window = RequestWindow(setup.name, pace.window_s(chosen.rate_rps))
    trials = chosen.trials
    sampling = None if trials is None else LiveSample(setup.name, trials.confidence_ratio, trials.warm_up_s)
    return RunningService(setup, chosen, obtained.profile, window, site.load_of(config), obtained.source, sampling)


def _opened(section: CarbonConfig) -> Any:
    return carbon_source(section, cache_folder())


async def _gpus(site: Site, stack: AsyncExitStack, screen: Screen) -> LocalGpus | None:
    """The GPUs of this machine that the site names, on loan until the stack unwinds; None to run on the CPU.

    Raises:
        ConfigError: It names some and may not act.
    """
    if not site.fleet.devices:
        return None
    if site.mode is not Mode.ACT:
        raise ConfigError(
            f"the services are to run on GPUs, which have to be cut or shared for them, and the mode is {site.mode}",
            pointer="mode",
            got=site.mode.value,
            expected="act",
            hint="mode: act; or leave out fleet.devices to try the services on the CPU",
        )
    holder = await stack.enter_async_context(held_leases(screen.warn))
    found = await asyncio.to_thread(local_gpus, site.fleet.devices, holder)
    stack.callback(found.close)
    return found


async def _serve(
    options: Options, session: Session, gate: GatewayHandle, screen: Screen, stop: asyncio.Event
) -> dict[str, LoadResult]:
    """Serve until the loads have ended (``stay``: until stopped), or somebody asks for the end.

    Returns:
        What the client of each service with a load saw, and of each language model (:func:`text_key`).
    """
    loaded = options.send and longest_s(session.site) is not None
    planned_s = longest_s(session.site) if loaded else options.duration_s
    screen.begin(session.site_label.services, None if options.stay else planned_s)
    session.watch(lambda tick: screen.tick(tick, tick.t_s - session.started_s))
    session.on_decision(screen.decision)
    loads = Loads(session, gate)
    running = asyncio.create_task(_run_session(options, session, loads, gate), name="session")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    results: dict[str, LoadResult] = {}
    try:
        if loaded:
            for one in session.hosted:
                loads.start(one)
            for model in session.site.language_models:
                loads.start_llm(model)
            loading = asyncio.create_task(loads.outcomes(), name="load")
            await asyncio.wait({running, stopping, loading}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loads.end()
            results = await loading
        if not loaded or options.stay:
            patience_s = None if options.stay else options.duration_s
            await asyncio.wait({running, stopping}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
    finally:
        stopping.cancel()
        running.cancel()
        loads.end()
        await asyncio.gather(running, stopping, return_exceptions=True)
    return results


async def _run_session(options: Options, session: Session, loads: Loads, gate: GatewayHandle) -> None:
    """Control and tick; a plan also follows its site file."""
    if options.file is None or not isinstance(session, ProvisionedSession):
        await session.run()
        return
    watch = SiteWatch(options.file)
    following = asyncio.create_task(follow_site(session, loads, watch, gate, cache_folder()), name="follow")
    try:
        await session.run()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _unless_stopped(work: Any, stop: asyncio.Event) -> Any:
    """The result of some work; cancelled, and its cleaning up awaited, when somebody asks for the end.

    Raises:
        Interrupted: The end was asked for first.
    """
    task = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise Interrupted
        return task.result()
    finally:
        stopping.cancel()


def _with_page(
    finished: Finished,
    results: dict[str, LoadResult],
    hosted: Sequence[RunningService],
    *,
    dashboard: str,
) -> dict[str, Any]:
    """The report with what is known only now: the page, where everything is, what the clients saw."""
    page = finished.path / "report.html"
    text = render_html(roll_up([load_run(finished.path, with_course=True)], "component"))
    write_atomically(page, lambda file: file.write(text.encode()))
    profiled = {one.name: one.profiled for one in hosted}
    services = [
        {
            **entry,
            "client": results.get(entry["service"], LoadResult()).as_dict(),
            "profile": profiled[entry["service"]],
        }
        for entry in finished.report["services"]
    ]
    client = LoadResult.together([result for name, result in results.items() if name in profiled])
    models = [
        {**entry, "client": results.get(text_key(entry["model"]), LoadResult()).as_dict()}
        for entry in finished.report["language_models"]
    ]
    return {
        **finished.report,
        "schema": "joulery.up/1",
        "client": client.as_dict(),
        "profile": "; ".join(dict.fromkeys(profiled.values())),
        "services": services,
        "language_models": models,
        "run": str(finished.path),
        "html": str(page),
        "dashboard": dashboard,
    }
