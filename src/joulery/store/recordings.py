"""Reading what :mod:`joulery.store.samples` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import orjson

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError
from joulery.store.samples import SCHEMA, SUFFIX


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One stream of samples.

    Attributes:
        header: Schema, columns and whatever the writer added.
        t_ns: Unix nanoseconds, strictly increasing, int64[n].
        values: float64[n, columns].
    """

    header: dict[str, Any]
    t_ns: IntArray
    values: FloatArray

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.header["columns"])

    def column(self, name: str) -> FloatArray:
        """One column.

        Raises:
            DataError: There is none of that name.
        """
        if name not in self.columns:
            raise DataError(f"no column {name!r} among {self.columns}")
        return np.ascontiguousarray(self.values[:, self.columns.index(name)])


def read_recording(file: Path) -> Recording:
    """The records of a file, up to the first that is torn or out of order of time.

    Raises:
        DataError: The file is missing or is no such file.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=str(file)) from error
    line, newline, _ = data.partition(b"\n")
    try:
        header = orjson.loads(line) if newline else None
    except orjson.JSONDecodeError as error:
        raise DataError("no header of samples", file=str(file), row=1) from error
    if not _is_header(header):
        raise DataError(f"no samples of schema {SCHEMA}", file=str(file), row=1)
    width = 1 + len(header["columns"])
    body = data[len(line) + 1 :]
    words = np.frombuffer(body, "<u8", count=len(body) // (8 * width) * width).reshape(-1, width)
    stamps = words[:, 0].astype(np.int64)
    good = len(stamps)
    if good:
        wrong = np.flatnonzero(np.diff(stamps, prepend=np.int64(0)) <= 0)
        good = int(wrong[0]) if len(wrong) else good
    values = np.ascontiguousarray(words[:good, 1:]).view("<f8").astype(np.float64)
    return Recording(header, stamps[:good] + (header["unix_ns"] - header["monotonic_ns"]), values)


def _is_header(value: Any) -> TypeGuard[dict[str, Any]]:
    return (
        isinstance(value, dict)
        and value.get("schema") == SCHEMA
        and isinstance(value.get("columns"), list)
        and isinstance(value.get("unix_ns"), int)
        and isinstance(value.get("monotonic_ns"), int)
    )


def read_recordings(folder: Path) -> dict[str, Recording]:
    """Every readable stream of a folder, by name; empty where there is no such folder.

    Raises:
        DataError: A file is there and is no such file (one torn within its header is left out).
    """
    found = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        with file.open("rb") as start:
            whole = b"\n" in start.read(65536)
        if whole:
            found[file.stem] = read_recording(file)
    return found
