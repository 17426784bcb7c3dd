"""From SLOs to sizes: Theorem 1 of iGniter, and the parts a service is cut into when one GPU is too small."""

from __future__ import annotations

import math
from typing import NamedTuple

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import Workload
from joulery.perf.interference.model import (
    InterferenceProfile,
    Latency,
    ModelCoefficients,
    Neighbourhood,
    latency,
    solo,
    work,
)
from joulery.policies.placement.provisioning.allocate import units_of

MAX_BATCH = 1024
"""No batch is larger: no profile reaches there, and the quadratic of Eq. 11 says nothing sensible about it."""
MAX_REPLICAS = 10_000
"""A service that needs more is taken for a mistake in its rate."""


class Part(NamedTuple):
    """One replica's portion of a service.

    Attributes:
        workload: Index of the service.
        replica, replicas: Which of how many.
        rate_rps: Demand routed to it.
    """

    workload: int
    replica: int
    replicas: int
    rate_rps: float


class Size(NamedTuple):
    """What Theorem 1 says a part needs when it is alone.

    Attributes:
        batch: b_appr (Eq. 17).
        work: gamma, ms percent.
        room_ms: delta: what is left of half the SLO for the work itself; <= 0 when the model cannot be that fast.
        units: r_lower (Eq. 18) in units of the GPU type; 0 when ``room_ms`` <= 0.
    """

    batch: int
    work: float
    room_ms: float
    units: int


def slo_ms(workload: Workload) -> float:
    """The latency SLO in ms, free of the rounding that the conversion from seconds adds."""
    return round(workload.slo.latency_s * 1e3, 9)


def size(profile: InterferenceProfile, model: ModelCoefficients, half_ms: float, rate_rps: float) -> Size:
    """Appropriate batch and lower bound of the share (Theorem 1, Eqs. 17-18).

    Args:
        profile: Coefficients of the GPU type.
        model: Coefficients of the model.
        half_ms: Half the SLO: the other half is for batching and queueing (constraint 14).
        rate_rps: Demand.
    """
    gpu, rate = profile.gpu, rate_rps / 1000.0
    bandwidth = gpu.pcie_bytes_per_ms
    batch = math.ceil(half_ms * rate * bandwidth / (bandwidth + rate * model.load_bytes))
    gamma = work(model, batch)
    room_ms = half_ms - (model.load_bytes + model.feedback_bytes) * batch / bandwidth - model.k5 - model.launch_ms
    if room_ms <= 0:
        return Size(batch, gamma, room_ms, 0)
    return Size(batch, gamma, room_ms, max(1, math.ceil((gamma / room_ms - model.k4) / gpu.unit_percent)))


def alone(profile: InterferenceProfile, model: ModelCoefficients, batch: int, share_percent: float) -> Latency:
    """Predicted times of a process that has a GPU to itself, throttling included."""
    own = solo(model, batch, share_percent)
    return latency(profile.gpu, model, batch, own, Neighbourhood().with_process(own))


def parts_of(
    profile: InterferenceProfile, index: int, workload: Workload, max_batch: int = MAX_BATCH
) -> list[tuple[Part, Size, bool]]:
    """The parts of a service as the published code cuts it, each with its size and whether it has a GPU to itself.

    A service that fits one GPU stays whole. Otherwise: the largest batch that keeps half the SLO on a whole GPU, a
    replica for every nine tenths of its throughput, and the rest as a part like any other. No part has a batch above
    ``max_batch``; the published code sets no limit, and its profiles reach 32.

    Raises:
        InfeasibleError: Not even a batch of one on a whole GPU is fast enough, or it takes absurdly many GPUs.
        ConfigError: The profile does not know the model.
    """
    model, half_ms = profile[workload.model], slo_ms(workload) / 2
    whole = size(profile, model, half_ms, workload.rate_rps)
    if _fits(profile, whole, max_batch):
        return [(Part(index, 0, 1, workload.rate_rps), whole, False)]
    batch = _largest_batch(profile, model, half_ms, min(whole.batch, max_batch))
    if batch == 0:
        raise too_fast(profile, workload, alone(profile, model, 1, 100.0).total_ms, half_ms)
    per_replica = math.ceil(0.9 * alone(profile, model, batch, 100.0).throughput_rps(batch))
    replicas = math.ceil(workload.rate_rps / per_replica)
    if replicas > MAX_REPLICAS:
        raise too_much(profile, workload, replicas)
    dedicated = Size(batch, work(model, batch), whole.room_ms, units_of(profile.gpu))
    parts = [(Part(index, i, replicas, float(per_replica)), dedicated, True) for i in range(replicas - 1)]
    rest_rps = workload.rate_rps - per_replica * (replicas - 1)
    rest = size(profile, model, half_ms, rest_rps)
    own_gpu = not _fits(profile, rest, max_batch)
    return [*parts, (Part(index, replicas - 1, replicas, rest_rps), dedicated if own_gpu else rest, own_gpu)]


def _fits(profile: InterferenceProfile, need: Size, max_batch: int) -> bool:
    """Whether Theorem 1 found a share of one GPU, with a batch the model is meant for."""
    return need.room_ms > 0 and need.work > 0 and need.batch <= max_batch and need.units <= units_of(profile.gpu)


def _largest_batch(profile: InterferenceProfile, model: ModelCoefficients, half_ms: float, limit: int) -> int:
    """The largest batch up to ``limit`` that keeps half the SLO on a whole GPU; 0 when none does."""
    best = 0
    for batch in range(1, limit + 1):
        if alone(profile, model, batch, 100.0).total_ms >= half_ms:
            break
        best = batch
    return best


def too_fast(profile: InterferenceProfile, workload: Workload, best_ms: float, allowed_ms: float) -> InfeasibleError:
    """The error for an SLO that no share of the GPU type can meet."""
    return InfeasibleError(
        f"service {workload.id}: {workload.model} takes {best_ms:.3f} ms for a single request on a whole "
        f"{profile.gpu.name}, but {allowed_ms:.3f} ms is all its SLO of {slo_ms(workload):g} ms leaves for a batch",
        binding=f"latency of {workload.id}",
        nearest={"workload": workload.id, "gpu": profile.gpu.name, "best_latency_s": best_ms / 1e3},
        hint="relax its SLO, choose a faster GPU type, or serve a smaller model",
    )


def too_much(profile: InterferenceProfile, workload: Workload, replicas: int) -> InfeasibleError:
    """The error for a rate that takes absurdly many GPUs."""
    return InfeasibleError(
        f"service {workload.id}: {workload.rate_rps:g} requests/s of {workload.model} take {replicas} replicas on "
        f"{profile.gpu.name}, more than {MAX_REPLICAS}",
        binding=f"rate of {workload.id}",
        nearest={"workload": workload.id, "gpu": profile.gpu.name, "replicas": replicas},
        hint="check the unit of its rate",
    )
