"""``joulery up``: profile a site's services, serve them, send load, and account their energy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from joulery.app.doctor import energy, machine_text
from joulery.app.planning.running_engines import check_planned_llms, is_language_plan, planned_engines
from joulery.app.profiling.joining import JoiningTimes, time_joining
from joulery.app.profiling.service_profile import Obtained, busy_cores, obtain_profile
from joulery.app.profiling.upstreams import stated_w
from joulery.app.serving.gateway_handle import AnyGateway, GatewayHandle, Pages, no_routes, open_gateway
from joulery.app.serving.governed.governed_llm import govern, join_keepers
from joulery.app.serving.governed.power_limits import Limited, join_limits, limit_power
from joulery.app.serving.llm import upstream_boards
from joulery.app.serving.llm_site import llm_facts, mount_llms, settle_llm_meter, start_llms
from joulery.app.serving.loads import Loads, longest_s, scaled, text_key
from joulery.app.serving.planned import follow_site, plan_file, planned_control
from joulery.app.serving.ray_nodes.loop import keep_nodes, open_places
from joulery.app.serving.ray_nodes.node_slices import profiled_setup
from joulery.app.serving.service import batch_remarks, choose, service_setup, shared_cores
from joulery.app.serving.site_watch import SiteWatch, TimeJoining
from joulery.app.serving.view import ServeView
from joulery.app.wiring.carbon import live_carbon_source
from joulery.app.wiring.gpus import LocalGpus, gpu_groups, local_gpus
from joulery.app.wiring.leases import held_leases
from joulery.app.wiring.models import cache_folder
from joulery.app.wiring.site_meters import meter_specs
from joulery.config.carbon import CarbonConfig
from joulery.config.services import ServiceConfig, no_models
from joulery.config.serving import RayEngine
from joulery.config.site import Mode, Site
from joulery.domain.energy.channel import MeterSpec
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef
from joulery.domain.serving.timeline import Tick
from joulery.runtime.load import LoadResult
from joulery.runtime.measuring.measure import RUNS
from joulery.runtime.measuring.sampling import start_sampler
from joulery.runtime.results.finish import Finished, client_figures, finish
from joulery.runtime.serving.controller import PolicyControl
from joulery.runtime.serving.governing import ClockController
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.runtime.serving.live_sample import LiveSample
from joulery.runtime.serving.plans.planned import PlanControl
from joulery.runtime.serving.running_service import RunningService, ServiceSetup
from joulery.runtime.serving.session import Control, Pace, ServingSession
from joulery.runtime.session.history import SessionHistory
from joulery.runtime.session.requests import RequestWindow
from joulery.steady_time import unix_s
from joulery.store.run.directory import SAMPLES, RunWriter, create_run, new_run_id

SCHEMA = "joulery.up/1"
METERS_SHOWN = 3
"""Number of checks of ``joulery doctor`` shown at the start: only meters, since the run starts the sampler anyway."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run.

    Attributes:
        site: The site.
        duration_s: How long to run; the load's own duration when None.
        stay: Whether to continue serving after the load has ended, until interrupted.
        out: The run folder; a new one in ``runs/`` when None.
        fresh: Whether to profile even where a profile is kept.
        argv: The command line, for the manifest.
        send: Whether to send the loads of the site file.
        file: The site file to watch for changes; None to watch none.
        plan: Plan file (of joulery plan --out) to run instead of the services' own policies. With preset joint in the
            site a plan is made where this is None.
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
    """The run was interrupted before anything was served."""


async def up(options: Options, view: ServeView, stop: asyncio.Event, pages: Pages = no_routes) -> dict[str, Any]:
    """Run a site; returns its report once everything has ended.

    Args:
        options: Options of the run.
        view: Shows the run as it goes.
        stop: Set to end the run early.
        pages: Makes the dashboard's routes.

    Raises:
        Interrupted: The run was ended before anything was served.
        JouleryError: A required resource is not available; nothing is left running.
    """
    site = scaled(options.site, options.duration_s)
    configs = the_services(site)
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(_run_folder(options, site))
        gate = await stack.enter_async_context(open_gateway(site, [config.name for config in configs], writer, pages))
        view.machine(machine_text(), await asyncio.to_thread(lambda: list(islice(energy(), METERS_SHOWN))))
        profiling = await stack.enter_async_context(AsyncExitStack())
        gpus = await _gpus(site, stack, stack if isinstance(gate, GatewayHandle) else profiling, view, gate)
        start = _Start(options, site, view, stop, gate, SessionHistory(writer), gpus)
        session = await start.session()
        await profiling.aclose()  # from here on the engine server leases what its replicas run on
        stack.push_async_callback(session.engine.close)
        stack.push_async_callback(session.stop)
        keepers = await govern(session, stack, view)
        limits = await limit_power(session, stack, view, keepers)
        places = await _unless_stopped(open_places(session, stack), stop)
        await _unless_stopped(session.serve(), stop)
        await gate.open_to(session)
        await keep_nodes(session, start.carbon_source, places, stack)
        await _language_models(session, gate, keepers, limits, view, stack, stop)
        if start.language_plan is not None:
            await check_planned_llms(site, start.language_plan, view.fact, warns(session, view))
        view.serving(session, gate.server.url, gate.server.beside_address)
        results = await _serve(options, session, gate, view, stop)
        await gate.server.stop()
        if session.nodes is not None:
            await session.nodes.look()
        await session.stop()
        cpu_s = LoadResult.together(list(results.values())).cpu_s
        finished = finish(
            session,
            loads=results,
            labels=gate.labels,
            load_cpu_s=cpu_s,
            more=gate.report() | ({} if session.nodes is None else session.nodes.report()),
        )
    return _report(finished, results, session.services, dashboard=f"{gate.server.url}/dashboard")


@dataclass(frozen=True, slots=True)
class _Start:
    """Creates a session from the options, the site and the opened resources."""

    options: Options
    site: Site
    view: ServeView
    stop: asyncio.Event
    gate: AnyGateway
    history: SessionHistory
    gpus: LocalGpus | None
    cache: Path = field(default_factory=cache_folder)

    @property
    def language_plan(self) -> Path | None:
        """The given plan if it is one of language models, whose engines are compared with it; else None."""
        return self.options.plan if is_language_plan(self.options.plan) else None

    async def session(self) -> ServingSession:
        """Create the session of a plan, or of the services' own policies; it runs nothing yet."""
        site, options, writer = self.site, self.options, self.history.writer
        meters, pace = meter_specs(site.meters), Pace.over(longest_s(site))
        grid = LiveIntensity(site.carbon, self.carbon_source, unix_s)
        control: Control
        given = options.plan
        if self.language_plan is not None:
            planned_engines(site, self.language_plan)  # what does not fit is said before anything is measured
            given = None
        plan = await _unless_stopped(plan_file(site, given, writer.path), self.stop)
        if plan is not None:
            services, engine, control = planned_control(site, plan, self.history, self.gate, self.cache, self.gpus)
            self.view.plan(control.plan)
        else:
            services, engine = await self._services(meters, pace)
            control = PolicyControl(services, engine, self.history, grid, site.mode, pace.step_s)
        session = ServingSession(
            site,
            services,
            self.history,
            engine,
            control,
            start_sampler=lambda: start_sampler(
                writer.path / SAMPLES, meters, site.meters.period_s, self.gate.pids, upstream_boards(site)
            ),
            grid=grid,
            pace=pace,
        )
        if options.file is not None and plan is None:
            steers = hasattr(engine, "set_mix")
            watch = SiteWatch(options.file, self.cache, engine.replicas, self._timing(engine), steers)
            session.follow(lambda: watch.revisions(session.services))
        return session

    async def _services(
        self, meters: tuple[MeterSpec, ...] | None, pace: Pace
    ) -> tuple[dict[str, RunningService], Engine]:
        """Profile the services, choose their policies, and create the engine for them."""
        groups = {} if self.gpus is None else gpu_groups(self.site, self.gpus)
        setups = [service_setup(self.site, one, self.cache, groups.get(one.name)) for one in self.site.services]
        services = {}
        for config, setup in zip(self.site.services, setups, strict=True):
            self.view.service(setup)
            profiling = self._profile(config, setup, meters, groups.get(config.name))
            obtained = await _unless_stopped(profiling, self.stop)
            self.view.profile(obtained, setup)
            if busy := busy_cores(obtained.profile):
                self.history.warn(f"{setup.name}: other processes kept {busy:.1f} cores busy while it was profiled")
            if any(stated_w(model) is not None for model in setup.models.values()):
                self.history.warn(
                    f"{setup.name}: the power of its upstreams is stated, not metered; "
                    "the energy of this machine contains theirs only where they run on it"
                )
            services[setup.name] = one = self._running(config, setup, obtained, pace)
            for remark in (
                () if one.chosen is None else batch_remarks(setup, obtained.profile, one.chosen.predictor.profile)
            ):
                self.view.warn(remark)
                self.history.warn(remark)
        for shared in shared_cores({name: one.setup.cores for name, one in services.items()}):
            self.view.warn(shared)
            self.history.warn(shared)
        cores = tuple(sorted({core for one in services.values() for core in one.setup.cores}))
        return services, self.gate.engine(self.site, cores, None if self.gpus is None else self.gpus.places)

    async def _profile(
        self, config: ServiceConfig, setup: ServiceSetup, meters: tuple[MeterSpec, ...] | None, gpus: LocalGpus | None
    ) -> Obtained:
        load = self.site.load_of(config)
        return await obtain_profile(
            setup if config.profile is not None else profiled_setup(self.site, setup),
            given=config.profile,
            cache=self.cache,
            folder=None if load is None else load.inputs,
            meters=meters,
            fresh=self.options.fresh,
            progress=self.view.progress,
            places=None if gpus is None else gpus.places,
        )

    def _running(self, config: ServiceConfig, setup: ServiceSetup, obtained: Obtained, pace: Pace) -> RunningService:
        """Create a service with its policy."""
        chosen = choose(self.site, config, setup, obtained.profile)
        window = RequestWindow(setup.name, pace.window_s(chosen.rate_rps))
        trials = chosen.trials
        sampling = None if trials is None else LiveSample(setup.name, trials.confidence_ratio, trials.warm_up_s)
        load = self.site.load_of(config)
        return RunningService(setup, chosen, chosen.predictor.profile, window, load, obtained.source, sampling)

    def _timing(self, engine: Engine) -> TimeJoining | None:
        """Function that times a variant before it joins; None on GPUs and clusters, where none is loaded on trial."""
        if self.gpus is not None or isinstance(self.site.serving.engine, RayEngine):
            return None

        async def timed(one: RunningService, config: ServiceConfig, name: str, model: ModelRef) -> JoiningTimes | None:
            views = (view for view in engine.replicas() if view.spec.service == one.name)
            declared, load = next((view.inputs for view in views if view.inputs), ()), self.site.load_of(config)
            folder = None if load is None else load.inputs
            stderr = self.gate.workers_log
            return await time_joining(one.setup, name, model, declared=declared, folder=folder, stderr=stderr)

        return timed

    def carbon_source(self, section: CarbonConfig) -> Any:
        """Open the source of a carbon section."""
        return live_carbon_source(section, self.cache)


def warns(session: ServingSession, view: ServeView) -> Callable[[str], None]:
    """Function that shows and keeps a warning, for use before the session shows its own."""

    def warn(text: str) -> None:
        view.warn(text)
        session.warn(text)

    return warn


async def _language_models(
    session: ServingSession,
    gate: AnyGateway,
    keepers: Sequence[ClockController],
    limits: Sequence[Limited],
    view: ServeView,
    stack: AsyncExitStack,
    stop: asyncio.Event,
) -> None:
    """Serve the site's language models, with or without services, with meters of their own."""
    site = session.site
    if not site.language_models:
        return
    text, models, routes = mount_llms(site, gate.bodies, gate.metrics, stack, gate.workers_log)
    gate.serve_text(routes)
    for name, fact in (
        *llm_facts(text),
        *join_keepers(keepers, text, alone=not site.services),
        *join_limits(limits, text),
    ):
        view.fact(name, fact)
    await _unless_stopped(start_llms(text), stop)
    session.host(models)
    for family in text.families:
        session.steer(family)
    keeping = asyncio.create_task(settle_llm_meter(text), name="text meter")
    stack.callback(keeping.cancel)


def the_services(site: Site) -> tuple[ServiceConfig, ...]:
    """The services to run; none where the site has language models alone.

    Raises:
        ConfigError: There is neither a service nor a language model, or a service names no models to run.
    """
    if not site.services and not site.language_models:
        raise ConfigError(
            "the site has no service to run",
            pointer="services",
            hint="list at least one service, with its models, or a language model below language_models",
        )
    for index, config in enumerate(site.services):
        if config.family_config is None:
            raise no_models(config, f"services.{index}")
    return site.services


@contextmanager
def _run_folder(options: Options, site: Site) -> Iterator[RunWriter]:
    """Create the run folder; closed as failed if an exception is raised."""
    folder = options.out or RUNS / new_run_id(time.time())
    zone = getattr(site.carbon, "zone", None)
    owners = {one.owner for one in site.services} | {one.owner for one in site.language_models}
    owner = owners.pop() if len(owners) == 1 else None
    with create_run(folder, kind="up", argv=options.argv, zone=zone, owner=owner) as writer:
        yield writer


async def _gpus(
    site: Site, stack: AsyncExitStack, leased: AsyncExitStack, view: ServeView, gate: AnyGateway
) -> LocalGpus | None:
    """Open the GPUs of this machine that the site names; None to run on the CPU.

    Args:
        site: The site.
        stack: Keeps the GPUs open until it unwinds.
        leased: Keeps their settings leased until it unwinds.
        view: Shows lost leases.
        gate: The gateway; replicas of its engine server may run on them.

    Raises:
        ConfigError: The site names GPUs, and its mode is not act.
    """
    if not site.fleet.devices:
        return None
    if site.mode is not Mode.ACT:
        raise ConfigError(
            f"services on GPUs need the GPUs partitioned or shared, and the mode is {site.mode}",
            pointer="mode",
            got=site.mode.value,
            expected="act",
            hint="mode: act; or leave out fleet.devices to try the services on the CPU",
        )
    holder = await leased.enter_async_context(held_leases(view.warn))
    found = await asyncio.to_thread(local_gpus, site.fleet.devices, holder, in_use=gate.gpus_in_use)
    stack.callback(found.close)
    return found


async def _serve(
    options: Options, session: ServingSession, gate: AnyGateway, view: ServeView, stop: asyncio.Event
) -> dict[str, LoadResult]:
    """Serve until the loads have ended (``stay``: until stopped).

    Returns:
        The client's result of each load, by service, or by :func:`text_key` for a language model.
    """
    loaded = options.send and longest_s(session.site) is not None
    planned_s = longest_s(session.site) if loaded else options.duration_s
    view.begin(session.site_label.services, None if options.stay else planned_s)

    def show(tick: Tick) -> None:
        view.relabel(session.site_label.services)
        view.tick(tick, tick.t_s - session.started_s)

    session.watch(show)
    session.on_decision(view.decision)
    session.on_warning(view.warn)
    loads = Loads(session, gate)
    running = asyncio.create_task(_run_session(options, session, loads, gate), name="session")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    results: dict[str, LoadResult] = {}
    try:
        if loaded:
            for one in session.services.values():
                loads.start(one)
            for model in session.site.language_models:
                loads.start_llm(model.name, model.load, model.deadline_s)
            for family in session.site.language_families:
                loads.start_llm(
                    family.name, family.load, max(model.deadline_s for model in session.site.language_models)
                )
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


async def _run_session(options: Options, session: ServingSession, loads: Loads, gate: AnyGateway) -> None:
    """Run the session; a plan also follows changes of its site file."""
    control = session.control
    if options.file is None or not isinstance(control, PlanControl):
        await session.run()
        return
    watch = SiteWatch(options.file)
    following = asyncio.create_task(follow_site(session, control, loads, watch, gate, cache_folder()), name="follow")
    try:
        await session.run()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _unless_stopped(work: Any, stop: asyncio.Event) -> Any:
    """Await some work and return its result; cancel it, and await its clean-up, if ``stop`` is set first.

    Raises:
        Interrupted: ``stop`` was set first.
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


def _report(
    finished: Finished,
    results: Mapping[str, LoadResult],
    services: Mapping[str, RunningService],
    *,
    dashboard: str,
) -> dict[str, Any]:
    """The report with the clients' measurements, the run folder and the dashboard's address."""
    profiled = {name: one.profiled for name, one in services.items()}
    entries = [{**entry, "profile": profiled[entry["service"]]} for entry in finished.report["services"]]
    models = [
        {**entry, **client_figures(results.get(text_key(entry["model"])))}
        for entry in finished.report["language_models"]
    ]
    families = [
        {**entry, **client_figures(results.get(text_key(entry["family"])))}
        for entry in finished.report["language_families"]
    ]
    alone = {} if entries else client_figures(LoadResult.together(list(results.values())))
    return {
        **finished.report,
        **alone,
        "schema": SCHEMA,
        "profile": "; ".join(dict.fromkeys(profiled.values())),
        "services": entries,
        "language_models": models,
        "language_families": families,
        "run": str(finished.path),
        "dashboard": dashboard,
    }
