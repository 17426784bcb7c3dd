"""One quantile for lists."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.quantile import quantile_of

VALUES = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=60)


@given(values=VALUES, quantile=st.floats(0, 1))
def test_it_is_numpys_to_the_last_digit(values, quantile) -> None:
    assert quantile_of(values, quantile) == float(np.quantile(values, quantile))


def test_infinite_values_have_infinite_quantiles() -> None:
    assert quantile_of([1.0, math.inf, math.inf], 0.99) == math.inf
    assert quantile_of([1.0, math.inf], 0.0) == 1.0
