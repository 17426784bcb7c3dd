"""Readers of rows of a CSV file, and of columns of numbers of a CSV or Parquet file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, readonly
from joulery.domain.errors import DataError
from joulery.store.run.series import read_series
from joulery.tabular import read_csv, require_columns


@dataclass(frozen=True, slots=True)
class CsvRow:
    """A row of a CSV file with its file and row number, for error messages.

    Attributes:
        cells: Text by the name of the column.
        file: The file.
        number: The row in it, the names of the columns being row 1.
    """

    cells: Mapping[str, str]
    file: Path
    number: int

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def positive(self, column: str) -> float:
        """The number in a column.

        Raises:
            DataError: It is missing, not a number, not finite, or not above 0.
        """
        value = self._number(column)
        if not 0 < value < math.inf:
            raise self.wrong(f"{column} is {self.cells[column]!r}, expected a number above 0")
        return value

    def at_least(self, column: str, least: float) -> float:
        """The number in a column.

        Raises:
            DataError: It is missing, not a number, not finite, or below ``least``.
        """
        value = self._number(column)
        if not least <= value < math.inf:
            raise self.wrong(f"{column} is {self.cells[column]!r}, expected a number of {least:g} or more")
        return value

    def whole(self, column: str) -> int:
        """The whole number in a column.

        Raises:
            DataError: It is missing, or not a whole number above 0.
        """
        value = self.positive(column)
        if value != int(value):
            raise self.wrong(f"{column} is {self.cells[column]!r}, expected a whole number")
        return int(value)

    def _number(self, column: str) -> float:
        """The number in a column; NaN where the cell does not hold one."""
        try:
            return float(self.cells[column])
        except ValueError:
            return math.nan

    def wrong(self, message: str, *, hint: str = "") -> DataError:
        """Make an error that names the file and the row."""
        return DataError(message, file=str(self.file), row=self.number, hint=hint)


def read_rows(path: Path, columns: Sequence[str]) -> list[CsvRow]:
    """Read the rows of a CSV file, UTF-8, whose first row names the columns; empty lines are skipped.

    Args:
        path: The file.
        columns: Required columns; others are left out.

    Raises:
        DataError: No such file, one of the columns is missing, or no rows.
    """
    rows = [row for row in _lines(path, columns) if row.cells]
    if not rows:
        raise DataError("no rows", file=str(path))
    return rows


def read_column(path: Path, column: str, *, least: float = 0.0) -> FloatArray:
    """Read the numbers of a column, in the order of the rows.

    Args:
        path: A CSV file, UTF-8, whose first row names the columns.
        column: Name of the column.
        least: Smaller values are refused.

    Raises:
        DataError: No such file or column, no rows, or a value that is missing, not a number, not finite or too
            small; the message names the row. An empty line between rows counts as a missing value.
    """
    values, empty = [], 0
    for row in _lines(path, [column]):
        if not row.cells:
            empty = empty or row.number
            continue
        if empty:
            raise DataError(f"{column} is missing: the line is empty", file=str(path), row=empty)
        values.append(row.at_least(column, least))
    if not values:
        raise DataError("no rows", file=str(path))
    return readonly(values, np.float64)


def _lines(path: Path, columns: Sequence[str]) -> Iterator[CsvRow]:
    """Every row of a CSV file; an empty line has no cells, a short row lacks its last ones."""
    table = read_csv(path)
    table.require(columns)
    for number, cells in table.lines:
        found = dict(zip(table.header, cells, strict=False))
        yield CsvRow({name: found.get(name, "") for name in columns} if cells else {}, path, number)


def read_parquet(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
    """Read columns of a Parquet file unchanged, in the order of the rows; missing numbers are NaN.

    Args:
        path: The file.
        columns: Required columns.
        optional: Columns that are left out where the file lacks them.

    Raises:
        DataError: No such file or column, or no rows.
    """
    series = read_series(path)
    require_columns(columns, tuple(series), path)
    found = {name: series[name] for name in (*columns, *optional) if name in series}
    if not all(len(values) for values in found.values()):
        raise DataError("no rows", file=str(path))
    return found


def float_column(values: npt.NDArray[Any], name: str, path: Path) -> FloatArray:
    """A column of a Parquet file as float64; NaN stays NaN.

    Raises:
        DataError: It holds no numbers.
    """
    if values.dtype.kind not in "iuf":
        raise DataError(f"{name} holds no numbers", file=str(path))
    return values.astype(np.float64)


def read_parquet_columns(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> dict[str, FloatArray]:
    """Read columns of numbers of a Parquet file as float64, in the order of the rows.

    Args:
        path: The file.
        columns: Required columns.
        optional: Columns that are left out where the file lacks them.

    Raises:
        DataError: No such file or column, no rows, or a value that is missing or not a finite number.
    """
    read = read_parquet(path, columns, optional)
    found = {name: float_column(values, name, path) for name, values in read.items()}
    for name, values in found.items():
        if not bool(np.all(np.isfinite(values))):
            at = int(np.argmax(~np.isfinite(values)))
            raise DataError(f"{name} is {values[at]}, expected a number", file=str(path), row=at + 1)
    return {name: readonly(values, np.float64) for name, values in found.items()}
