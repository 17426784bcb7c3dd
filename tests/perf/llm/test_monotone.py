"""Monotone curves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from joulery.perf.isotonic import isotonic
from joulery.perf.llm.predictor import monotone_times

curves = st.lists(st.floats(-3, 3), min_size=1, max_size=20)


@given(curves)
def test_an_isotonic_sequence_does_not_fall_and_keeps_the_mean(values):
    found = isotonic(np.array(values))
    assert np.all(np.diff(found) >= -1e-12)
    assert abs(np.mean(found) - np.mean(values)) < 1e-9


@given(curves)
def test_times_do_not_fall_and_throughput_does_not_fall(values):
    load = np.cumsum(np.full(len(values), 0.3))
    found = monotone_times(load, np.array(values))
    assert np.all(np.diff(found) >= -1e-9)
    assert np.all(np.diff(load - found) >= -1e-9)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_a_curve_that_obeys_already_is_kept(slopes):
    load = np.arange(len(slopes), dtype=np.float64)
    times = np.concatenate([[0.0], np.cumsum(slopes[1:])])
    np.testing.assert_allclose(monotone_times(load, times), times, atol=1e-9)
