"""The processes on one GPU: the least shares that keep each in time, and the predictions with these shares.

Alg. 2 of iGniter gives the least shares with which every process on a GPU is within its SLO: raising one share only
raises the power and cache use that affect the others, so from given batches there is one least vector of shares, and
growing every late process, one unit at a time, finds it. Shares are counted in units of the GPU type there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance, Violation, Workload
from joulery.perf.interference.model import (
    GpuCoefficients,
    InterferenceProfile,
    Latency,
    ModelCoefficients,
    Neighbourhood,
    Solo,
    clock_mhz,
    colocated_latency,
    demand_w,
    launch_delay_ms,
    solo,
    work,
)

TOLERANCE = 1e-9
"""Relative tolerance for rounding when a prediction is compared with a limit."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """A GPU type that can be rented.

    Attributes:
        name: Its name in the site.
        profile: Its interference profile.
        usd_per_hour: Price of one.
        available: Number of GPUs; None for no limit.
        memory_bytes: Memory that processes may take; None where unknown.
        per_host: Number of them on a host.
        spot: Whether their owner can withdraw them.
    """

    name: str
    profile: InterferenceProfile
    usd_per_hour: float
    available: int | None = None
    memory_bytes: float | None = None
    per_host: int = 1
    spot: bool = False


class ReplicaLoad(NamedTuple):
    """One replica's portion of a service.

    Attributes:
        workload: Index of the service.
        replica, replicas: Number of the replica, and how many replicas there are.
        rate_rps: Demand routed to it.
    """

    workload: int
    replica: int
    replicas: int
    rate_rps: float


class Share(NamedTuple):
    """A part of a service on a GPU.

    Attributes:
        part: The replica of a service.
        share_percent: Its share of the SMs.
        batch: Its batch size.
    """

    part: ReplicaLoad
    share_percent: float
    batch: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A GPU of a plan without predictions.

    Attributes:
        type_index: Index of the GPU type.
        shares: The processes on it.
    """

    type_index: int
    shares: tuple[Share, ...]


class BatchLimit(NamedTuple):
    """Time limit of a batch of a process.

    Attributes:
        limit_ms: Longest time from loading to feedback.
        evenly: Whether its requests arrive evenly spaced, so that a batch waits until it is full.
    """

    limit_ms: float
    evenly: bool


LimitOf = Callable[[Placed, Share], BatchLimit]
"""Limit of a batch of a process on a GPU."""


Figures = tuple[float, float, float]
"""k_act (ms), p (W) and c (percent) of a process alone."""


class Process(NamedTuple):
    """The constants of a process that decide whether it is late, worked out once.

    Attributes:
        batch: Batch size.
        limit_ms: Longest execution time when the GPU is shared.
        limit_alone_ms: Longest execution time when the process has the GPU to itself.
        launch_ms: Launch delay of all kernels when the GPU is shared, the part that grows with neighbours excluded.
        launch_alone_ms: Launch delay of all kernels when alone.
        kernels: Kernels of one inference.
        work: Eq. 11's numerator.
        k4, k5: Eq. 11.
        ability: Requests of a batch times 1000; divided by k_act, the processing ability.
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
    """Number of units of a whole GPU."""
    return math.floor(100.0 / gpu.unit_percent + 1e-9)


def slowdown(gpu: GpuCoefficients, power_w: float) -> float:
    """F/f for processes that demand this much power together (Eq. 9); infinite when no clock is left."""
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
    """The least shares with which all processes are in time.

    Args:
        gpu: Hardware coefficients.
        processes: The processes on the GPU.
        start: Units each has at least, such as those it needs alone.
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
        units, figures: Units of each process, and its figures with them; both lists are changed.
        spare: Units that may be added in all.

    Returns:
        False when more than ``spare`` would be needed; the shares are then not valid.
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


def slo_ms(workload: Workload) -> float:
    """The latency SLO in ms, free of the rounding that the conversion from seconds adds."""
    return round(workload.slo.latency_s * 1e3, 9)


def alone(profile: InterferenceProfile, model: ModelCoefficients, batch: int, share_percent: float) -> Latency:
    """Predicted times of a process that has a GPU to itself, throttling included."""
    own = solo(model, batch, share_percent)
    return colocated_latency(profile.gpu, model, batch, own, Neighbourhood().with_process(own))


def predict(
    gpus: Sequence[Placed], workloads: Sequence[Workload], types: Sequence[GpuType], limit_of: LimitOf
) -> tuple[PlannedGpu, ...]:
    """Model predictions for every GPU and its processes (Eqs. 1-11), compared with the limits of batches.

    Args:
        gpus: The GPUs; empty ones are left out.
        workloads: The services the parts refer to.
        types: The GPU types.
        limit_of: Limits of batches, without margins.
    """
    return tuple(_gpu(types[gpu.type_index], gpu, workloads, limit_of) for gpu in gpus if gpu.shares)


def _gpu(gpu_type: GpuType, gpu: Placed, workloads: Sequence[Workload], limit_of: LimitOf) -> PlannedGpu:
    profile = gpu_type.profile
    solos: list[Solo] = []
    around = Neighbourhood()
    for share in gpu.shares:
        own = solo(profile[workloads[share.part.workload].model], share.batch, share.share_percent)
        solos.append(own)
        around = around.with_process(own)
    demand = demand_w(profile.gpu, around)
    return PlannedGpu(
        type=gpu_type.name,
        usd_per_hour=gpu_type.usd_per_hour,
        clock_mhz=max(0.0, clock_mhz(profile.gpu, around)),
        clock_max_mhz=profile.gpu.clock_max_mhz,
        demand_w=demand,
        power_w=min(demand, profile.gpu.power_cap_w),
        instances=tuple(
            _instance(
                profile,
                workloads[share.part.workload],
                share,
                own,
                around,
                limit_of(gpu, share),
            )
            for share, own in zip(gpu.shares, solos, strict=True)
        ),
        memory_limit_bytes=math.nan if gpu_type.memory_bytes is None else gpu_type.memory_bytes,
    )


def _instance(
    profile: InterferenceProfile,
    workload: Workload,
    share: Share,
    own: Solo,
    around: Neighbourhood,
    limit: BatchLimit,
) -> PlannedInstance:
    times = colocated_latency(profile.gpu, profile[workload.model], share.batch, own, around)
    return PlannedInstance(
        workload=workload.id,
        model=workload.model,
        replica=share.part.replica,
        replicas=share.part.replicas,
        rate_rps=share.part.rate_rps,
        share_ratio=share.share_percent / 100.0,
        batch=share.batch,
        max_delay_s=math.inf if limit.evenly else 0.0,
        wait_s=(share.batch - 1) / share.part.rate_rps if limit.evenly else math.nan,
        parts=LatencyParts(
            load_s=times.load_ms / 1e3,
            schedule_s=times.schedule_ms / 1e3,
            active_s=times.active_ms / 1e3,
            throttle_s=(times.gpu_ms - times.schedule_ms - times.active_ms) / 1e3,
            feedback_s=times.feedback_ms / 1e3,
        ),
        limit_s=limit.limit_ms / 1e3,
        throughput_rps=times.throughput_rps(share.batch),
        slo_s=workload.slo.latency_s,
        memory_bytes=math.nan if workload.memory_bytes is None else workload.memory_bytes,
    )


def violations_of(gpus: Sequence[PlannedGpu]) -> tuple[Violation, ...]:
    """Every predicted violation: latency, throughput, shares beyond a whole GPU, or memory beyond that of the GPU."""
    found: list[Violation] = []
    for index, gpu in enumerate(gpus):
        if gpu.share_ratio > 1 + TOLERANCE:
            found.append(Violation(gpu.instances[-1].workload, index, "share", gpu.share_ratio, 1.0))
        if gpu.memory_bytes > gpu.memory_limit_bytes:
            largest = max(gpu.instances, key=lambda each: each.memory_bytes).workload
            found.append(Violation(largest, index, "memory", gpu.memory_bytes, gpu.memory_limit_bytes))
        for each in gpu.instances:
            if not 0 < each.latency_s <= each.limit_s * (1 + TOLERANCE):
                found.append(Violation(each.workload, index, "latency", each.latency_s, each.limit_s))
            elif not each.throughput_rps >= each.rate_rps * (1 - TOLERANCE):
                found.append(Violation(each.workload, index, "throughput", each.throughput_rps, each.rate_rps))
    return tuple(found)


def on_hosts(gpus: Sequence[PlannedGpu], types: Sequence[GpuType]) -> tuple[PlannedGpu, ...]:
    """Assign the GPUs to hosts by first fit, so that no two GPUs of a host have replicas of one service.

    GPUs with most services come first, for they are the hardest to put beside others. A host has GPUs of one type.
    """
    per_host = {kind.name: kind.per_host for kind in types}
    hosts: list[tuple[str, int, set[str]]] = []
    host_of: dict[int, int] = {}
    services = [{each.workload for each in gpu.instances} for gpu in gpus]
    cut = {each.workload for gpu in gpus for each in gpu.instances if each.replicas > 1}
    for index in sorted(range(len(gpus)), key=lambda at: -len(services[at] & cut)):
        kind, mine = gpus[index].type, services[index] & cut
        for host, (has, room, there) in enumerate(hosts):
            if has == kind and room > 0 and not there & mine:
                hosts[host] = (has, room - 1, there | mine)
                break
        else:
            host = len(hosts)
            hosts.append((kind, per_host[kind] - 1, set(mine)))
        host_of[index] = host
    number = {host: at for at, host in enumerate(dict.fromkeys(host_of[index] for index in range(len(gpus))))}
    return tuple(replace(gpu, host=number[host_of[index]]) for index, gpu in enumerate(gpus))


def shared_domains_of(gpus: Sequence[PlannedGpu], types: Sequence[GpuType]) -> tuple[Violation, ...]:
    """A violation for each service with replicas that share a GPU, and for each GPU type with too few hosts."""
    found: list[Violation] = []
    for index, gpu in enumerate(gpus):
        count = Counter(each.workload for each in gpu.instances)
        found += [Violation(name, index, "gpu", float(n), 1.0) for name, n in count.items() if n > 1]
    for kind in types:
        hosts = list(dict.fromkeys(gpu.host for gpu in gpus if gpu.type == kind.name and gpu.host is not None))
        there = math.inf if kind.available is None else math.ceil(kind.available / kind.per_host)
        if len(hosts) > there:
            index = next(at for at, gpu in enumerate(gpus) if gpu.host == hosts[int(there)])
            found.append(Violation(gpus[index].instances[0].workload, index, "host", float(len(hosts)), there))
    return tuple(found)


def shortages_of(gpus: Sequence[PlannedGpu], types: Sequence[GpuType]) -> tuple[Violation, ...]:
    """A violation for each GPU type of which the plan has more than are available.

    A plan has more only where no plan within the limits was found and none was proven impossible.
    """
    found: list[Violation] = []
    for gpu_type in types:
        mine = [index for index, gpu in enumerate(gpus) if gpu.type == gpu_type.name]
        if gpu_type.available is not None and len(mine) > gpu_type.available:
            first = mine[gpu_type.available]
            name = gpus[first].instances[0].workload
            found.append(Violation(name, first, "available", float(len(mine)), float(gpu_type.available)))
    return tuple(found)
