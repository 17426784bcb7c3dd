"""CPU bandwidth limits through control groups, version 1 (``cpu.cfs_quota_us``) and version 2 (``cpu.max``).

A limit is a quota of CPU time in every period. The period is short (10 ms) so that a request of a few milliseconds is
slowed evenly instead of being stopped for the rest of a long one: at 50 % of a core, the 99th percentile of a 2.6 ms
operation was 55 ms with a period of 100 ms, and about 12 ms with 4 to 10 ms.

Groups are named ``joulery-<pid of the engine>-<replica>``. Those that an engine left behind when it was killed are
removed by the next one.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from joulery.domain.errors import CapabilityError
from joulery.domain.serving.service import Slice

PERIOD_US = 10_000
MIN_QUOTA_US = 1_000
"""The kernel takes no smaller quota."""
ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
DELEGATE = "systemd-run --user --scope -p Delegate=yes -- joulery ..."

_NAME = re.compile(r"joulery-(\d+)-")


class GroupFiles:
    """The few file operations that control groups need; a test replaces it by a tree that behaves like the kernel's."""

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
        base: The group below which to create.
        unified: True for version 2.
        files: How to touch them.
    """

    def __init__(self, base: Path, *, unified: bool, files: GroupFiles) -> None:
        self.base = base
        self.unified = unified
        self._files = files
        self._pid = os.getpid()
        self._prepared = False

    @classmethod
    def find(cls, root: Path = ROOT, membership: Path = MEMBERSHIP, files: GroupFiles | None = None) -> CpuGroups:
        """The groups of this machine, whichever version holds the ``cpu`` controller.

        Raises:
            CapabilityError: Neither does.
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
        """Put a process and its future children under the quota of ``slice_``; the group's folder.

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
                f"cannot limit a replica to {slice_}: {error.strerror}",
                resource=str(error.filename or group),
                grant=DELEGATE if self.unified else None,
                hint="" if self.unified else "run as root, or use whole cores",
            ) from error
        return group

    def remove(self, group: Path) -> None:
        """Remove a group without processes. One that is still busy stays for the next engine to sweep."""
        with suppress(OSError):
            self._files.remove(group)

    def sweep(self) -> None:
        """Remove the groups of engines that are no more."""
        for group in self.base.glob("joulery-*-*"):
            match = _NAME.match(group.name)
            if match and not self._files.alive(int(match[1])):
                self.remove(group)

    def _prepare(self) -> None:
        """Version 2 only: hand the controller down, which the kernel refuses while the group itself holds processes."""
        if self._prepared or not self.unified:
            return
        control = self.base / "cgroup.subtree_control"
        try:
            self._files.write(control, "+cpu")
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self._step_aside(control)
        self._prepared = True

    def _step_aside(self, control: Path) -> None:
        """Move this process into a leaf of its own and try again; back when others are in the way."""
        leaf = self.base / f"joulery-{self._pid}-engine"
        self._files.make(leaf)
        self._files.write(leaf / "cgroup.procs", str(self._pid))
        try:
            self._files.write(control, "+cpu")
        except OSError:
            self._files.write(self.base / "cgroup.procs", str(self._pid))
            self._files.remove(leaf)
            raise
