"""Parsers of ``squeue`` output: JSON of 21.08 and newer, fixed columns of older versions.

Field names and forms differ between versions: a number may be ``7`` or ``{"set": true, "infinite": false, "number":
7}``, a state ``"RUNNING"`` or ``["RUNNING"]``, a reason may be spelt out. One record type hides these differences.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from joulery.adapters.clusters.tres import parse_gpus
from joulery.domain.cluster import JobState
from joulery.domain.errors import DataError

HELD_TAG = "green:held"
"""In a job's AdminComment: it waits because the scheduler holds it."""
COMMENT_TAG = "joulery:held"
"""The same in its Comment, behind the owner's words, where the scheduler may not write AdminComment (an operator)."""
COLUMNS: tuple[tuple[str, int], ...] = (
    ("jobid", 24), ("jobarrayid", 32), ("hetjobid", 24), ("statecompact", 12), ("username", 40), ("partition", 40),
    ("name", 128), ("submittime", 24), ("numnodes", 12), ("numcpus", 12), ("numtasks", 12), ("tres-per-node", 96),
    ("tres-per-job", 96), ("tres-per-task", 96), ("reason", 64), ("comment", 1024), ("admin_comment", 256),
    ("batchflag", 12), ("requeue", 12), ("restartcnt", 12), ("prioritylong", 16),
)  # fmt: skip
"""Columns of the text form, with their widths."""
_FOLLOWS = re.compile(r"\bjoulery:after=(\d+)")
_FAMILY = re.compile(r"\bjoulery:family=(\d+)")
_HOSTS = re.compile(r"([^,\[\s]+)(?:\[([^\]]*)\])?([^,\[\s]*)")
_YEAR_MIN = 365 * 24 * 60
_NODES = re.compile(r"(?:^|,)node=(\d+)")
_OTHER_GRES = re.compile(r"gres[:/](?!gpu\b)")
STATES = {
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
"""Meaning of Slurm's words for a state."""
_REASON = re.compile(r" ?\[joulery: [^\]]*\]")
_MOST_CHARACTERS = 240
"""Less than what is read of AdminComment."""
_MOST_OWN_CHARACTERS = 700
"""A longer text of an owner gets none of ours: what is read of Comment ends at 1024 characters."""


@dataclass(frozen=True, slots=True)
class SlurmRecord:
    """One job as Slurm reports it.

    Attributes:
        id, name, user, partition: As Slurm names them.
        state: Slurm's word for its state.
        reason: Slurm's reason why it waits.
        submit_s: Time of its submission or last requeue, Unix seconds.
        nodes, cpus, tasks: Its shape.
        tres_per_node, tres_per_job, tres_per_task, tres_per_socket: Its requests, as TRES strings.
        comment, admin_comment: Comments of its owner and of the operators.
        batch, requeue: Whether it is a script, and may be started again.
        array: Number of the job array it belongs to; 0 for none.
        array_tasks: The tasks of the array that it represents: ``7``, or ``5-12,15`` for several that wait.
        array_limit: Number of tasks of the array that may run at once; 0 for no limit.
        het: Number of the first component of the heterogeneous job it belongs to; 0 for none.
        het_offset: Number of its component within the heterogeneous job.
        restarts: Number of its restarts.
        priority: 0 when held.
        output: File of its output; empty where Slurm does not report it.
        folder: Its working directory.
        account, qos: Charged account and quality of service.
        limit_min: Its time limit in minutes; 0 for none.
        nodes_used: The nodes it runs on, as a host list.
        features: Its constraint (``--constraint``).
        start_s: Time of its start, Unix seconds; 0 where it did not start.
        end_s: Time of its end or expected end, Unix seconds; 0 where unknown.
        eligible_s: Earliest time at which Slurm may start it, Unix seconds.
        licenses: Licenses it requests.
        tres: All its requests: ``cpu=4,mem=16G,node=1,billing=4``.
        sockets: Sockets that it requests on each node.
        required_nodes, excluded_nodes: Host lists of ``--nodelist`` and ``--exclude``.
        reservation: The reservation it runs in; empty for none.
        whole_nodes: Whether it shares its nodes with no other job (``--exclusive``, or its partition is).
        least_min: Shortest time limit that its owner accepts (``--time-min``), minutes; 0 for none.
        particular: Whether it has requirements that are not read here: other GRES, a disk, adjacent nodes, nodes of
            its own user alone, or some nodes by name.
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
    array: int
    het: int
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
    end_s: float = 0.0
    eligible_s: float = 0.0
    array_tasks: str = ""
    array_limit: int = 0
    het_offset: int = 0
    licenses: str = ""
    tres: str = ""
    tres_per_socket: str = ""
    sockets: int = 1
    required_nodes: str = ""
    excluded_nodes: str = ""
    reservation: str = ""
    whole_nodes: bool = False
    least_min: int = 0
    particular: bool = False

    @property
    def address(self) -> str:
        """The job's name for ``scontrol``: an array's number with the tasks, or the number of the first component."""
        if self.array:
            return (
                f"{self.array}_{self.array_tasks}" if self.tasks_waiting == 1 else f"{self.array}_[{self.array_tasks}]"
            )
        return str(self.het or self.id)

    @property
    def tasks_waiting(self) -> int:
        """The number of array tasks that the record represents; 1 for one task or no array."""
        return len(expand_tasks(self.array_tasks)) if self.array else 1

    @property
    def tagged(self) -> bool:
        """Whether it is marked as held by joulery."""
        return HELD_TAG in self.admin_comment or COMMENT_TAG in self.comment.split()

    @property
    def gpu_type(self) -> str:
        """The type of GPU that it requests; empty for any."""
        requests = (self.tres_per_node, self.tres_per_job, self.tres_per_task, self.tres_per_socket)
        return next((kind for kind in (parse_gpus(request).type for request in requests) if kind), "")

    @property
    def follows(self) -> int:
        """The job that this one was submitted in place of; 0 for none."""
        found = _FOLLOWS.search(self.comment)
        return int(found[1]) if found else 0

    @property
    def family(self) -> int:
        """The number by which its owner knows the job: that of the first job in a chain of resubmissions."""
        found = _FAMILY.search(self.comment)
        return int(found[1]) if found else self.id

    @property
    def gpus(self) -> int:
        """The number of GPUs in its current shape."""
        nodes, per_job = max(1, self.nodes), parse_gpus(self.tres_per_job).total
        per_node, per_task = parse_gpus(self.tres_per_node).total * nodes, parse_gpus(self.tres_per_task).total
        per_socket = parse_gpus(self.tres_per_socket).total * max(1, self.sockets) * nodes
        return per_job or per_node or per_task * max(1, self.tasks) or per_socket

    @property
    def held(self) -> bool:
        """Whether it is held."""
        return self.priority == 0 or "Held" in self.reason or "held state" in self.reason


def parse_jobs(text: str) -> tuple[SlurmRecord, ...]:
    """The records of ``squeue --json``.

    Raises:
        DataError: The text is not such a document.
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


def expand_tasks(tasks: str) -> tuple[int, ...]:
    """The numbers in a list of array tasks such as ``1,5-12``; steps (``1-9:2``) included."""
    found: list[int] = []
    for part in tasks.split(","):
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), int(last or first) + 1, int(step) if step.isdigit() and int(step) else 1)
    return tuple(found)


def parse_shape(tres: str) -> tuple[float, float]:
    """CPUs and bytes of memory in a TRES string; 0 where it has none."""
    cpus = re.search(r"(?:^|,)cpu=(\d+)", tres)
    memory = re.search(r"(?:^|,)mem=([\d.]+)([KMGT]?)", tres)
    factor = 1024.0 ** (" KMGT".index(memory[2] or "M")) if memory else 0.0
    return float(cpus[1]) if cpus else 0.0, float(memory[1]) * factor if memory else 0.0


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
        array=_number(job.get("array_job_id")),
        het=_number(job.get("het_job_id")),
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
        end_s=float(_number(job.get("end_time"))),
        eligible_s=float(_number(job.get("eligible_time"))),
        array_tasks=_tasks(job),
        array_limit=_number(job.get("array_max_tasks")),
        het_offset=_number(job.get("het_job_offset")),
        licenses=_text(job.get("licenses")),
        tres=_text(job.get("tres_req_str")),
        tres_per_socket=_text(job.get("tres_per_socket")),
        sockets=_number(job.get("sockets_per_node"), unset=1),
        required_nodes=_text(job.get("required_nodes")),
        excluded_nodes=_text(job.get("excluded_nodes")),
        reservation=_text(job.get("resv_name")),
        whole_nodes="none" in _sharing(job),
        least_min=_minutes(job.get("time_minimum")),
        particular=_is_particular(job, word),
        **tag,
    )


def _sharing(job: Mapping[str, Any]) -> set[str]:
    """A job's node-sharing words: one word in 22.05, a list in newer versions; empty where it shares its nodes."""
    value = job.get("shared")
    return set(value) if isinstance(value, list) else {value} if isinstance(value, str) else set()


def _is_particular(job: Mapping[str, Any], state: str) -> bool:
    """Whether a job has the requirements of :attr:`SlurmRecord.particular`."""
    other = any(_OTHER_GRES.search(_text(job.get(f"tres_per_{what}"))) for what in ("node", "job", "task"))
    some = 0 < len(expand_hosts(_text(job.get("required_nodes")))) < _nodes(job, state)
    disk = _number(job.get("minimum_tmp_disk_per_node")) > 0
    return other or some or disk or bool(job.get("contiguous")) or bool(_sharing(job) & {"user", "mcs"})


def _tasks(job: Mapping[str, Any]) -> str:
    """The tasks of an array that a record stands for: one that was started once has a number, others a list."""
    if number := _text(job.get("array_task_string")):
        return number.partition("%")[0]
    task = job.get("array_task_id")
    unset = task is None or (isinstance(task, Mapping) and not task.get("set"))
    return "" if unset or not _number(job.get("array_job_id")) else str(_number(task))


def _output(job: Mapping[str, Any]) -> str:
    """The output file of a batch job: the requested one, or Slurm's default; empty where unknown."""
    number, folder = str(int(job["job_id"])), _text(job.get("current_working_directory"))
    path = _text(job.get("standard_output")) or (f"{folder}/slurm-%j.out" if folder else "")
    letters = {"j": number, "A": number, "x": _text(job.get("name")), "u": _text(job.get("user_name"))}
    for letter, value in letters.items():
        path = path.replace(f"%{letter}", value)
    if path and folder and not path.startswith("/"):  # 26.05 writes it as it was asked for
        path = f"{folder}/{path}"
    return "" if "%" in path else path


def _nodes(job: Mapping[str, Any], state: str) -> int:
    """The nodes that a job has or requests; ``node_count`` of a waiting job is its former or a possible number."""
    asked = _NODES.findall(_text(job.get("tres_req_str")))
    if asked and STATES.get(state) is JobState.WAITING:
        return int(asked[0])
    return _number(job.get("node_count"))


def _row(line: str) -> SlurmRecord:
    cells, at = {}, 0
    for name, width in COLUMNS:
        cells[name] = line[at : at + width].strip()
        at += width
    try:
        job, array = int(cells["jobid"]), cells["jobarrayid"].partition("_")[0]
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
            array=int(array) if "_" in cells["jobarrayid"] else 0,
            het=int(_cell(cells["hetjobid"]) or 0),
            restarts=int(cells["restartcnt"]),
            priority=int(cells["prioritylong"]),
        )
    except ValueError as error:
        raise DataError(f"squeue printed a line that is not understood: {line.strip()[:80]!r} ({error})") from error


def _number(value: Any, unset: int = 0) -> int:
    """Parse a number, ``7`` or ``{"set": true, "number": 7}``; ``unset`` where it is absent or infinite."""
    if isinstance(value, Mapping):
        return int(value.get("number", 0)) if value.get("set") else unset
    if value is None:
        return unset
    return int(value) if math.isfinite(float(value)) else unset


def _minutes(value: Any) -> int:
    """Parse a time limit, minutes; 0 for none (``infinite``, 22.05's largest number, or the year that Slurm gives for
    an unlimited partition)."""
    if isinstance(value, Mapping) and value.get("infinite"):
        return 0
    minutes = _number(value)
    return minutes if 0 < minutes < _YEAR_MIN else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _cell(text: str) -> str:
    return "" if text in ("N/A", "(null)") else text


def _stamp(text: str) -> float:
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        return 0.0


# ---- what joulery writes into AdminComment, which is its own, and behind the owner's words in Comment


def owner_comment(comment: str) -> str:
    """A comment without the text that joulery wrote."""
    return " ".join(word for word in _REASON.sub("", comment).split(" ") if word != COMMENT_TAG).strip()


def has_reason(comment: str) -> bool:
    """Whether joulery wrote into a comment why the job waits."""
    return _REASON.search(comment) is not None


def with_reason(comment: str, text: str) -> str:
    """The comment followed by the reason why the job waits: ``… [joulery: rank 2 of 5: …]``."""
    reason = text.replace("[", "(").replace("]", ")")[:_MOST_CHARACTERS].rstrip()
    return f"{_REASON.sub('', comment).rstrip()} [joulery: {reason}]".lstrip()


def component(record: SlurmRecord) -> str:
    """``scontrol``'s name of this component of a heterogeneous job alone; the job's address for other jobs."""
    return f"{record.het}+{record.het_offset}" if record.het else record.address


def reason_updates(record: SlurmRecord, text: str, *, in_comment: bool) -> Iterator[tuple[str, str, str]]:
    """(name, job, text) of the commands that update the reason in a held job's comments.

    Args:
        record: The job's current record; nothing is written to a job without joulery's mark.
        text: Reason why it waits.
        in_comment: Whether the reason is also written into its owner's Comment.
    """
    if HELD_TAG in record.admin_comment:
        wanted = f"{HELD_TAG} {text}"[:_MOST_CHARACTERS].rstrip()
        if record.admin_comment != wanted:
            yield "mark", record.address, wanted
    if in_comment and record.tagged and len(owner_comment(record.comment)) <= _MOST_OWN_CHARACTERS:
        wanted = with_reason(record.comment, text)
        if record.comment != wanted:
            yield "mark by comment", component(record), wanted
