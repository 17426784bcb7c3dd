"""Consolidation: while demand is low, part of a layout's slices stay empty, and their replicas are ended.

A replica that waits may draw power, and neighbours that work at the same time slow one another down: fewer replicas
answer a low demand for fewer joules. Which variants run is the search's decision; this rule only chooses how many of
the chosen instances are awake. It never gives up an accuracy or a latency that the whole layout would keep.

Waking takes the measured start of a replica, so the awake part always has room for more demand than there is, the more
the longer waking takes. Instances are woken as soon as that room is used, and parked only after demand has been low for
a while. The SLO-first rule wins: a threat wakes all of them, and demand has to be low for longer before they are parked
again.

On GPUs, whole GPUs are left empty, and their governors lower them to idle clocks: an empty slice beside a busy one
saves little. On the nodes of a cluster, whole nodes are left empty, which may then sleep.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError
from joulery.domain.gpu.layout import Instance, Layout, SliceAssignment
from joulery.domain.serving.service import Slice, SloScope
from joulery.perf.layouts import Predictor
from joulery.policies.serving.caution import CALM
from joulery.policies.serving.messages import short
from joulery.policies.serving.objective import ServiceObjectives
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT, TRY_LAYOUT, Observation
from joulery.policies.serving.slo_first import ROOM_RATIO, delay_s, present_rps
from joulery.policies.serving.state import ServiceState

T = TypeVar("T")
_NUMBERS = ("room", "growth_per_s", "used", "patience_s", "sleepers", "wakes_s", "wake_growth_per_s")
_LEAST_RPS, _RATE_STEP, _MOST_KEPT = 1e-3, 1.05, 256
MOST_PARTS = 5_000
"""Largest number of parts of a layout that are compared, the smallest parts first."""
EQUAL_RATIO = 0.01
"""Joules a request that differ by less than this, and by less than the error of the profile, count as equal."""
CONSOLIDATION = "consolidation"
"""Cause of the decisions that park and wake instances."""


@dataclass(frozen=True, slots=True)
class Consolidation:
    """Rules for parking and waking instances.

    Attributes:
        room: Demand that the awake part must be able to carry before others are parked, as a multiple of the present.
        growth_per_s: What is added to ``room`` for each second that waking takes.
        used: Share of that room which, once used, wakes more instances: below 1 ends flapping.
        patience_s: Seconds without a change or a threat before instances are parked; longer after a parking that a
            threat soon ended.
        gpus: The GPU or node of each slice, for each partition of a service's GPUs or nodes and of the first of them
            alone; empty on the CPU cores of one machine.
        sleepers: Nodes that sleep while they are empty.
        wakes_s: Seconds that such a node takes to wake; 0 where there is none.
        wake_growth_per_s: What is added to ``room`` for each of those seconds.
    """

    room: float = 2.0
    growth_per_s: float = 0.2
    used: float = 0.75
    patience_s: float = 30.0
    gpus: SliceAssignment = field(default_factory=dict)
    sleepers: int = 0
    wakes_s: float = 0.0
    wake_growth_per_s: float = 0.01
    _memo: dict[Hashable, tuple[Predictor, Any]] = field(default_factory=dict, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The rules as a JSON-ready dictionary."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        if self.gpus:
            found["gpus"] = [[[str(piece), gpu] for piece, gpu in assigned] for assigned in self.gpus.values()]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Consolidation:
        """The inverse of :meth:`as_dict`.

        Raises:
            TypeError, ValueError: ``data`` is not what ``as_dict`` writes.
        """
        assigned = [tuple((Slice.parse(piece), str(gpu)) for piece, gpu in one) for one in data.get("gpus", ())]
        gpus = {tuple(sorted(piece for piece, _ in one)): one for one in assigned}
        return cls(**{**data, "gpus": gpus})

    def part(
        self,
        whole: Layout,
        rate_rps: float,
        predictor: Predictor,
        goals: ServiceObjectives,
        *,
        reserve: float = 1.0,
        slowdown_ratio: float = 1.0,
    ) -> Layout:
        """The part of a layout that carries a demand with the fewest joules a second; the whole where none is better.

        Of parts whose predicted joules differ by less than the error of the profile, the one with the fewest instances:
        a core that is left empty sleeps deeper than any profile of its replicas shows. As many nodes sleep as possible:
        the power of a machine that is awake is in no profile of its replicas. It is assumed to exceed the difference
        between two variants at a demand that leaves the machine empty.

        Args:
            whole: The layout.
            rate_rps: Demand.
            predictor: The measured profile.
            goals: SLO and accuracy.
            reserve: Multiple of the demand that the part must carry within the SLO.
            slowdown_ratio: Service times now over those of the profile.
        """
        try:
            carried_rps = rate_rps * reserve
            found = predictor.predict_slower(whole, carried_rps, slowdown_ratio)
            kept = [whole]
            for part in filter(lambda part: self._empties(whole, part), itertools.islice(parts(whole), MOST_PARTS)):
                metrics = predictor.predict_slower(part, carried_rps, slowdown_ratio)
                keeps = metrics.utilisation_ratio <= ROOM_RATIO and self._keeps_slo(metrics.latency_s, goals)
                if keeps and metrics.accuracy_ratio >= found.accuracy_ratio - 1e-12:
                    kept.append(part)
            asleep = [self._asleep(whole, layout) for layout in kept]
            kept = [layout for layout, count in zip(kept, asleep, strict=True) if count == max(asleep)]
            watts = [self._watts(predictor, layout, rate_rps) for layout in kept]
            whole_w = self._watts(predictor, whole, rate_rps) - predictor.awake_w(whole)
            equal_w = min(EQUAL_RATIO, predictor.energy_error_ratio(whole)) * whole_w
        except DataError:
            return whole  # an instance was not profiled
        cheap = [(len(one.instances), one_w, at) for at, (one, one_w) in enumerate(zip(kept, watts, strict=True))]
        return kept[min(one for one in cheap if one[1] <= min(watts) + equal_w)[2]]

    def _empties(self, whole: Layout, part: Layout) -> bool:
        """Whether a part leaves GPUs or nodes empty and the others as they are; any part does on CPU cores."""
        if not self.gpus:
            return True
        before, after = (self.gpus.get(tuple(sorted(one.slices))) for one in (whole, part))
        if before is None or after is None or Counter(after) - Counter(before):
            return False
        used = {gpu for _, gpu in after}
        return used < {gpu for _, gpu in before} and len(after) == sum(gpu in used for _, gpu in before)

    def _asleep(self, whole: Layout, part: Layout) -> int:
        """Nodes that may sleep while a part runs; 0 where none sleeps."""
        used = [{gpu for _, gpu in self.gpus.get(tuple(sorted(one.slices)), ())} for one in (whole, part)]
        return min(self.sleepers, len(used[0]) - len(used[1]))

    @staticmethod
    def _keeps_slo(latency_s: float, goals: ServiceObjectives) -> bool:
        return goals.slo.scope is not SloScope.END_TO_END or latency_s <= goals.slo.latency_s

    @staticmethod
    def _watts(predictor: Predictor, layout: Layout, rate_rps: float) -> float:
        """Predicted watts above an empty machine; rounded, so that equal ones are equal."""
        metrics = predictor.predict(layout, rate_rps)
        return round(metrics.energy_j * rate_rps + predictor.awake_w(layout), 6)

    def reserve(self, whole: Layout, predictor: Predictor) -> float:
        """Multiple of the present demand that the awake part can carry: more, the longer waking takes."""
        try:
            starts_s = max((entry.startup_s for entry in predictor.instances(whole)), default=0.0)
        except DataError:
            return math.inf
        return self.room + self.growth_per_s * starts_s + self.wake_growth_per_s * self.wakes_s

    def apply(
        self,
        step: Step[ServiceState],
        seen: Observation,
        service: str,
        goals: ServiceObjectives,
        predictor: Predictor,
        demand_rps: float,
    ) -> Step[ServiceState]:
        """The step with as many instances awake as the demand needs.

        Args:
            step: The policy's step for the whole layout.
            seen: The policy's observation.
            service: The service.
            goals: SLO and accuracy.
            predictor: The measured profile.
            demand_rps: Smoothed demand.
        """
        state = step.state
        made = next((one for one in step.decisions if one.kind in (SET_LAYOUT, KEEP_LAYOUT, TRY_LAYOUT)), None)
        if state.protecting and made is None:
            return self._with_all_awake(step, seen, service)
        if state.protecting or state.trying is not None or state.layout is None:
            return Step(replace(state, whole=None, roomy_s=math.inf), step.decisions, step.wake_s)
        if made is None and (seen.changing or seen.running != state.layout):
            return step
        whole = state.layout if made is not None or state.whole is None else state.whole
        rate_rps, reserve = self._rate_rps(seen, demand_rps), self.reserve(whole, predictor)
        if not reserve < math.inf:
            return step
        slower = state.slowdown_ratio
        enough = self._kept(
            predictor,
            (whole, rate_rps, reserve, slower, goals),
            lambda: self.part(whole, rate_rps, predictor, goals, reserve=reserve, slowdown_ratio=slower),
        )
        if made is not None:
            return step if state.whole is None else self._settled(step, made, whole, enough, seen, service)
        roomy_s = min(state.roomy_s, seen.now_s) if is_part(enough, state.layout) else math.inf
        step = Step(replace(state, roomy_s=roomy_s), step.decisions, step.wake_s)
        short_of = self._is_short(state.layout, seen, rate_rps * reserve * self.used, predictor, goals, slower)
        if state.whole is not None and short_of:
            return self._settled(step, None, whole, enough, seen, service)
        rests_since_s = max(roomy_s, state.changed_s, state.threat_s)
        patient = seen.now_s - rests_since_s >= self.patience_s * state.parking.at(seen.now_s)
        if math.isfinite(roomy_s) and patient and not short_of:
            return self._settled(step, None, whole, enough, seen, service)
        return step

    @staticmethod
    def _rate_rps(seen: Observation, demand_rps: float) -> float:
        """The demand to carry: the larger of the present and the smoothed one; close to 0 where nothing has arrived.

        Rounded up to one of a few values, so that a prediction serves many steps.
        """
        if seen.demand_rps == 0:
            return _LEAST_RPS
        rate_rps = max(_LEAST_RPS, present_rps(seen, demand_rps))
        return float(_RATE_STEP ** math.ceil(math.log(rate_rps, _RATE_STEP) - 1e-9))

    def _kept(self, predictor: Predictor, key: Hashable, made: Callable[[], T]) -> T:
        """The cached result of this predictor for a key, else a new one; at most 256 results are cached."""
        known = self._memo.get(key)
        if known is None or known[0] is not predictor:
            if len(self._memo) >= _MOST_KEPT:
                self._memo.clear()
            known = self._memo[key] = predictor, made()
        found: T = known[1]
        return found

    def _is_short(
        self,
        awake: Layout,
        seen: Observation,
        rate_rps: float,
        predictor: Predictor,
        goals: ServiceObjectives,
        slowdown_ratio: float,
    ) -> bool:
        """Whether the awake part has no room left."""
        metrics = self._kept(
            predictor,
            (awake, rate_rps, slowdown_ratio),
            lambda: predictor.predict_slower(awake, rate_rps, slowdown_ratio),
        )
        waits_s = delay_s(seen, rate_rps / metrics.utilisation_ratio)
        late = waits_s > goals.slo.latency_s / 2 or seen.latency_s > goals.slo.latency_s
        return metrics.utilisation_ratio > ROOM_RATIO or not self._keeps_slo(metrics.latency_s, goals) or late

    def _settled(
        self,
        step: Step[ServiceState],
        made: Decision | None,
        whole: Layout,
        awake: Layout,
        seen: Observation,
        service: str,
    ) -> Step[ServiceState]:
        """The step with a part of the layout awake."""
        state, empty = step.state, len(whole.instances) - len(awake.instances)
        if empty and state.whole is None:
            state = replace(state, parking=state.parking.risked(seen.now_s, self.patience_s), leaving=CALM)
        elif made is not None and made.cause == "latency":
            state = state.struck(seen.now_s)
        changed_s = state.changed_s if awake == seen.running else seen.now_s
        state = replace(
            state,
            layout=awake,
            whole=whole if empty else None,
            changed_s=changed_s,
            decided_s=seen.now_s,
            roomy_s=math.inf,
        )
        text = f"{short(awake)} stays awake, {empty} of {len(whole.instances)} slices empty" if empty else ""
        kind = KEEP_LAYOUT if awake == seen.running else SET_LAYOUT
        if made is not None:
            reason = "; ".join(filter(None, (made.reason, text)))
            changed = replace(made, kind=kind, value=awake.names(), reason=reason)
            return Step(state, tuple(changed if one is made else one for one in step.decisions), step.wake_s)
        if kind == KEEP_LAYOUT:
            return Step(state, step.decisions, step.wake_s)
        rate = f"{seen.demand_rps:.0f} requests/s"
        reason = f"{rate} leave room: {text}" if empty else f"{rate} need more room: {short(whole)} wakes"
        if empty and seen.running is not None and len(awake.instances) > len(seen.running.instances):
            reason = f"{rate} need more room: {text}"
        return Step(state, (*step.decisions, self._decision(service, awake, reason)), step.wake_s)

    def _with_all_awake(self, step: Step[ServiceState], seen: Observation, service: str) -> Step[ServiceState]:
        """The step with all instances awake again, because the SLO is threatened."""
        state = step.state
        if state.whole is None or state.layout is None:
            return step
        whole = state.whole
        state = replace(state, layout=whole, whole=None, changed_s=seen.now_s, decided_s=seen.now_s)
        reason = f"SLO threatened: {short(whole)} wakes"
        return Step(state, (*step.decisions, self._decision(service, whole, reason)), step.wake_s)

    @staticmethod
    def _decision(service: str, layout: Layout, reason: str) -> Decision:
        return Decision(SET_LAYOUT, service, layout.names(), CONSOLIDATION, reason, CONSOLIDATION)


def parts(whole: Layout) -> Iterator[Layout]:
    """The parts of a layout that leave slices empty, equal ones once, the smallest first."""
    counts = Counter(whole.instances)
    for size in range(1, len(whole.instances)):
        for chosen in _choices(tuple(counts.items()), size):
            yield Layout(itertools.chain.from_iterable(itertools.repeat(one, times) for one, times in chosen))


def _choices(counts: tuple[tuple[Instance, int], ...], size: int) -> Iterator[tuple[tuple[Instance, int], ...]]:
    """Every way to take ``size`` instances, as the number of each instance that is taken."""
    if not counts:
        if size == 0:
            yield ()
        return
    (one, there), rest = counts[0], counts[1:]
    left = sum(count for _, count in rest)
    for times in range(min(there, size), max(0, size - left) - 1, -1):
        for others in _choices(rest, size - times):
            yield ((one, times), *others) if times else others


def is_part(one: Layout, other: Layout) -> bool:
    """Whether a layout is a proper part of another."""
    rest = list(other.instances)
    for item in one.instances:
        if item not in rest:
            return False
        rest.remove(item)
    return bool(rest)
