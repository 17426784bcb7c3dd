"""Which processes and GPUs of a node belong to which job of Slurm, read from the kernel: nothing is asked of Slurm.

Slurm gives every process of a job ``SLURM_JOB_ID``; the ones on top are those whose parent does not have it. A job's
GPUs are in ``SLURM_JOB_GPUS`` (the board's own numbers), or in what a prolog wrote to a file named by the job, which
counts first: inside a device cgroup ``CUDA_VISIBLE_DEVICES`` starts at 0 for everybody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from joulery.domain.cluster import Placement

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def node_placements(proc: Path = Path("/proc"), prolog: Path | None = None, node: str = "") -> tuple[Placement, ...]:
    """Every job with a living process on this node.

    Args:
        proc: Where the kernel shows processes; those of other users need root.
        prolog: Folder in which a prolog leaves ``SLURM_JOB_GPUS`` in a file named by the job.
        node: Only processes that Slurm started under this node name; all when empty.
    """
    jobs: dict[int, list[int]] = {}
    told: dict[int, Mapping[str, str]] = {}
    environments = {pid: read for pid in _pids(proc) if (read := _environment(proc / str(pid)))}
    for pid, variables in environments.items():
        if node and variables.get("SLURMD_NODENAME", node) != node:
            continue
        job = variables.get("SLURM_JOB_ID", "")
        parent = _parent(proc / str(pid))
        if not job.isdigit() or environments.get(parent, {}).get("SLURM_JOB_ID") == job:
            continue
        jobs.setdefault(int(job), []).append(pid)
        told[int(job)] = variables
    found = []
    for number, pids in sorted(jobs.items()):
        gpus = _gpus(number, told[number], prolog)
        found.append(Placement(number, tuple(sorted(pids)), max(1, len(gpus)), gpus))
    return tuple(found)


def _gpus(job: int, variables: Mapping[str, str], prolog: Path | None) -> tuple[int, ...]:
    if prolog is not None:
        try:
            return parse_gpus((prolog / str(job)).read_text())
        except OSError:  # the prolog wrote nothing for this job
            pass
    return parse_gpus(variables.get("SLURM_JOB_GPUS") or variables.get("CUDA_VISIBLE_DEVICES", ""))


def parse_gpus(text: str) -> tuple[int, ...]:
    """Board numbers in ``0,2-3``; none where it names boards otherwise (UUIDs)."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if match := _RANGE.fullmatch(part.strip()):
            first, last = int(match[1]), int(match[2] or match[1])
            numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def _pids(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]


def _environment(folder: Path) -> dict[str, str]:
    """The variables of a process that Slurm started; empty for others and for those that are gone or not ours."""
    try:
        content = (folder / "environ").read_bytes()
    except OSError:
        return {}
    if b"SLURM_JOB_ID=" not in content:
        return {}
    pairs = (item.decode("utf-8", "replace").partition("=") for item in content.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
