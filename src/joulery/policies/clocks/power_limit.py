"""The power limit of a training job, learned while it runs, with a bound on how much it slows the job down.

The cost of a limit is Zeus's (NSDI'23, section 3.1): ``eta · energy + (1 - eta) · maximum power · time`` for the same
work. The policy measures the job at full power, then tries lower limits one after another, and keeps the one of least
cost among those within ``max_slowdown``.

The bound holds for the job as a whole, trials included, whatever the response to a limit: a job earns **credit** while
it runs faster than the bound allows, ``max_slowdown`` times what its work takes at full power less the time that it
took. A trial begins only with enough credit, and below full power the credit never falls to less than one period's
worst case, no work at all. So at every observation the job has taken at most ``max_slowdown`` times what its work takes
at full power, as long as its speed at full power is what was measured. Where that changes, the policy measures again.

The simulator and the agents of the nodes drive the same object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import ConfigError

LIMIT_RATIOS = (0.917, 0.833, 0.75, 0.667, 0.583, 0.5)
"""Limits to try, as shares of full power, highest first: those of Zeus's measurements (275 to 150 of 300 W)."""
_AFFORDED = 0.25
"""Share of a trial that its job must be able to lose: a limit that loses more is certainly beyond the bound."""
_AFFORDED_KNOWN = 0.1
"""The same share for a limit that was within the bound on earlier jobs of the kind."""
_CHANGED = 0.05
"""Relative difference above which the speed at full power counts as changed."""
_NOISE = 0.01
_RISES = 2
"""Limits in a row that cost more than the least by more than noise before the search ends: the cost has one minimum."""


class LimitPhase(StrEnum):
    """Purpose of a job's power limit."""

    BASELINE = "baseline"
    """Full power, to measure it."""
    TRIAL = "trial"
    """A limit that is being measured."""
    HOLD = "hold"
    """The best limit known."""


@dataclass(frozen=True, slots=True)
class LimitPoint:
    """Effect of a limit on a job.

    Attributes:
        ratio: The limit, as a share of full power.
        slowdown: Time of the same work over that at full power, >= 0.
        power_ratio: Power over that at full power.
    """

    ratio: float
    slowdown: float
    power_ratio: float


@dataclass(frozen=True, slots=True)
class LimitedJobView:
    """A node's view of a running job.

    Attributes:
        now_s: Time.
        job: Its name, for the decision.
        ratio: The limit in force, as a share of full power.
        work: Work done so far, in any unit that only grows.
        work_s: Time at which the work reached that value; ``now_s`` where work is read and not reported.
        energy_j: Energy of its devices so far, J.
        full_w: Full power of its devices together, W: the limit they had before, the ``maximum power`` of the cost.
        known: Effects of limits on earlier jobs of its kind; empty for none.
    """

    now_s: float
    job: str
    ratio: float
    work: float
    work_s: float
    energy_j: float
    full_w: float
    known: tuple[LimitPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a job: time, work and energy."""

    at_s: float
    work: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class PowerLimitState:
    """State of one job.

    Attributes:
        phase: Purpose of the present limit.
        ratio: The limit wanted.
        changed_s: When it was chosen; NaN before the first observation.
        window: Start of the present measurement; None while the device settles.
        last: Last moment that counted towards the credit.
        full_rate: Work a second at full power; 0 while unknown.
        full_w: Power at full power, W.
        credit_s: Time the job may still lose.
        points: Limits that were measured and lie within the bound.
        tried: Limits that were measured.
        rises: Number of the latest limits in a row that cost more than the least.
        reviewed_s: Time of the last measurement of full power.
    """

    phase: LimitPhase = LimitPhase.BASELINE
    ratio: float = 1.0
    changed_s: float = math.nan
    window: Mark | None = None
    last: Mark | None = None
    full_rate: float = 0.0
    full_w: float = 0.0
    credit_s: float = 0.0
    points: tuple[LimitPoint, ...] = ()
    tried: tuple[float, ...] = ()
    rises: int = 0
    reviewed_s: float = 0.0

    def finished(self, tuner: PowerLimitTuner) -> bool:
        """Whether the search is over: every limit was tried or left out."""
        return self.phase is LimitPhase.HOLD and (set(tuner.ratios) <= set(self.tried))


def check_limit_search(
    eta: float,
    max_slowdown: float,
    ratios: Sequence[float],
    *,
    period_s: float,
    trial_s: float,
    settle_s: float,
    review_s: float,
) -> None:
    """Check the settings of a search for a power limit.

    Raises:
        ConfigError: A value out of range.
    """
    if not 0 <= eta <= 1:
        raise ConfigError("eta weighs energy against time", got=str(eta), expected="0 to 1")
    if not 1 <= max_slowdown < math.inf:
        raise ConfigError("a slowdown bound is at least 1", got=str(max_slowdown))
    if list(ratios) != sorted(ratios, reverse=True) or any(not 0 < ratio < 1 for ratio in ratios):
        raise ConfigError("limits are shares of full power, highest first", got=str(ratios))
    if not (0 < period_s <= trial_s <= review_s < math.inf and 0 <= settle_s < math.inf):
        raise ConfigError("times are period <= trial <= review", got=f"{period_s}, {trial_s} s")


@dataclass(frozen=True, slots=True)
class PowerLimitTuner:
    """Chooses the power limit of one job.

    Attributes:
        eta: Weight of energy against time: 1 for energy alone, 0 for time alone.
        max_slowdown: Largest time that a job may take, over its time at full power.
        ratios: Limits that may be tried, as shares of full power, highest first.
        trial_s: How long a limit is measured.
        settle_s: How long a device takes to follow a new limit.
        period_s: Longest time between two observations.
        review_s: How often full power is measured again.

    Raises:
        ConfigError: A value out of range.
    """

    eta: float = 0.5
    max_slowdown: float = 1.1
    ratios: tuple[float, ...] = LIMIT_RATIOS
    trial_s: float = 60.0
    settle_s: float = 5.0
    period_s: float = 5.0
    review_s: float = 3600.0
    name: str = "power-limit"

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

    @property
    def trial_credit_s(self) -> float:
        """Credit that a trial needs, s."""
        return self._credit_for(_AFFORDED)

    def _credit_for(self, afforded: float) -> float:
        return afforded * (self.settle_s + self.trial_s) + 2 * self.period_s

    def initial(self) -> PowerLimitState:
        """The initial state: full power, nothing measured."""
        return PowerLimitState()

    def step(self, state: PowerLimitState, view: LimitedJobView, /) -> Step[PowerLimitState]:
        """Count the credit, finish a measurement, choose the limit."""
        if not math.isfinite(view.work):  # no work is known to be done
            view = replace(view, work=0.0 if state.last is None else state.last.work)
            view = replace(view, work_s=view.work_s if state.last is None else state.last.at_s)
        mark = Mark(view.work_s, view.work, view.energy_j)
        if state.last is None or mark.work < state.last.work or mark.at_s < state.last.at_s:
            state = replace(PowerLimitState(), changed_s=view.now_s, last=mark)  # a job that starts, or starts again
            return self._done(state, view, "measures the job at full power")
        state = self._credited(state, mark)
        if state.ratio < 1 and self._spent(state, view):
            return self._too_slow(state, view)
        if view.ratio != state.ratio:  # not set yet, or refused
            return self._done(replace(state, window=None, changed_s=view.now_s), view, "is to be set still")
        if state.window is None:
            settled = view.now_s - state.changed_s >= self.settle_s and mark.at_s > state.changed_s
            state = replace(state, window=mark if settled else None)
        elif mark.at_s - state.window.at_s >= self.trial_s and mark.work > state.window.work:
            state = self._measured(state, mark, view)
        return self._chosen(state, view)

    def cost(self, point: LimitPoint, full_w: float, board_w: float) -> float:
        """Cost of a second's work at full power, W (Zeus's cost rate)."""
        return point.slowdown * (self.eta * point.power_ratio * full_w + (1 - self.eta) * board_w)

    def best(self, points: tuple[LimitPoint, ...], full_w: float, board_w: float) -> LimitPoint:
        """The point of least cost within the bound, full power among them; the higher limit of equals."""
        fitting = [point for point in points if point.slowdown <= self.max_slowdown]
        return min((FULL_POWER, *fitting), key=lambda point: (self.cost(point, full_w, board_w), -point.ratio))

    def _credited(self, state: PowerLimitState, mark: Mark) -> PowerLimitState:
        assert state.last is not None
        elapsed_s = mark.at_s - state.last.at_s
        if state.full_rate > 0:
            at_full_s = (mark.work - state.last.work) / state.full_rate
        else:  # nothing is earned before the device has settled at full power
            at_full_s = elapsed_s if state.window is not None else elapsed_s / self.max_slowdown
        credit_s = state.credit_s + self.max_slowdown * at_full_s - elapsed_s
        most_s = 2 * self.trial_credit_s  # a job that earned much must not lose it all at once
        return replace(state, credit_s=min(credit_s, most_s), last=mark)

    def _spent(self, state: PowerLimitState, view: LimitedJobView) -> bool:
        """Whether another period without any work would break the bound; work that is not reported counts as none."""
        return state.credit_s - (view.now_s - view.work_s) < self.period_s

    def _too_slow(self, state: PowerLimitState, view: LimitedJobView) -> Step[PowerLimitState]:
        """Return to full power; a job too slow under a limit measured before has changed and is measured again."""
        if state.phase is LimitPhase.TRIAL:
            tried = (*state.tried, *(ratio for ratio in self.ratios if ratio <= state.ratio))
            state = self._hold(replace(state, tried=tried, ratio=1.0, changed_s=view.now_s), view, full=True)
            return self._done(state, view, "the job slows down beyond the bound")
        fresh = replace(PowerLimitState(), changed_s=view.now_s, last=state.last, credit_s=max(0.0, state.credit_s))
        return self._done(fresh, view, "the job runs slower than measured: it is measured again")

    def _measured(self, state: PowerLimitState, mark: Mark, view: LimitedJobView) -> PowerLimitState:
        """Record the measurement that has ended."""
        assert state.window is not None
        elapsed_s = mark.at_s - state.window.at_s
        rate = (mark.work - state.window.work) / elapsed_s
        power_w = (mark.energy_j - state.window.energy_j) / elapsed_s
        state = replace(state, window=mark)
        if not power_w > 0:  # a meter that failed or began again
            return state
        if state.phase is LimitPhase.BASELINE:
            same = state.full_rate > 0 and abs(rate / state.full_rate - 1) <= _CHANGED
            state = replace(state, full_rate=rate, full_w=power_w, reviewed_s=view.now_s)
            if not same:
                state = replace(state, points=(), tried=(), rises=0)
            return self._hold(state, view)
        if state.phase is LimitPhase.TRIAL:
            point = LimitPoint(state.ratio, state.full_rate / rate, power_w / state.full_w)
            return self._tried(state, point, view)
        return state

    def _tried(self, state: PowerLimitState, point: LimitPoint, view: LimitedJobView) -> PowerLimitState:
        tried = (*state.tried, point.ratio)
        if point.slowdown > self.max_slowdown:  # lower limits are slower still
            tried += tuple(ratio for ratio in self.ratios if ratio < point.ratio)
            return self._hold(replace(state, tried=tried), view)
        least = min(self.cost(other, state.full_w, view.full_w) for other in (FULL_POWER, *state.points))
        rose = self.cost(point, state.full_w, view.full_w) > (1 + _NOISE) * least
        rises = state.rises + 1 if rose else 0
        if rises >= _RISES or view.known:
            tried += self.ratios
        return self._hold(replace(state, points=(*state.points, point), tried=tried, rises=rises), view)

    def _hold(self, state: PowerLimitState, view: LimitedJobView, *, full: bool = False) -> PowerLimitState:
        """Hold the best limit known, or full power while the credit is spent."""
        ratio = 1.0 if full else self.best(state.points, state.full_w, view.full_w).ratio
        return self._at(replace(state, phase=LimitPhase.HOLD), ratio, view)

    def _at(self, state: PowerLimitState, ratio: float, view: LimitedJobView) -> PowerLimitState:
        if ratio == state.ratio:
            return state
        return replace(state, ratio=ratio, window=None, changed_s=view.now_s)

    def _chosen(self, state: PowerLimitState, view: LimitedJobView) -> Step[PowerLimitState]:
        """Begin the next trial, review full power, or return to the best limit once there is credit for it."""
        if state.phase is not LimitPhase.HOLD:
            return self._done(state, view, f"{state.phase} at {100 * state.ratio:.0f} %")
        known = view.known and not state.tried
        needed_s = self._credit_for(_AFFORDED_KNOWN if known else _AFFORDED)
        if state.credit_s < needed_s:
            return self._done(state, view, f"{state.credit_s:.0f} s of {needed_s:.0f} s of credit")
        if (ratio := self._next(state, view)) is not None:
            state = self._at(replace(state, phase=LimitPhase.TRIAL), ratio, view)
            return self._done(state, view, f"tries {100 * ratio:.0f} % of its power")
        if state.ratio < 1 and view.now_s - state.reviewed_s >= self.review_s:
            state = self._at(replace(state, phase=LimitPhase.BASELINE), 1.0, view)
            return self._done(state, view, "measures full power again")
        best = self.best(state.points, state.full_w, view.full_w)
        reason = (
            f"least cost: {100 * (best.slowdown - 1):.1f} % slower, {100 * (1 - best.power_ratio):.0f} % less power"
        )
        return self._done(self._at(state, best.ratio, view), view, reason)

    def _next(self, state: PowerLimitState, view: LimitedJobView) -> float | None:
        """The next limit to try: the one that was best for the kind, else the highest that was not tried."""
        if view.known and not state.tried:
            ratio = self.best(view.known, state.full_w, view.full_w).ratio
            return None if ratio == 1 else ratio
        return next((ratio for ratio in self.ratios if ratio not in state.tried), None)

    def _done(self, state: PowerLimitState, view: LimitedJobView, reason: str) -> Step[PowerLimitState]:
        if state.ratio == view.ratio:
            return Step(state)
        return Step(state, (Decision("set_power_limit", view.job, state.ratio, self.name, reason),))


FULL_POWER = LimitPoint(1.0, 1.0, 1.0)
"""The job as it runs without a limit."""
