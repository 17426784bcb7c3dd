"""GPUs of a cluster node by node: the nodes that a job gets, and the nodes that sleep.

A job gets as few nodes as hold it: whole nodes, and for the rest the awake node with the least room that holds it, so
that nodes stay empty. It stays there until it stops, so free GPUs that are spread over several nodes may hold no job.
"""

from __future__ import annotations

import math


class NodePool:
    """The nodes of a cluster.

    Attributes:
        free: Free GPUs of each node.

    Args:
        nodes: How many.
        gpus: GPUs of each.
    """

    def __init__(self, nodes: int, gpus: int) -> None:
        self.free = [gpus] * nodes
        self._gpus = gpus
        self._idle_s = [0.0] * nodes
        self._asleep = [False] * nodes
        self._held: dict[int, list[tuple[int, int]]] = {}

    @property
    def awake(self) -> int:
        """Nodes that do not sleep."""
        return self._asleep.count(False)

    def fits(self, gpus: int) -> bool:
        """Whether free nodes can hold a job of so many GPUs."""
        return self._place(gpus) is not None

    def wakes(self, gpus: int) -> bool:
        """Whether a job of so many GPUs, which must fit, would wake a node."""
        return any(self._asleep[node] for node, _ in self._place(gpus) or ())

    def take(self, job: int, gpus: int) -> bool:
        """Give a job its nodes; it must fit. Returns whether one of them had to wake."""
        placed = self._place(gpus)
        assert placed is not None, f"no place for {gpus} GPUs"
        woken = any(self._asleep[node] for node, _ in placed)
        for node, count in placed:
            self.free[node] -= count
            self._asleep[node] = False
        self._held[job] = placed
        return woken

    def give(self, job: int, now_s: float) -> int:
        """Take a job's nodes back. Returns how many of them are idle now."""
        idle = 0
        for node, count in self._held.pop(job):
            self.free[node] += count
            if self.free[node] == self._gpus:
                self._idle_s[node] = now_s
                idle += 1
        return idle

    def sleep(self, now_s: float, after_s: float) -> int:
        """Suspend the nodes that have idled for ``after_s``. Returns how many."""
        found = [
            node
            for node, free in enumerate(self.free)
            if free == self._gpus and not self._asleep[node] and self._idle_s[node] + after_s <= now_s
        ]
        for node in found:
            self._asleep[node] = True
        return len(found)

    def _place(self, gpus: int) -> list[tuple[int, int]] | None:
        """Nodes for a job, and GPUs of each: the most recently idled first, sleeping ones last; None without room."""
        whole, rest = divmod(gpus, self._gpus)
        chosen: list[tuple[int, int]] = []
        if whole:
            empty = [node for node, free in enumerate(self.free) if free == self._gpus]
            if len(empty) < whole:
                return None
            empty.sort(key=lambda node: (self._asleep[node], -self._idle_s[node], node))
            chosen = [(node, self._gpus) for node in empty[:whole]]
        if rest:
            used = {node for node, _ in chosen}
            best, key = -1, (True, math.inf, math.inf, 0)
            for node, free in enumerate(self.free):
                if free >= rest and node not in used:
                    at = (self._asleep[node], free, -self._idle_s[node], node)
                    if at < key or best < 0:
                        best, key = node, at
            if best < 0:
                return None
            chosen.append((best, rest))
        return chosen
