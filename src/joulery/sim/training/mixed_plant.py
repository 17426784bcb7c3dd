"""A training pool of unlike nodes: GPU types of different power and speed, nodes of different sizes.

A job runs on nodes of one group at a time. It takes the first group, in the cluster's order, that has room on awake
nodes, else the first that has room, as Slurm takes nodes by weight and wakes nodes last. A job that is stopped and
started again may move to another group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from joulery.domain.arrays import IntArray
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.ports import Policy
from joulery.policies.training.allocation import ClusterView
from joulery.sim.core.kernel import Kernel
from joulery.sim.training.node_groups import members
from joulery.sim.training.placement import NodePool
from joulery.sim.training.plant import Cluster, Jobs, Plant, Watch


class MixedPlant(Plant):
    """A pool of several groups of nodes while it runs.

    Attributes:
        group_j, group_kg: Energy and carbon of jobs on each group, float64[groups].
        group_idle_j, group_idle_kg: The same of GPUs and nodes without a job there.
        group_gpu_s: GPU-seconds that jobs held there.

    Args:
        cluster: Its groups, and a power table with the rows of one group after those of another.
        jobs: Their groups are those of this cluster; their kinds are rows of the first group that they may run on.
        policy, period_s, start_s, watch, kernel, tag: As for :class:`~joulery.sim.training.plant.Plant`.
    """

    def __init__(
        self,
        cluster: Cluster,
        jobs: Jobs,
        policy: Policy[Any, ClusterView],
        period_s: float | None,
        start_s: Callable[[float, float], float] | None,
        watch: Watch | None = None,
        kernel: Kernel | None = None,
        tag: str = "",
    ) -> None:
        groups = cluster.groups
        self.nodes = [NodePool(group.nodes, group.node.gpus) for group in groups]
        self.free_gpus = [group.gpus for group in groups]
        self.awake_nodes = [group.nodes for group in groups]
        self.kinds = len(cluster.table.classes) // len(groups)
        every = (1 << len(groups)) - 1
        asked = [every] * len(jobs) if jobs.groups is None else jobs.groups.tolist()
        known = {bits: members(bits) for bits in set(asked)}
        self.allowed = [known[bits] for bits in asked]
        self.group_of = [-1] * len(jobs)
        self.group_j, self.group_kg, self.group_gpu_s = (np.zeros(len(groups)) for _ in range(3))
        self.group_idle_j, self.group_idle_kg = np.zeros(len(groups)), np.zeros(len(groups))
        super().__init__(cluster, jobs, policy, period_s, start_s, watch, kernel, tag)
        self.awake = sum(self.awake_nodes)

    def _nodes(self) -> NodePool | None:
        return None

    def _fits(self, job: int, gpus: int) -> bool:
        return self._group_for(job, gpus) >= 0

    def _group_for(self, job: int, gpus: int) -> int:
        """The group that a job takes; -1 where none has room."""
        found = -1
        for at in self.allowed[job]:
            if self.free_gpus[at] < gpus or not self.nodes[at].fits(gpus):
                continue
            if not self.nodes[at].wakes(gpus):
                return at
            found = at if found < 0 else found
        return found

    def _scattered(self, waiting: list[tuple[int, int]]) -> int:
        """Free GPUs of the groups whose free GPUs would suffice for a waiting job if they were on fewer nodes."""
        short = {at for job, gpus in waiting for at in self.allowed[job] if gpus <= self.free_gpus[at]}
        return sum(self.free_gpus[at] for at in short)

    def _occupy(self, job: int, gpus: int) -> bool:
        at = self._group_for(job, gpus)
        assert at >= 0, f"no place for {gpus} GPUs"
        woken = self.nodes[at].take(job, gpus)
        self.group_of[job], self.row[job] = at, at * self.kinds + int(self.jobs.kind[job]) % self.kinds
        self.free_gpus[at] -= gpus
        self.free -= gpus
        self._count_awake(at)
        return woken

    def _free_gpus(self, now_s: float, job: int, gpus: int) -> None:
        at = self.group_of[job]
        self.group_of[job] = -1
        self.free_gpus[at] += gpus
        self.free += gpus
        if self.nodes[at].give(job, now_s) and self.cluster.sleep_after_s < math.inf:
            self.kernel.at(now_s + self.cluster.sleep_after_s, self.tag + "sleep")

    def _sleep(self, now_s: float, _payload: object) -> None:
        if self.ended:
            return
        self._idle(now_s)
        fallen = [at for at, pool in enumerate(self.nodes) if pool.sleep(now_s, self.cluster.sleep_after_s)]
        for at in fallen:
            self._count_awake(at)
        if fallen:
            self._note_power(now_s)

    def _count_awake(self, at: int) -> None:
        self.awake_nodes[at] = self.nodes[at].awake
        self.awake = sum(self.awake_nodes)

    def _group_idle_w(self, at: int) -> float:
        group = self.cluster.groups[at]
        asleep = group.nodes - self.awake_nodes[at]
        return (self.free_gpus[at] - asleep * group.node.gpus) * group.node.idle_share_w + asleep * group.node.asleep_w

    def idle_w(self) -> float:
        """Power of GPUs and nodes without a job, over all groups, W."""
        return sum(self._group_idle_w(at) for at in range(len(self.nodes)))

    def _idle(self, now_s: float) -> None:
        elapsed_s = now_s - self.idle_since_s
        if elapsed_s > 0:
            watts = np.array([self._group_idle_w(at) for at in range(len(self.nodes))])
            self.group_idle_j += watts * elapsed_s
            self.group_idle_kg += watts * (self._integral(now_s) - self.idle_since_integral) / JOULES_PER_KWH / 1e3
        super()._idle(now_s)

    def _account(self, now_s: float, job: int) -> None:
        self._account_all(now_s, np.array([job]))

    def _account_all(self, now_s: float, jobs: IntArray) -> None:
        sums = self.accounts.job_j, self.accounts.job_kg, self.accounts.attained_s
        before = [column[jobs] for column in sums]
        super()._account_all(now_s, jobs)
        at = [self.group_of[job] for job in jobs.tolist()]
        for total, column, had in zip((self.group_j, self.group_kg, self.group_gpu_s), sums, before, strict=True):
            np.add.at(total, at, column[jobs] - had)
