"""Provisioning plans: services with their SLOs, GPU types, and GPUs divided into shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.optimum import PlanCertificate
from joulery.domain.quality import Quality
from joulery.domain.serving.service import Slo

PROCESSES_PER_INSTANCE = 2
"""An instance and its standby, both loaded (iGniter, section 4.2)."""


class ArrivalKind(StrEnum):
    """Kind of an arrival process."""

    CONSTANT = "constant"
    """Evenly spaced, as the paper assumes (section 3.1)."""
    POISSON = "poisson"
    """Independent of one another, as from many unrelated users."""
    GENERAL = "general"
    """A renewal process, described by the variation of its gaps."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrival process of a service.

    Attributes:
        kind: Constant, Poisson or general.
        scv: Squared coefficient of variation of the gaps between requests: 0 constant, 1 Poisson.
    """

    kind: ArrivalKind = ArrivalKind.CONSTANT
    scv: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.scv < math.inf):
            raise ConfigError("the variation of arrivals must be a number >= 0", got=str(self.scv))

    @classmethod
    def poisson(cls) -> Arrivals:
        """Poisson arrivals."""
        return cls(ArrivalKind.POISSON, 1.0)

    @classmethod
    def general(cls, scv: float) -> Arrivals:
        """A renewal process whose gaps have a given squared coefficient of variation."""
        return cls(ArrivalKind.GENERAL, scv)


@dataclass(frozen=True, slots=True)
class Workload:
    """One service to provide for: a model, an SLO and a demand.

    Attributes:
        id: Unique name.
        model: Name of its model in the performance profile.
        slo: Its latency SLO.
        rate_rps: Requests a second it must sustain.
        arrivals: Arrival process of the requests.
        memory_bytes: GPU memory that one process of it takes; None where unknown.
        replicas_min: Smallest number of replicas.
        spot: Whether it may run on GPUs that their owner can withdraw.
    """

    id: str
    model: str
    slo: Slo
    rate_rps: float
    arrivals: Arrivals = Arrivals()
    memory_bytes: float | None = None
    replicas_min: int = 1
    spot: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.rate_rps < math.inf):
            raise ConfigError(
                "a service needs a positive request rate", pointer=self.id, got=f"{self.rate_rps} /s", expected="> 0 /s"
            )
        if not math.isfinite(self.slo.latency_s):
            raise ConfigError("a service needs a finite latency SLO", pointer=self.id, got=f"{self.slo.latency_s} s")


@dataclass(frozen=True, slots=True)
class LatencyParts:
    """Parts of the latency of one batch, seconds (Eqs. 1 and 4); they add up to ``total_s``.

    Attributes:
        load_s: Input to the GPU over PCIe.
        schedule_s: Kernels waiting to be launched, neighbours included.
        active_s: Kernels running, cache contention included.
        throttle_s: Time that the lowered clock adds to the two above.
        feedback_s: Result back over PCIe.
    """

    load_s: float
    schedule_s: float
    active_s: float
    throttle_s: float
    feedback_s: float

    @property
    def gpu_s(self) -> float:
        """Execution on the GPU (t_gpu)."""
        return self.schedule_s + self.active_s + self.throttle_s

    @property
    def total_s(self) -> float:
        """Latency of a batch (t_inf), batching delay not included."""
        return self.load_s + self.gpu_s + self.feedback_s


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """One serving process of a plan.

    Attributes:
        workload: Identifier of the service.
        model: Its model.
        replica: Index of this replica, from 0.
        replicas: How many replicas the service has.
        rate_rps: The share of the service's demand that is routed here.
        share_ratio: Share of the GPU (MPS active thread share), 0 to 1.
        batch: Batch size; the largest, where requests do not wait for a full batch.
        max_delay_s: How long a request waits for others to fill its batch: infinite for a full batch, 0 for no wait.
        wait_s: Longest wait of evenly spaced requests for a full batch; NaN for random ones.
        parts: Predicted latency of one (full) batch.
        limit_s: Highest batch latency that stays within the SLO.
        throughput_rps: Predicted requests a second at saturation (Eq. 2).
        slo_s: The latency SLO.
        accuracy_ratio: Accuracy of its model as stated; NaN where services have no choice of models.
        overhead_w, requests_w: Mean power that its presence and its requests add to the GPU; NaN where the policy does
            not plan power.
        provided_rps: The rate that its share and batch keep within the SLO; NaN where it is ``rate_rps``.
        slice: MIG profile of the slice it has to itself, such as ``3g.40gb``; empty for a share. The latency of a batch
            on a slice was measured as a whole: all of it counts as active.
        processes: Processes of the model there, each with its own batches.
        memory_bytes: GPU memory of one such process; NaN where unknown.
    """

    workload: str
    model: str
    replica: int
    replicas: int
    rate_rps: float
    share_ratio: float
    batch: int
    max_delay_s: float
    wait_s: float
    parts: LatencyParts
    limit_s: float
    throughput_rps: float
    slo_s: float
    accuracy_ratio: float = math.nan
    overhead_w: float = math.nan
    requests_w: float = math.nan
    provided_rps: float = math.nan
    slice: str = ""
    processes: int = 1
    memory_bytes: float = math.nan

    @property
    def latency_s(self) -> float:
        """Predicted latency of one batch."""
        return self.parts.total_s

    @property
    def slack_s(self) -> float:
        """Slack of a batch; negative when the SLO is violated."""
        return self.limit_s - self.latency_s


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """One GPU of a plan and the processes on it.

    Attributes:
        type: Name of the GPU type.
        usd_per_hour: Its price.
        clock_mhz: Predicted clock (Eq. 9).
        clock_max_mhz: The clock without a power cap.
        demand_w: Power demand of the processes (Eq. 10); above the cap the clock falls instead.
        power_w: Power the board draws: the demand, at most the cap. Where the policy plans power, the mean power of
            board and host: ``idle_w``, ``host_w`` and the power that the instances add.
        instances: The processes, in the order they were placed.
        clock_set_mhz: The clock to set; None where the policy does not set it.
        idle_w, host_w: Power of the idle board at that clock, and of its host; NaN where the policy plans no power.
        memory_limit_bytes: Memory of the board that processes may take; NaN where unknown.
        host: Number of its host, from 0; None where the plan does not state it.
        clock_ceiling_mhz: The highest clock that a governor may set; ``clock_max_mhz`` when None. ``clock_set_mhz`` is
            the lowest one: the predicted latencies hold from there up.
    """

    type: str
    usd_per_hour: float
    clock_mhz: float
    clock_max_mhz: float
    demand_w: float
    power_w: float
    instances: tuple[PlannedInstance, ...]
    clock_set_mhz: float | None = None
    idle_w: float = math.nan
    host_w: float = math.nan
    memory_limit_bytes: float = math.nan
    host: int | None = None
    clock_ceiling_mhz: float | None = None

    @property
    def memory_bytes(self) -> float:
        """Memory of all its processes, standbys included; NaN where one is unknown. Slices have no standbys."""
        copies = [each.processes * (1 if each.slice else PROCESSES_PER_INSTANCE) for each in self.instances]
        return math.fsum(n * each.memory_bytes for n, each in zip(copies, self.instances, strict=True))

    @property
    def clock_bounds_mhz(self) -> tuple[float, float] | None:
        """The lowest and highest clock for a governor; None where the policy does not set the clock."""
        if self.clock_set_mhz is None:
            return None
        return self.clock_set_mhz, self.clock_max_mhz if self.clock_ceiling_mhz is None else self.clock_ceiling_mhz

    @property
    def sliced(self) -> bool:
        """Whether the GPU is divided into slices, or one model has several processes on all of it."""
        return any(each.slice and (each.share_ratio < 1 or each.processes > 1) for each in self.instances)

    @property
    def mode(self) -> str:
        """Division of the GPU: ``whole``, ``mps`` (shares, or several processes) or ``mig`` (slices)."""
        alone = len(self.instances) == 1 and self.instances[0].share_ratio >= 1
        if not alone:
            return "mig" if any(each.slice for each in self.instances) else "mps"
        return "whole" if self.instances[0].processes == 1 else "mps"

    @property
    def share_ratio(self) -> float:
        """Share of the GPU that its instances take."""
        return math.fsum(instance.share_ratio for instance in self.instances)


@dataclass(frozen=True, slots=True)
class Violation:
    """An SLO that the plan is predicted to violate.

    Attributes:
        workload: The service.
        gpu: Index of the GPU in the plan.
        what: ``latency``, ``throughput``, ``share``, ``attainment`` or ``available`` (more GPUs than there are),
            ``memory``, ``gpu`` or ``host`` (replicas of the service on one).
        predicted: The predicted value (s, requests/s, ratio, GPUs, bytes or replicas).
        allowed: Its limit.
    """

    workload: str
    gpu: int
    what: str
    predicted: float
    allowed: float


class Binding(NamedTuple):
    """The constraint of a plan with the least slack.

    Attributes:
        workload: The service it belongs to.
        gpu: Index of the GPU in the plan; None where the service runs on none.
        what: ``latency``, ``throughput`` or ``attainment``.
        slack_ratio: What is left of the limit, as a ratio of it; negative when it is violated.
    """

    workload: str
    gpu: int | None
    what: str
    slack_ratio: float


@dataclass(frozen=True, slots=True)
class PlanBound:
    """A proven lower bound of the cost of any plan, within the choices that were allowed.

    Attributes:
        gpus: Least number of GPUs (of any of the types).
        usd_per_hour: Least cost.
        relaxed_usd_per_hour: The same before rounding up to whole GPUs.
        method: Method of the proof.
    """

    gpus: int
    usd_per_hour: float
    relaxed_usd_per_hour: float
    method: str


@dataclass(frozen=True, slots=True)
class ProvisionPlan:
    """Provisioning plan: services on shares of GPUs, and the predicted result.

    Attributes:
        policy: Name of the policy.
        gpus: The GPUs, in the order they were opened.
        violations: Predicted SLO violations; empty for a good plan.
        bound: Lower bound, where the policy proves one.
        quality: How well the coefficients behind it are known.
        certificate: Objective, bound and the prices that prove it; None for policies that only count GPUs.
    """

    policy: str
    gpus: tuple[PlannedGpu, ...]
    violations: tuple[Violation, ...] = ()
    bound: PlanBound | None = None
    quality: Quality = Quality.MODELLED
    certificate: PlanCertificate | None = None

    @property
    def usd_per_hour(self) -> float:
        """Price of all GPUs."""
        return math.fsum(gpu.usd_per_hour for gpu in self.gpus)

    @property
    def optimal(self) -> bool:
        """True when the plan is within every SLO and no plan can be cheaper."""
        if self.certificate is not None:
            return not self.violations and self.certificate.optimal
        return not self.violations and self.bound is not None and self.gap_ratio <= 1e-9

    @property
    def gap_ratio(self) -> float:
        """Excess cost over the bound, as a ratio of the bound; infinite without a bound."""
        if self.certificate is not None:
            return self.certificate.gap_ratio
        if self.bound is None or self.bound.usd_per_hour <= 0:
            return math.inf
        return max(0.0, self.usd_per_hour / self.bound.usd_per_hour - 1)

    @property
    def binding(self) -> Binding | None:
        """The latency or throughput with the least slack; None for a plan without instances."""
        found = [
            Binding(each.workload, index, what, slack)
            for index, gpu in enumerate(self.gpus)
            for each in gpu.instances
            for what, slack in (
                ("latency", 1 - each.latency_s / each.limit_s if each.limit_s > 0 else -math.inf),
                ("throughput", 1 - each.rate_rps / each.throughput_rps if each.throughput_rps > 0 else -math.inf),
            )
        ]
        return min(found, key=lambda each: each.slack_ratio, default=None)
