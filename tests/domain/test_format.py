import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.format import UNKNOWN, count, duration, grams, latency, moment, number, percent, si


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3210.0, "3.21 kJ"),
        (999.6, "1.00 kJ"),
        (999.4, "999 J"),
        (1.0, "1.00 J"),
        (0.25, "250 mJ"),
        (1e-9, "1.00 nJ"),
        (2e-8, "20.0 nJ"),
        (3e-6, "3.00 µJ"),
        (5e5, "500 kJ"),
        (5e8, "500 MJ"),
        (5e11, "500 GJ"),
        (1e-12, "1e-12 J"),
        (5e13, "50.0 TJ"),
        (2e16, "20,000 TJ"),
        (-1500.0, "-1.50 kJ"),
        (0.0, "0 J"),
        (math.inf, "∞ J"),
        (math.nan, UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_si(value, text):
    assert si(value, "J") == text


def test_grams_turn_into_tonnes_not_megagrams():
    assert grams(0.25) == "250 mg"
    assert grams(2500.0) == "2.50 kg"
    assert grams(999_400.0) == "999 kg"
    assert grams(999_500.0) == "1.00 t"
    assert grams(None) == UNKNOWN


@pytest.mark.parametrize(
    ("value", "text"), [(42.46, "42.5 W"), (1234.0, "1,230 W"), (0.0, "0 W"), (None, UNKNOWN), (math.nan, UNKNOWN)]
)
def test_number(value, text):
    assert number(value, "W") == text


def test_percent():
    assert percent(0.7654, 2) == "76.54 %"
    assert percent(1.0, 0) == "100 %"
    assert percent(-1e-9) == "0.0 %", "nothing has no sign"
    assert percent(-0.0004) == "0.0 %" and percent(-0.0006) == "-0.1 %"
    assert percent(math.nan) == UNKNOWN
    assert percent(None) == UNKNOWN


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0451, "45.1 ms"),
        (1.5, "1.50 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min"),
        (90, "1 min 30 s"),
        (3599.6, "1 h"),
        (5400, "1 h 30 min"),
        (47.9 * 3600, "47 h 54 min"),
        (48 * 3600, "2 d"),
        (49 * 3600, "2 d 1 h"),
        (None, UNKNOWN),
        (math.nan, UNKNOWN),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0312, "31 ms"),
        (9.9994, "9999 ms"),
        (9.9996, "10.0 s"),
        (20.0, "20.0 s"),
        (123.4, "123 s"),
        (math.inf, "unbounded"),
        (None, UNKNOWN),
        (math.nan, UNKNOWN),
    ],
)
def test_latency(seconds, text):
    assert latency(seconds) == text


def test_moment_and_count():
    assert moment(0.0) == "1970-01-01 00:00:00 UTC"
    assert moment(math.nan) == moment(None) == moment(math.inf) == UNKNOWN
    assert count(1234567) == "1,234,567"


@given(st.floats(1e-9, 1e14))
def test_si_says_the_value_to_three_digits(value):
    text, unit = si(value, "J").split(" ")
    factor = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[unit[:-1]]
    assert float(text.replace(",", "")) * factor == pytest.approx(value, rel=0.0051)
