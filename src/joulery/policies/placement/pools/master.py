"""The relaxation behind the bound: counts of MIG partitions and instances, and flows of requests, solved by HiGHS.

Whole numbers count the GPUs of each machine with each partition, and the instances of each variant on slices of each
kind. Flows are the requests a second that each kind of instance answers. Instances that pull from one queue all wait
equally long for work, ``w``: an instance with service time ``t`` answers ``1 / (w + t)`` requests a second. The wait
``w`` depends on the solution, and so do service times, through the number of busy neighbours. A :class:`Box` limits
both to a range. Every row below holds for every pool inside the box, so the optimum is a bound. It becomes exact as
boxes shrink; see :mod:`joulery.policies.placement.pools.search`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError
from joulery.policies.placement.master import SolveStatus, add_row, make_whole, new_model, run
from joulery.policies.placement.pools.problem import Edges, PoolProblem, PoolService, nearby_ratio

_WIDEST_POOL = 64
"""Number of GPUs assumed where neither the GPU type nor the pool limits it."""


@dataclass(frozen=True, slots=True)
class Box:
    """Ranges that a service's pool lies in.

    Attributes:
        wait_s: Least and greatest time an instance waits for work.
        busy: Least and greatest mean number of busy instances.
    """

    wait_s: tuple[float, float]
    busy: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The optimum of one relaxation.

    Attributes:
        cost_w: Lower bound on the cost of any pool inside the boxes, W.
        partitions: GPUs by group, machine and partition: ``{(group, machine, partition): count}``.
        counts: Instances of each edge, int64[edges], for each service.
    """

    cost_w: float
    partitions: dict[tuple[int, int, int], int]
    counts: tuple[IntArray, ...]


def service_s(service: PoolService, edges: Edges, busy: float) -> FloatArray:
    """Mean service time of each edge while ``busy`` other instances run on the same host."""
    return np.asarray(edges.host_s * (1.0 + service.costs.contention * max(busy, 0.0)) + edges.gpu_s, np.float64)


def full_box(problem: PoolProblem, service: PoolService, edges: Edges) -> Box:
    """The box that contains every pool."""
    slots = most_gpus(problem) * max(max(map(len, machine.menu.partitions)) for machine in problem.machines)
    busy = min(float(slots), service.rate_rps * float(service_s(service, edges, slots).max()))
    return Box((0.0, slots / service.rate_rps), (0.0, busy))


def least_nearby(problem: PoolProblem, service: PoolService) -> float:
    """The least part of an instance's neighbours that are on its own host, over all pools (one instance a GPU)."""
    return min(nearby_ratio(gpus, gpus, service.costs.gpus) for gpus in range(1, most_gpus(problem) + 1))


def most_gpus(problem: PoolProblem) -> int:
    """The most GPUs that a pool may have in all."""
    counts = problem.available.values()
    there = sum(count for count in counts if count is not None) if None not in counts else _WIDEST_POOL
    return min(there, problem.most_gpus) if problem.most_gpus is not None else there


class PoolMaster:
    """Builds and solves the relaxation of one problem."""

    def __init__(self, problem: PoolProblem, edges: Sequence[Edges]) -> None:
        self._problem, self._edges = problem, tuple(edges)
        groups = 1 if problem.colocate else len(problem.services)
        self._partitions = [
            (group, index, number)
            for group in range(groups)
            for index, machine in enumerate(problem.machines)
            for number in range(len(machine.menu.multisets))
        ]
        self._at: list[int] = []
        column = len(self._partitions)
        for mine in self._edges:
            self._at.append(column)
            column += 2 * len(mine)
        self._columns = column

    def solve(self, boxes: Sequence[Box], tight: Sequence[float], gap_ratio: float = 1e-4) -> Relaxed | None:
        """The cheapest pool inside the boxes; None when there is none.

        Args:
            boxes: Box of each service.
            tight: Factor on each service's latency limit; 1 for a bound of the problem as it is.
            gap_ratio: Relative gap at which HiGHS may stop; the bound it proved is returned.
        """
        model = new_model(gap_ratio=gap_ratio)
        most = float(most_gpus(self._problem))
        for _, index, _ in self._partitions:
            idle_w = self._problem.machines[index].idle_w
            model.addCol(self._problem.energy_weight * idle_w, 0.0, most, 0, [], [])
        for service, edges in zip(self._problem.services, self._edges, strict=True):
            _add_service_columns(model, self._problem, service, edges, most)
        make_whole(model, self._whole_columns())
        self._add_slices(model)
        self._add_counts(model, most)
        for number, service in enumerate(self._problem.services):
            near = least_nearby(self._problem, service)
            _add_flows(model, service, self._edges[number], boxes[number], tight[number], self._at[number], near)
        outcome = run(model)
        if outcome is SolveStatus.OPEN:
            raise DataError("the solver ended without a solution or a proof that there is none")
        return None if outcome is SolveStatus.INFEASIBLE else self._read(model)

    def _whole_columns(self) -> list[int]:
        found = list(range(len(self._partitions)))
        for start, edges in zip(self._at, self._edges, strict=True):
            found += range(start, start + len(edges))
        return found

    def _add_slices(self, model: Any) -> None:
        """Require one instance on every slice of a partition: of the group's service, or of any if services share."""
        colocate = self._problem.colocate
        for group in range(1 if colocate else len(self._edges)):
            owners = range(len(self._edges)) if colocate else (group,)
            for index, machine in enumerate(self._problem.machines):
                for place, profile in enumerate(machine.menu.profiles):
                    columns, values = [], []
                    for column, (of, machine_at, number) in enumerate(self._partitions):
                        count = machine.menu.counts(machine.menu.multisets[number])[place] if machine_at == index else 0
                        if of == group and count:
                            columns.append(column)
                            values.append(float(count))
                    for owner in owners:
                        edges = self._edges[owner]
                        for edge in range(len(edges)):
                            if edges.machine[edge] == index and edges.profile[edge] == profile.name:
                                columns.append(self._at[owner] + edge)
                                values.append(-1.0)
                    add_row(model, 0.0, 0.0, columns, values)

    def _add_counts(self, model: Any, most: float) -> None:
        for gpu, there in self._problem.available.items():
            if there is not None:
                mine = [
                    c for c, (_, index, _) in enumerate(self._partitions) if self._problem.machines[index].gpu == gpu
                ]
                add_row(model, -math.inf, float(there), mine, [1.0] * len(mine))
        add_row(model, -math.inf, most, list(range(len(self._partitions))), [1.0] * len(self._partitions))

    def _read(self, model: Any) -> Relaxed:
        values = np.array(model.getSolution().col_value)
        partitions = {
            partition: round(value)
            for partition, value in zip(self._partitions, values.tolist(), strict=False)
            if value > 0.5
        }
        counts = tuple(
            np.rint(values[start : start + len(edges)]).astype(np.int64)
            for start, edges in zip(self._at, self._edges, strict=True)
        )
        return Relaxed(float(model.getInfo().mip_dual_bound), partitions, counts)


def _add_service_columns(model: Any, problem: PoolProblem, service: PoolService, edges: Edges, most: float) -> None:
    """Add a service's instances (free: their GPU is paid for), then flows: joules and the price of lost accuracy."""
    slots = most * max(max(map(len, machine.menu.partitions)) for machine in problem.machines)
    for _ in range(len(edges)):
        model.addCol(0.0, 0.0, slots, 0, [], [])
    lost = np.maximum(service.base_accuracy_ratio - edges.accuracy_ratio, 0.0)
    worth = problem.energy_weight * edges.joules + service.accuracy_price_j * lost
    for price in worth.tolist():
        model.addCol(price, 0.0, service.rate_rps, 0, [], [])


def _add_flows(model: Any, service: PoolService, edges: Edges, box: Box, tight: float, start: int, near: float) -> None:
    """Add the constraints of the demand, the accuracy, the latency and the box on a service's instances and flows."""
    least_s, most_s = (service_s(service, edges, busy) for busy in (near * (box.busy[0] - 1.0), box.busy[1]))
    (idle_from, idle_to), count = box.wait_s, len(edges)
    instances, flows = list(range(start, start + count)), list(range(start + count, start + 2 * count))
    add_row(model, service.rate_rps, service.rate_rps, flows, [1.0] * count)
    for edge in range(count):
        pair = [instances[edge], flows[edge]]
        add_row(model, -math.inf, 0.0, pair, [-1.0 / (idle_from + float(least_s[edge])), 1.0])
        add_row(model, 0.0, math.inf, pair, [-1.0 / (idle_to + float(most_s[edge])), 1.0])
    # Little's law: the mean number of busy instances is what flows in times how long it stays.
    add_row(model, -math.inf, box.busy[1], flows, least_s.tolist())
    add_row(model, box.busy[0], math.inf, flows, most_s.tolist())
    if service.minimum_accuracy_ratio > 0:
        least = service.minimum_accuracy_ratio * service.rate_rps
        add_row(model, least, math.inf, flows, edges.accuracy_ratio.tolist())
    late = late_ratio(service, edges, box, tight * service.limit_s, least_s)
    add_row(model, -math.inf, (1.0 - service.quantile) * service.rate_rps, flows, late.tolist())


def late_ratio(service: PoolService, edges: Edges, box: Box, limit_s: float, least_s: FloatArray) -> FloatArray:
    """The least share of an edge's requests that come too late inside a box.

    A request is late when its service alone takes too long, or when it waits first and both together do. How many wait
    grows with the utilisation and falls with the number of instances; inside a box neither is better than its best end.
    """
    from scipy.special import ndtr

    costs = service.costs
    spread = np.sqrt(costs.jitter_s**2 + (costs.size_cv * edges.gpu_s) ** 2)
    slow = ndtr(-(limit_s - least_s) / np.maximum(spread, 1e-9))
    busy_ratio = min(float((least_s / (box.wait_s[1] + least_s)).min()), 0.999)
    servers = math.ceil(service.rate_rps * (box.wait_s[1] + float(service_s(service, edges, box.busy[1]).max())))
    load, blocked = busy_ratio * servers, 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
        if blocked < 1e-12:
            break
    waits = blocked / (1.0 - busy_ratio * (1.0 - blocked))
    pace = 2.0 * service.rate_rps * (1.0 / busy_ratio - 1.0)
    waited = np.exp(-pace * np.maximum(limit_s - least_s, 0.0))
    return np.asarray((1.0 - waits) * slow + waits * np.maximum(waited, slow), np.float64)
