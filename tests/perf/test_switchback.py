import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from joulery.domain.errors import DataError
from joulery.perf.switchback import SampledCost, estimate_total, sums_by_period


def test_a_constant_cost_a_request_is_found_exactly_whatever_the_sizes():
    found = estimate_total([SampledCost([2.0, 6.0, 4.0], [1.0, 3.0, 2.0], 100.0)])
    assert (found.total, found.low, found.high, found.periods) == (200.0, 200.0, 200.0, 3)
    assert found.saving(50.0) == (0.75, 0.75, 0.75)


def test_few_periods_count_with_students_t():
    found = estimate_total([SampledCost([9.0, 10.0, 12.0, 9.0], np.ones(4), 1.0)])
    assert found.total == pytest.approx(10.0)
    # each residual is a quarter of its distance, divided by 1 - 1/4; 4 periods have 18/8 degrees of freedom
    error = math.sqrt(4 / 6 * (1.0 + 4.0 + 9.0)) / 3
    assert found.high - found.total == pytest.approx(float(stdtrit(18 / 8, 0.975)) * error)
    assert found.total - found.low == pytest.approx(found.high - found.total)


def test_a_drift_over_the_day_is_no_error():
    rng = np.random.default_rng(1)
    noise = rng.normal(0.0, 0.1, 40)
    still, drifting = (
        estimate_total([SampledCost(10.0 + noise + drift, np.ones(40), 40.0)])
        for drift in (0.0, np.linspace(-2.0, 2.0, 40))
    )
    assert drifting.high - drifting.low == pytest.approx(still.high - still.low, rel=0.6)
    shuffled = rng.permutation(10.0 + noise + np.linspace(-2.0, 2.0, 40))
    mixed = estimate_total([SampledCost(shuffled, np.ones(40), 40.0)])
    assert mixed.high - mixed.low > 4 * (still.high - still.low)


def test_idle_and_busy_joules_are_taken_together():
    """Idle joules by seconds and busy joules by requests; errors that cancel between them cancel in the total."""
    seconds, requests = np.full(4, 10.0), np.full(4, 100.0)
    shift = np.array([1.0, -1.0, 2.0, -2.0])
    found = estimate_total([SampledCost(200.0 + shift, seconds, 1000.0), SampledCost(50.0 - shift, requests, 10_000.0)])
    assert found.total == pytest.approx(20_000.0 + 5_000.0)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-6)


def test_a_lower_end_of_zero_leaves_the_saving_unbounded_below():
    found = estimate_total([SampledCost([0.0, 0.0, 9.0], [1.0, 1.0, 1.0], 1.0)])
    saving, low, high = found.saving(1.0)
    assert found.low == 0.0 and low == -math.inf and low < saving < high < 1.0


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([SampledCost([1.0, 2.0], [1.0, 1.0], 5.0)], "3 periods or more"),
        ([SampledCost([0.0] * 3, [0.0] * 3, 5.0)], "nothing was served"),
        ([], "3 periods or more"),
        ([SampledCost([1.0] * 3, [1.0] * 3, 5.0), SampledCost([1.0] * 4, [1.0] * 4, 5.0)], "of all costs"),
    ],
)
def test_too_little_is_refused(costs, words):
    with pytest.raises(DataError, match=words):
        estimate_total(costs)


def test_shapes_must_fit():
    with pytest.raises(DataError, match="no periods"):
        SampledCost([1.0, 2.0], [1.0], 5.0)


@given(
    st.lists(st.floats(0, 100), max_size=30),
    st.lists(st.floats(0.1, 5), max_size=5),
    st.lists(st.floats(0.1, 5), min_size=5, max_size=5),
)
def test_sums_by_period_are_those_of_a_loop(times, lengths, gaps):
    spans, at = [], 0.0
    for length, gap in zip(lengths, gaps, strict=False):
        spans.append((at + gap, at + gap + length))
        at = spans[-1][1]
    at_s = np.array(times)
    found = sums_by_period(at_s, at_s + 1.0, spans)
    assert found == pytest.approx([sum(t + 1.0 for t in times if low <= t < high) for low, high in spans])


@given(st.integers(0, 10_000))
def test_scaling_all_costs_scales_the_total_and_its_interval(seed):
    rng = np.random.default_rng(seed)
    cost, size = rng.uniform(1, 2, 6), rng.uniform(1, 2, 6)
    one = estimate_total([SampledCost(cost, size, 50.0)])
    seven = estimate_total([SampledCost(7 * cost, size, 50.0)])
    assert (seven.total, seven.high) == pytest.approx((7 * one.total, 7 * one.high))
    assert one.low <= one.total <= one.high
