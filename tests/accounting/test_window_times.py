"""The matrix of a regression: its few entries give what the whole matrix would."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from joulery.accounting.operations import regression
from joulery.accounting.operations.regression import WindowTimes

ENTRIES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.floats(0, 10)), max_size=60)


def matrix(times: WindowTimes) -> np.ndarray:
    found = np.zeros((times.windows, times.columns))
    np.add.at(found, (times.window, times.column), times.seconds)
    return found


def times_of(entries: list[tuple[int, int, float]]) -> WindowTimes:
    window, column, seconds = (np.array([entry[at] for entry in entries]) for at in range(3))
    return WindowTimes(7, 5, window.astype(np.int64), column.astype(np.int64), seconds.astype(np.float64))


@given(ENTRIES, st.lists(st.floats(-5, 5), min_size=7, max_size=7), st.sets(st.integers(0, 4)), st.booleans())
def test_normal_equations_are_those_of_the_whole_matrix(entries, residual, chosen, dense):
    times, residual_j, columns = times_of(entries), np.array(residual), np.array(sorted(chosen), np.int64)
    whole = matrix(times)[:, columns]
    before, regression._DENSE = regression._DENSE, 10**9 if dense else 0
    try:
        gram, moments = times.normal_equations(columns, residual_j)
    finally:
        regression._DENSE = before
    assert np.allclose(gram, whole.T @ whole, rtol=1e-12, atol=1e-9)
    assert np.allclose(moments, whole.T @ residual_j, rtol=1e-12, atol=1e-9)


@given(ENTRIES, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=12), st.sets(st.integers(0, 6)))
def test_windows_are_chosen_joined_and_summed_as_rows_of_the_matrix(entries, parts, chosen):
    times = times_of(entries)
    whole, mask = matrix(times), np.isin(np.arange(7), sorted(chosen))
    assert np.allclose(matrix(times.only(mask)), whole[mask], atol=1e-9)
    window, part = (np.array([pair[at] for pair in parts], np.int64) for at in range(2))
    made = np.zeros((4, 7))
    np.add.at(made, (window, part), 1.0)
    assert np.allclose(matrix(times.joined(4, window, part)), made @ whole, atol=1e-9)
    watts = np.arange(5.0)
    assert np.allclose(times.energy_j(watts), whole @ watts, atol=1e-9)
    assert np.allclose(times.total_s(), whole.sum(axis=0), atol=1e-9)
