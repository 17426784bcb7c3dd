"""Layout plans: which model variants run on which MIG slices of how many GPUs (presets columns, clover)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from joulery.domain.gpu.provisioning import Binding


class LayoutInstance(NamedTuple):
    """One variant of a service on one MIG slice.

    Attributes:
        slice: MIG profile, such as ``2g.10gb``.
        service, variant: The service and its variant on the slice.
    """

    slice: str
    service: str
    variant: str


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A group of equal GPUs in a layout plan.

    Attributes:
        gpu: GPU type.
        clock_mhz: Their clock; None where the plan does not set it.
        count: Number of these GPUs.
        instances: The instances on the slices of each GPU.
        usd_per_hour: Price of one GPU.
    """

    gpu: str
    clock_mhz: float | None
    count: int
    instances: tuple[LayoutInstance, ...]
    usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class LayoutBaseline:
    """Baseline of a service: its most accurate variant on whole GPUs, all of them powered.

    Attributes:
        variant: The variant.
        gpus: Number of GPUs: the service's share of the fleet, or the fewest that keep the latency limit.
        energy_j: Joules a request.
        latency_s: Simulated latency at the SLO's quantile.
    """

    variant: str
    gpus: int
    energy_j: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class LayoutService:
    """Allocation of a service in a layout plan; every measure is simulated.

    Attributes:
        service: Its name.
        rate_rps: Its demand.
        accuracy_ratio, minimum_accuracy_ratio: Mean accuracy of the answers, and the least allowed.
        loss_points, loss_ratio: Accuracy lost against the most accurate variant: in points, and as a ratio of it.
        latency_s, limit_s: Latency at the SLO's quantile, and the SLO.
        energy_j: Joules a request.
        saving_ratio: Joules saved against the baseline.
        saving_same_gpus_ratio: The same if every GPU of the baseline stayed powered.
        objective: Eq. 3 of Clover; None where the service does not weigh carbon.
        baseline: The baseline it is compared with.
    """

    service: str
    rate_rps: float
    accuracy_ratio: float
    minimum_accuracy_ratio: float
    loss_points: float
    loss_ratio: float
    latency_s: float
    limit_s: float
    energy_j: float
    saving_ratio: float
    saving_same_gpus_ratio: float
    objective: float | None
    baseline: LayoutBaseline


class PoolOfSize(NamedTuple):
    """The best plan found with a given number of GPUs.

    Attributes:
        gpus: The number.
        cost_w: Objective, watts.
        accuracy_ratio, latency_s: For each service.
    """

    gpus: int
    cost_w: float
    accuracy_ratio: tuple[float, ...]
    latency_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LayoutBound:
    """Proven lower bounds on the cost of any layout plan.

    Attributes:
        cost_w, gap_ratio: No plan costs less within the closed-form queue model; the gap as a ratio of the plan's cost.
        corrected_cost_w, corrected_gap_ratio: The same with the model's latencies corrected by the trials.
    """

    cost_w: float
    gap_ratio: float
    corrected_cost_w: float
    corrected_gap_ratio: float


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Layout plan: variants on MIG slices, how many GPUs, and the simulated result.

    Attributes:
        policy: ``columns`` or ``clover``.
        layouts: The GPUs that are on, equal ones counted.
        services: Every service.
        gpus_off: GPUs of the baselines that are switched off.
        cost_w: Objective: watts, plus the value of lost accuracy.
        idle_w: Idle power of the GPUs that are on.
        g_per_kwh: Carbon intensity planned for; None where no service weighs carbon.
        bound: Lower bound; None where the policy proves none.
        boxes, trials: Relaxations solved and plans simulated in the search.
        by_gpus: The best plan found for each number of GPUs.
        quality: Origin of its figures.
    """

    policy: str
    layouts: tuple[PlannedLayout, ...]
    services: tuple[LayoutService, ...]
    gpus_off: int
    cost_w: float
    idle_w: float
    g_per_kwh: float | None
    bound: LayoutBound | None
    boxes: int
    trials: int
    by_gpus: tuple[PoolOfSize, ...]
    quality: str = "simulated"

    @property
    def gpus_on(self) -> int:
        """Number of GPUs that are on."""
        return sum(layout.count for layout in self.layouts)

    @property
    def usd_per_hour(self) -> float:
        """Price of the GPUs that are on."""
        return math.fsum(layout.count * layout.usd_per_hour for layout in self.layouts)

    @property
    def power_w(self) -> float:
        """Mean power of all services."""
        return math.fsum(each.energy_j * each.rate_rps for each in self.services)

    @property
    def binding(self) -> Binding | None:
        """The service whose latency is nearest to its limit; it names no GPU, because instances share one queue."""
        found = [Binding(each.service, None, "latency", 1 - each.latency_s / each.limit_s) for each in self.services]
        return min(found, key=lambda each: each.slack_ratio, default=None)
