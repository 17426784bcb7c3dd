"""Resubmission of a job that Slurm does not resize: its own script is submitted again in another size, in its place.

The new job waits for the old one (``--dependency=afterany``), which is then cancelled in the queue. The new job has
another number; ``JOULERY_JOB`` in its environment is the first job's number, by which it finds its checkpoint and its
progress.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from joulery.adapters.clusters.slurm_commands import Runner, command
from joulery.adapters.clusters.slurm_records import SlurmRecord, owner_comment
from joulery.adapters.clusters.tres import parse_gpus
from joulery.domain.errors import ActuationError
from joulery.user import account_name

_PLACE = re.compile(r"\s*\bjoulery:(?:(?:after|family)=\d+|held\b)")


def resubmission(record: SlurmRecord, gpus: int, gpus_per_node: int) -> tuple[str, ...]:
    """The flags of ``sbatch`` that request the same job with another number of GPUs.

    Raises:
        ActuationError: The job is part of an array or heterogeneous, the number is not a multiple of its GPUs per
            task, or this user may not submit for its owner.
    """
    if record.array or record.het:
        raise ActuationError(f"job {record.id} is part of an array or of a heterogeneous job, which is not resubmitted")
    each = parse_gpus(record.tres_per_task).total
    if each and gpus % each:
        raise ActuationError(f"job {record.id} has {each} GPUs a task, and {gpus} is not a multiple")
    tasks_per_gpu = max(1, record.tasks // max(1, record.gpus))
    cpus_per_task = max(1, record.cpus // max(1, record.tasks))
    kind = f"{record.gpu_type}:" if record.gpu_type else ""
    if each:
        shape = [f"--ntasks={gpus // each}", f"--gpus-per-task={kind}{each}"]
    elif parse_gpus(record.tres_per_job).total:
        shape = [f"--gpus={kind}{gpus}", f"--ntasks={gpus * tasks_per_gpu}"]
    else:
        nodes = -(-gpus // gpus_per_node)
        while gpus % nodes:
            nodes += 1
        shape = [f"--nodes={nodes}", f"--gres=gpu:{kind}{gpus // nodes}", f"--ntasks={gpus * tasks_per_gpu}"]
    comment = owner_comment(_PLACE.sub("", record.comment))
    values = {
        "job-name": record.name, "partition": record.partition, "chdir": record.folder, "output": record.output,
        "account": record.account, "qos": record.qos, "time": str(record.limit_min) if record.limit_min else "",
        "comment": f"{comment} joulery:family={record.family} joulery:after={record.id}".strip(),
    }  # fmt: skip
    return (
        "--parsable", "--requeue", "--open-mode=append", f"--dependency=afterany:{record.id}",
        *shape, f"--cpus-per-task={cpus_per_task}",
        *(f"--{flag}={value}" for flag, value in values.items() if value),
        f"--export=ALL,JOULERY_JOB={record.family}", *_as_owner(record.user),
    )  # fmt: skip


def resubmit(run: Runner, record: SlurmRecord, flags: Sequence[str]) -> int:
    """Submit the job's own script with these flags, and return the new job's number.

    Raises:
        ActuationError: Slurm does not provide the script, or refuses the new job.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script"
        written = run(command("script", job=record.address, file=script))
        if written.code != 0 or not script.exists():
            raise ActuationError(f"the script of job {record.id} cannot be read: {written.message}")
        done = run(command("submit again", flags, file=script))
    number = done.out.strip().partition(";")[0]
    if done.code != 0 or not number.isdecimal():
        raise ActuationError(f"job {record.id} cannot be submitted again: {done.message}")
    return int(number)


def _as_owner(user: str) -> tuple[str, ...]:
    """The flags that submit the new job as its owner.

    Raises:
        ActuationError: The job belongs to another user, and only root may submit for others.
    """
    if user == account_name(os.geteuid()):
        return ()
    if os.geteuid() != 0:
        raise ActuationError(f"only root can submit for {user}", hint="run the daemon as root, or set resubmit: false")
    return (f"--uid={user}", "--get-user-env")
