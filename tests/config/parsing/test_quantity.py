import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from joulery.config.parsing.quantity import (
    BYTES,
    DIMENSIONS,
    EMISSION,
    INTENSITY,
    MASS,
    POWER,
    RATE,
    RATIO,
    TIME,
    Bytes,
    GramsPerKwh,
    PerSecond,
    Ratio,
    Seconds,
    SecondsOrZero,
    Watts,
    flag_quantity,
    parse_quantity,
)
from joulery.domain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 ms", TIME, 0.08),
        ("80ms", TIME, 0.08),
        (" 90  s ", TIME, 90.0),
        ("2 h", TIME, 7200.0),
        ("3 min", TIME, 180.0),
        ("1 d", TIME, 86400.0),
        ("5 us", TIME, 5e-6),
        ("5 µs", TIME, 5e-6),
        ("7 ns", TIME, 7e-9),
        ("1.5e3 s", TIME, 1500.0),
        (".5 s", TIME, 0.5),
        ("40 /s", RATE, 40.0),
        ("60/min", RATE, 1.0),
        ("7200 /h", RATE, 2.0),
        ("250 g/kWh", INTENSITY, 250.0),
        ("0.25 kg/kWh", INTENSITY, 250.0),
        ("250 kg/MWh", INTENSITY, 250.0),
        ("0.25 t/MWh", INTENSITY, 250.0),
        ("0.4 kg/h", EMISSION, 400.0),
        ("75.1 %", RATIO, 0.751),
        ("0.751", RATIO, 0.751),
        ("16 GiB", BYTES, 16 * 2**30),
        ("16 GB", BYTES, 16e9),
        ("1 KiB", BYTES, 1024.0),
        ("1 kB", BYTES, 1000.0),
        ("3 B", BYTES, 3.0),
        ("2 TiB", BYTES, 2 * 2**40),
        ("2 MiB", BYTES, 2 * 2**20),
        ("2 TB", BYTES, 2e12),
        ("2 MB", BYTES, 2e6),
        ("300 W", POWER, 300.0),
        ("1.2 kW", POWER, 1200.0),
        ("500 mW", POWER, 0.5),
        ("1 MW", POWER, 1e6),
        ("2 g", MASS, 2.0),
        ("5 kg", MASS, 5000.0),
        ("1 mg", MASS, 0.001),
        ("3 t", MASS, 3e6),
        ("1e-100 s", TIME, 1e-100),
        ("1E+2 s", TIME, 100.0),
    ],
)
def test_a_written_quantity_becomes_a_float_in_the_own_unit(text, dimension, value):
    assert parse_quantity(text, dimension) == value


@given(st.integers(0, 10**6), st.integers(0, 6), st.sampled_from(DIMENSIONS), st.data())
def test_the_conversion_is_correctly_rounded(mantissa, decimals, dimension, data):
    unit = data.draw(st.sampled_from(sorted(dimension.factors)))
    text = f"{mantissa / 10**decimals:.{decimals}f}"
    expected = float(Fraction(text) * dimension.factors[unit])
    assert parse_quantity(f"{text} {unit}", dimension) == expected


@given(st.text(), st.sampled_from(DIMENSIONS))
def test_any_text_is_a_finite_number_or_a_problem(text, dimension):
    try:
        assert math.isfinite(parse_quantity(text, dimension))
    except PydanticCustomError as error:
        assert error.type == "joulery"


@pytest.mark.parametrize(
    ("text", "dimension", "message"),
    [
        ("80", TIME, "a time needs a unit"),
        ("80 W", TIME, "is a power, not a time"),
        ("80 g/kWh", RATE, "is a carbon intensity, not a rate"),
        ("80 sec", TIME, "unknown unit 'sec'"),
        ("fast", TIME, "is not a time"),
        ("", TIME, "is not a time"),
        ("nan s", TIME, "must be a finite number"),
        ("-inf s", TIME, "must be a finite number"),
        (".inf", RATIO, "must be a finite number"),
        ("1e999 s", TIME, "must be a finite number"),
        ("9e307 TiB", BYTES, "must be a finite number"),
        ("1e99999 s", TIME, "must be a finite number"),
        ("1 2 s", TIME, "unknown unit '2 s'"),
        ("250,5 g/kWh", INTENSITY, "has a comma in its number"),
        ("1,500 W", POWER, "has a comma in its number"),
    ],
)
def test_what_is_wrong_is_said(text, dimension, message):
    with pytest.raises(PydanticCustomError) as caught:
        parse_quantity(text, dimension)
    assert caught.value.message() == message


def test_a_flag_takes_a_quantity_above_zero():
    assert flag_quantity("4 ms", TIME, "--period") == 0.004
    for text, message in [
        ("4", "--period: a time needs a unit (got '4', expected a time such as 80 ms)"),
        ("0 s", "--period: must be above 0 s (got '0 s', expected a time such as 80 ms)"),
        ("4 W", "--period: is a power, not a time (got '4 W', expected a time such as 80 ms)"),
    ]:
        with pytest.raises(ConfigError) as caught:
            flag_quantity(text, TIME, "--period")
        assert str(caught.value) == message
    assert flag_quantity("0 s", TIME, "--drain", zero=True) == 0.0
    with pytest.raises(ConfigError, match="such as 4 h"):
        flag_quantity("soon", TIME, "--duration", "4 h")


def test_percent_is_offered_where_a_share_above_one_was_written():
    for text, hint in [("75.1", "did you mean 75.1 %?"), ("100", "did you mean 100 %?"), ("101", ""), ("110 %", "")]:
        with pytest.raises(ValidationError) as caught:
            Everything(share=text)
        assert caught.value.errors()[0]["ctx"]["hint"] == hint


@pytest.mark.parametrize(
    ("text", "dimension", "hint"),
    [
        ("80", TIME, "write 80 s"),
        ("80 MS", TIME, "did you mean 80 ms?"),
        ("250 g/kwh", INTENSITY, "did you mean 250 g/kWh?"),
        ("40 rps", RATE, "units: /s, /min, /h"),
        ("250 g/MJ", INTENSITY, "units: g/kWh, kg/kWh, kg/MWh, t/MWh"),
    ],
)
def test_the_hint_says_how_to_write_it(text, dimension, hint):
    with pytest.raises(PydanticCustomError) as caught:
        parse_quantity(text, dimension)
    assert caught.value.context["hint"] == hint


class Everything(BaseModel):
    time: Seconds = 1.0
    wait: SecondsOrZero = 1.0
    rate: PerSecond = 1.0
    intensity: GramsPerKwh = 1.0
    share: Ratio = 1.0
    size: Bytes = 1.0
    power: Watts = 1.0


@pytest.mark.parametrize(
    "values",
    [
        {"time": "0 s"},
        {"time": "-1 ms"},
        {"wait": "-1 ms"},
        {"rate": "0 /s"},
        {"intensity": "-0.1 g/kWh"},
        {"share": "100.1 %"},
        {"share": "-1 %"},
        {"size": "-1 B"},
        {"power": "-1 W"},
        {"time": True},
        {"time": None},
        {"time": ["1 s"]},
        {"time": float("nan")},
        {"time": float("inf")},
        {"time": 10**400},
    ],
)
def test_values_without_sense_are_refused(values):
    with pytest.raises(ValidationError) as caught:
        Everything(**values)
    assert caught.value.errors()[0]["type"] == "joulery"


def test_limits_themselves_are_accepted():
    limits = Everything(wait="0 s", intensity="0 g/kWh", share="100 %", size="0 B", power="0 W")
    assert (limits.wait, limits.share) == (0.0, 1.0)
    assert Everything(share="0 %").share == 0.0


def test_a_bare_number_is_si_from_python_and_refused_from_a_file():
    assert Everything(time=0.08).time == 0.08
    with pytest.raises(ValidationError, match="a time needs a unit"):
        Everything.model_validate_json('{"time": 0.08}')
    assert Everything.model_validate_json('{"share": 0.5}').share == 0.5


def test_the_schema_states_the_unit():
    properties = Everything.model_json_schema()["properties"]
    assert properties["time"]["x-unit"] == "s"
    assert properties["share"]["anyOf"][1] == {"type": "number"}
    assert properties["power"]["examples"] == ["300 W"]
