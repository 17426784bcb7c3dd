"""Simulate several plans for the same services, each under the same seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from joulery.domain.gpu.provisioning import PlannedGpu, Workload
from joulery.perf.interference.model import InterferenceProfile
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.planner import provision
from joulery.sim.core.streams import Streams
from joulery.sim.placement.batched_serving import Gpu, Service, ServiceVerdict, ServingProcess, Trial, judge
from joulery.sim.placement.gpu import GpuTruth
from joulery.sim.queues.batching import BatchRule


@dataclass(frozen=True, slots=True)
class PlacedService:
    """One instance of a plan.

    Attributes:
        service: The service whose requests it serves.
        share_ratio: Its share of the GPU, 0 to 1.
        batch: Its batch size.
        weight: Its part of the service's requests, against the service's other instances.
        max_delay_s: How long it waits for a batch to fill.
        model: Which model it runs; the service's when None.
    """

    service: str
    share_ratio: float
    batch: int
    weight: float = 1.0
    max_delay_s: float = math.inf
    model: str | None = None


Plan = tuple[tuple[PlacedService, ...], ...]
"""The instances of each GPU."""


def make_plan(policy: str, workloads: Sequence[Workload], profile: InterferenceProfile, rules: Rules) -> Plan:
    """The plan of a policy for GPUs of one type.

    Args:
        policy: A name in :data:`joulery.policies.placement.provisioning.planner.POLICIES`.
        workloads: The services, with the arrivals that the policy assumes.
        profile: What the policy knows of the GPU; never the truth the plan is judged on.
        rules: Constraints that ``best`` keeps.

    Raises:
        ConfigError: There is no such policy, or the profile lacks a model.
        InfeasibleError: The policy finds no plan.
    """
    made = provision(policy, workloads, [GpuType(profile.gpu.name, profile, usd_per_hour=1.0)], rules)
    # Only best knows of random requests; every other policy means its batches to be full, as the paper does.
    return plan_of(made.gpus, None if made.policy == "best" else math.inf)


def plan_of(gpus: Sequence[PlannedGpu], max_delay_s: float | None = None) -> Plan:
    """The instances of a plan, each with its part of the demand.

    Args:
        gpus: The plan.
        max_delay_s: How long every instance waits for a batch to fill; the plan's own delays when None.
    """
    return tuple(
        tuple(
            PlacedService(
                one.workload,
                one.share_ratio,
                one.batch,
                one.rate_rps,
                one.max_delay_s if max_delay_s is None else max_delay_s,
                one.model,
            )
            for one in gpu.instances
        )
        for gpu in gpus
    )


def trials(
    services: Sequence[Service],
    models: Mapping[str, str],
    plans: Mapping[str, Plan],
    truth: GpuTruth,
    trial: Trial,
    seeds: Sequence[int],
    max_delay_s: float | None = None,
    truths: Mapping[str, Sequence[GpuTruth]] | None = None,
) -> Iterator[tuple[str, int, ServiceVerdict]]:
    """Simulate every plan under every seed.

    Args:
        services: The services and their arrivals.
        models: The model of each service.
        plans: The plans, by name.
        truth: How every GPU behaves.
        trial: Conditions of the simulations.
        seeds: Under one seed all plans face the same requests.
        max_delay_s: How long every instance waits for a batch to fill; each plan's own delays when None.
        truths: How each GPU of a plan behaves, by name of the plan; ``truth`` for plans without.

    Yields:
        Name of the plan, seed, verdict; plan by plan within a seed.
    """
    for seed in seeds:
        for name, plan in plans.items():
            each_truth = (truths or {}).get(name) or [truth] * len(plan)
            gpus = [
                Gpu(
                    mine,
                    tuple(
                        ServingProcess(
                            each.service,
                            each.model or models[each.service],
                            each.share_ratio,
                            BatchRule(each.batch, each.max_delay_s if max_delay_s is None else max_delay_s),
                            each.weight,
                        )
                        for each in gpu
                    ),
                )
                for gpu, mine in zip(plan, each_truth, strict=True)
            ]
            yield name, seed, judge(services, gpus, trial, Streams(seed))
