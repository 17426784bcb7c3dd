"""An append-only journal: JSON objects, one a line, that a killed writer leaves readable.

A line is on the disk before :meth:`Journal.append` returns. A torn last line is cut off when the journal is opened
again; a damaged line elsewhere is left out and counted.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from joulery.store.files import disk_errors, write_atomically


class Journal:
    """One journal, read at once and open for more.

    Attributes:
        entries: What was in it when it was opened.
        damaged: Lines that could not be read.

    Raises:
        CapabilityError: The disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            torn = whole < len(content)
            if torn:
                os.ftruncate(self._fd, whole)
        self.entries, broken = _parse(content[:whole])
        self.damaged = broken + torn

    def append(self, kind: str, **fields: Any) -> None:
        """Add one object and have it on the disk.

        Raises:
            CapabilityError: The disk refuses; the journal is as it was.
        """
        line = orjson.dumps({"kind": kind, **fields}, option=orjson.OPT_NON_STR_KEYS) + b"\n"
        with disk_errors(self._path):
            length = os.fstat(self._fd).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._fd, line[written:])
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, length)
                raise

    def replace(self, entries: list[dict[str, Any]]) -> None:
        """Put fewer lines that say the same in the place of all lines."""
        text = b"".join(orjson.dumps(entry, option=orjson.OPT_NON_STR_KEYS) + b"\n" for entry in entries)
        write_atomically(self._path, lambda file: file.write(text))
        with disk_errors(self._path):
            os.close(self._fd)
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    @property
    def size_bytes(self) -> int:
        """How long it is."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
