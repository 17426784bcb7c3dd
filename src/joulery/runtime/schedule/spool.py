"""Energy counted by the node agents, in files on a shared disk: agents append, the scheduler reads.

Each line contains the totals of the jobs whose total has changed since it was last written. The next line makes up for
a line that could not be written, and neither side needs the other to run.

A file is deleted when another has taken over its totals: an agent that starts, or whose own file has grown, begins a
new file with the totals of the files left on its node, lists the files that it **carries**, and only then deletes them.
The reader leaves carried files out, so neither the order in which it sees the files nor the death of the agent matters.
Files are taken over under a lock of the node, from agents that have ended. A total that nothing was added to for
:data:`KEEP_S` is left out of a new file; that time is counted by a monotonic clock, while agents run.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from joulery.domain.cluster import ClusterSnapshot, JobEnergy
from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.device import Owner
from joulery.domain.quality import Quality, weakest
from joulery.store.files import disk_errors, write_atomically
from joulery.store.leases import lives, owner_of

KEEP_S = 30 * 86_400.0
"""Least time for which a total that nothing is added to is kept: longer than a stopped job waits, and long
enough for a scheduler that is away to come back."""
LARGEST_BYTES = 1_000_000
"""A file larger than this, and than twice its first size, is continued in a new file."""
_SUFFIX = ".jsonl"
_LOOKS = 3
"""Most readings of the folder where a file is deleted meanwhile."""
_MACHINE = Path("/etc/machine-id")

Total = tuple[float, float, Quality]
"""Joules of a job, joules of its slots, and their quality."""


@dataclass(slots=True)
class SpoolFileState:
    """Totals read from a file so far.

    Attributes:
        totals: By job.
        added_s: When each was added to last, in seconds since the file was begun; below 0 for before.
        up_s: Seconds from its beginning to its last line.
        carries: Names of the files whose totals are among these.
        machine, owner: Host and process that write it; empty and None in files of earlier versions.
        offset: Byte up to which it was read.
    """

    totals: dict[int, Total] = field(default_factory=dict)
    added_s: dict[int, float] = field(default_factory=dict)
    up_s: float = 0.0
    carries: set[str] = field(default_factory=set)
    machine: str = ""
    owner: Owner | None = None
    offset: int = 0

    def read_on(self, file: Path) -> str:
        """Read the new lines; return the fault of a line that cannot be read, empty for none.

        Raises:
            OSError: It cannot be read.
        """
        with file.open("rb") as stream:
            if self.offset > stream.seek(0, os.SEEK_END):  # the file was truncated
                self.offset = 0
            stream.seek(self.offset)
            content = stream.read()
        whole, trouble = content.rfind(b"\n") + 1, ""
        self.offset += whole
        for line in filter(None, content[:whole].splitlines()):
            try:
                self._take(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
                trouble = f"a line of the node's agent cannot be read: {error}"
        return trouble

    def _take(self, line: dict[str, Any]) -> None:
        totals = {int(job): (float(e), float(s), Quality(q)) for job, (e, s, q) in line["jobs"].items()}
        up_s = float(line.get("up_s", 0.0))
        added_s = dict.fromkeys(totals, up_s)
        if "carries" in line:
            added_s |= {int(job): -float(seconds) for job, seconds in line["idle_s"].items()}
            owner = None if line["owner"] is None else Owner(**line["owner"])
            self.machine, self.owner, self.carries = str(line["machine"]), owner, set(map(str, line["carries"]))
        self.up_s = up_s
        self.totals |= totals
        self.added_s |= added_s


def summed(totals: Iterable[Mapping[int, Total]]) -> dict[int, Total]:
    """Totals of the same jobs added up."""
    found: dict[int, Total] = {}
    for each in totals:
        for job, (energy_j, slot_j, quality) in each.items():
            old_j, old_slot_j, old = found.get(job, (0.0, 0.0, Quality.MEASURED))
            found[job] = old_j + energy_j, old_slot_j + slot_j, weakest((old, quality))
    return found


def machine_id() -> str:
    """Identity of this machine, whatever its name; empty where it has none."""
    try:
        return _MACHINE.read_text().strip()
    except OSError:
        return ""


class SpoolWriter:
    """Writes totals of a node agent, one file at a time.

    Args:
        folder: Folder of the files.
        node: The node.
        session: Distinguishes this agent from others of the node.
        machine: Which machine this is; files of dead agents of this node and machine are taken over. Empty: none.
        owner: The writing process; this one unless given.
        clock_s: Seconds of a monotonic clock.
        largest_bytes: Size above which a new file is begun.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        session: str,
        *,
        machine: str = "",
        owner: Owner | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        largest_bytes: int = LARGEST_BYTES,
    ) -> None:
        self._folder, self._node, self._session = folder, node, session
        self._machine, self._owner = machine, owner or owner_of(os.getpid())
        self._clock_s, self._largest_bytes = clock_s, largest_bytes
        self._path, self._begun = folder / f"{node}.{session}{_SUFFIX}", 0
        self._bytes = self._limit_bytes = 0
        self._begun_s = clock_s()
        self._carried: dict[int, Total] = {}
        self._written: dict[int, Total] = {}
        self._added_s: dict[int, float] = {}
        self._behind: set[str] = set()
        self._torn = False

    def write(self, now_s: float, totals: Mapping[int, JobEnergy]) -> bool:
        """Append the changed totals; return False when the disk fails, in which case the next call writes them.

        Args:
            now_s: Unix seconds, for people.
            totals: Of every job since this agent was started.
        """
        try:
            with disk_errors(self._path):
                if not self._begun:
                    self._begin(now_s)
                elif self._bytes > self._limit_bytes:
                    self._rotate(now_s)
                self._append(now_s, totals)
        except CapabilityError:
            return False
        return not self._torn

    def _append(self, now_s: float, totals: Mapping[int, JobEnergy]) -> None:
        own = {job: (total.energy_j, total.slot_j, total.quality) for job, total in totals.items()}
        both = summed(({job: total for job, total in self._carried.items() if job in own}, own))
        new = {job: total for job, total in both.items() if self._written.get(job) != total}
        at_s = self._clock_s()
        entry = {"t_s": now_s, "up_s": round(at_s - self._begun_s, 1), "jobs": _jobs(new)}
        line = b"\n" * self._torn + orjson.dumps(entry) + b"\n"
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._torn = os.write(fd, line) < len(line)
        finally:
            os.close(fd)
        self._bytes += len(line)
        if not self._torn:
            self._written |= new
            self._added_s |= dict.fromkeys(new, at_s)

    def _begin(self, now_s: float) -> None:
        """Begin the first file, with what dead agents of this node left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._alone() as alone:
            left = self._left_behind() if alone else {}
            at_s, totals, idle_s = self._clock_s(), _uncarried(left), _idle_s(left)
            self._carried = {job: total for job, total in totals.items() if idle_s[job] <= KEEP_S}
            self._added_s = {job: at_s - idle_s[job] for job in self._carried}
            self._written = dict(self._carried)
            self._open(now_s, self._path, self._carried, set(left))

    def _rotate(self, now_s: float) -> None:
        """Continue in another file with the totals of this one."""
        with self._alone() as alone:
            if not alone:
                return
            fresh_s = self._clock_s() - KEEP_S
            kept = {job: total for job, total in self._written.items() if self._added_s[job] >= fresh_s}
            path = self._folder / f"{self._node}.{self._session}-{self._begun}{_SUFFIX}"
            self._open(now_s, path, kept, {self._path.name})

    def _open(self, now_s: float, path: Path, totals: Mapping[int, Total], left: set[str]) -> None:
        """Begin a file, whole or not at all, then delete those it carries."""
        at_s, behind = self._clock_s(), self._behind | left
        line = orjson.dumps(
            {
                "t_s": now_s,
                "machine": self._machine,
                "owner": None if self._owner is None else asdict(self._owner),
                "carries": sorted(behind),
                "idle_s": {str(job): round(at_s - self._added_s[job], 1) for job in totals},
                "jobs": _jobs(totals),
            }
        )
        write_atomically(path, lambda file: file.write(line + b"\n"))
        self._path, self._begun, self._begun_s, self._torn = path, self._begun + 1, at_s, False
        self._bytes = len(line) + 1
        self._limit_bytes = max(self._largest_bytes, 2 * self._bytes)
        self._behind = {name for name in behind if not _deleted(self._folder / name)}

    def _left_behind(self) -> dict[str, SpoolFileState]:
        """Files of dead agents of this node on this machine; none where one, which may carry others, is unreadable."""
        found: dict[str, SpoolFileState] = {}
        elsewhere: set[str] = set()
        for file in _files(self._folder):
            if _node_of(file.name) != self._node:
                continue
            seen = SpoolFileState()
            try:
                seen.read_on(file)
                mine = seen.owner is not None and seen.machine == self._machine and _ended(seen.owner)
                seen.read_on(file)  # what it wrote before it ended
            except OSError:
                return {}
            if mine:
                found[file.name] = seen
            else:
                elsewhere |= seen.carries
        self._delete_drafts()
        return {name: seen for name, seen in found.items() if name not in elsewhere}

    def _delete_drafts(self) -> None:
        """Delete the drafts of agents that were killed while writing."""
        for draft in self._folder.iterdir():
            if draft.name.startswith(f".{self._node}.") and draft.suffix == ".tmp":
                draft.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """True while no other agent of this node takes over; False where that cannot be known."""
        if not self._machine:
            yield False
            return
        fd = os.open(self._folder / f".{self._node}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield _locked(fd)
        finally:
            os.close(fd)


class SpoolReader:
    """Reads the totals of all node agents and adds them up.

    The total of a job on a node only grows, whatever its agents take over: the largest value read counts.

    Args:
        folder: Where agents write.
        note: Receives a message on lines and files that cannot be read, once per file.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._files: dict[str, SpoolFileState] = {}
        self._most: dict[str, dict[int, Total]] = {}
        self._noted: set[Path] = set()

    def read(self, snapshot: ClusterSnapshot) -> dict[int, JobEnergy]:
        """Totals of the jobs of the snapshot that any agent has seen; totals not readable now stay as they were."""
        try:
            self._look()
        except OSError as error:
            self._note_once(Path(error.filename or self._folder), f"cannot be read: {error.strerror or error}")
        wanted = {job.id for job in snapshot.jobs}
        found = summed(self._most.values())
        return {job: JobEnergy(*total, "agents") for job, total in found.items() if job in wanted}

    def _look(self) -> None:
        """Read the new lines of all files.

        Raises:
            OSError: A file cannot be read.
        """
        for _ in range(_LOOKS):
            seen = {file.name: self._current_state(file) for file in _files(self._folder)}
            self._files = {name: each for name, each in seen.items() if each is not None}
            if len(self._files) == len(seen):
                break
        nodes: dict[str, dict[str, SpoolFileState]] = {}
        for name, each in self._files.items():
            nodes.setdefault(_node_of(name), {})[name] = each
        for node, files in nodes.items():
            most = self._most.setdefault(node, {})
            most |= {job: total for job, total in _uncarried(files).items() if total > most.get(job, (-1.0,))}

    def _current_state(self, file: Path) -> SpoolFileState | None:
        """Present state of a file; None where it was deleted, because a file that was not listed yet carries it."""
        seen = self._files.get(file.name, SpoolFileState())
        try:
            trouble = seen.read_on(file)
        except FileNotFoundError:
            return None
        if trouble:
            self._note_once(file, trouble)
        return seen

    def _note_once(self, file: Path, text: str) -> None:
        if file not in self._noted:
            self._noted.add(file)
            self._note(f"{file}: {text}")


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob(f"*{_SUFFIX}") if not file.name.startswith("."))


def _node_of(name: str) -> str:
    return name.removesuffix(_SUFFIX).rpartition(".")[0]


def _deleted(file: Path) -> bool:
    """Delete a file; False where that fails: it stays carried, and is tried again with the next file."""
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _ended(owner: Owner) -> bool:
    """Whether a process has surely ended; one that the kernel hides from this user may still run."""
    if lives(owner):
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return owner_of(owner.pid) is not None
    return True


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another, or a disk without locks
        return False
    return True


def _uncarried(left: Mapping[str, SpoolFileState]) -> dict[int, Total]:
    """The sum of a node's files, without those that another of them carries."""
    carried = set().union(*(seen.carries for seen in left.values()))
    return summed(seen.totals for name, seen in left.items() if name not in carried)


def _idle_s(left: Mapping[str, SpoolFileState]) -> dict[int, float]:
    """Time since the last addition to the totals of each job, as far as the agents watched."""
    idle_s: dict[int, float] = {}
    for seen in left.values():
        for job, added_s in seen.added_s.items():
            idle_s[job] = min(seen.up_s - added_s, idle_s.get(job, math.inf))
    return idle_s


def _jobs(totals: Mapping[int, Total]) -> dict[str, Total]:
    return {str(job): total for job, total in totals.items()}
