"""Successors of each running GPU: itself at any clock, without an instance, another pattern, or asleep.

A running instance keeps its share and batch. The rate that it provides for today follows from the limits that its part
of the rate has: the one it was planned with, where its stream has not become burstier, or those of today's parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from joulery.domain.gpu.plan_moves import InstanceShape, gpu_moves, shape_of
from joulery.domain.gpu.provisioning import PROCESSES_PER_INSTANCE, PlannedGpu, PlannedInstance
from joulery.perf.instances import ServingInstance, predict_gpu
from joulery.policies.placement.joint.master import KnownPattern
from joulery.policies.placement.joint.problem import JointProblem
from joulery.policies.placement.joint.result.planned_gpus import ChosenInstance
from joulery.policies.placement.joint.slice_options import part_scv
from joulery.policies.placement.provisioning.options import may_use


class GpuSuccessor(NamedTuple):
    """One choice for the next state of a GPU.

    Attributes:
        source: Index of the group of equal running GPUs; None for a further GPU.
        machine: Index of its type and clock; -1 without instances.
        placed: Its instances; none for a GPU that is released.
        moves: Instances started, stopped or changed.
        cost: Cost without requests, in units of the objective.
        power_w: Watts without requests.
    """

    source: int | None
    machine: int
    placed: tuple[ChosenInstance, ...]
    moves: int
    cost: float
    power_w: float


class RunningGroup(NamedTuple):
    """Running GPUs that are alike: one of them, how many there are, and the index of their type."""

    gpu: PlannedGpu
    gpus: int
    fleet: int


class KeptLimits:
    """Limits on running instances at today's rates.

    Args:
        problem: Today's problem.
        before_rps: Rate of each service that the running plan was made for.
    """

    def __init__(self, problem: JointProblem, before_rps: Mapping[str, float]) -> None:
        self.problem = problem
        self._before = before_rps
        self._services = {each.workload.id: at for at, each in enumerate(problem.services)}
        self._today: dict[tuple[int, int, int, int], list[tuple[float, float]]] = {}
        for item, options in zip(problem.items, problem.options, strict=True):
            for machine, some in zip(problem.machines, options, strict=True):
                for option in some:
                    key = (machine.fleet, item.service, item.variant, option.process.batch)
                    self._today.setdefault(key, []).append((item.rate_rps, option.process.limit_ms))

    def variant(self, each: PlannedInstance) -> tuple[int, int] | None:
        """Indices of an instance's service and variant; None where either is no longer served."""
        service = self._services.get(each.workload)
        if service is None:
            return None
        models = [variant.model for variant in self.problem.services[service].variants]
        return (service, models.index(each.model)) if each.model in models else None

    def best(self, fleet: int, each: PlannedInstance, transfer_ms: float, gpu_ms: float) -> tuple[float, float]:
        """The greatest rate that an instance keeps where a full batch takes ``gpu_ms``, and its limit, ms."""
        found = self.variant(each)
        if found is None:
            return 0.0, 0.0
        service, variant = found
        offers = list(self._today.get((fleet, service, variant, each.batch), ()))
        offers += self._planned(service, each, transfer_ms)
        kept = [offer for offer in offers if gpu_ms <= offer[1] * (1 + 1e-12)]
        return max(kept, default=(0.0, 0.0))

    def _planned(self, service: int, each: PlannedInstance, transfer_ms: float) -> list[tuple[float, float]]:
        """The rate and the limit that an instance was planned with, where they still hold."""
        known, before = self.problem.services[service], self._before.get(each.workload, math.nan)
        same = math.isclose(each.slo_s, known.workload.slo.latency_s) and known.margin_ratio == 0
        if not same or not before > 0 or not math.isfinite(each.provided_rps):
            return []
        rate, scv = known.workload.rate_rps, known.workload.arrivals.scv
        was = each.provided_rps / before
        if was * known.workload.replicas_min > 1 + 1e-9:
            return []  # a larger part than a service of so many replicas may have
        provided = min(each.provided_rps, rate * was)
        if scv == 0 and provided < each.provided_rps:
            return []  # fewer of them wait longer for a full batch
        balancer = self.problem.request.rules.balancer
        if part_scv(scv, min(1.0, provided / rate), balancer) > part_scv(scv, min(1.0, was), balancer) + 1e-9:
            return []  # burstier than it was planned for
        return [(provided, each.limit_s * 1e3 - transfer_ms)]


def groups_of(problem: JointProblem, running: Sequence[PlannedGpu]) -> tuple[list[RunningGroup], list[PlannedGpu]]:
    """Running GPUs, equal ones together; and those of types that the fleet no longer has."""
    fleets = {each.gpu_type.name: at for at, each in enumerate(problem.fleet)}
    known = [gpu for gpu in running if gpu.type in fleets]
    counts: Counter[tuple[str, tuple[tuple[InstanceShape, float], ...]]] = Counter()
    first: dict[tuple[str, tuple[tuple[InstanceShape, float], ...]], PlannedGpu] = {}
    for gpu in known:
        key = gpu.type, tuple(sorted((shape_of(each), each.provided_rps) for each in gpu.instances))
        counts[key] += 1
        first.setdefault(key, gpu)
    groups = [RunningGroup(first[key], count, fleets[key[0]]) for key, count in counts.items()]
    return groups, [gpu for gpu in running if gpu.type not in fleets]


def successors(
    problem: JointProblem, groups: Sequence[RunningGroup], patterns: Sequence[KnownPattern], limits: KeptLimits
) -> list[GpuSuccessor]:
    """Every choice for every running GPU, and every pattern on a further one.

    Args:
        problem: Today's problem.
        groups: The running GPUs.
        patterns: Patterns that a GPU may change to, or that a further GPU may have.
        limits: Limits on running instances.
    """
    found = []
    fresh = [(known, _pattern(problem, known)) for known in patterns]
    for source, group in enumerate(groups):
        gpu = group.gpu
        found.append(GpuSuccessor(source, -1, (), len(gpu.instances), 0.0, 0.0))
        for kept in _subsets(gpu):
            found += kept_choices(problem, source, group, kept, limits)
        before = [shape_of(each) for each in gpu.instances]
        for known, placed in fresh:
            if problem.machines[known.machine].fleet == group.fleet:
                moves = sum(gpu_moves(before, [_shape(problem, known.machine, each) for each in placed]))
                if moves < len(before) + len(placed):
                    found.append(_choice(problem, source, known.machine, placed, moves))
    found += [_choice(problem, None, known.machine, placed, len(placed)) for known, placed in fresh]
    return found


def _subsets(gpu: PlannedGpu) -> list[tuple[PlannedInstance, ...]]:
    """The instances of a GPU, all or all but one; equal ones once."""
    found = [gpu.instances]
    if len(gpu.instances) > 1:
        found += [(*gpu.instances[:at], *gpu.instances[at + 1 :]) for at in range(len(gpu.instances))]
    return list(dict.fromkeys(found))


def kept_choices(
    problem: JointProblem, source: int, group: RunningGroup, kept: tuple[PlannedInstance, ...], limits: KeptLimits
) -> list[GpuSuccessor]:
    """Running instances at each clock of their GPU type at which all of them provide for something."""
    variants = [limits.variant(each) for each in kept]
    found: list[GpuSuccessor] = []
    if None in variants or not _may_stay(problem, group, [each for each in variants if each is not None]):
        return found
    for at, machine in enumerate(problem.machines):
        if machine.fleet != group.fleet:
            continue
        unit = machine.gpu_type.profile.gpu.unit_percent
        serving = [ServingInstance(each.model, 100 * each.share_ratio, each.batch, 0.0) for each in kept]
        times = predict_gpu(machine.clocked, serving).times
        placed = []
        for each, variant, time in zip(kept, variants, times, strict=True):
            assert variant is not None
            rate, limit_ms = limits.best(group.fleet, each, time.load_ms + time.feedback_ms, time.gpu_ms)
            units = round(100 * each.share_ratio / unit)
            placed.append(ChosenInstance(*variant, units, each.batch, limit_ms, rate, 0.0))
        if all(each.provided_rps > 0 for each in placed):
            moves = len(group.gpu.instances) - len(kept)
            found.append(_choice(problem, source, at, tuple(placed), moves))
    return found


def _may_stay(problem: JointProblem, group: RunningGroup, variants: Sequence[tuple[int, int]]) -> bool:
    """Whether a running GPU may hold these services and variants today: memory, market, replicas that stay apart."""
    kind = problem.fleet[group.fleet].gpu_type
    workloads = [problem.services[service].answered_by(variant) for service, variant in variants]
    if any(not may_use(each, kind) for each in workloads):
        return False
    memory = PROCESSES_PER_INSTANCE * math.fsum(each.memory_bytes or 0.0 for each in workloads)
    if kind.memory_bytes is not None and memory > kind.memory_bytes:
        return False
    services = [service for service, _ in variants]
    return not problem.request.rules.apart or len(set(services)) == len(services)


def _pattern(problem: JointProblem, known: KnownPattern) -> tuple[ChosenInstance, ...]:
    layout = problem.packings[known.machine].tightest(known.layout.pattern) or known.layout
    placed = []
    for index, option, units in zip(layout.pattern, layout.options, layout.units, strict=True):
        item, one = problem.items[index], option.process
        placed.append(ChosenInstance(item.service, item.variant, units, one.batch, one.limit_ms, item.rate_rps, 0.0))
    return tuple(placed)


def _shape(problem: JointProblem, machine: int, each: ChosenInstance) -> InstanceShape:
    service = problem.services[each.service]
    ratio = each.units * problem.machines[machine].gpu_type.profile.gpu.unit_percent / 100.0
    return InstanceShape(service.workload.id, service.variants[each.variant].model, round(ratio, 9), each.batch)


def _choice(
    problem: JointProblem, source: int | None, machine: int, placed: tuple[ChosenInstance, ...], moves: int
) -> GpuSuccessor:
    one = problem.machines[machine]
    models = [problem.services[each.service].variants[each.variant].model for each in placed]
    watts = float(problem.standing_w[machine]) + math.fsum(one.clocked.overhead_w(model) for model in models)
    return GpuSuccessor(
        source, machine, placed, moves, problem.objective.value(watts, one.gpu_type.usd_per_hour, 1), watts
    )
