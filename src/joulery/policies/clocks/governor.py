"""Clock governors: policies that set a device's clock. The simulator and the live loop drive the same objects.

``MiadGovernor`` is μ-Serve's (ATC'24, Alg. 3): it reacts to observed latencies. ``PredictiveGovernor`` predicts when
each running and queued request finishes at every clock. It sets the clock of least energy, raises it only where that
saves a deadline, and lowers an idle device to its idle clock. It is stepped on every arrival and completion.
``BusyIdleClocks`` is the baseline it must beat: one clock while there is work, another while there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray, readonly
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Policy
from joulery.policies.clocks.lowest_clock import ClockAction, ClockRange, PartitionLatency, miad_step, snap_clock

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
    """What a governor sees of its device.

    Attributes:
        now_s: Time.
        device: Name, for the decision.
        clock_mhz: Present clock.
        waiting: Running and queued requests, in the order of service.
        shortest_slo_s: Shortest SLO among the hosted models; infinity for an empty device.
        partitions: Recent tail latency of each hosted partition, for governors that react.
        hosted: SLO and mean service time at the highest clock of each hosted model, s; empty where unknown.
        steady: Predicted load until the next step; None where every arrival and completion steps the governor.
        start_s: Predicted seconds until a request that arrives now starts, float64[clocks]; the last ``finish_s`` where
            it is None.
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

    @property
    def idle(self) -> bool:
        """True where no request runs or waits and none is predicted."""
        return not self.waiting and self.steady is None


@dataclass(frozen=True, slots=True)
class GovernorState:
    """Since when the device has been overloaded at its highest clock; None when it is not."""

    overloaded_since_s: float | None = None
    scale_out_raised: bool = False


@dataclass(frozen=True, slots=True)
class Overload:
    """When a device that is overloaded at its highest clock asks the operator for another device.

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

    Attributes:
        clocks_mhz: Supported clocks, ascending.
        guard_ratio: Share of each SLO kept free against prediction error.
        reserve_ratio: Share of the shortest SLO the backlog may take, where the hosted models' service is unknown.
        idle_mhz: Clock of an idle device; the lowest supported one when None.
        knee_mhz: Clock below which the voltage does not fall further; the highest clock when None.
        floor_mhz: Never below this clock while there is work.
        overload: When to ask for another device.

    Raises:
        ConfigError: Clocks are not ascending, or a ratio is out of range.
    """

    clocks_mhz: FloatArray
    guard_ratio: float = 0.05
    reserve_ratio: float = 0.5
    idle_mhz: float | None = None
    knee_mhz: float | None = None
    floor_mhz: float = 0.0
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
        """No overload."""
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
        late = self._late(view)
        if view.waiting and self._overloaded(view):
            return top, True, f"overloaded: {len(view.waiting)} requests, some late even at the highest clock"
        usable = (late == late.min()) & (self.clocks_mhz >= min(self.floor_mhz, self.clocks_mhz[top]))
        energy_j = self._energy_j(view)
        if view.steady is not None:
            in_time = view.steady.tail_ratio <= 1.0 - self.guard_ratio
            if not bool(np.any(usable & in_time)):
                tail = float(view.steady.tail_ratio[top])
                return top, tail > 1.0, f"predicted tail latency is {tail:.0%} of the SLO at the highest clock"
            usable &= in_time
        if view.waiting:
            usable = self._roomy(view, usable)
        best = int(np.argmin(np.where(usable, energy_j, np.inf)))
        return best, False, self._reason(view, best)

    def _late(self, view: DeviceView) -> FloatArray:
        """Rank of each clock by how many requests miss their deadline and, among equals, miss it within the guard."""
        if not view.waiting:
            return np.zeros(len(self.clocks_mhz))
        finish_s = view.now_s + np.array([request.finish_s for request in view.waiting])
        deadline_s = np.array([request.deadline_s for request in view.waiting])[:, None]
        guard_s = self.guard_ratio * np.array([request.slo_s for request in view.waiting])[:, None]
        missed, tight = np.sum(finish_s > deadline_s, axis=0), np.sum(finish_s > deadline_s - guard_s, axis=0)
        return np.asarray(missed * (len(view.waiting) + 1) + tight, np.float64)

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

    def _roomy(self, view: DeviceView, usable: BoolArray) -> BoolArray:
        """The usable clocks that leave room for the next arrival; those from the knee up need not."""
        start_s = view.start_s if view.start_s is not None else view.waiting[-1].finish_s
        knee_mhz = self.clocks_mhz[-1] if self.knee_mhz is None else self.knee_mhz
        from_knee = np.arange(len(self.clocks_mhz)) >= int(np.argmin(np.abs(self.clocks_mhz - knee_mhz)))
        roomy = usable & ((start_s <= self._room_s(view)) | from_knee)
        return roomy if bool(np.any(roomy)) else usable

    def _room_s(self, view: DeviceView) -> float:
        """How long the next arrival may wait."""
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
        overload: When to ask for another device.
    """

    limits: ClockRange = field(default_factory=ClockRange)
    supported_mhz: tuple[float, ...] = ()
    literal: bool = False
    overload: Overload = field(default_factory=Overload)
    name: str = "miad"

    def initial(self) -> GovernorState:
        """No overload."""
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
    """The baseline: one clock, set once."""

    clock_mhz: float
    name: str = "fixed"

    def initial(self) -> GovernorState:
        """Nothing to remember."""
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
        """Nothing to remember."""
        return GovernorState()

    def step(self, state: GovernorState, view: DeviceView, /) -> Step[GovernorState]:
        """Set the busy or the idle clock."""
        clock_mhz, why = (self.idle_mhz, "idle") if view.idle else (self.busy_mhz, "busy")
        if view.clock_mhz == clock_mhz:
            return Step(state)
        return Step(state, (Decision("set_clock", view.device, clock_mhz, self.name, why),))


@dataclass(frozen=True, slots=True, eq=False)
class AboveKnee:
    """Another governor, kept at or above the voltage knee unless the device is idle.

    Below the knee the voltage does not fall any more: the same work takes longer at the same voltage, so it costs no
    less, and the board burns its static power for longer.

    Attributes:
        inner: The governor.
        clocks_mhz: Supported clocks, ascending.
        knee_mhz: Where the voltage begins to rise.
    """

    inner: Policy[GovernorState, DeviceView]
    clocks_mhz: FloatArray
    knee_mhz: float

    @property
    def name(self) -> str:
        """The inner governor's."""
        return str(getattr(self.inner, "name", "governor"))

    def initial(self) -> GovernorState:
        """The inner governor's."""
        return self.inner.initial()

    def step(self, state: GovernorState, view: DeviceView, /) -> Step[GovernorState]:
        """What the inner governor decides, raised to the knee while there is work."""
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
        said = next((decision.reason for decision in step.decisions if decision.kind == "set_clock"), "there is work")
        reason = f"{said}; not below the voltage knee at {self.knee_mhz:g} MHz"
        raised = Decision("set_clock", view.device, floor_mhz, self.name, reason)
        return replace(step, decisions=(raised, *others))
