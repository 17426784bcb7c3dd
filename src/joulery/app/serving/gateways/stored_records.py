"""Bookkeeping of the request records on disk, for the next controller.

An engine server keeps the entries of its ledger until a controller has stored them, and each gateway keeps its records
in case the engine server is killed. The next controller reads here which records are already stored.
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
"""Number of the latest engine servers whose stored records are listed: gateways outlive a server by a minute."""
_T = TypeVar("_T")


class StoredRecords:
    """File in the state folder that lists the records on disk, and those that a write of rows in progress will store.

    A controller lists the records that a write of rows will store, writes the rows, and marks the records as stored. At
    whatever point it is killed, the next one detects it and removes the rows of an incomplete write.

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

        Rows of an incomplete write are removed.
        """
        self._stored, missing = self._read()
        for file, count in missing.items():
            if _rows(file) > count:
                with suppress(OSError):  # they count again then
                    os.truncate(file, count * ROW.itemsize)
        return _copy(self._stored)

    def _read(self) -> tuple[Stored, dict[Path, int]]:
        """Read the stored records, and the number of rows of each file before an incomplete write."""
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
        """List the records that are stored once each file has this number of rows.

        Raises:
            CapabilityError: The file cannot be written.
        """
        self._once = _copy(once)
        self._expected = {str(file): (self._rows.get(str(file), 0), count) for file, count in rows.items()}
        self._write()

    def write(self, stored: Stored) -> None:
        """Write the stored records atomically if they have changed. No sync: after a power loss no gateways remain.

        Raises:
            CapabilityError: The file cannot be written.
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
    """Whether all records of ``some`` are among those of ``others``."""
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
