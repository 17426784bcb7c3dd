"""Sizes and shares: Theorem 1 of iGniter, replicas of services too large for one GPU, and Alg. 2.

Theorem 1 gives the batch and the least share of a service alone. Alg. 2 gives the least shares with which every process
on a GPU is within its SLO: raising one share only raises the power and cache use that the others feel, so from given
batches there is one least vector of shares, and growing every late process, one unit at a time, finds it.

Shares are counted in units of the GPU type here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from joulery.domain.errors import InfeasibleError
from joulery.domain.gpu.provisioning import Workload
from joulery.perf.interference.model import (
    GpuCoefficients,
    InterferenceProfile,
    Latency,
    ModelCoefficients,
    Neighbourhood,
    latency,
    launch_delay_ms,
    solo,
    work,
)

Figures = tuple[float, float, float]
"""k_act (ms), p (W) and c (percent) of a process alone."""


class Process(NamedTuple):
    """The constants of a process that decide whether it is late, worked out once.

    Attributes:
        batch: Batch size.
        limit_ms: What execution may take when the GPU is shared.
        limit_alone_ms: What it may take when the process has the GPU to itself.
        launch_ms: Launch delay of all kernels when the GPU is shared, the part that grows with neighbours excluded.
        launch_alone_ms: Launch delay of all kernels when alone.
        kernels: Kernels of one inference.
        work: Eq. 11's numerator.
        k4, k5: Eq. 11.
        ability: Requests times 1000: over k_act, the processing ability.
        power_slope, power_offset_w, cache_slope, cache_offset_percent, cache_sensitivity: As in the profile.
    """

    batch: int
    limit_ms: float
    limit_alone_ms: float
    launch_ms: float
    launch_alone_ms: float
    kernels: float
    work: float
    k4: float
    k5: float
    ability: float
    power_slope: float
    power_offset_w: float
    cache_slope: float
    cache_offset_percent: float
    cache_sensitivity: float

    def figures(self, share_percent: float) -> Figures:
        """k_act, p and c alone with this share (Eq. 11)."""
        active_ms = self.work / (share_percent + self.k4) + self.k5
        ability = self.ability / active_ms
        return (
            active_ms,
            self.power_slope * ability + self.power_offset_w,
            self.cache_slope * ability + self.cache_offset_percent,
        )


def process(model: ModelCoefficients, batch: int, limit_ms: float, limit_alone_ms: float) -> Process:
    """The constants of a model with a batch and the limits of its execution."""
    return Process(
        batch=batch,
        limit_ms=limit_ms,
        limit_alone_ms=limit_alone_ms,
        launch_ms=model.launch_ms + model.shared_launch_ms,
        launch_alone_ms=model.launch_ms,
        kernels=model.kernels,
        work=work(model, batch),
        k4=model.k4,
        k5=model.k5,
        ability=1000.0 * batch,
        power_slope=model.power_slope,
        power_offset_w=model.power_offset_w,
        cache_slope=model.cache_slope,
        cache_offset_percent=model.cache_offset_percent,
        cache_sensitivity=model.cache_sensitivity,
    )


def units_of(gpu: GpuCoefficients) -> int:
    """How many units a whole GPU has."""
    return math.floor(100.0 / gpu.unit_percent + 1e-9)


def slowdown(gpu: GpuCoefficients, power_w: float) -> float:
    """F/f for processes that ask for this much power together (Eq. 9); infinite when no clock is left."""
    excess_w = gpu.idle_w + power_w - gpu.power_cap_w
    if excess_w <= 0:
        return 1.0
    clock_mhz = gpu.clock_max_mhz + gpu.clock_mhz_per_w * excess_w
    return gpu.clock_max_mhz / clock_mhz if clock_mhz > 0 else math.inf


def least_units(gpu: GpuCoefficients, one: Process) -> int | None:
    """The fewest units with which a process that has the GPU to itself is in time, throttling included.

    Not assumed monotone: a larger share also draws more power. None when no share is enough.
    """
    room_ms = one.limit_alone_ms - one.launch_alone_ms - one.k5
    if room_ms <= 0 or one.work <= 0:
        return None
    unit = gpu.unit_percent
    first = max(1, math.ceil((one.work / room_ms - one.k4) / unit - 1e-9))
    for units in range(first, units_of(gpu) + 1):
        active_ms, power_w, _ = one.figures(units * unit)
        if (one.launch_alone_ms + active_ms) * slowdown(gpu, power_w) <= one.limit_alone_ms:
            return units
    return None


def allocate(
    gpu: GpuCoefficients, processes: Sequence[Process], start: Sequence[int], most: int | None = None
) -> list[int] | None:
    """The least shares with which all are in time.

    Args:
        gpu: Hardware coefficients.
        processes: Who is on the GPU.
        start: Units each has at least, such as what it needs alone.
        most: Units there are in all; a whole GPU when left out.

    Returns:
        Units of each process; None when they come to more than ``most``.
    """
    most = units_of(gpu) if most is None else most
    total = sum(start)
    if total > most:
        return None
    if len(processes) == 1:
        least = least_units(gpu, processes[0])
        return None if least is None or max(least, *start) > most else [max(least, *start)]
    units = list(start)
    figures = [one.figures(n * gpu.unit_percent) for one, n in zip(processes, units, strict=True)]
    return units if settle(gpu, processes, units, figures, most - total) else None


def settle(
    gpu: GpuCoefficients, processes: Sequence[Process], units: list[int], figures: list[Figures], spare: int
) -> bool:
    """Grow the shares of several processes on a GPU, in place, until none is late (Eqs. 4-10).

    All that are late in the same snapshot gain one unit each.

    Args:
        gpu: Hardware coefficients.
        processes: Two or more.
        units, figures: What each has, and its figures with that; both are changed.
        spare: Units that may be added in all.

    Returns:
        False when more than ``spare`` would be needed; the shares are then of no use.
    """
    delay_ms, unit = launch_delay_ms(gpu, len(processes)), gpu.unit_percent
    spare_w = gpu.power_cap_w - gpu.idle_w
    clock_per_w = gpu.clock_mhz_per_w / gpu.clock_max_mhz
    while True:
        excess_w = sum([power_w for _, power_w, _ in figures]) - spare_w
        speed = 1.0 + clock_per_w * excess_w if excess_w > 0 else 1.0
        cache = sum([own for _, _, own in figures])
        late = [
            i
            for i, (one, (active_ms, _, own)) in enumerate(zip(processes, figures, strict=True))
            if one.launch_ms + one.kernels * delay_ms + active_ms * (1 + one.cache_sensitivity * (cache - own))
            > one.limit_ms * speed
        ]
        if not late:
            return True
        spare -= len(late)
        if spare < 0:
            return False
        for i in late:
            units[i] += 1
            figures[i] = processes[i].figures(units[i] * unit)


MAX_BATCH = 1024
"""No batch is larger: no profile reaches there, and the quadratic of Eq. 11 says nothing sensible about it."""
MAX_REPLICAS = 10_000
"""A service that needs more is taken for a mistake in its rate."""


class ReplicaLoad(NamedTuple):
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
) -> list[tuple[ReplicaLoad, Size, bool]]:
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
        return [(ReplicaLoad(index, 0, 1, workload.rate_rps), whole, False)]
    batch = _largest_batch(profile, model, half_ms, min(whole.batch, max_batch))
    if batch == 0:
        raise too_fast(profile, workload, alone(profile, model, 1, 100.0).total_ms, half_ms)
    per_replica = math.ceil(0.9 * alone(profile, model, batch, 100.0).throughput_rps(batch))
    replicas = math.ceil(workload.rate_rps / per_replica)
    if replicas > MAX_REPLICAS:
        raise too_much(profile, workload, replicas)
    dedicated = Size(batch, work(model, batch), whole.room_ms, units_of(profile.gpu))
    parts = [(ReplicaLoad(index, i, replicas, float(per_replica)), dedicated, True) for i in range(replicas - 1)]
    rest_rps = workload.rate_rps - per_replica * (replicas - 1)
    rest = size(profile, model, half_ms, rest_rps)
    own_gpu = not _fits(profile, rest, max_batch)
    return [*parts, (ReplicaLoad(index, replicas - 1, replicas, rest_rps), dedicated if own_gpu else rest, own_gpu)]


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
