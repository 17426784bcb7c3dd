"""Baselines of iGniter: FFD+, FFD++, GSLICE+ and gpu-lets+ (section 5.1), on the same predictor.

The paper describes them as text, and its scripts for two of them no longer run, so this code follows the text:

* FFD+ is exact: the lower bound of every share, first fit in descending order, without regard to interference.
* FFD++ is FFD+ with Alg. 2: the first GPU on which every process can stay within its SLO.
* GSLICE+ takes iGniter's placement and tunes the share of every process by its own latency, regardless of the others:
  one unit more while it is late, one less while it is more than a tenth early. Shares of a GPU may then add up to more
  than the whole.
* gpu-lets+ gives every process the share with the most throughput per share out of five (or a whole GPU), puts at most
  two on a GPU by best fit, and checks the interference of the newcomer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

from joulery.domain.gpu.provisioning import Workload
from joulery.perf.interference.model import InterferenceProfile, Neighbourhood, colocated_latency, solo
from joulery.policies.placement.provisioning import igniter
from joulery.policies.placement.provisioning.gpu_shares import (
    Process,
    ReplicaLoad,
    Share,
    allocate,
    alone,
    process,
    slo_ms,
    units_of,
)
from joulery.policies.placement.provisioning.igniter import MAX_BATCH, parts_of

Gpus = tuple[tuple[Share, ...], ...]
_GPULETS_PERCENT = (20.0, 40.0, 50.0, 60.0, 80.0)
_GSLICE_ROUNDS = 40
_GSLICE_THRESHOLD = 0.1


class _Need(NamedTuple):
    """A part with the batch and the lower bound of Theorem 1."""

    part: ReplicaLoad
    units: int
    batch: int
    process: Process


def _needs(workloads: Sequence[Workload], profile: InterferenceProfile, max_batch: int) -> list[_Need]:
    """Every part, those that need most first."""
    needs = []
    for index, workload in enumerate(workloads):
        model, half_ms = profile[workload.model], slo_ms(workload) / 2
        for part, size, _ in parts_of(profile, index, workload, max_batch):
            transfer_ms = size.batch * (model.load_bytes + model.feedback_bytes) / profile.gpu.pcie_bytes_per_ms
            shared_ms = half_ms - model.pcie_contention * transfer_ms
            needs.append(
                _Need(part, size.units, size.batch, process(model, size.batch, shared_ms, half_ms - transfer_ms))
            )
    return sorted(needs, key=lambda need: -need.units)


def ffd(workloads: Sequence[Workload], profile: InterferenceProfile, max_batch: int = MAX_BATCH) -> Gpus:
    """FFD+: first fit decreasing by the lower bound of the share."""
    capacity, unit = units_of(profile.gpu), profile.gpu.unit_percent
    gpus: list[list[_Need]] = []
    for need in _needs(workloads, profile, max_batch):
        for gpu in gpus:
            if sum(each.units for each in gpu) + need.units <= capacity:
                gpu.append(need)
                break
        else:
            gpus.append([need])
    return tuple(tuple(Share(each.part, each.units * unit, each.batch) for each in gpu) for gpu in gpus)


def ffd_plus_plus(workloads: Sequence[Workload], profile: InterferenceProfile, max_batch: int = MAX_BATCH) -> Gpus:
    """FFD++: the first GPU on which Alg. 2 finds shares for all."""
    unit = profile.gpu.unit_percent
    gpus: list[tuple[list[_Need], list[int]]] = []
    for need in _needs(workloads, profile, max_batch):
        for members, units in gpus:
            together = allocate(profile.gpu, [*(each.process for each in members), need.process], [*units, need.units])
            if together is not None:
                members.append(need)
                units[:] = together
                break
        else:
            gpus.append(([need], [need.units]))
    return tuple(
        tuple(Share(each.part, n * unit, each.batch) for each, n in zip(members, units, strict=True))
        for members, units in gpus
    )


def gslice(workloads: Sequence[Workload], profile: InterferenceProfile, max_batch: int = MAX_BATCH) -> Gpus:
    """GSLICE+: iGniter's placement, with the share of each process tuned by its own latency."""
    unit = profile.gpu.unit_percent
    tuned = []
    for gpu in igniter.plan(workloads, profile, max_batch):
        shares = list(gpu)
        for _ in range(_GSLICE_ROUNDS):
            times_ms = _observed(workloads, profile, shares)
            for at, (share, time_ms) in enumerate(zip(shares, times_ms, strict=True)):
                half_ms = slo_ms(workloads[share.part.workload]) / 2
                step = unit if time_ms > half_ms else -unit if time_ms < (1 - _GSLICE_THRESHOLD) * half_ms else 0.0
                percent = min(100.0, max(unit, share.share_percent + step))
                shares[at] = share._replace(share_percent=percent)
        tuned.append(tuple(shares))
    return tuple(tuned)


def _observed(workloads: Sequence[Workload], profile: InterferenceProfile, shares: Sequence[Share]) -> list[float]:
    """Latency of every process; shares that exceed the whole GPU are scaled down to it."""
    squeeze = min(1.0, 100.0 / max(100.0, sum(share.share_percent for share in shares)))
    models = [profile[workloads[share.part.workload].model] for share in shares]
    solos = [
        solo(model, share.batch, share.share_percent * squeeze) for model, share in zip(models, shares, strict=True)
    ]
    around = Neighbourhood()
    for own in solos:
        around = around.with_process(own)
    return [
        colocated_latency(profile.gpu, model, share.batch, own, around).total_ms
        for model, share, own in zip(models, shares, solos, strict=True)
    ]


def gpulets(workloads: Sequence[Workload], profile: InterferenceProfile, max_batch: int = MAX_BATCH) -> Gpus:
    """gpu-lets+: five shares, two processes a GPU, best fit."""
    parts = [
        (part, *_efficient(profile, workloads[index], part.rate_rps, max_batch))
        for index, workload in enumerate(workloads)
        for part, _, _ in parts_of(profile, index, workload, max_batch)
    ]
    gpus: list[list[Share]] = []
    for part, percent, batch in sorted(parts, key=lambda each: -each[1]):
        newcomer = Share(part, percent, batch)
        half_ms = slo_ms(workloads[part.workload]) / 2
        fitting = [
            gpu
            for gpu in gpus
            if len(gpu) == 1
            and gpu[0].share_percent + percent <= 100
            and _observed(workloads, profile, [*gpu, newcomer])[1] <= half_ms
        ]
        if fitting:
            max(fitting, key=lambda gpu: gpu[0].share_percent).append(newcomer)
        else:
            gpus.append([newcomer])
    return tuple(tuple(gpu) for gpu in gpus)


def _efficient(profile: InterferenceProfile, workload: Workload, rate_rps: float, max_batch: int) -> tuple[float, int]:
    """The share with the most throughput per share that meets SLO and demand alone, and its batch."""
    model, half_ms = profile[workload.model], slo_ms(workload) / 2
    best: tuple[float, float] | None = None
    most = min(64, max_batch)
    for percent in _GPULETS_PERCENT:
        fast = [batch for batch in range(1, most + 1) if alone(profile, model, batch, percent).total_ms <= half_ms]
        throughput_rps = max(
            (alone(profile, model, batch, percent).throughput_rps(batch) for batch in fast), default=0.0
        )
        if throughput_rps >= rate_rps and (best is None or throughput_rps / percent > best[0]):
            best = throughput_rps / percent, percent
    percent = 100.0 if best is None else best[1]
    for batch in range(1, most + 1):
        if alone(profile, model, batch, percent).throughput_rps(batch) >= rate_rps:
            return percent, batch
    return percent, most


BASELINES: MappingProxyType[str, Callable[[Sequence[Workload], InterferenceProfile, int], Gpus]] = MappingProxyType(
    {"ffd": ffd, "ffd++": ffd_plus_plus, "gslice": gslice, "gpulets": gpulets}
)
"""The baselines by policy name."""
