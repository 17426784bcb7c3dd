"""Run the policy of each service: observe, step, and make the engine run the chosen layout."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from joulery.config.site import Mode
from joulery.domain.decisions import Decision, Step
from joulery.domain.gpu.layout import Layout
from joulery.domain.ports import Admission, Backlog, Copied, Engine, Steering
from joulery.domain.serving.engine import Outcome, QueuedRequest, ReplicaState, RequestRecord
from joulery.domain.serving.mix import OWN, VariantMix
from joulery.domain.serving.service import Slo
from joulery.perf.switchback import MIN_PERIODS
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_WEIGHTS, TRY_LAYOUT, Observation, tail_latency_s
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.state import ServiceState
from joulery.policies.serving.switchback import AuditedPolicy, AuditedState
from joulery.policies.serving.variants.changes import FAMILY
from joulery.policies.serving.variants.traffic_split import TrafficSplit
from joulery.runtime.serving.layout_actuator import LayoutActuator, running_layout
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.runtime.serving.live_sample import LiveSample
from joulery.runtime.serving.nodes.places import NodePlaces
from joulery.runtime.serving.running_service import PolicyBinding, RunningService, ServiceSetup
from joulery.runtime.serving.shadow import ShadowReplays
from joulery.runtime.session.driver import ADVISED, APPLIED, SHADOWED, LiveDriver
from joulery.runtime.session.history import SessionHistory
from joulery.runtime.session.requests import RequestWindow, summarise
from joulery.steady_time import unix_s


class TrialArbiter:
    """Lets one service at a time try layouts: two on trial at once would disturb one another's measurements.

    A turn lasts from the first trial until the service settles on a layout; the others follow in order of request.
    """

    def __init__(self) -> None:
        self._line: list[str] = []

    def ahead_of(self, service: str, wants: Mapping[str, bool]) -> str:
        """The service that another has to wait for; empty when it may try.

        Args:
            service: The service that wants to try.
            wants: Of each service whether it is on trial or waits to be.
        """
        self._line = [name for name in self._line if wants.get(name, False)]
        self._line += [name for name, waits in wants.items() if waits and name not in self._line]
        return self._line[0] if self._line and self._line[0] != service else ""


@dataclass(frozen=True, slots=True, eq=False)
class Revision:
    """Changes of a running service.

    Attributes:
        setup: New setup of the service: its variants, its SLO.
        chosen: New policy of the service.
        resets_state: Whether the new policy starts without the state of the former one.
    """

    setup: ServiceSetup
    chosen: PolicyBinding
    resets_state: bool = False


class PolicyControl:
    """Runs one policy for each service. Implements :class:`joulery.runtime.serving.session.Control`.

    Args:
        services: The running services by name, each with a policy.
        engine: Runs the layouts.
        history: Records observations, steps and decisions.
        grid: Carbon intensity.
        mode: Layouts change in ``act`` only.
        period_s: Time between two steps.

    Attributes:
        places: The nodes of a cluster that replicas are placed on; None where the site names none.
    """

    def __init__(
        self,
        services: Mapping[str, RunningService],
        engine: Engine,
        history: SessionHistory,
        grid: LiveIntensity,
        mode: Mode,
        period_s: float,
    ) -> None:
        self._services, self._engine, self._history, self._grid = services, engine, history, grid
        self._mode, self._period_s = mode, period_s
        self.places: NodePlaces | None = None
        self._changing, self._arbiter = asyncio.Lock(), TrialArbiter()
        for one in services.values():
            one.shadow = self._shadow(one)
        self._by_name = {
            name: self._driver(one, one.chosen) for name, one in services.items() if one.chosen is not None
        }

    @property
    def drivers(self) -> tuple[LiveDriver[Any, Any], ...]:
        """One driver a policy."""
        return tuple(self._by_name.values())

    @property
    def on_trial(self) -> bool:
        """True while a layout is on trial: other controllers change nothing then."""
        return any(getattr(driver.state, "trying", None) is not None for driver in self.drivers)

    async def start(self) -> None:
        """Make the first plans and run them.

        Raises:
            JouleryError: A layout cannot be run.
        """
        for name, driver in self._by_name.items():
            chosen = self._services[name].chosen
            if chosen is not None and chosen.remark:
                self._history.warn(chosen.remark)
            self._history.add_policy(driver.policy)
            await driver.step(unix_s())
            if driver.failure is not None:
                raise driver.failure
            if chosen is not None and chosen.loaded and not hasattr(self._engine, "set_mix"):
                self._history.warn(
                    f"{name}: this engine does not steer requests among loaded variants; if the SLO is "
                    "threatened, it starts other replicas, which takes longer"
                )
            if chosen is not None and loaded_variants(self._engine, name):
                await driver.step(unix_s())  # requests are steered from the first on

    def revise(self, revision: Revision) -> None:
        """Continue with new objectives, or with another policy."""
        one, driver = self._services[revision.setup.name], self._by_name[revision.setup.name]
        one.setup, one.chosen = revision.setup, revision.chosen
        one.profile = one.chosen.predictor.profile
        driven = one.chosen.driven
        if revision.resets_state:
            driver.change(driven)
        else:
            driver.policy = driven
        self._history.add_policy(driven)
        if one.chosen.remark:
            self._history.warn(one.chosen.remark)

    def _limit_queue(self, one: RunningService, seen: Observation, state: Any) -> None:
        """Limit the engine's queue to requests that the leanest variants can still answer in time; in act only.

        In other modes the layout never changes, and nothing the policy would do may reach a client.
        """
        if self._mode is not Mode.ACT or not hasattr(self._engine, "limit_queue"):
            return
        policy = cast("ServicePolicy | AuditedPolicy | TrafficSplit", self._by_name[one.name].policy)
        cast(Admission, self._engine).limit_queue(one.name, policy.queue_limit(state, seen))

    def _driver(self, one: RunningService, chosen: PolicyBinding) -> LiveDriver[Any, Observation]:
        return LiveDriver(
            chosen.driven,
            lambda now_s: self._observe(one, now_s),
            lambda decision: self._act(one, decision),
            watch=lambda seen, step: self._watch(one, seen, step),
            record=self._history.add_decision,
            period_s=self._period_s,
            quick=frozenset({SET_WEIGHTS}) if self._mode is Mode.ACT else None,
            refresh=cast(Copied, self._engine).refresh if hasattr(self._engine, "refresh") else None,
        )

    def _observe(self, one: RunningService, now_s: float) -> Observation:
        observer = ServiceObserver(one.window, self._engine, one.setup.slo, self._grid.at, self._power_w, one.sampling)
        seen = observer.observe(now_s, one.layouts[-1][0] if one.layouts else -math.inf)
        if self._mode is not Mode.ACT:
            # The policy observes its advice as if it were carried out; the latency is of another layout and left out.
            return replace(seen, running=one.advised, latency_s=math.nan, requests=0, loaded=(), occupied_s={})
        driver = self._by_name.get(one.name)
        changing = driver is not None and driver.acting
        return replace(seen, waits_for=self._arbiter.ahead_of(one.name, self._all_wait_for_trial()), changing=changing)

    def _shadow(self, one: RunningService) -> ShadowReplays | None:
        """The shadow replays of a service; None where its baseline is not audited."""
        if self._mode is not Mode.ACT or one.audit is None or one.profile is None:
            return None
        (variant,) = one.audit.baseline.counts
        name = one.name
        return ShadowReplays(
            name,
            variant,
            one.audit.share_ratio,
            one.profile,
            self._engine,
            lambda: self._all_wait_for_trial().get(name, False),
        )

    def _watch(self, one: RunningService, seen: Observation, step: Step[Any]) -> None:
        """Log a step, limit the queue by it, and keep the periods of the baseline that it completed."""
        self._limit_queue(one, seen, step.state)
        self._history.add_step(one.name, seen, step)
        if isinstance(step.state, AuditedState):
            one.tally, latest = step.state.tally, step.state.latest
            if latest is not None and (not one.periods or one.periods[-1] != latest):
                one.periods.append(latest)
        if one.shadow is not None and len(one.periods) < MIN_PERIODS:
            one.shadow.replay(len(backlog_of(self._engine, one.name)))

    def _all_wait_for_trial(self) -> dict[str, bool]:
        """Whether each service that tries layouts is on trial, or waits for a trial."""
        states = {name: driver.state for name, driver in self._by_name.items()}
        return {
            name: state.trying is not None or bool(state.deferred)
            for name, state in states.items()
            if isinstance(state, ServiceState | AuditedState)
        }

    def _power_w(self) -> float:
        return math.nan if self._history.latest is None else self._history.latest.power_w

    async def _act(self, one: RunningService, decision: Decision) -> tuple[str, str]:
        """Carry out a decision; in other modes than act, start the baseline and change nothing after.

        Only one change of replicas runs at a time, because each names the replicas of all services.
        """
        if decision.kind == SET_WEIGHTS:
            cast(Steering, self._engine).set_mix(one.name, VariantMix.of(decision.value))
            return APPLIED, "requests are steered from now on, replicas stay"
        actuator, base = self._actuator(one), cast(PolicyBinding, one.chosen).base
        async with AsyncExitStack() as stack:
            if self._mode is Mode.ACT and decision.kind != KEEP_LAYOUT:
                await self._wake_nodes(actuator, Layout.parse(decision.value), stack)
            await stack.enter_async_context(self._changing)
            if self._mode is Mode.ACT:
                done = await actuator.carry_out(decision)
                if one.sampling is not None and (decision.kind == TRY_LAYOUT or decision.cause == FAMILY):
                    one.sampling.begin(unix_s())
                if decision.kind != KEEP_LAYOUT:
                    one.layouts.append((unix_s(), Layout.parse(decision.value)))
                return done
            detail = f"mode {self._mode}: nothing was changed"
            if not one.layouts:
                detail = f"mode {self._mode}: the baseline runs instead, {await actuator.run(base)}"
                one.layouts.append((unix_s(), base))
        one.advised = Layout.parse(decision.value)
        return ADVISED if self._mode is Mode.ADVISE else SHADOWED, detail

    def _actuator(self, one: RunningService) -> LayoutActuator:
        chosen = one.chosen
        assert chosen is not None  # only services with a policy decide
        return LayoutActuator(
            self._engine,
            one.name,
            one.setup.models,
            one.setup.slice_assignment,
            chosen.loaded if self._mode is Mode.ACT and hasattr(self._engine, "set_mix") else (),
            chosen.replica_bytes,
            chosen.batches,
            chosen.predictor.batch_delay_s,
            self.places,
        )

    async def _wake_nodes(self, actuator: LayoutActuator, layout: Layout, stack: AsyncExitStack) -> None:
        """Wake the nodes that a layout needs; the rest of it runs at once.

        Args:
            actuator: Runs layouts of the service.
            layout: The layout.
            stack: The nodes stay awake until it unwinds.

        Raises:
            JouleryError: A node does not come back.
        """
        if self.places is None:
            return
        specs = actuator.specs(layout)
        await stack.enter_async_context(self.places.sleep.needed(specs))
        asleep = self.places.sleep.on_sleeping(specs)
        if not asleep:
            return
        there = [spec for spec in specs if self.places.sleep.on_sleeping([spec]) == set()]
        if any(spec.service == actuator.service for spec in there):
            async with self._changing:
                await self._engine.apply(there)
        await self.places.sleep.wake(asleep)

    async def settle(self) -> None:
        """Move running layouts to the nodes that come first now, where others are empty; in mode act.

        Raises:
            JouleryError: A node or the engine failed; the layout continues to serve where it was.
        """
        for one in self._services.values():
            if self.places is None or self._mode is not Mode.ACT or self._changing.locked():
                return
            layout = running_layout(self._engine, one.name)
            if layout is None or self._all_wait_for_trial().get(one.name, False):
                continue
            actuator = self._actuator(one)
            if not actuator.is_settled(layout):
                async with AsyncExitStack() as stack:
                    await self._wake_nodes(actuator, layout, stack)
                    await stack.enter_async_context(self._changing)
                    await actuator.run(layout)


@dataclass(frozen=True, slots=True)
class ServiceObserver:
    """Makes the observations of a service's policy.

    Attributes:
        window: Its latest requests.
        engine: What runs.
        slo: The quantile of its SLO is observed.
        g_per_kwh: Intensity at a time; NaN while unknown.
        power_w: Power now; NaN while unknown.
        sampling: The requests since the layout took over, where configurations are tried.
    """

    window: RequestWindow
    engine: Engine
    slo: Slo
    g_per_kwh: Callable[[float], float]
    power_w: Callable[[], float]
    sampling: LiveSample | None = None

    def observe(self, now_s: float, changed_s: float = -math.inf) -> Observation:
        """Make one observation.

        Args:
            now_s: Unix seconds.
            changed_s: When the layout changed: latencies and times of requests that arrived before belong to another
                layout.
        """
        running = running_layout(self.engine, self.window.service)
        sample = None
        if self.sampling is not None:
            self.sampling.watch(running, self.engine.replicas(), now_s)
            sample = self.sampling.sample(self.slo)
        records, pending = self.window.since(now_s), backlog_of(self.engine, self.window.service)
        records = [record for record in records if record.arrival_s >= changed_s]
        latency_s, _, count, served = summarise(records, self.slo)
        arrivals_s = [request.arrival_s for request in pending]
        waiting_s = [request.arrival_s for request in pending if math.isnan(request.start_s)]
        return Observation(
            now_s=now_s,
            g_per_kwh=self.g_per_kwh(now_s),
            rate_rps=self.window.rate_rps(now_s, arrivals_s),
            arrival_rps=self.window.recent_rps(now_s, arrivals_s),
            queued=len(waiting_s),
            oldest_wait_s=max(0.0, now_s - min(waiting_s)) if waiting_s else 0.0,
            latency_s=latency_s,
            requests=count,
            served=served,
            power_w=self.power_w(),
            running=running,
            sample=sample,
            loaded=loaded_variants(self.engine, self.window.service),
            mix=self.engine.mix(self.window.service) if hasattr(self.engine, "mix") else OWN,
            occupied_s=occupied_s(records),
            batched=batched(records),
            tail_latency_s=_tail_latency_s(records, now_s),
            held_s=held_s(pending, self.slo.latency_s, now_s),
        )


def _tail_latency_s(records: Sequence[RequestRecord], now_s: float) -> float:
    answered = [record for record in records if record.outcome is Outcome.OK]
    latencies_s, ended_s = [record.latency_s for record in answered], [record.end_s for record in answered]
    return tail_latency_s(latencies_s, ended_s, now_s)


def backlog_of(engine: Engine, service: str) -> list[QueuedRequest]:
    """Requests of a service that the engine has not answered; none where the engine does not report them."""
    found = cast(Backlog, engine).backlog() if hasattr(engine, "backlog") else ()
    return [request for request in found if request.service == service]


def loaded_variants(engine: Engine, service: str) -> tuple[str, ...]:
    """Variants that every replica of a service has loaded, sorted; none where the engine steers no requests."""
    if not hasattr(engine, "set_mix"):
        return ()
    views = [view for view in engine.replicas() if view.spec.service == service]
    found = [{view.spec.variant, *view.warm} for view in views if view.state is not ReplicaState.DRAINING]
    return tuple(sorted(set.intersection(*found))) if found else ()


def occupied_s(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Mean seconds that an answered request of each variant kept its replica busy; an equal part of its batch's."""
    times_s: dict[str, list[float]] = {}
    for record in records:
        if record.outcome is Outcome.OK and record.end_s > record.start_s:
            times_s.setdefault(record.variant, []).append((record.end_s - record.start_s) / record.batch)
    return {variant: math.fsum(took) / len(took) for variant, took in sorted(times_s.items())}


def held_s(pending: Sequence[QueuedRequest], limit_s: float, now_s: float) -> dict[str, float]:
    """Seconds that a replica has worked on the oldest request of each variant, where longer than a limit."""
    found: dict[str, float] = {}
    for request in pending:
        if request.variant and now_s - request.start_s > limit_s:  # never for one that waits: its start is NaN
            found[request.variant] = max(found.get(request.variant, 0.0), now_s - request.start_s)
    return dict(sorted(found.items()))


def batched(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Mean requests of the batches that each variant answered; none where all were answered one by one."""
    shares: dict[str, list[float]] = {}
    for record in records:
        if record.outcome is Outcome.OK:
            shares.setdefault(record.variant, []).append(1.0 / record.batch)
    found = {variant: len(mine) / math.fsum(mine) for variant, mine in sorted(shares.items())}
    return found if any(size > 1.0 for size in found.values()) else {}
