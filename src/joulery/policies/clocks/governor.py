"""Clock governors as policies: one object a device, driven alike by the simulator and the live loop.

``MiadGovernor`` is μ-Serve's (ATC'24, Alg. 3): it reacts to latencies that have happened. ``PredictiveGovernor`` is
ours: it knows what waits and how long each request would take at every clock, so it sets the clock that spends the
least energy while everything that waits still meets its deadline, falls to the idle clock when nothing runs, and is
stepped on every arrival and completion rather than once a second. Fed with an upper quantile of each request's length
rather than its mean, it errs on the side of the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.domain.arrays import FloatArray, readonly
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ConfigError
from joulery.domain.ports import Policy
from joulery.policies.clocks.lowest_clock import ClockAction, ClockRange, PartitionLatency, miad_step, snap_clock

_LONG = 2.0
"""How much longer than the mean the request is that room is kept for: lengths of answers spread about that far."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that runs or waits on a device.

    Attributes:
        deadline_s: When it must be answered.
        slo_s: Its whole latency allowance, > 0.
        remaining_s: Predicted remaining service time at each clock of the device, s.
        energy_j: Predicted energy above the idle board of that work at each clock, J.
    """

    deadline_s: float
    slo_s: float
    remaining_s: FloatArray
    energy_j: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class ArrivalForecast:
    """What each clock would mean if requests go on arriving as they did lately.

    A governor that is stepped once a period sees the queue at instants only; this tells it what comes between them.

    Attributes:
        tail_ratio: Predicted tail latency over its allowance, the worst of the hosted services, float64[clocks].
        energy_j: Predicted energy of the device over the coming period, J, float64[clocks].
    """

    tail_ratio: FloatArray
    energy_j: FloatArray


@dataclass(frozen=True, slots=True)
class DeviceView:
    """All a governor sees of its device.

    Attributes:
        now_s: Time.
        device: Name, for the decision.
        clock_mhz: Present clock.
        waiting: What runs and waits, in the order it will be served.
        shortest_slo_s: The shortest SLO among the models it hosts; infinity for an empty device.
        partitions: Recent tail latency of each hosted partition, for governors that react.
        hosted: SLO and mean service time at the highest clock of each hosted model, s; empty where it is not known.
        steady: What comes until the next step; None where a governor is stepped on every arrival and completion, and
            where nothing arrives.
    """

    now_s: float
    device: str
    clock_mhz: float
    waiting: Sequence[Waiting] = ()
    shortest_slo_s: float = float("inf")
    partitions: Sequence[PartitionLatency] = ()
    hosted: Sequence[tuple[float, float]] = ()
    steady: ArrivalForecast | None = None

    @property
    def idle(self) -> bool:
        """True where nothing runs, waits or arrives."""
        return not self.waiting and self.steady is None


@dataclass(frozen=True, slots=True)
class GovernorState:
    """What a governor remembers: since when the device has been too slow at its highest clock; None when it is not."""

    overloaded_since_s: float | None = None
    scale_out_raised: bool = False


@dataclass(frozen=True, slots=True)
class Overload:
    """When a device that cannot keep up at its highest clock asks for help.

    Attributes:
        patience_s: Uninterrupted overload before the scale-out signal is raised, once an episode.
    """

    patience_s: float = 3.0

    def watch(
        self, state: GovernorState, view: DeviceView, overloaded: bool, policy: str
    ) -> tuple[GovernorState, tuple[Decision, ...]]:
        """The next state, and the scale-out signal when its time has come."""
        if not overloaded:
            return GovernorState(), ()
        since_s = view.now_s if state.overloaded_since_s is None else state.overloaded_since_s
        if state.scale_out_raised or view.now_s - since_s < self.patience_s:
            return GovernorState(since_s, state.scale_out_raised), ()
        reason = f"deadlines missed at the highest clock for {view.now_s - since_s:.1f} s"
        return GovernorState(since_s, True), (Decision("scale_out", view.device, 1, policy, reason),)


@dataclass(frozen=True, slots=True, eq=False)
class PredictiveGovernor:
    """The least-energy clock at which everything that waits is still answered in time.

    A clock is admissible when, at that clock, each waiting request finishes ``guard_ratio`` of its SLO before its
    deadline and the whole backlog is gone so early that a request which arrives next still has room: one of any hosted
    model, twice as long as its mean, would finish ``guard_ratio`` of its SLO before its deadline. Where service times
    are not known, the backlog may take ``reserve_ratio`` of the shortest SLO. Where no clock is admissible, the highest
    one is set.

    Attributes:
        clocks_mhz: Supported clocks, ascending.
        guard_ratio: Share of each SLO kept free against prediction error.
        reserve_ratio: Share of the shortest SLO the backlog may take, where the hosted models' service is not known.
        idle_mhz: Clock of an empty device; the lowest supported one when None.
        overload: When to ask for another device.

    Raises:
        ConfigError: Clocks are not ascending, or a ratio is out of range.
    """

    clocks_mhz: FloatArray
    guard_ratio: float = 0.1
    reserve_ratio: float = 0.5
    idle_mhz: float | None = None
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
        """Set the clock for what runs and waits now."""
        index, admissible, why = self._choose(view)
        overloaded = not admissible and self._late_at_top(view)
        following, signals = self.overload.watch(state, view, overloaded, self.name)
        wake_s = None
        if overloaded and following.overloaded_since_s is not None and not following.scale_out_raised:
            wake_s = following.overloaded_since_s + self.overload.patience_s
        clock_mhz = float(self.clocks_mhz[index])
        if clock_mhz == view.clock_mhz:
            return Step(following, signals, wake_s)
        return Step(following, (Decision("set_clock", view.device, clock_mhz, self.name, why), *signals), wake_s)

    def _choose(self, view: DeviceView) -> tuple[int, bool, str]:
        if view.idle:
            idle_mhz = self.clocks_mhz[0] if self.idle_mhz is None else self.idle_mhz
            return int(np.searchsorted(self.clocks_mhz, idle_mhz)), True, "nothing runs or waits"
        if not view.waiting:
            return self._for_what_comes(view)
        finish_s = view.now_s + np.cumsum([request.remaining_s for request in view.waiting], axis=0)
        limit_s = np.array([request.deadline_s - self.guard_ratio * request.slo_s for request in view.waiting])
        in_time = np.all(finish_s <= limit_s[:, None], axis=0)
        roomy = finish_s[-1] - view.now_s <= self._room_s(view)
        admissible = in_time & roomy
        if view.steady is not None:
            admissible &= view.steady.tail_ratio <= 1.0 - self.guard_ratio
        if not bool(np.any(admissible)):
            return len(self.clocks_mhz) - 1, False, f"{len(view.waiting)} waiting leave no room below the highest clock"
        energy_j = np.sum([request.energy_j for request in view.waiting], axis=0)
        if view.steady is not None:
            energy_j = energy_j + view.steady.energy_j
        best = int(np.argmin(np.where(admissible, energy_j, np.inf)))
        why = f"{len(view.waiting)} waiting finish in {finish_s[-1][best] - view.now_s:.3g} s, least energy in time"
        return best, True, why

    def _room_s(self, view: DeviceView) -> float:
        """How long the backlog may take, for the sake of what has not arrived yet."""
        if not view.hosted:
            return self.reserve_ratio * view.shortest_slo_s
        return min((1.0 - self.guard_ratio) * slo_s - _LONG * service_s for slo_s, service_s in view.hosted)

    def _for_what_comes(self, view: DeviceView) -> tuple[int, bool, str]:
        """Nothing waits at this instant, and requests go on arriving."""
        if view.steady is None:
            return len(self.clocks_mhz) - 1, True, "nothing is known of what comes"
        admissible = view.steady.tail_ratio <= 1.0 - self.guard_ratio
        if not bool(np.any(admissible)):
            tail = float(view.steady.tail_ratio[-1])
            return len(self.clocks_mhz) - 1, False, f"at the highest clock the tail is {tail:.0%} of the promise"
        best = int(np.argmin(np.where(admissible, view.steady.energy_j, np.inf)))
        tail = float(view.steady.tail_ratio[best])
        return best, True, f"nothing waits; what comes stays at {tail:.0%} of the promise, least energy"

    def _late_at_top(self, view: DeviceView) -> bool:
        if not view.waiting:
            return view.steady is not None and bool(view.steady.tail_ratio[-1] > 1.0)
        finish_s = view.now_s + np.cumsum([request.remaining_s[-1] for request in view.waiting])
        return bool(np.any(finish_s > [request.deadline_s for request in view.waiting]))


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
