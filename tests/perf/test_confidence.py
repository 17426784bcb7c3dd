import math

import numpy as np
import pytest

from joulery.perf.confidence import effective_size, mean_interval, quantile_interval


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
