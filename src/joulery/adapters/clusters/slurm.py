"""Cluster backend for Slurm 22.05 and newer through its commands: it needs no plug-in, patch or daemon in Slurm.

Slurm runs the jobs, and its state of them is authoritative. ``scontrol hold`` keeps a job from starting,
``requeuehold`` stops it (SIGTERM, KillWait seconds, SIGKILL; same job number), and it is resized between the two: Slurm
does not change the GPUs of a running job. A job is marked *before* it is held, so that it can always be found and
released: in its AdminComment where this user may write that (an administrator), else behind its owner's text in its
Comment (an operator).
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from joulery.adapters.clusters.progress import Progress
from joulery.adapters.clusters.slurm_commands import (
    GRANT,
    Done,
    JobOverError,
    Runner,
    command,
    command_runner,
    raise_if_unreachable,
    raise_unless_done,
)
from joulery.adapters.clusters.slurm_jobs import as_one, to_job
from joulery.adapters.clusters.slurm_nodes import FIELDS, SlurmNode, parse_nodes, parse_tiers, pools
from joulery.adapters.clusters.slurm_reach import Reach, parse_reservations
from joulery.adapters.clusters.slurm_records import (
    COLUMNS,
    COMMENT_TAG,
    HELD_TAG,
    SlurmRecord,
    component,
    expand_tasks,
    has_reason,
    owner_comment,
    parse_jobs,
    parse_table,
    reason_updates,
)
from joulery.adapters.clusters.slurm_rest import RestPlace, SlurmRest
from joulery.adapters.clusters.slurm_resubmit import resubmission, resubmit
from joulery.adapters.clusters.tres import parse_gpus
from joulery.domain.cluster import (
    ClusterAction,
    ClusterJob,
    ClusterNode,
    ClusterSnapshot,
    Hold,
    JobState,
    Order,
    Release,
    Split,
    Start,
)
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.user import user_name

_RANK_STEP = 1000
_RANKED_ALONE = 16
"""So many jobs get a rank each; those behind them share ranks in groups that double, up to a command line's length:
every change is a call, and of those that wait only the first few start before the next round."""
_RANKED_AT_ONCE = 512
_EXPLAINED_AT_ONCE = 16
_TIER_POINTS = float(1 << 32)
"""Priorities of Slurm are smaller."""
_CLUSTER = re.compile(r"^ClusterName\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)
_TRACKS_MEMORY = re.compile(r"^SelectTypeParameters\s*=.*MEMORY", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SlurmScope:
    """Selection of the jobs that the backend schedules, and its settings.

    Attributes:
        partitions: Partitions to schedule; all when empty.
        user_range: Whether a job's Comment may state the range of its size.
        progress: Source of the progress that jobs report.
        resubmit: Whether a job whose resize is refused is submitted again in its place.
        user: User whose jobs may be changed if this user is not an operator; this user when empty.
        reason_in_comment: Whether the reason why a held job waits is written into its Comment, behind the owner's text.
    """

    partitions: tuple[str, ...] = ()
    user_range: bool = True
    progress: Progress | None = None
    resubmit: bool = False
    user: str = ""
    reason_in_comment: bool = False


class SlurmBackend:
    """Cluster backend for the jobs of a Slurm cluster.

    Args:
        run: Runs one command of Slurm.
        scope: Selection of the jobs, and settings.
        closing: The runner's connection, which ``close`` closes.
    """

    def __init__(self, run: Runner, scope: SlurmScope, closing: SlurmRest | None = None) -> None:
        self._run, self._scope, self._closing = run, scope, closing
        self._json: bool | None = None
        self._gpus_per_node = 1
        self._seen: dict[int, list[SlurmRecord]] = {}
        self._tiers: dict[str, int] = {}
        self._unmarked: set[int] = set()
        self._changed: set[int] = set()
        self._marks_by_comment, self._operator, self._unexplained = False, True, False
        self._tracks_memory: bool | None = None

    def snapshot(self) -> ClusterSnapshot:
        """Every job that requests GPUs, and the GPUs of the nodes that are up, by pool."""
        self._unmarked.clear()
        self._changed.clear()
        nodes, notes = self._nodes()
        reservations, now_s = parse_reservations(self._run(command("reservations")).out), time.time()
        jobs = self._jobs(self._records())
        wanting = [self._seen[job.id] for job in jobs]
        pool_by_node = pools(nodes, wanting)
        reach = Reach(nodes, pool_by_node, reservations, now_s)
        if not self._operator:
            notes = (*notes, f"{self._user()} is not a Slurm operator: jobs of other users are left alone ({GRANT})")
        return ClusterSnapshot(
            sum(node.gpus for node in reach.up),
            tuple(sorted((reach.placed(job, self._seen[job.id]) for job in jobs), key=lambda job: job.id)),
            notes,
            nodes=tuple(
                ClusterNode(
                    node.name, node.gpus, node.gpus - node.used, pool_by_node[node.name], node.free_cpus,
                    node.free_memory_bytes,
                )
                for node in reach.up
            ),
        )  # fmt: skip

    def _jobs(self, records: Sequence[SlurmRecord]) -> list[ClusterJob]:
        """The jobs with GPUs; components of a heterogeneous job as one."""
        parts: dict[int, list[tuple[SlurmRecord, ClusterJob]]] = {}
        for record in sorted(records, key=lambda record: record.id):
            job = to_job(
                record,
                self._scope.partitions,
                user_range=self._scope.user_range,
                progress_ratio=self._progress(record),
            )
            if job is not None:
                if not self._operator and not job.exempt and record.user != self._user():
                    job = replace(job, exempt="of another user, and this user is not a Slurm operator")
                parts.setdefault(record.het or record.id, []).append((record, job))
        own_priority = self._priorities()
        for found in parts.values():
            record, job = found[0]
            waits = job.state is JobState.WAITING and not record.held
            points = float(record.priority) if own_priority is None else own_priority.get(job.id, math.nan)
            found[0] = record, replace(job, priority=points + self._tier_points(record) if waits else math.nan)
        self._seen = {found[0][1].id: [record for record, _ in found] for found in parts.values()}
        return [as_one([job for _, job in found]) for found in parts.values()]

    def apply(self, action: ClusterAction, /) -> str:
        """Apply one change; it is safe to repeat."""
        if isinstance(action, Order):
            return self._order(action.jobs)
        released = isinstance(action, Start) and self._released(action.job, action.slots)
        self._changed.add(action.job)
        if isinstance(action, Start):
            return "released already" if released else self._start(self._of(action.job), action.slots)
        records = self._seen.get(action.job) or self._of(action.job)
        if not self._operator and records[0].user != self._user():
            raise ActuationError(f"job {action.job} is {records[0].user}'s: {self._user()} is not a Slurm operator")
        job = records[0].address
        try:
            if isinstance(action, Split):
                tasks = ",".join(map(str, expand_tasks(records[0].array_tasks)[: action.count]))
                self._change("hold", job=f"{records[0].array}_[{tasks}]")
                return f"tasks {tasks} are jobs of their own, held"
            if isinstance(action, Release):
                waits = records[0].state in ("PENDING", "PD")
                if waits or any(record.held for record in records):  # what runs unheld has a mark to lose, and no hold
                    self._change("release", job=job)
                self._mark(records, held=False)
                return "released"
            self._mark(records, held=True)
            self._change("hold" if isinstance(action, Hold) else "requeue", job=job)
        except JobOverError:
            return "it ended meanwhile"
        return "held" if isinstance(action, Hold) else "SIGTERM, KillWait, and back in the queue, held"

    def explain(self, texts: Mapping[int, str]) -> str:
        """Write why held jobs wait (texts by job) behind their marks in AdminComment: changed ones, a few in each call.

        A text is removed with its mark. Comment belongs to the owner: the texts are written there only with
        ``reason_in_comment``. Returns once the reason why nothing can be written; otherwise an empty text.
        """
        seen = self._seen.keys() - self._unmarked  # a job that was released since would look held again
        held = {job: self._seen[job][0] for job in texts if job in seen}
        if self._due(held, texts) and self._scope.reason_in_comment:
            now = {record.id: record for record in self._records()}  # its owner may have written since the last look
            held = {job: now[record.id] for job, record in held.items() if record.id in now}
        for name, job, text in islice(self._due(held, texts), _EXPLAINED_AT_ONCE):
            raise_if_unreachable(self._run(command(name, job=job, text=text)))
        if self._marks_by_comment and not self._unexplained and not self._scope.reason_in_comment:
            self._unexplained = True
            return (
                "only an administrator may write AdminComment: joulery jobs alone says why held jobs wait "
                "(jobs.slurm.reason_in_comment: true writes it into Comment, behind the owner's words)"
            )
        return ""

    def _due(self, held: Mapping[int, SlurmRecord], texts: Mapping[int, str]) -> list[tuple[str, str, str]]:
        """(name, job, text) of the commands that write why jobs wait, where that is not written yet."""
        in_comment = self._scope.reason_in_comment
        return [
            one for job, record in held.items() for one in reason_updates(record, texts[job], in_comment=in_comment)
        ]

    def close(self) -> None:
        """Close the connection to slurmrestd, where there is one."""
        if self._closing is not None:
            self._closing.close()

    def _released(self, job: int, gpus: int) -> bool:
        """Whether Slurm starts the job by itself: in the last snapshot it waited at this size, not held or marked."""
        return job in self._seen and job not in self._changed and all(
            record.state in ("PENDING", "PD") and _sized(record, gpus)
            and not (record.held or record.tagged or has_reason(record.comment)) for record in self._seen[job]
        )  # fmt: skip

    def _start(self, records: Sequence[SlurmRecord], gpus: int) -> str:
        """Resize a job if necessary, then release it: Slurm accepts the two in this order."""
        record, remark = records[0], "as it is"
        sized = _sized(record, gpus)
        if record.state in ("RUNNING", "R") and sized and not record.tagged:
            return "it runs already"
        if record.state not in ("PENDING", "PD"):
            raise ActuationError(f"job {record.id} cannot start: Slurm has it {record.state}")
        if not sized:
            try:
                arguments = resized(record, gpus, self._gpus_per_node)
                self._checked(arguments)
            except ActuationError as refused:
                if not self._scope.resubmit:
                    raise
                return self._in_its_place(record, gpus, str(refused))
            remark = " ".join(arguments[3:])
        # A requeued job waits until its old credential has expired (AuthInfo=cred_expire). Never hurry it with
        # StartTime=now: a node that it just left refuses it (credential revoked) and Slurm fails the job for good.
        self._change("release", job=record.address)
        self._mark(records, held=False)
        return remark

    def _in_its_place(self, record: SlurmRecord, gpus: int, refused: str) -> str:
        """Submit the script as a new job and cancel the old one. Repeated after a crash, it finds the new job."""
        waiting = [other.id for other in self._records() if other.follows == record.id]
        flags = () if waiting else resubmission(record, gpus, self._gpus_per_node)
        number = waiting[0] if waiting else resubmit(self._run, record, flags)
        done = self._run(command("cancel", job=record.address))
        if done.code != 0:
            raise_if_unreachable(done)
            raise ActuationError(f"job {record.id} cannot make room for job {number}: {done.message}")
        return f"as job {number}, because: {refused}"

    def _order(self, jobs: Sequence[int]) -> str:
        """Set SiteFactor by rank: it is a part of Slurm's own priority, and does not freeze it as Priority would."""
        if not self._operator:
            return "not ranked: only an operator may; jobs start in order as they are released"
        groups, left_out, refused = list(_groups(jobs)), 0, []
        for rank, group in enumerate(groups):
            names = ",".join(self._seen[job][0].address if job in self._seen else str(job) for job in group)
            done = self._run(command("rank", jobs=names, points=(len(groups) - rank) * _RANK_STEP))
            if done.denied:
                raise self._no_operator(done)
            if done.code != 0:  # for some of them; the others have it
                raise_if_unreachable(done)
                left_out += min(len(group), max(1, len(done.err.splitlines())))
                refused.append(f"job {names}: {done.message}" if len(group) == 1 else done.message)
        return f"{len(jobs) - left_out} ranked" + (f"; refused: {'; '.join(refused)}" if refused else "")

    def _mark(self, records: Sequence[SlurmRecord], *, held: bool) -> None:
        """Write or remove the mark of a job that joulery holds."""
        first = records[0]
        if not held:
            self._unmarked.add(first.het or first.id)
        if not self._marks_by_comment:
            for record in records:
                if not held and has_reason(record.comment):  # before the mark goes, by which it would be found again
                    self._change("mark by comment", job=component(record), text=owner_comment(record.comment))
            done = self._run(arguments := command("mark", job=first.address, text=HELD_TAG if held else ""))
            if not done.denied:
                raise_unless_done(done, arguments)
                return
            self._marks_by_comment = True
        for record in records:
            text = owner_comment(record.comment)
            text = f"{text} {COMMENT_TAG}".lstrip() if held else text
            if text != record.comment or not held:
                self._change("mark by comment", job=component(record), text=text)

    def _no_operator(self, done: Done) -> CapabilityError:
        """Schedule only this user's own jobs from now on; the returned error has no grant, so it causes no pause."""
        self._operator = False
        text = f"only an operator may change others' jobs, so only {self._user()}'s are scheduled: {done.message}"
        return CapabilityError(text, resource="scontrol", hint=GRANT)

    def _change(self, name: str, **values: str) -> None:
        self._checked(command(name, (), **values))

    def _checked(self, arguments: Sequence[str]) -> None:
        """Run a command that changes a job.

        Raises:
            ActuationError: Slurm refuses the change.
            CapabilityError: The controller does not answer, or this user lacks the right.
        """
        raise_unless_done(self._run(arguments), arguments)

    def _of(self, job: int) -> list[SlurmRecord]:
        """The current records of a job; those of a heterogeneous job in the order of its components."""
        found = [record for record in self._records(job) if (record.het or record.id) == job and record.gpus]
        if not found:
            raise ActuationError(f"Slurm knows no job {job}: it ended meanwhile")
        return sorted(found, key=lambda record: record.het_offset)

    def _user(self) -> str:
        return self._scope.user or user_name()

    def _records(self, job: int | None = None) -> tuple[SlurmRecord, ...]:
        """The records of all jobs; where squeue has no JSON, ``job`` limits its text output to one job."""
        if self._json is not False:
            done = self._run(command("jobs"))
            if done.code == 0:
                self._json = True
                return parse_jobs(done.out)
            raise_if_unreachable(done)
            if self._json:  # it can, and could not just now
                raise CapabilityError(f"squeue failed: {done.message}", resource="squeue")
            self._json = False
        columns = ",".join(f"{name}:{width}" for name, width in COLUMNS)
        text = command("jobs as text", columns=columns)
        done = self._run(text if job is None else command("job as text", columns=columns, job=job))
        if done.code != 0:
            raise_if_unreachable(done)
            if job is not None and "Invalid job id" in done.err:
                return ()
            raise CapabilityError(f"squeue failed: {done.message}", resource="squeue")
        return parse_table(done.out)

    def _priorities(self) -> dict[int, float] | None:
        """Slurm's own priority of each waiting job that is not held, without the part that joulery set.

        A job that squeue showed as waiting may have started since: it is missing here, and squeue's priority of it
        contains joulery's part. None where Slurm has no multifactor priority: then squeue's contains no such part.
        """
        done = self._run(command("priorities"))
        if "supported priority plugin" in done.err:
            return None
        found: dict[int, float] = {}
        for line in done.out.splitlines() if done.code == 0 else ():
            number, _, points = line.strip().partition("|")
            priority, _, ours = points.partition("|")
            if number.isdecimal() and _is_whole(priority) and _is_whole(ours):
                found[int(number)] = float(int(priority) - int(ours))
        return found

    def _tier_points(self, record: SlurmRecord) -> float:
        """Points that lift a job above every job of partitions of a lower PriorityTier, which Slurm considers later."""
        tiers = [self._tiers[name] for name in record.partition.split(",") if name in self._tiers]
        return _TIER_POINTS * (max(tiers) - min(self._tiers.values())) if tiers else 0.0

    def _nodes(self) -> tuple[tuple[SlurmNode, ...], tuple[str, ...]]:
        """The nodes with GPUs, and a note on each that is down."""
        columns = ",".join(f"{name}:{width}" for name, width in FIELDS)
        if self._scope.partitions:
            arguments = command("nodes of partitions", columns=columns, partitions=",".join(self._scope.partitions))
        else:
            arguments = command("nodes", columns=columns)
        done = self._run(arguments)
        if done.code != 0:
            raise_if_unreachable(done)
            raise CapabilityError(f"sinfo failed: {done.message}", resource="sinfo")
        nodes, self._tiers = parse_nodes(done.out), parse_tiers(done.out)
        if self._tracks_memory is None:
            self._tracks_memory = _TRACKS_MEMORY.search(self._run(command("configuration")).out) is not None
        if not self._tracks_memory:
            nodes = tuple(replace(node, free_memory_bytes=float("inf")) for node in nodes)
        self._gpus_per_node = max((node.gpus for node in nodes if node.up), default=self._gpus_per_node)
        down = sorted((node.name, node.state) for node in nodes if not node.up)
        where = f" in {', '.join(self._scope.partitions)}" if self._scope.partitions else ""
        none = () if nodes else (f"Slurm has no node with GPUs{where}: sinfo -N -O nodelist,partition,gres",)
        return nodes, (*none, *(f"node {name} is {state}" for name, state in down))

    def _progress(self, record: SlurmRecord) -> float:
        return float("nan") if self._scope.progress is None else self._scope.progress.of(record.family, record.output)


def resized(record: SlurmRecord, gpus: int, gpus_per_node: int) -> tuple[str, ...]:
    """The command that resizes a waiting job to a number of GPUs, in the form that Slurm accepts.

    Tasks and CPUs scale with the GPUs, which are spread evenly over as few nodes as possible.

    Raises:
        ActuationError: The job requests its GPUs by task or by socket.
    """
    for what in ("task", "socket"):
        if parse_gpus(getattr(record, f"tres_per_{what}")).total:
            raise ActuationError(f"job {record.id} has --gpus-per-{what}, which Slurm does not resize")
    tasks_per_gpu = max(1, record.tasks // max(1, record.gpus))
    cpus_per_task = max(1, record.cpus // max(1, record.tasks))
    tasks = gpus * tasks_per_gpu
    cpus = tasks * cpus_per_task
    typed = f"gres:gpu:{record.gpu_type}" if record.gpu_type else "gres:gpu"
    if parse_gpus(record.tres_per_job).total:
        return command("resize by job", job=record.address, gpus=f"{typed}:{gpus}", tasks=tasks, cpus=cpus)
    nodes = -(-gpus // gpus_per_node)
    while gpus % nodes:
        nodes += 1
    return command(
        "resize", job=record.address, tasks=tasks, cpus=cpus, nodes=f"{nodes}-{nodes}",
        gpus=f"{typed}:{gpus // nodes}",
    )  # fmt: skip


def open_slurm(
    *,
    partitions: tuple[str, ...] = (),
    user_range: bool = True,
    progress: Progress | None = None,
    timeout_s: float = 30.0,
    rest: RestPlace | None = None,
    resubmit: bool = False,
    reason_in_comment: bool = False,
    conf: Path | None = None,
    cluster: str | None = None,
) -> SlurmBackend:
    """Open the Slurm cluster whose commands are on PATH, read through slurmrestd where ``rest`` is given.

    Args:
        partitions, user_range, progress, resubmit, reason_in_comment: As in :class:`SlurmScope`.
        timeout_s: Time limit of a command, seconds.
        rest: Address and user of slurmrestd; None to read through commands.
        conf: The cluster's slurm.conf; None for the one of the environment.
        cluster: The ClusterName that it must have; any when None.

    Raises:
        CapabilityError: The commands are missing, or no controller answers.
        ConfigError: The ClusterName is another one, or ``conf`` is not a file.
    """
    for program in ("scontrol",) if rest is not None else ("squeue", "scontrol", "sinfo"):
        if shutil.which(program) is None:
            raise CapabilityError(
                f"{program} is not on PATH", resource=program, hint="run this where Slurm's commands work"
            )
    run = command_runner(timeout_s, conf)
    if cluster is not None:
        _check_name(run, cluster)
    service = None if rest is None else SlurmRest(rest, run)
    reader = run if service is None else service.run
    scope = SlurmScope(partitions, user_range, progress, resubmit, reason_in_comment=reason_in_comment)
    backend = SlurmBackend(reader, scope, closing=service)
    try:
        backend.snapshot()
    except BaseException:
        backend.close()
        raise
    return backend


def _check_name(run: Runner, cluster: str) -> None:
    done = run(command("configuration"))
    raise_if_unreachable(done)
    found = _CLUSTER.search(done.out)
    if found is None or found[1].lower() != cluster.lower():  # Slurm writes it in small letters
        name = "no name" if found is None else found[1]
        hint = "name its slurm.conf: jobs: {slurm: {conf: /etc/slurm/slurm.conf}}"
        raise ConfigError("this Slurm is another cluster", got=name, expected=cluster, hint=hint)


def _sized(record: SlurmRecord, gpus: int) -> bool:
    """Whether a job has this size already, or cannot be resized."""
    return record.gpus == gpus or bool(record.het) or record.whole_nodes


def _is_whole(text: str) -> bool:
    return text.strip().lstrip("-").isdecimal()


def _groups(jobs: Sequence[int]) -> Iterator[Sequence[int]]:
    """The jobs in groups that share a rank: the first few one by one, the rest in groups of growing size."""
    at, size = 0, 1
    while at < len(jobs):
        size = 1 if at < _RANKED_ALONE else min(max(2 * size, _RANKED_ALONE), _RANKED_AT_ONCE)
        yield jobs[at : at + size]
        at += size
