"""Marks of the gateway records that are on disk, for the next controller.

Gateways keep each record until a controller has stored it. Where the engine server and its controller are killed, the
next controller reads here what the gateways need not send again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from joulery.domain.errors import DataError
from joulery.domain.serving.ledger import RecordMarks
from joulery.store.files import disk_errors, json_bytes, require_json

MARKS = "stored.json"
_SERVERS = 16
"""The marks of so many engine servers are kept, the latest: gateways outlive one by a minute."""


class StoredMarks:
    """The file in the state folder.

    Args:
        folder: The state folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._draft = folder / MARKS, folder / f".{MARKS}.tmp"
        self._written: RecordMarks = {}

    def read(self) -> RecordMarks:
        """The marks of earlier controllers; none where the file is missing or damaged."""
        try:
            found = require_json(self._file)
        except DataError:
            return {}
        valid = isinstance(found, Mapping) and all(
            isinstance(numbers, Mapping) and all(isinstance(number, int) for number in numbers.values())
            for numbers in found.values()
        )
        return {server: dict(numbers) for server, numbers in found.items()} if valid else {}

    def write(self, marks: RecordMarks) -> None:
        """Keep these marks where they have changed: whole or not at all. A machine that loses power has no gateways.

        Raises:
            CapabilityError: The disk refuses.
        """
        if marks == self._written:
            return
        latest = dict(islice(marks.items(), max(0, len(marks) - _SERVERS), None))
        with disk_errors(self._file):
            self._draft.write_bytes(json_bytes(latest))
            self._draft.replace(self._file)
        self._written = {server: dict(numbers) for server, numbers in marks.items()}
