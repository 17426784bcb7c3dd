"""What completions teach, and what they cannot break."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.perf.lengths.pace import PRIOR_WEIGHT, OnlineLengths, OnlinePace, limited_tokens, unlimited_tokens

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


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 500), st.floats(0, 100_000)), max_size=80))
def test_more_tokens_never_take_less_time_and_longer_prompts_neither(ended) -> None:
    pace = OnlinePace()
    for tokens, seconds, read in ended:
        pace.completed(tokens, seconds, read)
    assert 0 <= pace.service_s(0) <= pace.service_s(1) < pace.service_s(1000)
    assert pace.service_s(1) <= pace.service_s(1, 1000.0)


def test_prefill_and_decode_are_separated_and_equal_prompts_keep_the_ratio_of_the_prior() -> None:
    random, pace, alike = np.random.default_rng(5), OnlinePace(), OnlinePace(per_read_s=0.003)
    for _ in range(3000):
        tokens, read = float(random.integers(1, 400)), float(random.integers(10, 3000))
        pace.completed(tokens, 0.2 + 0.001 * read + 0.03 * tokens, read)
        alike.completed(tokens, 0.2 + 0.03 * tokens, 20.0)
    assert (pace.per_read_s, pace.per_token_s) == pytest.approx((0.001, 0.03), rel=1e-3)
    assert pace.constant_s == pytest.approx(0.2, rel=1e-2)
    assert alike.per_read_s / alike.per_token_s == pytest.approx(0.003 / 0.02, rel=0.01)  # at this engine's speed
    assert alike.service_s(100.0, 20.0) == pytest.approx(3.2, rel=1e-3)


@given(st.floats(0.01, 1e5), st.integers(0, 100_000), st.floats(1.01, 3.0))
def test_a_limit_shortens_what_is_expected_and_keeps_its_order(mean, limit, factor) -> None:
    within = limited_tokens(mean, limit)
    assert 0 <= within <= min(mean, limit) * (1 + 1e-12)
    assert within <= limited_tokens(factor * mean, limit) * (1 + 1e-12)
    assert within <= limited_tokens(mean, factor * limit) * (1 + 1e-12)
    assert limit <= unlimited_tokens(mean, limit) <= 2 * limit


def test_a_limit_on_exponential_lengths() -> None:
    lengths = np.random.default_rng(2).exponential(80.0, 200_000)
    assert limited_tokens(80.0, 100.0) == pytest.approx(np.minimum(lengths, 100.0).mean(), rel=0.01)
    assert unlimited_tokens(80.0, 100.0) == pytest.approx(lengths[lengths > 100.0].mean(), rel=0.01)
    assert limited_tokens(0.0, 100.0) == 0.0


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
    with pytest.raises(DataError):
        OnlinePace().completed(1.0, 1.0, float("inf"))


@pytest.mark.parametrize("per_token_s", [0.002, 0.1, 1.0])
def test_an_engine_of_any_speed_is_known_after_a_few_short_answers(per_token_s: float) -> None:
    """What is assumed of 300 tokens once made a token of a slow engine take no time for its first hundred answers."""
    random, pace = np.random.default_rng(0), OnlinePace()
    for tokens in random.uniform(3.0, 48.0, 8):
        pace.completed(tokens, per_token_s * (tokens + 5.0), 45.0)
    assert pace.per_token_s == pytest.approx(per_token_s, rel=0.25)
    assert pace.service_s(40.0, 45.0) - pace.service_s(10.0, 45.0) == pytest.approx(30 * per_token_s, rel=0.25)
