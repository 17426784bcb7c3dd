"""Rules of a plan, and the ways to serve a service within them: replicas, and batches on each GPU type.

Services that are alike (same model, SLO, rate and arrivals) form one class and are planned as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import NormalDist
from types import MappingProxyType
from typing import NamedTuple

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.provisioning import PROCESSES_PER_INSTANCE, Workload
from joulery.perf.interference.model import GpuCoefficients, ModelCoefficients, launch_delay_ms, work
from joulery.policies.placement.provisioning.gpu_shares import (
    BatchLimit,
    Figures,
    GpuType,
    Placed,
    Process,
    Share,
    alone,
    least_units,
    process,
    slo_ms,
)
from joulery.policies.placement.provisioning.random_limits import KnownLimits, random_limit_ms

_COMPANY = 4
"""Number of processes on a GPU assumed for the launch delay of a random batch."""
MAX_REPLICAS = 10_000
"""Most replicas of a service; a need for more is treated as a mistake in its rate."""
_MORE_REPLICAS = 2
"""Number of replicas beyond the fewest that are tried when a service needs more than the rules would choose."""


class Accounting(StrEnum):
    """Part of the SLO that a batch may take when requests arrive evenly spaced."""

    HALF_SLO = "half-slo"
    """Half of the SLO, however long the batch waits (the paper's constraint 14)."""
    FULL_SLO = "full-slo"
    """The SLO minus the wait of a batch's first request for its last."""


class FailureDomain(StrEnum):
    """Resource that no two replicas of a service may share."""

    NONE = "none"
    """Nothing: replicas may be on one GPU."""
    GPU = "gpu"
    """A GPU."""
    HOST = "host"
    """A host, and so a GPU."""


class Balancer(StrEnum):
    """Distribution of a service's requests over its replicas."""

    TURNS = "turns"
    """In strict turns: every gap of a replica is the sum of as many gaps as there are replicas."""
    RANDOM = "random"
    """Each request at random: gaps of a replica vary as much as independent users make them."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Choices and constraints of preset ``best``.

    Attributes:
        accounting: How much of the SLO a batch may take. Random arrivals are accounted for as a queue instead.
        max_batch: Largest batch; the published profile reaches 32.
        max_replicas: Most equal replicas of a service; a service that needs more may have more.
        margin_ratio: Latencies are taken to be longer, and demands larger, by this ratio.
        noise_cv: Coefficient of variation of a batch's time from batch to batch; with the full SLO accounted for, the
            SLO quantile of that time counts instead of its mean.
        balancer: Distribution of requests over the replicas of a service.
        domain: Resource that may fail as a whole: no two replicas of a service share one.
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
        rate_rps: Requests a second.
        scv: Squared coefficient of variation of their gaps.
    """

    rate_rps: float
    scv: float


_HARDLY_ANY = RequestStream(1e-6, 0.0)
"""Requests so rare that only the latency of a single one can violate the SLO."""


class Option(NamedTuple):
    """One batch for a replica on one GPU type.

    Attributes:
        process: Its constants.
        units: Units it needs when it has the GPU to itself.
        figures: k_act, p and c with these units.
    """

    process: Process
    units: int
    figures: Figures


class Item(NamedTuple):
    """One replica of a service that is divided into ``replicas`` equal ones.

    Attributes:
        kind: Index of the class of services.
        replicas: Number of equal replicas of the service.
        options: For each GPU type the batches with which it fits, the one with the fewest units first.
        memory_bytes: GPU memory of the replica and its standby; 0 where unknown.
        apart: Whether no other replica of its service may share its GPU.
    """

    kind: int
    replicas: int
    options: tuple[tuple[Option, ...], ...]
    memory_bytes: float = 0.0
    apart: bool = False


class Kind(NamedTuple):
    """A class of services that are alike.

    Attributes:
        members: Indices of the services.
        items: The ways to divide one of them into replicas, fewest replicas first.
    """

    members: tuple[int, ...]
    items: tuple[Item, ...]


def kinds_of(workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> tuple[Kind, ...]:
    """The classes of services and how each can be served, in the order of first appearance.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: No GPU types, two services of one name, or a model unknown to all types.
    """
    if not types:
        raise ConfigError("the fleet has no GPU type", expected="at least one", hint="add one under fleet.gpus")
    names = [workload.id for workload in workloads]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError("two services have the same name", got=twice)
    alike: dict[object, list[int]] = {}
    for index, workload in enumerate(workloads):
        look = replace(workload, id="")
        # Replicas of different services may share a GPU: services that are alike are kinds of their own.
        alike.setdefault((look, workload.id) if rules.apart and rules.max_replicas > 1 else look, []).append(index)
    return tuple(
        Kind(tuple(members), items_of(workloads[members[0]], kind, types, rules))
        for kind, members in enumerate(alike.values())
    )


def items_of(workload: Workload, kind: int, types: Sequence[GpuType], rules: Rules) -> tuple[Item, ...]:
    """The ways to divide a service into replicas: up to ``rules.max_replicas``, or as few as work if more are needed.

    Raises:
        InfeasibleError: No number of replicas works on any type.
        ConfigError: The model is unknown to all types.
    """
    known = [gpu_type for gpu_type in types if workload.model in gpu_type.profile.models]
    if not known:
        types[0].profile[workload.model]
    if not any(may_use(workload, gpu_type) for gpu_type in known):
        raise spot_only_error(workload)
    known = [gpu_type for gpu_type in known if may_use(workload, gpu_type)]
    if not any(fits_memory(workload, gpu_type) for gpu_type in known):
        raise too_large(workload, known)
    if not any(_options(workload, _HARDLY_ANY, gpu_type, rules) for gpu_type in known):
        raise _too_fast(workload, known, rules)
    fewest = workload.replicas_min
    items = [
        _item(workload, kind, replicas, types, rules) for replicas in range(fewest, max(fewest, rules.max_replicas) + 1)
    ]
    items = [item for item in items if any(item.options)]
    if not items and rules.max_replicas == 1:
        raise _needs_replicas(workload, _fewest(workload, kind, types, rules))
    if not items:
        fewest = _fewest(workload, kind, types, rules)
        items = [_item(workload, kind, fewest + more, types, rules) for more in range(_MORE_REPLICAS + 1)]
    return tuple(items)


def _fewest(workload: Workload, kind: int, types: Sequence[GpuType], rules: Rules) -> int:
    """The smallest number of replicas that works on some type: fewer requests each are never worse."""
    low, high = workload.replicas_min, 2 * workload.replicas_min
    while not any(_item(workload, kind, high, types, rules).options):
        low, high = high, 2 * high
        if high > 2 * MAX_REPLICAS:
            raise InfeasibleError(
                f"service {workload.id}: {workload.rate_rps:g} requests/s of {workload.model} take more than "
                f"{MAX_REPLICAS} replicas",
                binding=f"rate of {workload.id}",
                hint="check the unit of its rate",
            )
    while high - low > 1:
        middle = (low + high) // 2
        if any(_item(workload, kind, middle, types, rules).options):
            high = middle
        else:
            low = middle
    return high


def _item(workload: Workload, kind: int, replicas: int, types: Sequence[GpuType], rules: Rules) -> Item:
    stream = stream_of(workload, replicas, rules.balancer)
    return Item(
        kind,
        replicas,
        tuple(_options(workload, stream, gpu_type, rules) for gpu_type in types),
        PROCESSES_PER_INSTANCE * (workload.memory_bytes or 0.0),
        rules.apart and replicas > 1,
    )


def _options(workload: Workload, stream: RequestStream, gpu_type: GpuType, rules: Rules) -> tuple[Option, ...]:
    """Every batch with which a replica fits on one type, the one with the fewest units first."""
    gpu, model = gpu_type.profile.gpu, gpu_type.profile.models.get(workload.model)
    if model is None or not may_use(workload, gpu_type) or not fits_memory(workload, gpu_type):
        return ()
    found: list[Option] = []
    for batch in batches_of(rules, workload, stream):
        shared_ms = limit_ms(rules, gpu, model, workload, stream, batch, shared=True)
        alone_ms = shared_ms
        if model.pcie_contention > 1 and stream.scv == 0:
            alone_ms = limit_ms(rules, gpu, model, workload, stream, batch, shared=False)
        one = process(model, batch, shared_ms, alone_ms)
        units = least_units(gpu, one)
        if units is not None:
            found.append(Option(one, units, one.figures(units * gpu.unit_percent)))
    return tuple(sorted(found, key=lambda option: (option.units, option.process.batch)))


def may_use(workload: Workload, gpu_type: GpuType) -> bool:
    """Whether a service may be on a type: on spot GPUs only if the service allows it."""
    return workload.spot or not gpu_type.spot


def spot_only_error(workload: Workload) -> InfeasibleError:
    """The error for a service that may not be on spot GPUs where there are no others."""
    return InfeasibleError(
        f"service {workload.id} may not be on spot GPUs, and the fleet has no others for it",
        binding=f"market of {workload.id}",
        nearest={"workload": workload.id},
        hint="add an on-demand price, or state spot: true for the service",
    )


def fits_memory(workload: Workload, gpu_type: GpuType) -> bool:
    """Whether a process and its standby fit into the memory of a GPU, as far as both are known."""
    if workload.memory_bytes is None or gpu_type.memory_bytes is None:
        return True
    return PROCESSES_PER_INSTANCE * workload.memory_bytes <= gpu_type.memory_bytes


def too_large(workload: Workload, types: Sequence[GpuType]) -> InfeasibleError:
    """The error for a model that fits into the memory of no GPU type."""
    largest = max(types, key=lambda each: each.memory_bytes or 0.0)
    needed = PROCESSES_PER_INSTANCE * (workload.memory_bytes or 0.0)
    return InfeasibleError(
        f"service {workload.id}: a process of {workload.model} and its standby take {needed / 1e9:.3g} GB, but "
        f"{largest.name} has {(largest.memory_bytes or 0.0) / 1e9:.3g} GB",
        binding=f"memory of {workload.id}",
        nearest={"workload": workload.id, "gpu": largest.name, "memory_bytes": needed},
        hint="add a GPU type with more memory, or serve a smaller model",
    )


def _too_fast(workload: Workload, types: Sequence[GpuType], rules: Rules) -> InfeasibleError:
    """The error for an SLO that no share of any GPU type can meet, naming the best it could get."""
    best_ms, best = min(
        ((alone(t.profile, t.profile[workload.model], 1, 100.0).total_ms, t) for t in types), key=lambda found: found[0]
    )
    allowed_ms = batch_limit_ms(rules, workload, _HARDLY_ANY, 1) / (1 + rules.margin_ratio)
    return InfeasibleError(
        f"service {workload.id}: {workload.model} takes at best {best_ms:.3f} ms, for a single request on a whole "
        f"{best.name}, but {allowed_ms:.3f} ms is all its SLO of {slo_ms(workload):g} ms leaves for a batch",
        binding=f"latency of {workload.id}",
        nearest={"workload": workload.id, "gpu": best.name, "best_latency_s": best_ms / 1e3},
        hint="relax its SLO, add a faster GPU type, or serve a smaller model",
    )


def _needs_replicas(workload: Workload, replicas: int) -> InfeasibleError:
    return InfeasibleError(
        f"service {workload.id}: no GPU type serves {workload.rate_rps:g} requests/s of {workload.model} within "
        f"{slo_ms(workload):g} ms alone",
        binding=f"rate of {workload.id}",
        nearest={"workload": workload.id, "replicas": replicas},
        hint=f"allow replicas: {replicas} would do",
    )


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
    known: KnownLimits | None = None,
) -> float:
    """Time limit of the execution of a full batch (t_gpu) that keeps latency and throughput.

    Evenly spaced requests wait for a full batch: constraints 13 and 14 of the paper, or the full SLO. A batch of random
    requests holds as many as have gathered; the limit is where the SLO quantile of the waiting and serving time meets
    the SLO.

    Args:
        rules: Constraints and choices.
        gpu, model: Coefficients.
        workload: The service.
        stream: The part of its requests that this replica serves.
        batch: Batch size; the largest, for random requests.
        shared: Whether the GPU is shared; transfers may then take longer.
        known: Limits of random requests found before, which speed up the search.

    Returns:
        Milliseconds; <= 0 when nothing is left for execution.
    """
    transfer = (model.pcie_contention if shared else 1.0) / gpu.pcie_bytes_per_ms
    load_ms, feedback_ms = model.load_bytes * transfer, model.feedback_bytes * transfer
    margin = 1 + rules.margin_ratio
    if stream.scv > 0:
        margin = 1 + max(rules.margin_ratio, rules.random_margins.get(workload.model, 0.0))
        limit = random_limit_ms(
            stream.rate_rps,
            stream.scv,
            batch_shape(gpu, model, batch),
            load_ms + feedback_ms,
            slo_ms(workload),
            1 - workload.slo.quantile,
            known,
            (gpu.name, workload.model, workload.slo, stream.scv, batch, shared),
        )
        return limit / margin
    keep_up_ms = 1000.0 * batch / (stream.rate_rps * margin) - feedback_ms * batch
    batch_ms = batch_limit_ms(rules, workload, stream, batch) / margin / _quantile_ratio(rules, workload)
    return min(keep_up_ms, batch_ms - (load_ms + feedback_ms) * batch)


def batch_limit_ms(rules: Rules, workload: Workload, stream: RequestStream, batch: int) -> float:
    """Time limit of a batch of evenly spaced requests from loading to feedback (t_inf)."""
    if rules.accounting is Accounting.HALF_SLO:
        return slo_ms(workload) / 2
    return slo_ms(workload) - (batch - 1) * 1000.0 / stream.rate_rps


def _quantile_ratio(rules: Rules, workload: Workload) -> float:
    """The SLO quantile of a batch's time over its mean (lognormal); 1 where half of the SLO absorbs it."""
    if rules.accounting is Accounting.HALF_SLO or rules.noise_cv == 0:
        return 1.0
    sigma = math.sqrt(math.log1p(rules.noise_cv**2))
    return max(1.0, math.exp(NormalDist().inv_cdf(workload.slo.quantile) * sigma - sigma * sigma / 2))


def batches_of(rules: Rules, workload: Workload, stream: RequestStream) -> tuple[int, ...]:
    """The batch sizes to consider: all for evenly spaced requests, powers of two for random ones.

    Random requests that are in time gather to hardly more than arrive within the SLO; larger sizes are left out.
    """
    if stream.scv == 0:
        return tuple(range(1, rules.max_batch + 1))
    gather = 4 + 2 * stream.rate_rps * workload.slo.latency_s
    return tuple(size for size in (1 << power for power in range(11)) if size <= min(rules.max_batch, gather))


def batch_shape(gpu: GpuCoefficients, model: ModelCoefficients, batch: int) -> list[float]:
    """Execution times of batches of 1 ... ``batch`` as fractions of the largest, in the least favourable proportion.

    The less work a request takes, the larger the fraction of a small batch: a whole GPU with neighbours is assumed.
    """
    fixed_ms = model.launch_ms + model.shared_launch_ms + model.kernels * launch_delay_ms(gpu, _COMPANY) + model.k5
    times_ms = [fixed_ms + work(model, size) / (100.0 + model.k4) for size in range(1, batch + 1)]
    return [time_ms / times_ms[-1] for time_ms in times_ms]


class BatchLimits:
    """Time limits of batches from loading to feedback, margins left out; worked out once for equal processes."""

    def __init__(self, workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> None:
        self._workloads, self._types = workloads, types
        self._rules = Rules(rules.accounting, rules.max_batch, rules.max_replicas, balancer=rules.balancer)
        self._known: dict[object, float] = {}

    def __call__(self, gpu: Placed, share: Share) -> BatchLimit:
        """The limit of a process on a GPU."""
        workload, replicas, processes = self._workloads[share.part.workload], share.part.replicas, len(gpu.shares)
        scv = split_scv(workload.arrivals.scv, replicas, self._rules.balancer)
        stream = RequestStream(share.part.rate_rps, scv)
        if scv == 0:
            return BatchLimit(batch_limit_ms(self._rules, workload, stream, share.batch), evenly=True)
        key = (gpu.type_index, workload.model, workload.slo, stream, share.batch, processes > 1)
        if key not in self._known:
            profile = self._types[gpu.type_index].profile
            model = profile[workload.model]
            execution_ms = limit_ms(
                self._rules, profile.gpu, model, workload, stream, share.batch, shared=processes > 1
            )
            transfer = share.batch / profile.gpu.pcie_bytes_per_ms * (model.pcie_contention if processes > 1 else 1.0)
            self._known[key] = execution_ms + (model.load_bytes + model.feedback_bytes) * transfer
        return BatchLimit(self._known[key], evenly=False)
