"""Conversion of Slurm's job records into the jobs of the scheduler."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from joulery.adapters.clusters.slurm_records import STATES, SlurmRecord, expand_hosts, parse_shape
from joulery.adapters.clusters.tres import parse_gpus
from joulery.domain.cluster import ClusterJob, JobRun, JobState

_PART = r"(?:(?:min|max)=\d+|by=[0-9T:.+Z-]+)"
_SETTINGS = re.compile(rf"\bjoulery:({_PART}(?:,{_PART})*)")
_FAILED = {"FAILED", "F", "TIMEOUT", "TO", "NODE_FAIL", "NF", "OUT_OF_MEMORY", "OOM", "BOOT_FAIL", "BF", "DEADLINE",
           "DL", "PREEMPTED", "PR", "LAUNCH_FAILED", "RECONFIG_FAIL"}  # fmt: skip
_NOT_DUE = ("Dependency", "BeginTime", "DependencyNeverSatisfied")
"""Reasons of jobs that are not due yet: set by their owners, left alone."""
_ONLY_SLOTS = ("", "None", "Resources", "Priority", "BeginTime", "Cleaning", "NodeDown", "SchedDefer")
"""Reasons of jobs that wait for free slots, or for the end of their last run: Slurm would start them there and then.
Every other reason (limits of QOS and association, licenses, reservations, nodes that are not available, …) is Slurm's
verdict that free slots would not help."""


def to_job(
    record: SlurmRecord, partitions: Sequence[str], *, user_range: bool, progress_ratio: float
) -> ClusterJob | None:
    """Convert a record into a job; None where the job has and requests no GPU: it is not a training job.

    Args:
        record: Slurm's record of the job.
        partitions: Partitions to schedule; all when empty.
        user_range: Whether the owner's Comment may state the range of its size and its deadline.
        progress_ratio: The progress that the job reports.
    """
    gpus = record.gpus
    if gpus == 0:
        return None
    state = STATES.get(record.state, JobState.FAILED if record.state in _FAILED else None)
    exempt = _exempt(record, partitions) if state is not None else f"its state {record.state} is not known here"
    fixed = record.het or record.whole_nodes or record.tres_per_socket
    resizable = user_range and not exempt and record.batch and not fixed
    low, high = owner_range(record.comment, gpus) if resizable else (gpus, gpus)
    cpus, memory_bytes = parse_shape(record.tres)
    tagged, waits = record.tagged, state is JobState.WAITING
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
        marked=tagged and not state.over,
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
        judged=record.reason == "Resources" and not record.particular,
        stoppable=record.requeue and record.batch,
        array=record.array,
        tasks=record.tasks_waiting if waits else 1,
        most_tasks=record.array_limit,
        limits=limits_of(record),
        cpus_per_slot=cpus / gpus,
        memory_per_slot_bytes=memory_bytes / gpus,
        deadline_s=owner_deadline_s(record.comment) if user_range and record.batch else math.inf,
        limit_s=60.0 * record.limit_min if record.limit_min else math.nan,
        account=record.account,
        run=_run_of(record, state, gpus),
    )


def _run_of(record: SlurmRecord, state: JobState, gpus: int) -> JobRun | None:
    """The run of a job: its start, and its duration if it is over; None before a start or where unknown."""
    if not record.start_s or state is JobState.WAITING:
        return None
    held_s = record.end_s - record.start_s if state.over and record.end_s >= record.start_s else math.nan
    return None if state.over and math.isnan(held_s) else JobRun(record.start_s, held_s, gpus)


def limits_of(record: SlurmRecord) -> frozenset[str]:
    """The names under which Slurm's limits may count this job: its user, account, QOS, partition and licenses."""
    named = {"user": record.user, "account": record.account, "qos": record.qos, "partition": record.partition}
    licenses = (entry.partition(":")[0].partition("@")[0] for entry in record.licenses.replace("|", ",").split(","))
    return frozenset(
        {f"{kind} {name}" for kind, name in named.items() if name} | {f"license {name}" for name in licenses if name}
    )


def as_one(components: Sequence[ClusterJob]) -> ClusterJob:
    """Merge the components of a heterogeneous job into one job: all of them start, or none does.

    Args:
        components: The components with GPUs, in order.
    """
    first = components[0]
    if len(components) == 1:
        return first
    blocked = next((job.blocked for job in components if job.blocked), "")
    exempt = next((job.exempt for job in components if job.exempt), "")
    shape = sum(job.shape for job in components)
    return replace(
        first,
        slots=sum(job.slots for job in components),
        shape=shape,
        min_slots=shape,
        max_slots=shape,
        nodes=tuple(name for job in components for name in job.nodes),
        held_by_us=all(job.held_by_us for job in components),
        marked=any(job.marked for job in components),
        judged=all(job.judged for job in components),
        stoppable=all(job.stoppable for job in components),
        blocked=blocked,
        exempt=exempt,
        spread=False,
        parts=tuple(job.shape for job in components),
        limits=frozenset().union(*(job.limits for job in components)),
        cpus_per_slot=sum(job.cpus_per_slot * job.shape for job in components) / shape,
        memory_per_slot_bytes=sum(job.memory_per_slot_bytes * job.shape for job in components) / shape,
        run=None if first.run is None else replace(first.run, slots=shape),
    )


def owner_range(comment: str, gpus: int) -> tuple[int, int]:
    """The range that ``joulery:min=1,max=4`` in a comment allows; just ``gpus`` where it states no valid range."""
    settings = _settings(comment)
    if "min" not in settings and "max" not in settings:
        return gpus, gpus
    low, high = int(settings.get("min", 1)), int(settings.get("max", gpus))
    return (low, high) if 1 <= low <= high else (gpus, gpus)


def owner_deadline_s(comment: str) -> float:
    """The time that ``joulery:by=2026-11-27T18:00`` in a comment states, Unix seconds; infinite where there is none.

    Without a zone it is the scheduler's local time, as with Slurm's own times.
    """
    try:
        return datetime.fromisoformat(_settings(comment)["by"]).timestamp()
    except (KeyError, ValueError):
        return math.inf


def _settings(comment: str) -> dict[str, str]:
    """The owner's settings for joulery, by name."""
    match = _SETTINGS.search(comment)
    parts = (part.partition("=") for part in match[1].split(",")) if match else ()
    return {name: value for name, _, value in parts}


def _exempt(record: SlurmRecord, partitions: Sequence[str]) -> str:
    """Reason why a job is left alone; empty where it is not."""
    if partitions and not set(record.partition.split(",")) & set(partitions):
        return f"partition {record.partition} is not scheduled"
    if record.array and not record.array_tasks:
        return "part of a job array, and this squeue has no --json"
    return ""


def verdict(record: SlurmRecord) -> str:
    """Slurm's reason not to start a waiting job even on free slots; empty where only slots are missing.

    A held job has no verdict: Slurm does not consider it.
    """
    reason = record.reason.partition(",")[0].strip("() ")
    return "" if record.held or reason in _ONLY_SLOTS else reason


def _waits_for_others(record: SlurmRecord) -> str:
    """Reason why a waiting job is not due; empty where it is due."""
    if record.held:
        return "held by its owner or an operator"
    for reason in _NOT_DUE:
        # A requeued job waits with BeginTime for its old credential, not because its owner set a time.
        if record.reason == reason and not (reason == "BeginTime" and record.restarts):
            return f"waits for {reason}"
    return ""
