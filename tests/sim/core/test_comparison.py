"""Intervals: Student's t by the book, coverage, and why pairing helps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.errors import DataError
from joulery.sim.core.comparison import interval, paired

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12)


def test_by_the_book():
    """Mean 5, standard deviation 2, n = 4: half width 3.182 * 2 / 2."""
    found = interval([3.0, 5.0, 5.0 - math.sqrt(2), 5.0 + math.sqrt(2) + 2.0])
    sample = np.array([3.0, 5.0, 5.0 - math.sqrt(2), 7.0 + math.sqrt(2)])
    assert found.mean == pytest.approx(sample.mean())
    assert found.half_width == pytest.approx(3.18244630528 * sample.std(ddof=1) / 2)
    assert found.seeds == 4


def test_less_confidence_is_a_shorter_interval():
    values = [1.0, 2.0, 4.0]
    assert interval(values, 0.5).half_width == pytest.approx(
        interval(values).half_width * 0.816497 / 4.302653, rel=1e-5
    )


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(4000):
        found = interval(rng.normal(7.0, 3.0, 5).tolist())
        covered += found.low <= 7.0 <= found.high
    assert covered / 4000 == pytest.approx(0.95, abs=0.015)


def test_one_seed_has_a_mean_but_no_interval():
    found = interval([3.0])
    assert found.mean == 3.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.as_dict() == {"mean": 3.0, "low": None, "high": None, "seeds": 1}


def test_infinite_values_become_null():
    assert interval([1.0, math.inf]).as_dict() == {"mean": None, "low": None, "high": None, "seeds": 2}


@given(VALUES, st.floats(-10, 10))
def test_shifting_every_seed_shifts_the_interval(values, shift):
    plain, moved = interval(values), interval([value + shift for value in values])
    assert moved.mean == pytest.approx(plain.mean + shift, rel=1e-9, abs=1e-6)
    assert moved.half_width == pytest.approx(plain.half_width, rel=1e-6, abs=1e-6)
    assert plain.low <= plain.mean <= plain.high


def test_pairing_removes_what_both_share():
    rng = np.random.default_rng(1)
    common = rng.normal(100.0, 10.0, 8)
    first, second = common + rng.normal(0, 0.1, 8), common + 1.0 + rng.normal(0, 0.1, 8)
    difference = paired(second.tolist(), first.tolist())
    assert difference.low < 1.0 < difference.high
    assert difference.half_width < 0.3 < interval(first.tolist()).half_width


def test_nothing_and_unequal_seeds_are_refused():
    with pytest.raises(DataError, match="at least one seed"):
        interval([])
    with pytest.raises(DataError, match="cannot be paired"):
        paired([1.0], [1.0, 2.0])
