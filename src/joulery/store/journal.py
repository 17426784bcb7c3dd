"""An append-only journal: JSON objects, one a line, that a killed writer leaves readable.

A line is on the disk before :meth:`Journal.append` returns, unless the call says otherwise. A torn last line is cut off
when the journal is opened again; a damaged line elsewhere is left out and counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from joulery.store.files import STATE_SETTING, disk_errors, json_bytes, write_atomically


class Journal:
    """A journal file, read when it is opened and then appended to.

    Attributes:
        path: The file.
        entries: Its objects when it was opened.
        damaged: Lines that could not be read.

    Raises:
        CapabilityError: The disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path, STATE_SETTING):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            torn = whole < len(content)
            if torn:
                os.ftruncate(self._fd, whole)
        self.entries, broken = _parse(content[:whole])
        self.damaged = broken + torn

    def append(self, kind: str, *, sync: bool = True, **fields: Any) -> dict[str, Any]:
        """Append one object and, with ``sync``, force it and all earlier ones to the disk.

        Without ``sync`` the object survives a kill of this process, but not a crash of the machine.

        Returns:
            The object as it will be read back from JSON.

        Raises:
            CapabilityError: The disk refuses; the journal is unchanged.
        """
        line = _line(kind, fields)
        with disk_errors(self.path, STATE_SETTING):
            length = os.fstat(self._fd).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._fd, line[written:])
                if sync:
                    os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, length)
                raise
        entry: dict[str, Any] = orjson.loads(line)
        return entry

    def replace(self, entries: list[dict[str, Any]]) -> None:
        """Replace the whole journal by these objects, atomically."""
        text = b"".join(json_bytes(entry, orjson.OPT_NON_STR_KEYS) + b"\n" for entry in entries)
        write_atomically(self.path, lambda file: file.write(text), STATE_SETTING)
        with disk_errors(self.path, STATE_SETTING):
            os.close(self._fd)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_back(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as a journal would read it back from JSON: NaN as None, tuples as lists, keys as text."""
    entry: dict[str, Any] = orjson.loads(_line(kind, fields))
    return entry


def _line(kind: str, fields: Mapping[str, Any]) -> bytes:
    return json_bytes({"kind": kind, **fields}, orjson.OPT_NON_STR_KEYS) + b"\n"


def _parse(content: bytes) -> tuple[list[dict[str, Any]], int]:
    entries, broken = [], 0
    for line in content.splitlines():
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            broken += 1
            continue
        if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
            entries.append(entry)
        else:
            broken += 1
    return entries, broken
