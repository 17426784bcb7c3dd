"""Readers of measurement tables whose columns have several names, with uniform error messages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.gpu_types import gpu_facts
from joulery.perf.llm.models import nearest_names, precision_name
from joulery.store.columns import CsvRow
from joulery.tabular import read_csv


@dataclass(frozen=True, slots=True)
class Given:
    """Facts that the command line states because the file of measurements does not.

    Attributes:
        gpu: GPU type.
        num_gpus: GPUs of the replica.
        precision: Precision of the weights.
        model: Id of the model.
    """

    gpu: str | None = None
    num_gpus: int | None = None
    precision: str | None = None
    model: str | None = None


class MeasuredRow:
    """A row of a CSV file whose numbers may be missing.

    Args:
        row: The row.
    """

    def __init__(self, row: CsvRow) -> None:
        self._row = row

    def text(self, *columns: str) -> str:
        """Text of the first of these columns that is not empty; empty where all are."""
        for column in columns:
            if found := self._row.cells.get(column, "").strip():
                return found
        return ""

    def number(self, *columns: str) -> float | None:
        """The number above 0 in the first of these columns that is not empty; None where all are empty.

        Raises:
            DataError: The cell is not a finite number above 0.
        """
        for column in columns:
            if self._row.cells.get(column, "").strip():
                return self._row.positive(column)
        return None

    def required(self, *columns: str) -> float:
        """As :meth:`number`, but raises an error where all columns are empty.

        Raises:
            DataError: As for :meth:`number`, or all columns are empty.
        """
        found = self.number(*columns)
        if found is None:
            raise self.wrong(f"{' and '.join(columns)} {'is' if len(columns) == 1 else 'are'} empty")
        return found

    def whole(self, column: str, otherwise: int | None = None) -> int:
        """The whole number in a column; ``otherwise`` if the cell is empty.

        Raises:
            DataError: The cell is not a whole number above 0, or is empty and ``otherwise`` is None.
        """
        if not self._row.cells.get(column, "").strip():
            if otherwise is None:
                raise self.wrong(f"{column} is empty")
            return otherwise
        return self._row.whole(column)

    def wrong(self, message: str, *, hint: str = "") -> DataError:
        """The error that names the file and the row."""
        return self._row.wrong(message, hint=hint)

    def named(self, error: ConfigError) -> DataError:
        """An error about an unknown name in this row, with the known names as a hint."""
        return self.wrong(f"{error.message} (got {error.got})", hint=error.hint)


def read_table(path: Path, columns: Sequence[str | tuple[str, ...]]) -> list[MeasuredRow]:
    """Read the rows of a CSV file.

    Args:
        path: The file.
        columns: Required columns; of a tuple, one of its columns.

    Raises:
        DataError: No such file, a column is missing (the nearest names are offered), or no rows.
    """
    table = read_csv(path)
    for wanted in columns:
        names = (wanted,) if isinstance(wanted, str) else wanted
        if not any(name in table.header for name in names):
            nearest = nearest_names(names[0], table.header)
            hint = f"nearest: {nearest}" if nearest else f"columns: {', '.join(table.header) or 'none'}"
            raise DataError(f"no column {' or '.join(names)}", file=str(path), row=1, hint=hint)
    rows = []
    for number, cells in table.lines:
        if cells:
            found = dict(zip(table.header, cells, strict=False))
            rows.append(MeasuredRow(CsvRow({name: found.get(name, "") for name in table.header}, path, number)))
    if not rows:
        raise DataError("no rows", file=str(path), hint="the file has a header only")
    return rows


def read_document(path: Path) -> Any:
    """Read a JSON document, or a list of documents from a file with one per line.

    Raises:
        DataError: No such file, or not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=str(path), hint="check the path") from None
    except UnicodeDecodeError:
        raise DataError("not UTF-8", file=str(path), hint="save the file as UTF-8") from None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"not JSON: {error}", file=str(path)) from None


def positive(document: Mapping[str, Any], key: str, path: Path) -> float | None:
    """The number above 0 at a key of a document; None where the key is missing or null.

    Raises:
        DataError: The value is not a finite number above 0.
    """
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DataError(f"{key} is {value!r}, expected a number above 0", file=str(path))
    return float(value)


def hardware(given: Given, gpu: object, num_gpus: object, precision: object, path: Path) -> tuple[str, int, str]:
    """GPU type, number of GPUs and precision: from the flag where it is given, else from the file.

    Raises:
        DataError: Neither gives the GPU type, or a name is unknown. The defaults of the others are 1 GPU and bfloat16.
    """
    name = given.gpu or (str(gpu) if gpu else "")
    if not name:
        raise DataError(
            "the file does not name the GPU type it was measured on",
            file=str(path),
            hint="add --gpu NAME (and --num-gpus N, --precision P), or record it: --metadata gpu_model=H100",
        )
    try:
        count = given.num_gpus or int(str(num_gpus or 1))
        kind = precision_name(given.precision or str(precision or "bfloat16"))
        gpu_facts(name)
    except ConfigError as error:
        raise DataError(f"{error.message} (got {error.got})", file=str(path), hint=error.hint) from None
    except ValueError:
        raise DataError(f"num_gpus is {num_gpus!r}, expected a whole number", file=str(path)) from None
    if count < 1:
        raise DataError(f"num_gpus is {count}, expected a whole number above 0", file=str(path))
    return name, count, kind
