"""Readers of events and power in CSV tables, which a program in any language can write.

Events: ``op,start_ns,dur_ns,device,lane,phase``; the last two columns, or single cells in them, may be left out. Power:
``t_ns,device`` and ``power_w`` (instantaneous) or ``counter_j`` (cumulative); ``component``, ``averaging_s``,
``wrap_j`` and ``quality`` may be added. CSV with a header, plain or gzipped; other columns are ignored.

The tables may have any length and use commas and decimal points. They are read in chunks, whereas
:mod:`joulery.tabular` holds a whole table. Encodings and other kinds of files are recognised as in that module.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path

import numpy as np

from joulery.adapters.tracers.chrome import open_stream
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.trace.events import NO_LANE, UNNAMED, EventTrace
from joulery.tabular import encoding_of, require_columns, require_unique

EVENT_COLUMNS = ("op", "start_ns", "dur_ns", "device", "lane", "phase")
_NS_PER_S = 1_000_000_000
_BEGINNING = 8
"""Bytes that tell the encoding of a file."""


def read_event_table(path: Path) -> EventTrace:
    """The events of a CSV table.

    Raises:
        DataError: The file cannot be read, a column is missing, or a cell has an invalid value.
    """
    kinds = {"op": "text", "start_ns": "int", "dur_ns": "int", "device": "text", "lane": "text", "phase": "text"}
    table = _read(path, kinds, required=EVENT_COLUMNS[:4])
    rows = table.rows
    codes: dict[str, tuple[list[str], IntArray]] = {
        name: _coded(table, name, path, missing=name in ("lane", "phase")) for name in ("op", "device", "lane", "phase")
    }
    start_ns, dur_ns = (_whole(table, name) for name in ("start_ns", "dur_ns"))
    lanes, lane = codes["lane"]
    phases, phase = codes["phase"]
    empty = np.array([text == "" for text in lanes], np.bool_)
    ops = [name.strip("/") or UNNAMED for name in codes["op"][0]]
    try:
        return EventTrace(
            ops,
            codes["device"][0],
            phases,
            op=codes["op"][1],
            start_ns=start_ns,
            dur_ns=dur_ns,
            device=codes["device"][1],
            lane=np.where(empty[lane], NO_LANE, lane) if rows else lane,
            phase=phase,
        )
    except DataError as error:
        raise DataError(error.message, file=str(path), hint=error.hint) from error


def read_power_table(path: Path, *, period_s: float | None = None) -> list[PowerTrace]:
    """The channels of a CSV table of power, one for each (device, component).

    Readings may be in any order; of equal stamps the last one counts. A device that has both columns is read from
    its counter. The sampling period is the median interval between two readings.

    Args:
        path: The file.
        period_s: Sampling period, where the table has only one reading or its stamps imply a wrong one.

    Raises:
        DataError: The file cannot be read, a column is missing, or a cell has an invalid value.
    """
    kinds = {
        "t_ns": "int",
        "device": "text",
        "power_w": "float",
        "counter_j": "float",
        "component": "text",
        "averaging_s": "float",
        "wrap_j": "float",
        "quality": "text",
    }
    table = _read(path, kinds, required=("t_ns", "device"))
    if "power_w" not in table and "counter_j" not in table:
        raise DataError("neither power_w nor counter_j among the columns", file=str(path), hint=_POWER_HINT)
    t_ns = _whole(table, "t_ns")
    devices, device = _coded(table, "device", path)
    components, component = _coded(table, "component", path, missing=True)
    stated, quality = _coded(table, "quality", path, missing=True)
    values = {name: _float(table, name) for name in ("power_w", "counter_j", "averaging_s", "wrap_j")}
    traces = []
    pairs = set(zip(device.tolist(), component.tolist(), strict=True))
    for d, c in sorted(pairs, key=lambda pair: (devices[pair[0]], components[pair[1]])):
        rows = np.flatnonzero((device == d) & (component == c))
        qualities = {stated[at] for at in np.unique(quality[rows]).tolist() if stated[at]}
        here = {name: column[rows] for name, column in values.items()}
        try:
            traces.append(_channel(devices[d], components[c], t_ns[rows], here, qualities, period_s))
        except DataError as error:
            raise DataError(error.message, file=str(path), hint=error.hint or _POWER_HINT) from error
    if not traces:
        raise DataError("the table holds no reading", file=str(path), hint=_POWER_HINT)
    return traces


_POWER_HINT = "a power table has the columns t_ns, device and power_w or counter_j"


def _channel(
    device: str,
    component: str,
    t_ns: IntArray,
    values: Mapping[str, FloatArray],
    qualities: set[str],
    period_s: float | None,
) -> PowerTrace:
    counter = bool(np.any(~np.isnan(values["counter_j"])))
    averaging = values["averaging_s"][~np.isnan(values["averaging_s"])]
    wrap = values["wrap_j"][~np.isnan(values["wrap_j"])]
    kind = ReadingKind.COUNTER if counter else ReadingKind.AVERAGE if len(averaging) else ReadingKind.POWER
    order = np.argsort(t_ns, kind="stable")
    last = np.append(np.diff(t_ns[order]) > 0, True)
    kept = order[last]
    quality = _quality(device, qualities)
    channel = Channel(
        device,
        component or "package",
        kind,
        "recorded",
        quality,
        averaging_s=float(averaging[0]) if kind is ReadingKind.AVERAGE else 0.0,
        wrap_j=float(wrap[0]) if counter and len(wrap) else 0.0,
    )
    spacing = np.diff(t_ns[kept])
    period = period_s if period_s is not None else float(np.median(spacing)) / _NS_PER_S if len(spacing) else 1e-9
    return PowerTrace(channel, t_ns[kept], values["counter_j" if counter else "power_w"][kept], period)


def _quality(device: str, qualities: set[str]) -> Quality:
    if len(qualities) > 1:
        raise DataError(f"{device}: readings of different quality ({', '.join(sorted(qualities))}) in one channel")
    try:
        return Quality(qualities.pop()) if qualities else Quality.MEASURED
    except ValueError as error:
        raise DataError(f"{device}: {error}", hint=f"quality is {', '.join(Quality)}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The known columns of a CSV file.

    Attributes:
        rows: Its rows.
        numbers: Columns of whole or decimal numbers, int64[n] or float64[n].
        texts: Distinct strings of the other columns, and the index of each row's string, int64[n].
    """

    rows: int
    numbers: Mapping[str, FloatArray | IntArray]
    texts: Mapping[str, tuple[list[str], IntArray]]

    def __contains__(self, name: str) -> bool:
        return name in self.numbers or name in self.texts


def _read(path: Path, kinds: Mapping[str, str], required: tuple[str, ...]) -> _Table:
    """Read the known columns of a CSV file, in chunks so that a long file takes little memory."""
    try:
        with open_stream(path) as stream:
            encoding = encoding_of(stream.read(_BEGINNING), path)
            stream.seek(0)
            reader = csv.reader(TextIOWrapper(stream, encoding, newline=""), strict=True)
            header = [name.strip() for name in next(reader, [])]
            if not header:
                raise csv.Error("the file is empty")
            require_columns(required, header, path)
            require_unique(header, path)
            return _collected(path, reader, header, kinds)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"no such table: {error}", file=str(path), hint=f"columns: {', '.join(kinds)}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"the gzip stream is damaged or ends early: {error}", file=str(path)) from error


def _collected(path: Path, reader: Iterator[list[str]], header: list[str], kinds: Mapping[str, str]) -> _Table:
    numbers: dict[str, list[FloatArray | IntArray]] = {n: [] for n in header if kinds.get(n) in ("int", "float")}
    indices: dict[str, list[IntArray]] = {name: [] for name in header if kinds.get(name) == "text"}
    codes: dict[str, dict[str, int]] = {name: {} for name in indices}
    rows = 0
    while lines := list(islice(reader, _PIECE)):
        lines = [cells for cells in lines if cells]
        if any(len(cells) != len(header) for cells in lines):
            at = next(at for at, cells in enumerate(lines) if len(cells) != len(header))
            raise DataError(
                f"expected {len(header)} cells like the header, got {len(lines[at])}", file=str(path), row=rows + at + 2
            )
        for name, column in zip(header, zip(*lines, strict=True), strict=False):
            if name in numbers:
                numbers[name].append(_numbers(path, name, column, whole=kinds[name] == "int", first_row=rows + 2))
            elif name in indices:
                known = codes[name]
                for cell in dict.fromkeys(column):
                    known.setdefault(cell, len(known))
                indices[name].append(np.fromiter(map(known.__getitem__, column), np.int64, len(column)))
        rows += len(lines)
    none = {"int": np.empty(0, np.int64), "float": np.empty(0)}
    return _Table(
        rows,
        {name: np.concatenate([none[kinds[name]], *pieces]) for name, pieces in numbers.items()},
        {name: (list(codes[name]), np.concatenate([none["int"], *pieces])) for name, pieces in indices.items()},
    )


def _numbers(path: Path, name: str, cells: Sequence[str], *, whole: bool, first_row: int) -> FloatArray | IntArray:
    """Parse a chunk of a column of numbers; a missing decimal number becomes NaN."""
    try:
        if whole:
            return np.fromiter(map(int, cells), np.int64, len(cells))
        return np.fromiter(map(_decimal, cells), np.float64, len(cells))
    except (ValueError, OverflowError):
        pass
    row, cell = next((row, cell) for row, cell in enumerate(cells, start=first_row) if not _is_number(cell, whole))
    if whole and cell.strip() in _MISSING:
        raise DataError(f"{name} is empty", file=str(path), row=row, hint="nanoseconds are whole numbers")
    kind = "a whole number of 64 bits" if whole else "a number"
    raise DataError(f"{name}: invalid value {cell[:40]!r}, expected {kind}", file=str(path), row=row)


def _is_number(cell: str, whole: bool) -> bool:
    try:
        np.int64(int(cell)) if whole else _decimal(cell)
    except (ValueError, OverflowError):
        return False
    return True


def _decimal(cell: str) -> float:
    return math.nan if cell.strip() in _MISSING else float(cell)


_PIECE = 1_024
_MISSING = frozenset(("", "nan", "NaN", "NAN", "null", "NA", "None"))


def _whole(table: _Table, name: str) -> IntArray:
    return np.asarray(table.numbers[name], np.int64)


def _float(table: _Table, name: str) -> FloatArray:
    found = table.numbers.get(name)
    return np.full(table.rows, np.nan) if found is None else np.asarray(found, np.float64)


def _coded(table: _Table, name: str, path: Path, *, missing: bool = False) -> tuple[list[str], IntArray]:
    """The distinct strings of a column, and the index of each row's string."""
    if name not in table.texts:
        return [""], np.zeros(table.rows, np.int64)
    texts, indices = table.texts[name]
    if not missing and "" in texts:
        row = int(np.argmax(indices == texts.index(""))) + 2
        raise DataError(f"{name} is empty", file=str(path), row=row)
    return texts or [""], indices
