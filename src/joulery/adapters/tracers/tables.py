"""Events and power as plain tables: what any program in any language can write.

Events: ``op,start_ns,dur_ns,device,lane,phase``; the last two columns, or cells of theirs, may be left out. Power:
``t_ns,device`` and ``power_w`` (instantaneous) or ``counter_j`` (cumulative); ``component``, ``averaging_s``,
``wrap_j`` and ``quality`` may be added. CSV with a header, plain or gzipped; other columns are ignored.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from joulery.adapters.tracers.chrome import open_stream
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.trace.events import NO_LANE, UNNAMED, EventTrace
from joulery.tabular import require_columns, require_unique

EVENT_COLUMNS = ("op", "start_ns", "dur_ns", "device", "lane", "phase")
_NS_PER_S = 1_000_000_000


def read_event_table(path: Path) -> EventTrace:
    """The events of a CSV table.

    Raises:
        DataError: The file cannot be read, a column is missing, or a cell is no such value.
    """
    kinds = {"op": "text", "start_ns": "int", "dur_ns": "int", "device": "text", "lane": "text", "phase": "text"}
    table = _read(path, kinds, required=EVENT_COLUMNS[:4])
    rows = table.num_rows
    codes: dict[str, tuple[list[str], IntArray]] = {
        name: _coded(table, name, path, missing=name in ("lane", "phase")) for name in ("op", "device", "lane", "phase")
    }
    start_ns, dur_ns = (_whole(table, name, path) for name in ("start_ns", "dur_ns"))
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
    """The channels of a CSV table of power, one a (device, component).

    Readings may come in any order; of equal stamps the last one counts. A device that has both columns is read from
    its counter. The sampling period is the median distance of two readings.

    Args:
        path: The file.
        period_s: Sampling period, where the table has only one reading or states it wrong.

    Raises:
        DataError: The file cannot be read, a column is missing, or a cell is no such value.
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
    present = set(table.column_names)
    if not present & {"power_w", "counter_j"}:
        raise DataError("neither power_w nor counter_j among the columns", file=str(path), hint=_POWER_HINT)
    t_ns = _whole(table, "t_ns", path)
    devices, device = _coded(table, "device", path)
    components, component = _coded(table, "component", path, missing=True)
    values = {name: _float(table, name) for name in ("power_w", "counter_j", "averaging_s", "wrap_j")}
    traces = []
    pairs = set(zip(device.tolist(), component.tolist(), strict=True))
    for d, c in sorted(pairs, key=lambda pair: (devices[pair[0]], components[pair[1]])):
        rows = np.flatnonzero((device == d) & (component == c))
        qualities = {q for q in (table.column("quality").take(rows).to_pylist() if "quality" in present else []) if q}
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


def _read(path: Path, kinds: Mapping[str, str], required: tuple[str, ...]) -> Any:
    """The known columns of a CSV file as an Arrow table."""
    import pyarrow as pa
    from pyarrow import csv

    types = {"text": pa.string(), "int": pa.int64(), "float": pa.float64()}
    try:
        with open_stream(path) as stream:
            table = csv.read_csv(
                stream,
                read_options=csv.ReadOptions(use_threads=False),
                parse_options=csv.ParseOptions(newlines_in_values=False),
                convert_options=csv.ConvertOptions(
                    column_types={name: types[kind] for name, kind in kinds.items()},
                    null_values=["", "nan", "NaN", "NAN", "null", "NA", "None"],
                    strings_can_be_null=False,
                ),
            )
            names = table.column_names
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(f"no such table: {error}", file=str(path), hint=f"columns: {', '.join(kinds)}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"the gzip stream is damaged or ends early: {error}", file=str(path)) from error
    require_columns(required, names, path)
    require_unique(names, path)
    return table


def _whole(table: Any, name: str, path: Path) -> IntArray:
    column = table.column(name)
    if column.null_count:
        row = column.is_null().to_pylist().index(True) + 2
        raise DataError(f"{name} is empty", file=str(path), row=row, hint="nanoseconds are whole numbers")
    return np.asarray(column.to_numpy(), np.int64)


def _float(table: Any, name: str) -> FloatArray:
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    return np.asarray(table.column(name).to_numpy(), np.float64)


def _coded(table: Any, name: str, path: Path, *, missing: bool = False) -> tuple[list[str], IntArray]:
    """Distinct strings of a column and the index of each row's."""
    if name not in table.column_names:
        return [""], np.zeros(table.num_rows, np.int64)
    encoded = table.column(name).combine_chunks().dictionary_encode()
    texts = [str(text) for text in encoded.dictionary.to_pylist()]
    indices = np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)
    if not missing and "" in texts:
        row = int(np.argmax(indices == texts.index(""))) + 2
        raise DataError(f"{name} is empty", file=str(path), row=row)
    return texts or [""], indices
