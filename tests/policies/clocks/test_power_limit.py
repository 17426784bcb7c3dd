"""The power limit of a training job: its bound on any response, its choice, and what makes it begin anew."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joulery.domain.errors import ConfigError
from joulery.perf.power.training_power import POWER_LIMITS, RTX3090_CLASSES, RTX3090_W
from joulery.policies.clocks.power_limit import (
    LIMIT_RATIOS,
    LimitedJobView,
    LimitPhase,
    LimitPoint,
    PowerLimitState,
    PowerLimitTuner,
)
from joulery.sim.training.limited_job import learned_limits, run_limited_job

TUNER = PowerLimitTuner(eta=0.5, max_slowdown=1.1)
RATIOS = (1.0, *LIMIT_RATIOS)
monotone = st.lists(st.floats(0.0, 1.0), min_size=len(LIMIT_RATIOS), max_size=len(LIMIT_RATIOS)).map(
    lambda speeds: dict(zip(RATIOS, (1.0, *sorted(speeds, reverse=True)), strict=True))
)
"""Speed at each limit, as a share of that at full power: it never rises as the limit falls, and may be none at all."""


def response_of(speeds: dict[float, float], powers: dict[float, float] | None = None):  # type: ignore[no-untyped-def]
    def response(ratio: float) -> tuple[float, float]:
        speed = speeds[ratio]
        return (1 / speed if speed > 0 else math.inf), (powers or {}).get(ratio, ratio)

    return response


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    speeds=monotone,
    bound=st.floats(1.0, 2.0),
    eta=st.floats(0.0, 1.0),
    trial_s=st.floats(10.0, 300.0),
    period_s=st.floats(0.5, 10.0),
    guess=st.lists(st.tuples(st.sampled_from(LIMIT_RATIOS), st.floats(1.0, 1.2), st.floats(0.3, 1.0)), max_size=3),
)
def test_no_job_ever_takes_longer_than_the_bound_allows(
    speeds: dict[float, float],
    bound: float,
    eta: float,
    trial_s: float,
    period_s: float,
    guess: list[tuple[float, float, float]],
) -> None:
    """At every observation, trials included, on any response, and whatever earlier jobs of its kind did."""
    tuner = PowerLimitTuner(eta, bound, trial_s=trial_s, period_s=period_s)

    def watch(now_s: float, work_s: float, state: PowerLimitState) -> None:
        assert now_s <= bound * work_s + 1e-6 * max(1.0, now_s)

    known = tuple(LimitPoint(*point) for point in guess)
    run = run_limited_job(
        tuner, response_of(speeds), 40 * trial_s, full_w=300.0, board_w=300.0, known=known, watch=watch
    )
    assert all(point.slowdown <= bound for point in run.state.points if point.ratio == run.state.ratio)


@settings(max_examples=60, deadline=None)
@given(speeds=monotone, eta=st.floats(0.0, 1.0))
def test_the_limit_it_settles_on_costs_no_more_than_full_power(speeds: dict[float, float], eta: float) -> None:
    tuner = replace(TUNER, eta=eta)
    run = run_limited_job(tuner, response_of(speeds), 3000.0, full_w=300.0, board_w=300.0)
    assert run.settled_s < math.inf
    speed = speeds[run.state.ratio]
    assert (eta * 300.0 * run.state.ratio + (1 - eta) * 300.0) / speed <= 300.0 * (1 + 1e-9)


def test_it_finds_the_limit_that_zeus_cost_has_within_the_bound() -> None:
    """Against the table itself: every limit's cost is known there."""
    for bound in (1.05, 1.1, 1.2):
        tuner = PowerLimitTuner(0.5, bound)
        for job in RTX3090_CLASSES:
            menu = {ratio: POWER_LIMITS[ratio][job.name] for ratio in LIMIT_RATIOS} | {1.0: (1.0, 1.0)}
            fitting = {ratio: point for ratio, point in menu.items() if point[0] <= bound}
            cost = {
                ratio: slowdown * (0.5 * power * job.gpu_w + 0.5 * RTX3090_W)
                for ratio, (slowdown, power) in fitting.items()
            }
            found = learned_limits((job,), tuner)[job.name].ratio
            assert cost[found] == pytest.approx(min(cost.values()))


def test_a_known_kind_is_limited_sooner_and_not_sooner_than_the_bound_allows() -> None:
    for limit in learned_limits(RTX3090_CLASSES, TUNER).values():
        assert 0 < limit.again_s <= limit.first_s < 900.0


def test_time_alone_keeps_full_power_where_any_limit_slows() -> None:
    speeds = dict(zip(RATIOS, (1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.94), strict=True))
    run = run_limited_job(replace(TUNER, eta=0.0), response_of(speeds), 3000.0, full_w=300.0, board_w=300.0)
    assert run.state.ratio == 1.0


@settings(max_examples=40, deadline=None)
@given(noise=st.lists(st.floats(-0.004, 0.004), min_size=6, max_size=6))
def test_limits_that_a_job_does_not_feel_do_not_end_the_search(noise: list[float]) -> None:
    """A job that draws 60 % of its limit: the first three trials differ by noise alone."""
    powers = {ratio: min(1.0, ratio / 0.6) * (1 + e) for ratio, e in zip(LIMIT_RATIOS, noise, strict=True)}
    run = run_limited_job(TUNER, response_of(dict.fromkeys(RATIOS, 1.0), powers), 3000.0, full_w=180.0, board_w=300.0)
    assert run.state.tried == LIMIT_RATIOS
    assert run.state.ratio == 0.5


def test_a_limit_beyond_the_bound_is_left_and_no_lower_one_is_tried() -> None:
    speeds = dict(zip(RATIOS, (1.0, 1.0, 0.5, 0.4, 0.3, 0.2, 0.1), strict=True))
    run = run_limited_job(TUNER, response_of(speeds), 3000.0, full_w=300.0, board_w=300.0)
    assert {ratio for _, ratio in run.timeline} == {1.0, 0.917, 0.833}
    assert run.state.ratio == 0.917


def view(now_s: float, work: float, ratio: float = 1.0, energy_j: float | None = None) -> LimitedJobView:
    return LimitedJobView(now_s, "7", ratio, work, now_s, 300.0 * now_s if energy_j is None else energy_j, 300.0)


def played(tuner: PowerLimitTuner, until_s: float, rate: float = 1.0) -> tuple[PowerLimitState, float, float]:
    """A job that no limit slows: its state, its work and its limit at that time."""
    state, ratio, now_s, work, energy_j = tuner.initial(), 1.0, 0.0, 0.0, 0.0
    while now_s <= until_s:
        step = tuner.step(state, view(now_s, work, ratio, energy_j))
        state = step.state
        ratio = float(step.decisions[0].value) if step.decisions else ratio
        now_s, work, energy_j = now_s + tuner.period_s, work + rate * tuner.period_s, energy_j + 300.0 * ratio
    return state, work, ratio


def test_a_job_that_slows_by_itself_is_measured_anew_at_full_power() -> None:
    state, work, ratio = played(TUNER, 1200.0)
    assert ratio < 1
    now_s = 1205.0
    while state.phase is LimitPhase.HOLD and now_s < 2000.0:
        now_s, work = now_s + 5.0, work + 2.0
        step = TUNER.step(state, view(now_s, work, ratio))
        state = step.state
    assert [decision.value for decision in step.decisions] == [1.0]
    assert state.phase is LimitPhase.BASELINE
    assert state.full_rate == 0.0


def test_a_job_that_starts_again_is_measured_anew() -> None:
    state, _, ratio = played(TUNER, 1200.0)
    step = TUNER.step(state, view(1210.0, 0.0, ratio))
    assert step.state.phase is LimitPhase.BASELINE
    assert step.state.credit_s == 0.0
    assert [decision.value for decision in step.decisions] == [1.0]


@pytest.mark.parametrize("work", [math.nan, math.inf])
def test_a_job_whose_work_is_not_known_returns_to_full_power(work: float) -> None:
    state, _, ratio = played(TUNER, 1200.0)
    for now_s in range(1205, 1400, 5):
        step = TUNER.step(state, view(float(now_s), work, ratio))
        state = step.state
        ratio = float(step.decisions[0].value) if step.decisions else ratio
    assert ratio == 1.0
    assert TUNER.step(TUNER.initial(), view(0.0, work)).decisions == ()


def test_a_limit_that_could_not_be_set_is_asked_for_again_and_never_measured() -> None:
    state, work, now_s = TUNER.initial(), 0.0, 0.0
    asked = []
    while now_s < 1500.0:
        step = TUNER.step(state, view(now_s, work, 1.0))
        state = step.state
        asked += [decision.value for decision in step.decisions]
        now_s, work = now_s + 5.0, work + 5.0
    assert len(asked) > 10
    assert set(asked) == {LIMIT_RATIOS[0]}
    assert state.points == ()


def test_a_meter_that_fails_or_begins_anew_gives_no_point() -> None:
    for readings in (math.nan, 5.0):
        state = TUNER.initial()
        for now_s in range(0, 1000, 5):
            state = TUNER.step(state, view(float(now_s), float(now_s), state.ratio, readings)).state
        assert state.phase is LimitPhase.BASELINE
        assert state.points == ()


def test_full_power_is_reviewed() -> None:
    tuner = replace(TUNER, review_s=1800.0)
    speeds = dict.fromkeys(RATIOS, 1.0)
    run = run_limited_job(tuner, response_of(speeds), 5000.0, full_w=300.0, board_w=300.0)
    late = [(at_s, ratio) for at_s, ratio in run.timeline if at_s > run.settled_s + 5]
    assert [ratio for _, ratio in late] == [1.0, 0.5, 1.0, 0.5]
    assert late[2][0] - late[0][0] >= 1800.0


@pytest.mark.parametrize(
    "changes",
    [
        {"eta": 1.1},
        {"eta": math.nan},
        {"max_slowdown": 0.9},
        {"max_slowdown": math.inf},
        {"ratios": (0.5, 0.75)},
        {"ratios": (1.0,)},
        {"period_s": 0.0},
        {"trial_s": 1.0},
        {"review_s": 30.0},
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(TUNER, **changes)  # type: ignore[arg-type]
