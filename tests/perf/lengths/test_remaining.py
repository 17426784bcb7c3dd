"""What is expected of an answer beyond what is written of it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.lengths.pace import limited_tokens
from joulery.perf.lengths.remaining import EXPONENTIAL, FEW, LengthDistribution, RatioCalibration

lengths = st.lists(st.integers(1, 400).map(float), min_size=1, max_size=40).map(sorted)


@given(lengths, st.integers(0, 420), st.none() | st.integers(1, 500))
def test_the_remainder_is_the_conditional_mean(possible, made, limit) -> None:
    found = LengthDistribution(possible).remaining(made, limit)
    beyond = [min(each, math.inf if limit is None else max(limit, made)) - made for each in possible if each > made]
    if beyond:
        assert found == pytest.approx(np.mean(beyond), abs=1e-6)
    else:
        assert found == (made if limit is None else min(made, max(limit - made, 0)))


@given(st.floats(0, 1e5), st.floats(0.1, 1e4))
def test_exponential_lengths_have_no_memory(made, mean) -> None:
    distribution = LengthDistribution(mean=mean)
    assert distribution.remaining(made) == distribution.remaining() == mean
    assert distribution.remaining(made, made + 10.0) == pytest.approx(limited_tokens(mean, 10.0), rel=1e-6)


def test_an_answer_that_outlives_its_prediction_has_longer_to_go() -> None:
    distribution = LengthDistribution([10.0] * 8 + [100.0, 200.0])
    expected = [distribution.remaining(made) for made in (0.0, 9.0, 11.0, 101.0, 201.0)]
    assert expected == pytest.approx([38.0, 29.0, 139.0, 99.0, 201.0])


def test_many_observations_are_reduced_and_keep_mean_and_longest() -> None:
    observed = np.random.default_rng(1).lognormal(4.0, 1.0, 5000)
    distribution = LengthDistribution.of(observed)
    assert distribution.remaining() == pytest.approx(observed.mean(), rel=0.05)
    assert distribution.remaining(np.sort(observed)[-2]) > 0
    assert distribution.remaining(observed.max()) == observed.max(), "beyond the longest: as much again"


def test_many_equal_observations_are_no_matter() -> None:
    observed = np.concatenate([np.linspace(0.1, 40.9, 900), np.full(5000, 40.96)])
    assert LengthDistribution.of(observed).remaining() == pytest.approx(observed.mean(), rel=0.01)


def test_a_calibration_needs_answers_of_a_kind_or_of_any() -> None:
    calibration = RatioCalibration()
    for _ in range(FEW - 1):
        calibration.completed("a", 100.0, 50.0)
    assert calibration.ratios("a") is EXPONENTIAL
    calibration.completed("b", 100.0, 50.0)
    assert calibration.ratios("a").remaining() == calibration.ratios("unseen").remaining() == pytest.approx(0.5)
    for _ in range(FEW):
        calibration.completed("b", 100.0, 300.0)
    assert calibration.ratios("b").remaining() == pytest.approx((0.5 + 20 * 3.0) / 21)
    assert calibration.ratios("a").remaining() == pytest.approx((20 * 0.5 + 20 * 3.0) / 40)


def test_what_says_nothing_is_left_out() -> None:
    calibration = RatioCalibration()
    for _ in range(2 * FEW):
        for predicted, length in ((0.0, 5.0), (5.0, 0.0), (math.nan, 5.0), (5.0, math.inf)):
            calibration.completed("a", predicted, length)
    assert calibration.ratios("a") is EXPONENTIAL


def test_cut_answers_move_the_expectation_up() -> None:
    """Exponential lengths about 100 that are cut at 80: without regard to the cut their mean would be 55."""
    rng, calibration = np.random.default_rng(2), RatioCalibration()
    for length in rng.exponential(100.0, 200):
        calibration.completed("a", 100.0, min(length, 80.0), cut=length > 80.0)
    ratios = calibration.ratios("a")
    assert ratios.remaining() == pytest.approx(1.0, abs=0.2)
    assert ratios.remaining(0.0, 0.8) == pytest.approx(0.55, abs=0.06)


@pytest.mark.parametrize("possible", [[0.0, 1.0], [3.0, 2.0], [-1.0]])
def test_lengths_are_positive_and_ascend(possible) -> None:
    with pytest.raises(DataError, match="ascend"):
        LengthDistribution(possible)
    with pytest.raises(DataError, match="mean above 0"):
        LengthDistribution()
    with pytest.raises(DataError, match="at least one"):
        LengthDistribution.of([])
