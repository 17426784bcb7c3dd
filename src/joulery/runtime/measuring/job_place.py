"""Find the place of a process in its job, its node and task, from its launcher's environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from joulery.domain.errors import ConfigError

_TORCHRUN = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID")
_DETACHED = {
    "docker": "the container is no child of joulery",
    "kubectl": "the container is no child of joulery",
    "podman": "the container may be no child of joulery",
    "sbatch": "the job runs later, as no child of joulery",
    "srun": "the tasks are no children of joulery, on this node or another",
}
"""Commands that hand the program to a daemon."""


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Place of a process in a job.

    Attributes:
        node: Number of its node, from 0.
        nodes: Nodes of the job.
        task: Its number among the tasks that the launcher started on this node, from 0.
        tasks: Number of tasks that the launcher started on this node.
        name: Name of the job; empty where the launcher gives none.
    """

    node: int = 0
    nodes: int = 1
    task: int = 0
    tasks: int = 1
    name: str = ""

    @property
    def folder(self) -> str:
        """Name of this node's folder in the job's folder."""
        return f"node-{self.node}"

    def as_dict(self) -> dict[str, int | str]:
        """The fields kept in the manifest of a run."""
        return {"name": self.name, "node": self.node, "nodes": self.nodes}


ALONE = JobPlace()


def job_place(environment: Mapping[str, str], stated: str | None = None) -> JobPlace:
    """The place of a process started by srun or torchrun; alone without either.

    Args:
        environment: The environment of the process.
        stated: ``K/N``, node K of N as the user states it; None to use the launcher's variables.

    Raises:
        ConfigError: ``stated`` does not have that form, or K is not below N.
    """
    found = _of_torchrun(environment) or _of_slurm(environment) or ALONE
    if stated is None:
        return found
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", stated)
    if match is None or not int(match[1]) < int(match[2]):
        raise ConfigError("not a node of a job", pointer="--node", got=stated, expected="K/N, such as 0/2 and 1/2")
    return JobPlace(int(match[1]), int(match[2]), found.task, found.tasks, found.name)


def _of_torchrun(environment: Mapping[str, str]) -> JobPlace | None:
    numbers = [environment.get(key, "") for key in _TORCHRUN]
    if not all(number.isdigit() for number in numbers):
        return None
    node, nodes, task, tasks = map(int, numbers)
    return JobPlace(node, nodes, task, tasks) if node < nodes and task < tasks else None


def _of_slurm(environment: Mapping[str, str]) -> JobPlace | None:
    numbers = [environment.get(key, "") for key in _SLURM]
    if not all(number.isdigit() for number in numbers):
        return None
    node, nodes, task = map(int, numbers)
    tasks = _tasks_of(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    name = f"slurm-{job}.{step}" if job.isdigit() and step.isdigit() else ""
    return JobPlace(node, nodes, task, max(tasks, task + 1), name) if node < nodes else None


def _tasks_of(text: str, node: int) -> int:
    """Tasks of a node by Slurm's list, such as ``2(x3),1``; 1 where the list does not state it."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return 1
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return 1


def detached(argv: Sequence[str]) -> str | None:
    """A warning for a command whose program does not run below it and so is not measured; None for any other."""
    name = PurePath(argv[0]).name
    if name not in _DETACHED:
        return None
    slurm = name in ("srun", "sbatch")
    use = "srun joulery measure -- CMD" if slurm else "joulery measure inside it, or joulery export"
    return f"only {name} itself is counted: {_DETACHED[name]}; use {use}"
