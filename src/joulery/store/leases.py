"""Leases of device settings as files, one per knob, which let another process revert a setting.

A lease is written whole and forced to the disk before the setting it names is touched. Its renewal is the file's
modification time, so that a renewal writes no data. A process that changes a lease or its setting holds the lock
beside it. Every lock is the kernel's (``flock``), so that it holds between containers that share the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.gpu.device import Lease, Owner, lease_as_dict, lease_from_dict
from joulery.store.files import disk_errors, write_atomically
from joulery.user import state_home

MACHINE_FOLDER = Path("/var/lib/joulery")
"""State folder of root's processes: outside every home, so that containers can share it with the host."""
_START_TICKS = 22
"""The field of ``/proc/PID/stat`` that holds the start of a process; proc(5) counts from 1."""


_FIRST_NAMESPACES = {"pid": 0xEFFFFFFC, "cgroup": 0xEFFFFFFB}
"""The machine's own namespaces, inode numbers that the kernel fixes (``PROC_PID_INIT_INO`` ...)."""


class LeaseState(StrEnum):
    """State of a lease."""

    HELD = "held"
    """Its owner runs, or is in another container and renews it."""
    EXPIRED = "expired"
    """Its owner does not renew it."""
    ABANDONED = "abandoned"
    """Its owner has ended."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """The namespaces of a process, which show whether it runs in a container.

    Attributes:
        pid, cgroup: Inode numbers; 0 where the kernel has no such namespace.
    """

    pid: int
    cgroup: int

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> Isolation:
        """The namespaces of this process."""
        return cls(_namespace(proc, "pid"), _namespace(proc, "cgroup"))

    @property
    def contained(self) -> bool:
        """True in a container: one of the namespaces is not the machine's own."""
        found = {"pid": self.pid, "cgroup": self.cgroup}
        return any(found[kind] not in (0, first) for kind, first in _FIRST_NAMESPACES.items())


def _namespace(proc: Path, kind: str) -> int:
    try:
        return int(str((proc / "ns" / kind).readlink()).partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return 0


def state_folder() -> Path:
    """State folder, which outlives processes.

    ``JOULERY_STATE``, else ``/var/lib/joulery`` for root, else ``joulery`` in the user's state folder.
    """
    named = os.environ.get("JOULERY_STATE")
    if named:
        return Path(named)
    if os.geteuid() == 0:
        return MACHINE_FOLDER
    return state_home() / "joulery"


class LeaseBook:
    """The leases of a machine, in one folder.

    Args:
        folder: The folder; ``leases`` in :func:`state_folder` when None. Created with the first lease.
        isolation: The namespaces of this process; found when None.
    """

    def __init__(self, folder: Path | None = None, isolation: Isolation | None = None) -> None:
        self.folder = folder or state_folder() / "leases"
        self._shared = MACHINE_FOLDER / "leases" if folder is None and not os.environ.get("JOULERY_STATE") else None
        self._isolation = isolation or Isolation.find()

    def write(self, lease: Lease) -> None:
        """Write a lease to its file, renewed now.

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
        """Renew a lease; False where the lease no longer exists."""
        now_s = time.time()
        try:
            os.utime(self._file(name), (now_s, now_s))
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a lease after its setting was reverted."""
        self._file(name).unlink(missing_ok=True)

    def names(self) -> tuple[str, ...]:
        """Names of all leases, sorted."""
        return tuple(sorted(file.name.removesuffix(".json") for file in self.folder.glob("[!.]*.json")))

    def elsewhere(self, name: str) -> Lease | None:
        """The lease of that name that root's processes recorded, where this book is another user's."""
        if self._shared is None or self._shared == self.folder:
            return None
        return LeaseBook(self._shared).read(name)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the lock of this lease and its setting; the kernel releases it when the process ends.

        Raises:
            CapabilityError: The disk refuses.
        """
        descriptor = self._opened(self.folder / f".{name}.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Act as the guard of this book: containers set devices only while a guard runs outside of them.

        Raises:
            CapabilityError: Another guard runs, or the disk refuses.
        """
        descriptor = self._opened(self._guard)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{self._isolation.pid} {self._isolation.cgroup} {_boot_id()}\n".encode())
            yield
        except BlockingIOError as error:
            raise CapabilityError(f"another guard of {self.folder} is running", resource=str(self._guard)) from error
        finally:
            os.close(descriptor)

    def require_guard(self, device: str) -> None:
        """Check that a setting of the device will be reverted, whatever happens to this process.

        Outside a container the watchdog reverts it. In a container the watchdog ends with the container, so a guard
        outside of it must watch this folder.

        ``JOULERY_UNGUARDED=1`` accepts that a setting may outlive its container.

        Raises:
            CapabilityError: This process is in a container, and no guard outside of it watches this folder.
        """
        accepted = os.environ.get("JOULERY_UNGUARDED", "0") not in ("", "0")
        if accepted or not self._isolation.contained or self._guarded_from_outside():
            return
        raise CapabilityError(
            f"{device} is not set: this container takes the watchdog of its leases with it when it ends",
            resource=str(self.folder),
            grant="sudo joulery doctor --guard",
            hint="run that on the host and share its folder with the container (-v /var/lib/joulery:/var/lib/joulery)",
        )

    def _guarded_from_outside(self) -> bool:
        try:
            descriptor = os.open(self._guard, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            parts = os.read(descriptor, 4096).decode().split()
            return (
                len(parts) == 3
                and parts[:2] != [str(self._isolation.pid), str(self._isolation.cgroup)]
                and (parts[2] == _boot_id())
            )
        finally:
            os.close(descriptor)
        return False

    @property
    def _guard(self) -> Path:
        return self.folder / ".guard.lock"

    def _opened(self, file: Path) -> int:
        with _state_errors(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


@contextmanager
def _state_errors(path: Path) -> Iterator[None]:
    """Explain disk errors in terms of leases: without a written lease nothing is set.

    Raises:
        CapabilityError: The disk refuses.
    """
    try:
        with disk_errors(path):
            yield
    except CapabilityError as error:
        raise CapabilityError(
            f"nothing is set, because the lease cannot be recorded first: {error.message}",
            resource=error.resource,
            hint="name a folder you may write to: export JOULERY_STATE=...",
        ) from error


def owner_of(pid: int, program: str = "") -> Owner | None:
    """The running process of that number; None where there is none, or only a zombie."""
    try:
        stat, boot_id = Path(f"/proc/{pid}/stat").read_text(), _boot_id()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name may hold anything; state is the field after it
    if fields[0] in ("Z", "X"):
        return None
    return Owner(pid, int(fields[_START_TICKS - 3]), boot_id, program, Isolation.find().pid)


def lives(owner: Owner) -> bool:
    """True while that very process runs in this PID namespace."""
    found = owner_of(owner.pid)
    return found is not None and _same(found, owner)


def lease_state(lease: Lease, now_s: float) -> LeaseState:
    """State of a lease. The owner in another container is judged by its renewals only.

    Args:
        lease: The lease.
        now_s: Unix seconds.
    """
    owner, renewed = lease.owner, lease.expires_s > now_s
    foreign = owner.pid_namespace not in (0, Isolation.find().pid) and owner.boot_id == _boot_id()
    if not foreign and not lives(owner):
        return LeaseState.ABANDONED
    return LeaseState.HELD if renewed else LeaseState.EXPIRED


def _same(one: Owner, other: Owner) -> bool:
    namespaces = {one.pid_namespace, other.pid_namespace} - {0}
    facts = [(each.pid, each.start_ticks, each.boot_id) for each in (one, other)]
    return facts[0] == facts[1] and len(namespaces) <= 1


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
