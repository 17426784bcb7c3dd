"""Runs the policy of each service: observes, steps, and has the engine run the layout it chooses."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from joulery.config.site import Mode
from joulery.domain.decisions import Decision
from joulery.domain.errors import ActuationError, JouleryError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.ports import Admission, Backlog, Engine
from joulery.domain.serving.engine import ModelRef, QueuedRequest, ReplicaSpec, ReplicaState
from joulery.domain.serving.service import Slo, SloScope
from joulery.policies.placement.pools.gpu_groups import SliceAssignment
from joulery.policies.serving.messages import short
from joulery.policies.serving.observation import KEEP_LAYOUT, TRY_LAYOUT, Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.state import ServiceState
from joulery.runtime.serving.driver import ADVISED, APPLIED, SHADOWED, LiveDriver
from joulery.runtime.serving.history import SessionHistory
from joulery.runtime.serving.intensity import LiveIntensity
from joulery.runtime.serving.live_sample import LiveSample
from joulery.runtime.serving.requests import RequestWindow, summarise
from joulery.runtime.serving.running_service import PolicyBinding, RunningService

_FLOOD_RPS = 1e12
"""A demand that saturates every layout: its utilisation gives the capacity."""


class TrialArbiter:
    """Lets one service at a time try layouts: two on trial at once would disturb one another's measurements.

    A turn lasts from the first trial to what the service settles on; the others go in the order they asked.
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
    """New objectives of a running service.

    Attributes:
        service: Its name.
        policy: Its policy with the new objectives.
        slo: Its SLO from now on.
    """

    service: str
    policy: ServicePolicy
    slo: Slo


class PolicyControl:
    """One policy a service. Implements :class:`joulery.runtime.serving.session.Control`.

    Args:
        services: The running services by name, each with a policy.
        engine: Runs the layouts.
        history: Records observations, steps and decisions.
        grid: Carbon intensity.
        mode: Layouts change in ``act`` only.
        period_s: Time between two steps.
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
        self._changing, self._arbiter = asyncio.Lock(), TrialArbiter()
        self._limits: dict[str, QueueLimit | None] = {}
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
            await driver.step(time.time())
            if driver.failure is not None:
                raise driver.failure

    def revise(self, revision: Revision) -> None:
        """Go on with new objectives."""
        one = self._services[revision.service]
        assert one.chosen is not None  # revisions are made of services with a policy
        self._by_name[revision.service].policy = revision.policy
        one.setup = replace(one.setup, slo=revision.slo)
        one.chosen = replace(one.chosen, policy=revision.policy)
        self._history.add_policy(revision.policy)
        self._limits.pop(revision.service, None)

    def _limit_queue(self, one: RunningService, arrival_rps: float) -> None:
        """Have the engine refuse requests early while more arrive than the leanest layout can answer; in act only.

        In other modes the layout never changes, and nothing the policy would do may reach a client.
        """
        if self._mode is not Mode.ACT or one.chosen is None or not hasattr(self._engine, "limit_queue"):
            return
        if one.name not in self._limits:
            self._limits[one.name] = queue_limit(one.chosen)
        limit = self._limits[one.name]
        overloaded = limit is not None and arrival_rps > limit.capacity_rps
        cast(Admission, self._engine).limit_queue(one.name, limit.waiting if limit is not None and overloaded else None)

    def _driver(self, one: RunningService, chosen: PolicyBinding) -> LiveDriver[Any, Observation]:
        return LiveDriver(
            chosen.policy,
            lambda now_s: self._observe(one, now_s),
            lambda decision: self._act(one, chosen.base, decision),
            watch=lambda seen, step: self._history.add_step(one.name, seen, step),
            record=self._history.add_decision,
            period_s=self._period_s,
        )

    def _observe(self, one: RunningService, now_s: float) -> Observation:
        observer = ServiceObserver(one.window, self._engine, one.setup.slo, self._grid.at, self._power_w, one.sampling)
        seen = observer.observe(now_s)
        self._limit_queue(one, seen.arrival_rps)
        if self._mode is not Mode.ACT:
            # The policy observes its advice as if it were carried out; the latency is of another layout and left out.
            return replace(seen, running=one.advised, latency_s=math.nan, requests=0)
        return replace(seen, waits_for=self._arbiter.ahead_of(one.name, self._wanting()))

    def _wanting(self) -> dict[str, bool]:
        """Of each service that tries layouts whether it is on trial, or waits for one."""
        states = {name: driver.state for name, driver in self._by_name.items()}
        return {
            name: state.trying is not None or bool(state.deferred)
            for name, state in states.items()
            if isinstance(state, ServiceState)
        }

    def _power_w(self) -> float:
        return math.nan if self._history.latest is None else self._history.latest.power_w

    async def _act(self, one: RunningService, base: Layout, decision: Decision) -> tuple[str, str]:
        """Carry out a decision; in other modes than act, start the baseline and change nothing after.

        One change of replicas at a time: each names the replicas of all services.
        """
        actuator = LayoutActuator(self._engine, one.name, one.setup.models, one.setup.slice_assignment)
        async with self._changing:
            if self._mode is Mode.ACT:
                done = await actuator.carry_out(decision)
                if decision.kind == TRY_LAYOUT and one.sampling is not None:
                    one.sampling.begin(time.time())
                if decision.kind != KEEP_LAYOUT:
                    one.layouts.append((time.time(), Layout.parse(decision.value)))
                return done
            detail = f"mode {self._mode}: nothing was changed"
            if not one.layouts:
                detail = f"mode {self._mode}: the baseline runs instead, {await actuator.run(base)}"
                one.layouts.append((time.time(), base))
        one.advised = Layout.parse(decision.value)
        return ADVISED if self._mode is Mode.ADVISE else SHADOWED, detail


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

    def observe(self, now_s: float) -> Observation:
        """Make one observation."""
        running = running_layout(self.engine, self.window.service)
        sample = None
        if self.sampling is not None:
            self.sampling.watch(running, self.engine.replicas(), now_s)
            sample = self.sampling.sample(self.slo)
        records, pending = self.window.since(now_s), backlog_of(self.engine, self.window.service)
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
        )


def backlog_of(engine: Engine, service: str) -> list[QueuedRequest]:
    """Requests of a service that the engine has not answered; none where the engine does not report them."""
    found = cast(Backlog, engine).backlog() if hasattr(engine, "backlog") else ()
    return [request for request in found if request.service == service]


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """When a service refuses requests, and how many may wait then.

    Attributes:
        capacity_rps: Requests a second of its leanest layout; more arrivals than that overload the service.
        waiting: Requests that this layout answers within the SLO.
    """

    capacity_rps: float
    waiting: int


def queue_limit(chosen: PolicyBinding) -> QueueLimit | None:
    """The limit of a service's queue under overload.

    The leanest layout is the candidate with the largest capacity that reaches the minimum accuracy. None where the SLO
    leaves waiting out, or no candidate reaches the accuracy.
    """
    objectives, predictor = chosen.policy.objectives, chosen.predictor
    if objectives.slo.scope is not SloScope.END_TO_END:
        return None
    capacity_rps, leanest = 0.0, None
    for layout in chosen.policy.candidates:
        saturated = predictor.predict(layout, _FLOOD_RPS)
        here_rps = _FLOOD_RPS / saturated.utilisation_ratio
        if saturated.accuracy_ratio >= objectives.minimum_accuracy_ratio - 1e-9 and here_rps > capacity_rps:
            capacity_rps, leanest = here_rps, layout
    if leanest is None:
        return None
    own_s = max(each.loaded.quantile_s(objectives.slo.quantile) for each in predictor.instances(leanest))
    room_s = max(0.0, objectives.slo.latency_s - own_s)
    return QueueLimit(capacity_rps, max(len(leanest.instances), math.ceil(capacity_rps * room_s)))


def running_layout(engine: Engine, service: str) -> Layout | None:
    """The layout of a service's replicas without those that drain; None where there are none."""
    instances = [
        Instance(view.spec.variant, view.spec.slice)
        for view in engine.replicas()
        if view.spec.service == service and view.state is not ReplicaState.DRAINING
    ]
    return Layout(instances) if instances else None


@dataclass(frozen=True, slots=True)
class LayoutActuator:
    """Has the engine run the layouts that a policy decides on.

    Attributes:
        engine: Runs them.
        service: The service.
        models: What each variant loads.
        slice_assignment: Of each partition of its GPUs, which GPU has which slice; empty on the CPU.
    """

    engine: Engine
    service: str
    models: Mapping[str, ModelRef]
    slice_assignment: SliceAssignment = field(default_factory=dict)

    async def carry_out(self, decision: Decision) -> tuple[str, str]:
        """Carry out one decision; its outcome, and a sentence about what changed.

        Raises:
            JouleryError: The engine could not; the old replicas serve on.
        """
        layout = Layout.parse(decision.value)
        if decision.kind == KEEP_LAYOUT:
            return APPLIED, f"{short(layout)} runs already"
        return APPLIED, await self.run(layout)

    async def run(self, layout: Layout) -> str:
        """Have a layout run; a sentence about what changed.

        Raises:
            ActuationError: The engine could not; which layout serves on is in the message.
            JouleryError: The engine could not, and nothing runs.
        """
        try:
            done = await self.engine.apply(self.specs(layout))
        except JouleryError as error:
            running = running_layout(self.engine, self.service)
            if running is None:
                raise
            undone = (short(layout),)
            raise ActuationError(f"{error}; {short(running)} serves on", rolled_back=undone, hint=error.hint) from error
        return (
            f"{short(layout)} took over after {done.ready_s:.2f} s, {len(done.started)} replicas started, "
            f"{len(done.stopped)} stopped, {done.startup_cpu_s:.2f} CPU seconds"
        )

    def specs(self, layout: Layout) -> list[ReplicaSpec]:
        """The replicas of a layout, one thread a core, and those of every other service as they are."""
        specs = [view.spec for view in self.engine.replicas() if view.state is not ReplicaState.DRAINING]
        running = [spec for spec in specs if spec.service == self.service]
        mine = [
            ReplicaSpec(self.service, item.variant, item.slice, self.models[item.variant], device=device)
            for item, device in zip(layout.instances, self._devices(layout, running), strict=True)
        ]
        return [spec for spec in specs if spec.service != self.service] + mine

    def _devices(self, layout: Layout, running: Sequence[ReplicaSpec]) -> list[str]:
        """The GPU of each instance of a layout, those that run already stay on theirs."""
        if not self.slice_assignment:
            return [""] * len(layout.instances)
        free = Counter(self.slice_assignment[tuple(sorted(layout.slices))])
        there = Counter((spec.variant, spec.slice, spec.device) for spec in running)
        found: dict[int, str] = {}
        for index, item in enumerate(layout.instances):
            stays = [gpu for piece, gpu in free if piece == item.slice and there[item.variant, piece, gpu]]
            if stays:
                found[index] = stays[0]
                there[item.variant, item.slice, stays[0]] -= 1
                free -= Counter([(item.slice, stays[0])])
        for index, item in enumerate(layout.instances):
            if index not in found:
                found[index] = next(gpu for piece, gpu in free if piece == item.slice)
                free -= Counter([(item.slice, found[index])])
        return [found[index] for index in range(len(layout.instances))]
