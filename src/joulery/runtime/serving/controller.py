"""What the policy of a service observes, and how the engine runs the layouts it chooses."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from joulery.domain.decisions import Decision
from joulery.domain.errors import ActuationError, JouleryError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef, Outcome, ReplicaSpec, ReplicaState, RequestRecord
from joulery.domain.serving.service import Slo
from joulery.policies.placement.pools.gpu_groups import Seats
from joulery.policies.serving.messages import short
from joulery.policies.serving.observation import KEEP_LAYOUT, Observation
from joulery.runtime.serving.driver import APPLIED
from joulery.runtime.serving.live_sample import LiveSample


class RequestWindow:
    """The latest requests of one service.

    Args:
        service: The service; records of others are left out.
        span_s: Its length, seconds.
    """

    def __init__(self, service: str, span_s: float) -> None:
        self.service, self.span_s = service, span_s
        self._records: deque[RequestRecord] = deque()
        self._first_s = math.inf

    def add(self, record: RequestRecord) -> None:
        """Add a request that ended."""
        if record.service == self.service:
            self._records.append(record)
            self._first_s = min(self._first_s, record.arrival_s)
            while self._records[0].end_s < record.end_s - self.span_s:
                self._records.popleft()

    def since(self, now_s: float) -> list[RequestRecord]:
        """The requests that ended within ``span_s`` before ``now_s``; older ones are dropped."""
        while self._records and self._records[0].end_s < now_s - self.span_s:
            self._records.popleft()
        return [record for record in self._records if record.end_s >= now_s - self.span_s]

    def rate_rps(self, now_s: float) -> float:
        """Requests a second over the last ``span_s``; NaN before so much time has passed since the first request."""
        if now_s - self._first_s < self.span_s:
            return math.nan
        return len(self.since(now_s)) / self.span_s


def summarise(records: Sequence[RequestRecord], slo: Slo) -> tuple[float, float, int, dict[str, int]]:
    """Latency quantile (NaN for none), share within the SLO (NaN for none), answers, answers by variant."""
    answered = [record for record in records if record.outcome is Outcome.OK]
    if not answered:
        return math.nan, math.nan, 0, {}
    latency_s = np.array([record.latency_s for record in answered])
    served = Counter(record.variant for record in answered)
    return (
        float(np.quantile(latency_s, slo.quantile)),
        float(np.mean(latency_s <= slo.latency_s)),
        len(answered),
        dict(sorted(served.items())),
    )


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
        records = self.window.since(now_s)
        latency_s, _, count, served = summarise(records, self.slo)
        return Observation(
            now_s=now_s,
            g_per_kwh=self.g_per_kwh(now_s),
            rate_rps=self.window.rate_rps(now_s),
            latency_s=latency_s,
            requests=count,
            served=served,
            power_w=self.power_w(),
            running=running,
            sample=sample,
        )


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
        seats: Of each partition of its GPUs, which GPU has which slice; empty on the CPU.
    """

    engine: Engine
    service: str
    models: Mapping[str, ModelRef]
    seats: Seats = field(default_factory=dict)

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
        if not self.seats:
            return [""] * len(layout.instances)
        free = Counter(self.seats[tuple(sorted(layout.slices))])
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
