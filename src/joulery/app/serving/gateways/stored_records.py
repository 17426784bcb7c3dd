"""Records of requests that are on disk, for the next controller.

An engine server keeps the entries of its ledger until a controller has stored them, and gateways each record: for the
next engine server where this one is killed. The next controller reads here what it need not take again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from joulery.domain.errors import DataError
from joulery.domain.serving.ledger import Stored, advance
from joulery.runtime.session.requests import ROW
from joulery.store.files import disk_errors, json_bytes, require_json

STORED = "stored.json"
_SERVERS = 16
"""Engine servers of which it is kept what is stored, the latest: gateways outlive one by a minute."""
_T = TypeVar("_T")


class StoredRecords:
    """The file in the state folder: the records on disk, and those that are once files of requests have so many rows.

    A controller says which records a write of rows will store, writes the rows, and says that they are stored. Wherever
    it is killed, the next one finds out, and takes rows back where only a part of them was written.

    Args:
        folder: The state folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._draft = folder / STORED, folder / f".{STORED}.tmp"
        self._stored = self._once = Stored({}, {})
        self._expected: dict[str, tuple[int, int]] = {}
        self._rows: dict[str, int] = {}
        self._written: Any = None

    def take_over(self) -> Stored:
        """The records that earlier controllers stored; none where the file is missing or damaged.

        Where a write of rows was not completed, they are removed.
        """
        self._stored, missing = self._read()
        for file, count in missing.items():
            if _rows(file) > count:
                with suppress(OSError):  # they count again then
                    os.truncate(file, count * ROW.itemsize)
        return _copy(self._stored)

    def _read(self) -> tuple[Stored, dict[Path, int]]:
        """The stored records, and the rows that each file had before a write that was not completed."""
        try:
            found = require_json(self._file)
            stored, once = _parsed(found), _parsed(found["once"])
            rows = {Path(file): (int(before), int(then)) for file, (before, then) in found["once"]["rows"].items()}
        except (DataError, AttributeError, KeyError, TypeError, ValueError):
            return Stored({}, {}), {}
        if any(_rows(file) < then for file, (_, then) in rows.items()):
            return stored, {file: before for file, (before, _) in rows.items()}
        advance(stored.marks, once.marks)
        stored.entries.update(once.entries)
        return stored, {}

    def expect(self, rows: Mapping[Path, int], once: Stored) -> None:
        """Rows are about to be written: these records are stored once each file has so many.

        Raises:
            CapabilityError: The disk refuses.
        """
        self._once = _copy(once)
        self._expected = {str(file): (self._rows.get(str(file), 0), count) for file, count in rows.items()}
        self._write()

    def write(self, stored: Stored) -> None:
        """Keep what is stored where it has changed: whole or not at all. A machine without power has no gateways.

        Raises:
            CapabilityError: The disk refuses.
        """
        self._stored = _copy(stored)
        if _within(self._once, stored):
            self._rows.update((file, _rows(Path(file))) for file in self._expected)
            self._once, self._expected = Stored({}, {}), {}
        self._write()

    def _write(self) -> None:
        content = {**_latest(self._stored), "once": {"rows": self._expected, **_latest(self._once)}}
        if content == self._written:
            return
        with disk_errors(self._file):
            self._draft.write_bytes(json_bytes(content))
            self._draft.replace(self._file)
        self._written = content


def _within(some: Stored, others: Stored) -> bool:
    """Whether all records of the one are among those of the other."""
    return all(
        mark <= others.marks.get(server, {}).get(process, -1)
        for server, marks in some.marks.items()
        for process, mark in marks.items()
    ) and all(number <= others.entries.get(server, -1) for server, number in some.entries.items())


def _rows(file: Path) -> int:
    return file.stat().st_size // ROW.itemsize if file.exists() else 0


def _parsed(found: Any) -> Stored:
    marks = {
        server: {name: int(mark) for name, mark in processes.items()} for server, processes in found["marks"].items()
    }
    return Stored(marks, {server: int(number) for server, number in found["entries"].items()})


def _copy(stored: Stored) -> Stored:
    return Stored({server: dict(marks) for server, marks in stored.marks.items()}, dict(stored.entries))


def _latest(stored: Stored) -> dict[str, Any]:
    """Stored records of the latest engine servers, as JSON."""
    kept = _copy(stored)
    return {"marks": _last(kept.marks), "entries": _last(kept.entries)}


def _last(by_server: Mapping[str, _T]) -> dict[str, _T]:
    return dict(islice(by_server.items(), max(0, len(by_server) - _SERVERS), None))
