"""Errors that validators raise; :mod:`joulery.config.parsing.explain` adds file, line and pointer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic_core import PydanticCustomError


def problem(
    message: str, *, expected: str = "", hint: str = "", at: tuple[str | int, ...] = (), got: str | None = None
) -> PydanticCustomError:
    """The error a validator raises.

    Args:
        message: What is wrong, continuing "the value ...".
        expected: What would be accepted.
        hint: How to fix it.
        at: Where below the validated value the fault lies, for checks across several keys.
        got: The offending value where it is not simply what stands in the file; empty to keep it secret.
    """
    context = {"message": message, "expected": expected, "hint": hint, "at": at, "got": got}
    return PydanticCustomError("joulery", "{message}", context)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` was most likely meant to be; None when none is near."""
    by_folded = {name.casefold(): name for name in reversed(tuple(known))}
    matches = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None
