"""Control groups, version 1 and 2: CPU bandwidth limits of replicas, and the CPU time of runs.

Limits (``cpu.max``, ``cpu.cfs_quota_us``): a quota of CPU time in every period. The period is short (10 ms) so that a
request of a few milliseconds is slowed evenly instead of being stopped for the rest of a long one: at 50 % of a core,
the 99th percentile of a 2.6 ms operation was 55 ms with a period of 100 ms, and about 12 ms with 4 to 10 ms. Groups are
named ``joulery-<pid of the engine>-<replica>``. An engine removes the groups that a killed engine left behind.

CPU time: a group counts every process that was ever in it. The group of a run is made inside the group of this process
where that is allowed (root, or a delegated group), and gets no controller of its own, so the scheduling of the program
does not change. On version 1 it is made in the ``cpuacct`` hierarchy, and only where that is not tied to ``cpu``. It is
named ``joulery-<pid of the starter>``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from joulery.domain.errors import CapabilityError

if TYPE_CHECKING:
    from joulery.domain.serving.service import Slice

PERIOD_US = 10_000
MIN_QUOTA_US = 1_000
"""Smallest quota that the kernel accepts."""
ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
DELEGATE = "systemd-run --user --scope -p Delegate=yes -- joulery ..."

_REPLICA_GROUP = re.compile(r"joulery-(\d+)-")
_RUN_GROUP = re.compile(r"joulery-(\d+)")


class GroupFiles:
    """File operations on control groups; tests replace them with a tree that behaves like the kernel's."""

    def write(self, path: Path, text: str) -> None:
        """Write ``text`` to a control file."""
        with path.open("w") as file:
            file.write(text)

    def make(self, path: Path) -> None:
        """Create a group."""
        path.mkdir()

    def remove(self, path: Path) -> None:
        """Remove an empty group."""
        path.rmdir()

    def alive(self, pid: int) -> bool:
        """Whether a process exists."""
        return Path(f"/proc/{pid}").exists()


class CpuGroups:
    """Groups of processes with a CPU quota below the group this process is in.

    Args:
        base: Folder of the parent group.
        unified: True for version 2.
        files: File operations on the groups.
    """

    def __init__(self, base: Path, *, unified: bool, files: GroupFiles) -> None:
        self.base = base
        self.unified = unified
        self._files = files
        self._pid = os.getpid()
        self._prepared = False

    @classmethod
    def find(cls, root: Path = ROOT, membership: Path = MEMBERSHIP, files: GroupFiles | None = None) -> CpuGroups:
        """The groups of this machine, in the control group version that has the ``cpu`` controller.

        Raises:
            CapabilityError: Neither version offers the controller.
        """
        paths: dict[str, str] = {}
        for line in membership.read_text().splitlines() if membership.exists() else ():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
        # In a container the path may be one of the host, while the tree shows the container's own group at its root.
        v1 = root / "cpu"
        if (v1 / "cpu.cfs_quota_us").exists() or (v1 / "cgroup.procs").exists():
            own = v1 / paths.get("cpu", "")
            return cls(own if own.exists() else v1, unified=False, files=files or GroupFiles())
        v2 = root / paths.get("", "")
        v2 = v2 if v2.exists() else root
        offered = v2 / "cgroup.controllers"
        if offered.exists() and "cpu" in offered.read_text().split():
            return cls(v2, unified=True, files=files or GroupFiles())
        raise CapabilityError(
            "this machine offers no CPU quota to this process",
            resource=str(root),
            grant=DELEGATE,
            hint=f"use whole cores, or run: {DELEGATE}",
        )

    def add(self, name: str, pid: int, slice_: Slice) -> Path:
        """Limit a process and its future children to the quota of ``slice_``; return the group's folder.

        Raises:
            CapabilityError: The share is too small for the kernel, or this user may not create groups.
        """
        quota_us = round(slice_.cores * slice_.share_ratio * PERIOD_US)
        if quota_us < MIN_QUOTA_US:
            raise CapabilityError(
                f"a slice {slice_} is too small for a CPU quota",
                hint=f"give it at least {MIN_QUOTA_US / PERIOD_US / slice_.cores:g} of its cores",
            )
        group = self.base / f"joulery-{self._pid}-{name}"
        try:
            self._prepare()
            self._files.make(group)
            if self.unified:
                self._files.write(group / "cpu.max", f"{quota_us} {PERIOD_US}")
            else:
                # The period first: the kernel judges a quota by the period it finds.
                self._files.write(group / "cpu.cfs_period_us", str(PERIOD_US))
                self._files.write(group / "cpu.cfs_quota_us", str(quota_us))
            self._files.write(group / "cgroup.procs", str(pid))
        except OSError as error:
            with suppress(OSError):  # the group may not exist yet; the error that counts is the first
                self._files.remove(group)
            raise CapabilityError(
                f"no control group can limit a replica to {slice_}: {error.strerror}",
                resource=str(error.filename or group),
                grant=DELEGATE if self.unified else None,
                hint="" if self.unified else "run as root, or use whole cores",
            ) from error
        return group

    def remove(self, group: Path) -> None:
        """Remove a group without processes. A busy group stays for the next engine to sweep."""
        with suppress(OSError):
            self._files.remove(group)

    def sweep(self) -> None:
        """Remove the groups of engines that have ended."""
        for group in self.base.glob("joulery-*-*"):
            match = _REPLICA_GROUP.match(group.name)
            if match and not self._files.alive(int(match[1])):
                self.remove(group)

    def _prepare(self) -> None:
        """Enable the controller for child groups (version 2); the kernel refuses while the group holds processes."""
        if self._prepared or not self.unified:
            return
        control = self.base / "cgroup.subtree_control"
        try:
            self._files.write(control, "+cpu")
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self._move_to_leaf(control)
        self._prepared = True

    def _move_to_leaf(self, control: Path) -> None:
        """Move this process into a leaf group and try again; move it back if the kernel still refuses."""
        leaf = self.base / f"joulery-{self._pid}-engine"
        self._files.make(leaf)
        self._files.write(leaf / "cgroup.procs", str(self._pid))
        try:
            self._files.write(control, "+cpu")
        except OSError:
            self._files.write(self.base / "cgroup.procs", str(self._pid))
            self._files.remove(leaf)
            raise


@dataclass(frozen=True, slots=True)
class RunGroup:
    """A control group made for one run.

    Attributes:
        path: Its folder.
        per_cpu: True where it counts each CPU (version 1).
    """

    path: Path
    per_cpu: bool

    def enter(self) -> None:
        """Move this process into the group.

        Raises:
            OSError: The kernel refuses.
        """
        (self.path / "cgroup.procs").write_text("0")

    def leave(self) -> None:
        """Move this process one group up.

        Raises:
            OSError: The kernel refuses.
        """
        (self.path.parent / "cgroup.procs").write_text("0")

    def remove(self) -> None:
        """Move remaining processes (daemons of the program) one group up and delete the group.

        Safe to call twice. A group that cannot be emptied stays: the kernel deletes no group with processes.
        """
        for _ in range(10):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                self._evacuate()
            else:
                return

    def _evacuate(self) -> None:
        try:
            pids = (self.path / "cgroup.procs").read_text().split()
        except OSError:
            return
        for pid in pids:
            try:
                (self.path.parent / "cgroup.procs").write_text(pid)
            except OSError:  # it ended meanwhile
                continue


def group_name(pid: int) -> str:
    """The name of the group of a run that process ``pid`` starts."""
    return f"joulery-{pid}"


def make_group(pid: int, proc: Path = Path("/proc")) -> RunGroup:
    """Make a group for a run inside the group of this process, and sweep those of dead processes.

    Args:
        pid: The process that starts the run.
        proc: Where the kernel shows its processes.

    Raises:
        CapabilityError: No hierarchy allows it; the message states the reason for each.
    """
    reasons = []
    for place, per_cpu in _places(proc):
        _sweep(place, proc)
        folder = place / group_name(pid)
        group = RunGroup(folder, per_cpu)
        try:
            folder.mkdir()
            open_group(group, (0,), {}).close()
            # Only a group that can be entered counts the run: learn it now, not in the child.
            group.enter()
            group.leave()
        except (OSError, CapabilityError) as error:
            reasons.append(f"{place}: {error}")
            group.remove()
            continue
        return group
    raise CapabilityError(
        "no control group can be made for a run" + (f" ({'; '.join(reasons)})" if reasons else ""),
        resource="cgroup",
        hint="the CPU time of a run is then read from /proc, which may miss daemons that outlive their parent",
    )


def _sweep(place: Path, proc: Path) -> None:
    """Delete the empty groups that killed starters left."""
    for folder in place.glob("joulery-*"):
        match = _RUN_GROUP.fullmatch(folder.name)
        if match and not (proc / match[1]).exists():
            with suppress(OSError):  # a process runs in it still, or another sweep was faster
                folder.rmdir()


class GroupTree:
    """Reader of the CPU seconds that the processes of a group have used, by socket."""

    def __init__(
        self, group: RunGroup, usage_fd: int, procs_fd: int, slot_of_cpu: tuple[int, ...], sockets: int
    ) -> None:
        self._group = group
        self._usage_fd = usage_fd
        self._procs_fd = procs_fd
        self._slot_of_cpu = slot_of_cpu
        self._sockets = sockets
        self._pids: frozenset[int] = frozenset()

    def pids(self) -> frozenset[int]:
        """The processes in the group at the last :meth:`discover`."""
        return self._pids

    def discover(self) -> None:
        """Read which processes are in the group."""
        text = b""
        while chunk := os.pread(self._procs_fd, 65536, len(text)):
            text += chunk
        self._pids = frozenset(int(pid) for pid in text.split())

    def read(self) -> tuple[float, ...]:
        """CPU seconds on each socket so far."""
        if not self._group.per_cpu:
            for line in os.pread(self._usage_fd, 4096, 0).split(b"\n"):
                if line.startswith(b"usage_usec "):
                    return (int(line[11:]) * 1e-6,)
        totals = [0] * self._sockets
        for cpu, used_ns in enumerate(os.pread(self._usage_fd, 65536, 0).split()):
            totals[self._slot_of_cpu[cpu] if cpu < len(self._slot_of_cpu) else 0] += int(used_ns)
        return tuple(total * 1e-9 for total in totals)

    def close(self) -> None:
        """Release the files. Safe to call twice."""
        for fd in (self._usage_fd, self._procs_fd):
            if fd >= 0:
                os.close(fd)
        self._usage_fd = self._procs_fd = -1


def open_group(group: RunGroup, sockets: tuple[int, ...], socket_of_cpu: Mapping[int, int]) -> GroupTree:
    """Open the counters of a group.

    Raises:
        CapabilityError: The group is gone, or there are several sockets and it does not count each.
    """
    if len(sockets) > 1 and not group.per_cpu:
        raise CapabilityError(f"{group.path} does not count each socket", resource=str(group.path))
    usage = "cpuacct.usage_percpu" if group.per_cpu else "cpu.stat"
    procs_fd = _open(group.path / "cgroup.procs")
    try:
        usage_fd = _open(group.path / usage)
    except CapabilityError:
        os.close(procs_fd)
        raise
    last = max(socket_of_cpu, default=-1)
    slots = tuple(sockets.index(socket_of_cpu[cpu]) if cpu in socket_of_cpu else 0 for cpu in range(last + 1))
    return GroupTree(group, usage_fd, procs_fd, slots, len(sockets))


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CapabilityError(f"cannot read {file}: {os.strerror(error.errno or 0)}", resource=str(file)) from error


def _places(proc: Path) -> list[tuple[Path, bool]]:
    """Folder of this process's group in each usable hierarchy, and whether it counts each CPU; version 2 first."""
    own: dict[str, str] = {}
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    places: list[tuple[Path, bool]] = []
    for line in _lines(proc / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        controllers = "" if kind == "cgroup2" else "cpuacct"
        usable = kind == "cgroup2" or (
            kind == "cgroup" and "cpuacct" in options.split(",") and "cpu" not in options.split(",")
        )
        if usable and controllers in own:
            inside = own[controllers].removeprefix(root.rstrip("/")).lstrip("/")
            places.append((Path(mount) / inside, kind == "cgroup"))
    return sorted(dict.fromkeys(places), key=lambda place: place[1])  # a container may mount one several times


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
