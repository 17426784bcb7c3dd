"""Free slots of a cluster by node, with the CPUs and the memory beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from joulery.domain.cluster import ClusterJob, ClusterNode, ClusterSnapshot


@dataclass(frozen=True, slots=True)
class _Room:
    """What a node has free."""

    slots: int
    cpus: float
    memory_bytes: float

    def holds(self, job: ClusterJob) -> int:
        """Slots of the job that fit here."""
        count = self.slots
        if job.cpus_per_slot > 0 and self.cpus < math.inf:
            count = min(count, int(self.cpus / job.cpus_per_slot + _ROUNDING))
        if job.memory_per_slot_bytes > 0 and self.memory_bytes < math.inf:
            count = min(count, int(self.memory_bytes / job.memory_per_slot_bytes + _ROUNDING))
        return max(0, count)

    def less(self, job: ClusterJob, slots: int) -> _Room:
        """The rest without so many slots of the job; more with a negative number."""
        return _Room(
            self.slots - slots,
            self.cpus - slots * job.cpus_per_slot,
            self.memory_bytes - slots * job.memory_per_slot_bytes,
        )


class FreeSlots:
    """Free slots by node, to try and to take.

    A job of ``spread`` false needs as few nodes as hold its slots, each with as many of them; the components of a
    heterogeneous job need nodes of their own. A job runs only on the nodes of its pool that suit it
    (:attr:`ClusterJob.runs_on`).
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._size: dict[str, int] = {}
        self._free: dict[str, dict[str, _Room]] = {}
        for node in snapshot.nodes or (ClusterNode("", snapshot.slots, snapshot.free),):
            room = _Room(node.free, node.free_cpus, node.free_memory_bytes)
            self._free.setdefault(node.pool, {})[node.name] = room
            self._size[node.pool] = max(self._size.get(node.pool, 1), node.slots)

    def copy(self) -> FreeSlots:
        """The same slots, to try with."""
        made = object.__new__(FreeSlots)
        made._size, made._free = self._size, {pool: dict(nodes) for pool, nodes in self._free.items()}
        return made

    def fits(self, job: ClusterJob, slots: int) -> bool:
        """Whether the job could start on so many slots."""
        return self._place(job, slots) is not None

    def take(self, job: ClusterJob, slots: int) -> bool:
        """Take the slots if the job could start on them."""
        placed = self._place(job, slots)
        for node, count in placed or ():
            self._free[job.pool][node] = self._free[job.pool][node].less(job, count)
        return placed is not None

    def reserve(self, job: ClusterJob, slots: int) -> None:
        """Take as many of the slots as there are, so that no other job does."""
        nodes = self._suited(job)
        for node in sorted(nodes, key=lambda node: -nodes[node].slots):
            count = max(0, min(slots, nodes[node].slots))
            self._free[job.pool][node], slots = nodes[node].less(job, count), slots - count

    def narrower(self, job: ClusterJob, slots: int) -> Iterator[int]:
        """Fewer slots that the job may use, the most first: those of whole nodes of its pool, or of a part of one."""
        size = self._size.get(job.pool, 1)
        return (fewer for fewer in range(slots - 1, job.min_slots - 1, -1) if fewer < size or fewer % size == 0)

    def give(self, job: ClusterJob) -> None:
        """Add the slots that a job holds, but for those on nodes that are not up."""
        nodes = self._free.setdefault(job.pool, {})
        names = job.nodes or list(nodes)[:1]
        for at, name in enumerate(names):
            if name in nodes:
                nodes[name] = nodes[name].less(job, -(job.slots // len(names) + (at < job.slots % len(names))))

    def _suited(self, job: ClusterJob) -> dict[str, _Room]:
        """The nodes that the job may run on."""
        nodes = self._free.get(job.pool, {})
        return nodes if job.runs_on is None else {name: room for name, room in nodes.items() if name in job.runs_on}

    def _place(self, job: ClusterJob, slots: int) -> list[tuple[str, int]] | None:
        nodes = self._suited(job)
        if not job.parts:
            return self._on_nodes(job, slots, nodes)
        placed: list[tuple[str, int]] = []
        for part in sorted(job.parts, reverse=True):
            used = {name for name, _ in placed}
            others = {name: room for name, room in nodes.items() if name not in used}
            chosen = self._on_nodes(replace(job, spread=False, parts=()), part, others)
            if chosen is None:
                return None
            placed += chosen
        return placed

    def _on_nodes(self, job: ClusterJob, slots: int, nodes: dict[str, _Room]) -> list[tuple[str, int]] | None:
        free = {name: room.holds(job) for name, room in nodes.items()}
        tight = sorted((name for name in free if free[name] > 0), key=lambda name: nodes[name].slots)
        if job.spread:
            placed, left = [], slots
            for name in reversed(tight):
                placed.append((name, min(left, free[name])))
                left -= placed[-1][1]
                if left == 0:
                    return placed
            return None
        count = -(-slots // self._size.get(job.pool, 1))
        while slots % count:
            count += 1
        chosen = [name for name in tight if free[name] >= slots // count][:count]
        return [(name, slots // count) for name in chosen] if len(chosen) == count else None


class LimitGrowth:
    """How far the starts that are under way grow what each limit counts.

    Slurm judges one job against what runs. A second job that the same limit counts may exceed it together with the
    first, unless the jobs stopped for it are counted there, too.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}

    def count(self, job: ClusterJob, slots: int) -> None:
        """Count slots of a job that is to start; negative for one that stops."""
        for limit in job.limits:
            self._slots[limit] = self._slots.get(limit, 0) + slots

    def allows(self, job: ClusterJob, victims: list[ClusterJob]) -> bool:
        """Whether the verdict on this job holds beside the starts under way, with the slots of the victims given up."""
        return all(
            self._slots.get(limit, 0) <= sum(victim.slots for victim in victims if limit in victim.limits)
            for limit in job.limits
        )


_ROUNDING = 1e-9
