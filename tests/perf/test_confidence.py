import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from joulery.perf.confidence import effective_size, mean_interval, mixed_interval, quantile_interval, share_interval


def test_nothing_seen_says_nothing():
    nothing = quantile_interval(np.empty(0), 0.95, 0.95)
    assert (nothing.low, nothing.high) == (-math.inf, math.inf) and math.isnan(nothing.point)
    assert mean_interval(np.array([3.0]), 0.95).point == 3.0
    assert mean_interval(np.array([3.0]), 0.95).high == math.inf


def test_few_observations_leave_the_upper_end_of_a_high_quantile_open():
    rng = np.random.default_rng(1)
    # The largest of n lies above the 95th percentile with probability 1 - 0.95^n: 72 are needed for 97.5 %.
    assert quantile_interval(rng.random(71), 0.95, 0.95).high == math.inf
    seen = rng.random(72)
    assert quantile_interval(seen, 0.95, 0.95).high == seen.max()


def test_the_interval_holds_the_quantile_as_often_as_it_says():
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(400):
        found = quantile_interval(rng.exponential(size=400), 0.9, 0.9)
        inside += found.low <= -math.log(0.1) <= found.high
    assert 340 <= inside <= 396, "90 % of 400, and order statistics err on the safe side"


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says():
    rng = np.random.default_rng(8)
    inside = 0
    for _ in range(400):
        found = mean_interval(rng.exponential(size=200), 0.9)
        inside += found.low <= 1.0 <= found.high
    assert 320 <= inside <= 385


def test_observations_that_follow_one_another_count_less():
    rng = np.random.default_rng(3)
    steps = rng.standard_normal(2000)
    alike = np.empty(2000)
    alike[0] = steps[0]
    for k in range(1, 2000):
        alike[k] = 0.95 * alike[k - 1] + math.sqrt(1 - 0.95**2) * steps[k]
    # A first-order process of correlation 0.95 is worth (1 - 0.95) / (1 + 0.95) of its length.
    assert 15 < effective_size(alike, 1.0) < 250
    assert effective_size(steps, 1.0) > 1000
    narrow, wide = quantile_interval(steps, 0.5, 0.95), quantile_interval(alike, 0.5, 0.95)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_what_was_never_answered_is_later_than_everything():
    values = np.concatenate([np.full(90, 0.01), np.full(110, np.inf)])
    found = quantile_interval(np.random.default_rng(0).permutation(values), 0.5, 0.95)
    assert found.low == 0.01 or found.low == math.inf
    assert found.high == math.inf
    assert quantile_interval(values, 0.95, 0.95).low == math.inf


def test_an_interval_is_ordered_and_wider_at_more_confidence():
    values = np.random.default_rng(5).gamma(2.0, size=500)
    sure, less = quantile_interval(values, 0.95, 0.99), quantile_interval(values, 0.95, 0.8)
    assert sure.low <= less.low <= less.point <= less.high <= sure.high
    assert less.point == pytest.approx(np.quantile(values, 0.95), rel=0.05)


@example(12, 186)
@given(st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_a_share_lies_within_its_interval(count, seed):
    right = int(np.random.default_rng(seed).integers(0, count + 1))
    found = share_interval(right, count, 0.95)
    assert 0.0 <= found.low <= found.point == right / count <= found.high <= 1.0
    assert found.high - found.low > 0, "not even a perfect score is certain"


def test_wilsons_interval_is_the_published_one():
    """Newcombe 1998, table I: 81 of 263 and 0 of 20."""
    found, none = share_interval(81, 263, 0.95), share_interval(0, 20, 0.95)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (none.low, none.high) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert math.isnan(share_interval(0, 0, 0.95).point)


def test_a_mix_covers_its_mean():
    rng, covered = np.random.default_rng(4), 0
    for _ in range(400):
        rights = [(0.7, rng.binomial(60, 0.75), 60), (0.3, rng.binomial(25, 0.9), 25)]
        found = mixed_interval([(weight, share_interval(int(right), n, 0.95)) for weight, right, n in rights])
        covered += found.low <= 0.7 * 0.75 + 0.3 * 0.9 <= found.high
    assert 368 <= covered <= 395
    one = share_interval(7, 10, 0.95)
    alone = mixed_interval([(1.0, one)])
    assert (alone.low, alone.point, alone.high) == pytest.approx((one.low, one.point, one.high))
