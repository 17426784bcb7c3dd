"""Simulate pools request by request, to try the column optimiser's plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.policies.placement.pools.pool import Used
from joulery.policies.placement.pools.problem import Machine, PoolService, slowdown
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.sim.core.streams import Streams
from joulery.sim.queues.fifo_pull import PullInstance, PullMetrics, Requests, metrics, pull

REQUESTS = 10_000
"""Requests of a trial, enough to know their 95th percentile to about 1 %."""


def instances(service: PoolService, machines: Sequence[Machine], used: Used) -> list[PullInstance]:
    """The simulated instances of a service."""
    made = []
    for index, profile, name in used:
        variant, machine = service.costs[name], machines[index]
        ratio = slowdown(variant, machine.menu, profile)
        assert ratio is not None, "the optimiser places nothing that does not fit"
        made.append(
            PullInstance(
                name=f"{name} on {profile}",
                host_s=variant.host_s,
                gpu_s=variant.gpu_s * ratio * machine.time_ratio,
                floor_s=0.5 * (variant.host_s + variant.gpu_s * machine.time_ratio),
                dynamic_j=variant.dynamic_j * machine.energy_ratio,
                accuracy_ratio=variant.accuracy_ratio,
            )
        )
    return made


def hosts(service: PoolService, machines: Sequence[Machine], used: Used) -> list[int]:
    """The host of each instance: slices fill GPUs one after the other, the largest slices first; GPUs then fill hosts.

    A host has the number of GPUs that the service's costs are for; GPUs of two types are on two hosts.
    """
    found = [0] * len(used)
    rooms: list[list[tuple[float, int]]] = [[] for _ in machines]  # what is left of each GPU of a machine, and its host
    next_host, per_host = 0, service.costs.gpus
    for index in sorted(range(len(used)), key=lambda at: (used[at][0], -_part(machines, used[at]), used[at])):
        machine, need = used[index][0], _part(machines, used[index])
        mine = rooms[machine]
        at = next((number for number, (left, _) in enumerate(mine) if left >= need - 1e-9), len(mine))
        if at == len(mine):
            if at % per_host == 0:
                next_host += 1
            mine.append((1.0, next_host))
        left, found[index] = mine[at]
        mine[at] = (left - need, found[index])
    return found


def _part(machines: Sequence[Machine], one: tuple[int, str, str]) -> float:
    """Share of its GPU that an instance takes, by compute slices."""
    menu = machines[one[0]].menu
    return menu[one[1]].compute_slices / menu.compute_slices


def window(
    service: PoolService,
    pool: Sequence[PullInstance],
    idle_w: float,
    streams: Streams,
    gaps: FloatArray,
    on: Sequence[int] = (),
) -> PullMetrics:
    """Simulate requests of a service on a pool of instances.

    Args:
        service: The service.
        pool: The instances.
        on: The host of each; empty for one host.
        idle_w: Idle power of its GPUs.
        streams: Where sizes and jitter are drawn.
        gaps: Times between requests in units of their mean.
    """
    costs = service.costs
    arrival_s = np.cumsum(gaps) / service.rate_rps
    work = Requests.draw(arrival_s, streams, size_cv=costs.size_cv, jitter_s=costs.jitter_s)
    return metrics(work, pull(work, pool, contention=costs.contention, hosts=on), pool, idle_w=idle_w)


def judge(
    services: Sequence[PoolService], machines: Sequence[Machine], streams: Streams, requests: int = REQUESTS
) -> Callable[[int, Used, float], TrialMetrics]:
    """Make the function that tries pools, on the same requests each time.

    Args:
        services: Of the problem, in order.
        machines: Of the problem, in order.
        streams: Where arrivals, sizes and jitter are drawn.
        requests: How many each trial answers.
    """
    # Arrivals stretched to their mean: the joules of a trial are then those of the demand asked for, not of a draw.
    gaps = {service.name: streams("gaps", service.name).exponential(1.0, requests) for service in services}
    gaps = {name: drawn / drawn.mean() for name, drawn in gaps.items()}

    def tried(number: int, used: Used, idle_w: float) -> TrialMetrics:
        service = services[number]
        pool, on = instances(service, machines, used), hosts(service, machines, used)
        found = window(service, pool, idle_w, streams, gaps[service.name], on)
        # The window ends with its last answer, a little after the demand it stands for.
        joules = idle_w / service.rate_rps + found.dynamic_j / requests
        return TrialMetrics(found.accuracy_ratio, found.p95_s, joules)

    return tried
