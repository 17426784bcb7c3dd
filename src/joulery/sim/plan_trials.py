"""Plans on trial: several plans for the same services, each judged under the same seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from joulery.domain.errors import ConfigError
from joulery.domain.provision import Workload
from joulery.perf.interference import InterferenceProfile
from joulery.policies.provision import igniter
from joulery.sim.batched_serving import Gpu, Instance, Service, Trial, Verdict, judge
from joulery.sim.batching import BatchRule
from joulery.sim.gpu import GpuTruth
from joulery.sim.streams import Streams


@dataclass(frozen=True, slots=True)
class Placed:
    """One instance of a plan.

    Attributes:
        service: Whose requests it serves.
        share_ratio: Its share of the GPU, 0 to 1.
        batch: Its batch size.
        weight: Its part of the service's requests, against the service's other instances.
    """

    service: str
    share_ratio: float
    batch: int
    weight: float = 1.0


Plan = tuple[tuple[Placed, ...], ...]
"""The instances of each GPU."""
Planner = Callable[[Sequence[Workload], InterferenceProfile], Plan]


def _igniter(workloads: Sequence[Workload], profile: InterferenceProfile) -> Plan:
    return tuple(
        tuple(
            Placed(workloads[share.part.workload].id, share.share_percent / 100, share.batch, share.part.rate_rps)
            for share in gpu
        )
        for gpu in igniter.plan(workloads, profile)
    )


PLANNERS: Mapping[str, Planner] = MappingProxyType({"igniter": _igniter})
"""Policies that make a plan, by name."""


def make_plan(policy: str, workloads: Sequence[Workload], profile: InterferenceProfile) -> Plan:
    """The plan of a policy.

    Raises:
        ConfigError: There is no such policy.
        InfeasibleError: The policy finds no plan.
    """
    if policy not in PLANNERS:
        raise ConfigError("no policy of that name makes plans", got=policy, expected=", ".join(PLANNERS))
    return PLANNERS[policy](workloads, profile)


def trials(
    services: Sequence[Service],
    models: Mapping[str, str],
    plans: Mapping[str, Plan],
    truth: GpuTruth,
    trial: Trial,
    seeds: Sequence[int],
    max_delay_s: float = math.inf,
) -> Iterator[tuple[str, int, Verdict]]:
    """Judge every plan under every seed.

    Args:
        services: What comes.
        models: The model of each service.
        plans: The plans, by name.
        truth: How every GPU behaves.
        trial: How plans are judged.
        seeds: Under one seed all plans face the same requests.
        max_delay_s: Patience of every instance with a batch that does not fill.

    Yields:
        Name of the plan, seed, verdict; plan by plan within a seed.
    """
    for seed in seeds:
        for name, plan in plans.items():
            gpus = [
                Gpu(
                    truth,
                    tuple(
                        Instance(
                            each.service,
                            models[each.service],
                            each.share_ratio,
                            BatchRule(each.batch, max_delay_s),
                            each.weight,
                        )
                        for each in gpu
                    ),
                )
                for gpu in plan
            ]
            yield name, seed, judge(services, gpus, trial, Streams(seed))
