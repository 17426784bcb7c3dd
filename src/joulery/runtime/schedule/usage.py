"""Energy and carbon of scheduled jobs: ended jobs from the scheduler's logs, running jobs from its journal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import orjson

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality, weakest
from joulery.months import month_of
from joulery.runtime.schedule.state import SchedulerState, replay

BY = ("owner", "account", "name", "partition", "state", "job", "month")
"""Keys that jobs can be grouped by."""
SEPARATOR = " / "
"""Between the values of several keys."""
_COSTS = ("executed_s", "slot_s", "unmetered_s", "energy_j", "carbon_g", "carbon_covered_j")


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


def used_by(
    folder: Path, by: str, since_s: float = -math.inf, month: str | None = None
) -> tuple[tuple[LiveUse, ...], LiveUse]:
    """Use by key, most joules first (with ``month``, months in order), and the total. Times are Unix seconds.

    A job that ended after ``since_s``, or still runs, counts whole. Cut by month, a job counts in each calendar month
    (UTC) with what it used up to the scheduler's last look in it; the months add up to the job. The cost of a job that
    ended and was started again under its number (Slurm requeues failed jobs) is the sum.

    Args:
        folder: State folder of the scheduler.
        by: Some of :data:`BY`, separated by commas.
        since_s: See above.
        month: Only what was used in this month, as ``2026-11``; None for all.

    Raises:
        ConfigError: ``by`` is no key, or the folder holds no scheduler's state.
        DataError: No job ended since then and none runs, or none ran in the month.
    """
    names = by.split(",")
    if unknown := [name for name in names if name not in BY]:
        raise ConfigError("jobs cannot be grouped by this", pointer="--by", got=unknown[0], expected=", ".join(BY))
    if not (folder / "runs").is_dir():
        raise ConfigError(
            "no scheduler wrote to this folder",
            got=str(folder),
            hint="name its state folder: --jobs FOLDER (jobs.state)",
        )
    rows = [row for row in job_costs(folder) if float(row.get("t_s") or math.inf) >= since_s]
    if not rows:
        raise DataError("no job ended since then and none runs", file=str(folder))
    last = {int(row["job"]): row for row in rows}
    if month is not None or "month" in names:
        rows = [piece for row in rows for piece in row["pieces"] if month in (None, piece["month"])]
        if not rows:
            raise DataError(f"no job ran in {month}", file=str(folder))
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        values = (row["month"] if name == "month" else last[int(row["job"])].get(name) for name in names)
        key = SEPARATOR.join(str(value or "unknown").replace(SEPARATOR, "/") for value in values)
        groups.setdefault(key, []).append(row)
    uses = sorted((_added(key, group) for key, group in groups.items()), key=lambda use: (-use.energy_j, use.key))
    if "month" in names:
        at = names.index("month")
        uses.sort(key=lambda use: use.key.split(SEPARATOR)[at] if len(names) > 1 else use.key)
    return tuple(uses), _added("total", rows)


def job_costs(folder: Path) -> list[dict[str, Any]]:
    """The cost of every job of a scheduler, ended and running, each with its ``pieces`` by calendar month."""
    ends: dict[tuple[int, int], dict[str, Any]] = {}
    cuts: dict[int, dict[str, Mapping[str, Any]]] = {}
    for entry in _job_entries(folder):
        job = int(entry["job"])
        if entry["kind"] == "month":
            cuts.setdefault(job, {})[str(entry.get("month"))] = entry
            continue
        # A scheduler that was killed between log and journal logs the end of a job twice, with the same restarts.
        key = (job, int(entry.get("restarts") or 0))
        own = cuts.pop(job, None) or (ends[key]["cuts"] if key in ends else {})
        t_s = entry.get("t_s")
        month = month_of(t_s, UTC) if isinstance(t_s, (int, float)) else "unknown"
        ends[key] = {**entry, "cuts": own, "pieces": _pieces(entry, own, month)}
    latest: dict[int, int] = {}
    for job, restarts in ends:
        latest[job] = max(restarts, latest.get(job, -1))
    running = [
        {**row, "pieces": _pieces(row, cuts.get(row["job"], {}), row["month"])}
        for row in _running(folder)
        if latest.get(row["job"], -1) < row["restarts"]
    ]
    return [*ends.values(), *running]


def _pieces(row: Mapping[str, Any], cuts: Mapping[str, Mapping[str, Any]], last_month: str) -> list[dict[str, Any]]:
    """The cost of a job cut into months: what had been counted at the end of each, less what was before."""
    marks = [(month, cuts[month]) for month in sorted(cuts) if month < last_month] + [(last_month, row)]
    before, pieces = dict.fromkeys(_COSTS, 0.0), []
    for month, mark in marks:
        now = {name: float(mark.get(name) or 0.0) for name in _COSTS}
        piece = {name: now[name] - before[name] for name in _COSTS}
        if any(value < 0 for value in piece.values()):  # marks of an earlier job of this number
            return [{**row, "month": last_month}]
        pieces.append({**row, **piece, "month": month})
        before = now
    return pieces


def _job_entries(folder: Path) -> Iterator[dict[str, Any]]:
    for log in sorted((folder / "runs").glob("*/log.jsonl")):
        for entry in lines(log):
            if entry["kind"] in ("over", "month") and isinstance(entry.get("job"), int):
                yield entry


def ended_jobs(folder: Path) -> Iterator[dict[str, Any]]:
    """The cost of ended jobs, from the logs of all runs."""
    return (entry for entry in _job_entries(folder) if entry["kind"] == "over")


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
        owner, name, partition, account = state.who.get(job, ("", "", "", ""))
        if tally.executed_s > 0:
            yield {
                "job": job, "state": "running", "restarts": 0 if tally.window is None else tally.window.restarts,
                "owner": owner, "name": name, "partition": partition, "account": account, "month": state.month,
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
        running=len({row["job"] for row in rows if row.get("state") == "running"}),
        executed_s=total("executed_s"),
        slot_s=total("slot_s"),
        unmetered_s=total("unmetered_s"),
        energy_j=total("energy_j"),
        carbon_g=total("carbon_g"),
        carbon_covered_j=total("carbon_covered_j"),
        quality=weakest([Quality(row["quality"]) for row in rows if row.get("quality")] or [Quality.MEASURED]),
    )
