"""Energy and carbon of scheduled jobs: ended jobs from the scheduler's logs, running jobs from its journal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality, weakest
from joulery.runtime.schedule.state import SchedulerState, replay

BY = ("owner", "name", "partition", "state", "job")
"""Keys that jobs can be grouped by."""


@dataclass(frozen=True, slots=True)
class LiveUse:
    """The sum over a group of jobs.

    Attributes:
        key: The value of the grouping key.
        jobs, running: Number of jobs, and of those that still run.
        executed_s, slot_s: Time they held slots, and slot-seconds.
        unmetered_s: Time that no source measured.
        energy_j: Joules counted.
        carbon_g: Grams of ``carbon_covered_j`` joules.
        carbon_covered_j: Joules whose intensity was known.
        quality: The weakest of the joules.
    """

    key: str
    jobs: int
    running: int
    executed_s: float
    slot_s: float
    unmetered_s: float
    energy_j: float
    carbon_g: float
    carbon_covered_j: float
    quality: Quality

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; grams are null where no intensity was known."""
        return {
            **asdict(self),
            "carbon_g": self.carbon_g if self.carbon_covered_j > 0 else None,
            "quality": str(self.quality),
        }


def used_by(folder: Path, by: str, since_s: float = -math.inf) -> tuple[tuple[LiveUse, ...], LiveUse]:
    """Use by key, most joules first, and the total. Times are Unix seconds.

    A job that ended after ``since_s``, or still runs, counts whole: its cost is kept per job, not per hour. The cost of
    a job that ended and was started again under its number (Slurm requeues failed jobs) is the sum.

    Raises:
        ConfigError: ``by`` is no key, or the folder holds no scheduler's state.
        DataError: No job ended since then and none runs.
    """
    if by not in BY:
        raise ConfigError("jobs cannot be grouped by this", pointer="--by", got=by, expected=", ".join(BY))
    if not (folder / "runs").is_dir():
        raise ConfigError(
            "no scheduler wrote to this folder",
            got=str(folder),
            hint="name its state folder: --jobs FOLDER (jobs.state)",
        )
    # A scheduler that was killed between log and journal logs the end of a job twice, with the same restarts.
    ends = {(int(row["job"]), int(row.get("restarts") or 0)): row for row in ended_jobs(folder)}
    rows = [row for row in ends.values() if float(row.get("t_s", math.inf)) >= since_s]
    latest: dict[int, int] = {}
    for job, restarts in ends:
        latest[job] = max(restarts, latest.get(job, -1))
    rows += [row for row in _running(folder) if latest.get(row["job"], -1) < row["restarts"]]
    if not rows:
        raise DataError("no job ended since then and none runs", file=str(folder))
    keys = {int(row["job"]): str(row.get(by) or "unknown") for row in rows}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(keys[int(row["job"])], []).append(row)
    uses = sorted((_added(key, group) for key, group in groups.items()), key=lambda use: (-use.energy_j, use.key))
    return tuple(uses), _added("total", rows)


def ended_jobs(folder: Path) -> Iterator[dict[str, Any]]:
    """The cost of ended jobs, from the logs of all runs."""
    for log in sorted((folder / "runs").glob("*/log.jsonl")):
        yield from (entry for entry in lines(log) if entry["kind"] == "over" and isinstance(entry.get("job"), int))


def live_state(folder: Path) -> SchedulerState:
    """The state of the acting scheduler of a folder, from its journal; empty where there is none."""
    journal = folder / "journal-act.jsonl"
    return replay(lines(journal) if journal.exists() else ())[0]


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """The entries of a log or journal; a line that is torn, or half written at this moment, is left out."""
    for line in file.read_bytes().splitlines():
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(entry, dict) and "kind" in entry:
            yield entry


def _running(folder: Path) -> Iterator[dict[str, Any]]:
    """The cost so far of jobs that are not over."""
    state = live_state(folder)
    for job, tally in state.tallies.items():
        owner, name, partition = state.who.get(job, ("", "", ""))
        if tally.executed_s > 0:
            yield {
                "job": job, "state": "running", "restarts": 0 if tally.window is None else tally.window.restarts,
                "owner": owner, "name": name, "partition": partition,
                "executed_s": tally.executed_s, "slot_s": tally.slot_s, "energy_j": tally.energy_j,
                "unmetered_s": tally.unmetered_s, "carbon_g": tally.carbon_g,
                "carbon_covered_j": tally.carbon_covered_j, "quality": tally.quality,
            }  # fmt: skip


def _added(key: str, rows: Sequence[Mapping[str, Any]]) -> LiveUse:
    def total(name: str) -> float:
        return math.fsum(float(row.get(name) or 0.0) for row in rows)

    return LiveUse(
        key=key,
        jobs=len({row["job"] for row in rows}),
        running=sum(row.get("state") == "running" for row in rows),
        executed_s=total("executed_s"),
        slot_s=total("slot_s"),
        unmetered_s=total("unmetered_s"),
        energy_j=total("energy_j"),
        carbon_g=total("carbon_g"),
        carbon_covered_j=total("carbon_covered_j"),
        quality=weakest([Quality(row["quality"]) for row in rows if row.get("quality")] or [Quality.MEASURED]),
    )
