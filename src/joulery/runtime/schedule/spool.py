"""What the agents of the nodes counted, through files on a shared disk: an agent appends, the scheduler reads on.

Lines hold totals since the agent was started, of the jobs whose total has changed since it was written last, so a line
that could not be written is made up by the next one, and neither side needs the other to be there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson

from joulery.domain.cluster import ClusterSnapshot, JobEnergy
from joulery.domain.errors import CapabilityError
from joulery.domain.quality import Quality, weakest
from joulery.store.files import disk_errors


class SpoolWriter:
    """The agent's end: one file a session of one node."""

    def __init__(self, folder: Path, node: str, session: str) -> None:
        self._folder, self._path = folder, folder / f"{node}.{session}.jsonl"
        self._written: dict[int, JobEnergy] = {}
        self._torn = False

    def write(self, now_s: float, totals: Mapping[int, JobEnergy]) -> bool:
        """Append the totals that are new; False when the disk is away, which the next call makes up for."""
        new = {job: total for job, total in totals.items() if self._written.get(job) != total}
        jobs = {str(job): [t.energy_j, t.slot_j, t.quality] for job, t in new.items()}
        line = b"\n" * self._torn + orjson.dumps({"t_s": now_s, "jobs": jobs}) + b"\n"
        try:
            with disk_errors(self._path):
                self._folder.mkdir(parents=True, exist_ok=True)
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                try:
                    self._torn = os.write(fd, line) < len(line)
                finally:
                    os.close(fd)
        except CapabilityError:
            return False
        if not self._torn:
            self._written |= new
        return not self._torn


class SpoolReader:
    """The scheduler's end: the sum over all nodes and sessions.

    Args:
        folder: Where agents write.
        note: Told of lines and files that cannot be read, once a file.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._offset: dict[Path, int] = {}
        self._latest: dict[Path, dict[int, tuple[float, float, Quality]]] = {}
        self._noted: set[Path] = set()

    def read(self, snapshot: ClusterSnapshot) -> dict[int, JobEnergy]:
        """Totals of the jobs of the snapshot that any agent has seen; what cannot be read now is as it was."""
        file = self._folder
        try:
            for file in sorted(self._folder.glob("*.jsonl")):
                self._read_on(file)
        except OSError as error:
            self._tell(file, f"cannot be read: {error.strerror or error}")
        found: dict[int, JobEnergy] = {}
        for jobs in self._latest.values():
            for job, (energy_j, slot_j, quality) in jobs.items():
                old = found.get(job, JobEnergy(0.0, 0.0, Quality.MEASURED, "agents"))
                found[job] = JobEnergy(
                    old.energy_j + energy_j, old.slot_j + slot_j, weakest((old.quality, quality)), "agents"
                )
        wanted = {job.id for job in snapshot.jobs}
        return {job: total for job, total in found.items() if job in wanted}

    def _read_on(self, file: Path) -> None:
        with file.open("rb") as stream:
            start = self._offset.get(file, 0)
            if start > stream.seek(0, os.SEEK_END):  # somebody cut it
                start = 0
            stream.seek(start)
            content = stream.read()
        whole = content.rfind(b"\n") + 1
        self._offset[file] = start + whole
        latest = self._latest.setdefault(file, {})
        for line in filter(None, content[:whole].splitlines()):
            try:
                jobs = orjson.loads(line)["jobs"]
                latest.update({int(job): (float(e), float(s), Quality(q)) for job, (e, s, q) in jobs.items()})
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
                self._tell(file, f"a line of the node's agent cannot be read: {error}")

    def _tell(self, file: Path, text: str) -> None:
        if file not in self._noted:
            self._noted.add(file)
            self._note(f"{file}: {text}")
