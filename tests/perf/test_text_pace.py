"""What completions teach, and what they cannot break."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.text_pace import PRIOR_WEIGHT, OnlineLengths, OnlinePace

PRIOR = np.array([10.0, 20.0, 40.0, 80.0, 160.0])
ENDED = st.lists(st.tuples(st.floats(-2, 6), st.floats(0, 5000)), max_size=80)


def test_before_anything_is_known_the_prior_speaks_and_between_classes_the_middle() -> None:
    lengths = OnlineLengths(PRIOR)
    assert [lengths.expected(score) for score in (-3.0, 0.0, 2.0, 4.0, 9.0)] == [10, 10, 40, 160, 160]
    assert lengths.expected(2.5) == pytest.approx(60.0)


def test_one_completion_weighs_one_against_the_priors_weight() -> None:
    lengths = OnlineLengths(PRIOR)
    lengths.completed(2.4, 95.0)
    weight = 0.995 * PRIOR_WEIGHT
    prior_sum = 0.995 * PRIOR_WEIGHT * 40.0
    assert lengths.expected(2.0) == pytest.approx((prior_sum + 95.0) / (weight + 1.0))


@given(ENDED)
def test_longer_scores_never_mean_shorter_answers(ended) -> None:
    lengths = OnlineLengths(PRIOR)
    for score, tokens in ended:
        lengths.completed(score, tokens)
    expected = [lengths.expected(score) for score in np.linspace(-1, 5, 25)]
    assert all(a <= b + 1e-9 for a, b in pairwise(expected))


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 500)), max_size=80))
def test_more_tokens_never_take_less_time(ended) -> None:
    pace = OnlinePace()
    for tokens, seconds in ended:
        pace.completed(tokens, seconds)
    assert 0 <= pace.service_s(0) <= pace.service_s(1) < pace.service_s(1000)


@pytest.mark.parametrize("prior", [[1.0] * 4, [1, 2, 3, 2, 5], [0, 1, 2, 3, 4], [1, 2, 3, 4, float("nan")]])
def test_a_prior_that_is_none_is_refused(prior) -> None:
    with pytest.raises(DataError, match="five positive ascending"):
        OnlineLengths(np.array(prior, float))


def test_completions_that_are_none_are_refused() -> None:
    with pytest.raises(DataError):
        OnlineLengths(PRIOR).completed(float("nan"), 1.0)
    with pytest.raises(DataError):
        OnlineLengths(PRIOR).completed(1.0, -1.0)
    with pytest.raises(DataError):
        OnlinePace().completed(-1.0, 1.0)
