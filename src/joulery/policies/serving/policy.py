"""The policy of one service: which variants run on which slices, by Clover's objective within the SLO.

:class:`ServicePolicy` is pure. It observes the grid's intensity, the demand and the latency, and answers with the
layout to run next and the reason. How it finds a layout is its search: by prediction from a measured profile
(:class:`~joulery.policies.serving.predictive_search.PredictiveSearch`), or by trials on the service itself
(:class:`~joulery.policies.serving.trial_search.TrialSearch`: Clover's annealer, or a learned model). The simulator's
Clover study and the live service drive this same object.

A search starts when the objectives, the grid or the demand moved, or when the service violates its SLO. A trial ends as
soon as the interval around the SLO's quantile lies on one side of the limit; what is not sure to keep the limit counts
as violating it. While another service is on trial, a search waits and the best known layout serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError, InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.service import Slo, SloScope
from joulery.policies.serving import messages
from joulery.policies.serving.messages import ms, quantile, short
from joulery.policies.serving.objective import ReplanTrigger, ServiceObjectives
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT, TRY_LAYOUT, Observation, Sample
from joulery.policies.serving.predictive_search import PredictiveSearch
from joulery.policies.serving.state import ServiceState
from joulery.policies.serving.trial_search import TrialSearch
from joulery.policies.serving.trials import MeasuredLayout, Verdict, judge

UNFINISHED, TURN = "unfinished", "turn"
_WAITED = ", after waiting"
_LEAST_RPS = 1e-3
_MOST_DEATHS = 1
"""Replica deaths during a trial that count as an accident; more are the layout's own."""
_ACCURACY_ERRORS = 3.0
"""Standard errors by which a mean accuracy must lie below the minimum to count as below it."""
_STRAIN, _THREAT = 1.0, 2.0
"""Delays of the queue as multiples of the SLO: two in a row above the first are a threat, or one above the second."""
_ARRIVAL_ERRORS, _ARRIVAL_WINDOW_S = 3.0, 2.0
"""Standard errors by which arrivals over so many seconds must exceed the capacity."""
_ROOM_RATIO = 2.0
"""Multiples of the settling time without a threat after which there is room again."""


@dataclass(frozen=True, slots=True)
class ServicePolicy:
    """Chooses among the layouts of one service.

    Attributes:
        service: The service.
        search: Finds layouts.
        objectives: Weight of carbon, SLO and accuracy floor.
        rate_rps: Demand to plan for until one has been observed.
        trigger: When a change starts a new search.

    Raises:
        InfeasibleError: No variant is as accurate as the objectives ask.
    """

    service: str
    search: PredictiveSearch | TrialSearch
    objectives: ServiceObjectives
    rate_rps: float
    trigger: ReplanTrigger

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
        """JSON-ready: all that it takes to decide the same again."""
        slo = self.objectives.slo
        return {
            "service": self.service,
            "rate_rps": self.rate_rps,
            "trigger": asdict(self.trigger),
            "objectives": {
                "lambda_ratio": self.objectives.lambda_ratio,
                "slo": {"latency_s": slo.latency_s, "quantile": slo.quantile, "scope": slo.scope.value},
                "minimum_accuracy_ratio": self.objectives.minimum_accuracy_ratio,
            },
            "search": self.search.as_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServicePolicy:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: It is not what ``as_dict`` writes.
        """
        if "search" not in data and ("predictor" in data or "problem" in data):
            raise DataError("the policy was logged by joulery 0.1, whose rules this version no longer has")
        try:
            goals, slo = dict(data["objectives"]), dict(data["objectives"]["slo"])
            goals["slo"] = Slo(**{**slo, "scope": SloScope(slo["scope"])})
            kind = TrialSearch if data["search"]["kind"] == TrialSearch.name else PredictiveSearch
            return cls(
                service=str(data["service"]),
                search=kind.from_dict(data["search"]),
                objectives=ServiceObjectives(**goals),
                rate_rps=float(data["rate_rps"]),
                trigger=ReplanTrigger(**data["trigger"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not a service policy: {error!r}") from error

    def initial(self) -> ServiceState:
        """Nothing decided yet."""
        return ServiceState()

    def step(self, state: ServiceState, observation: Observation, /) -> Step[ServiceState]:
        """Follow the trial that runs, or begin a search if something moved."""
        state, threat = self._watched(self._observed(state, observation), observation)
        changed = messages.changed(state.objectives, self.objectives)
        if threat and not changed:
            return self._protect(state, observation, threat)
        if state.protecting and not changed:
            if observation.now_s - state.threat_s < _ROOM_RATIO * self.trigger.settle_s:
                return Step(state)
            moved = self.trigger.demand_moved(self._demand(state), state.planned_rps)
            state = replace(state, protecting=False)
            return self._search(state, observation, "demand" if moved else "room", "the SLO has room again")
        state = replace(state, protecting=False)
        if isinstance(self.search, TrialSearch) and state.trying is not None and not changed:
            return self._follow(state, state.trying, observation, self.search)
        cause = ("terms", changed) if changed else self._cause(state, observation)
        if cause is None:
            return Step(state)
        if isinstance(self.search, TrialSearch) and cause[0] == UNFINISHED:
            return self._again(state, observation, self.search)
        return self._search(state, observation, *cause)

    def _search(self, state: ServiceState, seen: Observation, cause: str, words: str) -> Step[ServiceState]:
        """Begin a search."""
        begun = self._begin(state, seen, cause, words)
        if isinstance(self.search, PredictiveSearch):
            return self._predict(begun, seen, self.search)
        return self._next(begun, seen, self.search)

    def _watched(self, state: ServiceState, seen: Observation) -> tuple[ServiceState, str]:
        """The state with what threatens the SLO now; and the threat as a phrase, empty for none."""
        delay_s, phrase = self._queue_delay(seen)
        limit_s = self.objectives.slo.latency_s
        strained = state.strained + 1 if delay_s > _STRAIN * limit_s else 0
        if not (strained >= 2 or delay_s > _THREAT * limit_s):
            phrase = self._surge(seen)
        if phrase and not self._attainable(state):
            phrase = ""
        return replace(state, strained=strained, threat_s=seen.now_s if phrase else state.threat_s), phrase

    def _queue_delay(self, seen: Observation) -> tuple[float, str]:
        """Seconds that a request which arrives now waits at least, or that the oldest has waited; and that in words."""
        if self.objectives.slo.scope is not SloScope.END_TO_END or not seen.queued:
            return 0.0, ""
        capacity_rps = self._capacity_rps(seen.running)
        drain_s = seen.queued / capacity_rps if capacity_rps > 0 else 0.0
        delay_s = max(seen.oldest_wait_s, drain_s)
        return delay_s, f"{seen.queued} requests queued, the oldest for {ms(seen.oldest_wait_s)}"

    def _attainable(self, state: ServiceState) -> bool:
        """Whether the leanest layout answers within the SLO when nothing waits; else protecting it is pointless."""
        predictor = self.search.predictor
        if predictor is None:
            return True
        try:
            fastest_s = min(item.loaded.mean_s for item in predictor.instances(self._leanest(state)))
        except DataError:
            return True  # one of its variants was not profiled on its slice
        return fastest_s <= self.objectives.slo.latency_s

    def _surge(self, seen: Observation) -> str:
        """That more requests arrive than the running layout can serve; empty where they do not."""
        capacity_rps, rate_rps = self._capacity_rps(seen.running), seen.arrival_rps
        if not (capacity_rps > 0 and rate_rps > 0):
            return ""
        error_rps = math.sqrt(rate_rps / _ARRIVAL_WINDOW_S)
        if rate_rps - _ARRIVAL_ERRORS * error_rps <= capacity_rps:
            return ""
        return f"{rate_rps:.0f} requests/s arrive, {capacity_rps:.0f} /s can be served"

    def _capacity_rps(self, layout: Layout | None) -> float:
        """Requests a second that a layout can serve; 0 where no profile says so."""
        predictor = self.search.predictor
        if layout is None or predictor is None:
            return 0.0
        try:
            return 1.0 / predictor.utilisation_ratio(layout, 1.0)
        except DataError:
            return 0.0  # one of its variants was not profiled on its slice

    def _protect(self, state: ServiceState, seen: Observation, threat: str) -> Step[ServiceState]:
        """Run the leanest layout at once; trials and carbon wait until there is room."""
        layout = self._leanest(state)
        begun = state.protecting and state.layout == layout
        if begun and (seen.running == layout or seen.now_s - state.decided_s < self.trigger.settle_s):
            return Step(state)
        reason = f"SLO threatened: {threat}; {short(layout)} is the leanest layout"
        changed_s = state.changed_s if layout == seen.running else seen.now_s
        state = replace(
            state,
            layout=layout,
            trying=None,
            decided_s=seen.now_s,
            changed_s=changed_s,
            predicted_s=math.nan,
            protecting=True,
        )
        kind = KEEP_LAYOUT if layout == seen.running else SET_LAYOUT
        return Step(state, (self._decision(kind, layout, reason, "", "threat"),))

    def _leanest(self, state: ServiceState) -> Layout:
        """The layout that serves most requests among those that are accurate enough."""
        leanest = self.search.leanest(self.objectives)
        if leanest is not None or not isinstance(self.search, TrialSearch):
            assert leanest is not None, "a predictive search has a profile"
            return leanest
        return self.search.least_bad(self.objectives, state)

    def _observed(self, state: ServiceState, seen: Observation) -> ServiceState:
        """Demand and delay, smoothed."""
        elapsed_s = seen.now_s - state.seen_s
        weight = 1.0 if math.isinf(elapsed_s) else -math.expm1(-max(elapsed_s, 0.0) / self.trigger.settle_s)
        rate_rps, delay_ratio, now_rps = state.rate_rps, state.delay_ratio, seen.demand_rps
        if 0 < now_rps < math.inf:
            rate_rps = now_rps if math.isnan(rate_rps) else rate_rps + weight * (now_rps - rate_rps)
        if math.isfinite(state.predicted_s) and self._latency_counts(state, seen):
            ratio = max(seen.latency_s / state.predicted_s, 1.0)
            delay_ratio += weight * (ratio - delay_ratio)
        return replace(state, rate_rps=rate_rps, delay_ratio=delay_ratio, seen_s=seen.now_s)

    def _latency_counts(self, state: ServiceState, seen: Observation) -> bool:
        """Whether the window's latency is that of the layout decided on, over enough requests."""
        if not isinstance(self.search, PredictiveSearch) or seen.running != state.layout:
            return False
        settled = seen.now_s - state.changed_s >= self.trigger.settle_s
        return settled and seen.requests >= self.search.min_requests and math.isfinite(seen.latency_s)

    def _demand(self, state: ServiceState) -> float:
        return max(_LEAST_RPS, self.rate_rps if math.isnan(state.rate_rps) else state.rate_rps)

    def _cause(self, state: ServiceState, seen: Observation) -> tuple[str, str] | None:
        """Why to search now, as a word and as a phrase; None when nothing moved."""
        if state.layout is None:
            return "start", "start"
        if math.isfinite(seen.g_per_kwh):
            if math.isnan(state.g_per_kwh):
                return "intensity", f"intensity known again, {seen.g_per_kwh:.0f} g/kWh"
            if self.trigger.intensity_moved(seen.g_per_kwh, state.g_per_kwh):
                now_g, then_g = max(0.0, seen.g_per_kwh), max(0.0, state.g_per_kwh)
                return "intensity", messages.moved("grid", "g/kWh", now_g, then_g)
        if state.deferred and not seen.waits_for:
            return TURN, state.deferred + _WAITED
        if self._latency_counts(state, seen) and seen.latency_s > self.objectives.slo.latency_s:
            return "latency", f"{quantile(self.objectives.slo)} {ms(seen.latency_s)} above the SLO"
        if seen.now_s - state.decided_s < self.trigger.settle_s:
            return None
        if seen.running != state.layout:
            return UNFINISHED, "the layout decided on does not run"
        demand_rps = self._demand(state)
        if self.trigger.demand_moved(demand_rps, state.planned_rps):
            return "demand", messages.moved("demand", "/s", demand_rps, state.planned_rps)
        if isinstance(self.search, TrialSearch):
            return self._trial_cause(state, seen, self.search)
        return None

    def _trial_cause(self, state: ServiceState, seen: Observation, search: TrialSearch) -> tuple[str, str] | None:
        """Why to begin a search by trials: enough requests for a first one, or a violated objective."""
        sample, budget = seen.sample, search.budget
        if search.baseline_of(state) is None:
            if state.deferred or sample is None or not sample.suffices(budget.min_requests):
                return None  # a deferred search measures what runs when its turn has come
            return "measured", "enough requests ended to begin with"
        if sample is None or sample.layout != state.layout or sample.requests < budget.min_requests:
            return None
        if not state.feasible and seen.now_s - state.decided_s < budget.retry_s:
            return None
        slo, least = self.objectives.slo, self.objectives.minimum_accuracy_ratio
        if sample.latency_low_s > slo.latency_s:
            return "latency", f"{quantile(slo)} {ms(sample.latency_s)} above the SLO of {ms(slo.latency_s)}"
        mean, error = sample.accuracy(search.accuracy_ratio)
        if mean + _ACCURACY_ERRORS * error < least - 1e-9:
            return "accuracy", f"accuracy {mean:.2%} below the minimum of {least:.2%}"
        return None

    def _begin(self, state: ServiceState, seen: Observation, cause: str, words: str) -> ServiceState:
        """The state of a new search; a trial search keeps what the layout that ran has shown."""
        retry_s = 0.0
        if isinstance(self.search, TrialSearch):
            retry_s = self.search.budget.retry_s
            sample = None if cause == TURN else seen.sample  # another service was on trial: no measurement
            mine = sample is not None and sample.layout == state.layout
            if sample is not None and mine and sample.suffices(self.search.budget.min_requests):
                state = state.learned(self._measured(state, sample, seen, self.search))
        return state.begun(seen.now_s, cause, words, seen.g_per_kwh, self._demand(state), self.objectives, retry_s)

    def _measured(self, state: ServiceState, sample: Sample, seen: Observation, search: TrialSearch) -> MeasuredLayout:
        outcome = MeasuredLayout.of(sample, search.accuracy_ratio, self._demand(state), seen.now_s)
        return outcome if state.layout is None else replace(outcome, layout=state.layout)

    def _predict(self, state: ServiceState, seen: Observation, search: PredictiveSearch) -> Step[ServiceState]:
        """The layout that the profile predicts to be best."""
        goals = self.objectives
        observed_s = seen.latency_s if state.cause == "latency" else 0.0
        choice = search.choose(goals, state.planned_rps, seen.g_per_kwh, seen.running, state.delay_ratio, observed_s)
        waits = state.cause == "latency" and seen.now_s - state.decided_s < self.trigger.settle_s
        if waits and choice.layout == state.layout:
            return Step(state)  # nothing better is known; that was said already
        reason = f"{state.words}: {messages.predicted(choice, search.objective, goals.slo, seen.g_per_kwh)}"
        state = replace(
            state,
            layout=choice.layout,
            decided_s=seen.now_s,
            changed_s=state.changed_s if choice.layout == seen.running else seen.now_s,
            feasible=choice.feasible,
            predicted_s=choice.metrics.latency_s,
        )
        kind = KEEP_LAYOUT if choice.layout == seen.running else SET_LAYOUT
        return Step(state, (self._decision(kind, choice.layout, reason, "", state.cause),))

    def _follow(
        self, state: ServiceState, trying: Layout, seen: Observation, search: TrialSearch
    ) -> Step[ServiceState]:
        """The trial that runs: wait, or learn from it and go on."""
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
        """Too few requests ended. Without a baseline nothing can be compared: it serves until enough have ended."""
        if search.baseline_of(state) is None:
            return self._settle(replace(state, trying=None), seen, search, remark)
        return self._next(state.without(trying), seen, search, remark)

    def _next(
        self, state: ServiceState, seen: Observation, search: TrialSearch, remark: str = ""
    ) -> Step[ServiceState]:
        """The next trial, or the end of the search."""
        budget = search.budget
        if seen.now_s - state.begun_s >= budget.clock_s:
            return self._settle(state, seen, search, remark)
        layout, after = search.propose(self.objectives, state)
        if layout is None:
            return self._settle(after, seen, search, remark)
        if seen.waits_for:
            deferred = replace(state, deferred=state.words.removesuffix(_WAITED))
            return self._settle(deferred, seen, search, f"its trials wait for those of {seen.waits_for}")
        what = f"{short(layout)}, the baseline" if search.baseline_of(state) is None else short(layout)
        state = replace(
            after,
            layout=layout,
            trying=layout,
            decided_s=seen.now_s,
            asked=(*state.asked, layout),
            spent=state.spent + 1,
        )
        reason = f"{state.words}: trial {state.spent} of at most {budget.count}: {what}"
        return Step(state, (self._decision(TRY_LAYOUT, layout, reason, remark, state.cause),))

    def _settle(self, state: ServiceState, seen: Observation, search: TrialSearch, remark: str) -> Step[ServiceState]:
        """The best measured layout at the present intensity; the least bad where none keeps the objectives."""
        goals, baseline = self.objectives, search.baseline_of(state)
        g_per_kwh = seen.g_per_kwh if math.isfinite(seen.g_per_kwh) else state.g_per_kwh
        best = search.choose(goals, state, g_per_kwh)
        if best is None or baseline is None:
            layout = search.least_bad(goals, state)
            words = messages.none_feasible(goals, len(state.known), layout, deferred=bool(state.deferred))
        else:
            layout, objective = best.layout, search.objective(goals.lambda_ratio, baseline)
            words = messages.best(best, objective, goals.slo, g_per_kwh, len(state.known))
        reason = f"{state.words}: {words}, after {state.spent} trial{'' if state.spent == 1 else 's'}"
        state = replace(state, layout=layout, trying=None, decided_s=seen.now_s, feasible=best is not None)
        kind = KEEP_LAYOUT if layout == seen.running else SET_LAYOUT
        return Step(state, (self._decision(kind, layout, reason, remark, state.cause),))

    def _again(self, state: ServiceState, seen: Observation, search: TrialSearch) -> Step[ServiceState]:
        """What was settled on does not run: set it once more, and after that the next best."""
        layout = state.layout or search.baseline
        if layout in state.failures:
            state = state.without(layout, failed=True)
        else:
            state = replace(state, failures=(*state.failures, layout))
        words = "the layout decided on does not run"
        return self._settle(replace(state, cause=UNFINISHED, words=words), seen, search, "")

    def _decision(self, kind: str, layout: Layout, reason: str, remark: str, cause: str) -> Decision:
        reason = f"{reason}; {remark}" if remark else reason
        return Decision(kind, self.service, layout.names(), self.name, reason, cause)
