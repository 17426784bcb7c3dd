"""The policy of one service: which variants run on which slices, by Clover's objective within the SLO.

:class:`ServicePolicy` is pure. It observes the grid's intensity, the demand and the latency, and answers with the
layout to run next and the reason. Its search finds layouts: by prediction from a measured profile, or by trials on the
service itself (Clover's annealer, or a learned model). The simulator's Clover study and the live service drive it.

A search starts when the objectives, the grid or the demand moved, or when the service violates its SLO. A trial ends as
soon as the interval around the SLO's quantile lies on one side of the limit. While another service is on trial, a
search waits and the best known layout serves. The SLO comes first (:mod:`joulery.policies.serving.slo_first`): where it
is threatened, leaner loaded variants answer, or the leanest layout runs, until there is room at the present demand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError, InfeasibleError
from joulery.domain.format import latency
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.mix import OWN
from joulery.domain.serving.service import SloScope
from joulery.perf.layouts import Predictor
from joulery.policies.serving import messages
from joulery.policies.serving.consolidation import Consolidation
from joulery.policies.serving.messages import quantile, short
from joulery.policies.serving.objective import ReplanTrigger, ServiceObjectives
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT, SET_WEIGHTS, TRY_LAYOUT, Observation, Sample
from joulery.policies.serving.search.predictive_search import PredictiveSearch
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.search.trials import MeasuredLayout, Verdict, judge
from joulery.policies.serving.slo_first import (
    NO_THREAT,
    VariantScaler,
    admission,
    is_calm,
    present_rps,
    slowdown,
    steers,
    threat,
)
from joulery.policies.serving.state import Family, ServiceState
from joulery.policies.serving.variants.changes import FAMILY, decision_kind, family_from, followed, has_left, seen_by
from joulery.policies.serving.variants.newcomers import assumed, introduced, trusted

UNFINISHED, TURN = "unfinished", "turn"
_WAITED = ", after waiting"
_LEAST_RPS = 1e-3
_MOST_DEATHS = 1
"""Replica deaths during a trial that count as an accident; more are the layout's own."""
_ROOM_RATIO = 2.0
"""Multiples of the settling time without a threat before another layout may run; mixes change after one."""
_PERSISTS = 4.0
"""Multiples of the settling time after which a demand that lasts gets a layout of its own."""
_CAUTION, _HEADROOM = 12.0, 1.2
"""For so many settling times after a threat, a search plans for this multiple of the present demand."""
_WORTH = 1.1
"""The leanest layout runs where it serves more than the loaded variants do by this ratio, and that is needed."""


@dataclass(frozen=True, slots=True)
class ServicePolicy:
    """Chooses among the layouts of one service.

    Attributes:
        service: The service.
        search: Finds layouts.
        objectives: Weight of carbon, SLO and accuracy floor.
        rate_rps: Demand to plan for until one has been observed.
        trigger: When a change starts a new search.
        consolidation: When slices are left empty; None where all are filled.
        family: The variants to choose from, where they may change while the service runs.

    Raises:
        InfeasibleError: No variant is as accurate as the objectives ask.
    """

    service: str
    search: PredictiveSearch | TrialSearch
    objectives: ServiceObjectives
    rate_rps: float
    trigger: ReplanTrigger
    consolidation: Consolidation | None = None
    family: Family = ()

    def __post_init__(self) -> None:
        best = self.search.best_accuracy_ratio
        if best < self.objectives.minimum_accuracy_ratio:
            raise InfeasibleError(
                f"{self.service}: no layout is as accurate as {self.objectives.minimum_accuracy_ratio:.2%}",
                binding="minimum_accuracy",
                nearest=best,
                hint=f"ask for at most {best:.2%}",
            )

    @property
    def name(self) -> str:
        """Name of the policy in logs: that of its search."""
        return self.search.name

    @property
    def candidates(self) -> tuple[Layout, ...]:
        """Every layout there is to choose from."""
        return self.search.candidates

    def as_dict(self) -> dict[str, Any]:
        """The policy as a JSON-ready dictionary with all that is needed to repeat its decisions."""
        return {
            "service": self.service,
            "rate_rps": self.rate_rps,
            "trigger": asdict(self.trigger),
            "objectives": self.objectives.as_dict(),
            "search": self.search.as_dict(),
            **({} if self.consolidation is None else {"consolidation": self.consolidation.as_dict()}),
            **({FAMILY: [list(one) for one in self.family]} if self.family else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServicePolicy:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: ``data`` is not what ``as_dict`` writes.
        """
        try:
            objectives = ServiceObjectives.from_dict(data["objectives"])
            kind = TrialSearch if data["search"]["kind"] == TrialSearch.name else PredictiveSearch
            return cls(
                service=str(data["service"]),
                search=kind.from_dict(data["search"]),
                objectives=objectives,
                rate_rps=float(data["rate_rps"]),
                trigger=ReplanTrigger(**data["trigger"]),
                consolidation=Consolidation.from_dict(data["consolidation"]) if "consolidation" in data else None,
                family=family_from(data),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not a service policy: {error!r}") from error

    def initial(self) -> ServiceState:
        """The state before the first decision."""
        return ServiceState()

    def step(self, state: ServiceState, observation: Observation, /) -> Step[ServiceState]:
        """Protect the SLO where it is threatened; else follow the trial that runs, or search if something moved."""
        state, seen = followed(state, self.family), seen_by(self.family, observation)
        step = self._decide(self._observed(state, seen), seen)
        rule, known, demand_rps = self.consolidation, self.search.predictor, self._demand(step.state)
        if rule is not None and known is not None:
            step = rule.apply(step, seen, self.service, self.objectives, known, demand_rps)
        return self.steer(step, observation)

    def queue_limit(self, state: ServiceState, seen: Observation) -> QueueLimit | None:
        """Queue limit at which the leanest variants answer the last request within the SLO; None for no such limit.

        While the SLO is protected, requests that have waited for too long are refused in favour of later ones.

        Without loaded variants to turn to, the limit holds only while more requests arrive than the leanest layout can
        serve: until it runs, late answers are better than none.
        """
        predictor, seen = self.search.predictor, seen_by(self.family, seen)
        if self.objectives.slo.scope is not SloScope.END_TO_END or predictor is None or not self._attainable(state):
            return None
        scaler, ratio = self._scaler(predictor, state), state.admission_ratio
        if seen.running is not None and steers(seen, predictor):
            lean = scaler.lean(seen.running, seen.loaded)
            if seen.mix.steps or not lean:
                return scaler.queue_limit(seen.running, lean, state.weights, ratio, protected=state.protecting)
        leanest = self._leanest(state)
        alone, capacity_rps = replace(seen, queued=0), self._capacity_rps(leanest, state)
        surges = threat(alone, self.objectives.slo, capacity_rps, NO_THREAT).phrase
        return scaler.queue_limit(leanest, (), ratio=ratio, protected=state.protecting) if surges else None

    def _decide(self, state: ServiceState, seen: Observation) -> Step[ServiceState]:
        """Decide on the layout to run or to try."""
        state, phrase = self.watched(state, seen)
        changed = messages.changed(state.objectives, self.objectives)
        if phrase and not changed:
            return self._protect(state, seen, phrase)
        if seen.changing and not (changed or state.changes):
            return Step(state)  # nothing but a threat overrides a decision that is being carried out
        if state.protecting and not changed:
            return self._hold(state, seen)
        state = replace(state, protecting=False) if state.protecting else state
        if isinstance(self.search, TrialSearch) and state.trying is not None and not changed:
            return self._follow(state, state.trying, seen, self.search)
        cause = ("terms", changed) if changed else self._cause(state, seen)
        if isinstance(self.search, TrialSearch) and cause is not None and cause[0] == UNFINISHED:
            return self._again(state, seen, self.search)
        return Step(state) if cause is None else self._search(state, seen, *cause)

    def _search(self, state: ServiceState, seen: Observation, cause: str, cause_text: str) -> Step[ServiceState]:
        """Begin a search."""
        if state.changes and cause != FAMILY:
            cause, cause_text = FAMILY, f"{state.changes}; {cause_text}"
        begun, search = self._begin(state, seen, cause, cause_text), trusted(self.search, state, seen.now_s)
        return (
            self._predict(begun, seen, search)
            if isinstance(search, PredictiveSearch)
            else self._next(begun, seen, search)
        )

    def _scaler(self, known: Predictor, state: ServiceState) -> VariantScaler:
        return VariantScaler(known, self.objectives, state.slowdown_ratio)

    def watched(self, state: ServiceState, seen: Observation) -> tuple[ServiceState, str]:
        """The state with the present threat to the SLO, and that threat as a phrase; empty for none."""
        found = threat(seen, self.objectives.slo, self._capacity_rps(seen.running, state), state.threat)
        counts = bool(found.phrase) and self._attainable(state)
        if counts or found != state.threat:
            state = replace(state, threat=found, threat_s=seen.now_s if counts else state.threat_s)
        return state, found.phrase * counts

    def _attainable(self, state: ServiceState) -> bool:
        """Whether the leanest layout answers within the SLO when nothing waits; else protecting it is pointless."""
        predictor = self.search.predictor
        return predictor is None or self._scaler(predictor, state).attains(self._leanest(state))

    def _capacity_rps(self, layout: Layout | None, state: ServiceState) -> float:
        """Requests a second that a layout serves with the weights decided on; 0 without a profile."""
        if layout is None or (predictor := self.search.predictor) is None:
            return 0.0
        return self._scaler(predictor, state).known_capacity_rps(layout, state.weights)

    def _protect(self, state: ServiceState, seen: Observation, phrase: str) -> Step[ServiceState]:
        """Let the leanest loaded variants answer, or run the leanest layout; trials and carbon wait for room."""
        state = state if state.protecting else state.struck(seen.now_s)
        layout, predictor = self._leanest(state), self.search.predictor
        steering = predictor is not None and not has_left(self.family, seen.running) and steers(seen, predictor)
        if predictor is not None and seen.running is not None and steering:
            scaler = self._scaler(predictor, state)
            weights = scaler.lean(seen.running, seen.loaded)
            kept, capacity_rps = seen.running, scaler.capacity_rps(seen.running, weights)
            kept = state.layout or kept if seen.changing and state.trying is None else kept
            state = replace(state, weights=weights, cause_text=f"SLO threatened: {phrase}")
            if capacity_rps >= seen.demand_rps or _WORTH * capacity_rps >= scaler.known_capacity_rps(layout):
                return Step(replace(state, layout=kept, trying=None, protecting=True, predicted_s=math.nan))
        begun = state.protecting and state.layout == layout
        settling = seen.changing or seen.now_s - state.decided_s < self.trigger.settle_s
        if begun and (seen.running == layout or settling):
            return Step(state)
        reason = f"SLO threatened: {phrase}; {short(layout)} is the leanest layout"
        changed_s = state.changed_s if layout == seen.running else seen.now_s
        state = replace(state, layout=layout, trying=None, decided_s=seen.now_s, changed_s=changed_s)
        state = replace(state, predicted_s=math.nan, protecting=True)
        kind = KEEP_LAYOUT if layout == seen.running else SET_LAYOUT
        return Step(state, (self._decision(kind, layout, reason, "", "threat"),))

    def _hold(self, state: ServiceState, seen: Observation) -> Step[ServiceState]:
        """Scale as little as the present demand allows while the SLO is protected; then search again."""
        predictor, calm_s = self.search.predictor, seen.now_s - state.threat_s
        steering = predictor is not None and steers(seen, predictor)
        mixes = steering and isinstance(self.search, PredictiveSearch)
        patience_s = self.trigger.settle_s * (1.0 if steering else _ROOM_RATIO)
        patience_s *= 1.0 if mixes else state.leaving.at(seen.now_s)
        capacity_rps = self._capacity_rps(seen.running, state)
        if calm_s < patience_s or not is_calm(seen, self.objectives.slo, capacity_rps):
            return Step(state)
        rate_rps = present_rps(seen, self._demand(state))
        if predictor is not None and seen.running is not None and steering:
            scaler = self._scaler(predictor, state)
            weights = scaler.steady(seen.running, seen.loaded, rate_rps)
            weights = scaler.lean(seen.running, seen.loaded) if weights is None else weights
            state = replace(state, weights=weights, cause_text="the SLO has room again")
            if state.weights and calm_s < _PERSISTS * self.trigger.settle_s:
                return Step(state)
        cause = "demand" if self.trigger.demand_moved(rate_rps, state.planned_rps) else "room"
        leaving = state.leaving.risked(seen.now_s, _ROOM_RATIO * self.trigger.settle_s)
        state = replace(state, protecting=False, changed_s=seen.now_s, leaving=state.leaving if mixes else leaving)
        return self._search(state, seen, cause, "the SLO has room again")

    def steer(self, step: Step[ServiceState], seen: Observation) -> Step[ServiceState]:
        """The step with a decision on the mix of loaded variants, where it differs from the mix in force."""
        return introduced(self._steered(step, seen_by(self.family, seen)), seen, self)

    def _steered(self, step: Step[ServiceState], seen: Observation) -> Step[ServiceState]:
        """As :meth:`steer`, only among the variants whose times are known."""
        state, predictor = step.state, self.search.predictor
        if predictor is None or seen.running is None or not steers(seen, predictor):
            return step
        if state.weights and seen.running == state.layout and not (state.protecting or seen.changing):
            state = replace(state, weights=())
        key = (seen.running, seen.loaded, state.weights, state.slowdown_ratio, self.objectives, predictor)
        if state.mix[1] != key:
            scaler = self._scaler(predictor, state)
            state = replace(state, mix=(scaler.mix(seen.running, seen.loaded, state.weights), key))
        wanted = OWN if state.trying == seen.running else state.mix[0]
        if wanted == seen.mix:
            return Step(state, step.decisions, step.wake_s)
        reason = messages.steered(wanted, state.cause_text if state.protecting or state.weights else "")
        moved = "threat" if state.threat_s == seen.now_s else "room"  # the same weights have other capacities alone
        cause = moved if wanted.steady != seen.mix.steady else "layout"
        decision = Decision(SET_WEIGHTS, self.service, wanted.as_list(), self.name, reason, cause)
        return Step(state, (decision, *step.decisions), step.wake_s)

    def _leanest(self, state: ServiceState) -> Layout:
        """The layout that serves most requests among those that are accurate enough while the SLO is threatened."""
        floor = self.objectives.threatened_accuracy_ratio
        goals = self.objectives if floor is None else replace(self.objectives, minimum_accuracy_ratio=floor)
        leanest = self.search.leanest(goals, assumed(self.family))
        if leanest is not None or not isinstance(self.search, TrialSearch):
            assert leanest is not None, "a predictive search has a profile"
            return leanest
        return self.search.least_bad(goals, state)

    def _observed(self, state: ServiceState, seen: Observation) -> ServiceState:
        """The state with smoothed demand and delay, and the slowdown and admission that an observation shows."""
        held_s, slo = math.nan, self.objectives.slo
        if (predictor := self.search.predictor) is not None:
            state = replace(state, slowdown_ratio=slowdown(seen, predictor, state.slowdown_ratio))
            held_s = self._scaler(predictor, state).held_s(seen)  # NaN where too few answers show it
        admitted = admission(held_s, slo, state.admission_ratio) if state.protecting else 1.0
        elapsed_s = seen.now_s - state.seen_s
        weight = 1.0 if math.isinf(elapsed_s) else -math.expm1(-max(elapsed_s, 0.0) / self.trigger.settle_s)
        rate_rps, delay_ratio, now_rps = state.rate_rps, state.delay_ratio, seen.demand_rps
        if 0 < now_rps < math.inf:
            rate_rps = now_rps if math.isnan(rate_rps) else rate_rps + weight * (now_rps - rate_rps)
        if math.isfinite(state.predicted_s) and self._latency_counts(state, seen):
            ratio = max(seen.latency_s / state.predicted_s, 1.0)
            delay_ratio += weight * (ratio - delay_ratio)
        known_s = seen.now_s if math.isfinite(seen.g_per_kwh) else state.known_s
        at_s = seen.now_s
        return replace(
            state, admission_ratio=admitted, rate_rps=rate_rps, delay_ratio=delay_ratio, seen_s=at_s, known_s=known_s
        )

    def _latency_counts(self, state: ServiceState, seen: Observation) -> bool:
        """Whether the window's latency is that of the layout decided on, over enough requests."""
        if not isinstance(self.search, PredictiveSearch) or seen.running != state.layout:
            return False
        if state.protecting or state.weights:
            return False  # other variants answer than the layout's own
        settled = seen.now_s - state.changed_s >= self.trigger.settle_s
        return settled and seen.requests >= self.search.min_requests and math.isfinite(seen.latency_s)

    def _demand(self, state: ServiceState) -> float:
        return max(_LEAST_RPS, self.rate_rps if math.isnan(state.rate_rps) else state.rate_rps)

    def _cause(self, state: ServiceState, seen: Observation) -> tuple[str, str] | None:
        """Cause of a search now, as a word and as a phrase; None when nothing moved."""
        if state.layout is None:
            return "start", "start"
        if state.changes:
            return FAMILY, state.changes
        unknown_s = seen.now_s - state.known_s
        if moved := messages.intensity_moved(self.trigger, seen.g_per_kwh, state.g_per_kwh, unknown_s):
            return "intensity", moved
        if state.deferred and not seen.waits_for:
            return TURN, state.deferred + _WAITED
        if self._latency_counts(state, seen) and seen.latency_s > self.objectives.slo.latency_s:
            return "latency", f"{quantile(self.objectives.slo)} {latency(seen.latency_s)} above the SLO"
        if seen.now_s - state.decided_s < self.trigger.settle_s:
            return None
        if seen.running != state.layout:
            return UNFINISHED, "the layout decided on does not run"
        demand_rps = self._demand(state)
        if self.trigger.demand_moved(demand_rps, state.planned_rps):
            return "demand", messages.moved("demand", "/s", demand_rps, state.planned_rps)
        if isinstance(self.search, TrialSearch):
            return self.search.cause(self.objectives, state, seen)
        return None

    def _begin(self, state: ServiceState, seen: Observation, cause: str, cause_text: str) -> ServiceState:
        """The state of a new search; a trial search keeps the measurements of the layout that ran."""
        retry_s = 0.0
        if isinstance(self.search, TrialSearch):
            retry_s = self.search.budget.retry_s
            # Another service was on trial, or variants that left answered too: no measurement.
            sample = None if cause in (TURN, FAMILY) else seen.sample
            mine = sample is not None and sample.layout == state.layout and sample.is_own and state.whole is None
            if sample is not None and mine and sample.suffices(self.search.budget.min_requests):
                state = state.learned(self._measured(state, sample, seen, self.search))
        planned_rps = present_rps(seen, self._demand(state)) if self._cautious(state, seen) else self._demand(state)
        return state.begun(seen.now_s, cause, cause_text, seen.g_per_kwh, planned_rps, self.objectives, retry_s)

    def _cautious(self, state: ServiceState, seen: Observation) -> bool:
        """Whether the SLO was threatened lately."""
        return seen.now_s - state.threat_s < _CAUTION * self.trigger.settle_s

    def _measured(self, state: ServiceState, sample: Sample, seen: Observation, search: TrialSearch) -> MeasuredLayout:
        outcome = MeasuredLayout.of(sample, search.accuracy_ratio, self._demand(state), seen.now_s)
        return outcome if state.layout is None else replace(outcome, layout=state.layout)

    def _predict(self, state: ServiceState, seen: Observation, search: PredictiveSearch) -> Step[ServiceState]:
        """Decide on the layout that the profile predicts to be best."""
        goals = self.objectives
        observed_s = seen.latency_s if state.cause == "latency" else 0.0
        rate_rps = state.planned_rps * (_HEADROOM if self._cautious(state, seen) else 1.0)
        runs = state.whole or seen.running
        choice = search.choose(
            goals, rate_rps, seen.g_per_kwh, runs, state.delay_ratio, observed_s, state.slowdown_ratio
        )
        waits = state.cause == "latency" and seen.now_s - state.decided_s < self.trigger.settle_s
        if waits and choice.layout == (state.whole or state.layout):
            return Step(state)  # nothing better is known; that was said already
        reason = f"{state.cause_text}: {messages.predicted(choice, search.objective, goals.slo, seen.g_per_kwh)}"
        state = replace(
            state,
            layout=choice.layout,
            decided_s=seen.now_s,
            changed_s=state.changed_s if choice.layout == seen.running else seen.now_s,
            feasible=choice.feasible,
            predicted_s=choice.metrics.latency_s,
        )
        return Step(state, (self._decision(decision_kind(state, seen), choice.layout, reason, "", state.cause),))

    def _follow(
        self, state: ServiceState, trying: Layout, seen: Observation, search: TrialSearch
    ) -> Step[ServiceState]:
        """Wait for the trial that runs, or record its outcome and start the next one."""
        budget, name = search.budget, short(trying)
        if seen.running != trying:
            return self._next(state.without(trying, failed=True), seen, search, f"{name} failed to start")
        mine = seen.sample if seen.sample is not None and seen.sample.layout == trying else None
        # A trial begins when its layout serves: on a cluster that may be half a minute after the decision.
        begun_s = state.decided_s if mine is None else max(state.decided_s, mine.since_s)
        time_is_up = seen.now_s - begun_s >= budget.longest_s
        if mine is None:
            return self._no_data(state, trying, seen, search, f"{name} answered nothing") if time_is_up else Step(state)
        if mine.deaths > _MOST_DEATHS:
            remark = f"{name} lost {mine.deaths} replicas during its trial"
            return self._next(state.without(trying, failed=True), seen, search, remark)
        verdict = judge(mine, self.objectives.slo.latency_s, budget, time_is_up=time_is_up)
        if verdict is None:
            return Step(state)
        if verdict is Verdict.NO_DATA:
            return self._no_data(state, trying, seen, search, f"{name} answered {mine.answers} requests, too few")
        first = search.baseline_of(state) is None
        state = state.learned(self._measured(state, mine, seen, search))
        # The baseline's trial precedes the search's first: the search knew it from its beginning.
        state = replace(state, known_before=len(state.known), asked=()) if first else state
        remark = messages.measured(self.objectives.slo, mine, verdict)
        return self._next(replace(state, trying=None), seen, search, remark)

    def _no_data(
        self, state: ServiceState, trying: Layout, seen: Observation, search: TrialSearch, remark: str
    ) -> Step[ServiceState]:
        """End a trial with too few requests; without a baseline, the layout serves until enough have ended."""
        if search.baseline_of(state) is None:
            return self._settle(replace(state, trying=None), seen, search, remark)
        return self._next(state.without(trying), seen, search, remark)

    def _next(
        self, state: ServiceState, seen: Observation, search: TrialSearch, remark: str = ""
    ) -> Step[ServiceState]:
        """Start the next trial, or end the search."""
        budget = search.budget
        if seen.now_s - state.begun_s >= budget.clock_s:
            return self._settle(state, seen, search, remark)
        layout, after = search.propose(self.objectives, state)
        while layout is not None and self._too_slow(layout, state, seen):
            state = replace(after, asked=(*after.asked, layout)).without(layout)
            layout, after = search.propose(self.objectives, state)
        if layout is None:
            return self._settle(after, seen, search, remark)
        if seen.waits_for:
            deferred = replace(state, deferred=state.cause_text.removesuffix(_WAITED))
            return self._settle(deferred, seen, search, f"its trials wait for those of {seen.waits_for}")
        what = f"{short(layout)}, the baseline" if search.baseline_of(state) is None else short(layout)
        after = replace(after, asked=(*state.asked, layout), spent=state.spent + 1)
        state = replace(after, layout=layout, trying=layout, decided_s=seen.now_s)
        reason = f"{state.cause_text}: trial {state.spent} of at most {budget.count}: {what}"
        return Step(state, (self._decision(TRY_LAYOUT, layout, reason, remark, state.cause),))

    def _too_slow(self, layout: Layout, state: ServiceState, seen: Observation) -> bool:
        """Whether a trial of a layout would threaten the SLO again soon after a threat."""
        if not self._cautious(state, seen):
            return False
        return 0 < self._capacity_rps(layout, replace(state, weights=())) < _HEADROOM * state.planned_rps

    def _settle(self, state: ServiceState, seen: Observation, search: TrialSearch, remark: str) -> Step[ServiceState]:
        """Decide on the best measured layout at this intensity, or the least bad where none keeps the objectives."""
        goals, baseline = self.objectives, search.baseline_of(state)
        g_per_kwh = seen.g_per_kwh if math.isfinite(seen.g_per_kwh) else state.g_per_kwh
        best = search.choose(goals, state, g_per_kwh)
        if best is None or baseline is None:
            layout = search.least_bad(goals, state)
            outcome = messages.none_feasible(goals, len(state.known), layout, deferred=bool(state.deferred))
        else:
            layout, objective = best.layout, search.objective(goals.lambda_ratio, baseline)
            outcome = messages.best(best, objective, goals.slo, g_per_kwh, len(state.known))
        reason = f"{state.cause_text}: {outcome}, after {state.spent} trial{'' if state.spent == 1 else 's'}"
        state = replace(state, layout=layout, trying=None, decided_s=seen.now_s, feasible=best is not None)
        return Step(state, (self._decision(decision_kind(state, seen), layout, reason, remark, state.cause),))

    def _again(self, state: ServiceState, seen: Observation, search: TrialSearch) -> Step[ServiceState]:
        """Set the layout decided on once more where it does not run; on a second failure set the next best."""
        layout = state.layout or search.baseline
        known, more = layout in state.failures, (*state.failures, layout)
        state = state.without(layout, failed=True) if known else replace(state, failures=more)
        state = replace(state, cause=UNFINISHED, cause_text="the layout decided on does not run")
        return self._settle(state, seen, search, "")

    def _decision(self, kind: str, layout: Layout, reason: str, remark: str, cause: str) -> Decision:
        return Decision(kind, self.service, layout.names(), self.name, "; ".join(filter(None, (reason, remark))), cause)
