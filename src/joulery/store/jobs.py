"""The jobs of this machine on disk: one folder per job, one small JSON document per fact, each replaced whole.

::

    FOLDER/jobs/000017/job.json      what was submitted (the submitter's environment too: the folder is the owner's)
    FOLDER/jobs/000017/run.json      the process that runs it now
    FOLDER/jobs/000017/stop.json     the stop that was sent, and when
    FOLDER/jobs/000017/over.json     how it ended
    FOLDER/jobs/000017/output.log    what it printed, over all its starts
    FOLDER/jobs/000017/progress      the progress it reports
    FOLDER/jobs/lock                 held while a process reads jobs and acts on them

A job's number is the name of its folder, which only one submitter can create, so submitting needs no lock.
The effects of power limits on jobs are kept beside them, one file per kind of job (:class:`JobLimitBook`), and the
nodes of one job exchange notes (:class:`NodeNotes`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson

from joulery.domain.errors import CapabilityError, DataError
from joulery.store.files import STATE_SETTING, disk_errors, read_json, write_atomically

_LARGEST_NOTE_BYTES = 4096


class JobBook:
    """Jobs submitted to one state folder, which is created with the first job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "jobs"

    def add(self, job: Mapping[str, Any]) -> int:
        """Store a new job and return its number.

        Raises:
            CapabilityError: The disk refuses.
        """
        with disk_errors(self._folder, STATE_SETTING):
            self._folder.mkdir(parents=True, exist_ok=True)
            number = max(self._numbers(), default=0) + 1
            while True:
                try:
                    self.folder(number).mkdir(mode=0o700)
                    break
                except FileExistsError:  # another submitter took this number
                    number += 1
        self.write(number, "job", {**job, "id": number})
        return number

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the book; the kernel frees it when its holder dies.

        Raises:
            CapabilityError: The disk refuses.
        """
        with ExitStack() as stack:
            if self._folder.is_dir():
                with disk_errors(self._folder, STATE_SETTING):
                    fd = os.open(self._folder / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    def ids(self) -> tuple[int, ...]:
        """Numbers of the jobs that were submitted completely, ascending."""
        return tuple(number for number in sorted(self._numbers()) if (self.folder(number) / "job.json").exists())

    def folder(self, job: int) -> Path:
        """Folder of everything about a job."""
        return self._folder / f"{job:06d}"

    def read(self, job: int, fact: str) -> dict[str, Any] | None:
        """A document about a job; None where there is none.

        Raises:
            DataError: It is damaged.
        """
        file = self.folder(job) / f"{fact}.json"
        try:
            document = read_json(file, bytes_too=True)
        except FileNotFoundError:
            return None
        if not isinstance(document, dict):
            raise DataError("expected one JSON object", file=str(file))
        return document

    def write(self, job: int, fact: str, document: Mapping[str, Any]) -> None:
        """Set a document about a job.

        Raises:
            CapabilityError: The disk refuses.
        """
        try:
            text = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        except TypeError:  # a command or an environment that is not UTF-8
            text = json.dumps(document, indent=2).encode() + b"\n"
        write_atomically(self.folder(job) / f"{fact}.json", lambda file: file.write(text), STATE_SETTING)

    def remove(self, job: int, fact: str) -> None:
        """Remove a document about a job, if there is one."""
        with disk_errors(self.folder(job), STATE_SETTING):
            (self.folder(job) / f"{fact}.json").unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return [int(entry.name) for entry in self._folder.iterdir() if entry.name.isdigit()]


_MOST = 64
"""Maximum number of points read for a kind; joulery writes no more."""
LimitPoints = tuple[tuple[float, float, float], ...]
"""Limit as a share of full power, slowdown, share of power."""


class JobLimitBook:
    """Effects of power limits on jobs, one file per kind of job: the next job of the kind starts from them.

    Args:
        folder: The folder; created with the first file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, kind: str) -> LimitPoints:
        """The points of a kind; none where it has none, or where its file is damaged."""
        return self._points(self._file(kind))[1]

    def kinds(self) -> dict[str, LimitPoints]:
        """The points of every kind; without those whose file is damaged."""
        found = dict(self._points(file) for file in sorted(self._folder.glob("*.json")))
        return {kind: points for kind, points in found.items() if points}

    @staticmethod
    def _points(file: Path) -> tuple[str, LimitPoints]:
        try:
            document = json.loads(file.read_text())
            kind, rows = str(document.get("kind", "")), document["points"]
            points = tuple((float(ratio), float(slowdown), float(power)) for ratio, slowdown, power in rows[:_MOST])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "", ()
        sound = all(0 < ratio < 1 and 0 < s < math.inf and 0 < power < math.inf for ratio, s, power in points)
        return kind, points if sound else ()

    def write(self, kind: str, points: Sequence[tuple[float, float, float]]) -> bool:
        """Replace the points of a kind; False where the disk refuses."""
        content = json.dumps({"schema": "joulery.job-limits/1", "kind": kind, "points": [*map(list, points)]})
        try:
            with disk_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                write_atomically(self._file(kind), lambda file: file.write(content.encode() + b"\n"))
        except CapabilityError:
            return False
        return True

    def _file(self, kind: str) -> Path:
        return self._folder / f"{hashlib.blake2b(kind.encode(), digest_size=12).hexdigest()}.json"


class NodeNotes:
    """Notes that the nodes of a job leave each other on a shared disk: one small file for each job and node.

    A note is overwritten in place and verified by a checksum. If the file were replaced instead, readers could see the
    old one for as long as a network file system caches its folder, often a minute; a reopened file is read again.

    Args:
        folder: The folder; created with the first note.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, job: int, node: str, note: Mapping[str, Any]) -> bool:
        """Overwrite this node's note on a job; False where the disk refuses."""
        body = orjson.dumps(note)
        content = body + b"\n%08x\n" % zlib.crc32(body)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._file(job, node), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(handle, content, 0)
                os.ftruncate(handle, len(content))
            finally:
                os.close(handle)
        except OSError:
            return False
        return True

    def read(self, job: int, node: str) -> dict[str, Any] | None:
        """A node's note on a job; None where there is none, or while it is being written."""
        try:
            with self._file(job, node).open("rb") as file:
                body, _, rest = file.read(_LARGEST_NOTE_BYTES).partition(b"\n")
            note = orjson.loads(body) if rest == b"%08x\n" % zlib.crc32(body) else None
        except (OSError, orjson.JSONDecodeError):
            return None
        return note if isinstance(note, dict) else None

    def remove(self, job: int, node: str) -> None:
        """Remove this node's note on a job, if there is one."""
        try:
            self._file(job, node).unlink(missing_ok=True)
        except OSError:  # it stays, and is not renewed: the others see that
            return

    def _file(self, job: int, node: str) -> Path:
        return self._folder / f"{job}.{node.replace(os.sep, '_')}"
