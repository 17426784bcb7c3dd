"""The column optimiser as a scheme of a study: the pools that are best at some intensity of the grid.

The cost of a pool is linear in the intensity, so the best pools over all intensities form the lower envelope of lines.
Few plans find it: one at each end, then one where two neighbours cross, as long as that finds a better one.
"""

from __future__ import annotations

from collections.abc import Sequence

from joulery.domain.errors import ConfigError
from joulery.policies.placement.pools.problem import Machine, PoolProblem, PoolService, prices
from joulery.policies.placement.pools.search import PoolEffort, plan_pool
from joulery.policies.serving.objective import Objective
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.sim.core.streams import Streams
from joulery.sim.placement.pool_trial import judge
from joulery.sim.serving.trial_table import Bench

EFFORT = PoolEffort(boxes=60, polished=3, judged=8, rounds=3)
"""Effort of each plan of a study: less than for a single plan, because a study plans at several intensities."""
_DEEPEST = 3

Found = tuple[TrialMetrics, float]
"""Metrics of a pool, and its joules a request with every GPU powered."""


def envelope(
    bench: Bench, objective: Objective, intensities: Sequence[float], least_accuracy_ratio: float
) -> tuple[Found, ...]:
    """The best pools at the intensities of a grid, at least one.

    Raises:
        ConfigError: Only a table of the service is known, not what a request costs.
        InfeasibleError: No pool keeps the limits.
    """
    if bench.costs is None:
        raise ConfigError(
            f"scheme columns needs what a request of {bench.table.service} costs, not only a table of trials",
            hint="put profile.csv beside model.json, or leave out --profile",
        )
    weights = sorted({prices(objective, g_per_kwh)[0] for g_per_kwh in (min(intensities), max(intensities))})
    if least_accuracy_ratio > 0:
        del weights[1:]  # carbon alone counts: the best pool is the same at every intensity
    ends = [_planned(bench, objective, weight, least_accuracy_ratio) for weight in weights]
    if len(ends) == 1:
        return (ends[0],)
    worth = prices(objective, 1.0)[1]
    found = [ends[0], *_between(bench, objective, worth, ends[0], ends[1], _DEEPEST), ends[1]]
    return tuple(dict.fromkeys(found))


def _between(bench: Bench, objective: Objective, worth: float, left: Found, right: Found, depth: int) -> list[Found]:
    """The pools of the envelope between two of its pools: ``left`` is best where energy counts less."""
    spared = left[0].energy_j - right[0].energy_j
    lost = left[0].accuracy_ratio - right[0].accuracy_ratio
    if depth == 0 or spared <= 1e-6 or lost <= 1e-9:
        return []
    crossing = worth * lost / spared
    middle = _planned(bench, objective, crossing, 0.0)
    if _cost(middle, crossing, worth) >= _cost(left, crossing, worth) * (1 - 1e-3):
        return []
    before = _between(bench, objective, worth, left, middle, depth - 1)
    return [*before, middle, *_between(bench, objective, worth, middle, right, depth - 1)]


def _cost(found: Found, weight: float, worth: float) -> float:
    return weight * found[0].energy_j - worth * found[0].accuracy_ratio + worth


def _planned(bench: Bench, objective: Objective, weight: float, least_accuracy_ratio: float) -> Found:
    """The best pool at one weight of energy."""
    problem = pool_problem(bench, objective, weight, least_accuracy_ratio)
    trial = judge(problem.services, problem.machines, Streams(0))
    pool = plan_pool(problem, trial, EFFORT).pool
    (metrics,) = pool.metrics
    off_w = (bench.pool_gpus - pool.gpus) * problem.machines[0].idle_w
    return metrics, metrics.energy_j + off_w * bench.interarrival_s


def pool_problem(bench: Bench, objective: Objective, weight: float, least_accuracy_ratio: float) -> PoolProblem:
    """The pool of a service of a study: as many GPUs as the baseline has, each with a layout of its own."""
    assert bench.costs is not None
    machine = Machine(bench.menu.gpu, bench.menu, bench.costs.idle_w, bench.pool_gpus)
    service = PoolService(
        name=bench.table.service,
        costs=bench.costs,
        rate_rps=1.0 / bench.interarrival_s,
        limit_s=bench.table.base_latency_s,
        base_accuracy_ratio=bench.table.base_accuracy_ratio,
        minimum_accuracy_ratio=least_accuracy_ratio,
        accuracy_price_j=0.0 if least_accuracy_ratio > 0 else prices(objective, 1.0)[1],
    )
    return PoolProblem((machine,), (service,), energy_weight=weight)
