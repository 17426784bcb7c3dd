"""Slurm 22.05 and newer through its commands: no plug-in, no patch, no daemon of its own.

Slurm runs the jobs and is the truth about them. A job is kept from starting by ``scontrol hold``, stopped by
``requeuehold`` (SIGTERM, KillWait seconds, SIGKILL; same job number) and resized between the two: Slurm does not change
the GPUs of a running job. Whatever is held in our name carries :data:`HELD_TAG` in its AdminComment *before* it is
held, so that it can always be found and given back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from joulery.adapters.clusters.progress import Progress
from joulery.adapters.clusters.slurm_commands import Done, Runner, command_runner
from joulery.adapters.clusters.slurm_nodes import FIELDS, SlurmNode, parse_nodes, pool_of, pools
from joulery.adapters.clusters.slurm_records import (
    COLUMNS,
    HELD_TAG,
    SlurmRecord,
    parse_jobs,
    parse_table,
    to_job,
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
    Start,
)
from joulery.domain.errors import ActuationError, CapabilityError

_AWAY = ("Unable to contact slurm controller", "Connection refused", "Socket timed out", "Zero Bytes were transmitted")
_ELSEWHERE = "(other nodes)"
"""The pool of jobs that run on nodes outside the scheduled partitions."""
_RANK_STEP = 1000
_RANKED_ALONE = 16
"""So many jobs get a rank each; those behind them share ranks in groups that double, up to a command line's length:
every change is a call, and of those that wait only the first few start before the next round."""
_RANKED_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class SlurmScope:
    """Which jobs to see, and what their owners may say.

    Attributes:
        partitions: Those to schedule; all when empty.
        user_range: Whether Comment says how far a job may be resized.
        progress: Where jobs say how far they are.
        resubmit: Whether a job whose resize is refused is submitted anew in its place.
    """

    partitions: tuple[str, ...] = ()
    user_range: bool = True
    progress: Progress | None = None
    resubmit: bool = False


class SlurmBackend:
    """The jobs of a Slurm cluster.

    Args:
        run: Runs one command of Slurm.
        scope: Which jobs.
        closing: What the runner holds open.
    """

    def __init__(self, run: Runner, scope: SlurmScope, closing: SlurmRest | None = None) -> None:
        self._run, self._scope, self._closing = run, scope, closing
        self._json: bool | None = None
        self._gpus_per_node = 1

    def snapshot(self) -> ClusterSnapshot:
        """Every job that wants GPUs, and the GPUs of the nodes that are up, by pool."""
        nodes, notes = self._nodes()
        up = [node for node in nodes if node.up]
        records = self._records()
        wanting = [record for record in records if record.gpus]
        pool_by_node = pools(nodes, wanting)
        jobs = []
        for record in wanting:
            job = to_job(
                record,
                self._scope.partitions,
                user_range=self._scope.user_range,
                progress_ratio=self._progress(record),
            )
            if job is not None:
                jobs.append(_in_pool(job, record, nodes, pool_by_node))
        return ClusterSnapshot(
            sum(node.gpus for node in up),
            tuple(sorted(jobs, key=lambda job: job.id)),
            notes,
            nodes=tuple(
                ClusterNode(node.name, node.gpus, node.gpus - node.used, pool_by_node[node.name]) for node in up
            ),
        )

    def apply(self, action: ClusterAction, /) -> str:
        """One change through ``scontrol``; each can be done again."""
        if isinstance(action, Order):
            return self._order(action.jobs)
        if isinstance(action, Hold):
            self._tag(action.job, HELD_TAG)
            self._scontrol("hold", str(action.job))
            return f"held, AdminComment {HELD_TAG}"
        if isinstance(action, Release):
            self._scontrol("release", str(action.job))
            self._tag(action.job, "")
            return "released"
        if isinstance(action, Start):
            return self._start(action.job, action.slots)
        self._tag(action.job, HELD_TAG)
        self._scontrol("requeuehold", str(action.job))
        return "SIGTERM, KillWait, and back in the queue, held"

    def close(self) -> None:
        """Let go of the service, where there is one."""
        if self._closing is not None:
            self._closing.close()

    def _start(self, job: int, gpus: int) -> str:
        """Resize if need be, then release: the order in which Slurm accepts it."""
        record = self._record(job)
        if record.state not in ("PENDING", "PD"):
            raise ActuationError(f"job {job} cannot start: Slurm has it {record.state}")
        remark = "as it is"
        if record.gpus != gpus:
            try:
                shape = resized(record, gpus, self._gpus_per_node)
                self._scontrol("update", f"JobId={job}", *shape)
            except ActuationError as refused:
                if not self._scope.resubmit:
                    raise
                return self._in_its_place(record, gpus, str(refused))
            remark = " ".join(shape)
        # A requeued job waits until its old credential has expired (AuthInfo=cred_expire). Never hurry it with
        # StartTime=now: a node that it just left refuses it (credential revoked) and Slurm fails the job for good.
        self._scontrol("release", str(job))
        self._tag(job, "")
        return remark

    def _in_its_place(self, record: SlurmRecord, gpus: int, refused: str) -> str:
        """The same script as a new job; the old one goes. Done again after a crash it finds the new one there."""
        waiting = [other.id for other in self._records() if other.follows == record.id]
        flags = () if waiting else resubmission(record, gpus, self._gpus_per_node)
        number = waiting[0] if waiting else resubmit(self._run, record, flags)
        done = self._run(("scancel", str(record.id)))
        if done.code != 0:
            self._raise_if_away(done)
            raise ActuationError(f"job {record.id} cannot make place for job {number}: {_said(done)}")
        return f"as job {number}, because: {refused}"

    def _order(self, jobs: Sequence[int]) -> str:
        """SiteFactor by rank: within Slurm's own priority, without freezing it as Priority would."""
        groups, left_out, refused = list(_groups(jobs)), 0, []
        for rank, group in enumerate(groups):
            names = ",".join(map(str, group))
            done = self._run(
                ("scontrol", "update", f"JobId={names}", f"SiteFactor={(len(groups) - rank) * _RANK_STEP}")
            )
            if done.code != 0:  # for some of them; the others have it
                self._raise_if_away(done)
                left_out += min(len(group), max(1, len(done.err.splitlines())))
                refused.append(f"job {names}: {_said(done)}" if len(group) == 1 else _said(done))
        return f"{len(jobs) - left_out} ranked" + (f"; refused: {'; '.join(refused)}" if refused else "")

    def _tag(self, job: int, text: str) -> None:
        self._scontrol("update", f"JobId={job}", f"AdminComment={text}")

    def _scontrol(self, *words: str) -> None:
        """One change.

        Raises:
            ActuationError: Slurm refuses it.
            CapabilityError: The controller does not answer, or we may not.
        """
        done = self._run(("scontrol", *words))
        if done.code == 0:
            return
        self._raise_if_away(done)
        if "Access/permission denied" in done.err:
            raise CapabilityError(
                f"Slurm does not let this user change jobs of others: {_said(done)}",
                resource="scontrol",
                grant="sacctmgr modify user where name=$USER set adminlevel=Operator",
            )
        raise ActuationError(f"scontrol {' '.join(words)}: {_said(done)}")

    def _record(self, job: int) -> SlurmRecord:
        for record in self._records(job):
            if record.id == job:
                return record
        raise ActuationError(f"Slurm knows no job {job}: it ended meanwhile")

    def _records(self, job: int | None = None) -> tuple[SlurmRecord, ...]:
        """Every job, or one; by text where JSON is not offered."""
        if self._json is not False:
            done = self._run(("squeue", "--json"))
            if done.code == 0:
                self._json = True
                return parse_jobs(done.out)
            self._raise_if_away(done)
            if self._json:  # it can, and could not just now
                raise CapabilityError(f"squeue failed: {_said(done)}", resource="squeue")
            self._json = False
        which = () if job is None else ("-j", str(job))
        done = self._run(("squeue", "-h", "-a", *which, "-O", ",".join(f"{name}:{width}" for name, width in COLUMNS)))
        if done.code != 0:
            self._raise_if_away(done)
            if job is not None and "Invalid job id" in done.err:
                return ()
            raise CapabilityError(f"squeue failed: {_said(done)}", resource="squeue")
        return parse_table(done.out)

    def _nodes(self) -> tuple[tuple[SlurmNode, ...], tuple[str, ...]]:
        """The nodes with GPUs, and a note on each that is down."""
        where = ("-p", ",".join(self._scope.partitions)) if self._scope.partitions else ()
        fields = ",".join(f"{name}:{width}" for name, width in FIELDS)
        done = self._run(("sinfo", "-h", "-N", *where, "-O", fields))
        if done.code != 0:
            self._raise_if_away(done)
            raise CapabilityError(f"sinfo failed: {_said(done)}", resource="sinfo")
        nodes = parse_nodes(done.out)
        self._gpus_per_node = max((node.gpus for node in nodes if node.up), default=self._gpus_per_node)
        down = sorted((node.name, node.state) for node in nodes if not node.up)
        return nodes, tuple(f"node {name} is {state}" for name, state in down)

    def _progress(self, record: SlurmRecord) -> float:
        return float("nan") if self._scope.progress is None else self._scope.progress.of(record.family, record.output)

    def _raise_if_away(self, done: Done) -> None:
        if any(words in done.err for words in _AWAY):
            raise CapabilityError(
                f"the Slurm controller does not answer: {_said(done)}", resource="slurmctld", hint="try: scontrol ping"
            )


def _in_pool(
    job: ClusterJob, record: SlurmRecord, nodes: Sequence[SlurmNode], pool_by_node: Mapping[str, str]
) -> ClusterJob:
    """The job with its pool: that of the nodes it runs on, else that of the nodes it may run on."""
    pool = next((pool_by_node[name] for name in job.nodes if name in pool_by_node), None)
    if pool is None and job.nodes:
        pool = _ELSEWHERE
    if pool is None:
        pool = pool_of(record, nodes, pool_by_node)
    if pool is None and not job.exempt and job.state is JobState.WAITING:
        return replace(job, exempt="no node has its partition, GPU type and features")
    return replace(job, pool=pool or "")


def resized(record: SlurmRecord, gpus: int, gpus_per_node: int) -> tuple[str, ...]:
    """The changes that give a waiting job so many GPUs, in the form Slurm accepts.

    Tasks and CPUs follow the GPUs; as few nodes as hold them, evenly filled.

    Raises:
        ActuationError: The number does not spread evenly over nodes, or the job's GPUs hang on its tasks.
    """
    if parse_gpus(record.tres_per_task).total:
        raise ActuationError(f"job {record.id} has --gpus-per-task, which Slurm does not resize")
    tasks_per_gpu = max(1, record.tasks // max(1, record.gpus))
    cpus_per_task = max(1, record.cpus // max(1, record.tasks))
    tasks = gpus * tasks_per_gpu
    counts = (f"NumTasks={tasks}", f"NumCPUs={tasks * cpus_per_task}")
    typed = f"gres:gpu:{record.gpu_type}" if record.gpu_type else "gres:gpu"
    if parse_gpus(record.tres_per_job).total:
        return (f"TresPerJob={typed}:{gpus}", *counts)
    nodes = -(-gpus // gpus_per_node)
    while gpus % nodes:
        nodes += 1
    return (*counts, f"NumNodes={nodes}-{nodes}", f"TresPerNode={typed}:{gpus // nodes}")


def open_slurm(
    *,
    partitions: tuple[str, ...] = (),
    user_range: bool = True,
    progress: Progress | None = None,
    timeout_s: float = 30.0,
    rest: RestPlace | None = None,
    resubmit: bool = False,
) -> SlurmBackend:
    """The Slurm whose commands are on PATH, read through slurmrestd where that is named.

    Raises:
        CapabilityError: There are none, or no controller answers.
    """
    for program in ("scontrol",) if rest is not None else ("squeue", "scontrol", "sinfo"):
        if shutil.which(program) is None:
            raise CapabilityError(
                f"{program} is not on PATH", resource=program, hint="run this where Slurm's commands work"
            )
    run = command_runner(timeout_s)
    service = None if rest is None else SlurmRest(rest, run)
    reader = run if service is None else service.run
    backend = SlurmBackend(reader, SlurmScope(partitions, user_range, progress, resubmit), closing=service)
    try:
        backend.snapshot()
    except BaseException:
        backend.close()
        raise
    return backend


def _groups(jobs: Sequence[int]) -> Iterator[Sequence[int]]:
    """The first few one by one, the rest together in larger and larger groups."""
    at, size = 0, 1
    while at < len(jobs):
        size = 1 if at < _RANKED_ALONE else min(max(2 * size, _RANKED_ALONE), _RANKED_AT_ONCE)
        yield jobs[at : at + size]
        at += size


def _said(done: Done) -> str:
    return " ".join((done.err or done.out).split())[:300] or f"exit code {done.code}"
