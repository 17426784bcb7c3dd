"""A governor on a live device: once a period, what waits and what comes becomes a clock, logged with its reason.

Nothing is set unless the site's mode is act; then every clock is on loan, and given back when the session ends or dies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from joulery.config.devices import ClockConfig
from joulery.config.site import Mode
from joulery.domain.arrays import FloatArray
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.device import ClockSetting, DeviceSpec
from joulery.domain.ports import Device, Policy
from joulery.perf.power.clock_scaling import above_idle_ratio, slowdown_ratio, tail_s
from joulery.policies.clocks.governor import ArrivalForecast, DeviceView, GovernorState, Waiting
from joulery.policies.clocks.lowest_clock import PartitionLatency
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.serving.colocated import ColocatedService, ColocatedServices, Pending, ProgressClock
from joulery.runtime.serving.driver import ADVISED, APPLIED, SHADOWED, LiveDriver

CLOCK_STEP = "clock_step"
"""The kind of log line that holds what a governor saw."""
_TAIL_S = 10.0
_TAIL_COUNT = 20
"""p99 of the last ten seconds or twenty answers, whichever holds more (μ-Serve, section 3.4, as specified)."""
_TAIL_QUANTILE = 0.99
_LEAST_LEFT_RATIO = 0.02
"""What is left at least of a request that runs, as a ratio of what it was expected to take."""


@dataclass(frozen=True, slots=True, eq=False)
class GovernedClock:
    """A device whose clock is governed, and its governor.

    Attributes:
        config: Its section of the site file.
        device: The device.
        spec: How the lease watchdog opens the device.
        name: ``cpu``, ``gpu:0``, ``emulated:0``.
        policy: The governor, kept at or above the voltage knee while the device works.
        clocks_mhz: Clocks the governor may choose, ascending, float64[clocks].
        knee_mhz: Clock below which the voltage does not fall further.
        knee_assumed: True where the knee is scaled from another GPU.
    """

    config: ClockConfig
    device: Device[ClockSetting]
    spec: DeviceSpec
    name: str
    policy: Policy[GovernorState, DeviceView]
    clocks_mhz: FloatArray
    knee_mhz: float
    knee_assumed: bool


@dataclass(slots=True, eq=False)
class ClockController:
    """Sees, decides and sets for one device.

    Attributes:
        clock: The device and its governor.
        residents: Whose promises it keeps; asked anew each time.
        mode: How far it may go.
        holder: Lends the device; None where nothing is set.
        pinned: True while a trial runs: a clock that moves would spoil it.
        work_clock: How much of its work the device has done, slowed down with its clock.
        tell: Told what a person should know.
        advised_mhz: What was decided last where that is not carried out.
    """

    clock: GovernedClock
    residents: ColocatedServices
    mode: Mode
    holder: LeaseHolder | None
    pinned: Callable[[], bool] = lambda: False
    work_clock: ProgressClock = field(default_factory=ProgressClock)
    tell: Callable[[str], None] = lambda text: None
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
        residents = [one for one in self.residents(now_s) if not named or one.name in named]
        clock_mhz = self._seen_mhz()
        waiting: list[tuple[float, Waiting]] = []
        for one in residents:
            turn_s = 0.0
            for each in one.pending:
                # ColocatedServices take turns by arrival, each in an order of its own.
                turn_s = max(turn_s, each.arrival_s)
                waiting.append((turn_s, self._waiting(each, one, now_s)))
        waiting.sort(key=lambda entry: entry[0])
        return DeviceView(
            now_s=now_s,
            device=self.clock.name,
            clock_mhz=clock_mhz,
            waiting=tuple(each for _, each in waiting),
            shortest_slo_s=min((one.slo.latency_s for one in residents), default=math.inf),
            partitions=tuple(_partition(one, now_s) for one in residents),
            hosted=tuple((one.slo.latency_s, one.work.service_s) for one in residents),
            steady=self._steady(residents),
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
        self._seen_mhz()
        return APPLIED, str(done)

    def _seen_mhz(self) -> float:
        """The clock in force, among those that may be chosen; what was advised where advice is not carried out.

        The device's work is counted at the speed of the clock in force from now on.
        """
        clocks = self.clock.clocks_mhz
        if self.mode is not Mode.ACT:
            return float(clocks[-1]) if self.advised_mhz is None else self.advised_mhz
        try:
            set_mhz = self.clock.device.observe().setting.clock_mhz
        except CapabilityError as error:
            # The device is lost, its services may not be: they go on, at a clock that nobody here knows any more.
            self.tell(f"the clock of {self.clock.name} is not known any more: {error}")
            set_mhz = None
        index = len(clocks) - 1 if set_mhz is None else int(np.searchsorted(clocks, set_mhz - 1e-6))
        index = min(index, len(clocks) - 1)
        self.work_clock.run_at(1.0 / float(self._slowdown[index]))
        return float(clocks[index])

    def _waiting(self, request: Pending, one: ColocatedService, now_s: float) -> Waiting:
        """A request; replicas side by side work off the queue so many times faster."""
        done_s = 0.0 if math.isnan(request.start_s) else self.work_clock.rate * (now_s - request.start_s)
        left = max(1.0 - done_s / request.service_s, _LEAST_LEFT_RATIO) if request.service_s > 0 else 1.0
        return Waiting(
            deadline_s=request.arrival_s + one.slo.latency_s,
            slo_s=one.slo.latency_s,
            remaining_s=left * request.service_s / one.work.servers * self._slowdown,
            energy_j=left * request.energy_j * self._above_idle * self._slowdown,
        )

    def _steady(self, residents: Sequence[ColocatedService]) -> ArrivalForecast | None:
        """What comes until the next step; None where nothing arrives. Services share their device's time."""
        arriving = [(one.slo, one.work) for one in residents if one.work.rate_rps > 0]
        if not arriving:
            return None
        busy = sum(work.rate_rps * work.service_s / work.servers for _, work in arriving)
        tails = []
        for slo, mine in arriving:
            others = busy - mine.rate_rps * mine.service_s / mine.servers
            rate = mine.rate_rps + others * mine.servers / mine.service_s
            own_s = mine.own_tail_s * self._slowdown
            tails.append(
                tail_s(mine.service_s * self._slowdown, own_s, rate, mine.servers, slo.quantile) / slo.latency_s
            )
        watts = sum(work.rate_rps * work.energy_j for _, work in arriving)
        energy_j = watts * self.clock.config.period_s * self._above_idle * self._slowdown
        return ArrivalForecast(np.max(tails, axis=0), energy_j)


def _partition(one: ColocatedService, now_s: float) -> PartitionLatency:
    """How late the latest answers were; what waits counts with its age."""
    recent = [answer.latency_s for answer in one.answered if answer.end_s >= now_s - _TAIL_S]
    lately = [answer.latency_s for answer in one.answered[-_TAIL_COUNT:]]
    samples = recent if len(recent) >= _TAIL_COUNT else lately
    ages = [now_s - request.arrival_s for request in one.pending]
    if not ages and not recent:
        samples = []
    tail = float(np.quantile(samples, _TAIL_QUANTILE)) if samples else 0.0
    return PartitionLatency(one.slo.latency_s, max([tail, *ages]), 1.0)


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
