"""The plan on MIG slices that follows a running one: its choices and those nearly as good, on existing partitions.

Most of a fresh plan's CPU time computes the rate that every choice of model, slice and processes keeps within the SLO.
Here only the choices in use are computed for today's rates, and those that are worth most at the running plan's prices.
A GPU in use is not partitioned again, because its processes would have to end first: it offers the slices that it has,
at any clock. Other partitions are for free GPUs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from joulery.domain.gpu.optimum import CertifiedSlice, PlanCertificate
from joulery.domain.gpu.plan_moves import InstanceShape, shape_of
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.policies.placement.joint.master import Flow, JointMaster, JointSolution, SliceMoves
from joulery.policies.placement.joint.problem import ClockedType, JointProblem, JointRequest, JointService, problem_of
from joulery.policies.placement.joint.result.partitioned_gpus import PlacedSlice, numbered, sliced_gpu
from joulery.policies.placement.joint.slice_options import MigPartition, SliceChoice, SliceOption

_UNSERVED_RPS = 1e-6
_CHOICES = 60
"""Choices on slices that are computed for today's rates, beside those in use."""


def sliced_problem(request: JointRequest, before: ProvisionPlan) -> JointProblem | None:
    """Today's problem with the choices and partitions to consider; None where shares compete with slices.

    Raises:
        InfeasibleError: A service can be served by none of the choices.
    """
    problem = problem_of(_narrowed(request, before))
    if problem.items or before.certificate is None or problem.request.rules.apart:
        return None
    partitions, limits = list[MigPartition](), list[tuple[tuple[int, ...], int]]()
    for (kind, slices), count in _running(before.gpus).items():
        machines = [at for at, each in enumerate(problem.machines) if each.gpu_type.name == kind]
        first = len(partitions)
        for at in machines:
            menu = problem.menu(at)
            if set(slices) <= {profile.name for profile in menu.profiles}:
                partitions.append(MigPartition(at, menu.counts(slices)))
        limits.append((tuple(range(first, len(partitions))), count))
    kept = len(partitions)
    in_use = Counter(gpu.type for gpu in before.gpus)
    for at, each in enumerate(problem.fleet):
        if each.gpu_type.available is not None:
            fresh = [
                kept + i
                for i, partition in enumerate(problem.partitions)
                if problem.machines[partition.machine].fleet == at
            ]
            limits.append((tuple(fresh), max(0, each.gpu_type.available - in_use[each.gpu_type.name])))
    return replace(
        problem, partitions=(*partitions, *problem.partitions), partition_limits=tuple(limits), running_partitions=kept
    )


def next_on_slices(
    problem: JointProblem,
    before: ProvisionPlan,
    max_moves: int | None,
    gap_ratio: float,
    branchings: int,
    seconds: float,
    *,
    standing: bool = False,
) -> tuple[PlannedGpu, ...]:
    """The GPUs of the next plan; empty where not everything can be served.

    Args:
        problem: The problem that :func:`sliced_problem` returns.
        before: The running plan.
        max_moves: Most slices that may be started or stopped; None for any number.
        gap_ratio, branchings, seconds: Limits of the solver.
        standing: Whether every GPU keeps its slices and its clock, and only requests are redistributed.
    """
    master = JointMaster(problem)
    master.relax()
    moves = None if max_moves is None else SliceMoves(_shapes(problem, before.gpus), max_moves)
    if standing:
        held = _held(problem, before.gpus)
        if held is None:
            return ()
        moves = SliceMoves((), 0, *held)
    whole = master.whole(gap_ratio=gap_ratio, seconds=seconds, branchings=branchings, moves=moves)
    if not math.isfinite(whole.value) or bool(np.any(whole.unserved > _UNSERVED_RPS)):
        return ()
    return _gpus(problem, whole, before.gpus, going_on=max_moves is not None or standing)


def _narrowed(request: JointRequest, before: ProvisionPlan) -> JointRequest:
    """The request with the choices in use at any clock, and the best others at theirs."""
    proof = before.certificate
    assert proof is not None  # a joint plan is followed
    clocks = {each.gpu_type.name: each.clocks_mhz for each in request.fleet}
    chosen: dict[str, set[SliceChoice]] = defaultdict(set)
    for gpu in before.gpus:
        for one in gpu.instances:
            for mhz in clocks.get(gpu.type, ()):
                chosen[one.workload].add(SliceChoice(one.model, gpu.type, round(mhz, 6), one.slice, one.processes))
    for each in sorted(proof.slices, key=lambda one: _excess(one, proof))[:_CHOICES]:
        chosen[each.service].add(
            SliceChoice(each.variant, each.type, round(each.clock_mhz, 6), each.slice, each.processes)
        )

    def narrow(service: JointService) -> JointService:
        return replace(service, slices=frozenset(chosen[service.workload.id]))

    return replace(request, services=tuple(narrow(each) for each in request.services))


def _excess(one: CertifiedSlice, proof: PlanCertificate) -> float:
    """Negative worth of a slice at the prices of a plan, for its part of a GPU; the most valuable first."""
    floor = proof.floors_ratio.get(one.service, 0.0)
    gain = one.accuracy_ratio - floor if floor > 0 else 0.0
    price = proof.demand_price.get(one.service, 0.0) + proof.accuracy_price.get(one.service, 0.0) * gain
    per_w = proof.objective.per_w + proof.power_price
    compute = float(one.slice.partition("g")[0] or 1)
    return -one.capacity_rps * (price - per_w * one.request_j) / compute


def _running(gpus: Sequence[PlannedGpu]) -> Counter[tuple[str, tuple[str, ...]]]:
    """GPUs by type and the slices that they have."""
    return Counter((gpu.type, tuple(sorted(each.slice for each in gpu.instances))) for gpu in gpus)


def _shape(problem: JointProblem, one: SliceOption) -> InstanceShape:
    service, menu = problem.services[one.service], problem.menu(one.machine)
    profile = menu.profiles[one.profile]
    ratio = round(profile.compute_slices / menu.compute_slices, 9)
    model, batch = service.variants[one.variant].model, one.process.batch
    return InstanceShape(service.workload.id, model, ratio, batch, profile.name, one.processes)


def _shapes(problem: JointProblem, gpus: Sequence[PlannedGpu]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The options of each shape, and how many slices run it."""
    running = Counter((gpu.type, shape_of(each)) for gpu in gpus for each in gpu.instances)
    options: dict[tuple[str, InstanceShape], list[int]] = defaultdict(list)
    for at, one in enumerate(problem.slices):
        options[(problem.machines[one.machine].gpu_type.name, _shape(problem, one))].append(at)
    return tuple((tuple(options.get(key, ())), running[key]) for key in dict.fromkeys([*options, *running]))


def _held(problem: JointProblem, gpus: Sequence[PlannedGpu]) -> tuple[Counter[int], Counter[int]] | None:
    """Options and partitions of running GPUs, counted by index; None where one is not a choice of today's problem."""
    options = {(one.machine, _shape(problem, one)): at for at, one in enumerate(problem.slices)}
    slices, partitions = Counter[int](), Counter[int]()
    for gpu in gpus:
        machine = next((at for at, one in enumerate(problem.machines) if _runs_on(gpu, one)), None)
        found = [options.get((machine, shape_of(each))) for each in gpu.instances] if machine is not None else [None]
        mine = Counter(each.slice for each in gpu.instances)
        partition = next(
            (
                at
                for at, one in enumerate(problem.partitions[: problem.running_partitions])
                if one.machine == machine and one.counts == problem.menu(one.machine).counts(tuple(mine.elements()))
            ),
            None,
        )
        if partition is None or None in found:
            return None
        partitions[partition] += 1
        slices.update(each for each in found if each is not None)
    return slices, partitions


def _runs_on(gpu: PlannedGpu, machine: ClockedType) -> bool:
    """Whether a GPU has the type and the clock of a machine."""
    clock_mhz = gpu.clock_max_mhz if gpu.clock_set_mhz is None else gpu.clock_set_mhz
    return gpu.type == machine.gpu_type.name and math.isclose(clock_mhz, machine.clocked.clock_mhz)


def _gpus(
    problem: JointProblem, whole: JointSolution, running: Sequence[PlannedGpu], *, going_on: bool
) -> tuple[PlannedGpu, ...]:
    """The GPUs of a solution: those that run keep what they can of their instances, on their slices.

    With ``going_on``, instances without requests stay: stopping one would be a move.
    """
    waiting: dict[tuple[int, int], list[PlacedSlice]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for at, count in sorted(whole.slices.items()):
        one = problem.slices[at]
        rate_rps = whole.flows.get(Flow(one.service, one.variant, one.machine, at), 0.0) / count
        if rate_rps > 0 or going_on:
            counts[problem.services[one.service].workload.id] += count
            waiting[(one.machine, one.profile)] += [(one, rate_rps)] * count
    left, places = list(running), list[tuple[MigPartition, list[int], list[PlacedSlice]]]()
    for at, count in sorted(whole.partitions.items()):
        partition = problem.partitions[at]
        for _ in range(count):
            gpu = _continued(problem, partition, left, waiting) if at < problem.running_partitions else None
            free = list(partition.counts)
            places.append((partition, free, [] if gpu is None else _continuing(problem, partition, gpu, free, waiting)))
    replicas, found = Counter[int](), list[PlannedGpu]()
    for partition, free, mine in places:
        for profile, slices in enumerate(free):
            queue = waiting[(partition.machine, profile)]
            mine += [queue.pop(0) for _ in range(min(slices, len(queue)))]
        if mine:
            found.append(sliced_gpu(problem, partition.machine, mine, replicas))
    return numbered(found, counts)


def _continued(
    problem: JointProblem,
    partition: MigPartition,
    left: list[PlannedGpu],
    waiting: Mapping[tuple[int, int], list[PlacedSlice]],
) -> PlannedGpu | None:
    """The running GPU with such slices on which most instances continue; removes it from ``left``."""
    held, menu = problem.machines[partition.machine], problem.menu(partition.machine)
    there = Counter(_shape(problem, one) for key in waiting if key[0] == partition.machine for one, _ in waiting[key])
    best: tuple[tuple[int, bool], int] | None = None
    for at, gpu in enumerate(left):
        if (
            gpu.type == held.gpu_type.name
            and menu.counts(tuple(each.slice for each in gpu.instances)) == partition.counts
        ):
            going = (Counter(shape_of(each) for each in gpu.instances) & there).total()
            if best is None or (going, _runs_on(gpu, held)) > best[0]:
                best = (going, _runs_on(gpu, held)), at
    return None if best is None else left.pop(best[1])


def _continuing(
    problem: JointProblem,
    partition: MigPartition,
    gpu: PlannedGpu,
    free: list[int],
    waiting: Mapping[tuple[int, int], list[PlacedSlice]],
) -> list[PlacedSlice]:
    """The instances of a running GPU that continue there; removes them from ``waiting``, their slices from ``free``."""
    mine: list[PlacedSlice] = []
    for each in gpu.instances:
        profile = next(at for at, one in enumerate(problem.menu(partition.machine).profiles) if one.name == each.slice)
        queue = waiting[(partition.machine, profile)]
        found = next((one for one in queue if _shape(problem, one[0]) == shape_of(each)), None)
        if found is not None:
            queue.remove(found)
            free[profile] -= 1
            mine.append(found)
    return mine
