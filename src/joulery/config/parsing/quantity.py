"""Quantities as people write them (``80 ms``, ``250 g/kWh``) and the field types that turn them into SI floats.

A field declares its dimension once: ``latency_s: Seconds = Field(alias="latency")``. From a file, a bare number is
refused where a unit is due; from Python, a number is taken to be in the dimension's own unit already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from joulery.config.parsing.problem import problem
from joulery.domain.errors import ConfigError

_NUMBER = re.compile(r"\s*([-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?(\d+))?)\s*(\S.*?)?\s*", re.ASCII)
_NOT_FINITE = re.compile(r"\s*[-+]?\.?(nan|inf|infinity)\b.*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Dimension:
    """A kind of quantity.

    Attributes:
        noun: With its article, for messages: ``a time``.
        example: A value as one would write it.
        factors: How many of the dimension's own unit one of each written unit is; the first is the own unit.
        bare: True where a number without a unit is meaningful.
    """

    noun: str
    example: str
    factors: Mapping[str, Fraction] = field(hash=False)
    bare: bool = False

    @property
    def unit(self) -> str:
        """The unit of the resulting float."""
        return next(iter(self.factors))

    def __str__(self) -> str:
        return f"{self.noun} such as {self.example}"


_K = Fraction(1000)
TIME = Dimension(
    "a time",
    "80 ms",
    {
        "s": Fraction(1),
        "ns": 1 / _K**3,
        "us": 1 / _K**2,
        "µs": 1 / _K**2,
        "ms": 1 / _K,
        "min": Fraction(60),
        "h": Fraction(3600),
        "d": Fraction(86400),
    },
)
RATE = Dimension("a rate", "40 /s", {"/s": Fraction(1), "/min": Fraction(1, 60), "/h": Fraction(1, 3600)})
INTENSITY = Dimension(
    "a carbon intensity", "250 g/kWh", {"g/kWh": Fraction(1), "kg/kWh": _K, "kg/MWh": Fraction(1), "t/MWh": _K}
)
EMISSION = Dimension("a carbon emission rate", "400 g/h", {"g/h": Fraction(1), "kg/h": _K})
RATIO = Dimension("a ratio", "75.1 % or 0.751", {"": Fraction(1), "%": Fraction(1, 100)}, bare=True)
BYTES = Dimension(
    "a size",
    "16 GiB",
    {
        "B": Fraction(1),
        **{f"{letter}B": _K**power for power, letter in enumerate(("k", "M", "G", "T"), 1)},
        **{f"{letter}iB": Fraction(1024) ** power for power, letter in enumerate(("K", "M", "G", "T"), 1)},
    },
)
POWER = Dimension("a power", "300 W", {"W": Fraction(1), "mW": 1 / _K, "kW": _K, "MW": _K**2})
MASS = Dimension("a mass", "5 kg", {"g": Fraction(1), "mg": 1 / _K, "kg": _K, "t": _K**2})
PRICE = Dimension("a price", "3.06 USD/h", {"USD/h": Fraction(1), "$/h": Fraction(1)})
CLOCK = Dimension("a clock", "1380 MHz", {"MHz": Fraction(1), "kHz": 1 / _K, "GHz": _K})
BANDWIDTH = Dimension(
    "a bandwidth",
    "12 GB/s",
    {f"{letter}B/s": _K**power for power, letter in enumerate(("", "k", "M", "G", "T"))},
)
DIMENSIONS = (TIME, RATE, INTENSITY, EMISSION, RATIO, BYTES, POWER, MASS, PRICE, CLOCK, BANDWIDTH)


def parse_quantity(text: str, dimension: Dimension) -> float:
    """The value of ``text`` in ``dimension.unit``, correctly rounded.

    Raises:
        PydanticCustomError: No number, not finite, no unit, an unknown unit, or one of another dimension.
    """
    if _NOT_FINITE.fullmatch(text):
        raise problem("must be a finite number", expected=str(dimension))
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise problem(f"is not {dimension.noun}", expected=str(dimension))
    number, exponent, unit = match[1], match[2] or "", match[3] or ""
    if unit not in dimension.factors:
        raise _wrong_unit(number, unit, dimension)
    try:
        if len(exponent) <= 3:
            return float(Fraction(number) * dimension.factors[unit])
    except OverflowError:
        pass
    raise problem("must be a finite number", expected=str(dimension))


def flag_quantity(text: str, dimension: Dimension, flag: str, example: str = "", *, zero: bool = False) -> float:
    """The value that a command-line flag gives, above zero.

    Args:
        text: The value as written.
        dimension: What it is.
        flag: The flag, for messages.
        example: A value that makes sense for this flag; the dimension's when left out.
        zero: Whether zero is a value too.

    Raises:
        ConfigError: See :func:`parse_quantity`; or the value is below what is allowed.
    """
    try:
        known = replace(dimension, example=example) if example else dimension
        return Quantity(known, open_low=not zero).check(text, from_file=True)
    except PydanticCustomError as error:
        context = error.context or {}
        raise ConfigError(
            str(context["message"]), pointer=flag, got=repr(text), expected=context["expected"], hint=context["hint"]
        ) from None


def _wrong_unit(number: str, unit: str, dimension: Dimension) -> Exception:
    """The error for a unit that ``dimension`` does not know."""
    if not unit:
        return problem(
            f"{dimension.noun} needs a unit", expected=str(dimension), hint=f"write {number} {dimension.unit}"
        )
    if unit.startswith(","):
        return problem(
            "has a comma in its number",
            expected=str(dimension),
            hint="write a decimal point, and nothing between thousands",
        )
    for other in DIMENSIONS:
        if unit in other.factors:
            return problem(f"is {other.noun}, not {dimension.noun}", expected=str(dimension))
    units = tuple(name for name in dimension.factors if name)
    match = next((name for name in units if name.lower() == unit.lower()), None)
    hint = f"did you mean {number} {match}?" if match else f"units: {', '.join(units)}"
    return problem(f"unknown unit {unit!r}", expected=str(dimension), hint=hint)


@dataclass(frozen=True, slots=True)
class Quantity:
    """Annotation of a float field: its dimension and the range in which it makes sense.

    Attributes:
        dimension: What it is.
        low: Smallest value, in the dimension's unit.
        high: Largest value, in the dimension's unit.
        open_low: True when ``low`` itself is refused.
    """

    dimension: Dimension
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False

    def check(self, value: Any, *, from_file: bool) -> float:
        """``value`` as a float in the dimension's unit.

        Raises:
            PydanticCustomError: See :func:`parse_quantity`; or the value is out of range.
        """
        if isinstance(value, str):
            number = parse_quantity(value, self.dimension)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise problem(f"is not {self.dimension.noun}", expected=str(self.dimension))
        elif from_file and not self.dimension.bare and math.isfinite(value):
            raise _wrong_unit(f"{value}", "", self.dimension)
        else:
            number = _as_float(value, self.dimension)
        self._check_range(number, bare=not str(value).strip().endswith("%"))
        return number

    def _check_range(self, number: float, *, bare: bool) -> None:
        if number < self.low or (self.open_low and number == self.low):
            least = "above" if self.open_low else "at least"
            raise problem(f"must be {least} {self._show(self.low)}", expected=str(self.dimension))
        if number > self.high:
            hint = f"did you mean {number:g} %?" if self.dimension is RATIO and bare and number <= 100 else ""
            raise problem(f"must be at most {self._show(self.high)}", expected=str(self.dimension), hint=hint)

    def _show(self, number: float) -> str:
        return f"{number:g} {self.dimension.unit}".strip()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(
            lambda value, info: self.check(value, from_file=info.mode == "json"),
            core_schema.float_schema(allow_inf_nan=False),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        units = "|".join(re.escape(unit) for unit in self.dimension.factors if unit)
        written: dict[str, Any] = {
            "type": "string",
            "pattern": rf"^\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*({units})\s*$",
            "examples": [self.dimension.example.split(" or ")[0]],
            "x-unit": self.dimension.unit or "ratio",
        }
        return {"anyOf": [written, {"type": "number"}], "x-unit": "ratio"} if self.dimension.bare else written


def _as_float(value: float, dimension: Dimension) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise problem("must be a finite number", expected=str(dimension))
    return number


Seconds = Annotated[float, Quantity(TIME, open_low=True)]
"""A time above zero, seconds."""
SecondsOrZero = Annotated[float, Quantity(TIME)]
"""A time of zero or more, seconds."""
PerSecond = Annotated[float, Quantity(RATE, open_low=True)]
"""A rate above zero, per second."""
PerSecondOrZero = Annotated[float, Quantity(RATE)]
"""A rate of zero or more, per second."""
GramsPerKwh = Annotated[float, Quantity(INTENSITY)]
"""A carbon intensity of zero or more, g/kWh."""
GramsPerKwhAboveZero = Annotated[float, Quantity(INTENSITY, open_low=True)]
"""A carbon intensity above zero, g/kWh."""
GramsPerHourAboveZero = Annotated[float, Quantity(EMISSION, open_low=True)]
"""Grams of carbon an hour, above zero."""
Ratio = Annotated[float, Quantity(RATIO, high=1.0)]
"""A share of 0 to 1; percent where written so."""


def _inside(ratio: float) -> float:
    if not 0 < ratio < 1:
        raise problem("a quantile lies between 0 and 1, both excluded", expected="such as 95 %")
    return ratio


QuantileRatio = Annotated[float, Quantity(RATIO, high=1.0), AfterValidator(_inside)]
"""A quantile: between 0 and 1, both excluded; percent where written so."""
Bytes = Annotated[float, Quantity(BYTES)]
"""A size, bytes."""
BytesPerSecond = Annotated[float, Quantity(BANDWIDTH, open_low=True)]
"""A bandwidth above zero, bytes a second."""
Watts = Annotated[float, Quantity(POWER)]
"""A power of zero or more, watts."""
WattsAboveZero = Annotated[float, Quantity(POWER, open_low=True)]
"""A power above zero, watts."""
Megahertz = Annotated[float, Quantity(CLOCK, open_low=True)]
"""A clock above zero, MHz."""
UsdPerHour = Annotated[float, Quantity(PRICE, open_low=True)]
"""A price above zero, US dollars an hour."""
