"""The ways to serve a service: into how many replicas it is cut, and which batches fit on a GPU type.

Services that are alike (same model, SLO, rate and arrivals) form one class and are planned as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.provisioning import PROCESSES_PER_INSTANCE, Workload
from joulery.policies.placement.provisioning.predict import GpuType
from joulery.policies.placement.provisioning.rules import (
    RequestStream,
    Rules,
    batch_limit_ms,
    batches_of,
    limit_ms,
    stream_of,
)
from joulery.policies.placement.provisioning.sizes import (
    MAX_REPLICAS,
    Figures,
    Process,
    alone,
    least_units,
    process,
    slo_ms,
)


class Option(NamedTuple):
    """One batch for a replica on one GPU type.

    Attributes:
        process: Its constants.
        units: What it needs when it has the GPU to itself.
        figures: k_act, p and c with those.
    """

    process: Process
    units: int
    figures: Figures


class Item(NamedTuple):
    """One replica of a service that is cut into ``replicas`` equal ones.

    Attributes:
        kind: Index of the class of services.
        replicas: Into how many it is cut.
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
        items: The ways to cut one of them, fewest replicas first.
    """

    members: tuple[int, ...]
    items: tuple[Item, ...]


def kinds_of(workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> tuple[Kind, ...]:
    """The classes of services and how each can be served, in the order of first appearance.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: No GPU types, two services of one name, or a model that no type knows.
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
    """The ways to cut one service: up to ``rules.max_replicas`` replicas, or as few as work when more are needed.

    Raises:
        InfeasibleError: No number of replicas works on any type.
        ConfigError: No type knows the model.
    """
    known = [gpu_type for gpu_type in types if workload.model in gpu_type.profile.models]
    if not known:
        types[0].profile[workload.model]
    if not any(may_use(workload, gpu_type) for gpu_type in known):
        raise only_spot(workload)
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


_HARDLY_ANY = RequestStream(1e-6, 0.0)
"""Requests so rare that only the latency of a single one can be in the way."""
_MORE_REPLICAS = 2
"""How many replicas beyond the fewest are tried when a service needs more than the rules would choose."""


def _fewest(workload: Workload, kind: int, types: Sequence[GpuType], rules: Rules) -> int:
    """The smallest number of replicas that works on some type: fewer requests each never hurt."""
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
    """Whether a service may be on a type: on spot GPUs only if it says so."""
    return workload.spot or not gpu_type.spot


def only_spot(workload: Workload) -> InfeasibleError:
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
