"""GPUs in Slurm's GRES and TRES strings of 20.11 to 25.05: requests, nodes, configured and allocated resources.

::

    entry    = [ "gres" ( ":" | "/" ) ] "gpu" [ ":" type ] [ ( ":" | "=" ) count ] [ "(" … ")" ]
    type     = anything without ":", "=", "," and parentheses that is no count: "a100", "3090ti", "1g.10gb"
    count    = digits [ "K" | "M" | "G" | "T" | "P" ], factors of 1024; 1 where it is left out

Text after ``gpu:`` is a count if it has the form of one, as in Slurm's own parser, else a type: ``gpu:2080ti`` asks for
one GPU of that type, ``gpu:3090:2`` for two. A text in parentheses, such as ``(null)``, is not a type. Commas inside
parentheses (``gpu:a100:4(S:0-1,3)``) are not separators.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_COUNT = re.compile(r"(\d+)([kmgtp]?)", re.IGNORECASE)
_ENTRY = re.compile(r"[^,(]*(?:\([^)]*\)[^,(]*)*")
_PREFIX = re.compile(r"\s*(?:gres[:/])?gpu(?=[:=(\s]|$)", re.IGNORECASE)
_DETAIL = re.compile(r"\([^)]*\)\s*$")
_FLAGS = frozenset({"no_consume"})


@dataclass(frozen=True, slots=True)
class GpuCounts:
    """GPUs of one GRES or TRES string.

    Attributes:
        total: Number of all GPUs.
        by_type: GPUs of each type that is named, in the order of the string.
    """

    total: int
    by_type: tuple[tuple[str, int], ...] = ()

    @property
    def type(self) -> str:
        """The only type; empty where none or several are named."""
        return self.by_type[0][0] if len(self.by_type) == 1 else ""


def parse_gpus(text: str) -> GpuCounts:
    """The GPUs in a GRES or TRES string; none in ``""``, ``(null)`` and ``N/A``.

    TRES strings list a plain total beside the types (``gres/gpu=4,gres/gpu:a100=4``): the total counts, once.
    """
    types: dict[str, int] = {}
    requested, plain_total = 0, None
    for entry in _entries(text):
        kind, count, is_total = _entry(entry)
        if kind:
            types[kind] = types.get(kind, 0) + count
            requested += count
        elif is_total:
            plain_total = (plain_total or 0) + count
        else:
            requested += count
    return GpuCounts(requested if plain_total is None else plain_total, tuple(types.items()))


def _entries(text: str) -> Iterator[str]:
    """The entries of a list that are about GPUs, without their prefix."""
    for entry in _ENTRY.findall(text):
        if match := _PREFIX.match(entry):
            yield entry[match.end() :].strip()


def _entry(text: str) -> tuple[str, int, bool]:
    """The type, the count, and whether it is a plain total, of the text behind ``gpu``."""
    head, equals, value = text.partition("=")
    if equals:
        return _type(head.removeprefix(":")), _count(_DETAIL.sub("", value)) or 0, not head
    parts = [part.strip() for part in _unparenthesised(head).split(":") if part.strip()]
    parts = [part for part in parts if part not in _FLAGS]
    if not parts:
        return "", 1, False
    last = _count(parts[-1])
    if last is None:
        return _type(":".join(parts)), 1, False
    return _type(":".join(parts[:-1])), last, False


def _unparenthesised(text: str) -> str:
    """The text without its socket or index list; a type ``(null)`` becomes empty."""
    return re.sub(r"\([^)]*\)", "", text)


def _type(text: str) -> str:
    return _unparenthesised(text).strip()


def _count(text: str) -> int | None:
    match = _COUNT.fullmatch(text.strip())
    return None if match is None else int(match[1]) * _FACTORS[match[2].lower()]
