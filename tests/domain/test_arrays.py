"""Choices among values: the same on every processor."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.arrays import largest

_values = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=60)


@given(_values, st.integers(1, 70))
def test_the_largest_are_those_of_a_stable_sort(values: list[float], count: int) -> None:
    column = np.array(values)
    assert largest(column, count).tolist() == sorted(np.argsort(-column, kind="stable")[:count].tolist())


def test_of_equal_values_the_first_are_taken() -> None:
    assert largest(np.ones(1000), 3).tolist() == [0, 1, 2]
