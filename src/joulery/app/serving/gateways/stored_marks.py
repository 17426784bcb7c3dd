"""Marks of the gateway records that are on disk, for the next controller.

Gateways keep each record until a controller has stored it. Where the engine server and its controller are killed, the
next controller reads here what the gateways need not send again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.serving.ledger import RecordMarks, advance
from joulery.runtime.session.requests import ROW
from joulery.store.files import disk_errors, json_bytes, require_json

MARKS = "stored.json"
_SERVERS = 16
"""The marks of so many engine servers are kept, the latest: gateways outlive one by a minute."""


class StoredMarks:
    """The file in the state folder: the marks, and those that hold once files of requests have so many rows.

    A controller says which marks a write of rows will make true, writes the rows, and says that they are true. Wherever
    it is killed, the next one finds out.

    Args:
        folder: The state folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._draft = folder / MARKS, folder / f".{MARKS}.tmp"
        self._marks: RecordMarks = {}
        self._written: Any = None

    def read(self) -> RecordMarks:
        """The marks of earlier controllers; none where the file is missing or damaged."""
        try:
            found = require_json(self._file)
            marks, once = found["marks"], found["once"]
            if all(_rows(Path(file)) >= rows for file, rows in once["rows"].items()):
                advance(marks, once["marks"])
            self._marks = {server: {name: int(mark) for name, mark in one.items()} for server, one in marks.items()}
        except (DataError, AttributeError, KeyError, TypeError, ValueError):
            self._marks = {}
        return _copy(self._marks)

    def expect(self, rows: Mapping[Path, int], marks: RecordMarks) -> None:
        """Rows are about to be written: these marks hold once each file has so many.

        Raises:
            CapabilityError: The disk refuses.
        """
        self._write({str(file): count for file, count in rows.items()}, marks)

    def write(self, marks: RecordMarks) -> None:
        """Keep these marks where they have changed: whole or not at all. A machine that loses power has no gateways.

        Raises:
            CapabilityError: The disk refuses.
        """
        self._marks = _copy(marks)
        self._write({}, {})

    def _write(self, rows: Mapping[str, int], marks: RecordMarks) -> None:
        content = {"marks": _latest(self._marks), "once": {"rows": rows, "marks": _latest(marks)}}
        if content == self._written:
            return
        with disk_errors(self._file):
            self._draft.write_bytes(json_bytes(content))
            self._draft.replace(self._file)
        self._written = content


def _rows(file: Path) -> int:
    return file.stat().st_size // ROW.itemsize if file.exists() else 0


def _latest(marks: RecordMarks) -> RecordMarks:
    return _copy(dict(islice(marks.items(), max(0, len(marks) - _SERVERS), None)))


def _copy(marks: RecordMarks) -> RecordMarks:
    return {server: dict(numbers) for server, numbers in marks.items()}
