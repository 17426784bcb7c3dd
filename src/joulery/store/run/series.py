"""Series of a run: equally long columns in one file, written whole or not at all, read back as numpy.

A series is ``NAME.parquet`` where pyarrow is installed (the extra ``parquet``), else ``NAME.npz``, numpy's own format:
one array a column, and for a column of labels a second one, ``COLUMN:words``. Both are read; Parquet needs pyarrow.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from joulery.domain.errors import DataError
from joulery.store.files import write_atomically


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A column of text with few distinct words: a code for each row, and the words that the codes stand for.

    Attributes:
        codes: Index into ``words`` of each row, int[n].
        words: The words.
    """

    codes: npt.NDArray[Any]
    words: Sequence[str]

    def __len__(self) -> int:
        return len(self.codes)


def series_file(folder: Path, name: str) -> Path:
    """The file of a series: the newer one where a kill has left both; the Parquet path where there is none."""
    parquet = folder / f"{name}.parquet"
    found = [path for path in (parquet, folder / f"{name}.npz") if path.exists()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=parquet)


def series_names(folder: Path) -> tuple[str, ...]:
    """Names of the series in a folder, sorted."""
    return tuple(sorted({path.stem for kind in ("parquet", "npz") for path in folder.glob(f"*.{kind}")}))


def write_series(folder: Path, name: str, columns: Mapping[str, Any]) -> None:
    """Write equally long columns (numbers, strings or :class:`Labels`) as one series.

    Raises:
        DataError: The columns differ in length.
        CapabilityError: The disk refuses; an older file of that name is as it was.
    """
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"columns of a series must be equally long, got {lengths}", file=str(folder / name))
    plain, parquet = folder / f"{name}.npz", folder / f"{name}.parquet"
    if find_spec("pyarrow") is None:
        arrays: dict[str, Any] = dict(_arrays(columns))  # no option beside: numpy before 2.1 writes it as an array
        write_atomically(plain, lambda file: np.savez_compressed(file, **arrays))
        parquet.unlink(missing_ok=True)
    else:
        _write_parquet(parquet, columns)
        plain.unlink(missing_ok=True)


_WORDS = ":words"
"""Ends the name of the array that holds the words of a column of labels."""


def _arrays(columns: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, values in columns.items():
        if isinstance(values, Labels):
            arrays[name] = np.asarray(values.codes, np.int32)
            arrays[name + _WORDS] = np.array(list(values.words), np.str_)
        else:
            array = np.asarray(values)
            arrays[name] = array.astype(np.str_) if array.dtype == object else array
    return arrays


def _write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            name: pa.DictionaryArray.from_arrays(
                pa.array(values.codes, pa.int32()), pa.array(list(values.words), pa.string())
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
    """The columns of one file, or those named; missing numbers come back as NaN.

    Raises:
        DataError: There is no such file, it is damaged, text in it is not UTF-8, or a column does not fit its type.
    """
    if path.suffix == ".npz":
        arrays = _read_arrays(path)
        chosen = [name for name in arrays if not name.endswith(_WORDS)] if names is None else names
        return {name: _plain(arrays, name, path) for name in chosen}
    import pyarrow as pa

    table = _read_parquet(path, columns=None if names is None else list(names))
    assert isinstance(table, pa.Table)
    return {name: _column(table.column(name), name, path) for name in table.column_names}


def read_labelled(path: Path, texts: Sequence[str]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Labels]]:
    """The columns of one file that hold numbers, and those that hold text, as labels.

    Args:
        path: The file.
        texts: The columns of text.

    Raises:
        DataError: As :func:`read_series`.
    """
    if path.suffix == ".npz":
        arrays = _read_arrays(path)
        names = [name for name in arrays if not name.endswith(_WORDS)]
        labels = {name: _text_labels(arrays, name) for name in names if name in texts}
        return {name: arrays[name] for name in names if name not in texts}, labels
    table = _read_parquet(path, read_dictionary=list(texts))
    names = [name for name in table.column_names if name not in texts]
    labels = {name: _labels(table.column(name)) for name in texts if name in table.column_names}
    return {name: table.column(name).to_numpy() for name in names}, labels


def _text_labels(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> Labels:
    words = arrays.get(name + _WORDS)
    if words is not None:
        return Labels(arrays[name], words.tolist())
    distinct, codes = np.unique(arrays[name], return_inverse=True)
    return Labels(codes, distinct.tolist())


def _labels(column: Any) -> Labels:
    coded = column.unify_dictionaries().combine_chunks()
    return Labels(coded.indices.to_numpy(zero_copy_only=False), [str(text) for text in coded.dictionary.to_pylist()])


def _read_parquet(path: Path, **options: Any) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, **options)
    except FileNotFoundError as error:
        raise DataError("there is no such series", file=str(path)) from error
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"not a readable Parquet file: {error}", file=str(path)) from error


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError as error:
        raise DataError("there is no such series", file=str(path)) from error
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"not a readable series: {error}", file=str(path)) from error


def _plain(arrays: Mapping[str, npt.NDArray[Any]], name: str, path: Path) -> npt.NDArray[Any]:
    """One column, text as Python strings.

    Raises:
        DataError: There is no such column, or its labels are out of range.
    """
    try:
        values = arrays[name]
        if name + _WORDS in arrays:
            values = arrays[name + _WORDS][values]
    except (KeyError, IndexError) as error:
        raise DataError(f"{name} is missing or damaged", file=str(path)) from error
    return values.astype(object) if values.dtype.kind == "U" else values


def _column(column: Any, name: str, path: Path) -> npt.NDArray[Any]:
    """The cells of a column.

    Raises:
        DataError: Text in it is not UTF-8, or its values do not fit into an array.
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
