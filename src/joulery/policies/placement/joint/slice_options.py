"""MIG slices in the joint problem: the processes that may run on each slice, and the MIG partitions of a GPU.

Slices share neither SMs nor cache, so a partitioned GPU needs no search: rows of the master problem limit the slices of
a kind to those that the partitions provide. At given prices the best layout of a partitioned GPU has the best choice
for each kind of slice, and the partition of the menu that is best for those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.mig import MigProfile
from joulery.perf.slice_table import BatchCurve, SlicedGpu, SliceProcess, largest_batch
from joulery.policies.placement.provisioning.options import Balancer, may_use

if TYPE_CHECKING:
    from joulery.policies.placement.joint.problem import ClockedType, JointFleet, JointRequest, JointService

_GAIN = 1.05
"""Least ratio of the rates that more and fewer processes on a slice may keep, for the former to be another choice."""
_SAME = 1e-9
"""Joules closer to one another, as a ratio, are equal: those of fits are rounded."""


class SliceOption(NamedTuple):
    """Processes of a service's variant on a slice of a GPU at a clock.

    Attributes:
        service, variant, machine: Indices.
        profile: Index of the slice's kind in the menu.
        process: The processes that run there.
        capacity_rps: The rate that it keeps within the SLO, at most the service's.
        request_j: Dynamic joules of a request.
    """

    service: int
    variant: int
    machine: int
    profile: int
    process: SliceProcess
    capacity_rps: float
    request_j: float

    @property
    def processes(self) -> int:
        """Processes on the slice."""
        return self.process.curve.processes


class SliceChoice(NamedTuple):
    """A choice for slices of a kind: a model and its number of processes, on GPUs of a type at a clock."""

    model: str
    type: str
    clock_mhz: float
    slice: str
    processes: int


class MigPartition(NamedTuple):
    """One MIG partition of a machine's GPUs: the number of slices of each kind of the menu."""

    machine: int
    counts: tuple[int, ...]


def part_scv(scv: float, part: float, balancer: Balancer = Balancer.TURNS) -> float:
    """Squared coefficient of variation of the gaps of a part of a stream.

    If requests are distributed as evenly as possible, a gap is the sum of ``1 / part`` gaps, rounded down or up: for
    ``1 / part`` whole, ``scv * part``. If they are distributed at random, it is the sum of a geometric number of gaps.
    """
    if balancer is Balancer.RANDOM:
        return 1 + (scv - 1) * part
    odd = (1 / part) % 1.0
    odd = 0.0 if min(odd, 1 - odd) < 1e-9 else odd
    return scv * part + part * part * odd * (1 - odd) if scv > 0 else 0.0


def partitions_of(request: JointRequest, machines: Sequence[ClockedType]) -> tuple[MigPartition, ...]:
    """Every MIG partition of every machine that has any; only those of one slice if instances have their own GPU."""
    found = []
    for at, machine in enumerate(machines):
        sliced = request.fleet[machine.fleet].sliced
        if sliced is not None:
            partitions = dict.fromkeys(sliced.menu.counts(partition) for partition in sliced.menu.multisets)
            found += [MigPartition(at, each) for each in partitions if not request.alone or sum(each) == 1]
    return tuple(found)


def slice_options(
    request: JointRequest, machines: Sequence[ClockedType], margins_of: Sequence[float]
) -> tuple[SliceOption, ...]:
    """Options for slices, without those that another one of the same slice dominates at every rate.

    A service that names its choices keeps all of them, so that a running one is not stopped for an equal one.

    Args:
        request: The request.
        machines: GPU types at their clocks.
        margins_of: Margin of each service on the predicted times of its batches.
    """
    found: list[SliceOption] = []
    for at, machine in enumerate(machines):
        sliced = request.fleet[machine.fleet].sliced
        if sliced is None:
            continue
        for owner, service in enumerate(request.services):
            if not may_use(service.workload, machine.gpu_type):
                continue
            for variant, each in enumerate(service.variants):
                for index, profile in enumerate(sliced.menu.profiles):
                    if request.alone and profile.compute_slices < sliced.menu.compute_slices:
                        continue
                    curves = sliced.table.of(each.model, profile.size)
                    known = [one for one in curves if _fits(one.processes, service, variant, profile)]
                    known = _chosen(known, service, each.model, machine, profile)
                    tried = _tried(known[:1] if request.alone else known, machine, service, margins_of[owner])
                    some = [
                        _option(request, sliced, (owner, variant, at, index), one, margins_of[owner]) for one in tried
                    ]
                    usable = [one for one in some if one is not None]
                    found += usable if service.slices else _undominated(usable)
    return tuple(_fewest(request, found))


def _fits(processes: int, service: JointService, variant: int, profile: MigProfile) -> bool:
    """Whether processes fit into the memory of a slice, as far as theirs is known; they have no standby there."""
    return processes * (service.answered_by(variant).memory_bytes or 0.0) <= profile.memory_bytes


def _chosen(
    curves: Sequence[BatchCurve], service: JointService, model: str, machine: ClockedType, profile: MigProfile
) -> list[BatchCurve]:
    """The curves among which a service may choose there."""
    if not service.slices:
        return list(curves)
    name, clock_mhz = machine.gpu_type.name, round(machine.clocked.clock_mhz, 6)
    return [one for one in curves if SliceChoice(model, name, clock_mhz, profile.name, one.processes) in service.slices]


def explain_slices(service: JointService, fleet: Sequence[JointFleet], margin_ratio: float) -> None:
    """Raise the error for a service whose processes fit into the memory of no slice, or are too slow on any.

    Nothing is raised where neither holds.
    """
    sliced = [(kind.gpu_type.name, kind.sliced.menu) for kind in fleet if kind.sliced is not None]
    menus = [(profile.memory_bytes, f"{profile.name} of {name}") for name, menu in sliced for profile in menu.profiles]
    needed = min(service.answered_by(at).memory_bytes or 0.0 for at in range(len(service.variants)))
    most, largest = max(menus, default=(math.inf, ""))
    if needed > most:
        name = service.workload.id
        raise InfeasibleError(
            f"service {name}: a process takes {needed / 1e9:.3g} GB, but the largest slice, {largest}, has "
            f"{most / 1e9:.3g} GB",
            binding=f"memory of {name}",
            nearest={"workload": name, "memory_bytes": needed},
            hint="add a GPU type with more memory, or serve a smaller model",
        )
    longer = (1 + margin_ratio) * (1 + service.margin_ratio)
    times = [
        (longer * SliceProcess(curve, 1).time_s(1), variant.model, f"{profile.name} of {kind.gpu_type.name}")
        for kind in fleet
        if kind.sliced is not None
        for variant in service.variants
        for profile in kind.sliced.menu.profiles
        for curve in kind.sliced.table.of(variant.model, profile.size)
    ]
    best_s, model, where = min(times, default=(0.0, "", ""))
    slo = service.workload.slo
    if best_s > slo.latency_s:
        name = service.workload.id
        raise InfeasibleError(
            f"service {name}: {model} takes at best {1e3 * best_s:.4g} ms, margin included, for a single request on "
            f"{where}, but its SLO is {1e3 * slo.latency_s:.4g} ms",
            binding=f"latency of {name}",
            nearest={"workload": name, "best_latency_s": best_s},
            hint="relax its SLO, add a faster GPU type, or serve a smaller model",
        )


def _tried(
    curves: Sequence[BatchCurve], machine: ClockedType, service: JointService, margin_ratio: float
) -> list[SliceProcess]:
    """Processes to try, the fewest first: more of them are tried only if they can keep a higher rate."""
    slo, most, best = service.workload.slo, machine.batch_max, 0.0
    found = []
    for curve in curves:
        batch = largest_batch(curve, machine.speed, slo, margin_ratio, most)
        if batch:
            one = SliceProcess(curve, batch, machine.speed)
            if service.slices or one.full_rps > best * _GAIN:
                best = one.full_rps
                found.append(one)
    return found


def _option(
    request: JointRequest, sliced: SlicedGpu, where: tuple[int, int, int, int], process: SliceProcess, margin: float
) -> SliceOption | None:
    """The option of some processes; None where they keep no rate within the SLO."""
    owner, profile = where[0], sliced.menu.profiles[where[3]]
    workload = request.services[owner].workload
    # Requests are dealt out in turn, so the fewer of them come here, the more even they are.
    most_rps = workload.rate_rps / workload.replicas_min
    part = min(most_rps, process.full_rps) / workload.rate_rps / process.curve.processes
    scv = part_scv(workload.arrivals.scv, part, request.rules.balancer)
    capacity = min(process.capacity_rps(workload.slo, scv, margin), most_rps)
    if capacity <= 0:
        return None
    return SliceOption(*where, process, capacity, process.kernel_s * sliced.slice_w(profile, process.speed))


def _undominated(options: Sequence[SliceOption]) -> list[SliceOption]:
    """Options of one slice and variant without dominated ones, by rate and joules; the first of equals."""
    found: list[SliceOption] = []
    for one in sorted(options, key=lambda each: (-each.capacity_rps, each.request_j, each.processes)):
        if not found or one.request_j < found[-1].request_j * (1 - _SAME):
            found.append(one)
    return found


def _fewest(request: JointRequest, options: Sequence[SliceOption]) -> list[SliceOption]:
    """With one instance a service: only options that serve all of it, for services that have one."""
    if request.rules.max_replicas > 1:
        return list(options)
    whole = {one.service for one in options if _serves_all(request, one)}
    return [one for one in options if one.service not in whole or _serves_all(request, one)]


def _serves_all(request: JointRequest, one: SliceOption) -> bool:
    service = request.services[one.service]
    enough = one.capacity_rps >= service.workload.rate_rps / service.workload.replicas_min * (1 - 1e-9)
    accuracy = service.variants[one.variant].accuracy_ratio
    return enough and (service.floor_ratio == 0 or accuracy >= service.floor_ratio - 1e-12)


def check_slices(request: JointRequest) -> None:
    """Check that the measurements are on the menu and suffice for a plan.

    Raises:
        ConfigError: A table is empty, names a slice that the menu lacks, or has a single batch of a model in use.
    """
    used = {each.model for service in request.services for each in service.variants}
    for kind in request.fleet:
        if kind.sliced is None:
            continue
        table, menu, name = kind.sliced.table, kind.sliced.menu, kind.gpu_type.name
        sizes = {profile.size for profile in menu.profiles}
        for _, size in table.curves:
            if size not in sizes:
                raise ConfigError(
                    f"{name}: {table.source} has a slice that a {menu.gpu} cannot be partitioned into",
                    got=size,
                    expected=", ".join(profile.size for profile in menu.profiles),
                )
        for model in sorted(used & set(table.models)):
            points = [curve.batches for (known, _), some in table.curves.items() if known == model for curve in some]
            if sum(len(each) for each in points) < 2:
                raise ConfigError(
                    f"{name}: {table.source} has a single measurement of {model}",
                    expected="at least two batches on one slice",
                    hint="measure more batches: a single one does not predict others",
                )


def best_partition(partitions: Sequence[tuple[int, ...]], values: Sequence[float]) -> float:
    """Greatest worth of a partitioned GPU, when the best instance on each kind of slice is worth ``values``."""
    return max(
        (math.fsum(n * v for n, v in zip(partition, values, strict=True)) for partition in partitions), default=0.0
    )
