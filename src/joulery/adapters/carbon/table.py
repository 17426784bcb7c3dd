"""A CSV or Parquet file as columns of cells that still know their line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError
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


def read_table(path: Path) -> Table:
    """The file as a table; at least one row and two columns.

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
            f"{len(table.rows)} rows and {len(table.columns)} columns are no series",
            file=file,
            hint="expected a header such as timestamp_utc,ci_lifecycle and a row for each step",
        )
    return table


def _csv(path: Path) -> Table:
    table = read_csv(path, separators=",;\t")
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
    """Python values; time stamps as datetimes, in UTC where they carry a zone."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_date(kind):
        kind = pyarrow.timestamp("s")
    if not pyarrow.types.is_timestamp(kind):
        return list(column.to_pylist())
    whole = column.cast(pyarrow.timestamp("us", kind.tz), safe=kind.unit != "ns").cast(pyarrow.int64()).to_pylist()
    epoch = datetime(1970, 1, 1, tzinfo=UTC if kind.tz else None)
    return [None if us is None else epoch + timedelta(microseconds=us) for us in whole]
