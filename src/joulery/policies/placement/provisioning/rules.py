"""What a plan has to keep: which latency counts, with which margin, within which choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import NormalDist
from types import MappingProxyType
from typing import NamedTuple

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.provisioning import Workload
from joulery.perf.interference.model import GpuCoefficients, ModelCoefficients, launch_delay_ms, work
from joulery.perf.queues.batch_queue import late_ratio
from joulery.policies.placement.provisioning.sizes import slo_ms

_COMPANY = 4
"""Processes on a GPU that the launch delay of a random batch is reckoned with."""
_HALVINGS = 10
"""Halvings of the interval in which a limit is sought."""


class Accounting(StrEnum):
    """How much of the SLO a batch may take when requests come evenly spaced."""

    HALF_SLO = "half-slo"
    """Half of it, whatever the batch waits for (the paper's constraint 14)."""
    FULL_SLO = "full-slo"
    """What is left after the wait of the first request of a batch for the last."""


class FailureDomain(StrEnum):
    """What no two replicas of a service may share."""

    NONE = "none"
    """Nothing: replicas may be on one GPU."""
    GPU = "gpu"
    """A GPU."""
    HOST = "host"
    """A host, and so a GPU."""


class Balancer(StrEnum):
    """How the requests of a service reach its replicas."""

    TURNS = "turns"
    """In strict turns: every gap of a replica is the sum of as many gaps as there are replicas."""
    RANDOM = "random"
    """Each request at random: gaps of a replica vary as much as independent users make them."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What preset ``best`` may choose, and what it has to keep.

    Attributes:
        accounting: How much of the SLO a batch may take. Random arrivals are accounted for as a queue instead.
        max_batch: Largest batch; the published profile reaches 32.
        max_replicas: A service may be served by up to this many equal replicas, or by as many as it cannot do without.
        margin_ratio: Latencies are taken to be longer, and demands larger, by this ratio.
        noise_cv: Coefficient of variation of a batch's time from batch to batch; with the full SLO accounted for, the
            SLO quantile of that time counts instead of its mean.
        balancer: How requests reach the replicas of a service.
        domain: What may fail at once: no two replicas of a service share one.
        random_margins: By model: the least margin for requests that arrive at random. A queue makes a small error of
            the execution time a large one of the latency, while half of the SLO absorbs it for evenly spaced requests.
    """

    accounting: Accounting = Accounting.HALF_SLO
    max_batch: int = 32
    max_replicas: int = 4
    margin_ratio: float = 0.0
    noise_cv: float = 0.0
    balancer: Balancer = Balancer.TURNS
    domain: FailureDomain = FailureDomain.NONE
    random_margins: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.max_replicas < 1:
            raise ConfigError(
                "the largest batch and the number of replicas are at least 1",
                got=f"{self.max_batch} and {self.max_replicas}",
            )
        if not 0 <= self.margin_ratio < 10:
            raise ConfigError("a safety margin is a ratio from 0", got=str(self.margin_ratio), expected="such as 5 %")

    @property
    def apart(self) -> bool:
        """Whether no two replicas of a service may share a GPU."""
        return self.domain is not FailureDomain.NONE


class RequestStream(NamedTuple):
    """The requests that reach one replica.

    Attributes:
        rate_rps: How many a second.
        scv: Squared coefficient of variation of their gaps.
    """

    rate_rps: float
    scv: float


def stream_of(workload: Workload, replicas: int, balancer: Balancer = Balancer.TURNS) -> RequestStream:
    """The requests of one of several equal replicas."""
    return RequestStream(workload.rate_rps / replicas, split_scv(workload.arrivals.scv, replicas, balancer))


def split_scv(scv: float, replicas: int, balancer: Balancer) -> float:
    """Squared coefficient of variation of the gaps of one of several equal replicas.

    In turns, every gap is the sum of ``replicas`` gaps. At random, every gap is the sum of a geometric number of them.
    """
    if balancer is Balancer.RANDOM:
        return 1 + (scv - 1) / replicas
    return scv / replicas


def limit_ms(
    rules: Rules,
    gpu: GpuCoefficients,
    model: ModelCoefficients,
    workload: Workload,
    stream: RequestStream,
    batch: int,
    *,
    shared: bool,
) -> float:
    """What the execution of a full batch (t_gpu) may take for latency and throughput to be kept.

    Evenly spaced requests wait for a full batch: constraints 13 and 14 of the paper, or the full SLO. Random ones are
    served as many as have gathered; the limit is where the SLO quantile of the waiting and serving time meets the
    SLO.

    Args:
        rules: What has to be kept.
        gpu, model: Coefficients.
        workload: The service.
        stream: The part of its requests that this replica serves.
        batch: Batch size; the largest, for random requests.
        shared: Whether the GPU is shared; transfers may then take longer.

    Returns:
        Milliseconds; <= 0 when nothing is left for execution.
    """
    transfer = (model.pcie_contention if shared else 1.0) / gpu.pcie_bytes_per_ms
    load_ms, feedback_ms = model.load_bytes * transfer, model.feedback_bytes * transfer
    margin = 1 + rules.margin_ratio
    if stream.scv > 0:
        margin = 1 + max(rules.margin_ratio, rules.random_margins.get(workload.model, 0.0))
        return _random_limit_ms(gpu, model, workload, stream, batch, load_ms + feedback_ms) / margin
    keep_up_ms = 1000.0 * batch / (stream.rate_rps * margin) - feedback_ms * batch
    batch_ms = batch_limit_ms(rules, workload, stream, batch) / margin / _unlucky(rules, workload)
    return min(keep_up_ms, batch_ms - (load_ms + feedback_ms) * batch)


def batch_limit_ms(rules: Rules, workload: Workload, stream: RequestStream, batch: int) -> float:
    """What a batch of evenly spaced requests may take from loading to feedback (t_inf)."""
    if rules.accounting is Accounting.HALF_SLO:
        return slo_ms(workload) / 2
    return slo_ms(workload) - (batch - 1) * 1000.0 / stream.rate_rps


def _unlucky(rules: Rules, workload: Workload) -> float:
    """The SLO quantile of a batch's time over its mean (lognormal); 1 where half of the SLO absorbs it."""
    if rules.accounting is Accounting.HALF_SLO or rules.noise_cv == 0:
        return 1.0
    sigma = math.sqrt(math.log1p(rules.noise_cv**2))
    return max(1.0, math.exp(NormalDist().inv_cdf(workload.slo.quantile) * sigma - sigma * sigma / 2))


def batches_of(rules: Rules, workload: Workload, stream: RequestStream) -> tuple[int, ...]:
    """The batches worth considering: all, or powers of two where the size is only the largest of many.

    Random requests that are in time never gather to more than come within the SLO, give or take.
    """
    if stream.scv == 0:
        return tuple(range(1, rules.max_batch + 1))
    gather = 4 + 2 * stream.rate_rps * workload.slo.latency_s
    return tuple(size for size in (1 << power for power in range(11)) if size <= min(rules.max_batch, gather))


def _random_limit_ms(
    gpu: GpuCoefficients,
    model: ModelCoefficients,
    workload: Workload,
    stream: RequestStream,
    batch: int,
    transfer_ms: float,
) -> float:
    """The execution time of a full batch at which just the required part of random requests is in time."""
    deadline_ms, late = slo_ms(workload), 1 - workload.slo.quantile
    shape = batch_shape(gpu, model, batch)

    def too_slow(full_ms: float) -> bool:
        times_s = [(transfer_ms * (size + 1) + full_ms * part) / 1e3 for size, part in enumerate(shape)]
        return late_ratio(stream.rate_rps, stream.scv, times_s, deadline_ms / 1e3) > late

    low, high = 0.0, min(deadline_ms, 1000.0 * batch / stream.rate_rps)
    if too_slow(high * 1e-3):
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if too_slow(middle) else (middle, high)
    return low


def batch_shape(gpu: GpuCoefficients, model: ModelCoefficients, batch: int) -> list[float]:
    """Execution time of batches of 1 ... ``batch`` as parts of the largest, in the least favourable proportion.

    The less there is to do per request, the more a small batch costs: a whole GPU and company on it are assumed.
    """
    fixed_ms = model.launch_ms + model.shared_launch_ms + model.kernels * launch_delay_ms(gpu, _COMPANY) + model.k5
    times_ms = [fixed_ms + work(model, size) / (100.0 + model.k4) for size in range(1, batch + 1)]
    return [time_ms / times_ms[-1] for time_ms in times_ms]
