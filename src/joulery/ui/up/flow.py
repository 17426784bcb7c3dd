"""``joulery up`` from a site file to its summary: found, profiled, served, loaded, accounted."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from joulery.config.carbon import CarbonConfig
from joulery.config.loadgen import LoadConfig
from joulery.config.services import ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Engine
from joulery.domain.timeline import DecisionRecord, NowSnapshot
from joulery.runtime.bench import Obtained, age_words, obtain_profile
from joulery.runtime.compose.carbon import carbon_source
from joulery.runtime.compose.doctor import Status, energy, machine_in_words
from joulery.runtime.compose.engine import local_engine
from joulery.runtime.compose.meters import MeterSpec
from joulery.runtime.compose.models import cache_folder
from joulery.runtime.compose.service import ServiceSetup, choose, service_setup
from joulery.runtime.compose.site_meters import meter_specs
from joulery.runtime.drive import APPLIED
from joulery.runtime.finish import Finished, finish
from joulery.runtime.grid import Grid
from joulery.runtime.loading import Load, LoadResult, start_load
from joulery.runtime.measure import RUNS
from joulery.runtime.recorded import load_run
from joulery.runtime.session import Pace, Session
from joulery.store.files import disk_errors, write_atomically
from joulery.store.run import SAMPLES, RunWriter, create_run, new_run_id
from joulery.ui.dashboard.routes import dashboard_routes
from joulery.ui.format import duration, percent, si
from joulery.ui.gateway.access import read_token
from joulery.ui.gateway.admin import admin_app
from joulery.ui.gateway.app import Gateway
from joulery.ui.gateway.server import GatewayServer, ServerLimits
from joulery.ui.metrics import Metrics
from joulery.ui.reports.html import render_html
from joulery.ui.reports.table import roll_up
from joulery.ui.up.screen import Screen


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
    """

    site: Site
    duration_s: float | None = None
    stay: bool = False
    out: Path | None = None
    fresh: bool = False
    argv: tuple[str, ...] = ()


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
    config = the_service(site)
    cache = cache_folder()
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(_run(options, site))
        front = await stack.enter_async_context(_front(site, config, writer))
        await _tell_machine(screen)
        setup = service_setup(site, config, cache)
        _tell_service(screen, setup)
        meters = meter_specs(site.meters)
        obtained = await _unless_stopped(_profile(options, config, setup, meters, cache, screen), stop)
        _tell_profile(screen, obtained, setup)
        engine = front.engine(site, setup.cores)
        stack.push_async_callback(engine.close)
        session = await _session(site, config, setup, obtained, writer, engine, meters)
        stack.push_async_callback(session.stop)
        await _unless_stopped(session.serve(), stop)
        front.open_to(session)
        _tell_serving(screen, session, front.server)
        result = await _serve(options, session, front, screen, stop)
        await front.server.stop()
        await session.stop()
        finished = finish(session, load_cpu_s=result.cpu_s)
    return _with_page(finished, result, obtained, dashboard=f"{front.server.url}/dashboard")


def the_service(site: Site) -> ServiceConfig:
    """The service to run.

    Raises:
        ConfigError: There is none, or more than one.
    """
    if len(site.services) != 1:
        raise ConfigError(
            f"up serves one service, the site has {len(site.services)}",
            pointer="services",
            hint="leave one service in the site file, or give each a site file of its own",
        )
    return site.services[0]


def scaled(site: Site, duration_s: float | None) -> Site:
    """The site over another duration: the load lasts so long, and what the grid replays is fitted into it."""
    load = site.load
    if duration_s is None or load is None:
        return site
    changed: dict[str, Any] = {"load": load.model_copy(update={"duration_s": duration_s})}
    replay = getattr(site.carbon, "replay", None)
    if site.carbon is not None and replay is not None:
        lasts_s = replay.lasts_s * duration_s / load.duration_s
        shown = replay.model_copy(update={"lasts_s": lasts_s})
        changed["carbon"] = site.carbon.model_copy(update={"replay": shown})
    return site.model_copy(update=changed)


@contextmanager
def _run(options: Options, site: Site) -> Iterator[RunWriter]:
    """The run directory; closed as failed when something raises."""
    folder = options.out or RUNS / new_run_id(time.time())
    zone = getattr(site.carbon, "zone", None)
    owner = site.services[0].owner if site.services else None
    with create_run(folder, kind="up", argv=options.argv, zone=zone, owner=owner) as writer:
        yield writer


class _Front:
    """The gateway, listening from the first moment; it answers as soon as there is something to answer with."""

    def __init__(self, site: Site, config: ServiceConfig, workers_log: int) -> None:
        self._session: Session | None = None
        self._workers_log = workers_log
        self.token = _token(site)
        self.metrics = Metrics([config.name], self._latest, site.mode.value)
        self.gateway = Gateway(
            self.engine(site, ()),
            token=self.token,
            admin=admin_app(self.metrics, dashboard_routes(self._latest)),
        )
        serving = site.serving
        self.server = GatewayServer(
            self.gateway,
            serving.host,
            serving.port,
            limits=ServerLimits(drain_s=serving.drain_s),
            protected=self.token is not None,
        )

    def engine(self, site: Site, cores: tuple[int, ...]) -> Engine:
        """An engine on these cores, as the site file bounds it."""
        serving = site.serving
        return local_engine(
            cores=cores,
            queue=serving.queue,
            deadline_s=serving.deadline_s,
            drain_s=serving.drain_s,
            stderr=self._workers_log,
        )

    def open_to(self, session: Session) -> None:
        """Answer with a session's engine, charge requests and tell of them from now on."""
        self._session = session
        self.gateway.engine = session.engine
        self.gateway.attribute = session.attribute
        self.gateway.telemetry = (session.telemetry, self.metrics.request)
        session.on_decision(self._count)

    def _count(self, record: DecisionRecord) -> None:
        self.metrics.decision(record)
        self.metrics.replan(record.decision.cause)

    def _latest(self) -> NowSnapshot | None:
        return None if self._session is None else self._session.snapshot()


@asynccontextmanager
async def _front(site: Site, config: ServiceConfig, writer: RunWriter) -> AsyncIterator[_Front]:
    """The gateway on its port, so that a port in use is known before anything else takes time."""
    log = writer.path / "workers.log"
    with disk_errors(log):
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        front = _Front(site, config, descriptor)
        await front.server.start()
        try:
            yield front
        finally:
            await front.server.stop()
    finally:
        os.close(descriptor)


def _token(site: Site) -> str | None:
    serving = site.serving
    if serving.token is not None:
        return serving.token.get_secret_value()
    return None if serving.token_file is None else read_token(serving.token_file)


async def _profile(
    options: Options,
    config: ServiceConfig,
    setup: ServiceSetup,
    meters: tuple[MeterSpec, ...] | None,
    cache: Path,
    screen: Screen,
) -> Obtained:
    load = options.site.load
    return await obtain_profile(
        setup,
        given=config.profile,
        cache=cache,
        folder=None if load is None else load.inputs,
        meters=meters,
        fresh=options.fresh,
        progress=screen.progress,
    )


async def _session(
    site: Site,
    config: ServiceConfig,
    setup: ServiceSetup,
    obtained: Obtained,
    writer: RunWriter,
    engine: Engine,
    meters: tuple[MeterSpec, ...] | None,
) -> Session:
    def opened(section: CarbonConfig) -> Any:
        return carbon_source(section, cache_folder())

    chosen = choose(site, config, setup, obtained.profile)
    pace = Pace.over(None if site.load is None else site.load.duration_s, chosen.rate_rps)
    grid = Grid(site.carbon, opened, time.time)
    return Session(site, setup, chosen, obtained.profile, writer, engine, meters=meters, grid=grid, pace=pace)


async def _serve(options: Options, session: Session, front: _Front, screen: Screen, stop: asyncio.Event) -> LoadResult:
    """Serve until the load has ended (``stay``: until stopped), or somebody asks for the end."""
    load_config = session.site.load
    planned_s = options.duration_s if load_config is None else load_config.duration_s
    planned_s = None if options.stay else planned_s
    screen.begin(session.site_label.services[0], planned_s)
    session.watch(lambda tick: screen.tick(tick, tick.t_s - session.started_s))
    session.on_decision(screen.decision)
    running = asyncio.create_task(session.run(), name="session")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    load: Load | None = None
    result = LoadResult()
    try:
        if load_config is not None:
            load = _start_load(load_config, session, front)
            loading = asyncio.create_task(load.wait(), name="load")
            await asyncio.wait({running, stopping, loading}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                load.end()
            result = await loading
        if load is None or options.stay:
            patience_s = None if options.stay else options.duration_s
            await asyncio.wait({running, stopping}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
    finally:
        stopping.cancel()
        running.cancel()
        if load is not None:
            load.end()
        await asyncio.gather(running, stopping, return_exceptions=True)
    return result


def _start_load(config: LoadConfig, session: Session, front: _Front) -> Load:
    view = next(iter(session.engine.replicas()))
    return start_load(
        config,
        rate_rps=session.chosen.rate_rps,
        service=session.setup.name,
        specs=view.inputs,
        url=front.server.url,
        token=front.token,
        folder=session.writer.path,
        scratch=session.writer.path / SAMPLES,
    )


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


async def _tell_machine(screen: Screen) -> None:
    """What ``joulery doctor`` found of this machine and its meters."""
    machine = machine_in_words()
    virtual = " (virtual)" if machine["virtual"] == "yes" else ""
    screen.fact("machine", f"{machine['cpus']} CPUs, {machine['processor']}{virtual}; {machine['system']}")
    # The meters alone: that the sampler runs is about to be seen.
    for check in await asyncio.to_thread(lambda: list(islice(energy(), 3))):
        mark = {Status.OK: "✓", Status.PARTLY: "~", Status.DENIED: "!", Status.ABSENT: "–"}[check.status]
        grant = f"; to have it: {check.grant}" if check.grant else ""
        screen.fact("", f"{mark} {check.name}: {check.detail}{grant}")


def _tell_service(screen: Screen, setup: ServiceSetup) -> None:
    family = setup.family
    variants = ", ".join(f"{v.name} {percent(v.accuracy_ratio)}" for v in family.variants)
    screen.fact("service", f"{setup.name}: {variants} ({family.accuracy_metric}, {family.variants[0].accuracy_source})")
    cuts = " or ".join("+".join(str(piece.cores) for piece in partition) for partition in setup.partitions)
    promised = f"p{100 * setup.slo.quantile:g} within {duration(setup.slo.latency_s)}"
    screen.fact("slices", f"{len(setup.cores)} CPU cores cut as {cuts}: {len(setup.candidates)} layouts; {promised}")


def _tell_profile(screen: Screen, obtained: Obtained, setup: ServiceSetup) -> None:
    profile = obtained.profile
    smallest = min(entry.slice for entry in profile.entries)
    times = ", ".join(
        f"{entry.variant} {si(entry.alone.quantile_s(0.5), 's')}, {si(entry.energy_j, 'J')}"
        for entry in profile.entries
        if entry.slice == smallest
    )
    band = f" ± {percent(profile.band_ratio, 0)}" if profile.band_ratio else ""
    age = "" if obtained.source == "measured now" else f" ({age_words(profile)})"
    screen.fact("profile", f"{obtained.source}{age}; a request on {smallest}: {times}")
    watts = f"{si(profile.entries[0].active_w, 'W')} a busy core above {si(profile.idle_w, 'W')} idle"
    screen.fact("power", f"{watts}, {profile.quality} by {profile.meter}{band}")
    others = profile.machine.get("others_busy_cores")
    if isinstance(others, float) and others > 0.25:
        screen.warn(
            f"other processes kept {others:.1f} cores busy while this was profiled: --reprofile on a quiet machine"
        )


def _tell_serving(screen: Screen, session: Session, server: GatewayServer) -> None:
    label = session.site_label.carbon
    if label is None:
        screen.fact("carbon", "no source of carbon intensity in the site file: joules alone, no grams")
    else:
        screen.fact("carbon", f"{label.zone}, {label.source}: {label.signal}, {label.scope}, {label.basis}")
    screen.fact("demand", f"{session.chosen.rate_rps:.0f} requests a second to plan for")
    first = session.ran.decisions[-1]
    screen.fact(
        "plan", first.decision.reason if first.outcome == APPLIED else f"{first.decision.reason}; {first.detail}"
    )
    screen.fact("dashboard", f"{server.url}/dashboard")


def _with_page(finished: Finished, result: LoadResult, obtained: Obtained, *, dashboard: str) -> dict[str, Any]:
    """The report with what is known only now: the page, where everything is, what the client saw."""
    page = finished.path / "report.html"
    text = render_html(roll_up([load_run(finished.path, with_course=True)], "component"))
    write_atomically(page, lambda file: file.write(text.encode()))
    return {
        **finished.report,
        "schema": "joulery.up/1",
        "client": result.as_dict(),
        "profile": obtained.source,
        "run": str(finished.path),
        "html": str(page),
        "dashboard": dashboard,
    }
