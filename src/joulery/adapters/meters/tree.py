"""CPU time of a program and all its descendants on each socket, read from ``/proc``.

The kernel adds the time of a child to its parent when the parent waits for it, so the sum over living processes of (own
+ waited-for children) includes programs that started and ended between two readings. It misses a process whose parent
died between two readings (unless its new parent is in the tree: see ``PR_SET_CHILD_SUBREAPER``), and children of a
parent that ignores ``SIGCHLD``. A control group (:mod:`joulery.adapters.cgroups`) includes these too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

_PARENT, _UTIME, _STIME, _CUTIME, _CSTIME, _THREADS, _CPU = 1, 11, 12, 13, 14, 17, 36
"""Fields of ``/proc/PID/stat``, counted from the one after the command's name."""


class _Process:
    """One process of the tree; its open file cannot be confused with a later process of the same id."""

    __slots__ = ("fd", "own_ticks", "parent", "thread_ticks", "waited_ticks")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.parent = self.own_ticks = self.waited_ticks = 0
        self.thread_ticks: dict[str, int] = {}


class ProcessTree:
    """Counter of the CPU seconds of a process tree, with or without the time of the root process.

    Args:
        root: The process at the top.
        include_root: Whether the root's own time counts, or only that of its descendants.
        exclude: Processes that do not count, nor their descendants (the sampler itself).
        also: Further roots: processes of the run that another process started.
        sockets: Socket numbers, in the order of the values of ``read``.
        socket_of_cpu: Socket of each logical CPU.
        proc: Mount point of the kernel's ``/proc``.
    """

    def __init__(
        self,
        root: int,
        *,
        include_root: bool,
        exclude: Collection[int],
        sockets: tuple[int, ...],
        socket_of_cpu: Mapping[int, int],
        proc: Path = Path("/proc"),
        also: Collection[int] = (),
    ) -> None:
        self._root, self._also = root, tuple(also)
        self._include_root = include_root
        self._exclude = frozenset(exclude)
        self._slot_of_cpu = {cpu: sockets.index(socket) for cpu, socket in socket_of_cpu.items()}
        self._proc = proc
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._known: dict[int, _Process] = {}
        self._lost_ticks = 0
        self._last_total = 0
        self._ticks = [0.0] * len(sockets)
        self._has_children_files = (proc / f"{root}/task/{root}/children").exists()
        self.discover()
        self._also = ()  # their numbers may be another's once they have ended

    def pids(self) -> frozenset[int]:
        """The processes of the tree at the last :meth:`discover`; the root only if its own time counts."""
        return frozenset(self._known) - (frozenset() if self._include_root else {self._root})

    def discover(self) -> None:
        """Find new processes: below the root, and below known processes that have left the tree since."""
        children = self._children if self._has_children_files else self._parents().get
        frontier = [self._root, *self._also, *self._known]
        seen: set[int] = set()
        while frontier:
            pid = frontier.pop()
            if pid not in seen and pid not in self._exclude and (pid in self._known or self._adopt(pid)):
                frontier.extend(children(pid) or ())
            seen.add(pid)

    def read(self) -> tuple[float, ...]:
        """CPU seconds on each socket so far; never less than before."""
        total = self._lost_ticks
        moved = [0.0] * len(self._ticks)
        ended: dict[int, _Process] = {}
        for pid, process in self._known.items():
            stat = _stat(process.fd)
            if stat is None:
                ended[pid] = process
                continue
            own = 0 if pid == self._root and not self._include_root else int(stat[_UTIME]) + int(stat[_STIME])
            if len(moved) > 1:
                self._locate(pid, process, stat, own, moved)
            process.parent, process.own_ticks = int(stat[_PARENT]), own
            process.waited_ticks = int(stat[_CUTIME]) + int(stat[_CSTIME])
            total += own + process.waited_ticks
        self._divide_ticks(total + self._forget(ended), moved)
        return tuple(ticks * self._tick_s for ticks in self._ticks)

    def close(self) -> None:
        """Release the files. Safe to call twice."""
        for process in self._known.values():
            os.close(process.fd)
        self._known.clear()

    def _adopt(self, pid: int) -> bool:
        try:
            self._known[pid] = _Process(os.open(self._proc / f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:  # it ended meanwhile, or no more files may be opened: its parent's waited-for time has it later
            return False
        return True

    def _forget(self, ended: Mapping[int, _Process]) -> int:
        """Remove ended processes, and return the ticks of those that no parent in the tree has waited for.

        A parent that ended since the last reading has waited for its children: its own parent has their time.
        """
        for pid, process in ended.items():
            os.close(process.fd)
            del self._known[pid]
        ticks = 0
        for process in ended.values():
            parent = process.parent
            while parent in ended:
                parent = ended[parent].parent
            if parent not in self._known:
                ticks += process.own_ticks + process.waited_ticks
        self._lost_ticks += ticks
        return ticks

    def _locate(self, pid: int, process: _Process, stat: list[bytes], own: int, moved: list[float]) -> None:
        """Add each thread's new ticks to the socket on which the thread ran last."""
        if int(stat[_THREADS]) < 2:
            moved[self._slot_of_cpu.get(int(stat[_CPU]), 0)] += max(0, own - process.own_ticks)
            return
        ticks = {}
        for thread in self._names(f"{pid}/task"):
            fields = _fields(self._read_file(f"{pid}/task/{thread}/stat"))
            if fields is not None:
                ticks[thread] = int(fields[_UTIME]) + int(fields[_STIME])
                new = max(0, ticks[thread] - process.thread_ticks.get(thread, 0))
                moved[self._slot_of_cpu.get(int(fields[_CPU]), 0)] += new
        process.thread_ticks = ticks

    def _divide_ticks(self, total: int, moved: list[float]) -> None:
        """Divide the new ticks among the sockets on which threads ran; without any, add them to the first socket."""
        new, weight = total - self._last_total, sum(moved)
        if new <= 0:
            return
        self._last_total = total
        for slot, ticks in enumerate(moved if weight > 0 else [1.0] + [0.0] * (len(moved) - 1)):
            self._ticks[slot] += new * ticks / (weight or 1.0)

    def _children(self, pid: int) -> list[int]:
        lists = (self._read_file(f"{pid}/task/{thread}/children") for thread in self._names(f"{pid}/task"))
        return [int(child) for children in lists for child in children.split()]

    def _parents(self) -> dict[int, list[int]]:
        """The children of each process, from all processes: for kernels without ``children`` files."""
        found: dict[int, list[int]] = {}
        for name in self._names("."):
            fields = _fields(self._read_file(f"{name}/stat")) if name.isdigit() else None
            if fields is not None:
                found.setdefault(int(fields[_PARENT]), []).append(int(name))
        return found

    def _names(self, folder: str) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self._proc / folder)]
        except OSError:  # the process ended meanwhile
            return []

    def _read_file(self, name: str) -> bytes:
        try:
            return (self._proc / name).read_bytes()
        except OSError:  # the process ended meanwhile
            return b""


def _stat(fd: int) -> list[bytes] | None:
    try:
        return _fields(os.pread(fd, 1024, 0))
    except ProcessLookupError:
        return None


def _fields(stat: bytes) -> list[bytes] | None:
    """The fields of a ``stat`` line after the command's name, which may itself hold spaces and brackets."""
    _, bracket, rest = stat.rpartition(b")")
    return rest.split() if bracket else None
