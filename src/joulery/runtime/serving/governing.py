"""A governor on a live device: once a period, what waits and what comes becomes a clock, logged with its reason.

Nothing is set unless the site's mode is act; then every clock is on loan, and given back when the session ends or dies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from joulery.config.site import Mode
from joulery.domain.arrays import FloatArray
from joulery.domain.decisions import Decision, Step
from joulery.domain.device import ClockSetting
from joulery.domain.engine import Outcome, QueuedRequest
from joulery.domain.ports import Backlog, Engine
from joulery.perf.clock_scaling import above_idle_ratio, slowdown_ratio, tail_s
from joulery.policies.clocks import PartitionLatency
from joulery.policies.governor import DeviceView, GovernorState, Steady, Waiting
from joulery.runtime.compose.clocks import GovernedClock
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.serving.drive import ADVISED, APPLIED, SHADOWED, LiveDriver
from joulery.runtime.serving.hosted import Hosted

CLOCK_STEP = "clock_step"
"""The kind of log line that holds what a governor saw."""
_TAIL_S = 10.0
_TAIL_COUNT = 20
"""p99 of the last ten seconds or twenty answers, whichever holds more (μ-Serve, section 3.4, as specified)."""
_TAIL_QUANTILE = 0.99


@dataclass(frozen=True, slots=True)
class Work:
    """What one service's requests take at full clock.

    Attributes:
        service_s, own_tail_s: Mean of the service time, and its quantile of the SLO, s.
        energy_j: Joules above idle a request.
        servers: Requests served at once.
        rate_rps: Arrivals lately, 1/s; 0 when there are none.
    """

    service_s: float
    own_tail_s: float
    energy_j: float
    servers: int
    rate_rps: float


@dataclass(slots=True, eq=False)
class ClockKeeper:
    """Sees, decides and sets for one device.

    Attributes:
        clock: The device and its governor.
        hosted: The services whose promises it keeps; asked anew each time.
        engine: What answers their requests.
        mode: How far it may go.
        holder: Lends the device; None where nothing is set.
        pinned: True while a trial runs: a clock that moves would spoil it.
        advised_mhz: What was decided last where that is not carried out.
    """

    clock: GovernedClock
    hosted: Callable[[], Sequence[Hosted]]
    engine: Engine
    mode: Mode
    holder: LeaseHolder | None
    pinned: Callable[[], bool] = lambda: False
    advised_mhz: float | None = None
    _slowdown: FloatArray = field(init=False)
    _above_idle: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self._slowdown = slowdown_ratio(self.clock.clocks_mhz)
        self._above_idle = above_idle_ratio(self.clock.clocks_mhz)

    def driver(self, log: Callable[..., None], record: Callable[[Any], None]) -> LiveDriver[GovernorState, DeviceView]:
        """What steps the governor.

        Args:
            log: Writes a line of the run's log: its kind, and fields.
            record: Takes each decision with its outcome.
        """
        return LiveDriver(
            self.clock.policy,
            self.look,
            self.act,
            watch=lambda view, step: log(CLOCK_STEP, **_entry(view, step, self.clock)),
            record=record,
            period_s=self.clock.config.period_s,
        )

    def look(self, now_s: float) -> DeviceView:
        """What waits, what comes, and how late the latest answers were."""
        named = self.clock.config.services
        services = [one for one in self.hosted() if not named or one.name in named]
        work = {one.name: work_of(one, self.engine, now_s) for one in services}
        queued = [request for request in _backlog(self.engine) if request.service in work]
        slos = {one.name: one.setup.slo for one in services}
        waiting = tuple(
            self._waiting(request, work[request.service], slos[request.service].latency_s, now_s) for request in queued
        )
        return DeviceView(
            now_s=now_s,
            device=self.clock.name,
            clock_mhz=self._clock_mhz(),
            waiting=waiting,
            shortest_slo_s=min((slo.latency_s for slo in slos.values()), default=math.inf),
            partitions=tuple(self._partition(one, queued, now_s) for one in services),
            hosted=tuple((slos[name].latency_s, each.service_s) for name, each in work.items()),
            steady=self._steady(services, work),
        )

    async def act(self, decision: Decision) -> tuple[str, str]:
        """Set a clock, on loan; in other modes than act, remember what would have been set."""
        if decision.kind != "set_clock":
            return ADVISED, "joulery starts no further device by itself"
        if self.pinned():
            return ADVISED, "pinned while a layout is on trial: nothing was changed"
        clock_mhz = float(decision.value)
        if self.mode is not Mode.ACT or self.holder is None:
            self.advised_mhz = clock_mhz
            return ADVISED if self.mode is Mode.ADVISE else SHADOWED, f"mode {self.mode}: nothing was changed"
        done = await asyncio.to_thread(
            self.holder.set, self.clock.device, self.clock.spec, ClockSetting(clock_mhz), decision.reason
        )
        return APPLIED, str(done)

    def _clock_mhz(self) -> float:
        """The clock in force, among those that may be chosen; what was advised where advice is not carried out."""
        highest = float(self.clock.clocks_mhz[-1])
        if self.mode is not Mode.ACT:
            return highest if self.advised_mhz is None else self.advised_mhz
        set_mhz = self.clock.device.observe().setting.clock_mhz
        if set_mhz is None:
            return highest
        index = int(np.searchsorted(self.clock.clocks_mhz, set_mhz - 1e-6))
        return float(self.clock.clocks_mhz[min(index, len(self.clock.clocks_mhz) - 1)])

    def _waiting(self, request: QueuedRequest, work: Work, slo_s: float, now_s: float) -> Waiting:
        """A request; replicas side by side work off the queue so many times faster."""
        done_s = 0.0 if math.isnan(request.start_s) else now_s - request.start_s
        left = max(1.0 - done_s / work.service_s, 0.02) if work.service_s > 0 else 1.0
        return Waiting(
            deadline_s=request.arrival_s + slo_s,
            slo_s=slo_s,
            remaining_s=left * work.service_s / work.servers * self._slowdown,
            energy_j=left * work.energy_j * self._above_idle * self._slowdown,
        )

    def _steady(self, services: Sequence[Hosted], work: dict[str, Work]) -> Steady | None:
        """What comes until the next step; None where nothing arrives. Services share their device's time."""
        arriving = [one for one in services if work[one.name].rate_rps > 0]
        if not arriving:
            return None
        busy = sum(work[one.name].rate_rps * work[one.name].service_s / work[one.name].servers for one in arriving)
        tails = []
        for one in arriving:
            mine, slo = work[one.name], one.setup.slo
            others = busy - mine.rate_rps * mine.service_s / mine.servers
            rate = mine.rate_rps + others * mine.servers / mine.service_s
            own_s = mine.own_tail_s * self._slowdown
            tails.append(
                tail_s(mine.service_s * self._slowdown, own_s, rate, mine.servers, slo.quantile) / slo.latency_s
            )
        watts = sum(work[one.name].rate_rps * work[one.name].energy_j for one in arriving)
        energy_j = watts * self.clock.config.period_s * self._above_idle * self._slowdown
        return Steady(np.max(tails, axis=0), energy_j)

    def _partition(self, one: Hosted, queued: Sequence[QueuedRequest], now_s: float) -> PartitionLatency:
        """How late the latest answers were; what waits counts with its age."""
        answered = [record for record in one.window.since(now_s) if record.outcome is Outcome.OK]
        recent = [record.latency_s for record in answered if record.end_s >= now_s - _TAIL_S]
        samples = recent if len(recent) >= _TAIL_COUNT else [record.latency_s for record in answered[-_TAIL_COUNT:]]
        ages = [now_s - request.arrival_s for request in queued if request.service == one.name]
        if not ages and not recent:
            samples = []
        tail = float(np.quantile(samples, _TAIL_QUANTILE)) if samples else 0.0
        return PartitionLatency(one.setup.slo.latency_s, max([tail, *ages]), 1.0)


def work_of(one: Hosted, engine: Engine, now_s: float) -> Work:
    """What a service's requests take at full clock, by its profile; by its latest answers where it has none."""
    running = [view for view in engine.replicas() if view.spec.service == one.name and not view.spec.standby]
    rate_rps = one.window.rate_rps(now_s)
    recent = [record for record in one.window.since(now_s) if record.outcome is Outcome.OK]
    if math.isnan(rate_rps):
        rate_rps = one.rate_rps if recent else 0.0
    servers = max(1, len(running))
    if one.profile is not None and running:
        entries = [one.profile.entry(view.spec.variant, view.spec.slice) for view in running]
        speed = np.array([1.0 / entry.loaded.mean_s for entry in entries])
        share = speed / speed.sum()
        return Work(
            service_s=len(entries) / float(speed.sum()),
            own_tail_s=float(share @ [entry.loaded.quantile_s(one.setup.slo.quantile) for entry in entries]),
            energy_j=float(share @ [entry.energy_j for entry in entries]),
            servers=servers,
            rate_rps=rate_rps,
        )
    if not recent:
        return Work(one.setup.slo.latency_s, one.setup.slo.latency_s, 0.0, servers, rate_rps)
    times = np.array([record.service_s for record in recent])
    return Work(float(times.mean()), float(np.quantile(times, one.setup.slo.quantile)), 0.0, servers, rate_rps)


def _backlog(engine: Engine) -> tuple[QueuedRequest, ...]:
    """What an engine has not answered yet; nothing where it does not tell."""
    return cast(Backlog, engine).backlog() if hasattr(engine, "backlog") else ()


def _entry(view: DeviceView, step: Step[GovernorState], clock: GovernedClock) -> dict[str, Any]:
    """A line of the log: what was seen, in short, and what was decided."""
    steady = view.steady
    at = int(np.searchsorted(clock.clocks_mhz, view.clock_mhz))
    tail = None if steady is None else float(steady.tail_ratio[min(at, len(clock.clocks_mhz) - 1)])
    return {
        "t_s": view.now_s,
        "device": view.device,
        "clock_mhz": view.clock_mhz,
        "waiting": len(view.waiting),
        "tail_ratio": tail if tail is not None and math.isfinite(tail) else None,
        "slack_ratio": min((partition.slack_ratio for partition in view.partitions), default=None),
        "decisions": [[one.kind, one.value, one.reason] for one in step.decisions],
    }
