"""Meter that replays a recorded power trace from its beginning, at the recorded speed.

A recording is a table with one row for each reading: ``t_s`` (seconds, any origin) or ``t_ns``, ``device``,
``component``, and ``power_w`` or ``energy_j`` (cumulative). CSV with a header, or Parquet; the ``power.parquet`` of a
run directory is such a table (columns ``t_ns``, ``device``, ``component``, ``unit``, ``value``). ``device`` and
``component`` default to ``cpu:0`` and ``package``. A row with a missing value (empty or NaN) is ignored.

Replayed joules are labelled assumed, because they were not measured in this run.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.tabular import read_csv

_UNITS = {"J": ReadingKind.COUNTER, "W": ReadingKind.POWER}


@dataclass(frozen=True, slots=True)
class ReplayedChannel:
    """The readings of one channel: seconds since the start of the recording, and joules or watts."""

    channel: Channel
    t_s: tuple[float, ...]
    values: tuple[float, ...]


class ReplayMeter:
    """Meter that replays recordings from its creation on; it gives NaN and a note after a recording's end."""

    def __init__(self, recordings: tuple[ReplayedChannel, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self._recordings = recordings
        self._clock = clock
        self._start_s = clock()
        self._notes = ["these joules were recorded at another time, nothing was measured now (meter: replay)"]
        self._over = [False] * len(recordings)
        self._open = True

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One channel for each recorded channel."""
        return tuple(recording.channel for recording in self._recordings)

    def read(self) -> tuple[float, ...]:
        """The recorded readings at the elapsed time: counters are interpolated between two readings."""
        at_s = self._clock() - self._start_s
        return tuple(self._read(slot, recording, at_s) for slot, recording in enumerate(self._recordings))

    def notes(self) -> tuple[str, ...]:
        """New notes: that this meter is a replay, and that a recording is over."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Stop the replay. Safe to call twice."""
        self._open = False

    def _read(self, slot: int, recording: ReplayedChannel, at_s: float) -> float:
        if not self._open or not recording.t_s[0] <= at_s <= recording.t_s[-1]:
            if self._open and at_s > recording.t_s[-1] and not self._over[slot]:
                self._over[slot] = True
                self._notes.append(f"{recording.channel.device}: the recording is over after {recording.t_s[-1]:.3f} s")
            return math.nan
        index = bisect_right(recording.t_s, at_s) - 1
        value = recording.values[index]
        if recording.channel.kind is ReadingKind.POWER or index + 1 == len(recording.t_s):
            return value
        begin_s, end_s = recording.t_s[index], recording.t_s[index + 1]
        return value + (recording.values[index + 1] - value) * (at_s - begin_s) / (end_s - begin_s)


def open_replay(file: Path) -> ReplayMeter:
    """Open a meter that replays a recording.

    Raises:
        DataError: The file is missing, unreadable, not such a table, not in order of time, or has invalid values.
    """
    try:
        rows = _parquet_rows(file) if file.suffix == ".parquet" else _csv_rows(file)
        return ReplayMeter(_recordings(file, rows))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=str(file)) from error
    except UnicodeDecodeError as error:
        raise DataError("not a text file", file=str(file), hint="a recording is CSV or Parquet") from error


def _csv_rows(file: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    table = read_csv(file)
    return ((line, dict(zip(table.header, cells, strict=False))) for line, cells in table.lines if cells)


def _parquet_rows(file: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except pa.ArrowInvalid as error:
        raise DataError(f"not a Parquet file: {error}", file=str(file)) from error
    yield from enumerate(table.to_pylist(), start=2)


def _recordings(file: Path, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> tuple[ReplayedChannel, ...]:
    series: dict[tuple[str, str, ReadingKind], tuple[list[float], list[float]]] = {}
    for number, row in rows:
        key, t_s, value = _reading(file, number, row)
        if math.isnan(value):
            continue
        times, values = series.setdefault(key, ([], []))
        if times and t_s <= times[-1]:
            raise DataError(f"time {t_s} does not follow {times[-1]}", file=str(file), row=number)
        if key[2] is ReadingKind.COUNTER and values and value < values[-1]:
            raise DataError(f"the counter falls from {values[-1]} to {value}", file=str(file), row=number)
        times.append(t_s)
        values.append(value)
    if not series:
        raise DataError("holds no readings", file=str(file))
    origin_s = min(times[0] for times, _ in series.values())
    return tuple(
        ReplayedChannel(
            Channel(device, component, kind, "replay", Quality.ASSUMED),
            tuple(t - origin_s for t in times),
            tuple(values),
        )
        for (device, component, kind), (times, values) in sorted(series.items())
    )


def _reading(file: Path, number: int, row: Mapping[str, Any]) -> tuple[tuple[str, str, ReadingKind], float, float]:
    unit = row.get("unit")
    try:
        t_s = float(row["t_s"]) if "t_s" in row else int(row["t_ns"]) / 1e9
        if unit is not None:
            kind, value = _UNITS[unit], _number(row["value"])
        elif "power_w" in row:
            kind, value = ReadingKind.POWER, _number(row["power_w"])
        else:
            kind, value = ReadingKind.COUNTER, _number(row["energy_j"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is neither a column nor a unit" if isinstance(error, KeyError) else error
        raise DataError(
            f"not a reading: {reason}",
            file=str(file),
            row=number,
            hint="a recording has the columns t_s or t_ns, power_w or energy_j, and perhaps device and component",
        ) from error
    if not math.isfinite(t_s) or value < 0 or math.isinf(value):
        raise DataError(f"expected a finite time and a value >= 0, got {t_s} and {value}", file=str(file), row=number)
    return (row.get("device") or "cpu:0", row.get("component") or "package", kind), t_s, value


def _number(value: Any) -> float:
    return math.nan if value is None or value == "" else float(value)
