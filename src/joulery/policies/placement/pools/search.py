"""The cheapest pool of GPUs, with a bound: branch and bound over how long instances wait for work.

Each box of waits and busy neighbours has a relaxation (:mod:`joulery.policies.placement.pools.master`) whose optimum is
a lower bound on every pool in the box. Its whole numbers are also a pool, which the closed form of
:mod:`joulery.perf.queues.pull_model` evaluates at once. The box with the least bound is split in two until the best
pool found is close to it.

The closed form is quick and a little off in the tails. So the best pools are then tried by a judge (the event
simulation, or a live trial); when the judge finds one less than 2 % below its latency limit, or above it, the next
search keeps that much more distance. Bounds are those of the first search, with the limits as they are, and hold within
the closed form.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from joulery.domain.errors import InfeasibleError
from joulery.domain.format import latency
from joulery.policies.placement.pools.master import Box, PoolMaster, full_box, most_gpus, service_s
from joulery.policies.placement.pools.pool import Pool, Pools, Used, cost_w, idle_shares_w
from joulery.policies.placement.pools.problem import Edges, PoolProblem, edges_of
from joulery.policies.serving.search.annealing import TrialMetrics

_WITHIN = 0.98
"""Part of its latency limit that a tried pool may use. A trial is one draw: over 40 others the quantile of a pool had a
standard deviation of 0.7 % of the limit (simulated), and this is three of them. Where no pool keeps the distance, one
within the limit will do."""
Judge = Callable[[int, Used, float], TrialMetrics]
"""Simulation of a service: its number, its instances and the idle watts that are its own."""


@dataclass(frozen=True, slots=True)
class PoolEffort:
    """Limits on the work of a search: counts rather than seconds, so that the same input gives the same plan.

    Attributes:
        boxes: Relaxations solved in a search, at most.
        gap_ratio: Relative gap between the best pool and the bound at which a search ends.
        polished: Pools improved by small changes at the end of a search.
        steps: Most changes to each of these pools.
        judged: Pools the judge tries after each search.
        rounds: Searches, each keeping more distance from the limits.
    """

    boxes: int = 120
    gap_ratio: float = 0.005
    polished: int = 4
    steps: int = 100
    judged: int = 12
    rounds: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class PoolPlan:
    """The best pool found, and how much better any could be.

    Attributes:
        pool: The pool.
        bound_w: Lower bound on the cost of any pool, in closed form.
        corrected_bound_w: The same bound with the closed form's latencies corrected by the judge's results.
        by_gpus: The best pool found for each number of GPUs, including the chosen one.
        boxes: Relaxations solved.
        trials: Pools the judge tried.
    """

    pool: Pool
    bound_w: float
    corrected_bound_w: float
    by_gpus: dict[int, Pool]
    boxes: int
    trials: int

    @property
    def gap_ratio(self) -> float:
        """Excess cost of the pool over the bound, as a ratio of its own cost; 0 or more."""
        return 1.0 - self.bound_w / self.pool.cost_w if self.pool.cost_w > 0 else 0.0

    @property
    def corrected_gap_ratio(self) -> float:
        """Excess cost of the pool over the corrected bound, as a ratio of its own cost; 0 or more."""
        return 1.0 - self.corrected_bound_w / self.pool.cost_w if self.pool.cost_w > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Result of one search: pools that keep every limit in closed form, cheapest first, and the bound."""

    pools: tuple[Pool, ...]
    bound_w: float
    boxes: int


def plan_pool(problem: PoolProblem, judge: Judge, effort: PoolEffort | None = None) -> PoolPlan:
    """The cheapest pool that keeps every limit, as far as the judge finds.

    GPU groups are planned one by one, and together only where there are too few GPUs for the separate plans.

    Args:
        problem: Input of the plan.
        judge: Tries a pool.
        effort: Limits on the work of the search.

    Raises:
        InfeasibleError: No pool keeps the limits; the error names the nearest pool, if there is one.
    """
    effort = effort or PoolEffort()
    if len(problem.services) == 1:
        return _planned(problem, judge, effort)
    if problem.colocate:
        return _shared(problem, judge, effort)
    alone = [
        _planned(replace(problem, services=(service,)), partial(_one, judge, number), effort)
        for number, service in enumerate(problem.services)
    ]
    together = _together(alone)
    for gpu, there in problem.available.items():
        if there is not None and sum(together.pool.of_type(problem, gpu).values()) > there:
            return _planned(problem, judge, effort)
    return together if together.pool.gpus <= most_gpus(problem) else _planned(problem, judge, effort)


def _shared(problem: PoolProblem, judge: Judge, effort: PoolEffort) -> PoolPlan:
    """Plan GPUs that services may share, from the best separate groups; with less effort for the many more choices."""
    less = replace(effort, boxes=effort.boxes // 10, polished=1, steps=4, judged=min(effort.judged, 6), rounds=1)
    try:
        apart = plan_pool(replace(problem, colocate=False), judge, effort).pool
    except InfeasibleError:
        return _planned(problem, judge, less)
    partitions: dict[tuple[int, int, int], int] = {}
    for (_, machine, partition), count in apart.partitions.items():
        partitions[0, machine, partition] = partitions.get((0, machine, partition), 0) + count
    return _planned(problem, judge, less, [replace(apart, partitions=partitions)])


def _one(judge: Judge, service: int, _: int, used: Used, idle_w: float) -> TrialMetrics:
    """Judge a service that was planned as a problem of its own, by its number in the whole problem."""
    return judge(service, used, idle_w)


def _together(plans: Sequence[PoolPlan]) -> PoolPlan:
    """Combine the plans of separate GPU groups into one; costs, bounds and counts add up."""
    pool = Pool(
        partitions={
            (group, *partition[1:]): n
            for group, plan in enumerate(plans)
            for partition, n in plan.pool.partitions.items()
        },
        used=tuple(used for plan in plans for used in plan.pool.used),
        metrics=tuple(metrics for plan in plans for metrics in plan.pool.metrics),
        cost_w=math.fsum(plan.pool.cost_w for plan in plans),
        judged=True,
    )
    return PoolPlan(
        pool,
        math.fsum(plan.bound_w for plan in plans),
        math.fsum(plan.corrected_bound_w for plan in plans),
        {pool.gpus: pool},
        sum(plan.boxes for plan in plans),
        sum(plan.trials for plan in plans),
    )


def _planned(problem: PoolProblem, judge: Judge, effort: PoolEffort, seeds: Sequence[Pool] = ()) -> PoolPlan:
    """Search, let the judge try the best pools, tighten the limits of services that were too slow, and search again."""
    edges = tuple(edges_of(service, problem.machines) for service in problem.services)
    tight = [1.0] * len(problem.services)
    seeds = [*seeds, *_at_full_clock(problem, effort)]
    found = _search(problem, edges, tight, effort, seeds)
    if not found.pools and math.isfinite(found.bound_w):
        accurate = _search(_accuracy_alone(problem), edges, tight, effort)
        enough = [pool for pool in accurate.pools if _accurate(problem, pool)]
        enough.sort(key=lambda pool: cost_w(problem, pool.metrics))
        found = _search(problem, edges, tight, effort, enough[: effort.judged])
    if not found.pools:
        raise infeasible(problem, effort)
    bound_w, trials, boxes = found.bound_w, 0, found.boxes
    passed = [pool for pool in (judged_pool(problem, seed, judge) for seed in seeds) if _kept(problem, pool)]
    failed: list[Pool] = []
    for number in range(effort.rounds):
        best_w = min((pool.cost_w for pool in passed), default=math.inf)
        tried = [judged_pool(problem, pool, judge) for pool in found.pools[: effort.judged] if pool.cost_w < best_w]
        trials += len(tried)
        passed += [pool for pool in tried if _kept(problem, pool)]
        failed += [pool for pool in tried if _late(problem, pool)]
        corrections = _corrections(problem, found.pools, tried)
        if number + 1 == effort.rounds or (tried and not _late(problem, tried[0])):
            break
        tight = [each * correction for each, correction in zip(tight, corrections, strict=True)]
        found = _search(problem, edges, tight, effort, found.pools[: effort.judged])
        boxes += found.boxes
    passed = passed or [pool for pool in failed if _kept(problem, pool, within=1.0)]
    if not passed:
        raise _too_late(problem, failed) if failed else infeasible(problem, effort)
    best = min(passed, key=lambda pool: (pool.cost_w, pool.used))
    by_gpus: dict[int, Pool] = {}
    for pool in sorted(passed, key=lambda pool: (pool.gpus, pool.cost_w, pool.used)):
        by_gpus.setdefault(pool.gpus, pool)
    return PoolPlan(
        best, min(bound_w, best.cost_w), min(max(bound_w, found.bound_w), best.cost_w), by_gpus, boxes, trials
    )


def _at_full_clock(problem: PoolProblem, effort: PoolEffort) -> list[Pool]:
    """Good pools with each GPU type at its first clock, as starts for lower clocks; none if there are no others."""
    first: dict[str, int] = {}
    for index, machine in enumerate(problem.machines):
        first.setdefault(machine.gpu, index)
    kept = list(first.values())
    if len(kept) == len(problem.machines):
        return []
    part = replace(problem, machines=tuple(problem.machines[index] for index in kept))
    edges = tuple(edges_of(service, part.machines) for service in part.services)
    found = _search(part, edges, [1.0] * len(edges), effort)
    return [
        replace(
            pool,
            partitions={(group, kept[at], partition): n for (group, at, partition), n in pool.partitions.items()},
            used=tuple(tuple((kept[at], piece, name) for at, piece, name in used) for used in pool.used),
        )
        for pool in found.pools[: effort.judged]
    ]


def _too_late(problem: PoolProblem, tried: Sequence[Pool]) -> InfeasibleError:
    """The error raised when every pool that is feasible in closed form failed its trial."""
    worst = [
        max(m.latency_s / s.limit_s for m, s in zip(pool.metrics, problem.services, strict=True)) for pool in tried
    ]
    pool = tried[worst.index(min(worst))]
    shown = [
        f"{s.name} {latency(m.latency_s)} of {latency(s.limit_s)} at {m.accuracy_ratio:.2%} accuracy"
        for m, s in zip(pool.metrics, problem.services, strict=True)
    ]
    return InfeasibleError(
        f"none of the {len(tried)} most promising pools kept its limits when tried; the nearest: {', '.join(shown)}",
        binding="latency",
        nearest={
            s.name: {"latency_s": m.latency_s, "accuracy_ratio": m.accuracy_ratio, "gpus": pool.gpus}
            for m, s in zip(pool.metrics, problem.services, strict=True)
        },
        hint="allow a longer latency or a greater loss of accuracy",
    )


def _corrections(problem: PoolProblem, predicted: Sequence[Pool], tried: Sequence[Pool]) -> list[float]:
    """Factor that tightens each service's latency limit: the mildest over the pools that were too slow, else 1."""
    found = []
    for at, service in enumerate(problem.services):
        ratios = [
            _WITHIN * before.metrics[at].latency_s / after.metrics[at].latency_s
            for before, after in zip(predicted, tried, strict=False)
            if after.metrics[at].latency_s > _WITHIN * service.limit_s
        ]
        found.append(min(max(ratios, default=1.0), 0.99) if ratios else 1.0)
    return found


def _kept(problem: PoolProblem, pool: Pool, *, within: float = _WITHIN) -> bool:
    return not _late(problem, pool, within) and _accurate(problem, pool)


def _late(problem: PoolProblem, pool: Pool, within: float = _WITHIN) -> bool:
    return any(m.latency_s > within * s.limit_s for m, s in zip(pool.metrics, problem.services, strict=True))


def _accuracy_alone(problem: PoolProblem) -> PoolProblem:
    """The problem without a minimum accuracy and with accuracy as its objective."""
    services = tuple(replace(one, minimum_accuracy_ratio=0.0, accuracy_price_j=1.0) for one in problem.services)
    return replace(problem, energy_weight=1e-6, services=services)


def infeasible(problem: PoolProblem, effort: PoolEffort) -> InfeasibleError:
    """The error raised when there is no pool, with the most accurate one that keeps the latency limits."""
    loose = _accuracy_alone(problem)
    edges = tuple(edges_of(service, problem.machines) for service in problem.services)
    found = _search(loose, edges, [1.0] * len(edges), effort)
    there = ", ".join(f"{'any number of' if n is None else n} {gpu}" for gpu, n in problem.available.items())
    if not found.pools:
        return InfeasibleError(
            f"no layout of {there} keeps the latency limits",
            binding="latency",
            hint="allow a longer latency, a lower rate, or more GPUs",
        )
    pool = found.pools[0]
    nearest = {
        service.name: {
            "accuracy_ratio": metrics.accuracy_ratio,
            "loss_ratio": 1.0 - metrics.accuracy_ratio / service.base_accuracy_ratio,
            "instances": [f"{variant} on {profile}" for _, profile, variant in used],
            "gpus": pool.gpus,
        }
        for service, metrics, used in zip(problem.services, pool.metrics, pool.used, strict=True)
    }
    short = [
        f"{service.name} reaches {metrics.accuracy_ratio:.2%} of the {service.minimum_accuracy_ratio:.2%} asked for"
        for service, metrics in zip(problem.services, pool.metrics, strict=True)
        if metrics.accuracy_ratio < service.minimum_accuracy_ratio
    ]
    return InfeasibleError(
        f"no layout of {there} is that accurate within the latency limits: {'; '.join(short) or 'none passed a trial'}",
        binding="minimum accuracy",
        nearest=nearest,
        hint="allow a greater loss of accuracy, a longer latency, or more GPUs",
    )


def _search(
    problem: PoolProblem, edges: Sequence[Edges], tight: Sequence[float], effort: PoolEffort, seeds: Sequence[Pool] = ()
) -> _Found:
    """Search by branch and bound over boxes, starting from known pools."""
    master, pools = PoolMaster(problem, edges), Pools(problem, edges, tight)
    for seed in seeds:
        pools.add(seed.state(edges))
    root = tuple(full_box(problem, *each) for each in zip(problem.services, edges, strict=True))
    heap: list[tuple[float, int, tuple[Box, ...]]] = [(0.0, 0, root)]
    closed, solved = math.inf, 0
    while heap and solved < effort.boxes and heap[0][0] < pools.best * (1 - effort.gap_ratio):
        bound_w, _, boxes = heapq.heappop(heap)
        solved += 1
        found = master.solve(boxes, tight)
        if found is None or found.cost_w >= pools.best:
            continue
        bound_w = max(bound_w, found.cost_w)
        pools.add((found.partitions, found.counts))
        halves = _halves(problem, edges, boxes)
        if halves is None:
            closed = min(closed, bound_w)
            continue
        for number, half in enumerate(halves):
            heapq.heappush(heap, (bound_w, 2 * solved + number, half))
    pools.polish(effort.polished, effort.steps)
    return _Found(pools.kept(), min(pools.best, closed, *(entry[0] for entry in heap[:1])), solved)


def _halves(
    problem: PoolProblem, edges: Sequence[Edges], boxes: tuple[Box, ...]
) -> tuple[tuple[Box, ...], tuple[Box, ...]] | None:
    """Split the widest side of the boxes in two; None when all are narrow."""
    widest, chosen = 0.004, None
    for number, (service, mine, box) in enumerate(zip(problem.services, edges, boxes, strict=True)):
        typical = float(service_s(service, mine, 1.0).mean())
        (low, high), (few, many) = box.wait_s, box.busy
        by_wait = math.log((high + typical) / (low + typical))
        by_busy = (many - few) * service.costs.contention
        if by_wait > max(widest, by_busy):
            middle = math.sqrt((low + typical) * (high + typical)) - typical
            widest, chosen = by_wait, (number, Box((low, middle), box.busy), Box((middle, high), box.busy))
        elif by_busy > widest:
            middle = (few + many) / 2
            widest, chosen = by_busy, (number, Box(box.wait_s, (few, middle)), Box(box.wait_s, (middle, many)))
    if chosen is None:
        return None
    at, left, right = chosen
    return (*boxes[:at], left, *boxes[at + 1 :]), (*boxes[:at], right, *boxes[at + 1 :])


def judged_pool(problem: PoolProblem, pool: Pool, judge: Judge) -> Pool:
    """The pool with the judge's metrics of each service."""
    idle = idle_shares_w(problem, pool.partitions, pool.used)
    metrics = tuple(judge(number, used, idle[number]) for number, used in enumerate(pool.used))
    return replace(pool, metrics=metrics, cost_w=cost_w(problem, metrics), judged=True)


def _accurate(problem: PoolProblem, pool: Pool) -> bool:
    return all(
        metrics.accuracy_ratio >= service.minimum_accuracy_ratio - 1e-9
        for service, metrics in zip(problem.services, pool.metrics, strict=True)
    )
