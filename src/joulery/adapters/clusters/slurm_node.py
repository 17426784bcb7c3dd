"""Processes and GPUs of a node by Slurm job, read from the kernel without a call to Slurm.

A process belongs to the job of its cgroup (``.../job_7/step_batch``), which it cannot change; where Slurm creates no
cgroups, to the job in its environment (``SLURM_JOB_ID``). A job's top processes are those whose parent is not in the
job. Its GPUs are in a file that a prolog wrote under the job's number, else in ``SLURM_JOB_GPUS`` (board numbers); last
in ``CUDA_VISIBLE_DEVICES``, because inside a device cgroup that starts at 0 for every job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from joulery.adapters.clusters.slurm_records import expand_hosts
from joulery.domain.cluster import Placement

_CGROUP = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def node_placements(
    proc: Path = Path("/proc"), prolog: Path | None = None, node: str = "", cluster: str = ""
) -> tuple[Placement, ...]:
    """The placement of every job with a living process on this node.

    Args:
        proc: Mount point of the kernel's ``/proc``; processes of other users need root.
        prolog: Folder in which a prolog writes ``SLURM_JOB_GPUS`` to a file named by the job.
        node: Only processes that Slurm started under this node name; all when empty.
        cluster: Only processes of the cluster of this name (two clusters may use the same numbers); all when empty.
    """
    jobs: dict[int, list[int]] = {}
    variables_of: dict[int, Mapping[str, str]] = {}
    environments = {pid: _environment(proc / str(pid)) for pid in _pids(proc)}
    owners = {pid: owner for pid, read in environments.items() if (owner := _job(proc / str(pid), read))}
    for pid, job in owners.items():
        variables = environments[pid]
        if not _belongs_here(variables, node, cluster):
            continue
        if variables.get("SLURM_JOB_ID") == str(job):
            variables_of.setdefault(job, variables)
        if owners.get(_parent(proc / str(pid))) != job:
            jobs.setdefault(job, []).append(pid)
    found = []
    for number, pids in sorted(jobs.items()):
        started = variables_of.get(number, {})
        gpus = _gpus(number, started, prolog)
        nodes = started.get("SLURM_JOB_NUM_NODES", "1")
        user, name = started.get("SLURM_JOB_USER", ""), started.get("SLURM_JOB_NAME", "")
        found.append(
            Placement(
                number,
                tuple(sorted(pids)),
                max(1, len(gpus)),
                gpus,
                int(nodes) if nodes.isdigit() else 1,
                f"{user}/{name}" if name else "",
                *_hosts(started, nodes),
            )
        )
    return tuple(found)


def job_of(pid: int, proc: Path = Path("/proc"), cluster: str = "") -> int:
    """The job of a living process; 0 where it has none, or one of another cluster than ``cluster``."""
    variables = _environment(proc / str(pid))
    return _job(proc / str(pid), variables) if _belongs_here(variables, "", cluster) else 0


def _hosts(variables: Mapping[str, str], nodes: str) -> tuple[tuple[str, ...], str]:
    """The nodes of a multi-node job, and this node's name; empty where Slurm does not list all the nodes."""
    hosts, host = expand_hosts(variables.get("SLURM_JOB_NODELIST", "")), variables.get("SLURMD_NODENAME", "")
    return (hosts, host) if nodes != "1" and str(len(hosts)) == nodes and host in hosts else ((), "")


def _belongs_here(variables: Mapping[str, str], node: str, cluster: str) -> bool:
    """Whether a process belongs to this node and cluster; a process that states neither does."""
    named = variables.get("SLURM_CLUSTER_NAME", cluster)
    return (not node or variables.get("SLURMD_NODENAME", node) == node) and (
        not cluster or named.lower() == cluster.lower()
    )


def _job(folder: Path, variables: Mapping[str, str]) -> int:
    """The job of a process; 0 where it has none."""
    try:
        found = _CGROUP.findall((folder / "cgroup").read_text())
    except OSError:  # gone, or a made-up /proc without cgroups
        found = []
    number = found[-1] if found else variables.get("SLURM_JOB_ID", "")
    return int(number) if number.isdigit() else 0


def _gpus(job: int, variables: Mapping[str, str], prolog: Path | None) -> tuple[int, ...]:
    if prolog is not None:
        try:
            return gpu_ids((prolog / str(job)).read_text())
        except OSError:  # the prolog wrote nothing for this job
            pass
    return gpu_ids(variables.get("SLURM_JOB_GPUS") or variables.get("CUDA_VISIBLE_DEVICES", ""))


def gpu_ids(text: str) -> tuple[int, ...]:
    """The board numbers in text such as ``0,2-3``; empty where it names boards otherwise (UUIDs)."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if match := _RANGE.fullmatch(part.strip()):
            first, last = int(match[1]), int(match[2] or match[1])
            numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def _pids(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]


def _environment(folder: Path) -> dict[str, str]:
    """The variables of a process that Slurm started; empty for others, and where they cannot be read."""
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
