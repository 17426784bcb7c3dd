"""Reader of ``sacct`` output as past jobs: pipe- or comma-separated, with a header; columns may be missing.

:data:`COMMAND` prints all used columns; without a column, only its values are missing. A job that was held, or waited
for another, counts as submitted when it could start. Steps (``17.batch``) have the time of their job and are left out,
except for their energy: a job's own row contains only the energy of its ``srun`` steps, and none without such steps.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from pathlib import Path

from joulery.adapters.clusters.tres import parse_gpus
from joulery.domain.cluster import PastJob
from joulery.domain.errors import DataError
from joulery.tabular import read_csv

COMMAND = (
    "sacct -a -X -P -S now-30days -o JobID,JobName,User,Account,Partition,State,Submit,Eligible,Start,End,ElapsedRaw,"
    "AllocTRES,ReqTRES"
)
"""The command whose output is read best."""
ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
     "REVOKED", "REQUEUED"}
)  # fmt: skip
RUNNING = frozenset({"RUNNING", "SUSPENDED", "RESIZING", "COMPLETING", "CONFIGURING"})
WAITING = frozenset({"PENDING"})
_UNIX_DIGITS = 9
"""Unix seconds since 1973 have as many digits; a date without separators has 8."""
_SPAN = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class SacctLog:
    """Past jobs read from a file.

    Attributes:
        jobs: The jobs that held resources, in the order of the file.
        left_out: Number of omitted rows, by reason.
        notes: Notes for the user, one sentence each.
    """

    jobs: tuple[PastJob, ...]
    left_out: Mapping[str, int]
    notes: tuple[str, ...]


def read_sacct(path: Path, zone: tzinfo | None = None) -> SacctLog:
    """Read the jobs in a file.

    Args:
        path: Output of sacct with ``-P`` and a header, or a CSV of it.
        zone: Time zone of stamps that contain none; this machine's when None.

    Raises:
        DataError: The file cannot be read, has no header of sacct, or no job that held resources.
    """
    jobs: dict[tuple[str, str, float], PastJob] = {}
    steps: dict[tuple[str, str], list[tuple[float, float]]] = {}
    left: Counter[str] = Counter()
    strange: Counter[str] = Counter()
    for row in _rows(path):
        if row is None:
            left["more fields than the first line names"] += 1
            continue
        state = (row.get("state", "").split() or [""])[0].rstrip("+").upper()
        if state and state not in ENDED | RUNNING | WAITING:
            strange[state] += 1
        made = _job(row, state, zone)
        if isinstance(made, str):
            left[made] += 1
            continue
        if isinstance(made, _Step):
            steps.setdefault(made.job, []).append((made.start_s, made.energy_j))
            continue
        # One run may appear twice, in files that overlap; a requeued job has several, which began at other times.
        run = (*made.identity, made.start_s)
        before = jobs.get(run)
        left.update(["the same run again"] * (before is not None))
        if before is None or made.elapsed_s > before.elapsed_s:
            jobs[run] = made
    if not jobs:
        why = ", ".join(f"{count} x {reason}" for reason, count in left.items())
        raise DataError(f"no job held anything: {why or 'the file has no rows'}", file=str(path), hint=COMMAND)
    notes = tuple(f"{count} jobs in the unknown state {state} count as ended" for state, count in strange.items())
    return SacctLog(tuple(_with_steps(job, steps.get(job.identity, ())) for job in jobs.values()), dict(left), notes)


@dataclass(frozen=True, slots=True)
class _Step:
    """Energy of a step: cluster and number of its job, start (NaN where unknown), joules."""

    job: tuple[str, str]
    start_s: float
    energy_j: float


def _with_steps(job: PastJob, steps: Sequence[tuple[float, float]]) -> PastJob:
    """The job with the largest energy of its own row and its steps.

    The batch step covers the first node for the whole run, a step of srun its own nodes for its time, the job's row
    the sum of the srun steps. Each is a part of the nodes' energy, so the largest counts and they are not added up.
    """
    own = [joules for start_s, joules in steps if not (start_s < job.start_s - 1 or start_s > job.end_s + 1)]
    known = [joules for joules in (job.measured_j, *own) if not math.isnan(joules)]
    return replace(job, measured_j=max(known)) if own and known else job


def _rows(path: Path) -> Iterator[Mapping[str, str] | None]:
    """Rows by lower-case column name; None for one with more fields than there are columns."""
    # sacct quotes nothing: a " in a job's name is a character like any other, but in a CSV made by something else.
    table = read_csv(path, separators="|,;\t", lenient=True)
    if not table.header:
        raise DataError("the file is empty", file=str(path), hint=COMMAND)
    header = [name.lower() for name in table.header]
    if not {"jobid", "jobidraw"} & set(header):
        first = ",".join(table.header)
        raise DataError(
            f"the first line names no JobID: {first[:80]!r}", file=str(path), row=1, hint=f"make it with: {COMMAND}"
        )
    for _, cells in table.lines:
        if cells and any(cell.strip() for cell in cells):
            longer = len(cells) > len(header)
            yield None if longer else dict(zip(header, (cell.strip() for cell in cells), strict=False))


def _job(row: Mapping[str, str], state: str, zone: tzinfo | None) -> PastJob | _Step | str:
    """The job or the step of a row, or the reason why it is neither."""
    number = row.get("jobid") or row.get("jobidraw", "")
    if not number:
        return "no job number"
    if "." in number:
        job = (row.get("cluster", ""), number.partition(".")[0])
        measured_j = _joules(row)
        return (
            "a step of a job" if math.isnan(measured_j) else _Step(job, _stamp(row.get("start", ""), zone), measured_j)
        )
    if state in WAITING:
        return "still waits"
    elapsed_s = _elapsed_s(row)
    start_s, end_s = _span_s(row.get("start", ""), row.get("end", ""), elapsed_s, zone)
    if math.isnan(elapsed_s):
        elapsed_s = end_s - start_s
    if elapsed_s <= 0:
        return "never ran" if elapsed_s == 0 else "ended before it began"
    if math.isnan(elapsed_s):
        return "no elapsed time and no start and end"
    if math.isnan(start_s):
        start_s = end_s - elapsed_s
    if math.isnan(start_s):
        return "neither start nor end"
    tres = row.get("alloctres") or row.get("reqtres", "")
    held = dict(part.partition("=")[::2] for part in tres.split(",") if "=" in part)
    gpus = parse_gpus(tres)
    return PastJob(
        id=number,
        name=row.get("jobname", ""),
        owner=row.get("user") or "unknown",
        account=row.get("account") or "unknown",
        partition=row.get("partition") or "unknown",
        state=state or "unknown",
        submit_s=_later(_stamp(row.get("submit", ""), zone), _stamp(row.get("eligible", ""), zone)),
        start_s=start_s,
        end_s=start_s + elapsed_s,
        elapsed_s=elapsed_s,
        gpus=gpus.total,
        gpu_type=gpus.type,
        any_type=bool(gpus.type and (asked := parse_gpus(row.get("reqtres", ""))).total and not asked.type),
        cpus=_count(held.get("cpu", "") or row.get("alloccpus", "")),
        nodes=_count(held.get("node", "") or row.get("allocnodes", "") or row.get("nnodes", "")),
        measured_j=_joules(row),
        cluster=row.get("cluster", ""),
    )


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _elapsed_s(row: Mapping[str, str]) -> float:
    if row.get("elapsedraw", "").isdigit():
        return float(row["elapsedraw"])
    match = _SPAN.fullmatch(row.get("elapsed", ""))
    if match is None:
        return math.nan
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _span_s(start: str, end: str, elapsed_s: float, zone: tzinfo | None) -> tuple[float, float]:
    """Start and end of a run, Unix seconds; NaN where unknown.

    When a clock is set back, one hour occurs twice. The readings whose difference fits the elapsed time best count.
    """
    spans = [(_stamp(start, zone, one), _stamp(end, zone, other)) for one in (0, 1) for other in (0, 1)]
    if math.isnan(elapsed_s):
        # Without an elapsed time, one that ends before it begins is wrong at least.
        return next((span for span in spans if span[0] < span[1]), spans[0])
    off_s = [abs(end_s - start_s - elapsed_s) for start_s, end_s in spans]
    return spans[off_s.index(min(off_s))] if not math.isnan(off_s[0]) else spans[0]


def _stamp(text: str, zone: tzinfo | None, fold: int = 0) -> float:
    """Unix seconds of a stamp, which may itself be Unix seconds; ``fold`` selects one where an hour occurs twice."""
    if text.isdecimal() and len(text) >= _UNIX_DIGITS:
        return float(text)
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    if stamp.tzinfo is None:
        stamp = stamp.replace(fold=fold)
        stamp = stamp.replace(tzinfo=zone) if zone is not None else stamp.astimezone()
    return stamp.timestamp()


def _later(one_s: float, other_s: float) -> float:
    """The later of two stamps, either of which may be NaN (unknown)."""
    return other_s if math.isnan(one_s) or other_s > one_s else one_s


def _joules(row: Mapping[str, str]) -> float:
    """The energy that Slurm measured, joules; NaN without one, and for 0 or an implausibly large number."""
    text = row.get("consumedenergyraw", "")
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0 < value < 1e13 else math.nan
