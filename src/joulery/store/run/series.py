"""Columns in Parquet: written whole or not at all, read back as numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from joulery.domain.errors import DataError
from joulery.store.files import write_atomically


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A column of few different words, many times over: a number a row, and what the numbers stand for.

    Attributes:
        codes: Index into ``words`` of each row, int[n].
        words: The words.
    """

    codes: npt.NDArray[Any]
    words: Sequence[str]

    def __len__(self) -> int:
        return len(self.codes)


def write_series(path: Path, columns: Mapping[str, Any]) -> None:
    """Write equally long columns (numbers, strings or :class:`Labels`) to one Parquet file.

    Raises:
        DataError: The columns differ in length.
        CapabilityError: The disk refuses; an older file of that name is as it was.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"columns of a series must be equally long, got {lengths}", file=str(path))
    table = pa.table(
        {
            name: pa.DictionaryArray.from_arrays(
                pa.array(values.codes, pa.int32()), pa.array(values.words, pa.string())
            )
            if isinstance(values, Labels)
            else pa.array(values)
            for name, values in columns.items()
        }
    )
    write_atomically(path, lambda file: pq.write_table(table, file, compression="zstd"))


def write_blocks(path: Path, blocks: Iterable[Mapping[str, Any]], empty: Mapping[str, Any]) -> None:
    """Write blocks of rows to one Parquet file, one block in memory at a time.

    Args:
        path: The file.
        blocks: Equally long columns (numbers or strings) of each block, with the same names and types.
        empty: The columns of a block without rows: names and types.

    Raises:
        CapabilityError: The disk refuses; an older file of that name is as it was.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = {name: pa.string() if values.dtype == object else values.dtype for name, values in empty.items()}
    schema = pa.schema(
        [(name, kind if isinstance(kind, pa.DataType) else pa.from_numpy_dtype(kind)) for name, kind in fields.items()]
    )

    def write(file: IO[bytes]) -> None:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for columns in blocks:
                writer.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}, schema))

    write_atomically(path, write)


def read_series(path: Path, names: Sequence[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The columns of one Parquet file, or those named; missing numbers come back as NaN.

    Raises:
        DataError: There is no such file, it is no Parquet file, text in it is not UTF-8, or a column of it does not fit
            its type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=None if names is None else list(names))
    except FileNotFoundError as error:
        raise DataError("there is no such series", file=str(path)) from error
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"not a readable Parquet file: {error}", file=str(path)) from error
    return {name: _column(table.column(name), name, path) for name in table.column_names}


def _column(column: Any, name: str, path: Path) -> npt.NDArray[Any]:
    """The cells of a column.

    Raises:
        DataError: Text in it is not UTF-8, or it holds what no array can.
    """
    import pyarrow as pa

    try:
        return np.asarray(column.to_numpy())
    except (pa.ArrowException, ValueError) as error:
        found = _not_utf8(column)
        if found is None:
            raise DataError(
                f"{name} cannot be read as {column.type}: {error}",
                file=str(path),
                hint="write the column again, as numbers or as text",
            ) from None
        row, cell = found
        raise DataError(
            f"{name} holds text that is not UTF-8: {cell[:40]!r}",
            file=str(path),
            row=row,
            hint="write the file again with its text in UTF-8",
        ) from None


def _not_utf8(column: Any) -> tuple[int, bytes] | None:
    """The first row of a column of text, from 1, that is not UTF-8; Arrow's own error does not name it."""
    import pyarrow as pa

    try:
        cells = column.cast(pa.large_binary()).to_pylist()
    except pa.ArrowException:
        return None  # no text at all, or labels that point nowhere
    for row, cell in enumerate(cells, start=1):
        try:
            (cell or b"").decode()
        except UnicodeDecodeError:
            return row, cell
    return None
