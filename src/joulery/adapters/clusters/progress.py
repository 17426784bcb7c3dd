"""Progress that a job reports: lines ``epoch k/K``, ``k/K`` or a share such as ``0.25``; the last one counts.

Where a job reports none, a pattern may find it in the job's output.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from joulery.domain.errors import ConfigError

_TAIL_BYTES = 4096
_OUTPUT_TAIL_BYTES = 65_536
_OF = re.compile(r"(?:epoch|epochs|step|steps|samples)?\s*:?\s*(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_SHARE = re.compile(r"(\d*\.?\d+)(\s*%)?")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where jobs report their progress.

    Attributes:
        folder: A file a job, named by its number; None where there is none.
        pattern: Finds it in a job's output where its file says nothing: ``(done)``, ``(done) (of how much)``; None for
            no such search.
    """

    folder: Path | None = None
    pattern: re.Pattern[str] | None = None

    def of(self, job: int, output: str = "") -> float:
        """The share of a job's work that is done, 0 to 1; NaN where it says none.

        Args:
            job: Its number.
            output: The file its output goes to; empty where unknown.
        """
        ratio = float("nan") if self.folder is None else read_progress(self.folder / str(job))
        if ratio == ratio or self.pattern is None or not output:
            return ratio
        return read_output(Path(output), self.pattern)


def output_pattern(text: str) -> re.Pattern[str]:
    """A pattern that finds progress in output.

    Raises:
        ConfigError: It is no regular expression, or has no one or two groups.
    """
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(f"is no regular expression: {error}", pointer="jobs.output_pattern", got=text) from error
    if pattern.groups not in (1, 2):
        raise ConfigError(
            "needs one group (a share or percent) or two (done, and of how much)",
            pointer="jobs.output_pattern",
            got=text,
            expected=r"such as Epoch (\d+)/(\d+)",
        )
    return pattern


def read_output(file: Path, pattern: re.Pattern[str]) -> float:
    """Progress in the last match at the end of a job's output, 0 to 1; NaN where there is none."""
    ratio = float("nan")
    for match in pattern.finditer(_tail(file, _OUTPUT_TAIL_BYTES)):
        found = parse_progress("/".join(group or "" for group in match.groups()))
        ratio = found if found == found else ratio
    return ratio


def read_progress(file: Path) -> float:
    """Progress in the file's last whole line that contains one, 0 to 1; NaN where there is none."""
    lines = _tail(file, _TAIL_BYTES).split("\n")[:-1]
    for line in reversed(lines):
        ratio = parse_progress(line)
        if ratio == ratio:
            return ratio
    return float("nan")


def parse_progress(line: str) -> float:
    """Progress in one line, clamped to 0 … 1; NaN where there is none."""
    text = line.strip()
    if match := _OF.fullmatch(text):
        done, whole = float(match[1]), float(match[2])
        return min(1.0, done / whole) if whole > 0 else float("nan")
    if match := _SHARE.fullmatch(text):
        value = float(match[1]) / (100.0 if match[2] else 1.0)
        return value if value <= 1.0 else float("nan")
    return float("nan")


def _tail(file: Path, size: int) -> str:
    """The end of a file; nothing where there is none to read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
