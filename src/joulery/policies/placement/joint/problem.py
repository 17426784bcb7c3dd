"""Input of the joint planner: services with variants and floors, GPU types with clocks, one objective.

A GPU type at each of its clocks is a *machine*. A machine may hold *items*: an item is a variant of a service provided
for a part of the service's rate. An item's demand for SMs follows from the queue in front of it, its joules from the
clock. :class:`~joulery.policies.placement.provisioning.packing.Packing`, the same for every preset, decides how many
items fit beside one another.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.mig import MigMenu
from joulery.domain.gpu.optimum import PlanObjective
from joulery.domain.gpu.provisioning import PROCESSES_PER_INSTANCE, Workload
from joulery.perf.instances import ClockedGpu, at_clock
from joulery.perf.slice_table import SlicedGpu
from joulery.policies.placement.joint.slice_options import (
    MigPartition,
    SliceChoice,
    SliceOption,
    check_slices,
    explain_slices,
    part_scv,
    partitions_of,
    slice_options,
)
from joulery.policies.placement.provisioning.gpu_shares import GpuType, least_units, process
from joulery.policies.placement.provisioning.options import (
    Item,
    Option,
    RequestStream,
    Rules,
    batches_of,
    fits_memory,
    items_of,
    limit_ms,
    may_use,
    spot_only_error,
)
from joulery.policies.placement.provisioning.packing import Packing
from joulery.policies.placement.provisioning.random_limits import KnownLimits

_PARTS_MAX = 4096
"""Most instances of a service; a need for more is treated as a mistake in its rate."""


class Variant(NamedTuple):
    """One way to answer a service's requests.

    Attributes:
        model: Its name in the profiles of the GPU types.
        accuracy_ratio: The accuracy that the user states; NaN where there is no choice.
        memory_bytes: GPU memory of one process of it; that of the service when None.
    """

    model: str
    accuracy_ratio: float = math.nan
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class JointService:
    """A service to plan for.

    Attributes:
        workload: Its SLO, rate and arrivals; its model is that of the first variant.
        variants: The models that can answer.
        floor_ratio: Mean accuracy of the answers never to go below.
        margin_ratio: Margin on its latencies, beside the rules' margin.
        batches: Largest batches to choose among, for each number of equal parts of the rate; all of them, and any
            number of parts that the rules allow, where empty.
        slices: Choices on slices; all of them where empty.
        names: Services that are alike and that this one stands for, itself the first; each has its own instances.
            Empty for a single service.
    """

    workload: Workload
    variants: tuple[Variant, ...]
    floor_ratio: float = 0.0
    margin_ratio: float = 0.0
    batches: Mapping[int, frozenset[int]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    slices: frozenset[SliceChoice] = frozenset()

    @property
    def count(self) -> int:
        """Number of services it stands for."""
        return len(self.names) or 1

    def answered_by(self, variant: int) -> Workload:
        """The workload where one variant, by its index, answers all requests."""
        each = self.variants[variant]
        memory = self.workload.memory_bytes if each.memory_bytes is None else each.memory_bytes
        return replace(self.workload, model=each.model, memory_bytes=memory)

    def memory_bytes(self, variant: int) -> float:
        """GPU memory of one process of a variant, by its index; NaN where unknown."""
        known = self.answered_by(variant).memory_bytes
        return math.nan if known is None else known

    def __post_init__(self) -> None:
        name = self.workload.id
        if not self.variants:
            raise ConfigError(f"service {name} has no variant", pointer=name, expected="at least one")
        if not 0 <= self.floor_ratio <= 1:
            raise ConfigError(f"service {name}: a floor of accuracy lies between 0 and 1", got=str(self.floor_ratio))
        if len(self.variants) == 1 and self.floor_ratio == 0:
            return
        for each in self.variants:
            if not 0 <= each.accuracy_ratio <= 1:
                raise ConfigError(
                    f"service {name}: variant {each.model} states no accuracy",
                    got=str(each.accuracy_ratio),
                    expected="between 0 and 1, from your own evaluation",
                    hint="with several variants or a floor every variant needs one: accuracy: 76.1 %",
                )
        best = max(self.variants, key=lambda each: each.accuracy_ratio)
        if best.accuracy_ratio < self.floor_ratio - 1e-12:
            raise ConfigError(
                f"service {name}: no variant is as accurate as its floor",
                got=f"{100 * self.floor_ratio:g} %",
                expected=f"at most {100 * best.accuracy_ratio:g} %, what {best.model} has",
            )


@dataclass(frozen=True, slots=True)
class JointFleet:
    """A GPU type that may be rented.

    Attributes:
        gpu_type: The type at full clock, with price and count.
        clocks_mhz: Clocks that may be set, the highest first.
        host_w: Watts of the host for each powered GPU.
        sliced: Measurements of models on its slices; None for a type that is shared by MPS alone.
    """

    gpu_type: GpuType
    clocks_mhz: tuple[float, ...]
    host_w: float = 0.0
    sliced: SlicedGpu | None = None

    @property
    def models(self) -> frozenset[str]:
        """The models that it can serve."""
        measured = () if self.sliced is None else self.sliced.table.models
        return frozenset(self.gpu_type.profile.models) | frozenset(measured)

    def __post_init__(self) -> None:
        if not 0 <= self.gpu_type.usd_per_hour < math.inf:
            raise ConfigError(f"{self.gpu_type.name}: a price is a number from 0", got=str(self.gpu_type.usd_per_hour))
        if not self.clocks_mhz:
            raise ConfigError(f"{self.gpu_type.name} has no clock to run at", expected="at least one")


class ClockedType(NamedTuple):
    """A GPU type at one clock: index of the type, the type, the predictor's model of it, and the largest batch."""

    fleet: int
    gpu_type: GpuType
    clocked: ClockedGpu
    batch_max: int

    @property
    def speed(self) -> float:
        """The clock as a ratio of the highest."""
        return self.clocked.clock_mhz / self.clocked.clock_max_mhz


class JointItem(NamedTuple):
    """A variant of a service provided for a rate.

    Attributes:
        service, variant: Indices.
        rate_rps: The rate.
        part: The rate as a part of the service's.
        memory_bytes: GPU memory of the instance and its standby; 0 where unknown.
    """

    service: int
    variant: int
    rate_rps: float
    part: float
    memory_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class JointRequest:
    """Input of a joint plan.

    Attributes:
        services: The services.
        fleet: The GPU types.
        rules: Constraints; the largest batches and the smallest parts of a service.
        objective: What is minimised.
        power_cap_w: Watts of all GPUs and hosts, at most; None for no cap.
        alone: Whether every instance has a GPU to itself.
        carbon_cap_g_per_hour: Grams an hour that correspond to the watts of the cap, where carbon is capped.
    """

    services: tuple[JointService, ...]
    fleet: tuple[JointFleet, ...]
    rules: Rules
    objective: PlanObjective
    power_cap_w: float | None = None
    alone: bool = False
    carbon_cap_g_per_hour: float | None = None

    @property
    def cap_text(self) -> str:
        """The cap as text."""
        if self.carbon_cap_g_per_hour is None:
            return f"power cap of {self.power_cap_w:g} W"
        return f"carbon cap of {self.carbon_cap_g_per_hour:g} g/h ({self.power_cap_w:.4g} W of GPUs and hosts)"


@dataclass(frozen=True, slots=True)
class JointProblem:
    """Input of the optimiser, derived from a request.

    Attributes:
        request: The request.
        machines: GPU types at their clocks.
        items: Items that a machine may hold.
        options: For each item and machine the batches with which it fits there alone.
        packings: Packing of each machine.
        request_j: Dynamic joules of a request, float64[machines, items].
        overhead_w: Power of a process without requests, float64[machines, items].
        standing_w: Power of an idle board and its host, float64[machines].
        slices: Options for slices of GPUs.
        partitions: MIG partitions of GPUs.
        partition_limits: Sets of partitions, by index, each with the most GPUs that may have one of them.
        running_partitions: How many of the first partitions are those of running GPUs.
    """

    request: JointRequest
    machines: tuple[ClockedType, ...]
    items: tuple[JointItem, ...]
    options: tuple[tuple[tuple[Option, ...], ...], ...]
    packings: tuple[Packing, ...]
    request_j: FloatArray
    overhead_w: FloatArray
    standing_w: FloatArray
    slices: tuple[SliceOption, ...] = ()
    partitions: tuple[MigPartition, ...] = ()
    partition_limits: tuple[tuple[tuple[int, ...], int], ...] = ()
    running_partitions: int = 0

    @property
    def services(self) -> tuple[JointService, ...]:
        """The services."""
        return self.request.services

    @property
    def fleet(self) -> tuple[JointFleet, ...]:
        """The GPU types."""
        return self.request.fleet

    @property
    def rates_rps(self) -> FloatArray:
        """Requests a second of each service, all that are alike together, float64[services]."""
        return np.array([each.count * each.workload.rate_rps for each in self.services])

    @property
    def objective(self) -> PlanObjective:
        """The objective."""
        return self.request.objective

    @property
    def power_cap_w(self) -> float | None:
        """Watts of all GPUs and hosts, at most."""
        return self.request.power_cap_w

    def copies(self, machine: int) -> IntArray:
        """Most copies of each item on one GPU, int64[items]: more would serve more than the service's rate."""
        needed = [self.services[item.service].count * math.ceil(1 / item.part - 1e-9) for item in self.items]
        return np.minimum(np.array(needed, np.int64), self.packings[machine].capacity)

    def menu(self, machine: int) -> MigMenu:
        """The menu of slices of a machine's GPU type; only types that have one are partitioned."""
        sliced = self.fleet[self.machines[machine].fleet].sliced
        assert sliced is not None
        return sliced.menu

    def gain(self, item: JointItem | SliceOption) -> float:
        """Accuracy of an item's variant above its service's floor; 0 where the service has none."""
        service = self.services[item.service]
        if service.floor_ratio == 0:
            return 0.0
        return service.variants[item.variant].accuracy_ratio - service.floor_ratio


def problem_of(request: JointRequest, known: KnownLimits | None = None) -> JointProblem:
    """Derive the choices of a request.

    An instance is provided for a whole part of its service's rate: all of it, a half, a third ... down to one of
    ``rules.max_replicas``, or smaller ones where the service needs more instances. Flows decide how many requests it
    gets: instances of different parts may serve one service together. A service with a least number of replicas has no
    larger part than one of them.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: No services or types, two services of one name, or a model unknown to all types.
    """
    services, fleet, rules = request.services, request.fleet, request.rules
    check_request(request)
    check_slices(request)
    machines = tuple(
        ClockedType(index, _held(each, clocked), clocked, rules.max_batch)
        for index, each in enumerate(fleet)
        for mhz in each.clocks_mhz
        for clocked in (at_clock(each.gpu_type.profile, mhz, host_w=each.host_w),)
    )
    partitions = partitions_of(request, machines)
    margins = [(1 + rules.margin_ratio) * (1 + each.margin_ratio) - 1 for each in services]
    slices = slice_options(request, machines, margins)
    sliced = {one.service for one in slices}
    items: list[JointItem] = []
    options: list[tuple[tuple[Option, ...], ...]] = []
    for at, service in enumerate(services):
        before = len(items)
        fewest = service.workload.replicas_min
        for count in range(fewest, max(fewest, rules.max_replicas) + 1):
            _add_part(at, service, 1 / count, fleet, machines, rules, items, options, known)
        count = max(fewest, rules.max_replicas) + 1
        while len(items) == before and at not in sliced and count <= _PARTS_MAX:
            for more in (count, math.ceil(1.25 * count), math.ceil(1.5 * count)):
                _add_part(at, service, 1 / more, fleet, machines, rules, items, options, known)
            count = math.ceil(1.5 * count) + 1
        if len(items) == before and at not in sliced:
            _explain(service, fleet, rules)
    packed = [
        Item(item.service, round(1 / item.part), each, item.memory_bytes, rules.apart)
        for item, each in zip(items, options, strict=True)
    ]
    packings = tuple(Packing(machine.gpu_type, index, packed) for index, machine in enumerate(machines))
    models = [services[item.service].variants[item.variant].model for item in items]
    return JointProblem(
        request,
        machines,
        tuple(items),
        tuple(options),
        packings,
        np.array([[_figure(m, model, m.clocked.request_j) for model in models] for m in machines]),
        np.array([[_figure(m, model, m.clocked.overhead_w) for model in models] for m in machines]),
        np.array([m.clocked.idle_w + m.clocked.host_w for m in machines]),
        slices,
        partitions,
    )


def _held(fleet: JointFleet, clocked: ClockedGpu) -> GpuType:
    return replace(fleet.gpu_type, profile=clocked.profile)


def _figure(machine: ClockedType, model: str, of: object) -> float:
    assert callable(of)
    return float(of(model)) if model in machine.clocked.profile.models else 0.0


def _add_part(
    at: int,
    service: JointService,
    part: float,
    fleet: Sequence[JointFleet],
    machines: Sequence[ClockedType],
    rules: Rules,
    items: list[JointItem],
    options: list[tuple[tuple[Option, ...], ...]],
    known: KnownLimits | None,
) -> None:
    """Add the items that serve a part of a service: one for each variant that fits on some machine."""
    scv = part_scv(service.workload.arrivals.scv, part, rules.balancer)
    stream = RequestStream(service.workload.rate_rps * part, scv)
    for variant in range(len(service.variants)):
        workload = service.answered_by(variant)
        limits = [_limits(kind.gpu_type, workload, stream, rules, service, part, known) for kind in fleet]
        found = tuple(_options(machine, workload.model, limits[machine.fleet]) for machine in machines)
        if any(found):
            memory_bytes = PROCESSES_PER_INSTANCE * (workload.memory_bytes or 0.0)
            items.append(JointItem(at, variant, stream.rate_rps, part, memory_bytes))
            options.append(found)


def _limits(
    kind: GpuType,
    workload: Workload,
    stream: RequestStream,
    rules: Rules,
    service: JointService,
    part: float,
    known: KnownLimits | None,
) -> list[tuple[int, float, float]]:
    """Batches with their longest execution, ms: when the GPU is shared, and when it is not.

    The queue is computed at full clock: at a lower one small batches are cheaper relative to large ones, so the limits
    err on the safe side there.
    """
    model = kind.profile.models.get(workload.model)
    if model is None or not may_use(workload, kind) or not fits_memory(workload, kind):
        return []
    found, margin_ratio = [], service.margin_ratio
    for batch in batches_of(rules, workload, stream):
        if service.batches and batch not in service.batches.get(round(1 / part), ()):
            continue
        shared_ms = limit_ms(rules, kind.profile.gpu, model, workload, stream, batch, shared=True, known=known)
        alone_ms = shared_ms
        if model.pcie_contention > 1 and stream.scv == 0:
            alone_ms = limit_ms(rules, kind.profile.gpu, model, workload, stream, batch, shared=False)
        found.append((batch, shared_ms / (1 + margin_ratio), alone_ms / (1 + margin_ratio)))
    return found


def _options(machine: ClockedType, model: str, limits: Sequence[tuple[int, float, float]]) -> tuple[Option, ...]:
    gpu = machine.gpu_type.profile.gpu
    found = []
    for batch, shared_ms, alone_ms in limits:
        one = process(machine.gpu_type.profile.models[model], batch, shared_ms, alone_ms)
        units = least_units(gpu, one)
        if units is not None:
            found.append(Option(one, units, one.figures(units * gpu.unit_percent)))
    return tuple(sorted(found, key=lambda option: (option.units, option.process.batch)))


def _explain(service: JointService, fleet: Sequence[JointFleet], rules: Rules) -> None:
    """Raise the error that states why a service can be served on none of the types."""
    types = [each.gpu_type for each in fleet]
    for variant in range(len(service.variants)):
        workload = service.answered_by(variant)
        if any(workload.model in kind.profile.models for kind in types):
            items_of(workload, 0, types, rules)
    if not any(may_use(service.workload, kind) for kind in types):
        raise spot_only_error(service.workload)
    explain_slices(service, fleet, rules.margin_ratio)
    raise InfeasibleError(
        f"service {service.workload.id} cannot be served within its SLO and the margin it needs",
        binding=f"latency of {service.workload.id}",
        hint="relax its SLO, or add a faster GPU type",
    )


def check_request(request: JointRequest) -> None:
    """Check that a request is valid.

    Raises:
        ConfigError: No services or types, two services of one name, a model unknown to all types, or an invalid cap.
    """
    services, fleet, power_cap_w = request.services, request.fleet, request.power_cap_w
    if not services:
        raise ConfigError("there is nothing to plan", pointer="services", hint="list at least one service")
    if not fleet:
        raise ConfigError("the fleet has no GPU type", expected="at least one", hint="add one under fleet.gpus")
    for names, what in (
        ([each.workload.id for each in services], "services"),
        ([each.gpu_type.name for each in fleet], "GPU types"),
    ):
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise ConfigError(f"two {what} have the same name", got=twice)
    if power_cap_w is not None and not 0 < power_cap_w < math.inf:
        raise ConfigError("a power cap is a number above 0", got=f"{power_cap_w} W", pointer="plan.power_cap")
    for service in services:
        for variant in service.variants:
            check_model(variant.model, fleet)


def check_model(model: str, fleet: Sequence[JointFleet]) -> None:
    """Check that some GPU type of the fleet can serve a model.

    Raises:
        ConfigError: None can; the error suggests the nearest names.
    """
    if any(model in kind.models for kind in fleet):
        return
    if all(kind.sliced is None for kind in fleet):
        fleet[0].gpu_type.profile[model]
    known = sorted(frozenset().union(*(kind.models for kind in fleet)))
    nearest = difflib.get_close_matches(model, known, n=2)
    raise ConfigError(
        f"no GPU type of the fleet has measurements or coefficients of model {model!r}",
        got=model,
        expected=", ".join(known),
        hint=f"did you mean {' or '.join(nearest)}?" if nearest else "measure it, or name one of these",
    )
