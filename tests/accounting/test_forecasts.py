"""Intervals of forecasts, and counting whether they hold."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.forecasts import (
    KEPT_SCORES,
    LEVEL_RATIO,
    OFFSETS,
    ForecastScore,
    JobForecast,
    coverage,
    kept,
    scored,
    with_interval,
)


def made(kind: str, amount: float, scores: tuple[ForecastScore, ...]) -> JobForecast:
    low, high = with_interval(kind, amount, scores)
    return JobForecast(kind, 0.0, amount, low, high)


def played(count: int, outcome_of: object, seed: int = 0) -> tuple[ForecastScore, ...]:
    """Forecasts one after another, each judged before the next is made."""
    draw, scores = random.Random(seed), tuple[ForecastScore, ...]()
    for at in range(count):
        amount = draw.uniform(0.0, 7200.0)
        forecast = made("start", amount, scores)
        scores = kept(scores, scored(forecast, outcome_of(draw, amount, at)))  # type: ignore[operator]
    return scores


@pytest.mark.parametrize(
    "noise",
    [lambda d: d.gauss(0.0, 0.3), lambda d: d.paretovariate(1.5) - 1.0, lambda d: d.choice([-0.5, 0.0, 4.0])],
    ids=["gauss", "pareto", "three values"],
)
def test_nine_in_ten_outcomes_lie_within_whatever_the_distribution(noise: object) -> None:
    def outcome(draw: random.Random, amount: float, at: int) -> float:
        return max(0.0, amount + noise(draw) * (amount + OFFSETS["start"]))  # type: ignore[operator]

    inside = intervals = 0
    for seed in range(8):
        (row, *_) = coverage(played(300, outcome, seed))
        inside, intervals = inside + row.inside, intervals + row.with_interval
        assert row.reliable
    assert inside / intervals >= LEVEL_RATIO - 0.01


def test_an_interval_needs_nineteen_outcomes_of_its_kind() -> None:
    scores = tuple(ForecastScore("end", at / 100.0, None) for at in range(18))
    assert all(map(math.isnan, with_interval("end", 100.0, scores)))
    scores = (*scores, ForecastScore("end", -0.5, None), *(ForecastScore("grams", 9.0, None) for _ in range(50)))
    assert with_interval("end", 100.0, scores) == (0.0, 100.0 + 0.17 * 400.0)


def test_a_process_that_changes_is_seen() -> None:
    """Jobs start punctually 100 times and then take three times as long: the intervals miss, and the report says so."""

    def outcome(draw: random.Random, amount: float, at: int) -> float:
        return amount * (1.0 + 0.02 * draw.random()) if at < 100 else 3.0 * amount + at

    (row, *_) = coverage(played(140, outcome))
    assert row.reliable is False and row.coverage_ratio < 0.85


def test_without_outcomes_nothing_is_claimed() -> None:
    for row in coverage(()):
        assert (row.checked, row.reliable) == (0, None)
        assert (row.as_dict()["coverage_ratio"], row.as_dict()["median_error"]) == (None, None)


@given(
    st.sampled_from(sorted(OFFSETS)),
    st.floats(0.0, 1e9),
    st.lists(st.floats(-1.0, 1e6), min_size=19, max_size=60),
)
def test_an_interval_is_in_order_and_never_in_the_past(kind: str, amount: float, errors: list[float]) -> None:
    low, high = with_interval(kind, amount, [ForecastScore(kind, error, None) for error in errors])
    assert 0.0 <= low <= high


def test_the_last_scores_of_each_kind_are_kept() -> None:
    scores: tuple[ForecastScore, ...] = (ForecastScore("grams", 1.0, None),)
    for at in range(KEPT_SCORES + 5):
        scores = kept(scores, ForecastScore("end", float(at), None))
    assert len(scores) == KEPT_SCORES + 1 and scores[0].kind == "grams"
    assert next(score.error for score in scores if score.kind == "end") == 5.0
