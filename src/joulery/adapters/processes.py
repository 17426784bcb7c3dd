"""Processes of a node by workload, and their CPU time: read from ``/proc`` and control groups alone.

The control group of a process names its job of Slurm (``.../job_7/step_0``), its pod of Kubernetes, its container, its
systemd service or its user's session; no environment, argument or open file is read. The CPU time of a workload is that
of its control group where the kernel counts it (processes that have ended included), else the sum of its living
processes. A process outside any such group is a workload by the name of its command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from joulery.domain.energy.workload import NodeWorkload, WorkloadUse

_PATTERNS = (
    ("slurm", re.compile(r"/job_(\d+)(?=/|$)")),
    ("pod", re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?=/|$)")),
    ("container", re.compile(r"(?:^|/|-)([0-9a-f]{64})(?:\.scope)?(?=/|$)")),
    ("user", re.compile(r"/user-(\d+)\.slice(?=/|$)")),
    ("service", re.compile(r"/([^/]+\.service)(?=/|$)")),
)
_CONTAINER_DIGITS = 12
_KERNEL = NodeWorkload("process", "[kernel]")
_KTHREAD = 0x00200000
_PARENT, _FLAGS, _UTIME, _STIME, _START = 1, 6, 11, 12, 19
"""Fields of ``/proc/PID/stat``, counted from the one after the command's name."""


@dataclass(slots=True)
class _Process:
    start: int
    workload: NodeWorkload
    group: Path | None
    ticks: int
    parent: int


class ProcessTable:
    """Table of a node's processes, with the workload of each. The first reading is the baseline: its times are 0.

    Args:
        proc: Where the kernel shows processes.
        cgroups: Where it shows control groups.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._known: dict[int, _Process] = {}
        self._group_s: dict[Path, float] = {}
        self._seen = False

    @property
    def hidden(self) -> bool:
        """True where the processes of others are not shown (``hidepid``)."""
        return not os.access(self._proc / "1" / "stat", os.R_OK)

    def read(self) -> WorkloadUse:
        """CPU seconds since the reading before, by workload and by process."""
        spent = self._scan()
        members: dict[NodeWorkload, list[int]] = {}
        for pid, process in self._known.items():
            members.setdefault(process.workload, []).append(pid)
        groups = self._groups()
        cpu_s: dict[NodeWorkload, float] = {}
        for workload, pids in members.items():
            own = [group for pid in pids if (group := self._known[pid].group) is not None]
            counted = {group: groups[group] for group in own if group in groups}
            rest = [pid for pid in pids if self._known[pid].group not in counted]
            cpu_s[workload] = sum(counted.values()) + sum(spent[pid] for pid in rest)
        self._seen = True
        return WorkloadUse(cpu_s, {pid: process.workload for pid, process in self._known.items()}, spent)

    def family(self, pid: int) -> frozenset[int]:
        """A process and its living descendants, as of the last reading; empty where it is gone."""
        if pid not in self._known:
            return frozenset()
        children: dict[int, list[int]] = {}
        for child, process in self._known.items():
            children.setdefault(process.parent, []).append(child)
        found, frontier = {pid}, [pid]
        while frontier:
            for child in children.get(frontier.pop(), ()):
                if child not in found:
                    found.add(child)
                    frontier.append(child)
        return frozenset(found)

    def _scan(self) -> dict[int, float]:
        """Read every process; return the CPU seconds of each since the scan before."""
        spent: dict[int, float] = {}
        alive: dict[int, _Process] = {}
        for name in _names(self._proc):
            fields = self._stat(name) if name.isdigit() else None
            if fields is None:
                continue
            pid, (command, rest) = int(name), fields
            ticks, start = int(rest[_UTIME]) + int(rest[_STIME]), int(rest[_START])
            known = self._known.get(pid)
            if known is None or known.start != start:
                kernel = bool(int(rest[_FLAGS]) & _KTHREAD)
                workload, group = (_KERNEL, None) if kernel else self._workload(name, command)
                # A process that began after the scan before is new with all its time.
                known = _Process(start, workload, group, 0 if self._seen else ticks, 0)
            spent[pid] = max(0, ticks - known.ticks) * self._tick_s
            known.ticks, known.parent = ticks, int(rest[_PARENT])
            alive[pid] = known
        self._known = alive
        return spent

    def _stat(self, name: str) -> tuple[str, list[bytes]] | None:
        try:
            with open(f"{self._proc}/{name}/stat", "rb") as file:  # noqa: PTH123 - hundreds of times a scan
                head, bracket, rest = file.read(1024).rpartition(b")")
        except OSError:  # it ended meanwhile
            return None
        fields = rest.split()
        if not bracket or len(fields) <= _START:
            return None
        return head.partition(b"(")[2].decode("utf-8", "replace"), fields

    def _workload(self, pid: str, command: str) -> tuple[NodeWorkload, Path | None]:
        try:
            text = (self._proc / pid / "cgroup").read_text(errors="replace")
        except OSError:
            return NodeWorkload("process", command), None
        lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
        for kind, pattern in _PATTERNS:
            for _, controllers, path in sorted(lines, key=lambda line: "cpuacct" not in line[1].split(",")):
                if match := pattern.search(path):
                    name = match[1].replace("_", "-") if kind == "pod" else match[1]
                    short = name[:_CONTAINER_DIGITS] if kind == "container" else name
                    return NodeWorkload(kind, short), self._group(controllers, path[: match.end()])
        return NodeWorkload("process", command), None

    def _group(self, controllers: str, path: str) -> Path | None:
        """The file that counts the CPU time of a control group; None where the kernel shows none."""
        if controllers and "cpuacct" not in controllers.split(","):
            return None
        names = (f"{controllers}/", "cpuacct/") if controllers else ("", "unified/")
        for root in names:
            file = self._cgroups / root / path.lstrip("/") / ("cpuacct.usage" if controllers else "cpu.stat")
            if file.exists():
                return file
        return None

    def _groups(self) -> Mapping[Path, float]:
        """CPU seconds of each control group since the reading before; those seen for the first time are left out."""
        now = {file: used for file in {p.group for p in self._known.values()} if file and (used := _used_s(file)) >= 0}
        grown = {file: max(0.0, used - self._group_s[file]) for file, used in now.items() if file in self._group_s}
        self._group_s = now
        return grown


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _used_s(file: Path) -> float:
    """CPU seconds that a control group has used; -1 where they cannot be read."""
    try:
        text = file.read_text()
        if file.name == "cpuacct.usage":
            return int(text) / 1e9
        return next((int(line.split()[1]) / 1e6 for line in text.splitlines() if line.startswith("usage_usec")), -1.0)
    except (OSError, ValueError, IndexError):  # the workload ended meanwhile
        return -1.0


_LISTEN = "0A"
_FORWARDERS = frozenset({"docker-proxy", "rootlessport", "slirp4netns", "pasta", "kube-proxy", "haproxy", "nginx"})
"""Processes that pass requests on to the engine."""


def listener(port: int, proc: Path = Path("/proc")) -> int:
    """Id of the process that listens on a TCP port here, the lowest of several; 0 where none is found or accessible.

    Processes that only forward requests are ignored. Reading the sockets of other users' processes needs root.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    found = [int(name) for name in _names(proc) if inodes and name.isdigit() and _holds(proc / name, inodes)]
    return min(found, default=0)


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        if (folder / "comm").read_text().strip() in _FORWARDERS:
            return False
        return any(_link(folder / "fd" / name) in inodes for name in _names(folder / "fd"))
    except OSError:  # it ended meanwhile, or is another user's
        return False


def _link(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:
        return ""
