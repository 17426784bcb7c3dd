"""What power limits did to jobs of one kind, in files on a shared disk: the next job of the kind starts from it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from joulery.domain.errors import CapabilityError
from joulery.store.files import disk_errors, write_atomically

_MOST = 64
"""Points read of a kind; more is no file of joulery's."""
Points = tuple[tuple[float, float, float], ...]
"""Limit as a share of full power, slowdown, share of power."""


class JobLimitBook:
    """Files of one folder, one a kind.

    Args:
        folder: Where; made with the first file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, kind: str) -> Points:
        """The points of a kind; none where it has none, or where its file is damaged."""
        try:
            rows = json.loads(self._file(kind).read_text())["points"]
            points = tuple((float(ratio), float(slowdown), float(power)) for ratio, slowdown, power in rows[:_MOST])
        except (OSError, ValueError, KeyError, TypeError):
            return ()
        sound = all(0 < ratio < 1 and 0 < s < math.inf and 0 < power < math.inf for ratio, s, power in points)
        return points if sound else ()

    def write(self, kind: str, points: Sequence[tuple[float, float, float]]) -> bool:
        """Replace the points of a kind; False where the disk refuses."""
        content = json.dumps({"schema": "joulery.job-limits/1", "kind": kind, "points": [*map(list, points)]})
        try:
            with disk_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                write_atomically(self._file(kind), lambda file: file.write(content.encode() + b"\n"))
        except CapabilityError:
            return False
        return True

    def _file(self, kind: str) -> Path:
        return self._folder / f"{hashlib.blake2b(kind.encode(), digest_size=12).hexdigest()}.json"
