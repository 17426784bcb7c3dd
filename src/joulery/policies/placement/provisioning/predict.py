"""From shares to a plan: what the model predicts for every process, and which SLOs it would violate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from joulery.domain.gpu.provisioning import (
    LatencyParts,
    PlannedGpu,
    PlannedInstance,
    Violation,
    Workload,
)
from joulery.perf.interference.model import InterferenceProfile, Neighbourhood, Solo, clock_mhz, demand_w, latency, solo
from joulery.policies.placement.provisioning.rules import RequestStream, Rules, batch_limit_ms, limit_ms, split_scv
from joulery.policies.placement.provisioning.sizes import ReplicaLoad

TOLERANCE = 1e-9
"""Relative slack granted to rounding when a prediction is held against a limit."""


class Share(NamedTuple):
    """A part of a service on a GPU.

    Attributes:
        part: Which part of which service.
        share_percent: Its share of the SMs.
        batch: Its batch size.
    """

    part: ReplicaLoad
    share_percent: float
    batch: int


@dataclass(frozen=True, slots=True)
class GpuType:
    """A kind of GPU one can rent.

    Attributes:
        name: As the site calls it.
        profile: What is known of it.
        usd_per_hour: Price of one.
        available: How many there are; None for as many as wanted.
        memory_bytes: Memory that processes may take; None where unknown.
        per_host: How many of them a host has.
        spot: Whether their owner can withdraw them.
    """

    name: str
    profile: InterferenceProfile
    usd_per_hour: float
    available: int | None = None
    memory_bytes: float | None = None
    per_host: int = 1
    spot: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """A GPU of a plan before anything is predicted.

    Attributes:
        type_index: Which GPU type.
        shares: The processes on it.
    """

    type_index: int
    shares: tuple[Share, ...]


def predict(
    gpus: Sequence[Placed], workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules
) -> tuple[PlannedGpu, ...]:
    """What the model says of every GPU and its processes (Eqs. 1-11), held against what the rules ask for.

    Args:
        gpus: The GPUs; empty ones are left out.
        workloads: The services the parts refer to.
        types: The GPU types.
        rules: Which latency counts; margins are not held against the plan.
    """
    limits = _Limits(workloads, types, rules)
    return tuple(_gpu(types[gpu.type_index], gpu, workloads, limits) for gpu in gpus if gpu.shares)


def _gpu(gpu_type: GpuType, gpu: Placed, workloads: Sequence[Workload], limits: _Limits) -> PlannedGpu:
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
                limits.of(gpu, share, len(solos)),
                evenly=limits.stream(share).scv == 0,
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
    limit_ms: float,
    *,
    evenly: bool,
) -> PlannedInstance:
    times = latency(profile.gpu, profile[workload.model], share.batch, own, around)
    return PlannedInstance(
        workload=workload.id,
        model=workload.model,
        replica=share.part.replica,
        replicas=share.part.replicas,
        rate_rps=share.part.rate_rps,
        share_ratio=share.share_percent / 100.0,
        batch=share.batch,
        max_delay_s=math.inf if evenly else 0.0,
        wait_s=(share.batch - 1) / share.part.rate_rps if evenly else math.nan,
        parts=LatencyParts(
            load_s=times.load_ms / 1e3,
            schedule_s=times.schedule_ms / 1e3,
            active_s=times.active_ms / 1e3,
            throttle_s=(times.gpu_ms - times.schedule_ms - times.active_ms) / 1e3,
            feedback_s=times.feedback_ms / 1e3,
        ),
        limit_s=limit_ms / 1e3,
        throughput_rps=times.throughput_rps(share.batch),
        slo_s=workload.slo.latency_s,
        memory_bytes=math.nan if workload.memory_bytes is None else workload.memory_bytes,
    )


class _Limits:
    """What a batch may take from loading to feedback, worked out once for processes that are alike."""

    def __init__(self, workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> None:
        self._workloads, self._types = workloads, types
        self._rules = Rules(rules.accounting, rules.max_batch, rules.max_replicas, balancer=rules.balancer)
        self._known: dict[object, float] = {}

    def stream(self, share: Share) -> RequestStream:
        """The requests that reach a process."""
        scv = self._workloads[share.part.workload].arrivals.scv
        return RequestStream(share.part.rate_rps, split_scv(scv, share.part.replicas, self._rules.balancer))

    def of(self, gpu: Placed, share: Share, processes: int) -> float:
        """Milliseconds."""
        workload, stream = self._workloads[share.part.workload], self.stream(share)
        if stream.scv == 0:
            return batch_limit_ms(self._rules, workload, stream, share.batch)
        key = (gpu.type_index, workload.model, workload.slo, stream, share.batch, processes > 1)
        if key not in self._known:
            profile = self._types[gpu.type_index].profile
            model = profile[workload.model]
            execution_ms = limit_ms(
                self._rules, profile.gpu, model, workload, stream, share.batch, shared=processes > 1
            )
            transfer = share.batch / profile.gpu.pcie_bytes_per_ms * (model.pcie_contention if processes > 1 else 1.0)
            self._known[key] = execution_ms + (model.load_bytes + model.feedback_bytes) * transfer
        return self._known[key]


def violations_of(gpus: Sequence[PlannedGpu]) -> tuple[Violation, ...]:
    """Every violation that is predicted: latency, throughput, more than a whole GPU given away, or than its memory."""
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
    """The GPUs with their hosts: as few as a first fit finds without two replicas of a service on one.

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
    """A violation for replicas of a service on one GPU, and for hosts that there are not."""
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
