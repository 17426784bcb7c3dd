"""A governor on a live device: observes its requests, decides on a clock, sets it, and logs the reason.

The governor is stepped once a period, and at once when a request of a language model arrives or ends. Nothing is set
unless the site's mode is act; then every clock is leased, and reverted when the session ends or dies.
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
from joulery.perf.power.clock_scaling import tail_s
from joulery.policies.clocks.governor import ArrivalForecast, DeviceView, GovernorState
from joulery.policies.clocks.lowest_clock import PartitionLatency
from joulery.policies.clocks.observation import ClockCurves, ColocatedService, pending_requests
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.serving.plans.colocated import ColocatedServices
from joulery.runtime.session.driver import ADVISED, APPLIED, SHADOWED, LiveDriver
from joulery.runtime.session.progress_clock import ProgressClock

CLOCK_STEP = "clock_step"
"""Kind of the log entries with a governor's observations."""
_TAIL_S = 10.0
_TAIL_COUNT = 20
"""p99 of the last ten seconds or twenty answers, whichever holds more (μ-Serve, section 3.4, as specified)."""
_TAIL_QUANTILE = 0.99


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
        curves: How work depends on its clock; assumed where no profile is stated.
    """

    config: ClockConfig
    device: Device[ClockSetting]
    spec: DeviceSpec
    name: str
    policy: Policy[GovernorState, DeviceView]
    clocks_mhz: FloatArray
    knee_mhz: float
    knee_assumed: bool
    curves: ClockCurves


@dataclass(slots=True, eq=False)
class ClockController:
    """Observes, governs and sets one device's clock.

    Attributes:
        clock: The device and its governor.
        residents: The services of the device; called at each step.
        mode: Whether decisions are carried out.
        holder: Holds the lease of the device; None where nothing is set.
        pinned: True while a trial runs, during which the clock must not change.
        work_clock: Work that the device has done; slower while its clock is low.
        tell: Receives messages for the operator.
        advised_mhz: Latest decision where decisions are not carried out.
        poke: Steps the governor now: a request of the device has arrived or ended.
    """

    clock: GovernedClock
    residents: ColocatedServices
    mode: Mode
    holder: LeaseHolder | None
    pinned: Callable[[], bool] = lambda: False
    work_clock: ProgressClock = field(default_factory=ProgressClock)
    tell: Callable[[str], None] = lambda text: None
    advised_mhz: float | None = None
    poke: Callable[[], None] = lambda: None
    _slowdown: FloatArray = field(init=False)
    _curves: ClockCurves = field(init=False)
    _driver: LiveDriver[GovernorState, DeviceView] | None = None

    def __post_init__(self) -> None:
        self._curves = self.clock.curves
        self._slowdown = self._curves.slowdown(1.0)

    def rebound(self, clock: GovernedClock) -> None:
        """Govern the same device within other bounds from now on; the governor is stepped at once."""
        self.clock = clock
        self.__post_init__()
        if self._driver is not None:
            self._driver.change(clock.policy)
            self._driver.poke()

    def driver(self, log: Callable[..., None], record: Callable[[Any], None]) -> LiveDriver[GovernorState, DeviceView]:
        """The driver of the governor.

        Args:
            log: Writes a line of the run's log: its kind, and fields.
            record: Receives each decision with its outcome.
        """
        driver = LiveDriver(
            self.clock.policy,
            self.look,
            self.act,
            watch=lambda view, step: log(CLOCK_STEP, **_entry(view, step, self.clock)),
            record=record,
            period_s=self.clock.config.period_s,
        )
        self.poke, self._driver = driver.poke, driver
        return driver

    def look(self, now_s: float) -> DeviceView:
        """The requests of the device, their predicted ends at each clock, and recent latencies."""
        named = self.clock.config.services
        residents = [one for one in self.residents(now_s) if not named or one.name in named]
        clock_mhz = self._seen_mhz()
        waiting, start_s = pending_requests(residents, now_s, self._curves, self.work_clock.rate)
        budgets = [one.late_budget for one in residents if one.late_budget is not None]
        return DeviceView(
            now_s=now_s,
            device=self.clock.name,
            clock_mhz=clock_mhz,
            waiting=waiting,
            shortest_slo_s=min((one.slo.latency_s for one in residents), default=math.inf),
            partitions=tuple(_partition(one, now_s) for one in residents),
            hosted=tuple((one.slo.latency_s, one.work.service_s) for one in residents),
            steady=self._steady([one for one in residents if not one.eventful]),
            start_s=start_s,
            late_budget=min(budgets, default=None),
            batched=any(one.batch is not None and one.batch.capacity > 1 for one in residents),
        )

    async def act(self, decision: Decision) -> tuple[str, str]:
        """Set a clock, leased; in modes other than act, keep the decision."""
        if decision.kind != "set_clock":
            return ADVISED, "another device is needed; joulery starts none by itself"
        if self.pinned():
            return ADVISED, "a layout is on trial: the clock stays"
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
        """The clock in force, among the supported ones; the advised one where decisions are not carried out.

        From now on the device's work is counted at the speed of that clock.
        """
        clocks = self.clock.clocks_mhz
        if self.mode is not Mode.ACT:
            return float(clocks[-1]) if self.advised_mhz is None else self.advised_mhz
        try:
            set_mhz = self.clock.device.observe().setting.clock_mhz
        except CapabilityError as error:
            # The device is lost; its services may go on, at an unknown clock.
            self.tell(f"the clock of {self.clock.name} is unknown: {error}")
            set_mhz = None
        index = len(clocks) - 1 if set_mhz is None else int(np.searchsorted(clocks, set_mhz - 1e-6))
        index = min(index, len(clocks) - 1)
        self.work_clock.run_at(1.0 / float(self._slowdown[index]))
        return float(clocks[index])

    def _steady(self, residents: Sequence[ColocatedService]) -> ArrivalForecast | None:
        """Predicted load until the next step; None where nothing arrives. Services share their device's time."""
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
        energy_j = watts * self.clock.config.period_s * self._curves.above_idle * self._slowdown
        return ArrivalForecast(np.max(tails, axis=0), energy_j)


def _partition(one: ColocatedService, now_s: float) -> PartitionLatency:
    """Tail latency of the latest answers; a waiting request counts with its age."""
    recent = [answer.latency_s for answer in one.answered if answer.end_s >= now_s - _TAIL_S]
    lately = [answer.latency_s for answer in one.answered[-_TAIL_COUNT:]]
    samples = recent if len(recent) >= _TAIL_COUNT else lately
    ages = [now_s - request.arrival_s for request in one.pending]
    if not ages and not recent:
        samples = []
    tail = float(np.quantile(samples, _TAIL_QUANTILE)) if samples else 0.0
    return PartitionLatency(one.slo.latency_s, max([tail, *ages]), 1.0)


def _entry(view: DeviceView, step: Step[GovernorState], clock: GovernedClock) -> dict[str, Any]:
    """A line of the log: the observation in short, and the decisions."""
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
