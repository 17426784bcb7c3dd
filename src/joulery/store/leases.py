"""Leases of device settings as files, one a knob: what another process needs to take a setting back.

A lease is written whole and forced to the disk before the setting it speaks of is touched. Its renewal is the file's
modification time, so that renewing costs no writing. Who changes a lease or the setting behind it holds the lock
beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.gpu.device import Lease, Owner, lease_as_dict, lease_from_dict
from joulery.store.files import disk_errors, write_atomically

_START_TICKS = 22
"""The field of ``/proc/PID/stat`` that holds the start of a process; proc(5) counts from 1."""


def state_folder() -> Path:
    """Where joulery keeps what outlives a process: ``JOULERY_STATE``, else ``joulery`` in the user's state folder."""
    named = os.environ.get("JOULERY_STATE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "joulery"


class LeaseBook:
    """The leases of a machine, in one folder.

    Args:
        folder: Where; ``leases`` in :func:`state_folder` when None. Made when the first lease is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or state_folder() / "leases"

    def write(self, lease: Lease) -> None:
        """Write a lease down, renewed now.

        Raises:
            CapabilityError: The disk refuses.
        """
        content = json.dumps(lease_as_dict(lease), indent=1).encode() + b"\n"
        with _state_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(lease.name), lambda file: file.write(content))

    def read(self, name: str) -> Lease | None:
        """The lease of that name; None where there is none.

        Raises:
            DataError: The file is damaged.
        """
        file = self._file(name)
        try:
            content, renewed_s = file.read_bytes(), file.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            document = json.loads(content)
        except ValueError as error:
            raise DataError(f"not a lease: {error}", file=str(file)) from error
        return lease_from_dict(document, renewed_s, str(file))

    def renew(self, name: str) -> bool:
        """Say that the owner still cares; False where the lease is gone."""
        now_s = time.time()
        try:
            os.utime(self._file(name), (now_s, now_s))
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """The setting is back: forget the lease."""
        self._file(name).unlink(missing_ok=True)

    def names(self) -> tuple[str, ...]:
        """The leases there are, sorted."""
        return tuple(sorted(file.name.removesuffix(".json") for file in self.folder.glob("[!.]*.json")))

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the lock of this lease and its setting; the kernel releases it when the process ends.

        Raises:
            CapabilityError: The disk refuses.
        """
        file = self.folder / f".{name}.lock"
        with _state_errors(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


@contextmanager
def _state_errors(path: Path) -> Iterator[None]:
    """Say what a refusing disk means here: without a lease nothing is set.

    Raises:
        CapabilityError: The disk refuses.
    """
    try:
        with disk_errors(path):
            yield
    except CapabilityError as error:
        raise CapabilityError(
            f"nothing is set, because the lease cannot be written down first: {error.message}",
            resource=error.resource,
            hint="name a folder you may write to: export JOULERY_STATE=...",
        ) from error


def owner_of(pid: int, program: str = "") -> Owner | None:
    """The process of that number as it runs now; None where there is none, or only its remains (a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name may hold anything; state is the field after it
    if fields[0] in ("Z", "X"):
        return None
    return Owner(pid, int(fields[_START_TICKS - 3]), boot_id, program)


def lives(owner: Owner) -> bool:
    """True while that very process runs."""
    found = owner_of(owner.pid)
    return found is not None and (found.start_ticks, found.boot_id) == (owner.start_ticks, owner.boot_id)
