"""Conversion of numbers for JSON documents, where numbers that are not finite are null."""

from __future__ import annotations

import math
from typing import Any


def known_number(value: float) -> float | None:
    """The number; None where it is not finite."""
    return value if math.isfinite(value) else None


def known_numbers(value: Any) -> Any:
    """Replace every number that is not finite by None, at all levels of an object; tuples become lists."""
    if isinstance(value, float):
        return known_number(value)
    if isinstance(value, dict):
        return {key: known_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [known_numbers(item) for item in value]
    return value


def or_nan(value: Any) -> float:
    """A number of a document; NaN for null."""
    return math.nan if value is None else float(value)
