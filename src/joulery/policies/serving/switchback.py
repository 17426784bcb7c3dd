"""Runs the baseline for short periods at random times, so that a saving rests on a measured baseline (a switchback).

:class:`AuditedPolicy` wraps a :class:`~joulery.policies.serving.policy.ServicePolicy`. Requests are counted in blocks.
In each block the baseline answers one run of consecutive requests, whose place is drawn uniformly; the blocks are so
long that these requests are the share that the user allows; the first block has none, so that no run exceeds its
budget however early it ends. Times are drawn and never chosen, so that what the
baseline costs is not mixed up with when it ran (D. Bojinov, D. Simchi-Levi, J. Zhao, *Design and Analysis of Switchback
Experiments*, Management Science 2023).

The SLO comes first. While it is threatened, while trials run, or where the baseline is predicted to violate it, no
period begins. A period that runs ends as soon as its queue would take half of the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError
from joulery.domain.format import latency
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.service import SloScope
from joulery.policies.serving.messages import short
from joulery.policies.serving.observation import SET_LAYOUT, Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.state import RandomState, ServiceState
from joulery.policies.serving.variants.newcomers import assumed

AUDIT = "audit"
"""Cause of the decisions that begin and end a period of the baseline."""
_CALM_RATIO = 0.5
"""A queue that takes more than this share of the SLO ends a period of the baseline."""
_OVERRUN_RATIO = 1.5
"""A period ends when the baseline has answered this multiple of the requests that were planned for it."""
_FULL_RATIO = 0.9
"""The baseline is not begun where the demand takes more than this share of its capacity."""


@dataclass(frozen=True, slots=True)
class Switchback:
    """Settings for measuring the baseline.

    Attributes:
        baseline: The baseline layout.
        share_ratio: Share of the requests that the baseline may answer, above 0.
        trim_s: Seconds after a change of layout that are not measured, because effects of the earlier layout remain.
        period_s: Shortest measured part of a period, seconds.
        min_requests: Requests that the measured part of a period holds at least, on average.
        fixed_slices: Whether the baseline runs only where the slices already are those that it needs: a GPU serves
            nothing while it is partitioned again.
        seed: Seed of the drawn times.
    """

    baseline: Layout
    share_ratio: float
    trim_s: float
    period_s: float
    min_requests: int = 50
    fixed_slices: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share_ratio <= 0.5:
            raise DataError(f"an audit's share of the requests is {self.share_ratio:g}, expected above 0, at most 0.5")

    def length_s(self, rate_rps: float) -> float:
        """Length of a period under a demand, seconds."""
        return self.trim_s + max(self.period_s, self.min_requests / rate_rps)

    def as_dict(self) -> dict[str, Any]:
        """The settings as a JSON-ready dictionary."""
        return {**asdict(self), "baseline": self.baseline.names()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Switchback:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: ``data`` is not what ``as_dict`` writes.
        """
        try:
            return cls(**{**data, "baseline": Layout.parse(data["baseline"])})
        except (KeyError, TypeError) as error:
            raise DataError(f"not an audit: {error!r}") from error


@dataclass(frozen=True, slots=True)
class BaselinePeriod:
    """A period in which the baseline served and no effect of an earlier layout remained.

    Attributes:
        from_s, until_s: Its measured part, Unix seconds.
        cut: Whether it ended early, to protect the SLO.
    """

    from_s: float
    until_s: float
    cut: bool = False


@dataclass(frozen=True, slots=True)
class AuditTally:
    """Outcomes of the periods of an audit.

    Attributes:
        blocks: Blocks of requests that ended; each allows one period.
        periods: Periods that were measured.
        cut: Periods that ended early because the SLO was threatened.
        withheld: Blocks without a period, by reason.
        requests: Arrivals while the baseline served in place of the policy's layout.
        arrived: All arrivals.
    """

    blocks: int = 0
    periods: int = 0
    cut: int = 0
    withheld: Mapping[str, int] = field(default_factory=dict)
    requests: float = 0.0
    arrived: float = 0.0

    @property
    def share_ratio(self) -> float:
        """Share of the requests that the baseline answered in place of the policy's layout."""
        return self.requests / self.arrived if self.arrived > 0 else 0.0


@dataclass(frozen=True, slots=True)
class AuditedState:
    """State of an audited policy.

    Attributes:
        service: The state of the policy of the service.
        tally: Outcomes of the periods so far.
        seen_s: Time of the last observation.
        block_at: Arrivals before the present block; NaN before the first.
        block_requests: Arrivals in the present block.
        spent_at: Arrivals that the baseline had answered before the block, in place of the policy's layout.
        due_at: Arrivals after which the block's period is due.
        planned_requests, length_s: Arrivals and seconds of the period.
        done: Whether the period was made or given up.
        saves: Whether the block has no period, to save up requests for the first one: a run that ends early exceeds no
            budget.
        reason: Reason why the period has not begun yet; empty for none.
        asked_s: Time of the decision for the baseline; NaN while no period runs.
        serving_s: Time since which the baseline serves; NaN before.
        spent: Arrivals since then.
        latest: The latest period that was measured; None before the first.
        random: State of the generator of the drawn times.
    """

    service: ServiceState
    random: RandomState
    tally: AuditTally = AuditTally()
    seen_s: float = math.nan
    block_at: float = math.nan
    block_requests: float = 0.0
    spent_at: float = 0.0
    due_at: float = math.inf
    planned_requests: float = 0.0
    length_s: float = 0.0
    done: bool = False
    saves: bool = False
    reason: str = ""
    asked_s: float = math.nan
    serving_s: float = math.nan
    spent: float = 0.0
    latest: BaselinePeriod | None = None

    @property
    def trying(self) -> Layout | None:
        """The layout on trial; None for none. A period of the baseline counts: nothing else may change then."""
        return self.service.trying if math.isnan(self.asked_s) else (self.service.trying or self.service.layout)

    @property
    def deferred(self) -> str:
        """Reason why a search waits for another service's trials to end; empty where none waits."""
        return self.service.deferred


@dataclass(frozen=True, slots=True)
class AuditedPolicy:
    """A service's policy with periods of the baseline.

    Attributes:
        policy: Decides on the layouts of the service.
        audit: Settings for the periods of the baseline.
    """

    policy: ServicePolicy
    audit: Switchback

    @property
    def name(self) -> str:
        """Name of the policy in logs: that of its search."""
        return self.policy.name

    @property
    def service(self) -> str:
        """The service."""
        return self.policy.service

    def as_dict(self) -> dict[str, Any]:
        """The policy as a JSON-ready dictionary with all that is needed to repeat its decisions."""
        return {**self.policy.as_dict(), AUDIT: self.audit.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AuditedPolicy:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: ``data`` is not what ``as_dict`` writes.
        """
        rest = {name: value for name, value in data.items() if name != AUDIT}
        return cls(ServicePolicy.from_dict(rest), Switchback.from_dict(data.get(AUDIT, {})))

    def initial(self) -> AuditedState:
        """The state before the first decision."""
        return AuditedState(self.policy.initial(), RandomState.seeded(self.audit.seed, 7))

    def step(self, state: AuditedState, observation: Observation, /) -> Step[AuditedState]:
        """Step the service's policy, or follow the period of the baseline that runs."""
        seen = observation
        state = self._counted(state, seen)
        if not math.isnan(state.asked_s):
            return self._during(state, seen)
        inner = self.policy.step(state.service, seen)
        state = self._in_block(replace(state, service=inner.state), seen)
        if inner.decisions or state.done or state.tally.arrived < state.due_at:
            return Step(state, inner.decisions)
        reason, given_up = self._obstacle(state.service, seen)
        if reason:
            return Step(replace(state, reason=reason, done=given_up))
        return self._begin(state, seen)

    def _counted(self, state: AuditedState, seen: Observation) -> AuditedState:
        """The state with the arrivals since the last observation."""
        elapsed_s, rate_rps = seen.now_s - state.seen_s, seen.demand_rps
        state = replace(state, seen_s=seen.now_s)
        if not (elapsed_s > 0 and 0 < rate_rps < math.inf):
            return state
        arrived, spent, tally = rate_rps * elapsed_s, state.spent, state.tally
        if not math.isnan(state.serving_s):
            spent += arrived
        if seen.running == self.audit.baseline != state.service.layout:
            tally = replace(tally, requests=tally.requests + arrived)
        return replace(state, spent=spent, tally=replace(tally, arrived=tally.arrived + arrived))

    def _in_block(self, state: AuditedState, seen: Observation) -> AuditedState:
        """The state in the present block; a new block is drawn where the last one has ended."""
        rate_rps, tally = seen.demand_rps, state.tally
        if not 0 < rate_rps < math.inf:
            return state
        first = math.isnan(state.block_at)
        if not first:
            if tally.arrived < state.block_at + state.block_requests:
                return state
            if state.saves:
                tally = replace(tally, blocks=tally.blocks - 1)
            elif not state.done or state.reason:
                why = state.reason or "the block ended"
                tally = replace(tally, withheld={**tally.withheld, why: tally.withheld.get(why, 0) + 1})
            tally = replace(tally, blocks=tally.blocks + 1)
        length_s = self.audit.length_s(rate_rps)
        planned = rate_rps * length_s
        # The baseline also answers while the layouts change: as much as in the block before.
        block = max(planned, tally.requests - state.spent_at) / self.audit.share_ratio
        rng = state.random.generator()
        # No period before the last one is paid back: a run that ends at any time is one period over its budget at most.
        earliest = max(tally.arrived, tally.requests / self.audit.share_ratio)
        return replace(
            state,
            tally=tally,
            block_at=tally.arrived,
            block_requests=block,
            spent_at=tally.requests,
            due_at=earliest + rng.random() * max(tally.arrived + block - planned - earliest, 0.0),
            planned_requests=planned,
            length_s=length_s,
            done=first,
            saves=first,
            reason="",
            random=RandomState.of(rng),
        )

    def _obstacle(self, service: ServiceState, seen: Observation) -> tuple[str, bool]:
        """Reason why no period may begin now, empty for no reason; and whether the block is given up for it."""
        trigger, limit_s = self.policy.trigger, self.policy.objectives.slo.latency_s
        baseline = self.audit.baseline
        if service.trying is not None or seen.waits_for or service.deferred:
            return "layouts were on trial", False
        if service.protecting or service.weights or self._delay_s(seen, seen.running) > _CALM_RATIO * limit_s:
            return "the SLO was threatened", False
        if service.layout is None or seen.running != service.layout or seen.changing:
            return "the layout was changing", False
        if seen.now_s - service.changed_s < trigger.settle_s:
            return "the layout was changing", False
        if seen.latency_s > limit_s:
            return "the SLO was threatened", False
        if seen.running == baseline and assumed(self.policy.family).intersection(seen.loaded):
            return "a variant that joined answered a share", False
        if self.audit.fixed_slices and sorted(baseline.slices) != sorted(seen.running.slices):
            return "the GPUs would be partitioned again", True
        if not self._baseline_keeps_slo(seen.demand_rps):
            return "the baseline would not keep the SLO", True
        return "", False

    def _baseline_keeps_slo(self, rate_rps: float) -> bool:
        """Whether the baseline is predicted to keep the SLO under a demand; True where nothing predicts."""
        predictor, slo = self.policy.search.predictor, self.policy.objectives.slo
        if predictor is None:
            return True
        try:
            if predictor.utilisation_ratio(self.audit.baseline, rate_rps) > _FULL_RATIO:
                return False
            return slo.scope is not SloScope.END_TO_END or (
                predictor.predict(self.audit.baseline, rate_rps).latency_s <= slo.latency_s
            )
        except DataError:
            return True  # it was not profiled on its slices

    def _delay_s(self, seen: Observation, layout: Layout | None) -> float:
        """Seconds that a request which arrives now waits in the queue, or that the oldest has waited."""
        predictor = self.policy.search.predictor
        if not seen.queued or layout is None:
            return 0.0
        drain_s = 0.0
        if predictor is not None:
            try:
                drain_s = seen.queued * predictor.utilisation_ratio(layout, 1.0)
            except DataError:
                drain_s = 0.0  # it was not profiled on its slices
        return max(seen.oldest_wait_s, drain_s)

    def _begin(self, state: AuditedState, seen: Observation) -> Step[AuditedState]:
        """Begin a period: set the baseline, or measure it where it serves already."""
        state = replace(state, asked_s=seen.now_s, spent=0.0, serving_s=math.nan, done=True, reason="")
        if seen.running == self.audit.baseline:
            return Step(replace(state, serving_s=seen.now_s))
        reason = (
            f"audit: {short(self.audit.baseline)}, the baseline, answers about {state.planned_requests:.0f} requests"
        )
        return Step(state, (self._decision(self.audit.baseline, reason),))

    def _during(self, state: AuditedState, seen: Observation) -> Step[AuditedState]:
        """Continue the period that runs, or end it."""
        if self.policy.family and state.service.family != self.policy.family:  # the layout to go back to may be gone
            state = self._closed(state, seen, cut=False)
            inner = self.policy.step(state.service, seen)
            return Step(replace(state, service=inner.state), inner.decisions)
        service, threat = self.policy.watched(state.service, seen)
        limit_s, baseline = self.policy.objectives.slo.latency_s, self.audit.baseline
        delay_s = self._delay_s(seen, baseline)
        state = replace(state, service=service)
        if threat:  # the policy of the service answers a threat, and its layout is not the one to go back to
            state = self._closed(state, seen, cut=True)
            inner = self.policy.step(service, seen)
            return Step(replace(state, service=inner.state), inner.decisions)
        if delay_s > _CALM_RATIO * limit_s:
            reason = f"audit ended early: the queue takes {latency(delay_s)} of the SLO of {latency(limit_s)}"
            return self._end(state, seen, reason, cut=True)
        if service.layout == baseline:
            inner = self.policy.step(service, seen)
            state = replace(state, service=inner.state)
            if inner.decisions:
                return Step(self._closed(state, seen, cut=False), inner.decisions)
        if seen.running != baseline:
            waits = seen.changing or seen.now_s - state.asked_s <= self.policy.trigger.settle_s
            if not (waits and math.isnan(state.serving_s)):
                return self._end(state, seen, "audit ended early: the baseline does not run", cut=False)
            return Step(state)
        if math.isnan(state.serving_s):
            state = replace(state, serving_s=seen.now_s, spent=0.0)
        over = seen.now_s - state.serving_s >= state.length_s
        if over or state.spent >= _OVERRUN_RATIO * state.planned_requests:
            return self._end(state, seen, f"audit: the baseline answered about {state.spent:.0f} requests", cut=False)
        # Leaner variants that are loaded answer single requests whose slack is short, as always.
        inner = self.policy.steer(Step(state.service), seen)
        return Step(replace(state, service=inner.state), inner.decisions)

    def _end(self, state: AuditedState, seen: Observation, reason: str, *, cut: bool) -> Step[AuditedState]:
        """End the period and return to the policy's layout."""
        state = self._closed(state, seen, cut=cut)
        layout = state.service.layout
        if layout is None or layout == seen.running:
            return Step(state)
        state = replace(state, service=replace(state.service, changed_s=seen.now_s))
        return Step(state, (self._decision(layout, reason),))

    def _closed(self, state: AuditedState, seen: Observation, *, cut: bool) -> AuditedState:
        """The state without a running period; the measured part of the period is kept."""
        tally = replace(state.tally, cut=state.tally.cut + cut)
        from_s, latest = state.serving_s + self.audit.trim_s, state.latest
        if seen.now_s > from_s:
            latest = BaselinePeriod(from_s, seen.now_s, cut)
            tally = replace(tally, periods=tally.periods + 1)
        return replace(state, tally=tally, latest=latest, asked_s=math.nan, serving_s=math.nan)

    def queue_limit(self, state: AuditedState, seen: Observation) -> QueueLimit | None:
        """Queue limit of the policy of the service; None for no limit."""
        return self.policy.queue_limit(state.service, seen)

    def _decision(self, layout: Layout, reason: str) -> Decision:
        return Decision(SET_LAYOUT, self.service, layout.names(), self.name, reason, AUDIT)
