"""Disk cache of carbon history and forecasts, so that a service is queried once for values that do not change.

History is kept by UTC day, step by step: a step that was over when it was fetched and is not an estimate is settled and
kept for good; any other is valid for ``fresh_s``. A forecast is kept apart, for ``fresh_s`` too, and never replaces
history. A damaged entry counts as absent. Writing is atomic; where it fails (a full disk) the answer is still returned.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from joulery.adapters.carbon.series import Meaning, Reading, assemble
from joulery.adapters.carbon.timestamps import iso_utc
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.ports import CarbonSource
from joulery.domain.quality import Quality

SCHEMA = "joulery.carbon-cache/1"
DAY_S = 86400.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A step and when it was fetched."""

    reading: Reading
    fetched_at_s: float

    def usable(self, now_s: float, fresh_s: float) -> bool:
        settled = self.reading.end_s <= self.fetched_at_s and not self.reading.estimated
        return settled or 0 <= now_s - self.fetched_at_s < fresh_s


@dataclass(slots=True)
class Cached:
    """A source behind a cache on disk.

    Attributes:
        source: The source that is queried for steps the cache lacks.
        folder: Folder of this source alone; see :func:`provider_folder`.
        step_s: Longest step of the source; gaps are split at its multiples.
        fresh_s: How long an estimate, a step that was not over, a missing one and a forecast are kept.
        now_s: Unix seconds.
    """

    source: CarbonSource
    folder: Path
    step_s: float
    fresh_s: float = 600.0
    now_s: Callable[[], float] = time.time
    _missed: tuple[float, float, float] = field(default=(0.0, 0.0, float("-inf")), init=False, repr=False)

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The source's history; the source is queried only for the stretch that the cache lacks.

        Raises:
            JouleryError: As the source's ``history``.
        """
        now_s = self.now_s()
        days = range(int((t0_s - self.step_s) // DAY_S), int(-(-t1_s // DAY_S)))
        meaning, kept = self._load(days)
        usable = [one for one in kept if one.usable(now_s, self.fresh_s)]
        lacking = _lacking(usable, t0_s, t1_s)
        if meaning is not None and (lacking is None or self._asked_lately(*lacking, now_s)):
            return assemble((one.reading for one in usable), t0_s, t1_s, meaning, step_s=self.step_s)
        begin_s, end_s = lacking or (t0_s, t1_s)
        found = self.source.history(begin_s, end_s)
        self._missed = (begin_s, end_s, now_s)
        meaning = Meaning(found.zone, found.signal, found.scope, found.source, found.quality)
        fresh = [_Kept(reading, now_s) for reading in _known(found)]
        outside = [one for one in usable if one.reading.end_s <= found.start_s or one.reading.start_s >= found.end_s]
        self._store(meaning, (*outside, *fresh))
        return assemble((one.reading for one in (*outside, *fresh)), t0_s, t1_s, meaning, step_s=self.step_s)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The source's forecast, at most ``fresh_s`` old.

        Raises:
            JouleryError: As the source's ``forecast``.
        """
        now_s, path = self.now_s(), self.folder / "forecast.json"
        entry = _read(path)
        if entry is not None:
            try:
                asked = entry["asked"]
                fresh = 0 <= now_s - entry["fetched_at_s"] < self.fresh_s
                if fresh and asked[0] <= t0_s and t1_s <= asked[1]:
                    readings = [_reading(row) for row in entry["steps"]]
                    issued_at_s = float(entry["issued_at_s"])
                    return assemble(readings, t0_s, t1_s, _meaning(entry), step_s=self.step_s, issued_at_s=issued_at_s)
            except (LookupError, TypeError, ValueError, DataError) as error:
                _log.info("asking again, %s cannot be used: %r", path, error)
        found = self.source.forecast(t0_s, t1_s)
        meaning = Meaning(found.zone, found.signal, found.scope, found.source, found.quality)
        rows = [_row(reading) for reading in _known(found)]
        head = {"asked": [t0_s, t1_s], "fetched_at_s": now_s, "issued_at_s": found.issued_at_s}
        _write(path, {**_head(meaning), **head, "steps": rows})
        return found

    def _asked_lately(self, begin_s: float, end_s: float, now_s: float) -> bool:
        """Whether the source was queried for this stretch less than ``fresh_s`` ago."""
        first_s, last_s, asked_at_s = self._missed
        return first_s <= begin_s and end_s <= last_s and 0 <= now_s - asked_at_s < self.fresh_s

    def _load(self, days: Iterable[int]) -> tuple[Meaning | None, list[_Kept]]:
        """The content of the files of these UTC days."""
        meaning: Meaning | None = None
        kept: list[_Kept] = []
        for day in days:
            path = self._path(day)
            entry = _read(path)
            if entry is None:
                continue
            try:
                steps = [_Kept(_reading(row), float(row[4])) for row in entry["steps"]]
                if any(two.reading.start_s < one.reading.end_s for one, two in pairwise((*kept[-1:], *steps))):
                    raise ValueError("steps overlap")
                meaning = _meaning(entry)
                kept += steps
            except (LookupError, TypeError, ValueError) as error:
                _log.info("asking again, %s cannot be used: %r", path, error)
        return meaning, kept

    def _store(self, meaning: Meaning, kept: Iterable[_Kept]) -> None:
        by_day: dict[int, list[list[Any]]] = {}
        for one in sorted(kept, key=lambda one: one.reading.start_s):
            row = [*_row(one.reading), one.fetched_at_s]
            by_day.setdefault(int(one.reading.start_s // DAY_S), []).append(row)
        for day, rows in by_day.items():
            _write(self._path(day), {**_head(meaning), "steps": rows})

    def _path(self, day: int) -> Path:
        return self.folder / f"{iso_utc(day * DAY_S)[:10]}.json"


def provider_folder(root: Path, *parts: str) -> Path:
    """The folder for a source below the cache's root; ``parts`` are the settings that change its answers."""
    return root / "carbon" / "_".join(("v1", *(quote(part, safe="") for part in parts)))


def _lacking(kept: Iterable[_Kept], t0_s: float, t1_s: float) -> tuple[float, float] | None:
    """The shortest stretch of ``[t0_s, t1_s)`` that holds everything not covered; None when all of it is."""
    steps = sorted((one.reading.start_s, one.reading.end_s) for one in kept)
    first_s = t0_s
    for start_s, end_s in steps:
        if start_s <= first_s < end_s:
            first_s = end_s
    if first_s >= t1_s:
        return None
    last_s = t1_s
    for start_s, end_s in reversed(steps):
        if start_s < last_s <= end_s:
            last_s = start_s
    return first_s, last_s


def _known(series: CarbonSeries) -> list[Reading]:
    known = ~np.isnan(series.g_per_kwh)
    columns = (series.edges_s[:-1], series.edges_s[1:], series.g_per_kwh, series.estimated)
    return [Reading(*row) for row in zip(*(column[known].tolist() for column in columns), strict=True)]


def _row(reading: Reading) -> list[Any]:
    return [reading.start_s, reading.end_s, reading.g_per_kwh, reading.estimated]


def _reading(row: Any) -> Reading:
    start_s, end_s, g_per_kwh = (float(value) for value in row[:3])
    if not (np.isfinite(start_s) and start_s < end_s < np.inf and np.isfinite(g_per_kwh)):
        raise ValueError(f"no step: {row}")
    return Reading(start_s, end_s, g_per_kwh, bool(row[3]))


def _head(meaning: Meaning) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "zone": meaning.zone,
        "signal": meaning.signal.value,
        "scope": meaning.scope.value,
        "source": meaning.source,
        "quality": meaning.quality.value if meaning.quality else None,
    }


def _meaning(entry: dict[str, Any]) -> Meaning:
    quality = Quality(entry["quality"]) if entry["quality"] is not None else None
    return Meaning(str(entry["zone"]), Signal(entry["signal"]), Scope(entry["scope"]), str(entry["source"]), quality)


def _read(path: Path) -> dict[str, Any] | None:
    """A cache file; None when it is absent, damaged or of another version."""
    try:
        entry = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.info("asking again, %s cannot be read: %s", path, error)
        return None
    return entry if isinstance(entry, dict) and entry.get("schema") == SCHEMA else None


def _write(path: Path, entry: dict[str, Any]) -> None:
    """Replace a cache file atomically; a failure is logged, not raised."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(entry, stream)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        _log.warning("carbon intensity could not be cached in %s: %s", path, error)
