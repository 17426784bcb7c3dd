"""Write the sampler's fixed-size records to an append-only file, which is readable even after a kill.

A file starts with one line of JSON (schema ``joulery.samples/1``, the columns, the clock, further keys of the
stream), padded with spaces to a multiple of eight bytes, newline included. Records follow: an int64 of monotonic
nanoseconds and one float64 a column, little-endian. A torn last record is dropped on reading. ``unix_ns`` and
``monotonic_ns`` of the header are the same moment on both clocks.

This module imports nothing heavy; the reader (:mod:`joulery.store.run.readings`) is separate for that reason.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joulery.store.files import disk_errors

SCHEMA = "joulery.samples/1"
SUFFIX = ".samples"
SAMPLES = "samples"
"""Folder of a run in which its sampler writes."""
BUFFER_COLUMNS = ("channel", "watts")
"""Columns of the power readings that a device buffered. The header names the stream that they refine (``channels_of``)
and states how long before its stamp the middle of a reading lies (``late_s``)."""
_PATIENCE_BYTES = 4 << 20
"""Maximum bytes kept in memory while the disk is full."""


class Appender:
    """Appends bytes to a new file when they are flushed; they stay in memory while the disk is full.

    Args:
        path: The file; it must not exist.

    Raises:
        CapabilityError: The file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = bytearray()
        with disk_errors(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def add(self, data: bytes) -> None:
        """Keep bytes in memory until the next flush."""
        self._waiting += data

    def flush(self, *, patient: bool = True) -> None:
        """Append the bytes kept in memory.

        Args:
            patient: Keep them in memory if the disk refuses them, unless they are too many.

        Raises:
            CapabilityError: The disk refuses, and the bytes are not kept.
        """
        with disk_errors(self._path):
            try:
                while self._waiting:
                    del self._waiting[: os.write(self._fd, self._waiting)]
            except OSError:
                if not patient or len(self._waiting) > _PATIENCE_BYTES:
                    raise

    def close(self) -> None:
        """Append the rest and close the file. Safe to call twice.

        Raises:
            CapabilityError: The disk refuses the rest.
        """
        if self._fd < 0:
            return
        try:
            self.flush(patient=False)
        finally:
            os.close(self._fd)
            self._fd = -1


class SampleWriter(Appender):
    """Appends records to a new file of samples.

    Args:
        path: The file; it must not exist.
        columns: Names of the values of a record.
        header: Further keys of the header, JSON-ready.

    Raises:
        CapabilityError: The file cannot be made, or not even its header fits on the disk.
    """

    def __init__(self, path: Path, columns: Sequence[str], header: Mapping[str, Any]) -> None:
        super().__init__(path)
        line = json.dumps({"schema": SCHEMA, "columns": list(columns), **header}).encode()
        self.add(line + b" " * (-(len(line) + 1) % 8) + b"\n")
        self.flush(patient=False)
        self._pack = struct.Struct(f"<q{len(columns)}d").pack

    def record(self, monotonic_ns: int, values: tuple[float, ...]) -> None:
        """Add one record."""
        self.add(self._pack(monotonic_ns, *values))
