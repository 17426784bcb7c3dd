"""Clover live: configurations are tried on the running service, measured, and the best of them is settled on.

:class:`TrialPolicy` is pure, like every policy: it sees what a trial has shown so far and answers with the layout to
run next and why. What it remembers is what was tried; the search (:mod:`joulery.policies.serving.trial_search`) is made
again from that whenever it is asked, so that a log replays exactly.

A trial ends as soon as an interval around the promised quantile lies on one side of the limit, not after a fixed number
of requests; what is not sure to keep the limit counts as breaking it and is never settled on. While another service is
on trial, a search waits: the best that is known serves meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import DataError, InfeasibleError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.service import Slo, SloScope
from joulery.policies.serving import trial_messages as say
from joulery.policies.serving.objective import has_moved
from joulery.policies.serving.trial_sample import Tried, Verdict, judge
from joulery.policies.serving.trial_search import TrialProblem, choice, propose
from joulery.policies.serving.trial_state import Budget, TrialState, TrialTerms
from joulery.policies.serving.variant_policy import KEEP_LAYOUT, SET_LAYOUT, Observation, short

TRY_LAYOUT = "try_layout"
UNFINISHED, TURN = "unfinished", "turn"
_WAITED = ", after waiting"
_LEAST_RPS = 1e-3
_MOST_DEATHS = 1
"""A replica that dies once under a trial may be an accident; the second time it is the layout's."""
_SURELY = 3.0
"""Standard errors by which a mean accuracy must lie below the one asked for."""


@dataclass(frozen=True, slots=True)
class TrialPolicy:
    """Chooses among layouts of one service by Clover's objective, from trials on the service itself.

    Attributes:
        service: Whose layouts.
        problem: The layouts, and what they are compared with.
        terms: What is asked for.
        rate_rps: Demand to plan for until one has been observed.
        replan_ratio: Search again when the intensity moved by this share of the yardstick's.
        rate_step_ratio: Search again when the demand left the planned one by this share.
        settle_s: Time constant over which demand is smoothed; apart from the grid and the terms, nothing begins a
            search sooner after a decision.
        budget: What a search may spend.

    Raises:
        InfeasibleError: No variant is as accurate as asked for.
    """

    service: str
    problem: TrialProblem
    terms: TrialTerms
    rate_rps: float
    replan_ratio: float = 0.05
    rate_step_ratio: float = 0.3
    settle_s: float = 5.0
    budget: Budget = field(default_factory=Budget)

    name = "trials"

    def __post_init__(self) -> None:
        best = self.problem.best_accuracy_ratio
        if best < self.terms.minimum_accuracy_ratio:
            raise InfeasibleError(
                f"{self.service}: no layout is as accurate as {self.terms.minimum_accuracy_ratio:.2%}",
                binding="minimum_accuracy",
                nearest=best,
                hint=f"ask for at most {best:.2%}",
            )

    @property
    def minimum_accuracy_ratio(self) -> float:
        """The mean accuracy never to go below."""
        return self.terms.minimum_accuracy_ratio

    @property
    def candidates(self) -> tuple[Layout, ...]:
        """Every layout there is to try."""
        return self.problem.space.layouts

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: all that it takes to decide the same again."""
        slo = self.terms.slo
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "problem": self.problem.as_dict(),
            "terms": {
                "lambda_ratio": self.terms.lambda_ratio,
                "slo": {"latency_s": slo.latency_s, "quantile": slo.quantile, "scope": slo.scope.value},
                "minimum_accuracy_ratio": self.terms.minimum_accuracy_ratio,
            },
            "budget": asdict(self.budget),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrialPolicy:
        """The inverse of :meth:`as_dict`.

        Raises:
            DataError: It is not what ``as_dict`` writes.
        """
        try:
            terms, slo = dict(data["terms"]), dict(data["terms"]["slo"])
            terms["slo"] = Slo(**{**slo, "scope": SloScope(slo["scope"])})
            return cls(
                **{name: data[name] for name in _PLAIN},
                problem=TrialProblem.from_dict(data["problem"]),
                terms=TrialTerms(**terms),
                budget=Budget(**data["budget"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a policy of trials: {error!r}") from error

    def initial(self) -> TrialState:
        """Nothing tried yet."""
        return TrialState()

    def step(self, state: TrialState, observation: Observation, /) -> Step[TrialState]:
        """Follow the trial that runs, or begin a search if something moved."""
        state = self._demand_seen(state, observation)
        changed = say.changed(state.terms, self.terms)
        if state.trying is not None and not changed:
            return self._follow(state, state.trying, observation)
        cause = ("terms", changed) if changed else self._cause(state, observation)
        if cause is None:
            return Step(state)
        if cause[0] == UNFINISHED:
            return self._again(state, observation)
        return self._next(self._begin(state, observation, *cause), observation)

    def _demand_seen(self, state: TrialState, seen: Observation) -> TrialState:
        elapsed_s = seen.now_s - state.seen_s
        weight = 1.0 if math.isinf(elapsed_s) else -math.expm1(-max(elapsed_s, 0.0) / self.settle_s)
        rate_rps = state.rate_rps
        if 0 < seen.rate_rps < math.inf:
            rate_rps = seen.rate_rps if math.isnan(rate_rps) else rate_rps + weight * (seen.rate_rps - rate_rps)
        return replace(state, rate_rps=rate_rps, seen_s=seen.now_s)

    def _demand(self, state: TrialState) -> float:
        return max(_LEAST_RPS, self.rate_rps if math.isnan(state.rate_rps) else state.rate_rps)

    def _cause(self, state: TrialState, seen: Observation) -> tuple[str, str] | None:
        """Why to search now, as a word and in words; None when nothing calls for it."""
        if state.layout is None:
            return "start", "start"
        now_g, then_g = max(0.0, seen.g_per_kwh), max(0.0, state.g_per_kwh)
        if math.isfinite(seen.g_per_kwh):
            if math.isnan(state.g_per_kwh):
                return "intensity", f"intensity known again, {now_g:.0f} g/kWh"
            pue, base_g = self.problem.pue, self.problem.base_g_per_kwh * self.problem.base_pue
            if has_moved(now_g * pue, then_g * pue, base_g, self.replan_ratio):
                return "intensity", f"grid {'up' if now_g > then_g else 'down'} from {then_g:.0f} to {now_g:.0f} g/kWh"
        if state.owed and not seen.waits_for:
            return TURN, state.owed + _WAITED
        if seen.now_s - state.decided_s < self.settle_s:
            return None
        if seen.running != state.layout:
            return UNFINISHED, "what was decided does not run"
        ratio = self._demand(state) / state.planned_rps
        if max(ratio, 1 / ratio) > 1 + self.rate_step_ratio:
            direction = "up" if ratio > 1 else "down"
            return "demand", f"demand {direction} from {state.planned_rps:.0f} to {self._demand(state):.0f} /s"
        if state.yardstick is None and state.owed:
            return None  # what runs is measured when its turn has come
        if state.yardstick is None:
            told = seen.sample is not None and seen.sample.tells(self.budget.fewest)
            return ("measured", "enough requests have come to begin with") if told else None
        if state.feasible or seen.now_s - state.decided_s >= self.budget.retry_s:
            return self._broken_promise(state, seen)
        return None

    def _broken_promise(self, state: TrialState, seen: Observation) -> tuple[str, str] | None:
        sample = seen.sample
        if sample is None or sample.layout != state.layout or sample.requests < self.budget.fewest:
            return None
        slo, least = self.terms.slo, self.terms.minimum_accuracy_ratio
        if sample.latency_low_s > slo.latency_s:
            return "latency", f"{say.quantile(slo)} {say.ms(sample.latency_s)} above the SLO of {say.ms(slo.latency_s)}"
        mean, error = sample.accuracy(self.problem.accuracy_ratio)
        if mean + _SURELY * error < least - 1e-9:
            return "accuracy", f"accuracy {mean:.2%} below the {least:.2%} asked for"
        return None

    def _begin(self, state: TrialState, seen: Observation, cause: str, words: str) -> TrialState:
        """A new search, with what is known of the layout that has run."""
        sample = None if cause == TURN else seen.sample  # others tried meanwhile: that is no measurement
        if sample is not None and sample.layout == state.layout and sample.tells(self.budget.fewest):
            state = state.learned(Tried.of(sample, self.problem.accuracy_ratio, self._demand(state), seen.now_s))
        demand_rps, retry_s = self._demand(state), self.budget.retry_s
        return state.begun(seen.now_s, cause, words, seen.g_per_kwh, demand_rps, self.terms, retry_s)

    def _follow(self, state: TrialState, trying: Layout, seen: Observation) -> Step[TrialState]:
        """The trial that runs: wait, or learn from it and go on."""
        budget, name = self.budget, short(trying)
        if seen.running != trying:
            return self._next(state.without(trying, failed=True), seen, f"{name} could not be run")
        mine = seen.sample if seen.sample is not None and seen.sample.layout == trying else None
        # A trial begins when its layout serves: on a cluster that may be half a minute after the decision.
        begun_s = state.decided_s if mine is None else max(state.decided_s, mine.since_s)
        time_is_up = seen.now_s - begun_s >= budget.longest_s
        if mine is None:
            return self._silent(state, trying, seen, f"{name} answered nothing") if time_is_up else Step(state)
        if mine.deaths > _MOST_DEATHS:
            remark = f"{name} lost {mine.deaths} replicas under its trial"
            return self._next(state.without(trying, failed=True), seen, remark)
        limit_s = self.terms.slo.latency_s
        verdict = judge(mine, limit_s, budget.fewest, budget.energy_tolerance_ratio, time_is_up=time_is_up)
        if verdict is None:
            return Step(state)
        if verdict is Verdict.SILENT:
            return self._silent(state, trying, seen, f"{name} answered {mine.answers} requests, too few to say")
        first = state.yardstick is None
        state = state.learned(Tried.of(mine, self.problem.accuracy_ratio, self._demand(state), seen.now_s))
        # The yardstick's trial comes before the search's first: for the search it was known from the beginning.
        state = replace(state, before=len(state.known), asked=()) if first else state
        return self._next(replace(state, trying=None), seen, say.seen(self.terms.slo, mine, verdict))

    def _silent(self, state: TrialState, trying: Layout, seen: Observation, remark: str) -> Step[TrialState]:
        """Too few requests came. Without a yardstick nothing can be weighed: it serves until enough have come."""
        if state.yardstick is None:
            return self._settle(replace(state, trying=None), seen, remark)
        return self._next(state.without(trying), seen, remark)

    def _next(self, state: TrialState, seen: Observation, remark: str = "") -> Step[TrialState]:
        """The next trial, or the end of the search."""
        budget = self.budget
        over = state.spent >= budget.count or seen.now_s - state.begun_s >= budget.clock_s
        layout = None if over else propose(self.problem, self.terms, state, budget.count)
        if layout is None:
            return self._settle(state, seen, remark)
        if seen.waits_for:
            waiting = replace(state, owed=state.words.removesuffix(_WAITED))
            return self._settle(waiting, seen, f"its trials wait for those of {seen.waits_for}")
        what = f"{short(layout)}, the yardstick" if state.yardstick is None else short(layout)
        state = replace(
            state,
            layout=layout,
            trying=layout,
            decided_s=seen.now_s,
            asked=(*state.asked, layout),
            spent=state.spent + 1,
        )
        reason = f"{state.words}: trial {state.spent} of at most {budget.count}: {what}"
        return Step(state, (self._decision(TRY_LAYOUT, layout, reason, remark, state.cause),))

    def _settle(self, state: TrialState, seen: Observation, remark: str) -> Step[TrialState]:
        """The best measured at the present intensity; where none keeps what was promised, the yardstick."""
        g_per_kwh = seen.g_per_kwh if math.isfinite(seen.g_per_kwh) else state.g_per_kwh
        best = choice(self.problem, self.terms, state, g_per_kwh)
        if best is None:
            layout = (state.layout or self.problem.base) if state.yardstick is None else state.yardstick.layout
            words = say.none_keeps(self.terms, len(state.known), layout, waits=bool(state.owed))
        else:
            layout = best.layout
            words = say.best(self.problem, self.terms, state, best, g_per_kwh)
        reason = f"{state.words}: {words}, after {state.spent} trial{'' if state.spent == 1 else 's'}"
        state = replace(state, layout=layout, trying=None, decided_s=seen.now_s, feasible=best is not None)
        kind = KEEP_LAYOUT if layout == seen.running else SET_LAYOUT
        return Step(state, (self._decision(kind, layout, reason, remark, state.cause),))

    def _again(self, state: TrialState, seen: Observation) -> Step[TrialState]:
        """What was settled on does not run: settle on it once more, or, after that, on the next best."""
        layout = state.layout or self.problem.base
        if layout in state.failures:
            state = state.without(layout, failed=True)
        else:
            state = replace(state, failures=(*state.failures, layout))
        return self._settle(replace(state, cause=UNFINISHED, words="what was decided does not run"), seen, "")

    def _decision(self, kind: str, layout: Layout, reason: str, remark: str, cause: str) -> Decision:
        return Decision(
            kind, self.service, layout.names(), self.name, f"{reason}; {remark}" if remark else reason, cause
        )


_PLAIN = ("service", "rate_rps", "replan_ratio", "rate_step_ratio", "settle_s")
