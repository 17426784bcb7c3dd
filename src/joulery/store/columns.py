"""Columns of numbers from a CSV file with a header, or a Parquet file."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from joulery.domain.arrays import FloatArray, readonly
from joulery.domain.errors import DataError
from joulery.store.series import read_series


def read_column(path: Path, column: str, *, least: float = 0.0) -> FloatArray:
    """The numbers of a column, in the order of the rows.

    Args:
        path: A CSV file, UTF-8, its first row the names of the columns.
        column: Which one.
        least: Smaller values are refused.

    Raises:
        DataError: No such file or column, no rows, or a value that is missing, no number, not finite or too small;
            the message names the row.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            if column not in (reader.fieldnames or ()):
                raise DataError(
                    f"no column {column!r}",
                    file=str(path),
                    row=1,
                    hint=f"columns: {', '.join(reader.fieldnames or ()) or 'none'}",
                )
            values = [_number(row[column], path, column, reader.line_num, least) for row in reader]
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", file=str(path)) from None
    except UnicodeDecodeError:
        raise DataError("not UTF-8", file=str(path), hint="save the file as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", file=str(path)) from None
    if not values:
        raise DataError("no rows", file=str(path))
    return readonly(values, np.float64)


def _number(text: str | None, path: Path, column: str, row: int, least: float) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise DataError(f"{column} is {text!r}, expected a number of {least:g} or more", file=str(path), row=row)
    return value


def read_parquet_columns(path: Path, columns: Sequence[str]) -> dict[str, FloatArray]:
    """Columns of numbers of a Parquet file, float64, in the order of the rows.

    Raises:
        DataError: No such file or column, no rows, or a value that is missing or no finite number.
    """
    series = read_series(path)
    for name in columns:
        if name not in series:
            raise DataError(f"no column {name!r}", file=str(path), hint=f"columns: {', '.join(series) or 'none'}")
        if series[name].dtype.kind not in "iuf":
            raise DataError(f"{name} holds no numbers", file=str(path))
    found = {name: series[name].astype(np.float64) for name in columns}
    for name, values in found.items():
        if not len(values):
            raise DataError("no rows", file=str(path))
        if not bool(np.all(np.isfinite(values))):
            at = int(np.argmax(~np.isfinite(values)))
            raise DataError(f"{name} is {values[at]}, expected a number", file=str(path), row=at + 1)
    return {name: readonly(values, np.float64) for name, values in found.items()}
