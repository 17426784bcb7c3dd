"""What ``squeue`` and ``sinfo`` print, as jobs and slots: JSON of 21.08 and newer, fixed columns of what came before.

Field names and forms differ between versions: a number may be ``7`` or ``{"set": true, "infinite": false, "number":
7}``, a state ``"RUNNING"`` or ``["RUNNING"]``, a reason may be spelt out. One record type hides that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from joulery.adapters.clusters.tres import parse_gpus
from joulery.domain.cluster import ClusterJob, JobState
from joulery.domain.errors import DataError

HELD_TAG = "green:held"
"""In a job's AdminComment: it waits because the scheduler holds it. Its owner's Comment is left alone."""
COLUMNS: tuple[tuple[str, int], ...] = (
    ("jobid", 24), ("jobarrayid", 32), ("hetjobid", 24), ("statecompact", 12), ("username", 40), ("partition", 40),
    ("name", 128), ("submittime", 24), ("numnodes", 12), ("numcpus", 12), ("numtasks", 12), ("tres-per-node", 96),
    ("tres-per-job", 96), ("tres-per-task", 96), ("reason", 64), ("comment", 160), ("admin_comment", 64),
    ("batchflag", 12), ("requeue", 12), ("restartcnt", 12), ("prioritylong", 16),
)  # fmt: skip
"""Columns of the text form, with their widths."""
_RANGE = re.compile(r"\bjoulery:((?:min|max)=\d+(?:,(?:min|max)=\d+)*)")
_FOLLOWS = re.compile(r"\bjoulery:after=(\d+)")
_FAMILY = re.compile(r"\bjoulery:family=(\d+)")
_HOSTS = re.compile(r"([^,\[\s]+)(?:\[([^\]]*)\])?([^,\[\s]*)")
_NODES = re.compile(r"(?:^|,)node=(\d+)")
_STATES = {
    "PENDING": JobState.WAITING, "PD": JobState.WAITING, "REQUEUED": JobState.WAITING, "RQ": JobState.WAITING,
    "REQUEUE_HOLD": JobState.WAITING, "RH": JobState.WAITING, "SPECIAL_EXIT": JobState.WAITING, "SE": JobState.WAITING,
    "REQUEUE_FED": JobState.WAITING, "RF": JobState.WAITING, "RESV_DEL_HOLD": JobState.WAITING,
    "RD": JobState.WAITING, "RUNNING": JobState.RUNNING, "R": JobState.RUNNING, "CONFIGURING": JobState.RUNNING,
    "CF": JobState.RUNNING, "RESIZING": JobState.RUNNING, "RS": JobState.RUNNING, "SIGNALING": JobState.RUNNING,
    "SI": JobState.RUNNING, "STAGE_OUT": JobState.RUNNING, "SO": JobState.RUNNING, "SUSPENDED": JobState.RUNNING,
    "S": JobState.RUNNING, "STOPPED": JobState.RUNNING, "ST": JobState.RUNNING, "COMPLETING": JobState.STOPPING,
    "CG": JobState.STOPPING, "COMPLETED": JobState.DONE, "CD": JobState.DONE, "CANCELLED": JobState.CANCELLED,
    "CA": JobState.CANCELLED, "REVOKED": JobState.CANCELLED, "RV": JobState.CANCELLED,
}  # fmt: skip
_FAILED = {"FAILED", "F", "TIMEOUT", "TO", "NODE_FAIL", "NF", "OUT_OF_MEMORY", "OOM", "BOOT_FAIL", "BF", "DEADLINE",
           "DL", "PREEMPTED", "PR", "LAUNCH_FAILED", "RECONFIG_FAIL"}  # fmt: skip
_NOT_DUE = ("Dependency", "BeginTime", "DependencyNeverSatisfied", "JobArrayTaskLimit")
"""Reasons of jobs that are not due yet: their owners' wish, left alone."""
_ONLY_SLOTS = ("", "None", "Resources", "Priority", "BeginTime", "Cleaning", "NodeDown", "SchedDefer")
"""Reasons of jobs that wait for free slots, or for the end of their last run: Slurm would start them there and then.
Every other reason (limits of QOS and association, licenses, reservations, nodes that are not available, …) is Slurm's
verdict that free slots would not help."""


@dataclass(frozen=True, slots=True)
class SlurmRecord:
    """One job as Slurm reports it.

    Attributes:
        id, name, user, partition: As Slurm names them.
        state: Its word for it.
        reason: Why it waits.
        submit_s: Submission, or last requeue.
        nodes, cpus, tasks: Its shape.
        tres_per_node, tres_per_job, tres_per_task: What it asks for.
        comment, admin_comment: Its owner's and the operators'.
        batch, requeue: Whether it is a script, and may be started again.
        array, het: Whether it is part of an array or a heterogeneous job.
        restarts: How often it was started again.
        priority: 0 when held.
        output: The file its output goes to; empty where Slurm does not say.
        folder: Where it runs.
        account, qos: Charged account and quality of service.
        limit_min: Its time limit in minutes; 0 for none.
        nodes_used: The nodes it runs on, as a host list.
        features: Its constraint (``--constraint``).
        start_s: When it started, Unix seconds; 0 where it did not.
        eligible_s: Before when Slurm does not start it.
    """

    id: int
    name: str
    user: str
    partition: str
    state: str
    reason: str
    submit_s: float
    nodes: int
    cpus: int
    tasks: int
    tres_per_node: str
    tres_per_job: str
    tres_per_task: str
    comment: str
    admin_comment: str
    batch: bool
    requeue: bool
    array: bool
    het: bool
    restarts: int
    priority: int
    output: str = ""
    folder: str = ""
    account: str = ""
    qos: str = ""
    limit_min: int = 0
    nodes_used: str = ""
    features: str = ""
    start_s: float = 0.0
    eligible_s: float = 0.0

    @property
    def gpu_type(self) -> str:
        """The type of GPU it asks for; empty for any."""
        requests = (self.tres_per_node, self.tres_per_job, self.tres_per_task)
        return next((kind for kind in (parse_gpus(request).type for request in requests) if kind), "")

    @property
    def follows(self) -> int:
        """The job that this one was submitted in place of; 0 for none."""
        found = _FOLLOWS.search(self.comment)
        return int(found[1]) if found else 0

    @property
    def family(self) -> int:
        """The number its owner knows it by: the first number of jobs that follow one another."""
        found = _FAMILY.search(self.comment)
        return int(found[1]) if found else self.id

    @property
    def gpus(self) -> int:
        """GPUs of its present shape."""
        per_node, per_job = parse_gpus(self.tres_per_node).total, parse_gpus(self.tres_per_job).total
        return per_job or per_node * max(1, self.nodes) or parse_gpus(self.tres_per_task).total * max(1, self.tasks)

    @property
    def held(self) -> bool:
        """Whether it is held."""
        return self.priority == 0 or "Held" in self.reason or "held state" in self.reason


def parse_jobs(text: str) -> tuple[SlurmRecord, ...]:
    """The records of ``squeue --json``.

    Raises:
        DataError: This is no such document.
    """
    try:
        jobs = json.loads(text)["jobs"]
        return tuple(_record(job) for job in jobs)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"squeue --json answered something that is not understood: {error!r}") from error


def parse_table(text: str) -> tuple[SlurmRecord, ...]:
    """The records of ``squeue -O`` with :data:`COLUMNS`.

    Raises:
        DataError: A line does not have these columns.
    """
    return tuple(_row(line) for line in text.splitlines() if line.strip())


def to_job(
    record: SlurmRecord, partitions: Sequence[str], *, user_range: bool, progress_ratio: float
) -> ClusterJob | None:
    """The job behind a record; None where it holds no GPU and wants none: not a training job.

    Args:
        record: What Slurm says.
        partitions: Those to schedule; all when empty.
        user_range: Whether the owner's Comment says how far it may be resized.
        progress_ratio: Its reported progress.
    """
    gpus = record.gpus
    if gpus == 0:
        return None
    state = _STATES.get(record.state, JobState.FAILED if record.state in _FAILED else None)
    exempt = _exempt(record, partitions) if state is not None else f"its state {record.state} is not known here"
    low, high = owner_range(record.comment, gpus) if user_range and not exempt else (gpus, gpus)
    tagged = HELD_TAG in record.admin_comment
    waits = state is JobState.WAITING
    if waits and not exempt and not (tagged and record.held):
        exempt = _waits_for_others(record)
    state = JobState.RUNNING if state is None else state
    return ClusterJob(
        id=record.id,
        name=record.name,
        owner=record.user,
        partition=record.partition,
        submit_s=record.submit_s,
        state=state,
        slots=gpus if state in (JobState.RUNNING, JobState.STOPPING) else 0,
        shape=gpus,
        min_slots=min(low, gpus),
        max_slots=max(high, gpus),
        held_by_us=tagged and record.held and not state.over,  # Slurm holds what runs, too: it would stay when requeued
        exempt=exempt,
        restarts=record.restarts,
        progress_ratio=progress_ratio,
        follows=record.follows,
        nodes=expand_hosts(record.nodes_used) if state in (JobState.RUNNING, JobState.STOPPING) else (),
        spread=not parse_gpus(record.tres_per_node).total,
        start_s=record.start_s if state is JobState.RUNNING and record.start_s else math.nan,
        eligible_s=record.eligible_s,
        priority=float(record.priority) if waits and not record.held else math.nan,
        blocked=verdict(record) if waits else "",
        judged=record.reason == "Resources",
        stoppable=record.requeue,
    )


def owner_range(comment: str, gpus: int) -> tuple[int, int]:
    """What ``joulery:min=1,max=4`` in a comment allows; just ``gpus`` where it says nothing sensible."""
    match = _RANGE.search(comment)
    if match is None:
        return gpus, gpus
    said = {name: int(value) for name, _, value in (part.partition("=") for part in match[1].split(","))}
    low, high = said.get("min", 1), said.get("max", gpus)
    return (low, high) if 1 <= low <= high else (gpus, gpus)


def expand_hosts(hosts: str) -> tuple[str, ...]:
    """The names in a host list such as ``g[1-3,07],login``."""
    found: list[str] = []
    for prefix, ranges, suffix in _HOSTS.findall(hosts):
        if not ranges:
            found.append(prefix)
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            if first.isdigit() and (last or first).isdigit():
                numbers = range(int(first), int(last or first) + 1)
                found += [f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers]
    return tuple(found)


def _exempt(record: SlurmRecord, partitions: Sequence[str]) -> str:
    """Why a job is left alone; empty where it is not."""
    if partitions and not set(record.partition.split(",")) & set(partitions):
        return f"partition {record.partition} is not scheduled"
    if record.array:
        return "part of a job array"
    if record.het:
        return "part of a heterogeneous job"
    if not record.batch:
        return "interactive: it cannot be started again"
    return ""


def verdict(record: SlurmRecord) -> str:
    """Why Slurm would not start a waiting job even on free slots; empty where only slots are missing.

    A held job has no verdict: Slurm does not look at it.
    """
    reason = record.reason.partition(",")[0].strip("() ")
    return "" if record.held or reason in _ONLY_SLOTS else reason


def _waits_for_others(record: SlurmRecord) -> str:
    """Why a waiting job is not due."""
    if record.held:
        return "held by its owner or an operator"
    for reason in _NOT_DUE:
        # A requeued job waits with BeginTime for its old credential: that is no wish of its owner.
        if record.reason == reason and not (reason == "BeginTime" and record.restarts):
            return f"waits for {reason}"
    return ""


def _record(job: Mapping[str, Any]) -> SlurmRecord:
    """A record from JSON of any version."""
    state = job["job_state"]
    words = [state] if isinstance(state, str) else list(state)
    # Newer versions add flags to the state: while COMPLETING is among them the job still has its nodes.
    word = "COMPLETING" if "COMPLETING" in words else words[0]
    tag = {name: _text(job.get(name)) for name in ("comment", "admin_comment")}
    if isinstance(job.get("comment"), dict):  # 23.02: {"comment": {"job": …, "administrator": …}}
        tag = {"comment": _text(job["comment"].get("job")), "admin_comment": _text(job["comment"].get("administrator"))}
    return SlurmRecord(
        id=int(job["job_id"]),
        name=_text(job.get("name")),
        user=_text(job.get("user_name")) or str(job.get("user_id", "")),
        partition=_text(job.get("partition")),
        state=word,
        reason=_text(job.get("state_reason")),
        submit_s=float(_number(job.get("submit_time"))),
        nodes=_nodes(job, word),
        cpus=_number(job.get("cpus")),
        tasks=_number(job.get("tasks")),
        tres_per_node=_text(job.get("tres_per_node")),
        tres_per_job=_text(job.get("tres_per_job")),
        tres_per_task=_text(job.get("tres_per_task")),
        batch=bool(job.get("batch_flag")),
        requeue=bool(job.get("requeue")),
        array=_number(job.get("array_job_id")) != 0,
        het=_number(job.get("het_job_id")) != 0,
        restarts=_number(job.get("restart_cnt")),
        priority=_number(job.get("priority"), unset=1),
        output=_output(job),
        folder=_text(job.get("current_working_directory")),
        account=_text(job.get("account")),
        qos=_text(job.get("qos")),
        limit_min=_minutes(job.get("time_limit")),
        nodes_used=_text(job.get("nodes")),
        features=_text(job.get("features")),
        start_s=float(_number(job.get("start_time"))),
        eligible_s=float(_number(job.get("eligible_time"))),
        **tag,
    )


def _output(job: Mapping[str, Any]) -> str:
    """The file a batch job prints to: as it asked, or Slurm's default; empty where it is unknown."""
    number, folder = str(int(job["job_id"])), _text(job.get("current_working_directory"))
    said = _text(job.get("standard_output")) or (f"{folder}/slurm-%j.out" if folder else "")
    letters = {"j": number, "A": number, "x": _text(job.get("name")), "u": _text(job.get("user_name"))}
    for letter, value in letters.items():
        said = said.replace(f"%{letter}", value)
    return "" if "%" in said else said


def _nodes(job: Mapping[str, Any], state: str) -> int:
    """Nodes it has, or asks for: of a job that waits, ``node_count`` is what it had, or what might do."""
    asked = _NODES.findall(_text(job.get("tres_req_str")))
    if asked and _STATES.get(state) is JobState.WAITING:
        return int(asked[0])
    return _number(job.get("node_count"))


def _row(line: str) -> SlurmRecord:
    cells, at = {}, 0
    for name, width in COLUMNS:
        cells[name] = line[at : at + width].strip()
        at += width
    try:
        job = int(cells["jobid"])
        return SlurmRecord(
            id=job,
            name=cells["name"],
            user=cells["username"],
            partition=cells["partition"],
            state=cells["statecompact"],
            reason=cells["reason"],
            submit_s=_stamp(cells["submittime"]),
            nodes=int(cells["numnodes"].partition("-")[0]),
            cpus=int(cells["numcpus"].partition("-")[0]),
            tasks=int(cells["numtasks"]),
            tres_per_node=_cell(cells["tres-per-node"]),
            tres_per_job=_cell(cells["tres-per-job"]),
            tres_per_task=_cell(cells["tres-per-task"]),
            comment=_cell(cells["comment"]),
            admin_comment=_cell(cells["admin_comment"]),
            batch=cells["batchflag"] == "1",
            requeue=cells["requeue"] == "1",
            array="_" in cells["jobarrayid"],
            het=_cell(cells["hetjobid"]) not in ("", "0"),
            restarts=int(cells["restartcnt"]),
            priority=int(cells["prioritylong"]),
        )
    except ValueError as error:
        raise DataError(f"squeue printed a line that is not understood: {line.strip()[:80]!r} ({error})") from error


def _number(value: Any, unset: int = 0) -> int:
    """7, ``{"set": true, "number": 7}``, or what stands for nothing."""
    if isinstance(value, Mapping):
        return int(value.get("number", 0)) if value.get("set") else unset
    if value is None:
        return unset
    return int(value) if math.isfinite(float(value)) else unset


def _minutes(value: Any) -> int:
    """A time limit; 0 for none (``infinite``, or 22.05's largest number)."""
    if isinstance(value, Mapping) and value.get("infinite"):
        return 0
    minutes = _number(value)
    return minutes if 0 < minutes < 0xFFFFFFF0 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _cell(text: str) -> str:
    return "" if text in ("N/A", "(null)") else text


def _stamp(text: str) -> float:
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        return 0.0
