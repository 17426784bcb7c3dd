"""The partitioned GPUs of a joint plan: the instance on each slice, and its predictions."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from joulery.domain.gpu.mig import MigMenu
from joulery.domain.gpu.optimum import CertifiedPartition, CertifiedSlice
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance
from joulery.policies.placement.joint.master import Flow, JointSolution
from joulery.policies.placement.joint.problem import JointProblem
from joulery.policies.placement.joint.slice_options import SliceOption
from joulery.policies.placement.joint.spread import coloured, spread_slices

PlacedSlice = tuple[SliceOption, float]
"""Option on a slice, and the requests a second that it gets."""


def partitioned_gpus(problem: JointProblem, whole: JointSolution) -> tuple[list[PlannedGpu], dict[int, int]]:
    """The partitioned GPUs of a solution, and how many instances each service has on them.

    Slices are assigned GPU by GPU, the largest partitions first; an instance without requests is left out, and so is a
    GPU without instances. Where replicas stay apart, no GPU has two of one service.
    """
    waiting: dict[tuple[int, int], list[PlacedSlice]] = defaultdict(list)
    counts: Counter[int] = Counter()
    for at, count in sorted(whole.slices.items()):
        one = problem.slices[at]
        rate_rps = whole.flows.get(Flow(one.service, one.variant, one.machine, at), 0.0) / count
        if rate_rps > 0:
            counts[one.service] += count
            waiting[(one.machine, one.profile)] += [(one, rate_rps)] * count
    gpus, replicas = [], Counter[int]()
    for at, count in sorted(whole.partitions.items()):
        partition = problem.partitions[at]
        spread = _spread(problem, whole, at, waiting) if problem.request.rules.apart else None
        for _ in range(count):
            mine: list[PlacedSlice] = []
            if spread is not None:
                mine = spread.pop(0) if spread else []
            else:
                for profile, slices in enumerate(partition.counts):
                    queue = waiting[(partition.machine, profile)]
                    mine += [queue.pop(0) for _ in range(min(slices, len(queue)))]
            if mine:
                gpus.append(sliced_gpu(problem, partition.machine, mine, replicas))
    return gpus, dict(counts)


def _spread(
    problem: JointProblem, whole: JointSolution, at: int, waiting: Mapping[tuple[int, int], list[PlacedSlice]]
) -> list[list[PlacedSlice]]:
    """Instances on each GPU of one partition, no two of a service on one; removes them from ``waiting``."""
    partition, gpus = problem.partitions[at], whole.partitions[at]
    placed: list[PlacedSlice] = []
    edges: list[tuple[int, int]] = []
    used: Counter[int] = Counter()
    first = list(itertools.accumulate(partition.counts, initial=0))
    for index, one in enumerate(spread_slices(problem)):
        if one.partition != at:
            continue
        queue = waiting[(partition.machine, one.profile)]
        mine = [each for each in queue if each[0].service == one.service][: whole.spread.get(index, 0)]
        for each in mine:
            queue.remove(each)
            edges.append((one.service, first[one.profile] + used[one.profile] // gpus))
            used[one.profile] += 1
            placed.append(each)
    found: list[list[PlacedSlice]] = [[] for _ in range(gpus)]
    for each, gpu in zip(placed, coloured(edges, gpus), strict=True):
        found[gpu].append(each)
    return found


def numbered(gpus: Sequence[PlannedGpu], count: Mapping[str, int]) -> tuple[PlannedGpu, ...]:
    """The GPUs with the number of replicas set in each instance, given the number by name of the service."""
    return tuple(
        replace(gpu, instances=tuple(replace(one, replicas=count[one.workload]) for one in gpu.instances))
        for gpu in gpus
    )


def sliced_gpu(
    problem: JointProblem, machine: int, chosen: Sequence[PlacedSlice], replicas: Counter[int]
) -> PlannedGpu:
    """One partitioned GPU.

    Args:
        problem: The problem.
        machine: Its type and clock.
        chosen: Option on each of its slices in use, and the requests a second that it gets.
        replicas: Instances numbered so far, by service; updated.
    """
    held = problem.machines[machine]
    sliced = problem.fleet[held.fleet].sliced
    assert sliced is not None  # only GPUs with a menu are partitioned
    instances = []
    for one, rate_rps in chosen:
        instances.append(_instance(problem, sliced.menu, one, rate_rps, replicas[one.service]))
        replicas[one.service] += 1
    clocked = held.clocked
    kernels_w = math.fsum(sliced.slice_w(sliced.menu.profiles[one.profile], held.speed) for one, _ in chosen)
    added_w = math.fsum(each.overhead_w + each.requests_w for each in instances)
    return PlannedGpu(
        type=held.gpu_type.name,
        usd_per_hour=held.gpu_type.usd_per_hour,
        clock_mhz=clocked.clock_mhz,
        clock_max_mhz=clocked.clock_max_mhz,
        demand_w=clocked.idle_w + kernels_w,
        power_w=clocked.idle_w + clocked.host_w + added_w,
        instances=tuple(instances),
        clock_set_mhz=clocked.clock_mhz,
        clock_ceiling_mhz=clocked.clock_max_mhz if problem.power_cap_w is None else clocked.clock_mhz,
        idle_w=clocked.idle_w,
        host_w=clocked.host_w,
        memory_limit_bytes=math.nan if held.gpu_type.memory_bytes is None else held.gpu_type.memory_bytes,
    )


def _instance(problem: JointProblem, menu: MigMenu, one: SliceOption, rate_rps: float, replica: int) -> PlannedInstance:
    service = problem.services[one.service]
    variant, profile = service.variants[one.variant], menu.profiles[one.profile]
    batch_s = one.process.time_s(one.process.batch)
    longer = (1 + problem.request.rules.margin_ratio) * (1 + service.margin_ratio)
    return PlannedInstance(
        workload=service.workload.id,
        model=variant.model,
        replica=replica,
        replicas=replica + 1,
        rate_rps=rate_rps,
        share_ratio=profile.compute_slices / menu.compute_slices,
        batch=one.process.batch,
        max_delay_s=0.0,
        wait_s=math.nan,
        parts=LatencyParts(0.0, 0.0, batch_s, 0.0, 0.0),
        limit_s=batch_s * longer,
        throughput_rps=one.process.full_rps,
        slo_s=service.workload.slo.latency_s,
        accuracy_ratio=variant.accuracy_ratio,
        overhead_w=0.0,
        requests_w=one.request_j * rate_rps,
        provided_rps=one.capacity_rps,
        slice=profile.name,
        processes=one.processes,
        memory_bytes=service.memory_bytes(one.variant),
    )


def certified_slices(problem: JointProblem) -> tuple[CertifiedSlice, ...]:
    """The choices for slices, for the certificate."""
    found = []
    for one in problem.slices:
        service, held = problem.services[one.service], problem.machines[one.machine]
        variant = service.variants[one.variant]
        found.append(
            CertifiedSlice(
                service.workload.id,
                variant.model,
                held.gpu_type.name,
                held.clocked.clock_mhz,
                problem.menu(one.machine).profiles[one.profile].name,
                one.processes,
                one.process.batch,
                one.capacity_rps,
                one.request_j,
                variant.accuracy_ratio,
            )
        )
    return tuple(found)


def certified_partitions(problem: JointProblem, whole: JointSolution) -> tuple[CertifiedPartition, ...]:
    """The MIG partitions of GPUs, for the certificate."""
    found = []
    for at, partition in enumerate(problem.partitions):
        held, profiles = problem.machines[partition.machine], problem.menu(partition.machine).profiles
        slices = tuple(each.name for each, n in zip(profiles, partition.counts, strict=True) for _ in range(n))
        standing_w = float(problem.standing_w[partition.machine])
        price, planned = held.gpu_type.usd_per_hour, whole.partitions.get(at, 0)
        found.append(CertifiedPartition(held.gpu_type.name, held.clocked.clock_mhz, standing_w, price, planned, slices))
    return tuple(found)
