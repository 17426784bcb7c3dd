"""Nodes of Slurm, and the pools of nodes that jobs compete for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from joulery.adapters.clusters.slurm_records import SlurmRecord
from joulery.adapters.clusters.tres import parse_gpus

FIELDS: tuple[tuple[str, int], ...] = (
    ("nodelist", 64), ("statelong", 32), ("gres", 160), ("gresused", 160), ("partitionname", 64), ("features_act", 160),
    ("cpusstate", 32), ("memory", 24), ("allocmem", 24), ("prioritytier", 12),
)  # fmt: skip
"""Columns of ``sinfo -N -O``, with their widths."""
_DOWN = ("down", "drain", "fail", "maint", "unk", "future", "inval", "boot", "reserved")
_DOWN_MARKS = "*$@^"
"""Not responding, in maintenance, about to reboot; a node put to sleep (``~``) is woken for a job and counts."""
_TOKEN = re.compile(r"[\w.:-]+")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node with GPUs.

    Attributes:
        name: Its name.
        state: Slurm's word for its state.
        gpus: Number of its GPUs.
        used: Number of GPUs that jobs hold.
        types: Types of its GPUs.
        partitions: Partitions it belongs to.
        features: Its active features.
        free_cpus: CPUs that no job holds; infinite where Slurm does not report them.
        free_memory_bytes: Memory that no job holds; infinite where Slurm does not report it.
        cpus: Number of its CPUs; infinite where Slurm does not report it.
    """

    name: str
    state: str
    gpus: int
    used: int
    types: frozenset[str]
    partitions: frozenset[str]
    features: frozenset[str]
    free_cpus: float = math.inf
    free_memory_bytes: float = math.inf
    cpus: float = math.inf

    @property
    def up(self) -> bool:
        """Whether jobs can start on the node."""
        return not (self.state.startswith(_DOWN) or self.state[-1:] in _DOWN_MARKS)

    @property
    def shape(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], int]:
        """Properties that jobs choose nodes by; nodes of one shape are interchangeable."""
        return tuple(sorted(self.partitions)), tuple(sorted(self.types)), tuple(sorted(self.features)), self.gpus

    def suits(self, record: SlurmRecord) -> bool:
        """Whether a job may run on the node, by partition, GPU type and constraint."""
        if not self.partitions & set(record.partition.split(",")):
            return False
        if record.gpu_type and record.gpu_type not in self.types:
            return False
        return satisfies(self.features, record.features)


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Parse the nodes with GPUs from ``sinfo -h -N -O`` with :data:`FIELDS`: one line for each node and partition."""
    nodes: dict[str, SlurmNode] = {}
    for cells in map(_cells, text.splitlines()):
        gres = parse_gpus(cells["gres"])
        name = cells["nodelist"]
        if not name or not gres.total:
            continue
        partitions = {cells["partitionname"]} - {""}
        if name in nodes:
            partitions |= nodes[name].partitions
        nodes[name] = SlurmNode(
            name,
            cells["statelong"],
            gres.total,
            min(gres.total, parse_gpus(cells["gresused"]).total),
            frozenset(kind for kind, _ in gres.by_type),
            frozenset(partitions),
            frozenset(set(cells["features_act"].split(",")) - {"", "(null)"}),
            _cpus(cells["cpusstate"], 1),
            _free_memory_bytes(cells["memory"], cells["allocmem"]),
            _cpus(cells["cpusstate"], 3),
        )
    return tuple(nodes.values())


def parse_tiers(text: str) -> dict[str, int]:
    """The PriorityTier of each partition for which the lines contain one."""
    rows = map(_cells, text.splitlines())
    return {row["partitionname"]: int(row["prioritytier"]) for row in rows if row["prioritytier"].isdigit()}


def _cells(line: str) -> dict[str, str]:
    """Cells of a line, by field."""
    cells, at = {}, 0
    for name, width in FIELDS:
        cells[name] = line[at : at + width].strip()
        at += width
    return cells


def _cpus(state: str, part: int) -> float:
    """The number of CPUs in one part of ``allocated/idle/other/total``; infinite where unknown."""
    parts = state.split("/")
    return float(parts[part]) if len(parts) == 4 and parts[part].isdigit() else math.inf


def _free_memory_bytes(memory: str, allocated: str) -> float:
    """The free memory in bytes, from the total and allocated MB; infinite where unknown."""
    both = memory.isdigit() and allocated.isdigit()
    return float(max(0, int(memory) - int(allocated)) << 20) if both else math.inf


def satisfies(features: frozenset[str], constraint: str) -> bool:
    """Whether a node's features satisfy ``--constraint``: ``a&b|c``, brackets and counts (``[x*2|y]``) read as choice.

    A constraint of another form counts as satisfied: Slurm decides.
    """
    if constraint in ("", "(null)"):
        return True
    choices = re.sub(r"\*\d+|[\[\]()]", "", constraint).split("|")
    return any(set(_TOKEN.findall(choice)) <= features for choice in choices)


def pools(nodes: Iterable[SlurmNode], jobs: Iterable[Sequence[SlurmRecord]]) -> dict[str, str]:
    """The pool of each node.

    Nodes of one shape belong to one pool, and so do all shapes on which one job may run: a job competes only with the
    other jobs of its pool. In a cluster with one pool, its name is ``""``.

    Args:
        nodes: The nodes.
        jobs: The records of each job: one, or one for each component.
    """
    shapes: dict[object, list[SlurmNode]] = {}
    for node in nodes:
        shapes.setdefault(node.shape, []).append(node)
    groups = [{shape} for shape in shapes]
    requests = {tuple(request_of(record) for record in records): records for records in jobs}
    for records in requests.values():
        reached = {shape for shape, (first, *_) in shapes.items() if any(first.suits(record) for record in records)}
        joined = [group for group in groups if group & reached]
        if len(joined) > 1:
            groups = [group for group in groups if not group & reached] + [set().union(*joined)]
    if len(groups) <= 1:
        return {node.name: "" for members in shapes.values() for node in members}
    return {
        node.name: min(other.name for shape in group for other in shapes[shape])
        for group in groups
        for shape in group
        for node in shapes[shape]
    }


def request_of(record: SlurmRecord) -> tuple[str, str, str]:
    """Properties of a job that decide which nodes it may run on."""
    return record.partition, record.gpu_type, record.features
