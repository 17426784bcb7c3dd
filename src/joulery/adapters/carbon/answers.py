"""Validation of JSON from services: the expected value, or a :class:`DataError` that quotes the actual one."""

from __future__ import annotations

import math
from typing import Any

from joulery.domain.errors import DataError


def rows(answer: Any, key: str, service: str) -> list[dict[str, Any]]:
    """``answer[key]``, a list of objects.

    Raises:
        DataError: The value is anything else.
    """
    found = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise DataError(f"{service} answered without a list {key!r}: {str(answer)[:80]}")
    return found


def text(row: dict[str, Any], key: str, service: str) -> str:
    """``row[key]``, a string.

    Raises:
        DataError: The value is anything else.
    """
    found = row.get(key)
    if not isinstance(found, str):
        raise DataError(f"{service} answered {key} {str(found)[:40]!r}, expected text")
    return found


def number(row: dict[str, Any], key: str, service: str) -> float:
    """``row[key]``, a finite number; NaN where it is null or absent.

    Raises:
        DataError: The value is anything else.
    """
    found = row.get(key)
    if found is None:
        return math.nan
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        raise DataError(f"{service} answered {key} {str(found)[:40]!r}, expected a number")
    return float(found)
