"""Pipeline plans of models divided into stages: services, their parts, the GPUs they share and their clocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from joulery.domain.gpu.provisioning import Binding, Violation
from joulery.domain.quality import Quality


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A stage of one replica on one GPU.

    Attributes:
        workload, model: The service and its model.
        replica, replicas: Which copy of how many.
        stage, stages: Which stage of how many.
        shard, shards: Which of the GPUs that share the stage.
        rate_rps: Requests a second of the service that pass here.
        latency_s: Time of the stage at the planned clock.
        score: Sensitivity to the clock.
        memory_bytes: Memory it needs here.
        operators: First and last of its operators.
    """

    workload: str
    model: str
    replica: int
    replicas: int
    stage: int
    stages: int
    shard: int
    shards: int
    rate_rps: float
    latency_s: float
    score: float
    memory_bytes: float
    operators: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PipelineGpu:
    """One GPU of a plan.

    Attributes:
        type: Name of the GPU type.
        usd_per_hour: Its price; 0 where none was given.
        clock_mhz: The static clock of least energy within the SLOs.
        clock_max_mhz: Its highest clock.
        clock_floor_mhz: The lowest clock at which a request that need not wait is in time: a governor's lower bound.
        clock_ceiling_mhz: The clock above which nothing here gets noticeably faster: a governor's upper bound.
        power_w: Mean board power at the planned clock.
        full_power_w: Mean board power at the highest clock.
        busy_ratio: Share of the time it works, at the planned clock.
        memory_bytes: Memory for models.
        parts: The stages that run on it.
    """

    type: str
    usd_per_hour: float
    clock_mhz: float
    clock_max_mhz: float
    clock_floor_mhz: float
    clock_ceiling_mhz: float
    power_w: float
    full_power_w: float
    busy_ratio: float
    memory_bytes: float
    parts: tuple[PlannedPart, ...]

    @property
    def free_bytes(self) -> float:
        """Memory that no part takes."""
        return self.memory_bytes - math.fsum(part.memory_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class PlannedService:
    """Allocation of a service in a pipeline plan.

    Attributes:
        workload, model: Its name and its model.
        rate_rps: Its demand.
        slo_s: Latency SLO.
        required_ratio: Share of requests that must be within it (the SLO's quantile).
        attainment_ratio: Predicted share that is, at the planned clocks.
        latency_s: Latency of a request that need not wait, at the planned clocks of its first replica.
        clusters: Operator clusters of the model.
        score: Sensitivity of the model to the clock.
        replicas, stages, shards: Number of replicas, stages of each, and GPUs that share a stage.
    """

    workload: str
    model: str
    rate_rps: float
    slo_s: float
    required_ratio: float
    attainment_ratio: float
    latency_s: float
    clusters: int
    score: float
    replicas: int
    stages: int
    shards: int


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Pipeline plan: parts of models on GPUs, their clocks, and the predicted result.

    Attributes:
        policy: ``muserve`` or ``best``.
        gpus: Every GPU of the fleet.
        services: Every service.
        violations: SLO violations that are predicted.
        quality: Of the clock profiles behind it, the weakest.
        grouping: Division of the fleet into groups, as text.
        placement: The placement that was chosen among those tried, and the reason.
        scatter: Spread of sensitivity within devices, weighted by load: 0 when each is homogeneous.
        simulated_requests: Requests simulated in the search.
    """

    policy: str
    gpus: tuple[PipelineGpu, ...]
    services: tuple[PlannedService, ...]
    violations: tuple[Violation, ...]
    quality: Quality
    grouping: str
    placement: str
    scatter: float
    simulated_requests: int

    @property
    def power_w(self) -> float:
        """Mean power of the fleet at the planned clocks."""
        return math.fsum(gpu.power_w for gpu in self.gpus)

    @property
    def saving_ratio(self) -> float:
        """Power at full clock over that at the planned clocks."""
        return math.fsum(gpu.full_power_w for gpu in self.gpus) / self.power_w

    @property
    def usd_per_hour(self) -> float:
        """Price of all GPUs."""
        return math.fsum(gpu.usd_per_hour for gpu in self.gpus)

    @property
    def binding(self) -> Binding | None:
        """The least slack: of a latency without waiting, or of the share of requests within the SLO."""
        found = [
            Binding(each.workload, self._first_gpu(each.workload), what, slack)
            for each in self.services
            for what, slack in (
                ("latency", 1 - each.latency_s / each.slo_s),
                ("attainment", each.attainment_ratio - each.required_ratio),
            )
            if math.isfinite(slack)
        ]
        return min(found, key=lambda each: each.slack_ratio, default=None)

    def _first_gpu(self, workload: str) -> int | None:
        hosts = (at for at, gpu in enumerate(self.gpus) if any(part.workload == workload for part in gpu.parts))
        return next(hosts, None)
