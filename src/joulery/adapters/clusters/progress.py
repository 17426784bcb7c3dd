"""Progress that a job says of itself: lines ``epoch k/K``, ``k/K`` or a share such as ``0.25``; the last one counts."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TAIL_BYTES = 4096
_OF = re.compile(r"(?:epoch|epochs|step|steps|samples)?\s*:?\s*(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_SHARE = re.compile(r"(\d*\.?\d+)(\s*%)?")


def read_progress(file: Path) -> float:
    """The share of the work done that the file's last whole line tells, 0 to 1; NaN where it tells none."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return float("nan")
    lines = text.split("\n")[:-1]
    for line in reversed(lines):
        ratio = parse_progress(line)
        if ratio == ratio:
            return ratio
    return float("nan")


def parse_progress(line: str) -> float:
    """The share that one line tells, clamped to 0 … 1; NaN when it tells none."""
    text = line.strip()
    if match := _OF.fullmatch(text):
        done, whole = float(match[1]), float(match[2])
        return min(1.0, done / whole) if whole > 0 else float("nan")
    if match := _SHARE.fullmatch(text):
        value = float(match[1]) / (100.0 if match[2] else 1.0)
        return value if value <= 1.0 else float("nan")
    return float("nan")
