import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.store.fields import instant, known, number, pairs, shown, text, whole

not_numbers = st.none() | st.booleans() | st.text() | st.lists(st.integers()) | st.just(math.nan) | st.just(-math.inf)


@given(st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers(value):
    assert number(value) == float(value)


@given(not_numbers)
def test_what_is_no_number(value):
    with pytest.raises((TypeError, ValueError), match="is not"):
        number(value)


def test_null_is_unknown_where_that_is_allowed():
    assert math.isnan(known(None))
    assert known(2) == 2.0
    assert math.isnan(instant(None))
    assert instant(1.79e9) == 1.79e9
    for seconds in (1e11, -6e10):
        with pytest.raises(ValueError, match="is no time"):
            instant(seconds)


def test_whole_numbers_text_and_pairs():
    assert (whole(3), text("a"), pairs([["a", 1], ["b", 0.5]])) == (3, "a", (("a", 1.0), ("b", 0.5)))


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (whole, 1.0),
        (whole, True),
        (text, 5),
        (text, None),
        (pairs, {}),
        (pairs, [["a"]]),
        (pairs, [[1, 1]]),
        (pairs, [["a", "b"]]),
    ],
)
def test_other_types_are_refused(read, value):
    with pytest.raises((TypeError, ValueError)):
        read(value)


def test_long_values_are_shown_shortened():
    assert shown("x" * 100) == "'" + "x" * 36 + "..."
    assert shown([1]) == "[1]"
