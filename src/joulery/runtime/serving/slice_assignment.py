"""A provisioning plan on this machine: which CPU cores stand for which GPU, and the processes of each instance.

A GPU of the plan is played by a group of CPU cores; an instance's share of the GPU becomes a quota of those cores'
time, its batch the replica's batch. Beside each original waits its shadow, loaded and warm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from joulery.domain.errors import CapabilityError
from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance
from joulery.domain.serving.engine import ModelRef, ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind
from joulery.policies.placement.provisioning.standby import Watched


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """One instance of a running plan.

    Attributes:
        watched: What it promised and what its shadow has.
        original: Its process as the plan says.
        shadow: The process that stands by; None where the plan left nothing for one.
    """

    watched: Watched
    original: ReplicaSpec
    shadow: ReplicaSpec | None

    def answering(self, active: Collection[str]) -> ReplicaSpec:
        """The process that answers: the shadow, where it took over."""
        return self.shadow if self.shadow is not None and self.watched.key in active else self.original

    def processes(self, active: Collection[str]) -> list[ReplicaSpec]:
        """What runs: the shadow alone where it took over, else the original and its shadow on standby."""
        if self.shadow is None:
            return [self.original]
        return [self.shadow] if self.watched.key in active else [self.original, standing_by(self.shadow)]


def standing_by(spec: ReplicaSpec) -> ReplicaSpec:
    """The same process, waiting."""
    return replace(spec, standby=True)


def cores_for(
    gpus: Sequence[PlannedGpu],
    cores: Sequence[int],
    size: Mapping[str, int],
    kept: Mapping[int, tuple[int, ...]] = {},
    noun: str = "CPU cores",
) -> tuple[tuple[int, ...], ...]:
    """The cores that stand for each GPU of a plan.

    Args:
        gpus: The plan.
        cores: The cores that may be used.
        size: Cores that stand for one GPU, by its type; 1 where it is not named.
        kept: GPUs that go on, with the cores they have.
        noun: What they are called in messages: cores, or the GPUs themselves.

    Raises:
        CapabilityError: There are not enough cores.
    """
    free = [core for core in cores if not any(core in bound for bound in kept.values())]
    wanted = sum(size.get(gpu.type, 1) for index, gpu in enumerate(gpus) if index not in kept)
    if wanted > len(free):
        raise CapabilityError(
            f"the plan has {len(gpus)} GPUs, which takes {wanted - len(free)} {noun} more than may be used here",
            resource=noun,
            hint="plan for fewer GPUs (fleet.gpus.*.available), or run it where there are more",
        )
    found = []
    for index, gpu in enumerate(gpus):
        bound = kept.get(index)
        if bound is None:
            count = size.get(gpu.type, 1)
            bound, free = tuple(free[:count]), free[count:]
        found.append(bound)
    return tuple(found)


def seats_of(
    gpus: Sequence[PlannedGpu],
    cores: Sequence[tuple[int, ...]],
    models: Mapping[str, ModelRef],
    watched: Sequence[Watched],
    shared: Sequence[str] = (),
) -> tuple[PlannedReplica, ...]:
    """The processes of a plan.

    Args:
        gpus: The plan.
        cores: The cores of each GPU; its number in ``shared``, where that names any.
        models: What each service loads, by name.
        watched: Its instances, in order.
        shared: GPUs of this machine that processes share under MPS; empty where cores stand for GPUs.
    """
    instances = [(index, each) for index, gpu in enumerate(gpus) for each in gpu.instances]
    return tuple(
        _seat(each, cores[index], models[each.workload], one, shared[cores[index][0]] if shared else "")
        for (index, each), one in zip(instances, watched, strict=True)
    )


def _seat(
    each: PlannedInstance, cores: tuple[int, ...], model: ModelRef, watched: Watched, device: str
) -> PlannedReplica:
    def process(percent: float) -> ReplicaSpec:
        share = min(1.0, round(percent / 100, 9))
        if device:
            piece = Slice(SliceKind.MPS, share_ratio=share)
            delayed = delay_s(each)
            return ReplicaSpec(each.workload, each.model, piece, model, 0, each.batch, delayed, device=device)
        piece = Slice(SliceKind.CPU, cores=len(cores), share_ratio=share)
        return ReplicaSpec(each.workload, each.model, piece, model, 0, each.batch, delay_s(each), cores)

    larger = watched.shadow_percent > watched.share_percent + 1e-9
    return PlannedReplica(watched, process(watched.share_percent), process(watched.shadow_percent) if larger else None)


def delay_s(each: PlannedInstance) -> float:
    """How long a live batch waits to fill: as planned, and for evenly spaced requests as long as they take to come.

    A plan for evenly spaced requests lets them wait for a full batch. Live ones are never quite even: a batch that has
    waited for as long as its requests should have taken goes as it is.
    """
    if math.isfinite(each.max_delay_s):
        return each.max_delay_s
    return (each.batch - 1) / each.rate_rps
