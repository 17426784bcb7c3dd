"""Energy and carbon of scheduled jobs: ended jobs from the scheduler's logs, running jobs from its journal."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import orjson

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality, weakest
from joulery.months import month_of
from joulery.runtime.schedule.state import SchedulerState, replay_events

BY = ("owner", "account", "name", "partition", "state", "job", "cluster", "month")
"""Keys that jobs can be grouped by."""
SEPARATOR = " / "
"""Separator between the values of several keys."""
_OVER, _MONTH = b'"over"', b'"month"'
_BLOCK = 1 << 18
"""Bytes of a log that are read at once from its end."""
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
            "quality": self.shown_quality or None,
        }

    @property
    def shown_quality(self) -> str:
        """The quality as text; empty where no joule was counted."""
        return str(self.quality) if self.energy_j > 0 else ""


def state_folders(*folders: Path) -> dict[str, Path]:
    """State folders by the name of their cluster, which is empty for that of a site with one.

    A folder stands for itself and for the folders of a site's clusters in it. Where there are several, each is named by
    its folder.

    Raises:
        ConfigError: One of them holds no scheduler's state.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        inside = [one for one in sorted(folder.glob("*")) if (one / "runs").is_dir()]
        own = [folder] if (folder / "runs").is_dir() else []
        if not own and not inside:
            raise ConfigError(
                "no scheduler wrote to this folder",
                got=str(folder),
                hint="name its state folder: --jobs FOLDER (jobs.state)",
            )
        for one in own + inside:
            name = "" if one is folder and len(folders) == 1 else one.absolute().name
            found[name if name not in found else str(one)] = one
    return found


def used_by(
    folders: Path | Sequence[Path], by: str, since_s: float = -math.inf, month: str | None = None
) -> tuple[tuple[LiveUse, ...], LiveUse]:
    """Use by key, most joules first (with ``month``, months in order), and the total. Times are Unix seconds.

    A job that ended after ``since_s``, or still runs, counts whole. Divided by month, a job counts in each calendar
    month (UTC) with what it used up to the scheduler's last look in it; the months add up to the job. The cost of a job
    that ended and was started again under its number (Slurm requeues failed jobs) is the sum.

    Args:
        folders: State folder of the scheduler, or of several, as :func:`state_folders` reads them.
        by: Some of :data:`BY`, separated by commas.
        since_s: See above.
        month: Only what was used in this month, as ``2026-11``; None for all.

    Raises:
        ConfigError: ``by`` is not a key, or a folder holds no scheduler's state.
        DataError: No job ended since then and none runs, or none ran in the month.
    """
    names = by.split(",")
    if unknown := [name for name in names if name not in BY]:
        raise ConfigError("jobs cannot be grouped by this", pointer="--by", got=unknown[0], expected=", ".join(BY))
    folders = [folders] if isinstance(folders, Path) else folders
    clusters, where = state_folders(*folders), ", ".join(map(str, folders))
    rows = [
        row for cluster, folder in clusters.items() for row in _costs_of(cluster, folder)
        if float(row.get("t_s") or math.inf) >= since_s
    ]  # fmt: skip
    if not rows:
        raise DataError("no job ended since then and none runs", file=where)
    last = {_identity(row): row for row in rows}
    if month is not None or "month" in names:
        known = sorted({piece["month"] for row in rows for piece in row["pieces"]})
        rows = [piece for row in rows for piece in row["pieces"] if month in (None, piece["month"])]
        if not rows:
            raise DataError(f"no job ran in {month}", file=where, hint=f"jobs ran from {known[0]} to {known[-1]}")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    numbered_alike = len(clusters) > 1 and "cluster" not in names
    for row in rows:
        facts: Mapping[str, Any] = {**last[_identity(row)], "month": row.get("month")}
        if numbered_alike:
            facts = {**facts, "job": f"{row['cluster'] or 'unknown'}/{row['job']}"}
        values = (facts.get(name) for name in names)
        key = SEPARATOR.join(str(value or "unknown").replace(SEPARATOR, "/") for value in values)
        groups.setdefault(key, []).append(row)
    uses = sorted((_added(key, group) for key, group in groups.items()), key=lambda use: (-use.energy_j, use.key))
    if "month" in names:
        at = names.index("month")
        uses.sort(key=lambda use: use.key.split(SEPARATOR)[at] if len(names) > 1 else use.key)
    return tuple(uses), _added("total", rows)


def _costs_of(cluster: str, folder: Path) -> list[dict[str, Any]]:
    """The cost of every job of one cluster, whose name is in each row and each piece of it."""
    rows = job_costs(folder)
    for row in rows:
        for part in (row, *row["pieces"]):
            part["cluster"] = cluster
    return rows


def _identity(row: Mapping[str, Any]) -> tuple[str, int]:
    """The cluster and number of a job."""
    return str(row["cluster"]), int(row["job"])


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
    """The cost of a job divided into months: the count at the end of each, less that at the end before."""
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
        for entry in lines(log, _OVER, _MONTH):
            if entry["kind"] in ("over", "month") and isinstance(entry.get("job"), int):
                yield entry


def ended_jobs(folder: Path, since_s: float = -math.inf) -> list[dict[str, Any]]:
    """The cost of jobs that ended after a time, in order of their end; logs are read back only to that time."""
    found = []
    logs = ((log.stat().st_mtime, log) for log in (folder / "runs").glob("*/log.jsonl"))
    for _, log in sorted((at for at in logs if at[0] >= since_s), reverse=True):
        for entry in lines_backwards(log):
            if float(entry.get("t_s") or math.inf) < since_s:
                break
            if entry["kind"] == "over" and isinstance(entry.get("job"), int):
                found.append(entry)
    return found[::-1]


def live_state(folder: Path) -> SchedulerState:
    """The state of the acting scheduler of a folder, from its journal; empty where there is none."""
    journal = folder / "journal-act.jsonl"
    return replay_events(lines(journal) if journal.exists() else ())[0]


def lines(file: Path, *words: bytes) -> Iterator[dict[str, Any]]:
    """The entries of a log or journal; a line that is torn, or half written at this moment, is left out.

    Args:
        file: One entry a line; a log of months has hundreds of megabytes.
        words: Only lines with one of these are read; all when empty.
    """
    with file.open("rb") as log:
        for line in log:
            if (not words or any(word in line for word in words)) and (entry := _entry(line)) is not None:
                yield entry


def lines_backwards(file: Path) -> Iterator[dict[str, Any]]:
    """The entries of a log, the last one first; the file is read only as far as needed."""
    with file.open("rb") as log:
        at, rest = log.seek(0, os.SEEK_END), b""
        while at > 0:
            size = min(at, _BLOCK)
            at = log.seek(at - size)
            first, *others = (log.read(size) + rest).split(b"\n")
            for line in reversed(others):
                if (entry := _entry(line)) is not None:
                    yield entry
            rest = first
        if (entry := _entry(rest)) is not None:
            yield entry


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and "kind" in entry else None


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
        jobs=len({_identity(row) for row in rows}),
        running=len({_identity(row) for row in rows if row.get("state") == "running"}),
        executed_s=total("executed_s"),
        slot_s=total("slot_s"),
        unmetered_s=total("unmetered_s"),
        energy_j=total("energy_j"),
        carbon_g=total("carbon_g"),
        carbon_covered_j=total("carbon_covered_j"),
        quality=weakest(
            [Quality(row["quality"]) for row in rows if row.get("quality") and row.get("energy_j")]
            or [Quality.MEASURED]
        ),
    )
