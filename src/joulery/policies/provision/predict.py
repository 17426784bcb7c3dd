"""From shares to a plan: what the model predicts for every process, and which promises it would break."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from joulery.domain.provision import (
    LatencyParts,
    PlannedGpu,
    PlannedInstance,
    Violation,
    Workload,
)
from joulery.perf.interference import InterferenceProfile, Neighbourhood, Solo, clock_mhz, demand_w, latency, solo
from joulery.policies.provision.demand import Part, slo_ms

TOLERANCE = 1e-9
"""Relative slack granted to rounding when a prediction is held against a limit."""


class Share(NamedTuple):
    """A part of a service on a GPU.

    Attributes:
        part: Which part of which service.
        share_percent: Its share of the SMs.
        batch: Its batch size.
    """

    part: Part
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
    """

    name: str
    profile: InterferenceProfile
    usd_per_hour: float
    available: int | None = None


def predict_gpu(gpu_type: GpuType, workloads: Sequence[Workload], shares: Sequence[Share]) -> PlannedGpu:
    """What the model says of one GPU and its processes (Eqs. 1-11), held against half the SLO (constraints 13-14)."""
    profile = gpu_type.profile
    solos: list[Solo] = []
    around = Neighbourhood()
    for share in shares:
        own = solo(profile[workloads[share.part.workload].model], share.batch, share.share_percent)
        solos.append(own)
        around = around.with_process(own)
    demand = demand_w(profile.gpu, around)
    return PlannedGpu(
        type=gpu_type.name,
        usd_per_hour=gpu_type.usd_per_hour,
        clock_mhz=max(0.0, clock_mhz(profile.gpu, around)),
        demand_w=demand,
        power_w=min(demand, profile.gpu.power_cap_w),
        instances=tuple(
            _instance(profile, workloads[share.part.workload], share, own, around)
            for share, own in zip(shares, solos, strict=True)
        ),
    )


def _instance(
    profile: InterferenceProfile, workload: Workload, share: Share, own: Solo, around: Neighbourhood
) -> PlannedInstance:
    times = latency(profile.gpu, profile[workload.model], share.batch, own, around)
    unthrottled_ms = times.schedule_ms + times.active_ms
    return PlannedInstance(
        workload=workload.id,
        model=workload.model,
        replica=share.part.replica,
        replicas=share.part.replicas,
        rate_rps=share.part.rate_rps,
        share_ratio=share.share_percent / 100.0,
        batch=share.batch,
        parts=LatencyParts(
            load_s=times.load_ms / 1e3,
            schedule_s=times.schedule_ms / 1e3,
            active_s=times.active_ms / 1e3,
            throttle_s=(times.gpu_ms - unthrottled_ms) / 1e3,
            feedback_s=times.feedback_ms / 1e3,
        ),
        limit_s=slo_ms(workload) / 2e3,
        throughput_rps=times.throughput_rps(share.batch),
        slo_s=workload.slo.latency_s,
    )


def violations_of(gpus: Sequence[PlannedGpu]) -> tuple[Violation, ...]:
    """Every promise the plan is predicted to break: latency, throughput, or more than a whole GPU given away."""
    found: list[Violation] = []
    for index, gpu in enumerate(gpus):
        if gpu.share_ratio > 1 + TOLERANCE:
            found.append(Violation(gpu.instances[-1].workload, index, "share", gpu.share_ratio, 1.0))
        for each in gpu.instances:
            if not each.latency_s <= each.limit_s * (1 + TOLERANCE):
                found.append(Violation(each.workload, index, "latency", each.latency_s, each.limit_s))
            elif not each.throughput_rps >= each.rate_rps * (1 - TOLERANCE):
                found.append(Violation(each.workload, index, "throughput", each.throughput_rps, each.rate_rps))
    return tuple(found)


def throttled(gpu: PlannedGpu, clock_max_mhz: float) -> bool:
    """Whether the power cap lowers the clock."""
    return gpu.clock_mhz < clock_max_mhz and not math.isclose(gpu.clock_mhz, clock_max_mhz)
