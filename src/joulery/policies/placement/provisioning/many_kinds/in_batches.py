"""Plans for many different services in batches: full GPUs are kept, the rest is planned again with the next batch.

Column generation finds nearly the cheapest plan of a batch. Services on GPUs that are not full return to the pool, so
room is wasted once at the end instead of once a batch. No bound is proven.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.provisioning.column_generation import cost_of
from joulery.policies.placement.provisioning.gpu_shares import Placed
from joulery.policies.placement.provisioning.packing import Problem

BATCH = 90
"""Services planned at once."""
_FULL_RATIO = 0.97
"""Mean fullness from which GPUs that share services with one another are kept."""

Planner = Callable[[Sequence[int]], tuple[Placed, ...]]


def plan_in_batches(models: Sequence[str], planner: Planner) -> tuple[Placed, ...]:
    """A plan for all services, made of plans for batches of them.

    Args:
        models: The model of each service.
        planner: Plans a batch, given the indices of its services; parts refer to them by their position in it.
    """
    waiting, pool = deque(each_model_in_turn(models)), list[int]()
    kept: list[Placed] = []
    while waiting or pool:
        while waiting and len(pool) < BATCH:
            pool.append(waiting.popleft())
        gpus = [_renamed(gpu, pool) for gpu in planner(pool)]
        groups = _linked(gpus)
        groups.sort(key=lambda group: -_fullness(group))
        full = [group for group in groups if _fullness(group) >= _FULL_RATIO] or groups[:1]
        done = [gpu for group in (full if waiting else groups) for gpu in group]
        kept += done
        served = {share.part.workload for gpu in done for share in gpu.shares}
        pool = [index for index in pool if index not in served]
    return tuple(kept)


def replan_worst(
    problem: Problem, gpus: tuple[Placed, ...], values: FloatArray, planner: Planner, most: int
) -> tuple[Placed, ...]:
    """The plan with the GPUs worth least planned again together; the plan as it was where that costs more.

    Args:
        problem: The problem.
        gpus: The plan.
        values: What one more service of each kind costs at least, float64[kinds].
        planner: Plans some of the services, given their indices; parts refer to them by their position.
        most: GPUs that are planned again, at most.
    """
    value = {member: values[at] for at, kind in enumerate(problem.kinds) for member in kind.members}

    def worth(group: list[Placed]) -> float:
        parts = [share.part for gpu in group for share in gpu.shares]
        return math.fsum(value[part.workload] / part.replicas for part in parts) / cost_of(problem, group)

    chosen, kept = list[Placed](), list[Placed]()
    for group in sorted(_linked(gpus), key=worth):
        (chosen if len(chosen) + len(group) <= most else kept).extend(group)
    pool = sorted({share.part.workload for gpu in chosen for share in gpu.shares})
    again = [_renamed(gpu, pool) for gpu in planner(pool)]
    served = {share.part.workload for gpu in again for share in gpu.shares}
    better = len(served) == len(pool) and cost_of(problem, again) <= cost_of(problem, chosen)
    return (*kept, *again) if better else gpus


def each_model_in_turn(models: Sequence[str]) -> list[int]:
    """An order of services, by the model of each, in which every stretch holds services of all models."""
    by_model: dict[str, deque[int]] = {}
    for index, model in enumerate(models):
        by_model.setdefault(model, deque()).append(index)
    order: list[int] = []
    while by_model:
        for model in list(by_model):
            order.append(by_model[model].popleft())
            if not by_model[model]:
                del by_model[model]
    return order


def _renamed(gpu: Placed, pool: Sequence[int]) -> Placed:
    """The GPU with its parts referring to all services, not to those of the batch."""
    shares = tuple(share._replace(part=share.part._replace(workload=pool[share.part.workload])) for share in gpu.shares)
    return Placed(gpu.type_index, shares)


def _linked(gpus: Sequence[Placed]) -> list[list[Placed]]:
    """GPUs in groups such that no service has replicas in two of them."""
    groups: list[tuple[set[int], list[Placed]]] = []
    for gpu in gpus:
        services = {share.part.workload for share in gpu.shares}
        members = [gpu]
        for other in [group for group in groups if group[0] & services]:
            services |= other[0]
            members = other[1] + members
            groups.remove(other)
        groups.append((services, members))
    return [members for _, members in groups]


def _fullness(group: Sequence[Placed]) -> float:
    """Mean share in use, 0 to 1."""
    return sum(share.share_percent for gpu in group for share in gpu.shares) / (100.0 * len(group))
