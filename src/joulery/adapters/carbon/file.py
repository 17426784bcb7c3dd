"""Carbon intensity from a CSV or Parquet file: one row a step, stamped with its beginning.

The header of the bundled and of most public series is understood without options: ``timestamp_utc``, ``ci_lifecycle``,
``ci_direct``, ``estimated``. Any other file needs its columns named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from joulery.adapters.carbon.fill import FilePlace, complete
from joulery.adapters.carbon.series import Meaning, window
from joulery.adapters.carbon.timestamps import StampReader, iso_utc, time_zone
from joulery.domain.arrays import IntArray
from joulery.domain.energy.carbon import CarbonSeries, FillRule, Scope, Signal
from joulery.domain.errors import CapabilityError, DataError
from joulery.tabular import read_csv, require_unique


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equal length.

    Attributes:
        columns: Cells by column name, in the order of the file: text from CSV, typed values from Parquet.
        rows: 1-based line of each row in a CSV file, row number in Parquet.
    """

    columns: Mapping[str, Sequence[Any]]
    rows: Sequence[int]

    def __getitem__(self, name: str) -> Sequence[Any]:
        return self.columns[name]


def read_intensities(path: Path) -> Table:
    """Read a file as a table of at least one row and two columns.

    Raises:
        DataError: It cannot be read, is neither CSV nor Parquet, has no rows, or a row has the wrong number of cells.
    """
    file = str(path)
    try:
        with path.open("rb") as stream:
            parquet = stream.read(4) == b"PAR1"
        table = _parquet(path) if parquet else _csv(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=file, hint="check the path") from error
    if len(table.columns) < 2 or not table.rows:
        raise DataError(
            f"{len(table.rows)} rows and {len(table.columns)} columns are not a series",
            file=file,
            hint="expected a header such as timestamp_utc,ci_lifecycle and a row for each step",
        )
    return table


def _csv(path: Path) -> Table:
    table = read_csv(path)
    rows = [(number, cells) for number, cells in table.lines if cells]
    for number, cells in rows:
        if len(cells) != len(table.header):
            raise DataError(f"{len(cells)} cells where the header has {len(table.header)}", file=str(path), row=number)
    columns = {name: [cells[index] for _, cells in rows] for index, name in enumerate(table.header)}
    return Table(columns, [number for number, _ in rows])


def _parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"not readable as Parquet: {str(error).splitlines()[0]}", file=str(path)) from error
    names = found.column_names
    require_unique(names, path)
    try:
        columns = {name: _cells(found[name]) for name in names}
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise DataError(f"holds values beyond what can be read: {error}", file=str(path)) from error
    return Table(columns, range(1, found.num_rows + 1))


def _cells(column: Any) -> list[Any]:
    """The cells of a column as Python values; time stamps as datetimes, in UTC where they carry a zone."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_date(kind):
        kind = pyarrow.timestamp("s")
    if not pyarrow.types.is_timestamp(kind):
        return list(column.to_pylist())
    whole = column.cast(pyarrow.timestamp("us", kind.tz), safe=kind.unit != "ns").cast(pyarrow.int64()).to_pylist()
    epoch = datetime(1970, 1, 1, tzinfo=UTC if kind.tz else None)
    return [None if us is None else epoch + timedelta(microseconds=us) for us in whole]


TIME_COLUMNS = (
    "timestamp_utc",
    "datetime_utc",
    "datetime (utc)",
    "timestamp",
    "datetime",
    "point_time",
    "time",
    "date",
)
FLAG_COLUMNS = ("estimated", "is_estimated", "data estimated")
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
MISSING = frozenset({"", "nan", "na", "n/a", "null", "none", "-"})

SPARSEST = 100
"""Steps per row above which the gaps of a file count as a mistake."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileFormat:
    """Format of a file of carbon intensity.

    Attributes:
        zone: Zone to put on the series; empty for the name of the file.
        column: Column of the values; empty for ``ci_lifecycle`` or ``ci_direct`` (by ``scope``), else the only
            column left.
        time_column: Column of the time stamps; empty to find it by its name.
        timezone: Time zone of stamps without an offset (``Europe/Berlin``); empty when they carry one, or when the
            column's name contains ``utc``.
        signal: Average or marginal intensity.
        scope: Direct or life-cycle emissions; None to take it from the column's name, else life-cycle.
        step_s: Length of a step; 0 to infer it from the stamps.
        fill: What to do about missing rows and values.
    """

    zone: str = ""
    column: str = ""
    time_column: str = ""
    timezone: str = ""
    signal: Signal = Signal.AVERAGE
    scope: Scope | None = None
    step_s: float = 0.0
    fill: FillRule = field(default_factory=FillRule)


@dataclass(frozen=True, slots=True)
class SeriesSource:
    """A source whose series is already in memory: a file that was read, a trace, values in a test.

    Attributes:
        actual: The history.
        expected: The forecast; None when there is none.
    """

    actual: CarbonSeries
    expected: CarbonSeries | None = None

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The steps that meet ``[t0_s, t1_s)``; NaN where the series does not reach.

        Raises:
            DataError: The series has nothing at all for the interval.
        """
        return _part(self.actual, t0_s, t1_s)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The steps of the forecast that meet ``[t0_s, t1_s)``; NaN where it does not reach.

        Raises:
            CapabilityError: There is no forecast.
            DataError: The forecast has nothing at all for the interval.
        """
        if self.expected is None:
            raise CapabilityError(
                f"{self.actual.source} holds no forecast", hint="name a forecast file, or use a service that forecasts"
            )
        return _part(self.expected, t0_s, t1_s)


def _part(series: CarbonSeries, t0_s: float, t1_s: float) -> CarbonSeries:
    if t1_s <= series.start_s or t0_s >= series.end_s:
        raise DataError(
            f"{series.source} covers {iso_utc(series.start_s)} to {iso_utc(series.end_s)}, "
            f"asked for {iso_utc(t0_s)} to {iso_utc(t1_s)}",
            hint="use a file that covers the run, or a service (--zone)",
        )
    return window(series, t0_s, t1_s, step_s=float(np.median(np.diff(series.edges_s))))


def read_carbon_file(path: Path, how: FileFormat | None = None, *, forecast: bool = False) -> CarbonSeries:
    """Read the series in a CSV or Parquet file.

    Args:
        path: The file.
        how: Its columns, time zone and meaning, and the rule for gaps.
        forecast: True for a forecast; its ``issued_at_s`` is its first stamp.

    Raises:
        DataError: The file is missing, unreadable or malformed: no header, unsorted or duplicate stamps, stamps that
            are not a multiple of a step apart, a value that is negative or not a number, or a gap that ``how.fill``
            does not fill. The error names file and line.
        ConfigError: ``how.timezone`` is not a time zone.
    """
    how = how or FileFormat()
    file, table = str(path), read_intensities(path)
    time_column = _time_column(file, table, how.time_column)
    column = _value_column(file, table, how, time_column)
    zone = time_zone(how.timezone) if how.timezone else UTC if "utc" in time_column.lower() else None
    starts = _each(file, table, time_column, StampReader(zone).read)
    step_s = how.step_s or _step_s(file, table, starts)
    places = _places(file, table, starts, step_s)
    grid, estimated = np.full(places[-1] + 1, np.nan), np.zeros(places[-1] + 1, bool)
    grid[places] = _each(file, table, column, lambda cell: _intensity(cell, how.signal))
    flag_column = next((name for name in table.columns if name.lower() in FLAG_COLUMNS and name != column), "")
    if flag_column:
        estimated[places] = _each(file, table, flag_column, _flag)
    meaning = Meaning(how.zone or path.stem, how.signal, how.scope or _scope(column), f"{path.name}, column {column}")
    series = meaning.series(
        starts[0] + step_s * np.arange(len(grid) + 1.0), grid, estimated, issued_at_s=starts[0] if forecast else None
    )
    return complete(
        series,
        series.start_s,
        series.end_s,
        how.fill,
        place=lambda step: FilePlace(file, table.rows[int(np.searchsorted(places, step))]),
    )


def _each(file: str, table: Table, column: str, read: Callable[[Any], T]) -> list[T]:
    """Read every cell of a column; an error names the line."""
    found = []
    for row, cell in zip(table.rows, table[column], strict=True):
        try:
            found.append(read(cell))
        except DataError as error:
            raise DataError(f"{column}: {error.message}", file=file, row=row, hint=error.hint) from error
    return found


def _time_column(file: str, table: Table, wanted: str) -> str:
    if wanted:
        return _existing(file, table, wanted)
    by_name = {name.lower(): name for name in reversed(list(table.columns))}
    for name in TIME_COLUMNS:
        if name in by_name:
            return by_name[name]
    raise DataError(
        f"no column of time stamps among {', '.join(table.columns)}",
        file=file,
        row=1,
        hint=f"call it {TIME_COLUMNS[0]}, or name it: --time-column NAME, in a site file carbon.time_column",
    )


def _value_column(file: str, table: Table, how: FileFormat, time_column: str) -> str:
    if how.column:
        return _existing(file, table, how.column)
    preferred = [Scope.LIFECYCLE, Scope.DIRECT] if how.scope is None else [how.scope]
    for scope in preferred:
        if f"ci_{scope}" in table.columns:
            return f"ci_{scope}"
    others = [name for name in table.columns if name != time_column and name.lower() not in FLAG_COLUMNS]
    if len(others) == 1 and others[0] not in {f"ci_{scope}" for scope in Scope}:
        return others[0]
    raise DataError(
        f"which column holds the {how.scope or ''} intensity? There are {', '.join(others)}".replace("  ", " "),
        file=file,
        row=1,
        hint="name it (--column NAME)",
    )


def _existing(file: str, table: Table, name: str) -> str:
    if name not in table.columns:
        raise DataError(f"no column {name}; there are {', '.join(table.columns)}", file=file, row=1)
    return name


def _scope(column: str) -> Scope:
    return Scope.DIRECT if "direct" in column.lower() else Scope.LIFECYCLE


def _intensity(cell: Any, signal: Signal) -> float:
    """Grams per kilowatt-hour; NaN for an empty cell."""
    if cell is None or (isinstance(cell, str) and cell.strip().lower() in MISSING):
        return float("nan")
    try:
        if isinstance(cell, bool) or "_" in str(cell):
            raise ValueError(cell)
        value = float(cell)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{str(cell)[:40]!r} is not a number", hint="write grams per kilowatt-hour, such as 231.5"
        ) from error
    if np.isinf(value) or (value < 0 and signal is Signal.AVERAGE):
        raise DataError(f"{value:g} g/kWh is not an average intensity", hint="expected a finite value of at least 0")
    return value


def _flag(cell: Any) -> bool:
    """Whether the provider estimated the value."""
    text = "" if cell is None else str(cell).strip().lower().removesuffix(".0")
    if text not in FLAGS:
        raise DataError(f"{str(cell)[:40]!r} is neither 0 nor 1")
    return FLAGS[text]


def _step_s(file: str, table: Table, starts: Sequence[float]) -> float:
    """The most common distance between stamps, in seconds; the smallest of equally common ones."""
    if len(starts) < 2:
        raise DataError(
            "one row does not show the step", file=file, row=table.rows[0], hint="add a row, or state the step"
        )
    distances, counts = np.unique(np.diff(starts), return_counts=True)
    positive = distances > 0
    if not bool(positive.any()):
        return 1.0
    return float(distances[positive][np.argmax(counts[positive])])


def _places(file: str, table: Table, starts: Sequence[float], step_s: float) -> IntArray:
    """The number of the step that each row begins, counted from the first row's."""
    offsets = (np.asarray(starts) - starts[0]) / step_s
    places = np.rint(offsets).astype(np.int64)
    before = np.diff(np.asarray(starts), prepend=-np.inf)
    for wrong, says in (
        (before < 0, "is before the row above"),
        (before == 0, "is the same time as the row above"),
        (np.abs(offsets - places) > 1e-6, f"is not a multiple of the {step_s:g} s step after the first row"),
    ):
        if bool(wrong.any()):
            at = int(np.argmax(wrong))
            raise DataError(
                f"{iso_utc(starts[at])} {says}",
                file=file,
                row=table.rows[at],
                hint="one row a step, sorted by time, each stamped with the beginning of its step",
            )
    if places[-1] > SPARSEST * len(starts):
        at = int(np.argmax(np.diff(starts))) + 1
        raise DataError(
            f"{iso_utc(starts[at])} is {starts[at] - starts[at - 1]:g} s after the row above; steps are {step_s:g} s",
            file=file,
            row=table.rows[at],
            hint="split the file, or state the step",
        )
    return places
