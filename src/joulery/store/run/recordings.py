"""Reading what :mod:`joulery.store.run.samples` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import orjson

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError
from joulery.store.run.samples import SCHEMA, SUFFIX


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


class RecordingTail:
    """The newest records of a file that is still being written, read as they come.

    Args:
        file: The file; it may not be there yet.
        keep_s: How much of the past to keep.
    """

    def __init__(self, file: Path, keep_s: float) -> None:
        self._file = file
        self._keep_ns = round(keep_s * 1e9)
        self._header: dict[str, Any] | None = None
        self._offset = 0
        self._t_ns: IntArray = np.empty(0, np.int64)
        self._values: FloatArray = np.empty((0, 0))

    def update(self) -> Recording | None:
        """What was written within ``keep_s`` before the newest record; None before there is any.

        Raises:
            DataError: The file is no such file.
        """
        if self._header is None and not self._begin():
            return None
        assert self._header is not None
        width = 1 + len(self._header["columns"])
        with self._file.open("rb") as file:
            file.seek(self._offset)
            body = file.read()
        count = len(body) // (8 * width)
        if count:
            self._offset += 8 * width * count
            words = np.frombuffer(body, "<u8", count=width * count).reshape(-1, width)
            stamps = words[:, 0].astype(np.int64) + (self._header["unix_ns"] - self._header["monotonic_ns"])
            values = np.ascontiguousarray(words[:, 1:]).view("<f8")
            self._t_ns, self._values = np.append(self._t_ns, stamps), np.concatenate((self._values, values))
            fresh = self._t_ns >= self._t_ns[-1] - self._keep_ns
            self._t_ns, self._values = self._t_ns[fresh], self._values[fresh]
        return Recording(self._header, self._t_ns, self._values) if len(self._t_ns) else None

    def _begin(self) -> bool:
        """Read the header; False while it is not there."""
        if not self._file.exists():
            return False
        with self._file.open("rb") as file:
            if not file.readline().endswith(b"\n"):
                return False
            self._offset = file.tell()
        self._header = read_recording(self._file).header
        self._values = np.empty((0, len(self._header["columns"])))
        return True


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
