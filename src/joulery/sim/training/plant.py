"""A simulated training cluster: jobs start, grow, shrink, are preempted and restarted; power and carbon add up.

GPUs are counted, or placed node by node (:mod:`~joulery.sim.training.placement`); either way a job of n GPUs runs as
fast as the power table states for n. A job that is started
again or resized first restarts: it holds its GPUs and takes power but makes no progress for ``restart_s``. Energy
and grams are integrated exactly between events, over an intensity that is constant within each hour.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.decisions import Decision, Step
from joulery.domain.energy.carbon import JOULES_PER_KWH
from joulery.domain.errors import DataError
from joulery.domain.ports import Policy
from joulery.perf.power.training_power import NodePower, PowerTable
from joulery.policies.training.allocation import Allocation, ClusterView, start_waiting
from joulery.policies.training.service_order import ENDED_JOBS
from joulery.sim.core.driver import Driver
from joulery.sim.core.hourly_intensity import Intensity
from joulery.sim.core.kernel import Kernel, Rank
from joulery.sim.training.job_accounts import JobAccounts
from joulery.sim.training.node_groups import NodeGroup
from joulery.sim.training.placement import NodePool


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """A workload of training jobs, in order of submission.

    Attributes:
        submit_s: Non-decreasing, float64[n].
        work_s: Duration on one GPU, float64[n], > 0.
        kind: Row of the power table, int64[n].
        requested: GPUs that the owner requested, int64[n], at least 1.
        max_gpus: Most GPUs it may use, int64[n].
        deadline_s: When its owner needs it at the latest, float64[n]; infinite for no deadline, None where no job has
            one.
        groups: The groups of nodes it may run on, the first group's bit lowest, int64[n]; None where all are allowed.
        min_gpus: Fewest GPUs it may use, int64[n]; 1 each when None.
    """

    submit_s: FloatArray
    work_s: FloatArray
    kind: IntArray
    requested: IntArray
    max_gpus: IntArray
    deadline_s: FloatArray | None = None
    groups: IntArray | None = None
    min_gpus: IntArray | None = None

    def __post_init__(self) -> None:
        if bool(np.any(np.diff(self.submit_s) < 0)):
            raise DataError("jobs must be in order of submission", hint="sort the trace by submit_s")
        if not bool(np.all(self.work_s > 0) and np.all(np.isfinite(self.work_s))):
            at = int(np.argmax(~(self.work_s > 0)))
            raise DataError(f"job {at} has a duration of {self.work_s[at]} s, expected more than 0", row=at + 2)

    def __len__(self) -> int:
        return len(self.submit_s)


Watch = Callable[[float, ClusterView, Step[Any]], None]
"""Called at every round with the time, the policy's view and its decision."""
_AHEAD_H = 48
"""Number of hours ahead for which schedulers know or assume the intensity."""


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """True properties of the cluster that the jobs run on.

    Attributes:
        nodes: How many nodes.
        node: Their power.
        table: Speed and power of each kind of job.
        carbon: Intensity over the whole run, simulated time 0 being its first edge; held at its last value after it.
        window_s: Length of the window of ``mean_g_per_kwh``, aligned to the start.
        restart_s: Checkpoint and restart.
        sleep_after_s: How long a node idles before it is suspended; infinity keeps all nodes awake.
        wake_s: How long a suspended node takes to wake; its GPUs do nothing meanwhile.
        full_table: Speed and power of jobs that start without the limits behind ``table``; None where it has none.
        belief: The schedulers' forecast of intensity; None for the truth. The present hour is known.
        silent: No job reports progress.
        learning_s: How long jobs run at full power before they are limited, s: the first of a kind on so many GPUs, and
            those after it; each float64[kinds], infinite where the kind has no limit. None where limits are known at
            once.
        placed: Whether a job needs nodes with room for it; otherwise any free GPUs suffice.
        groups: Its groups of nodes where they differ; ``nodes`` and ``node`` are then ignored, and ``table`` has the
            rows of one group after those of another.
    """

    nodes: int
    node: NodePower
    table: PowerTable
    carbon: Intensity
    window_s: float = 86_400.0
    restart_s: float = 120.0
    sleep_after_s: float = math.inf
    wake_s: float = 60.0
    belief: Intensity | None = None
    full_table: PowerTable | None = None
    silent: bool = False
    learning_s: tuple[FloatArray, FloatArray] | None = None
    placed: bool = False
    groups: tuple[NodeGroup, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(group.gpus for group in self.groups) if self.groups else self.nodes * self.node.gpus


class Plant:
    """A cluster during a simulation. State is arrays by job; running jobs are integrated lazily, at their events."""

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
        self.cluster, self.jobs, self.kernel, self.tag = cluster, jobs, Kernel() if kernel is None else kernel, tag
        n = len(jobs)
        self.row, self.others = jobs.kind.copy(), ()
        self.tables = (cluster.table, cluster.table if cluster.full_table is None else cluster.full_table)
        self.full_power, self.lifted = False, np.zeros(n, np.bool_)
        self.searched: set[tuple[int, int]] = set()
        self.accounts = JobAccounts(jobs.work_s)
        self.finish_s = np.full(n, np.nan)
        self.version = [0] * n
        self.active: dict[int, None] = {}
        self.waiting: list[tuple[int, int]] = []
        self.newcomer_gpus: dict[int, int] = {}
        self.gpus = self.free = cluster.gpus
        self.passive = self.as_requested = False
        self.hold_slack_s, self.hold_gpus, self.round_s = math.inf, 0, math.inf if period_s is None else period_s
        self.slowdown = np.array([job.time_ratio for job in cluster.table.classes])
        self.awake = cluster.nodes
        self.idle_nodes: deque[float] = deque([0.0] * cluster.nodes)
        self.pool = self._nodes()
        self.unplaced_gpus, self.fragmented_gpu_s = 0, 0.0
        self.choose_start_s = start_s
        self.power_w, self.peak_w = 0.0, 0.0
        self.idle_j = self.idle_kg = self.idle_since_s = self.idle_since_integral = 0.0
        self.integral = (0.0, 0.0)  # of the intensity, with its time
        self.preemptions = self.rescales = self.most_gpus = 0
        self.unfinished = n
        self.ended_gpu_s = np.zeros(n)  # service of the ended jobs, in the order of their ends
        self.hash = hashlib.blake2b(digest_size=16)
        self.kernel.on(tag + "done", Rank.COMPLETION, self._done)
        self.kernel.on(tag + "sleep", Rank.COMPLETION, self._sleep)
        self.kernel.on(tag + "limit", Rank.COMPLETION, self._limit)
        self.kernel.on(tag + "submit", Rank.ARRIVAL, self._submit)
        self.kernel.on(tag + "release", Rank.ARRIVAL, self._release)
        self.kernel.feed(jobs.submit_s, tag + "submit")
        if cluster.sleep_after_s < math.inf:
            self.kernel.at(cluster.sleep_after_s, self.tag + "sleep")
        self.power_timeline: list[tuple[float, float]] | None = None if watch is None else [(0.0, self.idle_w())]
        self.driver = Driver(
            self.kernel, f"{tag}scheduler", policy, self._view, self._act, period_s=period_s, watch=watch
        )

    row: IntArray
    """Row of the power table of each job."""
    others: tuple[Plant, ...]
    """The other pools of the same cluster: idle energy ends with the last job of all, and power adds up."""

    def _nodes(self) -> NodePool | None:
        """The nodes, where jobs are placed on them."""
        return NodePool(self.cluster.nodes, self.cluster.node.gpus) if self.cluster.placed else None

    @property
    def ended(self) -> bool:
        """Whether the last job of the cluster has ended."""
        return not self.unfinished and not any(other.unfinished for other in self.others)

    def settle(self, now_s: float) -> None:
        """Count idle power up to the end of the cluster's last job."""
        self._idle(now_s)

    def _submit(self, now_s: float, job: int) -> None:
        if self.choose_start_s is None:
            self._release(now_s, job)
        else:
            start_s = self.choose_start_s(now_s, float(self.jobs.work_s[job]))
            self.kernel.at(max(now_s, start_s), self.tag + "release", job)

    def _release(self, now_s: float, job: int) -> None:
        self.active[job] = None
        if (slack_s := self._slack_s(now_s, job)) > -math.inf and self.hold_gpus > 0:
            self.hold_gpus -= 1
            if slack_s > self.hold_slack_s:
                self.driver.poke()
                return
        otherwise = int(self.jobs.requested[job]) if self.as_requested else 1
        want = self.newcomer_gpus.get(int(self.jobs.kind[job]), otherwise)
        least = 1 if self.jobs.min_gpus is None else int(self.jobs.min_gpus[job])
        self.waiting.append((job, min(max(want, least), int(self.jobs.max_gpus[job]))))
        self._start_waiting(now_s)
        self.driver.poke()

    def _slack_s(self, now_s: float, job: int) -> float:
        """Time that a new job may wait and still meet its deadline on one GPU; negative infinity without one."""
        if self.jobs.deadline_s is None or self.jobs.deadline_s[job] == math.inf:
            return -math.inf
        need_s = float(self.jobs.work_s[job] * self.slowdown[self.jobs.kind[job]])
        return float(self.jobs.deadline_s[job]) - now_s - need_s

    def _done(self, now_s: float, payload: tuple[int, int]) -> None:
        job, version = payload
        if version != self.version[job]:
            return
        self._stop(now_s, job)
        self.finish_s[job] = now_s
        self.ended_gpu_s[len(self.jobs) - self.unfinished] = self.accounts.attained_s[job]
        del self.active[job]
        self.unfinished -= 1
        self._start_waiting(now_s)
        self.driver.poke()

    def _start_waiting(self, now_s: float) -> None:
        if self.cluster.placed:
            self._place_waiting(now_s)
            return
        if not (self.passive and self.free and self.waiting):
            return
        started, self.waiting = start_waiting(self.waiting, self.free)
        for job, gpus in started:
            self._start(now_s, job, gpus)

    def _place_waiting(self, now_s: float) -> None:
        """Start the waiting jobs that fit on free nodes, in order; count the GPUs too scattered for the rest."""
        if self.ended:  # idle energy ends with the last job
            return
        self._idle(now_s)
        left = []
        for job, gpus in self.waiting:
            if self.passive and gpus <= self.free and self._fits(job, gpus):
                self._start(now_s, job, gpus)
            else:
                left.append((job, gpus))
        self.waiting = left
        self.unplaced_gpus = self._scattered(left) if self.passive else 0

    def _fits(self, job: int, gpus: int) -> bool:
        """Whether free nodes can hold a job; always true where GPUs are counted."""
        return self.pool is None or self.pool.fits(gpus)

    def _scattered(self, waiting: list[tuple[int, int]]) -> int:
        """Free GPUs that would suffice for a waiting job if they were on fewer nodes."""
        return self.free if any(gpus <= self.free for _, gpus in waiting) else 0

    def _start(self, now_s: float, job: int, gpus: int) -> None:
        """Give a job GPUs; one that has run before restarts first."""
        self._idle(now_s)
        accounts = self.accounts
        restart_s = self.cluster.restart_s if accounts.executed_s[job] > 0 else 0.0
        if self._occupy(job, gpus):
            restart_s = max(restart_s, self.cluster.wake_s)
        accounts.start(job, now_s, self._integral(now_s), gpus, now_s + restart_s)
        self.most_gpus = max(self.most_gpus, self.gpus - self.free)
        learning_s = self._learning_s(job)
        self.lifted[job] = self.full_power or learning_s > 0
        table = self.tables[int(self.lifted[job])]
        self.power_w += accounts.set_rates(job, table, self.row.item(job))
        self._note_power(now_s)
        self.version[job] += 1
        finish_s = now_s + restart_s + accounts.work_left_s(job)
        self.kernel.at(finish_s, self.tag + "done", (job, self.version[job]))
        if learning_s > 0 and now_s + restart_s + learning_s < finish_s:
            self.kernel.at(now_s + restart_s + learning_s, self.tag + "limit", (job, self.version[job]))
        self.hash.update(f"{now_s:.6f},{job},{gpus};".encode())

    def _learning_s(self, job: int) -> float:
        """Time that a job that starts now runs at full power; 0 where its limit is known."""
        learning_s = self.cluster.learning_s
        if learning_s is None:
            return 0.0
        row = self.row.item(job)
        return float(learning_s[(row, self.accounts.gpus.item(job)) in self.searched][row])

    def _limit(self, now_s: float, payload: tuple[int, int]) -> None:
        """Put a job under the power limit that it has learned."""
        job, version = payload
        if version != self.version[job]:
            return
        self.searched.add((self.row.item(job), self.accounts.gpus.item(job)))
        self.lifted[job] = False
        self._account(now_s, job)
        full_w = self.accounts.job_w(job)
        self.power_w += self.accounts.set_rates(job, self.tables[0], self.row.item(job)) - full_w
        self._note_power(now_s)
        self.version[job] += 1
        self.kernel.at(now_s + self.accounts.work_left_s(job), self.tag + "done", (job, self.version[job]))
        self.hash.update(f"{now_s:.6f},{job},limit;".encode())

    def _stop(self, now_s: float, job: int) -> None:
        """Take a job's GPUs away, its account brought up to date."""
        self._idle(now_s)
        self._account(now_s, job)
        gpus = self.accounts.gpus.item(job)
        self.power_w -= self.accounts.job_w(job)
        self.accounts.gpus[job] = 0
        self._free_gpus(now_s, job, gpus)
        self._note_power(now_s)
        self.version[job] += 1
        self.hash.update(f"{now_s:.6f},{job},0;".encode())

    def _account(self, now_s: float, job: int) -> None:
        """Bring the account of a running job up to date."""
        self.accounts.update(job, now_s, self._integral(now_s))

    def _account_all(self, now_s: float, jobs: IntArray) -> None:
        """Bring the accounts of running jobs up to date."""
        self.accounts.update_all(jobs, now_s, self._integral(now_s))

    def _integral(self, now_s: float) -> float:
        """Integral of the intensity up to now; cached, because all jobs of a round need the same one."""
        if now_s != self.integral[0]:
            self.integral = (now_s, self.cluster.carbon.integral(now_s))
        return self.integral[1]

    def _idle(self, now_s: float) -> None:
        elapsed_s = now_s - self.idle_since_s
        if elapsed_s > 0:
            power_w, integral = self.idle_w(), self._integral(now_s)
            self.idle_j += power_w * elapsed_s
            self.idle_kg += power_w * (integral - self.idle_since_integral) / JOULES_PER_KWH / 1e3
            self.fragmented_gpu_s += self.unplaced_gpus * elapsed_s
            self.idle_since_s, self.idle_since_integral = now_s, integral

    def _note_power(self, now_s: float) -> None:
        """Record a change of power in the peak and the timeline."""
        power_w = self.power_w + self.idle_w()
        for other in self.others:
            power_w += other.power_w + other.idle_w()
        self.peak_w = max(self.peak_w, power_w)
        if self.power_timeline is not None:
            self.power_timeline.append((now_s, power_w))

    def idle_w(self) -> float:
        """Idle power: idle GPUs of awake nodes with their share of the node, and suspended nodes."""
        node, asleep = self.cluster.node, self.cluster.nodes - self.awake
        return (self.free - asleep * node.gpus) * node.idle_share_w + asleep * node.asleep_w

    def _needed(self) -> int:
        return -((self.free - self.gpus) // self.cluster.node.gpus)

    def _occupy(self, job: int, gpus: int) -> bool:
        """Take GPUs, the last idled nodes first; True when a suspended node has to wake for them."""
        if self.pool is not None:
            woken_node = self.pool.take(job, gpus)
            self.free, self.awake = self.free - gpus, self.pool.awake
            return woken_node
        before = self._needed()
        self.free -= gpus
        grown = self._needed() - before
        for _ in range(min(grown, len(self.idle_nodes))):
            self.idle_nodes.pop()
        woken = self._needed() + len(self.idle_nodes) - self.awake
        self.awake += max(0, woken)
        return woken > 0

    def _free_gpus(self, now_s: float, job: int, gpus: int) -> None:
        if self.pool is not None:
            self.free += gpus
            if self.pool.give(job, now_s) and self.cluster.sleep_after_s < math.inf:
                self.kernel.at(now_s + self.cluster.sleep_after_s, self.tag + "sleep")
            return
        before = self._needed()
        self.free += gpus
        for _ in range(before - self._needed()):
            self.idle_nodes.append(now_s)
            if self.cluster.sleep_after_s < math.inf:
                self.kernel.at(now_s + self.cluster.sleep_after_s, self.tag + "sleep")

    def _sleep(self, now_s: float, _payload: object) -> None:
        """Suspend the nodes that have idled long enough; after the last job nothing is counted any more."""
        if self.ended:
            return
        self._idle(now_s)
        if self.pool is not None:
            if self.pool.sleep(now_s, self.cluster.sleep_after_s):
                self.awake = self.pool.awake
                self._note_power(now_s)
            return
        while self.idle_nodes and self.idle_nodes[0] + self.cluster.sleep_after_s <= now_s:
            self.idle_nodes.popleft()
            self.awake -= 1
            self._note_power(now_s)

    def _view(self, now_s: float) -> ClusterView:
        job = np.fromiter(self.active, np.int64, len(self.active))
        accounts, ended = self.accounts, len(self.jobs) - self.unfinished
        gpus = accounts.gpus[job]
        self._account_all(now_s, job[gpus > 0])
        kind, carbon, table = self.jobs.kind[job], self.cluster.carbon, self.cluster.table
        start_s = math.floor(now_s / self.cluster.window_s) * self.cluster.window_s
        ahead = carbon if self.cluster.belief is None else self.cluster.belief
        deadlines, measured = self.jobs.deadline_s, accounts.measured(job, now_s)
        return ClusterView(
            now_s=now_s,
            gpus=self.gpus,
            g_per_kwh=carbon.at(now_s),
            mean_g_per_kwh=ahead.mean(start_s, start_s + self.cluster.window_s),
            restart_s=self.cluster.restart_s,
            job=job,
            submit_s=self.jobs.submit_s[job],
            running=gpus,
            max_gpus=self.jobs.max_gpus[job],
            requested=self.jobs.requested[job],
            kind=kind,
            executed_s=accounts.executed_s[job],
            attained_gpu_s=accounts.attained_s[job],
            remaining_s=np.full(len(job), np.nan) if self.cluster.silent else accounts.left_s[job],
            footprint_kg=accounts.job_kg[job],
            degradation=np.where(measured, table.degradation[self.row[job], gpus], np.nan),
            gpu_w=accounts.gpu_w[job],
            deadline_s=None if deadlines is None else deadlines[job],
            slowdown=None if deadlines is None else self.slowdown[kind],
            ahead_g_per_kwh=None if deadlines is None else _hours(now_s, ahead),
            expected_g_per_kwh=ahead.at(now_s),
            min_gpus=None if self.jobs.min_gpus is None else self.jobs.min_gpus[job],
            round_s=self.round_s,
            wake_s=self.cluster.wake_s if self.cluster.sleep_after_s < math.inf else 0.0,
            ended_gpu_s=self.ended_gpu_s[max(0, ended - ENDED_JOBS) : ended],
            job_w=np.where(measured & ~self.lifted[job], table.job_w[self.row[job], gpus], np.nan),
        )

    def _act(self, now_s: float, decision: Decision) -> None:
        allocation = decision.value
        assert isinstance(allocation, Allocation)
        run, self.full_power = allocation.run, allocation.full_power
        had: dict[int, int] = {}
        active = np.fromiter(self.active, np.int64, len(self.active))
        held = self.accounts.gpus[active]
        for job, have in zip(active[held > 0].tolist(), held[held > 0].tolist(), strict=True):
            want = run.get(job, 0)
            if want != have:
                self._stop(now_s, job)
                self.preemptions += want == 0
                self.rescales += want != 0
                had[job] = have
        unplaced = []
        for job, gpus in run.items():
            if self.accounts.gpus[job] == 0:
                if self._fits(job, gpus):
                    self._start(now_s, job, gpus)
                elif had.get(job) and self._fits(job, had[job]):
                    self._start(now_s, job, had[job])  # no place for its new size
                else:
                    unplaced.append((job, gpus))
        self.waiting = [*unplaced, *allocation.waiting]
        self.newcomer_gpus = dict(allocation.newcomer_gpus)
        self.passive, self.as_requested = allocation.passive, allocation.newcomers_as_requested
        self.hold_slack_s, self.hold_gpus = allocation.hold_slack_s, allocation.hold_gpus
        if self.cluster.placed:
            self._start_waiting(now_s)
        assert self.free >= 0, f"{-self.free} GPUs too many given out at {now_s} s"


def _hours(now_s: float, expected: Intensity) -> FloatArray:
    """Mean expected intensity of each of the hours ahead; the first begins now."""
    edges = expected.integrals(now_s + 3600.0 * np.arange(_AHEAD_H + 1, dtype=np.float64))
    return np.asarray(np.diff(edges) / 3600.0, np.float64)
