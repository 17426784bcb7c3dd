"""The nodes on which a Slurm job may run, by its request and by reservations of others now or before its end."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from joulery.adapters.clusters.slurm_nodes import SlurmNode, request_of
from joulery.adapters.clusters.slurm_records import SlurmRecord, expand_hosts
from joulery.domain.cluster import ClusterJob, JobState

_ELSEWHERE = "(other nodes)"
"""The pool of jobs that run on nodes outside the scheduled partitions."""
_FIELD = re.compile(r"(\w+)=(\S*)")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slurm's reservation of whole nodes for some users.

    Attributes:
        name: Its name.
        nodes: The nodes, each as a whole.
        start_s, end_s: Start and end, Unix seconds; NaN where Slurm's text is not understood.
    """

    name: str
    nodes: frozenset[str]
    start_s: float
    end_s: float

    def bars(self, now_s: float, end_s: float) -> bool:
        """Whether a job outside the reservation may not run on its nodes from ``now_s`` until ``end_s``."""
        return self.start_s < end_s and now_s < self.end_s


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Parse the reservations of whole nodes from ``scontrol -o show reservation``.

    Reservations of single cores, and those that jobs join automatically (``MAGNETIC``), are left out: they bar no job
    from the rest of a node.
    """
    found = []
    for line in text.splitlines():
        fields: dict[str, str] = {}
        for name, value in _FIELD.findall(line):
            fields.setdefault(name, value)
        if "ReservationName" not in fields or "CoreIDs" in fields or "MAGNETIC" in fields.get("Flags", ""):
            continue
        nodes = fields.get("Nodes", "(null)")
        if nodes != "(null)":
            times = (_stamp(fields.get(name, "")) for name in ("StartTime", "EndTime"))
            found.append(Reservation(fields["ReservationName"], frozenset(expand_hosts(nodes)), *times))
    return tuple(found)


def _stamp(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return math.nan


class Reach:
    """Map of the nodes on which jobs may run.

    Args:
        nodes: The nodes with GPUs.
        pool_by_node: The pool of each node.
        reservations: Slurm's reservations.
        now_s: The current time, Unix seconds.
    """

    def __init__(
        self,
        nodes: Sequence[SlurmNode],
        pool_by_node: Mapping[str, str],
        reservations: Sequence[Reservation] = (),
        now_s: float = 0.0,
    ) -> None:
        self._nodes, self._pool_by_node = {node.name: node for node in nodes}, pool_by_node
        self._reservations, self._now_s = reservations, now_s
        self.up = tuple(node for node in nodes if node.up and node.name not in self._reserved())
        """The nodes that are up, without those reserved now."""
        self._up = frozenset(node.name for node in self.up)
        self._names: dict[tuple[str, str, str], frozenset[str]] = {}
        self._pools: dict[str, frozenset[str]] = {}
        for name, pool in pool_by_node.items():
            self._pools[pool] = self._pools.get(pool, frozenset()) | {name}

    def placed(self, job: ClusterJob, records: Sequence[SlurmRecord]) -> ClusterJob:
        """The job with its pool: the pool of the nodes it runs on, else of the nodes it may run on.

        A job on nodes that are draining or reserved is in the pool of other nodes: its end frees no slot of a pool.
        """
        if records[0].reservation and not job.exempt:
            job = replace(job, exempt=f"in the reservation {records[0].reservation}: Slurm places it")
        pool = next((self._pool_by_node[name] for name in job.nodes if name in self._up), None)
        if pool is None and job.nodes:
            return replace(job, pool=_ELSEWHERE)
        each = [self._suitable_nodes(record) for record in records]
        names = frozenset().union(*each)
        if not all(each) and not job.exempt and job.state is JobState.WAITING:
            return replace(job, exempt="no node has its partition, GPU type and features")
        if pool is None:
            pool = next((self._pool_by_node[name] for name in sorted(names)), "")
        open_names = frozenset().union(*map(self._open, records, each))
        if len(records) == 1 and records[0].whole_nodes:
            job = self._whole_nodes(job, records[0], names)
        return replace(job, pool=pool, runs_on=None if open_names >= self._pools.get(pool, open_names) else open_names)

    def _whole_nodes(self, job: ClusterJob, record: SlurmRecord, names: frozenset[str]) -> ClusterJob:
        """Give a job that shares its nodes with no other all GPUs and CPUs of these nodes."""
        nodes = [self._nodes[name] for name in job.nodes or names if name in self._nodes]
        if not nodes:
            return job
        largest = max(node.gpus for node in nodes)
        slots = sum(node.gpus for node in nodes) if job.nodes else largest * max(1, record.nodes)
        cpus = max(node.cpus for node in nodes) / largest
        return replace(
            job, slots=slots if job.slots else 0, shape=slots, min_slots=slots, max_slots=slots, spread=False,
            cpus_per_slot=cpus if cpus < math.inf else job.cpus_per_slot,
            memory_per_slot_bytes=job.memory_per_slot_bytes * job.shape / slots,
        )  # fmt: skip

    def _reserved(self) -> frozenset[str]:
        """The nodes that are reserved now, and so are not available to jobs outside the reservation."""
        now_s = self._now_s
        barred = (one.nodes for one in self._reservations if one.bars(now_s, math.nextafter(now_s, math.inf)))
        return frozenset().union(*barred)

    def _open(self, record: SlurmRecord, names: frozenset[str]) -> frozenset[str]:
        """The nodes among ``names`` on which a job might start now."""
        required, excluded = expand_hosts(record.required_nodes), expand_hosts(record.excluded_nodes)
        if len(required) >= record.nodes:
            names = names & frozenset(required) if required else names
        limit_min = record.least_min or record.limit_min
        end_s = self._now_s + 60.0 * limit_min if limit_min else math.inf
        barred = (one.nodes for one in self._reservations if one.bars(self._now_s, end_s))
        return names - frozenset(excluded).union(*barred)

    def _suitable_nodes(self, record: SlurmRecord) -> frozenset[str]:
        request = request_of(record)
        if request not in self._names:
            self._names[request] = frozenset(name for name, node in self._nodes.items() if node.suits(record))
        return self._names[request]
