"""Run a site's services: engine, meters, controllers and one summary a period, in one run folder.

::

    session = ServingSession(...)                        # nothing runs yet
    await session.serve()                         # sampler, grid, the first plans and their replicas
    ... a gateway in front of the engine, with session.attribute and session.telemetry ...
    await session.run()                           # controllers and ticks, until cancelled
    await session.stop()                          # drained, the last reading taken
    finish(session, ...)                          # joulery.runtime.results.finish: account, compare, write

The gateway belongs to a layer above and receives the functions it needs; nothing here depends on HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from joulery.config.site import Site
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.errors import JouleryError
from joulery.domain.ports import Engine
from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.charging import ChargeTable
from joulery.domain.serving.engine import EnergyShare, InferRequest, RequestRecord
from joulery.domain.serving.timeline import DecisionRecord, NowSnapshot, ServiceLabel, SiteLabel, Tick
from joulery.runtime.llm.family import LanguageFamily
from joulery.runtime.llm.hosted import HostedModels
from joulery.runtime.measuring.live import LAG_S, LiveMeters
from joulery.runtime.measuring.sampling import SamplerProcess
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.governing import ClockController
from joulery.runtime.serving.limiting import PowerLimitController
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.runtime.serving.nodes.ledger import NodeLedger
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.ticker import Ticker
from joulery.runtime.session.driver import FAILED, LiveDriver
from joulery.runtime.session.history import SessionHistory
from joulery.steady_time import unix_s
from joulery.store.files import disk_errors
from joulery.store.run.directory import SAMPLES
from joulery.store.run.timeline import write_site

_WINDOW_REQUESTS = 50
"""Requests that a window holds on average, so that a latency quantile is meaningful."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals at which a session acts.

    Attributes:
        tick_s: Time between two ticks.
        step_s: Time between two steps of a controller.
    """

    tick_s: float = 1.0
    step_s: float = 1.0

    @classmethod
    def over(cls, duration_s: float | None) -> Pace:
        """The pace of a run of this length: a second, less for a run of less than a minute; None for no end."""
        step_s = 1.0 if duration_s is None else min(1.0, max(0.25, duration_s / 60.0))
        return cls(tick_s=step_s, step_s=step_s)

    def window_s(self, rate_rps: float) -> float:
        """The span of a controller's request window at an expected rate, seconds."""
        return max(4.0 * self.step_s, _WINDOW_REQUESTS / rate_rps)


class Remarking(Protocol):
    """An engine that reports remarks for people on the system it runs on."""

    def remarks(self) -> Sequence[str]:
        """All remarks so far."""
        ...


class Control(Protocol):
    """Decides what a session's engine runs."""

    @property
    def drivers(self) -> Sequence[LiveDriver[Any, Any]]:
        """The loops to run."""
        ...

    @property
    def on_trial(self) -> bool:
        """True while a layout is on trial: other controllers change nothing then."""
        ...

    async def start(self) -> None:
        """Run the first plan.

        Raises:
            JouleryError: It cannot be run.
        """
        ...

    def revise(self, revision: Revision) -> None:
        """Continue with new objectives of a service."""
        ...


class ServingSession:
    """Services being served and measured.

    Args:
        site: The site file.
        services: Its services on this machine by name; shared with ``control``, which may add to it.
        history: Records what happens.
        engine: Answers requests; it runs nothing yet.
        control: Decides what the engine runs.
        start_sampler: Starts the meters; blocks until they read.
        grid: Carbon intensity.
        pace: Intervals of ticks and steps.

    Attributes:
        site_label: The site, its services and its carbon source, for display.
        started_s: When requests could first be answered, Unix seconds; NaN before.
        start_ns, end_ns: The same and the end of the run, monotonic nanoseconds; 0 before.
        models: The language models it serves; None for none.
        families: Their families.
        limits: Controllers of its devices' power limits.
        nodes: The nodes of its cluster; None on one machine.
    """

    def __init__(
        self,
        site: Site,
        services: dict[str, RunningService],
        history: SessionHistory,
        engine: Engine,
        control: Control,
        *,
        start_sampler: Callable[[], SamplerProcess],
        grid: LiveIntensity,
        pace: Pace,
    ) -> None:
        self.site, self.services, self.history = site, services, history
        self.engine, self.control, self.grid, self.pace = engine, control, grid, pace
        self.writer = history.writer
        self.site_label = SiteLabel(site.name, site.mode.value)
        self.started_s = math.nan
        self.start_ns = self.end_ns = 0
        self.models: HostedModels | None = None
        self.families: list[LanguageFamily] = []
        self.limits: list[PowerLimitController] = []
        self.nodes: NodeLedger | None = None
        self._start_sampler = start_sampler
        self._ticker = Ticker(services, grid, LiveMeters(self.writer.path / SAMPLES, site.pue), site.pue)
        self._sampler: SamplerProcess | None = None
        self._since_tick: list[RequestRecord] = []
        self._latest: NowSnapshot | None = None
        self._ticked_s = math.nan
        self._watchers: list[Callable[[Tick], None]] = []
        self._revisions: Callable[[], tuple[Sequence[Revision], Sequence[str]]] = lambda: ((), ())
        self._governors: list[LiveDriver[Any, Any]] = []

    def follow(self, revisions: Callable[[], tuple[Sequence[Revision], Sequence[str]]]) -> None:
        """Call a function once a tick for new objectives, and warnings about those it refuses."""
        self._revisions = revisions

    def host(self, models: HostedModels) -> None:
        """Count language models in ticks, charges and the report from now on."""
        self.models = self._ticker.models = models
        self.relabel()

    def govern(self, keeper: ClockController) -> None:
        """Govern a device's clock while the services run."""
        self._governors.append(keeper.driver(self.writer.log, self._add_clock_decision))

    def limit(self, controller: PowerLimitController) -> None:
        """Limit a device's power while the services run."""
        self.limits.append(controller)
        self._governors.append(controller.driver(self.history))

    def steer(self, family: LanguageFamily) -> None:
        """Steer the requests of a family of language models by its policy while the services run."""
        self.history.add_policy(family.policy)
        self.families.append(family)
        self._governors.append(family.driver(self.history))

    def _add_clock_decision(self, record: DecisionRecord) -> None:
        self.history.add_decision(record)
        if record.outcome == FAILED:
            self.warn(f"{record.decision.kind}: {record.detail}")

    @property
    def on_trial(self) -> bool:
        """True while a layout is on trial: other controllers change nothing then."""
        return self.control.on_trial

    async def serve(self) -> None:
        """Start the meters, fetch the carbon intensity, make the first plans and run them.

        Raises:
            JouleryError: A named meter, the grid or a replica is not available.
        """
        samples = self.writer.path / SAMPLES
        with disk_errors(samples):
            samples.mkdir()
        self._sampler = await asyncio.to_thread(self._start_sampler)
        await self._ask_grid()
        self.relabel()
        await self.control.start()
        self.begin(unix_s())

    def begin(self, now_s: float) -> None:
        """Begin the account of the session: requests can be answered from now on."""
        self.started_s, self.start_ns = now_s, time.monotonic_ns()
        self._ticked_s = now_s

    async def run(self) -> None:
        """Control and tick until cancelled.

        Raises:
            JouleryError: The sampler's files are damaged, or the disk refuses the log.
        """
        tasks = [asyncio.create_task(driver.run(), name="controller") for driver in self.control.drivers]
        tasks += [asyncio.create_task(driver.run(), name="governor") for driver in self._governors]
        tasks.append(asyncio.create_task(self._tick_loop(), name="ticks"))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, watcher: Callable[[Tick], None]) -> None:
        """Call a function with every tick."""
        self._watchers.append(watcher)

    def on_decision(self, listener: Callable[[DecisionRecord], None]) -> None:
        """Call a function with every decision and its outcome."""
        self.history.on_decision(listener)

    def on_warning(self, listener: Callable[[str], None]) -> None:
        """Call a function with every new warning."""
        self.history.on_warning(listener)

    def warn(self, text: str) -> None:
        """Keep and log a warning, once."""
        self.history.warn(text)

    def attribute(self, service: str, variant: str, cpu_s: float, service_s: float, end_s: float) -> EnergyShare | None:
        """The charge of one request: its CPU seconds at the watts of a busy core, at the grid's intensity.

        None where no profile has the watts of a busy core.
        """
        profile = self.services[service].profile
        if profile is None:
            return None
        active_w = next(
            (one.active_w for one in profile.entries if one.variant == variant), profile.entries[0].active_w
        )
        energy_j = cpu_s * active_w
        # Nodes are on grids of their own, and which of them answered is not known here.
        g_per_kwh = self.grid.at(end_s) if self.nodes is None else math.nan
        carbon_g = energy_j * self.site.pue * g_per_kwh / JOULES_PER_KWH
        quality = weakest((profile.quality_of(variant), Quality.MODELLED))
        return EnergyShare(energy_j, carbon_g if math.isfinite(carbon_g) else None, quality)

    def charges(self, now_s: float) -> ChargeTable:
        """Charges of requests that end now."""
        known = {name: one.profile for name, one in self.services.items() if one.profile is not None}
        watts = {
            name: {
                "": profile.entries[0].active_w,
                **{entry.variant: entry.active_w for entry in reversed(profile.entries)},
            }
            for name, profile in known.items()
        }
        quality = {name: weakest((profile.quality, Quality.MODELLED)) for name, profile in known.items()}
        own = {
            name: {
                entry.variant: weakest((entry.quality, Quality.MODELLED))
                for entry in profile.entries
                if entry.quality is not None
            }
            for name, profile in known.items()
        }
        return ChargeTable(watts, quality, self.grid.at(now_s) * self.site.pue, own)

    def telemetry(self, record: RequestRecord) -> None:
        """Record a request that ended; requests for other services than the session's are left out."""
        one = self.services.get(record.service)
        if one is None:
            return
        one.window.add(record)
        if one.sampling is not None:
            one.sampling.add(record)
        if self.nodes is not None:
            self.nodes.answered(record)
        self._since_tick.append(record)
        self.history.requests.add(record)

    def sample(self, service: str, request: InferRequest) -> None:
        """Offer an answered request to the shadow replays of its service."""
        one = self.services.get(service)
        if one is not None and one.shadow is not None:
            one.shadow.saw(request)

    @property
    def controller_cpu_s(self) -> float:
        """CPU seconds spent observing and deciding."""
        return math.fsum(driver.busy_cpu_s for driver in (*self.control.drivers, *self._governors))

    def snapshot(self) -> NowSnapshot | None:
        """The state at the latest tick; None before the first."""
        return self._latest

    def relabel(self) -> None:
        """Write the services and the grid as they are now to the run folder."""
        self.site_label = replace(self.site_label, carbon=self.grid.label(), services=self._labels())
        write_site(self.writer, self.site_label)

    def _labels(self) -> tuple[ServiceLabel, ...]:
        models = () if self.models is None else self.models.labels()
        return (*(one.label() for one in self.services.values()), *models)

    async def stop(self) -> None:
        """End the run: drain the engine, take the last reading, sum up the last period. Safe to call twice."""
        if self.start_ns and not self.end_ns:
            self.end_ns = time.monotonic_ns()
        end_s = unix_s()
        for one in self.services.values():
            if one.shadow is not None:
                await one.shadow.stop()
        await self.engine.close()
        if self._sampler is None:
            return
        sampler, self._sampler = self._sampler, None
        try:
            await asyncio.to_thread(sampler.stop)
        except JouleryError as error:
            self.warn(f"not all of the run was measured: {error}")
        if end_s > self._ticked_s:
            self.tick(end_s)

    async def _tick_loop(self) -> None:
        start = time.monotonic()
        while True:
            elapsed = time.monotonic() - start
            await asyncio.sleep(self.pace.tick_s - elapsed % self.pace.tick_s)
            await self._ask_grid()
            self._revise()
            if hasattr(self.engine, "remarks"):
                for text in cast(Remarking, self.engine).remarks():
                    self.warn(text)
            if unix_s() - LAG_S > self._ticked_s:
                self.tick(unix_s() - LAG_S)

    async def _ask_grid(self) -> None:
        """Refresh the carbon intensity where that is due, and issue warnings about its source."""
        await self.grid.refresh()
        for text in self.grid.warnings(unix_s()):
            self.warn(text)
        if self.start_ns and self.grid.label() != self.site_label.carbon:
            self.relabel()

    def _revise(self) -> None:
        """Apply the objectives of a changed site file."""
        revisions, warnings = self._revisions()
        for text in warnings:
            self.warn(text)
        for revision in revisions:
            self.control.revise(revision)
        if revisions:
            self.relabel()

    def tick(self, until_s: float) -> None:
        """Sum up the period since the last tick, log it, show it.

        Raises:
            DataError: The sampler's files are damaged.
            CapabilityError: The disk refuses the log.
        """
        records, self._since_tick = self._since_tick, []
        tick = self._ticker.tick(self._ticked_s, until_s, records)
        self._ticked_s = until_s
        self.history.add_tick(tick)
        self._latest = self._ticker.snapshot(
            self.site_label, self.started_s, until_s, self.history.decisions, self.history.warnings
        )
        for watcher in self._watchers:
            watcher(tick)
