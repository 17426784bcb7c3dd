"""Check types of JSON fields; a wrong type or value raises a ``TypeError`` or ``ValueError`` that states it.

Readers turn these into one :class:`~joulery.domain.errors.DataError` with the name of the file.
"""

from __future__ import annotations

import math
from typing import Any

from joulery.domain.format import EARLIEST_S, LATEST_S


def number(value: Any) -> float:
    """A finite number.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{shown(value)} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)


def known(value: Any) -> float:
    """A finite number, or NaN for null.

    Raises:
        TypeError: It is neither.
        ValueError: It is not finite.
    """
    return math.nan if value is None else number(value)


def instant(value: Any) -> float:
    """Unix seconds, or NaN for null.

    Raises:
        TypeError: It is neither.
        ValueError: It is thousands of years away.
    """
    seconds = known(value)
    if seconds <= EARLIEST_S or seconds >= LATEST_S:
        raise ValueError(f"{seconds} is no time")
    return seconds


def whole(value: Any) -> int:
    """A whole number.

    Raises:
        TypeError: It is not a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{shown(value)} is not a whole number")
    return value


def text(value: Any) -> str:
    """Text.

    Raises:
        TypeError: It is not text.
    """
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not text")
    return value


def pairs(value: Any) -> tuple[tuple[str, float], ...]:
    """A list of names and numbers; NaN for null.

    Raises:
        TypeError: It is not such a list.
        ValueError: A member does not have two parts, or a number is not finite.
    """
    if not isinstance(value, list):
        raise TypeError(f"{shown(value)} is not a list")
    return tuple((text(name), known(share)) for name, share in value)


def shown(value: Any) -> str:
    """The representation of a value, shortened to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
