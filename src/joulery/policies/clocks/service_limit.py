"""The power limit of a device that serves, learned while it serves, with a bound on how much it slows requests down.

Work a second is not meaningful under partial load, so the policy compares **service time**: how long requests of a kind
run once they are started, queueing left out. It measures what a limit does and assumes nothing: short windows under the
limit alternate with windows at full power (full, limit, limit, full, ...; a switchback), so that a drift of the load
meets both alike. Each neighbouring two windows are one comparison of service time and of joules for the same work.

A limit is kept only where its slowdown is found within ``max_slowdown`` (a limit beyond it passes in fewer than 5 % of
its trials) and its cost, ``eta · energy + (1 - eta) · service time``, both against full power, is the least of those
known. The nearer it is to the bound and the more requests differ, the more comparisons that takes, 4 to 48. While it is
kept, further windows at full power renew the comparison.

Two rules hold at every observation, trials included:

- **The bound.** The device earns **credit** while it answers faster than the bound allows: ``max_slowdown`` times the
  service time of its answers at full power, less the service time that they took. Below full power the credit never
  falls below what one further period could lose if nothing were answered any more.
- **The SLO comes first.** Where a queue, an age or the attainment threatens an SLO, the same step returns to full
  power. The limit and every lower one are given up, and the next trial waits twice as long after each threat.

The simulator and ``joulery up`` drive the same object.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ConfigError
from joulery.domain.json_numbers import known_numbers
from joulery.policies.clocks.limit_comparison import (
    FULL,
    LimitRecord,
    WindowTotals,
    WorkTotals,
    add_totals,
    compare_windows,
    faded,
)
from joulery.policies.clocks.power_limit import LIMIT_RATIOS, LimitPhase, check_limit_search

SET_POWER_LIMIT = "set_power_limit"
MIN_ANSWERS = 20
"""Answers that a window needs."""
_SERVICE_TIMES = 20
"""Least length of a window in mean service times: requests that its ends cut off then weigh little."""
_QUIET = 10
"""Multiples of its length after which a window without enough answers is given up."""
_AFFORDED = 0.25
"""Share of the work of a trial that may be lost: a limit that loses more is certainly beyond the bound."""
_PRESSURE_RATIO = 0.5
"""Share of the SLO's latency at which the oldest request, or what a queue adds, counts as a threat."""
_MIN_JUDGED = 20
"""Answers by which the attainment of a service is judged."""
_NOISE = 0.01
_RISES = 2
"""Limits in a row that cost more than the least by more than noise before the search ends."""
_IDLE_WINDOWS = 24
"""Windows without a comparison after which a trial ends."""
_SEARCH_SHARE = 0.2
"""Largest share of the time that searches may take."""


@dataclass(frozen=True, slots=True)
class ServicePressure:
    """Pressure on a service: how near it is to missing its SLO.

    Attributes:
        name: The service.
        slo_s: Latency of its SLO, s.
        quantile: Share of the answers that must keep it.
        oldest_s: Age of its oldest request that is not answered, s; 0 for none.
        delay_s: Time that a request which arrives now is predicted to wait, s.
        attainment_ratio: Share of its recent answers within the SLO; NaN for none.
        answers: Number of these answers.
    """

    name: str
    slo_s: float
    quantile: float
    oldest_s: float = 0.0
    delay_s: float = 0.0
    attainment_ratio: float = math.nan
    answers: int = 0

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ServicePressure:
        """The pressure in a dictionary of :meth:`ServingDeviceView.as_dict`."""
        return cls(**_known(fields))

    def threat(self) -> str:
        """The threat to the SLO as text; empty for none."""
        late_s = max(self.oldest_s, self.delay_s)
        if late_s > _PRESSURE_RATIO * self.slo_s:
            return f"{self.name}: {late_s:.3g} s of the SLO of {self.slo_s:.3g} s are gone"
        if self.answers >= _MIN_JUDGED and self.attainment_ratio < self.quantile:
            return f"{self.name}: {100 * self.attainment_ratio:.1f} % within the SLO, {100 * self.quantile:g} % wanted"
        return ""


@dataclass(frozen=True, slots=True)
class ServingDeviceView:
    """The policy's view of a device that serves.

    Attributes:
        now_s: Time, s.
        ratio: The limit in force, as a share of full power.
        set_s: When it was set, s; minus infinity for always.
        energy_j: Energy of the device so far, J; NaN where it is not read.
        servers: Requests that run at once.
        running_s: Sum of the times for which the running requests have run, s.
        answers: Work of the requests that were answered since the last view, by kind.
        services: Pressure on the services.
        arrangement: Identifier of what runs, in any form; measurements of another arrangement are discarded.
        pinned: Whether a trial of a layout runs, during which no other limit may be tried.
    """

    now_s: float
    ratio: float
    set_s: float
    energy_j: float
    servers: int
    running_s: float
    answers: tuple[WorkTotals, ...] = ()
    services: tuple[ServicePressure, ...] = ()
    arrangement: str = ""
    pinned: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The view as a JSON-ready dictionary; numbers that are not finite are None."""
        document: dict[str, Any] = known_numbers(asdict(self))
        return document

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ServingDeviceView:
        """The inverse of :meth:`as_dict`."""
        values = {**_known(fields), "set_s": -math.inf if fields["set_s"] is None else fields["set_s"]}
        values["answers"] = tuple(WorkTotals(**one) for one in fields["answers"])
        values["services"] = tuple(ServicePressure.from_dict(one) for one in fields["services"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ServiceLimitState:
    """State of one device.

    Attributes:
        phase: Purpose of the present limit.
        ratio: The limit wanted.
        seen_s: Time of the last view; NaN before the first.
        arrangement: Arrangement in that view.
        window: The window that is being measured; None while the device settles.
        position: Windows of the present trial that are complete.
        trial: The limit of the present trial.
        first: The first window of a comparison whose second one runs; None for none.
        base: Work at full power, by kind.
        full_w: Power at full power, W; 0 while unknown.
        busy_ratio: Mean number of requests that ran at once at full power.
        credit_s: Service time that may still be lost, s.
        records: Limits that were compared with full power.
        tried: Limits that were tried or left out.
        rises: Number of the latest limits in a row that cost more than the least.
        calm_s: No limit before this time.
        backoff_s: How long a further threat keeps full power.
        searched_s: When the search began.
        found_s: When it ended; NaN while it runs.
        checked_s: When the limit that is kept was compared last.
    """

    phase: LimitPhase = LimitPhase.BASELINE
    ratio: float = 1.0
    seen_s: float = math.nan
    arrangement: str = ""
    window: WindowTotals | None = None
    position: int = 0
    trial: float = 1.0
    first: WindowTotals | None = None
    base: tuple[WorkTotals, ...] = ()
    full_w: float = 0.0
    busy_ratio: float = 0.0
    credit_s: float = 0.0
    records: tuple[LimitRecord, ...] = ()
    tried: tuple[float, ...] = ()
    rises: int = 0
    calm_s: float = -math.inf
    backoff_s: float = 0.0
    searched_s: float = 0.0
    found_s: float = math.nan
    checked_s: float = 0.0

    def finished(self, tuner: ServiceLimitTuner) -> bool:
        """Whether the search is over: every limit was tried or left out."""
        return self.phase is LimitPhase.HOLD and set(tuner.ratios) <= set(self.tried)


@dataclass(frozen=True, slots=True)
class ServiceLimitTuner:
    """Chooses the power limit of one device that serves.

    Attributes:
        device: The device, for decisions and logs.
        eta: Weight of energy against service time: 1 for energy alone, 0 for service time alone.
        max_slowdown: Largest service time that requests may take, over that at full power.
        ratios: Limits that may be tried, as shares of full power, highest first.
        trial_s: How long a window lasts.
        settle_s: How long a device takes to follow a new limit.
        period_s: Longest time between two views.
        baseline_ratio: Share of the time at full power while a limit is kept, to compare it.
        review_s: How often the search starts again.

    Raises:
        ConfigError: A value out of range.
    """

    device: str
    eta: float = 0.5
    max_slowdown: float = 1.1
    ratios: tuple[float, ...] = LIMIT_RATIOS
    trial_s: float = 20.0
    settle_s: float = 2.0
    period_s: float = 1.0
    baseline_ratio: float = 0.1
    review_s: float = 3600.0
    name: ClassVar[str] = "service-power-limit"

    def __post_init__(self) -> None:
        check_limit_search(
            self.eta,
            self.max_slowdown,
            self.ratios,
            period_s=self.period_s,
            trial_s=self.trial_s,
            settle_s=self.settle_s,
            review_s=self.review_s,
        )
        if not 0 < self.baseline_ratio <= 0.5:
            raise ConfigError("a limit is compared with full power for part of the time", got=str(self.baseline_ratio))

    @property
    def service(self) -> str:
        """The name of its steps in a log."""
        return f"power limit of {self.device}"

    def as_dict(self) -> dict[str, Any]:
        """The policy as a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ServiceLimitTuner:
        """The inverse of :meth:`as_dict`."""
        return cls(**{**fields, "ratios": tuple(fields["ratios"])})

    def initial(self) -> ServiceLimitState:
        """The initial state: full power, nothing measured."""
        return ServiceLimitState(backoff_s=2 * self.trial_s)

    def step(self, state: ServiceLimitState, view: ServingDeviceView, /) -> Step[ServiceLimitState]:
        """Count the credit, protect the SLO, finish a window, choose the limit."""
        new = math.isnan(state.seen_s) or view.now_s < state.seen_s or view.arrangement != state.arrangement
        if new:
            fresh = replace(self.initial(), credit_s=min(0.0, state.credit_s), backoff_s=state.backoff_s)
            fresh = replace(fresh, seen_s=view.now_s, arrangement=view.arrangement, calm_s=state.calm_s)
            return self._done(fresh, view, "another arrangement runs: it is measured at full power")
        state = self._credited(replace(state, seen_s=view.now_s), view)
        if threat := next((text for one in view.services if (text := one.threat())), ""):
            return self._protected(state, view, threat)
        if state.ratio < 1 and state.credit_s < self._reserve_s(view):
            return self._spent(state, view)
        if view.pinned and state.phase is not LimitPhase.HOLD:
            return self._done(self._baseline(state), view, "a layout is on trial")
        if view.ratio != state.ratio or view.pinned:  # not set yet, or refused
            return self._done(replace(state, window=None, first=None), view, "is to be set still")
        state = self._windowed(state, view)
        return self._chosen(state, view)

    # --- what holds at every step

    def _credited(self, state: ServiceLimitState, view: ServingDeviceView) -> ServiceLimitState:
        """Count the answers since the last view: the service time they may take, less the one they took."""
        credit_s = state.credit_s
        for one in view.answers:
            own_s = one.fresh_s if view.ratio == 1 else 0.0  # at full power: the baseline itself
            size = one.size - one.fresh_size if view.ratio == 1 else one.size
            known = next((each for each in state.base if each.kind == one.kind), None)
            base_s = own_s + (size * known.seconds_a_size if known is not None else 0.0)
            credit_s += self.max_slowdown * base_s - one.service_s
        most_s = 2 * self._trial_credit_s(state, view)  # a device that earned much must not lose it all at once
        return replace(state, credit_s=min(credit_s, most_s))

    def _reserve_s(self, view: ServingDeviceView) -> float:
        """Service time that could be lost before full power is back, if nothing were answered from now on."""
        return view.running_s + view.servers * (self.period_s + self.settle_s)

    def _trial_credit_s(self, state: ServiceLimitState, view: ServingDeviceView) -> float:
        """Credit that a window under a limit needs."""
        lost_s = _AFFORDED * state.busy_ratio * (self.settle_s + self.trial_s)
        return self._reserve_s(view) + view.running_s + lost_s

    def _protected(self, state: ServiceLimitState, view: ServingDeviceView, threat: str) -> Step[ServiceLimitState]:
        """Return to full power at once; a limit in force and all lower ones are given up, and the wait doubles."""
        limited, backoff_s = state.ratio < 1, state.backoff_s
        calm_s = max(state.calm_s, view.now_s + (backoff_s if limited else self.trial_s))
        if limited:
            state = self._given_up(state, state.ratio)
            backoff_s = min(2 * backoff_s, self.review_s)
        state = replace(self._baseline(state), calm_s=calm_s, backoff_s=backoff_s)
        return self._done(state, view, f"the SLO is threatened: {threat}")

    def _spent(self, state: ServiceLimitState, view: ServingDeviceView) -> Step[ServiceLimitState]:
        """Return to full power; where a limit was kept, the work has changed and is measured again."""
        if state.phase is LimitPhase.HOLD:
            state = replace(self._baseline(state), records=(), tried=(), rises=0)
            return self._done(state, view, "requests run slower than measured: they are measured again")
        return self._done(self._baseline(self._given_up(state, state.trial)), view, "requests slow down too much")

    def _given_up(self, state: ServiceLimitState, ratio: float) -> ServiceLimitState:
        """The state without a limit and all lower ones."""
        tried = tuple(sorted({*state.tried, *(each for each in self.ratios if each <= ratio)}, reverse=True))
        records = tuple(one for one in state.records if one.ratio > ratio)
        return replace(state, tried=tried, records=records)

    def _baseline(self, state: ServiceLimitState) -> ServiceLimitState:
        """The state at full power, with no running window or comparison."""
        if state.phase is LimitPhase.BASELINE and state.ratio == 1:
            return replace(state, window=None)
        if state.phase is LimitPhase.TRIAL:  # comparisons without a verdict
            state = replace(state, records=tuple(one for one in state.records if one.ratio != state.trial))
        return replace(state, phase=LimitPhase.BASELINE, ratio=1.0, window=None, first=None, position=0, trial=1.0)

    # --- windows and comparisons

    def _windowed(self, state: ServiceLimitState, view: ServingDeviceView) -> ServiceLimitState:
        """Begin, continue or end a window."""
        if state.window is None:
            settled = view.now_s - view.set_s >= self.settle_s
            return replace(state, window=WindowTotals(view.now_s, view.energy_j) if settled else None)
        window = state.window.with_answers(view.answers)
        elapsed_s = view.now_s - window.from_s
        length_s = max(self.trial_s, _SERVICE_TIMES * window.mean_s)
        if elapsed_s < length_s or window.count < MIN_ANSWERS:
            if elapsed_s < _QUIET * length_s:
                return replace(state, window=window)
            if state.phase is LimitPhase.TRIAL:  # too few requests to learn from
                return self._baseline(state)
            return replace(state, window=None, first=None)
        window = window.ended(view.now_s, view.energy_j)
        state = replace(state, window=WindowTotals(view.now_s, view.energy_j))
        if not window.energy_j > 0:  # a meter that failed, or began again
            return replace(state, first=None)
        return self._measured(state, window, view)

    def _measured(self, state: ServiceLimitState, window: WindowTotals, view: ServingDeviceView) -> ServiceLimitState:
        """Record a window that is complete."""
        if view.ratio == 1:
            state = replace(
                state,
                base=add_totals(faded(state.base), window.work),
                full_w=window.energy_j / window.elapsed_s,
                busy_ratio=window.service_s / window.elapsed_s,
            )
        if state.phase is LimitPhase.TRIAL:
            return self._in_trial(state, window, view)
        if state.phase is LimitPhase.HOLD and state.trial < 1:
            return self._checked(state, window, view)
        return replace(state, first=window)

    def _in_trial(self, state: ServiceLimitState, window: WindowTotals, view: ServingDeviceView) -> ServiceLimitState:
        """The next window of full, limit, limit, full, ...; a verdict where two complete a comparison."""
        position = state.position + 1
        if state.first is None:  # the first of two
            return self._to_window(replace(state, first=window, position=position), view)
        full, limited = (state.first, window) if view.ratio != 1 else (window, state.first)
        comparison = compare_windows(full, limited)
        state = replace(state, first=None, position=position)
        record = state_record(state).with_comparison(comparison)
        state = replace(state, records=(*(one for one in state.records if one.ratio != state.trial), record))
        verdict = record.verdict(self.max_slowdown)
        if verdict is None and position - 2 * len(record.comparisons) < _IDLE_WINDOWS:
            return self._to_window(state, view)
        return self._tried(state, record, within=bool(verdict))

    def _to_window(self, state: ServiceLimitState, view: ServingDeviceView) -> ServiceLimitState:
        """The state with the limit of the next window of a trial."""
        return self._at(state, 1.0 if state.position % 4 in (0, 3) else state.trial)

    def _tried(self, state: ServiceLimitState, record: LimitRecord, *, within: bool) -> ServiceLimitState:
        """End a trial: within the bound for certain, or given up with all lower limits."""
        if not within:
            state = self._given_up(state, record.ratio)
        else:
            others = [one for one in state.records if one.ratio != record.ratio]
            least = min(one.cost(self.eta) for one in (FULL, *others))
            rises = state.rises + 1 if record.cost(self.eta) > least + _NOISE else 0
            tried = self.ratios if rises >= _RISES else (*state.tried, record.ratio)
            state = replace(state, tried=tried, rises=rises)
        return self._hold(state)

    def _hold(self, state: ServiceLimitState) -> ServiceLimitState:
        """Keep the best limit known."""
        best = self.best(state.records)
        state = replace(state, phase=LimitPhase.HOLD, trial=best.ratio, first=None, position=0, checked_s=state.seen_s)
        return self._at(state, best.ratio)

    def _checked(self, state: ServiceLimitState, window: WindowTotals, view: ServingDeviceView) -> ServiceLimitState:
        """Windows while a limit is kept: the last one under it, then one at full power, renew its comparison."""
        if view.ratio != 1:
            cycle_s = self.trial_s / self.baseline_ratio
            if state.seen_s - state.checked_s < cycle_s - self.trial_s:
                return replace(state, first=window)
            return self._at(replace(state, first=window), 1.0)
        if state.first is None:
            return self._at(state, state.trial)
        record = state_record(state).with_comparison(compare_windows(window, state.first))
        state = replace(
            state,
            records=(*(one for one in state.records if one.ratio != state.trial), record),
            first=None,
            checked_s=state.seen_s,
        )
        if record.lately_slower(self.max_slowdown):
            state = self._given_up(state, record.ratio)
        return self._hold(replace(state, backoff_s=2 * self.trial_s))

    def _at(self, state: ServiceLimitState, ratio: float) -> ServiceLimitState:
        return state if ratio == state.ratio else replace(state, ratio=ratio, window=None)

    # --- the choice

    def best(self, records: tuple[LimitRecord, ...]) -> LimitRecord:
        """The limit of least cost among those within the bound, full power among them; the higher of equals."""
        fitting = [one for one in records if one.kept(self.max_slowdown)]
        return min((FULL, *fitting), key=lambda one: (one.cost(self.eta), -one.ratio))

    def _chosen(self, state: ServiceLimitState, view: ServingDeviceView) -> Step[ServiceLimitState]:
        """Begin the next trial, keep the best limit, or search again."""
        if state.phase is LimitPhase.TRIAL:
            return self._in_credit(state, view, f"compares {100 * state.trial:.0f} % of its power with full power")
        if view.now_s < state.calm_s:
            return self._done(self._baseline(state), view, "keeps full power after the SLO was threatened")
        if state.finished(self):
            state = state if math.isfinite(state.found_s) else replace(state, found_s=view.now_s)
            if view.now_s - state.searched_s >= max(self.review_s, (state.found_s - state.searched_s) / _SEARCH_SHARE):
                state = replace(self._baseline(state), records=(), tried=(), rises=0, searched_s=view.now_s)
                return self._done(replace(state, found_s=math.nan), view, "begins the search again")
        if state.phase is LimitPhase.HOLD and state.ratio == 1 and state.trial < 1:
            return self._done(state, view, "compares its limit with full power")
        untried = next((ratio for ratio in self.ratios if ratio not in state.tried), None)
        if untried is None:
            if state.phase is LimitPhase.BASELINE:
                state = self._hold(state)
            return self._in_credit(state, view, self._why(state))
        if state.first is None or state.ratio < 1:  # every search starts from a window at full power
            if state.phase is LimitPhase.HOLD:
                state = self._baseline(state)
            return self._done(state, view, "measures full power")
        if state.credit_s < self._trial_credit_s(state, view):
            need_s = self._trial_credit_s(state, view)
            return self._done(state, view, f"{state.credit_s:.1f} s of {need_s:.1f} s of credit")
        if not state.tried:
            state = replace(state, searched_s=view.now_s, found_s=math.nan)
        records = tuple(one for one in state.records if one.ratio != untried)
        state = replace(state, phase=LimitPhase.TRIAL, trial=untried, position=1, records=records)
        return self._done(self._to_window(state, view), view, f"tries {100 * untried:.0f} % of its power")

    def _in_credit(self, state: ServiceLimitState, view: ServingDeviceView, reason: str) -> Step[ServiceLimitState]:
        """Go below full power only with the credit for it."""
        if state.ratio < 1 and view.ratio == 1 and state.credit_s < self._trial_credit_s(state, view):
            need_s = self._trial_credit_s(state, view)
            why = f"{state.credit_s:.1f} s of {need_s:.1f} s of credit"
            return self._done(self._baseline(state), view, why)
        return self._done(state, view, reason)

    def _why(self, state: ServiceLimitState) -> str:
        best = self.best(state.records)
        if best.ratio == 1:
            return "no lower limit within the bound costs less"
        slower, less = 100 * (best.slowdown - 1), 100 * (1 - best.energy_ratio)
        return f"least cost: service time {slower:+.1f} %, {less:.0f} % fewer joules for the same work"

    def _done(self, state: ServiceLimitState, view: ServingDeviceView, reason: str) -> Step[ServiceLimitState]:
        if state.ratio == view.ratio:
            return Step(state)
        return Step(state, (Decision(SET_POWER_LIMIT, self.device, state.ratio, self.name, reason),))


def state_record(state: ServiceLimitState) -> LimitRecord:
    """The record of the limit on trial."""
    return next((one for one in state.records if one.ratio == state.trial), LimitRecord(state.trial))


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in fields.items()}
