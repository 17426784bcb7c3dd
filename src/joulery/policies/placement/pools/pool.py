"""A pool of GPUs, its metrics in closed form, and the pools found in a search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray, IntArray
from joulery.perf.queues.pull_model import predict
from joulery.policies.placement.pools.local_search import Changes, State
from joulery.policies.placement.pools.master import most_gpus
from joulery.policies.placement.pools.problem import Edges, PoolProblem, PoolService, nearby_ratio
from joulery.policies.serving.search.annealing import TrialMetrics

Used = tuple[tuple[int, str, str], ...]
"""The instances of a service: machine, slice profile and variant of each."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A pool of GPUs and its metrics.

    Attributes:
        partitions: GPUs by group (a service's group, or the shared pool), machine and partition.
        used: The instances of each service.
        metrics: Metrics of each service: from the judge where ``judged``, else in closed form.
        cost_w: Watts, and the price of lost accuracy in watts, with the weights of the problem.
        judged: Whether the judge has tried it.
    """

    partitions: dict[tuple[int, int, int], int]
    used: tuple[Used, ...]
    metrics: tuple[TrialMetrics, ...]
    cost_w: float
    judged: bool = False

    @property
    def gpus(self) -> int:
        """GPUs that are on."""
        return sum(self.partitions.values())

    def state(self, edges: Sequence[Edges]) -> State:
        """The counts of partitions and of instances."""
        counts = []
        for mine, used in zip(edges, self.used, strict=True):
            many = Counter(used)
            keys = zip(mine.machine, mine.profile, mine.variant, strict=True)
            counts.append(np.array([many[key] for key in keys], np.int64))
        return self.partitions, tuple(counts)

    def of_type(self, problem: PoolProblem, gpu: str) -> dict[tuple[int, int, int], int]:
        """The partitions of one GPU type, with their counts."""
        return {
            partition: count
            for partition, count in self.partitions.items()
            if problem.machines[partition[1]].gpu == gpu
        }


class Pools:
    """The pools found in a search, evaluated in closed form.

    Attributes:
        best: Cost of the cheapest pool that keeps every limit.
    """

    def __init__(self, problem: PoolProblem, edges: Sequence[Edges], tight: Sequence[float]) -> None:
        self.best = math.inf
        self._problem, self._edges, self._tight = problem, tuple(edges), tuple(tight)
        self._changes = Changes(problem, edges)
        self._known: dict[bytes, tuple[Pool, State, float]] = {}

    def add(self, state: State) -> None:
        """Evaluate a pool; if it breaks a limit, also evaluate the pools with another variant on one slice."""
        if self._new([state]) and self._known[_key(state)][2] > 0:
            self._new(list(self._changes.of(state, partitions=False)))

    def polish(self, descents: int, steps: int = 100) -> None:
        """Improve the best pools by small changes until none helps, or for ``steps`` steps."""
        starts = sorted(self._known.values(), key=lambda entry: (entry[2], entry[0].cost_w))[:descents]
        for pool, state, excess in starts:
            at, rank = state, (excess, pool.cost_w)
            for _ in range(steps):
                near = list(self._changes.of(at))
                self._new(near)
                step = min(near, key=lambda other: self._rank(other), default=at)
                if self._rank(step) >= rank:
                    break
                at, rank = step, self._rank(step)

    def kept(self) -> tuple[Pool, ...]:
        """Pools that keep every limit, cheapest first."""
        good = (pool for pool, _, excess in self._known.values() if excess == 0)
        return tuple(sorted(good, key=lambda pool: (pool.cost_w, pool.used)))

    def _rank(self, state: State) -> tuple[float, float]:
        pool, _, excess = self._known[_key(state)]
        return excess, pool.cost_w

    def _new(self, states: Sequence[State]) -> bool:
        """Evaluate the pools that are not known yet; return whether there were any."""
        fresh = {key: state for state in states if (key := _key(state)) not in self._known}
        for (key, state), pool in zip(fresh.items(), self._in_closed_form(list(fresh.values())), strict=True):
            excess = self._excess(pool)
            self._known[key] = pool, state, excess
            if excess == 0:
                self.best = min(self.best, pool.cost_w)
        return bool(fresh)

    def _excess(self, pool: Pool) -> float:
        """Excess over limits, relative and summed; 0 when all are kept."""
        over = 0.0
        for metrics, service, tight in zip(pool.metrics, self._problem.services, self._tight, strict=True):
            over += max(0.0, min(metrics.latency_s, 1e6) / (tight * service.limit_s) - 1.0)
            over += 10 * max(0.0, service.minimum_accuracy_ratio - metrics.accuracy_ratio - 1e-9)
        for gpu, there in self._problem.available.items():
            mine = sum(n for (_, index, _), n in pool.partitions.items() if self._problem.machines[index].gpu == gpu)
            over += max(0, mine - there) if there is not None else 0
        return over + max(0, pool.gpus - most_gpus(self._problem))

    def _in_closed_form(self, states: Sequence[State]) -> list[Pool]:
        if not states:
            return []
        used = [tuple(used_of(mine, n) for mine, n in zip(self._edges, counts, strict=True)) for _, counts in states]
        idle = [
            idle_shares_w(self._problem, partitions, each) for (partitions, _), each in zip(states, used, strict=True)
        ]
        gpus = [gpus_of(self._problem, partitions) for partitions, _ in states]
        columns = [
            predicted(
                service,
                mine,
                np.array([counts[at] for _, counts in states]),
                np.array(idle)[:, at],
                [each[at] for each in gpus],
            )
            for at, (service, mine) in enumerate(zip(self._problem.services, self._edges, strict=True))
        ]
        rows = [tuple(column[row] for column in columns) for row in range(len(states))]
        return [
            Pool(partitions, used[row], rows[row], cost_w(self._problem, rows[row]))
            for row, (partitions, _) in enumerate(states)
        ]


def _key(state: State) -> bytes:
    partitions, counts = state
    return repr(sorted(partitions.items())).encode() + b"".join(each.astype(np.int64).tobytes() for each in counts)


def gpus_of(problem: PoolProblem, partitions: Mapping[tuple[int, int, int], int]) -> tuple[int, ...]:
    """Number of GPUs that each service's instances are spread over: those of its group, or all if services share."""
    if problem.colocate:
        return (sum(partitions.values()),) * len(problem.services)
    return tuple(sum(n for (group, *_), n in partitions.items() if group == at) for at in range(len(problem.services)))


def predicted(
    service: PoolService, edges: Edges, counts: IntArray, idle_w: FloatArray, gpus: Sequence[int]
) -> list[TrialMetrics]:
    """Predicted metrics of a service with each row of instances, in closed form; without instances latency is infinite.

    Args:
        service: The service.
        edges: The instances that the service can have.
        counts: Instances of each edge, int64[rows, edges].
        idle_w: Idle power it pays for, float64[rows].
        gpus: GPUs that the instances are spread over, by row.
    """
    costs, one = service.costs, np.ones(len(counts))
    many = counts.sum(axis=1)
    none: BoolArray = many == 0
    near = np.array([nearby_ratio(*pair, costs.gpus) for pair in zip(gpus, many.tolist(), strict=True)])
    found = predict(
        np.where(none[:, None], 1.0, counts),
        edges.host_s,
        edges.gpu_s,
        costs.contention * near,
        costs.jitter_s * one,
        costs.size_cv * one,
        service.rate_rps * one,
        quantile=service.quantile,
    )
    accuracy, joules = found.share @ edges.accuracy_ratio, found.share @ edges.joules + idle_w / service.rate_rps
    latency = np.where(none, math.inf, found.latency_s)
    rows = zip(accuracy.tolist(), latency.tolist(), joules.tolist(), strict=True)
    return [TrialMetrics(*row) for row in rows]


def cost_w(problem: PoolProblem, metrics: Sequence[TrialMetrics]) -> float:
    """Value of the problem's objective."""
    return math.fsum(
        service.rate_rps
        * (
            problem.energy_weight * each.energy_j
            + service.accuracy_price_j * max(service.base_accuracy_ratio - each.accuracy_ratio, 0.0)
        )
        for service, each in zip(problem.services, metrics, strict=True)
    )


def idle_shares_w(
    problem: PoolProblem, partitions: Mapping[tuple[int, int, int], int], used: Sequence[Used]
) -> tuple[float, ...]:
    """Idle power that each service pays for: its group's; of shared GPUs, by compute slices on each machine."""
    shares = [0.0] * len(used)
    if not problem.colocate:
        for (group, index, _), count in partitions.items():
            shares[group] += count * problem.machines[index].idle_w
        return tuple(shares)
    for index, machine in enumerate(problem.machines):
        watts = machine.idle_w * sum(count for (_, at, _), count in partitions.items() if at == index)
        slices = [sum(machine.menu[p].compute_slices for at, p, _ in mine if at == index) for mine in used]
        for number, mine in enumerate(slices):
            shares[number] += watts * mine / max(sum(slices), 1)
    return tuple(shares)


def used_of(edges: Edges, counts: IntArray) -> Used:
    """The instances behind counts of edges."""
    return tuple(
        (edges.machine[edge], edges.profile[edge], edges.variant[edge])
        for edge in range(len(edges))
        for _ in range(int(counts[edge]))
    )
