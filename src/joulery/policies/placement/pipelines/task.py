"""A pipeline planning task: services whose models can be split into stages, the GPUs, the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.provisioning import ArrivalKind, Workload
from joulery.perf.queues.pipeline_queue import PipelineWorkload
from joulery.policies.placement.pipelines.partition import CutModel, PartitionRules, Stage
from joulery.policies.placement.pipelines.search import Overheads

Cuts = tuple[tuple[Stage, ...] | None, ...]
"""Stages of each service's model in one shape; None where it cannot run in it."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """The GPUs of a fleet.

    Attributes:
        name: Their name in plans.
        count: Number of GPUs.
        usd_per_hour: Price of one.
        memory_bytes: Memory of one for models: the board's, less what a runtime and activations take.
    """

    name: str
    count: int
    usd_per_hour: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class PipelineRules:
    """Constraints and choices of a plan.

    Attributes:
        partition: Rules for splitting models.
        devices_per_model: Most devices one replica may use (the paper's CT).
        overheads: Overheads of pipelines and requests.
        guard_ratio: Share of the late requests allowed by an SLO that a plan keeps in reserve, for workloads other
            than the simulated one.
        ceiling_loss_ratio: Relative slowdown allowed at the ceiling clock of a GPU against the highest clock: clocks
            above the ceiling cost power for no more gain than that.
        requests: Length of the simulated workload.
        seed: Seed of its arrivals.
        beam: Width of the beam that follows the greedy; 0 for none.
    """

    partition: PartitionRules = field(default_factory=PartitionRules)
    devices_per_model: int = 4
    overheads: Overheads = field(default_factory=Overheads)
    guard_ratio: float = 0.5
    ceiling_loss_ratio: float = 0.02
    requests: int = 10_000
    seed: int = 0
    beam: int = 0

    def __post_init__(self) -> None:
        if self.devices_per_model < 1 or self.requests < 1:
            raise ConfigError(
                "a plan needs a device for each model and requests to simulate",
                got=f"{self.devices_per_model} devices a model, {self.requests} requests",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One planning task.

    Attributes:
        workloads: The services.
        cuts: The model of each service, ready to be split.
        device: The GPUs.
        rules: Constraints and choices.
        improved: Whether moves and swaps may follow Alg. 2, and the placement of least power be taken.
    """

    workloads: tuple[Workload, ...]
    cuts: tuple[CutModel, ...]
    device: DeviceType
    rules: PipelineRules
    improved: bool

    @property
    def aimed(self) -> FloatArray:
        """Target share of each service's requests in time: the SLO's quantile plus the guard, float64[services]."""
        required = np.array([workload.slo.quantile for workload in self.workloads])
        return np.asarray(required + self.rules.guard_ratio * (1.0 - required), np.float64)

    def lone_s(self, stage_s: FloatArray) -> float:
        """Latency of a request that does not wait, given the time of its stages."""
        overheads = self.rules.overheads
        return float((1.0 + overheads.stage_ratio * len(stage_s)) * stage_s.sum() + overheads.request_s)


def arrivals(workloads: Sequence[Workload], requests: int, seed: int) -> PipelineWorkload:
    """Requests of all services together, in order; each service has a random stream of its own.

    Args:
        workloads: The services, each with its arrival process.
        requests: Approximate number of requests in all.
        seed: Seed of the streams.
    """
    horizon_s = requests / sum(workload.rate_rps for workload in workloads)
    times, models = [], []
    for index, workload in enumerate(workloads):
        random = np.random.default_rng([seed, index])
        mean_s, scv = 1.0 / workload.rate_rps, workload.arrivals.scv
        count = int(horizon_s * workload.rate_rps * (1 + 4 * max(scv, 1.0) ** 0.5)) + 100
        if workload.arrivals.kind is ArrivalKind.CONSTANT or scv == 0:
            at = (np.arange(count) + random.random()) * mean_s
        else:
            at = np.cumsum(random.gamma(1.0 / scv, scv * mean_s, count))
        at = at[at < horizon_s]
        times.append(at)
        models.append(np.full(len(at), index))
    arrival_s = np.concatenate(times)
    order = np.argsort(arrival_s, kind="stable")
    slo_s = np.array([workload.slo.latency_s for workload in workloads])
    return PipelineWorkload(arrival_s[order], np.concatenate(models)[order], slo_s)
