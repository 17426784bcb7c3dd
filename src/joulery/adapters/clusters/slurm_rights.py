"""Tests of the rights of this user in Slurm, each by a change that is then undone.

The test submits its own job, held and not before next week, so that it never starts. Slurm allows some of the tested
changes to every user, on the user's own jobs; it allows SiteFactor only to operators, who may change every job, and
AdminComment only to administrators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from joulery.adapters.clusters.slurm_commands import GRANT, Done, Runner, command, raise_if_unreachable
from joulery.domain.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class SlurmRight:
    """Result of the test of one right.

    Attributes:
        name: The tested change.
        granted: Whether Slurm allowed it.
        detail: Consequence of the result.
        grant: The command that grants it; empty where it is granted, or not needed.
    """

    name: str
    granted: bool
    detail: str
    grant: str = ""


def slurm_rights(run: Runner, partitions: Sequence[str] = ()) -> tuple[SlurmRight, ...]:
    """Test every right that the scheduler uses.

    Args:
        run: Runs one command of Slurm.
        partitions: Partitions for the test job; Slurm's default partition when empty.

    Raises:
        CapabilityError: The controller does not answer, or this user may not submit a job with a GPU.
    """
    done = run(command("probe", [f"--partition={','.join(partitions)}"] if partitions else []))
    raise_if_unreachable(done)
    job = done.out.strip().partition(";")[0]
    if done.code != 0 or not job.isdecimal():
        raise CapabilityError(
            f"no job can be submitted to test rights with: {done.message}",
            resource="sbatch",
            hint="test as a user with an account that may submit to a partition with GPUs",
        )
    try:
        return tuple(_tested(run, job))
    finally:
        run(command("cancel", job=job))


def _tested(run: Runner, job: str) -> Iterator[SlurmRight]:
    hold = _first_refusal(run(command("release", job=job)), run(command("hold", job=job)))
    yield SlurmRight("hold and release own jobs", hold is None, "works" if hold is None else hold.message)
    comment = _first_refusal(
        run(command("mark by comment", job=job, text="joulery:held")), run(command("mark by comment", job=job, text=""))
    )
    yield SlurmRight("write Comment", comment is None, "works" if comment is None else comment.message)
    rank = _first_refusal(
        run(command("rank", jobs=job, points="1000")), run(command("rank", jobs=job, points="0"))
    )  # fmt: skip
    yield SlurmRight(
        "change jobs of all users (SiteFactor)",
        rank is None,
        "works: this user is an operator" if rank is None else f"only jobs of this user are scheduled ({rank.message})",
        "" if rank is None else GRANT,
    )
    admin = _first_refusal(run(command("mark", job=job, text="green:held")), run(command("mark", job=job, text="")))
    detail = "works" if admin is None else "an administrator's right, not needed: jobs are marked in Comment"
    yield SlurmRight("write AdminComment", admin is None, detail)
    shape = {"job": job, "tasks": "2", "cpus": "2", "nodes": "1-1", "gpus": "gres:gpu:2"}
    resize = _first_refusal(
        run(command("resize", (), **shape)), run(command("resize", (), **{**shape, "tasks": "1", "gpus": "gres:gpu:1"}))
    )
    message = "works" if resize is None else f"{resize.message}: where no node has two GPUs, jobs keep one"
    yield SlurmRight("resize waiting jobs", resize is None, message)


def _first_refusal(*done: Done) -> Done | None:
    """The first of the results that failed; None where all succeeded.

    Raises:
        CapabilityError: The controller does not answer.
    """
    for one in done:
        raise_if_unreachable(one)
    return next((one for one in done if one.code != 0), None)
