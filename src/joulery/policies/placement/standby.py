"""Standby instances: they repair a plan whose prediction was wrong (iGniter, section 4.2).

Every instance of a plan has a *standby*: a second process with a larger share of the same GPU, by the smaller of 10 %
and what the plan left. Once a second the SLO's quantile of the latencies is compared with the SLO. If the SLO is
violated, and still violated half a second later (section 5.3), the standby takes over and the original ends. The
standby is loaded beforehand, so no process starts then. Requests that queue behind the original are late anyway, so
latencies do not count for ``settle_s`` after the switch.

A standby is refused where the shares of its GPU would exceed the whole. The decision then reports an SLO violation that
only a new plan can fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError
from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.domain.serving.service import Slo

ACTIVATE_STANDBY, SLO_VIOLATED = "activate_standby", "slo_violated"
EXTRA_PERCENT = 10.0
"""Share of a standby beyond its original: the largest prediction error the paper measured."""
REFUSED_S = 1e9
"""The latency that a refused request counts with: later than any SLO."""
_ROUNDING_PERCENT = 1e-6


@dataclass(frozen=True, slots=True)
class WatchedInstance:
    """One instance of a plan.

    Attributes:
        workload: The service.
        replica: Number of the replica.
        gpu: Index of its GPU in the plan.
        share_percent: Its share of the GPU.
        standby_percent: Share of its standby; the same where the plan left nothing.
        slo_s: The latency SLO.
        quantile: Quantile of the latencies that the SLO limits.
    """

    workload: str
    replica: int
    gpu: int
    share_percent: float
    standby_percent: float
    slo_s: float
    quantile: float

    @property
    def key(self) -> str:
        """Name of the instance in observations and decisions."""
        return key_of(self.workload, self.replica)


def key_of(workload: str, replica: int) -> str:
    """Name of an instance: ``W1/0``."""
    return f"{workload}/{replica}"


def watched_instances(
    gpus: Sequence[PlannedGpu], slos: Mapping[str, Slo], extra_percent: float = EXTRA_PERCENT
) -> tuple[WatchedInstance, ...]:
    """The instances of a plan with the shares of their standbys.

    Args:
        gpus: The plan.
        slos: SLO by workload.
        extra_percent: The most by which a standby's share exceeds its original's.
    """
    return tuple(
        WatchedInstance(
            each.workload,
            each.replica,
            index,
            100 * each.share_ratio,
            # A slice does not grow.
            100 * each.share_ratio + (0.0 if gpu.sliced else max(0.0, min(extra_percent, 100 - 100 * gpu.share_ratio))),
            slos[each.workload].latency_s,
            slos[each.workload].quantile,
        )
        for index, gpu in enumerate(gpus)
        for each in gpu.instances
    )


class Tail(NamedTuple):
    """Recent tail latency of one instance's requests.

    Attributes:
        key: Name of the instance.
        latency_s: The SLO quantile of the requests' latencies; NaN for none.
        requests: Number of requests.
    """

    key: str
    latency_s: float
    requests: int


class StandbyObservation(NamedTuple):
    """The policy's input: every instance's latest tail, counted since its standby took over, if it did."""

    now_s: float
    tails: tuple[Tail, ...]

    def as_dict(self) -> dict[str, Any]:
        """The observation as a JSON-ready dictionary."""
        tails = [[t.key, None if math.isnan(t.latency_s) else t.latency_s, t.requests] for t in self.tails]
        return {"now_s": self.now_s, "tails": tails}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StandbyObservation:
        """The observation from the output of :meth:`as_dict`."""
        tails = (Tail(str(k), math.nan if s is None else float(s), int(n)) for k, s, n in data["tails"])
        return cls(float(data["now_s"]), tuple(tails))


@dataclass(frozen=True, slots=True)
class StandbyState:
    """State of the policy.

    Attributes:
        late_since_s: When each instance that is late was first seen late.
        active: Since when the standby of an instance answers.
        violated: Instances reported as beyond repair by a standby.
    """

    late_since_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    active: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    violated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StandbyPolicy:
    """Activates the standby of an instance that violates its SLO.

    Attributes:
        instances: The plan's instances.
        confirm_s: How long an SLO must stay violated before the policy acts.
        min_requests: Fewest requests of a tail that counts.
        settle_s: How long latencies do not count after a standby took over.
        taken_over: Instances whose standby answers from the start, and since when.
        service: Name of what the policy watches, for the log: a whole plan.
    """

    instances: tuple[WatchedInstance, ...]
    confirm_s: float = 0.5
    min_requests: int = 5
    settle_s: float = 2.0
    taken_over: tuple[tuple[str, float], ...] = ()
    name: ClassVar[str] = "standby"
    service: ClassVar[str] = "plan"

    def initial(self) -> StandbyState:
        """The first state: every original answers, except those whose standby has taken over."""
        return StandbyState(active=MappingProxyType(dict(self.taken_over)))

    def step(self, state: StandbyState, observation: StandbyObservation, /) -> Step[StandbyState]:
        """Check every instance once, in the order of the plan."""
        tails = {tail.key: tail for tail in observation.tails}
        decisions: list[Decision] = []
        for one in self.instances:
            tail = tails.get(one.key)
            if tail is None or tail.requests < self.min_requests or math.isnan(tail.latency_s):
                continue
            if observation.now_s < state.active.get(one.key, -math.inf) + self.settle_s:
                continue
            state, decision = self._look(state, one, tail, observation.now_s)
            decisions += decision
        return Step(state, tuple(decisions))

    def _look(
        self, state: StandbyState, one: WatchedInstance, tail: Tail, now_s: float
    ) -> tuple[StandbyState, list[Decision]]:
        late = dict(state.late_since_s)
        if tail.latency_s <= one.slo_s:
            late.pop(one.key, None)
            return replace(state, late_since_s=MappingProxyType(late), violated=state.violated - {one.key}), []
        since_s = late.setdefault(one.key, now_s)
        state = replace(state, late_since_s=MappingProxyType(late))
        # Rounding of the clock may not turn half a second into a little less.
        if now_s - since_s < self.confirm_s - 1e-6 or one.key in state.violated:
            return state, []
        took = (
            f"{1e3 * tail.latency_s:.1f} ms" if tail.latency_s < REFUSED_S else "beyond all bounds (requests refused)"
        )
        seen = f"p{100 * one.quantile:g} of {one.key} {took} of {1e3 * one.slo_s:g} ms"
        refusal = self._refusal(state, one)
        if refusal:
            reason = f"{seen}: {refusal}"
            violated = Decision(SLO_VIOLATED, one.key, None, self.name, reason, cause="latency")
            return replace(state, violated=state.violated | {one.key}), [violated]
        late.pop(one.key)
        active = MappingProxyType({**state.active, one.key: now_s})
        state = replace(state, late_since_s=MappingProxyType(late), active=active)
        shares = f"{one.standby_percent:g} % takes over from the original's {one.share_percent:g} %"
        reason = f"{seen}: the standby with {shares}"
        return state, [Decision(ACTIVATE_STANDBY, one.key, one.standby_percent, self.name, reason, cause="latency")]

    def _refusal(self, state: StandbyState, one: WatchedInstance) -> str:
        """Reason why its standby cannot help; empty when it can."""
        if one.key in state.active:
            return "its standby answers already"
        if one.standby_percent <= one.share_percent:
            return "the plan left nothing of its GPU for a standby"
        used = math.fsum(
            other.standby_percent if other.key in state.active or other is one else other.share_percent
            for other in self.instances
            if other.gpu == one.gpu
        )
        if used > 100 + _ROUNDING_PERCENT:
            return "another standby has what the plan left of its GPU"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """The policy as a JSON-ready dictionary."""
        return {
            "instances": [asdict(one) for one in self.instances],
            "confirm_s": self.confirm_s,
            "min_requests": self.min_requests,
            "settle_s": self.settle_s,
            "taken_over": [list(one) for one in self.taken_over],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StandbyPolicy:
        """The policy from the output of :meth:`as_dict`.

        Raises:
            DataError: The data does not describe a standby policy.
        """
        try:
            instances = tuple(WatchedInstance(**one) for one in data["instances"])
            return cls(
                instances,
                float(data["confirm_s"]),
                int(data["min_requests"]),
                float(data["settle_s"]),
                tuple((str(key), float(since_s)) for key, since_s in data.get("taken_over", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a standby policy: {error!r}") from error
