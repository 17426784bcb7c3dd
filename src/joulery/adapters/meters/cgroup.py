"""CPU time of a program and everything it started, exactly, from a control group made for it.

A group counts every process that was ever in it, whoever waited for it. It is made inside the group this process is in,
where that is allowed (root, or a delegated group), and gets no controller of its own, so it changes nothing about how
the program is scheduled. On version 1 the group is made in the ``cpuacct`` hierarchy, and only where that is not tied
to ``cpu``, for the same reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from joulery.domain.errors import CapabilityError

_NAME = re.compile(r"joulery-(\d+)")


@dataclass(frozen=True, slots=True)
class RunGroup:
    """A control group made for one run.

    Attributes:
        path: Its folder.
        per_cpu: True where it counts CPU by CPU (version 1).
    """

    path: Path
    per_cpu: bool

    def enter(self) -> None:
        """Move this process into it.

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
        """Move what still runs in it (daemons the program left behind) one group up and delete it.

        Safe to call twice. A group that cannot be emptied stays: the kernel deletes nothing that runs.
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
    """Make a group for a run inside the group of this process, and sweep those whose process is no more.

    Args:
        pid: The process that starts the run.
        proc: Where the kernel shows its processes.

    Raises:
        CapabilityError: No hierarchy allows it; the message says why for each.
    """
    reasons = []
    for place, per_cpu in _places(proc):
        _sweep(place, proc)
        folder = place / group_name(pid)
        group = RunGroup(folder, per_cpu)
        try:
            folder.mkdir()
            open_group(group, (0,), {}).close()
            # Whoever may enter can be counted here; better to learn now than in the command's place.
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
    """Delete the empty groups of runs whose starter was killed before it could."""
    for folder in place.glob("joulery-*"):
        match = _NAME.fullmatch(folder.name)
        if match and not (proc / match[1]).exists():
            with suppress(OSError):  # something runs in it still, or somebody else was faster
                folder.rmdir()


class GroupTree:
    """CPU seconds of everything that ran in a group, socket by socket."""

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
        """Look which processes are in the group."""
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
    """Read a group.

    Raises:
        CapabilityError: It is gone, or it counts no CPU time socket by socket and there are several.
    """
    if len(sockets) > 1 and not group.per_cpu:
        raise CapabilityError(f"{group.path} does not tell sockets apart", resource=str(group.path))
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
    """(folder of this process's own group, counts CPU by CPU) in each usable hierarchy, version 2 first."""
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
    return sorted(places, key=lambda place: place[1])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
