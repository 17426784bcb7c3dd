"""Clock governors: policies that set a device's clock. The simulator and the live loop drive the same objects.

``MiadGovernor`` is μ-Serve's (ATC'24, Alg. 3): it reacts to observed latencies. ``PredictiveGovernor`` predicts when
each running and queued request finishes at every clock. It sets the clock of least energy, raises it only where that
saves a deadline, and lowers an idle device to its idle clock. It is stepped on every arrival and completion.
``BusyIdleClocks`` is the baseline it must beat: one clock while there is work, another while there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray, readonly
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Policy
from joulery.policies.clocks.lowest_clock import ClockAction, ClockRange, PartitionLatency, miad_step, snap_clock

_PRIOR_ANSWERS = 100
"""Answers in time that :func:`late_budget` counts before the recent ones."""
_SHORT_GUARD = 0.3
"""Share of each SLO kept free while no further answer may be late."""
_LONG = 2.0
"""Length of the request that room is kept for, over the mean length: answers vary about that much."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that runs or waits on a device.

    Attributes:
        deadline_s: Latest end within the SLO.
        slo_s: Its SLO latency, > 0.
        finish_s: Predicted seconds from now to its end at each clock, requests before it included, float64[clocks].
        energy_j: Predicted energy above the idle device of the work left at each clock, J, float64[clocks].
        queued: True while it has not started.
    """

    deadline_s: float
    slo_s: float
    finish_s: FloatArray
    energy_j: FloatArray
    queued: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ArrivalForecast:
    """Predicted load between two steps, for services whose arrivals do not step the governor.

    Attributes:
        tail_ratio: Predicted tail latency over its SLO, the worst of the hosted services, float64[clocks].
        energy_j: Predicted energy of the device over the coming period, J, float64[clocks].
    """

    tail_ratio: FloatArray
    energy_j: FloatArray


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A governor's view of its device.

    Attributes:
        now_s: Time.
        device: Name of the device, for decisions.
        clock_mhz: Present clock.
        waiting: Running and queued requests, in the order of service.
        shortest_slo_s: Shortest SLO among the hosted models; infinity for an empty device.
        partitions: Recent tail latency of each hosted partition, for reactive governors.
        hosted: SLO and mean service time at the highest clock of each hosted model, s; empty where unknown.
        steady: Predicted load until the next step; None where every arrival and completion steps the governor.
        start_s: Predicted seconds until a request that arrives now starts, float64[clocks]; the last ``finish_s`` where
            it is None.
        late_budget: Further answers that may be late within the SLO, by the recent ones (:func:`late_budget`);
            negative once too many were; None where no answers are counted.
        batched: Whether requests share the engine, so that one that arrives slows those that run.
    """

    now_s: float
    device: str
    clock_mhz: float
    waiting: Sequence[Waiting] = ()
    shortest_slo_s: float = float("inf")
    partitions: Sequence[PartitionLatency] = ()
    hosted: Sequence[tuple[float, float]] = ()
    steady: ArrivalForecast | None = None
    start_s: FloatArray | None = None
    late_budget: float | None = None
    batched: bool = False

    @property
    def idle(self) -> bool:
        """True where no request runs or waits and none is predicted."""
        return not self.waiting and self.steady is None


def late_budget(answers: int, late: int, quantile: float) -> float:
    """Further answers that may be late while the share in time stays at the SLO's quantile.

    The answers count as if :data:`_PRIOR_ANSWERS` in time came before them: one late answer out of the first ten is not
    evidence of a breach.

    Args:
        answers, late: Recent answers, and those of them beyond the SLO's latency.
        quantile: Share that must be in time, in (0, 1).
    """
    return (1.0 - quantile) * (answers + _PRIOR_ANSWERS) - late


@dataclass(frozen=True, slots=True)
class GovernorState:
    """State of a governor: since when the device has been overloaded at its highest clock, None when it is not."""

    overloaded_since_s: float | None = None
    scale_out_raised: bool = False


@dataclass(frozen=True, slots=True)
class Overload:
    """Overload rule: a device overloaded at its highest clock asks the operator for another device.

    Attributes:
        patience_s: Uninterrupted overload before the signal ``scale_out`` is raised, once an episode.
    """

    patience_s: float = 3.0

    def watch(
        self, state: GovernorState, view: DeviceView, overloaded: bool, policy: str
    ) -> tuple[GovernorState, tuple[Decision, ...]]:
        """The next state, and the scale-out signal once the overload has lasted."""
        if not overloaded:
            return GovernorState(), ()
        since_s = view.now_s if state.overloaded_since_s is None else state.overloaded_since_s
        if state.scale_out_raised or view.now_s - since_s < self.patience_s:
            return GovernorState(since_s, state.scale_out_raised), ()
        reason = f"deadlines missed at the highest clock for {view.now_s - since_s:.1f} s"
        return GovernorState(since_s, True), (Decision("scale_out", view.device, 1, policy, reason),)


@dataclass(frozen=True, slots=True, eq=False)
class PredictiveGovernor:
    """The clock of least energy, raised only where a higher clock saves a deadline.

    Among the clocks at which the fewest requests miss their deadline it sets the one of least predicted energy. Below
    the voltage knee the backlog must also leave room: a request that arrives next, of any hosted model and twice as
    long as its mean, must still finish within its SLO. Where a queued request is late even at the highest clock, the
    device is overloaded and runs at the highest clock until the queue has drained.

    Before an engine with continuous batching it rises above the knee only while that saves a request and more would be
    late than the SLO still allows, and falls below it only while the recent answers leave room for a late one. The same
    rule for rising holds where latency and power at lower clocks are assumed and not measured; the clock of least
    energy is unknown then, so it runs at the knee while there is work, as ``BusyIdleClocks`` does.

    Attributes:
        clocks_mhz: Supported clocks, ascending.
        guard_ratio: Share of each SLO kept free against prediction error.
        reserve_ratio: Below the knee, share of each SLO kept free for requests that join a batch; elsewhere share of
            the shortest SLO the backlog may take, where the hosted models' service is unknown.
        idle_mhz: Clock of an idle device; the lowest supported one when None.
        knee_mhz: Clock below which the voltage does not fall further; the highest clock when None.
        floor_mhz: Lowest clock while there is work.
        assumed: Whether latency and power at lower clocks are assumed.
        overload: Rule by which another device is requested.

    Raises:
        ConfigError: Clocks are not ascending, or a ratio is out of range.
    """

    clocks_mhz: FloatArray
    guard_ratio: float = 0.05
    reserve_ratio: float = 0.5
    idle_mhz: float | None = None
    knee_mhz: float | None = None
    floor_mhz: float = 0.0
    assumed: bool = False
    overload: Overload = field(default_factory=Overload)
    name: str = "predictive"

    def __post_init__(self) -> None:
        clocks = readonly(self.clocks_mhz, np.float64)
        if len(clocks) == 0 or bool(np.any(np.diff(clocks) <= 0)):
            raise ConfigError("a governor needs ascending clocks", got=str(clocks.tolist()))
        if not (0 <= self.guard_ratio < 1 and self.reserve_ratio > 0):
            raise ConfigError(
                "a governor needs a guard below 1 and a positive reserve",
                got=f"guard {self.guard_ratio}, reserve {self.reserve_ratio}",
            )
        object.__setattr__(self, "clocks_mhz", clocks)

    def initial(self) -> GovernorState:
        """The initial state: no overload."""
        return GovernorState()

    def step(self, state: GovernorState, view: DeviceView, /) -> Step[GovernorState]:
        """Set the clock for the present requests."""
        index, overloaded, why = self._choose(view)
        following, signals = self.overload.watch(state, view, overloaded, self.name)
        wake_s = None
        if overloaded and following.overloaded_since_s is not None and not following.scale_out_raised:
            wake_s = following.overloaded_since_s + self.overload.patience_s
        clock_mhz = float(self.clocks_mhz[index])
        if clock_mhz == view.clock_mhz:
            return Step(following, signals, wake_s)
        return Step(following, (Decision("set_clock", view.device, clock_mhz, self.name, why), *signals), wake_s)

    def _choose(self, view: DeviceView) -> tuple[int, bool, str]:
        """Index of the clock, whether the device is overloaded, and the reason."""
        top = len(self.clocks_mhz) - 1
        if view.idle:
            idle_mhz = self.clocks_mhz[0] if self.idle_mhz is None else self.idle_mhz
            return int(np.searchsorted(self.clocks_mhz, idle_mhz)), False, "no request is running or queued"
        late, overloaded = self._late(view), bool(view.waiting) and self._overloaded(view)
        if (self.assumed or view.batched) and view.steady is None and self._affordable(view):
            best, late_at_knee = self._at_most_knee(view, late), int(self._missed(view)[self._knee])
            where = "at the voltage knee" if best == self._knee else "below the voltage knee, with room"
            return best, overloaded, f"{len(view.waiting)} requests {where}; {late_at_knee} late, which the SLO allows"
        if overloaded:
            return top, True, f"overloaded: {len(view.waiting)} requests, some late even at the highest clock"
        floor_mhz = max(self.floor_mhz, float(self.clocks_mhz[self._knee]) if self.assumed else 0.0)
        usable = (late == late.min()) & (self.clocks_mhz >= min(floor_mhz, self.clocks_mhz[top]))
        energy_j = self._energy_j(view)
        if view.steady is not None:
            in_time = view.steady.tail_ratio <= 1.0 - self.guard_ratio
            if not bool(np.any(usable & in_time)):
                tail = float(view.steady.tail_ratio[top])
                return top, tail > 1.0, f"predicted tail latency is {tail:.0%} of the SLO at the highest clock"
            usable &= in_time
        if view.waiting:
            usable = self._with_room(view, usable)
        best = int(np.argmin(np.where(usable, energy_j, np.inf)))
        return best, False, self._reason(view, best)

    def _late(self, view: DeviceView) -> FloatArray:
        """Rank of each clock by how many requests miss their deadline and, among equals, miss it within the guard."""
        if not view.waiting:
            return np.zeros(len(self.clocks_mhz))
        finish_s = view.now_s + np.array([request.finish_s for request in view.waiting])
        deadline_s = np.array([request.deadline_s for request in view.waiting])[:, None]
        guard_s = self._guard(view) * np.array([request.slo_s for request in view.waiting])[:, None]
        missed, tight = np.sum(finish_s > deadline_s, axis=0), np.sum(finish_s > deadline_s - guard_s, axis=0)
        return np.asarray(missed * (len(view.waiting) + 1) + tight, np.float64)

    @property
    def _knee(self) -> int:
        """Index of the clock at the voltage knee."""
        knee_mhz = self.clocks_mhz[-1] if self.knee_mhz is None else self.knee_mhz
        return int(np.argmin(np.abs(self.clocks_mhz - max(knee_mhz, self.floor_mhz))))

    def _affordable(self, view: DeviceView) -> bool:
        """Whether the knee suffices: the SLO allows those late there or, in a batch, no higher clock saves one."""
        if view.late_budget is None:
            return False
        missed = self._missed(view)
        if not view.batched:
            return bool(missed[self._knee] <= max(view.late_budget, 0.0))
        if missed[self._knee] <= missed[-1]:
            return True
        return view.late_budget >= 0.0 and bool(missed[self._knee] <= math.ceil(view.late_budget))

    def _at_most_knee(self, view: DeviceView, late: FloatArray) -> int:
        """The knee; with measured curves the clock of least energy below it at which nothing is late."""
        if self.assumed:
            return self._knee
        number, floor_mhz = np.arange(len(self.clocks_mhz)), min(self.floor_mhz, float(self.clocks_mhz[self._knee]))
        below = (late == 0) & (number <= self._knee) & (self.clocks_mhz >= floor_mhz)
        below[self._knee] = True
        roomy = self._with_room(view, np.asarray(below, np.bool_)) if view.waiting else below
        return int(np.argmin(np.where(roomy, self._energy_j(view), np.inf)))

    def _guard(self, view: DeviceView) -> float:
        """Share of the SLO kept free: more of it once the recent answers leave no room for late ones."""
        if view.late_budget is None or not (self.assumed or view.batched):
            return self.guard_ratio
        short = min(max(1.0 - view.late_budget, 0.0), 1.0)
        return self.guard_ratio + short * max(_SHORT_GUARD - self.guard_ratio, 0.0)

    def _missed(self, view: DeviceView) -> FloatArray:
        """Number of requests that miss their deadline at each clock, or end too close to it for the recent answers."""
        finish_s = view.now_s + np.array([request.finish_s for request in view.waiting])
        guard_s = (self._guard(view) - self.guard_ratio) * np.array([request.slo_s for request in view.waiting])
        deadline_s = np.array([request.deadline_s for request in view.waiting]) - guard_s
        return np.asarray(np.sum(finish_s > deadline_s[:, None], axis=0), np.float64)

    def _overloaded(self, view: DeviceView) -> bool:
        """Whether a queued request is late at the highest clock; one that runs may be long by itself."""
        return any(
            request.queued and view.now_s + request.finish_s[-1] > request.deadline_s for request in view.waiting
        )

    def _energy_j(self, view: DeviceView) -> FloatArray:
        energy_j = np.zeros(len(self.clocks_mhz))
        for request in view.waiting:
            energy_j = energy_j + request.energy_j
        return energy_j if view.steady is None else energy_j + view.steady.energy_j

    def _with_room(self, view: DeviceView, usable: BoolArray) -> BoolArray:
        """The usable clocks that leave room for the next arrival; clocks from the knee up need not leave any."""
        start_s = view.start_s if view.start_s is not None else view.waiting[-1].finish_s
        from_knee = np.arange(len(self.clocks_mhz)) >= self._knee
        room = start_s <= self._room_s(view)
        if view.batched:
            room &= self._reserved(view) & (view.late_budget is None or view.late_budget >= 1.0)
        roomy = usable & (room | from_knee)
        return roomy if bool(np.any(roomy)) else usable

    def _reserved(self, view: DeviceView) -> BoolArray:
        """The clocks at which every request leaves the reserve of its SLO to those that will join the batch."""
        spare_s = np.array([each.deadline_s - view.now_s - self.reserve_ratio * each.slo_s for each in view.waiting])
        finish_s = np.array([each.finish_s for each in view.waiting])
        return np.asarray(np.all(finish_s <= spare_s[:, None], axis=0), np.bool_)

    def _room_s(self, view: DeviceView) -> float:
        """Time that the next arrival may wait."""
        if not view.hosted:
            return self.reserve_ratio * view.shortest_slo_s
        return min((1.0 - self.guard_ratio) * slo_s - _LONG * service_s for slo_s, service_s in view.hosted)

    def _reason(self, view: DeviceView, best: int) -> str:
        if view.waiting:
            last_s = float(max(request.finish_s[best] for request in view.waiting))
            return f"{len(view.waiting)} requests finish in {last_s:.3g} s, least energy within the SLO"
        assert view.steady is not None
        return f"no request waits; predicted tail at {float(view.steady.tail_ratio[best]):.0%} of the SLO, least energy"


@dataclass(frozen=True, slots=True)
class MiadGovernor:
    """μ-Serve's governor: multiplicative increase, additive decrease on observed tail latencies, once a period.

    Attributes:
        limits: Clock range, step and guard.
        supported_mhz: Clocks to snap to, never below the request; empty to set any clock.
        literal: Follow the pseudo-code's loop.
        overload: Rule by which another device is requested.
    """

    limits: ClockRange = field(default_factory=ClockRange)
    supported_mhz: tuple[float, ...] = ()
    literal: bool = False
    overload: Overload = field(default_factory=Overload)
    name: str = "miad"

    def initial(self) -> GovernorState:
        """The initial state: no overload."""
        return GovernorState()

    def step(self, state: GovernorState, view: DeviceView, /) -> Step[GovernorState]:
        """One period of Alg. 3."""
        action, clock_mhz = miad_step(view.clock_mhz, view.partitions, self.limits, literal=self.literal)
        if self.supported_mhz:
            clock_mhz = snap_clock(clock_mhz, self.supported_mhz)
        stuck = action is ClockAction.UP and view.clock_mhz >= self.limits.max_mhz
        following, signals = self.overload.watch(state, view, stuck, self.name)
        if clock_mhz == view.clock_mhz:
            return Step(following, signals)
        slack = min((partition.slack_ratio for partition in view.partitions), default=1.0)
        reason = f"{action}: least slack {slack:.0%} of the SLO"
        return Step(following, (Decision("set_clock", view.device, clock_mhz, self.name, reason), *signals))


@dataclass(frozen=True, slots=True)
class FixedClock:
    """A baseline of one clock, set once."""

    clock_mhz: float
    name: str = "fixed"

    def initial(self) -> GovernorState:
        """The initial state; this governor does not use it."""
        return GovernorState()

    def step(self, state: GovernorState, view: DeviceView, /) -> Step[GovernorState]:
        """Keep the clock."""
        if view.clock_mhz == self.clock_mhz:
            return Step(state)
        return Step(state, (Decision("set_clock", view.device, self.clock_mhz, self.name, "a fixed clock"),))


@dataclass(frozen=True, slots=True)
class BusyIdleClocks:
    """A baseline of two clocks: one while requests run or wait, one while the device is idle.

    With the highest clock as ``busy_mhz`` it races to idle; with the voltage knee it is the rule to beat.
    """

    busy_mhz: float
    idle_mhz: float
    name: str = "busy-idle"

    def initial(self) -> GovernorState:
        """The initial state; this governor does not use it."""
        return GovernorState()

    def step(self, state: GovernorState, view: DeviceView, /) -> Step[GovernorState]:
        """Set the busy or the idle clock."""
        clock_mhz, why = (self.idle_mhz, "idle") if view.idle else (self.busy_mhz, "busy")
        if view.clock_mhz == clock_mhz:
            return Step(state)
        return Step(state, (Decision("set_clock", view.device, clock_mhz, self.name, why),))


@dataclass(frozen=True, slots=True, eq=False)
class AboveKnee:
    """Wraps another governor to keep the clock at or above the voltage knee unless the device is idle.

    Below the knee the voltage does not fall any more: the same work takes longer at the same voltage, so it costs no
    less, and the board burns its static power for longer.

    Attributes:
        inner: The governor.
        clocks_mhz: Supported clocks, ascending.
        knee_mhz: Clock at which the voltage begins to rise.
    """

    inner: Policy[GovernorState, DeviceView]
    clocks_mhz: FloatArray
    knee_mhz: float

    @property
    def name(self) -> str:
        """Name of the inner governor."""
        return str(getattr(self.inner, "name", "governor"))

    def initial(self) -> GovernorState:
        """The initial state of the inner governor."""
        return self.inner.initial()

    def step(self, state: GovernorState, view: DeviceView, /) -> Step[GovernorState]:
        """The inner governor's decision, raised to the knee while there is work."""
        step = self.inner.step(state, view)
        if view.idle and not any(partition.latency_s > 0 for partition in view.partitions):
            return step
        floor_mhz = snap_clock(self.knee_mhz, self.clocks_mhz.tolist())
        wanted = [float(decision.value) for decision in step.decisions if decision.kind == "set_clock"]
        clock_mhz = wanted[-1] if wanted else view.clock_mhz
        if clock_mhz >= floor_mhz:
            return step
        others = tuple(decision for decision in step.decisions if decision.kind != "set_clock")
        if view.clock_mhz == floor_mhz:
            return replace(step, decisions=others)
        chosen = next((decision.reason for decision in step.decisions if decision.kind == "set_clock"), "there is work")
        reason = f"{chosen}; not below the voltage knee at {self.knee_mhz:g} MHz"
        raised = Decision("set_clock", view.device, floor_mhz, self.name, reason)
        return replace(step, decisions=(raised, *others))
