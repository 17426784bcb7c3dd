"""What the jobs of a scheduler used: those that ended from its logs, those that run from its journal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality, weakest
from joulery.runtime.schedule.state import remembered

BY = ("owner", "name", "partition", "state", "job")
"""What jobs are added up by."""


@dataclass(frozen=True, slots=True)
class LiveUse:
    """What some jobs used, added up.

    Attributes:
        key: Whose, or which.
        jobs, running: How many, and how many of them still run.
        executed_s, slot_s: Time they held slots, and slot-seconds.
        unmetered_s: Time of it that nothing measured.
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
    """What jobs used, by key, most joules first; and all of them. Times are Unix seconds.

    A job that ended after ``since_s``, or still runs, counts whole: its cost is kept per job, not per hour. One that
    ended and was started again under its number (Slurm requeues what has failed) cost the sum of all that.

    Raises:
        ConfigError: Jobs are not added up by that, or no scheduler kept anything in the folder.
        DataError: No job ended since then and none runs.
    """
    if by not in BY:
        raise ConfigError("jobs are not added up by this", pointer="--by", got=by, expected=", ".join(BY))
    if not (folder / "runs").is_dir():
        raise ConfigError(
            "no scheduler kept anything here", got=str(folder), hint="name its state folder: --jobs FOLDER (jobs.state)"
        )
    # A scheduler that was killed as it wrote down an end writes it again: the same job, started as often.
    ends = {(int(row["job"]), int(row.get("restarts") or 0)): row for row in ended(folder)}
    rows = [row for row in ends.values() if float(row.get("t_s", math.inf)) >= since_s]
    latest: dict[int, int] = {}
    for job, restarts in ends:
        latest[job] = max(restarts, latest.get(job, -1))
    rows += [row for row in _running(folder) if latest.get(row["job"], -1) < row["restarts"]]
    if not rows:
        raise DataError("no job ended since then and none runs", file=str(folder))
    told = {int(row["job"]): str(row.get(by) or "unknown") for row in rows}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(told[int(row["job"])], []).append(row)
    uses = sorted((_added(key, group) for key, group in groups.items()), key=lambda use: (-use.energy_j, use.key))
    return tuple(uses), _added("total", rows)


def ended(folder: Path) -> Iterator[dict[str, Any]]:
    """What ended jobs cost, from the logs of all runs."""
    for log in sorted((folder / "runs").glob("*/log.jsonl")):
        yield from (entry for entry in lines(log) if entry["kind"] == "over" and isinstance(entry.get("job"), int))


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """The entries of a log or journal; a line that is torn, or being written at this moment, is left out."""
    for line in file.read_bytes().splitlines():
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(entry, dict) and "kind" in entry:
            yield entry


def _running(folder: Path) -> Iterator[dict[str, Any]]:
    """What jobs that are not over cost so far, as the scheduler in force wrote it down last."""
    journal = folder / "journal-act.jsonl"
    memory, _ = remembered(lines(journal) if journal.exists() else ())
    for job, tally in memory.tallies.items():
        owner, name, partition = memory.who.get(job, ("", "", ""))
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
