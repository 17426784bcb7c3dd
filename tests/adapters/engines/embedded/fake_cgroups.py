"""A control-group tree in a temporary folder that refuses what the kernel refuses."""

import errno
import os
from pathlib import Path

from joulery.adapters.cgroups import GroupFiles


class FakeGroups(GroupFiles):
    """Writes move processes, busy groups stay, and version 2 hands no controller down from a group with processes."""

    def __init__(self, tree: Path, *, unified: bool, alive: set[int] | None = None) -> None:
        self.tree = tree
        self.unified = unified
        self.pids_alive = alive or set()
        self.writes: list[tuple[str, str]] = []
        self.deny: str = ""

    def procs(self, group: Path) -> list[int]:
        file = group / "cgroup.procs"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def write(self, path: Path, text: str) -> None:
        self.writes.append((str(path.relative_to(self.tree)), text))
        if self.deny and self.deny in path.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        if path.name == "cgroup.subtree_control" and self.procs(path.parent) and path.parent != self.tree:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        if path.name == "cpu.max" and "cpu" not in (path.parent.parent / "cgroup.subtree_control").read_text():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if path.name != "cgroup.procs":
            path.write_text(text)
            return
        for group in self.tree.rglob("cgroup.procs"):
            group.write_text("".join(f"{pid}\n" for pid in self.procs(group.parent) if str(pid) != text))
        path.write_text("".join(f"{pid}\n" for pid in [*self.procs(path.parent), int(text)]))

    def remove(self, path: Path) -> None:
        if self.procs(path):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        for file in path.iterdir():
            file.unlink()
        path.rmdir()

    def alive(self, pid: int) -> bool:
        return pid in self.pids_alive or pid == os.getpid()
