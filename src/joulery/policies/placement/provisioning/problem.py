"""What is to be planned, worked out into items and packings, and what it costs at least without any search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from joulery.domain.gpu.provisioning import PlanBound, Workload
from joulery.policies.placement.provisioning.column_generation import Range
from joulery.policies.placement.provisioning.options import Item, Kind, kinds_of
from joulery.policies.placement.provisioning.packing import Packing
from joulery.policies.placement.provisioning.predict import GpuType, Placed
from joulery.policies.placement.provisioning.rules import Rules


@dataclass(frozen=True, slots=True)
class Problem:
    """Services, GPU types and rules, worked out into items and packings."""

    workloads: Sequence[Workload]
    types: Sequence[GpuType]
    kinds: tuple[Kind, ...]
    items: tuple[Item, ...]
    packings: tuple[Packing, ...]

    @property
    def demand(self) -> list[int]:
        """Services of each kind."""
        return [len(kind.members) for kind in self.kinds]

    @property
    def crossed(self) -> bool:
        """Whether more than shares decides what fits on a GPU: memory, or replicas that stay apart."""
        known = any(packing.memory_limit_bytes < math.inf for packing in self.packings)
        return any(item.apart or (known and item.memory_bytes > 0) for item in self.items)

    @property
    def ranges(self) -> list[Range]:
        """How many GPUs of each type there may be."""
        return [(0, gpu_type.available) for gpu_type in self.types]


def problem_of(workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> Problem:
    """Work out what can be chosen.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: No GPU types, two services of one name, or a model that no type knows.
    """
    kinds = kinds_of(workloads, types, rules)
    items = tuple(item for kind in kinds for item in kind.items)
    packings = tuple(Packing(gpu_type, index, items) for index, gpu_type in enumerate(types))
    return Problem(workloads, types, kinds, items, packings)


def volume(problem: Problem) -> float:
    """Dollars an hour for what services need alone, of shares or of memory, as if it could be cut and mixed at will."""
    shares, memory = ([math.inf] * len(problem.kinds) for _ in range(2))
    for index, item in enumerate(problem.items):
        for packing in problem.packings:
            if packing.alone[index] <= packing.capacity:
                usd = packing.gpu_type.usd_per_hour * item.replicas
                share = float(packing.alone[index]) / packing.capacity
                shares[item.kind] = min(shares[item.kind], usd * share)
                memory[item.kind] = min(memory[item.kind], usd * item.memory_bytes / packing.memory_limit_bytes)
    return max(math.fsum(usd * n for usd, n in zip(each, problem.demand, strict=True)) for each in (shares, memory))


def attainable(problem: Problem, usd_per_hour: float, ranges: Sequence[Range]) -> float:
    """The least that whole numbers of GPUs within the ranges can cost without costing less than this.

    Worked out for one or two types; the value itself for more.
    """
    wanted = usd_per_hour * (1 - 1e-9)
    prices = [gpu_type.usd_per_hour for gpu_type in problem.types]
    if len(prices) > 2 or wanted <= 0:
        return usd_per_hour
    (last_low, last_high), last = ranges[-1], prices[-1]
    first_low, first_high = ranges[0] if len(prices) == 2 else (0, 0)
    most = math.ceil(wanted / prices[0])
    costs = []
    for count in range(first_low, max(first_low, most if first_high is None else min(most, first_high)) + 1):
        rest = max(last_low, math.ceil((wanted - count * prices[0]) / last))
        if last_high is None or rest <= last_high:
            costs.append(count * prices[0] * (len(prices) - 1) + rest * last)
    return min(costs, default=usd_per_hour)


def cost_of(problem: Problem, gpus: Sequence[Placed]) -> float:
    """Dollars an hour."""
    return math.fsum(problem.types[gpu.type_index].usd_per_hour for gpu in gpus)


def bound_of(problem: Problem, usd_per_hour: float, relaxed_usd_per_hour: float, method: str) -> PlanBound:
    """The bound on the cost, and on the number of GPUs that follows from it."""
    dearest = max(gpu_type.usd_per_hour for gpu_type in problem.types)
    return PlanBound(math.ceil(usd_per_hour / dearest - 1e-6), usd_per_hour, relaxed_usd_per_hour, method)


def cuts_of(problem: Problem) -> str:
    """Within which choices a bound holds, in words."""
    most = max(item.replicas for item in problem.items)
    return "services whole" if most == 1 else f"up to {most} replicas a service"


def least_gpus(problem: Problem) -> int:
    """No plan has fewer GPUs: the shares that the services need alone, rounded up."""
    least = [math.inf] * len(problem.kinds)
    for index, item in enumerate(problem.items):
        for packing in problem.packings:
            if packing.alone[index] <= packing.capacity:
                share = float(packing.alone[index]) / packing.capacity * item.replicas
                least[item.kind] = min(least[item.kind], share)
    return math.ceil(math.fsum(share * n for share, n in zip(least, problem.demand, strict=True)) - 1e-9)
