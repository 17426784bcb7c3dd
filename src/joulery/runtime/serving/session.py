"""A site file's services, running: engine, sampler, controllers and ticks, in one run directory.

::

    session = Session(...)                        # nothing runs yet
    await session.serve()                         # sampler, the grid, the first plans and their replicas
    ... a gateway in front of the engine, with session.attribute and session.telemetry ...
    await session.run()                           # controllers and ticks, until cancelled
    await session.stop()                          # drained, the last reading taken
    finish(session, ...)                          # joulery.runtime.serving.finish: account, compare, write

Whoever answers requests sits above and is handed what it needs; nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from joulery.app.serving.service import PolicyBinding, objectives_from_config, terms_of, with_terms
from joulery.app.wiring.meters import MeterSpec
from joulery.config.site import Mode, Site
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import JouleryError
from joulery.domain.gpu.layout import Layout
from joulery.domain.ports import Engine
from joulery.domain.quality import Quality, weakest
from joulery.domain.serving.engine import EnergyShare, RequestRecord
from joulery.domain.serving.timeline import DecisionRecord, NowSnapshot, SiteLabel, Tick
from joulery.policies.serving.objective import JOULES_PER_KWH
from joulery.policies.serving.trial_policy import TRY_LAYOUT
from joulery.policies.serving.trial_state import TrialState
from joulery.policies.serving.variant_policy import KEEP_LAYOUT, Observation
from joulery.runtime.measuring.live import LAG_S, LiveMeters
from joulery.runtime.measuring.sampling import SamplerProcess
from joulery.runtime.profiling.obtain import start_sampler
from joulery.runtime.runs.replay import POLICY, STEP, policy_entry, step_entry
from joulery.runtime.serving.controller import LayoutActuator, ServiceObserver
from joulery.runtime.serving.driver import ADVISED, FAILED, SHADOWED, LiveDriver
from joulery.runtime.serving.governing import ClockController
from joulery.runtime.serving.intensity import Grid
from joulery.runtime.serving.pace import Pace
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.site_watch import SiteWatch
from joulery.runtime.serving.ticker import Ticker
from joulery.runtime.serving.trial_arbiter import TrialArbiter
from joulery.store.files import disk_errors
from joulery.store.run.directory import SAMPLES, RunWriter
from joulery.store.run.timeline import log_decision, log_tick, write_site

MOST_RECORDS = 2_000_000


@dataclass(slots=True)
class SessionHistory:
    """What happened, kept for the account.

    Attributes:
        records: Every request that ended, in that order.
        ticks: Every tick.
        decisions: Every decision with its outcome.
        warnings: What a person should know, each once.
    """

    records: list[RequestRecord] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Session:
    """Services being served and watched.

    Args:
        site: The site file.
        hosted: Its services on this machine, in the order of the site file.
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
        hosted: Sequence[RunningService],
        writer: RunWriter,
        engine: Engine,
        *,
        meters: Sequence[MeterSpec] | None,
        grid: Grid,
        pace: Pace,
    ) -> None:
        self.site, self.hosted = site, tuple(hosted)
        self.writer, self.grid, self.pace = writer, grid, pace
        self.ran = SessionHistory()
        self.started_s = math.nan
        self.start_ns = self.end_ns = 0
        self.engine = engine
        self.site_label = SiteLabel(site.name, site.mode.value)
        self._meters = meters
        self._by_name = {one.name: one for one in self.hosted}
        self._ticker = Ticker(self.hosted, grid, LiveMeters(writer.path / SAMPLES, site.pue), site.pue)
        self._changing, self._trial_turn = asyncio.Lock(), TrialArbiter()
        self._sampler: SamplerProcess | None = None
        self._since_tick: list[RequestRecord] = []
        self._latest: NowSnapshot | None = None
        self._ticked_s = math.nan
        self._watchers: list[Callable[[Tick], None]] = []
        self._listeners: list[Callable[[DecisionRecord], None]] = []
        self._file: SiteWatch | None = None
        self._drivers = self._make_drivers()
        self._governors: list[LiveDriver[Any, Any]] = []

    def _make_drivers(self) -> list[LiveDriver[Any, Any]]:
        """Who decides: a policy a service."""
        return [self._make_driver(one, one.chosen) for one in self.hosted if one.chosen is not None]

    def _make_driver(self, one: RunningService, chosen: PolicyBinding) -> LiveDriver[Any, Observation]:
        return LiveDriver(
            chosen.policy,
            lambda now_s: self._see(one, now_s),
            lambda decision: self._act(one, chosen, decision),
            watch=lambda seen, step: self._log_step(one, seen, step),
            record=self._record,
            period_s=self.pace.step_s,
        )

    def _see(self, one: RunningService, now_s: float) -> Observation:
        eye = ServiceObserver(one.window, self.engine, one.setup.slo, self.grid.at, self._power_w, one.sampling)
        seen = eye.look(now_s)
        if self.site.mode is not Mode.ACT:
            return _as_if_advised(one, seen)
        return replace(seen, waits_for=self._trial_turn.ahead_of(one.name, self._wanting()))

    def _wanting(self) -> dict[str, bool]:
        """Of each service that tries layouts whether it is on trial, or waits to be."""
        named = zip((one.name for one in self.hosted if one.chosen is not None), self._drivers, strict=True)
        trying = ((name, driver.state) for name, driver in named if isinstance(driver.state, TrialState))
        return {name: state.trying is not None or bool(state.owed) for name, state in trying}

    def follow(self, watch: SiteWatch) -> None:
        """Take over what a person changes in the site file while it is served."""
        self._file = watch

    def govern(self, keeper: ClockController) -> None:
        """Have a device's clock governed while the services run."""
        self._governors.append(keeper.driver(self.writer.log, self._record))

    @property
    def on_trial(self) -> bool:
        """True while a layout is tried live: whoever owns other knobs holds still."""
        return any(getattr(driver.state, "trying", None) is not None for driver in self._drivers)

    async def serve(self) -> None:
        """Start reading meters, ask the grid, make the first plans and run them.

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
        await self._first()
        self.started_s, self.start_ns = time.time(), time.monotonic_ns()
        self._ticked_s = self.started_s

    async def _first(self) -> None:
        """Make the first plans and run them."""
        chosen = [one.chosen for one in self.hosted if one.chosen is not None]
        for each, driver in zip(chosen, self._drivers, strict=True):
            if each.remark:
                self.warn(each.remark)
            self.writer.log(POLICY, **policy_entry(each.policy))
            await driver.step(time.time())
            if driver.failure is not None:
                raise driver.failure

    async def run(self) -> None:
        """Control and tick until cancelled.

        Raises:
            JouleryError: The sampler's files are damaged, or the disk refuses the log.
        """
        tasks = [asyncio.create_task(driver.run(), name="controller") for driver in self._drivers]
        tasks += [asyncio.create_task(driver.run(), name="governor") for driver in self._governors]
        tasks.append(asyncio.create_task(self._tick_along(), name="ticks"))
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

    def attribute(self, service: str, variant: str, cpu_s: float, service_s: float, end_s: float) -> EnergyShare | None:
        """What one request is charged: its CPU seconds at the watts of a busy core, at the grid's intensity.

        None where no profile says what a busy core draws.
        """
        profile = self._by_name[service].profile
        if profile is None:
            return None
        energy_j = cpu_s * profile.entries[0].active_w
        g_per_kwh = self.grid.at(end_s)
        carbon_g = energy_j * self.site.pue * g_per_kwh / JOULES_PER_KWH
        quality = weakest((profile.quality, Quality.MODELLED))
        return EnergyShare(energy_j, carbon_g if math.isfinite(carbon_g) else None, quality)

    def telemetry(self, record: RequestRecord) -> None:
        """A request ended."""
        one = self._by_name.get(record.service)
        if one is not None:
            one.window.add(record)
            if one.sampling is not None:
                one.sampling.add(record)
        self._since_tick.append(record)
        if len(self.ran.records) < MOST_RECORDS:
            self.ran.records.append(record)
        else:
            self.warn(f"the summary is of the first {MOST_RECORDS:,} requests: all of them are held in memory")

    def adopt(self, came: Sequence[RunningService]) -> None:
        """Services that came while others run."""
        self.hosted = (*self.hosted, *came)
        self._by_name = {one.name: one for one in self.hosted}
        self._ticker.hosted = self.hosted

    @property
    def names(self) -> frozenset[str]:
        """The services there are."""
        return frozenset(self._by_name)

    @property
    def controller_cpu_s(self) -> float:
        """CPU seconds spent observing and deciding."""
        return math.fsum(driver.busy_cpu_s for driver in (*self._drivers, *self._governors))

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
        return replace(self.site_label, carbon=self.grid.label(), services=tuple(one.label() for one in self.hosted))

    async def _act(self, one: RunningService, chosen: PolicyBinding, decision: Decision) -> tuple[str, str]:
        """Carry out a decision; in other modes than act, start the baseline and leave it at that.

        One change of replicas at a time: each names the replicas of all services.
        """
        actuator = LayoutActuator(self.engine, one.name, one.setup.models, one.setup.seats)
        async with self._changing:
            if self.site.mode is Mode.ACT:
                done = await actuator.carry_out(decision)
                if decision.kind == TRY_LAYOUT and one.sampling is not None:
                    one.sampling.begin(time.time())
                if decision.kind != KEEP_LAYOUT:
                    one.layouts.append((time.time(), Layout.parse(decision.value)))
                return done
            said = f"mode {self.site.mode}: nothing was changed"
            if not one.layouts:
                said = f"mode {self.site.mode}: the baseline runs instead, {await actuator.run(chosen.base)}"
                one.layouts.append((time.time(), chosen.base))
        one.advised = Layout.parse(decision.value)
        return ADVISED if self.site.mode is Mode.ADVISE else SHADOWED, said

    def _log_step(self, one: RunningService, seen: Observation, step: Step[Any]) -> None:
        self.writer.log(STEP, t_s=seen.now_s, **step_entry(one.name, seen, step))

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
            self._read_again()
            if time.time() - LAG_S > self._ticked_s:
                self._tick(time.time() - LAG_S)

    def _read_again(self) -> None:
        """What is asked for now, where the site file was changed."""
        site, remark = (None, "") if self._file is None else self._file.changed()
        if remark:
            self.warn(remark)
        chosen = [(one, one.chosen) for one in self.hosted if one.chosen is not None]
        for (one, had), driver in zip(chosen, self._drivers if chosen else (), strict=True):
            config = None if site is None else next((c for c in site.services if c.name == one.name), None)
            if config is None:
                continue
            asked = objectives_from_config(config, one.setup.family.largest.accuracy_ratio)
            if asked == terms_of(had.policy):
                continue
            try:
                policy = with_terms(had.policy, asked)
            except JouleryError as error:
                self.warn(f"the changed site file is not taken over: {error}")
                continue
            driver.policy = policy
            one.setup, one.chosen = replace(one.setup, slo=asked.slo), replace(had, policy=policy)
            self.site_label = self._label()
            self.writer.log(POLICY, **policy_entry(policy))

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


def _as_if_advised(one: RunningService, seen: Observation) -> Observation:
    """What a policy sees where its advice is not carried out: as if it had been, and no latency, which tells about
    another layout."""
    return replace(seen, running=one.advised, latency_s=math.nan, requests=0)
