"""A site file's service, running: engine, sampler, controller and ticks, in one run directory.

::

    session = Session(...)                        # nothing runs yet
    await session.serve()                         # sampler, the grid, the first plan and its replicas
    ... a gateway in front of the engine, with session.attribute and session.telemetry ...
    await session.run()                           # controller and ticks, until cancelled
    await session.stop()                          # drained, the last reading taken
    finish(session, ...)                          # joulery.runtime.finish: account, compare, write

Whoever answers requests sits above and is handed what it needs; nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from joulery.config.site import Mode, Site
from joulery.domain.decisions import Decision, Step
from joulery.domain.engine import EnergyShare, RequestRecord
from joulery.domain.errors import JouleryError
from joulery.domain.layout import Layout
from joulery.domain.ports import Engine
from joulery.domain.profile import Profile
from joulery.domain.quality import Quality, weakest
from joulery.domain.timeline import DecisionRecord, NowSnapshot, ServiceLabel, SiteLabel, Tick
from joulery.policies.objective import JOULES_PER_KWH
from joulery.policies.variants import SET_LAYOUT, Observation, VariantState
from joulery.runtime.bench import start_sampler
from joulery.runtime.compose.meters import MeterSpec
from joulery.runtime.compose.service import Chosen, ServiceSetup
from joulery.runtime.controller import LayoutActuator, RequestWindow, ServiceEye
from joulery.runtime.drive import ADVISED, FAILED, SHADOWED, LiveDriver
from joulery.runtime.grid import Grid
from joulery.runtime.live import LAG_S, LiveMeters
from joulery.runtime.replay import POLICY, STEP, policy_entry, step_entry
from joulery.runtime.sampling import SamplerProcess
from joulery.runtime.ticker import Ticker
from joulery.store.files import disk_errors
from joulery.store.run import SAMPLES, RunWriter
from joulery.store.timeline import log_decision, log_tick, write_site

MOST_RECORDS = 2_000_000
_ENOUGH = 50
"""Requests that a window should hold on average."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things happen.

    Attributes:
        tick_s: Period of ticks.
        step_s: Period of the controller.
        window_s: How far back the controller looks at requests.
    """

    tick_s: float = 1.0
    step_s: float = 1.0
    window_s: float = 4.0

    @classmethod
    def over(cls, duration_s: float | None, rate_rps: float) -> Pace:
        """A pace that shows a run of so long: a second, or less for a run of less than a minute.

        The window is wide enough for a latency quantile to mean something at the rate expected.
        """
        step_s = 1.0 if duration_s is None else min(1.0, max(0.25, duration_s / 60.0))
        return cls(tick_s=step_s, step_s=step_s, window_s=max(4.0 * step_s, _ENOUGH / rate_rps))


@dataclass(slots=True)
class Ran:
    """What happened, kept for the account.

    Attributes:
        records: Every request that ended, in that order.
        layouts: ``(from_s, layout)``: what served, from when.
        ticks: Every tick.
        decisions: Every decision with its outcome.
        warnings: What a person should know, each once.
    """

    records: list[RequestRecord] = field(default_factory=list)
    layouts: list[tuple[float, Layout]] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Session:
    """One service being served and watched.

    Args:
        site: The site file.
        setup: Its service on this machine.
        chosen: Its policy.
        profile: What its variants cost.
        writer: The run directory.
        engine: Answers requests; it runs nothing yet.
        meters: Meters to open; None for those this machine has.
        grid: The grid.
        pace: How often things happen.

    Attributes:
        ran: What happened so far.
        site_label: What does not change.
        started_s: When requests could first be answered, Unix seconds; NaN before.
        start_ns, end_ns: The same and the end of the run, monotonic nanoseconds; 0 before.
    """

    def __init__(
        self,
        site: Site,
        setup: ServiceSetup,
        chosen: Chosen,
        profile: Profile,
        writer: RunWriter,
        engine: Engine,
        *,
        meters: Sequence[MeterSpec] | None,
        grid: Grid,
        pace: Pace,
    ) -> None:
        self.site, self.setup, self.chosen, self.profile = site, setup, chosen, profile
        self.writer, self.grid, self.pace = writer, grid, pace
        self.ran = Ran()
        self.started_s = math.nan
        self.start_ns = self.end_ns = 0
        self.engine = engine
        self.site_label = SiteLabel(site.name, site.mode.value)
        self._meters = meters
        self._ticker = Ticker(setup, chosen, grid, LiveMeters(writer.path / SAMPLES, site.pue), site.pue)
        self._window = RequestWindow(setup.name, pace.window_s)
        self._sampler: SamplerProcess | None = None
        self._since_tick: list[RequestRecord] = []
        self._latest: NowSnapshot | None = None
        self._ticked_s = math.nan
        self._advised: Layout | None = None
        self._watchers: list[Callable[[Tick], None]] = []
        self._listeners: list[Callable[[DecisionRecord], None]] = []
        self._driver = self._make_driver()

    def _make_driver(self) -> LiveDriver[VariantState, Observation]:
        policy = self.chosen.policy
        eye = ServiceEye(self._window, self.engine, self.setup.slo, self.grid.at, self._power_w)
        return LiveDriver(
            policy,
            eye.look if self.site.mode is Mode.ACT else lambda now_s: self._as_if_advised(eye.look(now_s)),
            self._act,
            watch=lambda seen, step: self._log_step(seen, step),
            record=self._record,
            period_s=self.pace.step_s,
        )

    async def serve(self) -> None:
        """Start reading meters, ask the grid, make the first plan and run it.

        Raises:
            JouleryError: A meter that was named, the grid or a replica is not to be had.
        """
        samples = self.writer.path / SAMPLES
        with disk_errors(samples):
            samples.mkdir()
        self._sampler = await asyncio.to_thread(start_sampler, samples, self._meters, self.site.meters.period_s)
        await self.grid.refresh()
        self.site_label = self._label()
        write_site(self.writer, self.site_label)
        self.writer.log(POLICY, **policy_entry(self.chosen.policy))
        await self._driver.step(time.time())
        if self._driver.failure is not None:
            raise self._driver.failure
        self.started_s, self.start_ns = time.time(), time.monotonic_ns()
        self._ticked_s = self.started_s

    async def run(self) -> None:
        """Control and tick until cancelled.

        Raises:
            JouleryError: The sampler's files are damaged, or the disk refuses the log.
        """
        tasks = [
            asyncio.create_task(self._driver.run(), name="controller"),
            asyncio.create_task(self._tick_along(), name="ticks"),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, watcher: Callable[[Tick], None]) -> None:
        """Have a function called with every tick."""
        self._watchers.append(watcher)

    def on_decision(self, listener: Callable[[DecisionRecord], None]) -> None:
        """Have a function called with every decision and what became of it."""
        self._listeners.append(listener)

    def attribute(self, variant: str, cpu_s: float, service_s: float, end_s: float) -> EnergyShare:
        """What one request is charged: its CPU seconds at the watts of a busy core, at the grid's intensity."""
        energy_j = cpu_s * self.profile.entries[0].active_w
        g_per_kwh = self.grid.at(end_s)
        carbon_g = energy_j * self.site.pue * g_per_kwh / JOULES_PER_KWH
        quality = weakest((self.profile.quality, Quality.MODELLED))
        return EnergyShare(energy_j, carbon_g if math.isfinite(carbon_g) else None, quality)

    def telemetry(self, record: RequestRecord) -> None:
        """A request ended."""
        self._window.add(record)
        self._since_tick.append(record)
        if len(self.ran.records) < MOST_RECORDS:
            self.ran.records.append(record)
        else:
            self.warn(f"the summary is of the first {MOST_RECORDS:,} requests: all of them are held in memory")

    @property
    def controller_cpu_s(self) -> float:
        """CPU seconds spent observing and deciding."""
        return self._driver.busy_cpu_s

    def snapshot(self) -> NowSnapshot | None:
        """The latest state for whoever looks; None before the first tick."""
        return self._latest

    async def stop(self) -> None:
        """End the run: drain the engine, take the last reading, sum up the last period. Safe to call twice."""
        if self.start_ns and not self.end_ns:
            self.end_ns = time.monotonic_ns()
        end_s = time.time()
        await self.engine.close()
        if self._sampler is None:
            return
        sampler, self._sampler = self._sampler, None
        try:
            await asyncio.to_thread(sampler.stop)
        except JouleryError as error:
            self.warn(f"not all of the run was measured: {error}")
        if end_s > self._ticked_s:
            self._tick(end_s)

    def warn(self, text: str) -> None:
        """Tell a person something, once."""
        if text not in self.ran.warnings:
            self.ran.warnings.append(text)
            self.writer.log("warning", text=text)

    def _label(self) -> SiteLabel:
        setup = self.setup
        ordered = sorted(setup.family.variants, key=lambda variant: variant.accuracy_ratio)
        service = ServiceLabel(
            setup.name,
            setup.slo.latency_s,
            setup.slo.quantile,
            tuple((variant.name, variant.accuracy_ratio) for variant in ordered),
            self.chosen.policy.minimum_accuracy_ratio,
        )
        return replace(self.site_label, carbon=self.grid.label(), services=(service,))

    async def _act(self, decision: Decision) -> tuple[str, str]:
        """Carry out a decision; in other modes than act, start the baseline and leave it at that."""
        actuator = LayoutActuator(self.engine, self.setup.name, self.setup.models)
        if self.site.mode is Mode.ACT:
            done = await actuator.carry_out(decision)
            if decision.kind == SET_LAYOUT:
                self.ran.layouts.append((time.time(), Layout.parse(decision.value)))
            return done
        said = f"mode {self.site.mode}: nothing was changed"
        if not self.ran.layouts:
            said = f"mode {self.site.mode}: the baseline runs instead, {await actuator.run(self.chosen.base)}"
            self.ran.layouts.append((time.time(), self.chosen.base))
        self._advised = Layout.parse(decision.value)
        return ADVISED if self.site.mode is Mode.ADVISE else SHADOWED, said

    def _as_if_advised(self, seen: Observation) -> Observation:
        """What the policy sees where its advice is not carried out: as if it had been, and no latency, which tells
        about another layout."""
        return replace(seen, running=self._advised, latency_s=math.nan, requests=0)

    def _log_step(self, seen: Observation, step: Step[VariantState]) -> None:
        self.writer.log(STEP, t_s=seen.now_s, **step_entry(self.setup.name, seen, step))

    def _record(self, record: DecisionRecord) -> None:
        self.ran.decisions.append(record)
        log_decision(self.writer, record)
        if record.outcome == FAILED:
            self.warn(f"{record.decision.kind}: {record.detail}")
        for listener in self._listeners:
            listener(record)

    def _power_w(self) -> float:
        return self.ran.ticks[-1].power_w if self.ran.ticks else math.nan

    async def _tick_along(self) -> None:
        start = time.monotonic()
        while True:
            elapsed = time.monotonic() - start
            await asyncio.sleep(self.pace.tick_s - elapsed % self.pace.tick_s)
            await self.grid.refresh()
            if self.grid.trouble:
                self.warn(self.grid.trouble)
            if time.time() - LAG_S > self._ticked_s:
                self._tick(time.time() - LAG_S)

    def _tick(self, until_s: float) -> None:
        """Sum up the period until then, log it, show it."""
        records, self._since_tick = self._since_tick, []
        tick = self._ticker.tick(self._ticked_s, until_s, records)
        self._ticked_s = until_s
        self.ran.ticks.append(tick)
        log_tick(self.writer, tick)
        self._latest = self._ticker.look(
            self.site_label, self.started_s, until_s, self.ran.decisions, self.ran.warnings
        )
        for watcher in self._watchers:
            watcher(tick)
