"""``plan --preset muserve``: clusters, stages and shards, groups, placement by sensitivity, and a clock for each GPU.

AlpaServe's search assigns models to groups of devices and splits them into stages. Alg. 2 then places the stages so
that stages on one device can share a clock, within the memory and the devices allowed to a replica. Its placement is
simulated, and taken if it meets every SLO that the search's own placement meets. ``best`` forms clusters by exact
segmentation, improves placements by moves and swaps, and takes the groups and the placement of least power.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import IntArray
from joulery.domain.errors import ConfigError, DataError, InfeasibleError
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.domain.gpu.pipeline_plan import PipelinePlan
from joulery.domain.gpu.provisioning import Workload
from joulery.policies.placement.pipelines.device_groups import Shape, groupings
from joulery.policies.placement.pipelines.partition import CutModel, PartitionRules, Stage, cut_model
from joulery.policies.placement.pipelines.placed import PlacedStages
from joulery.policies.placement.pipelines.prediction import predicted
from joulery.policies.placement.pipelines.search import FoundPipelines, PlacementSearch, ShapeTable
from joulery.policies.placement.pipelines.static_clocks import Judge
from joulery.policies.placement.pipelines.task import Cuts, DeviceType, PipelineRules, Task, arrivals

_GROUPINGS_JUDGED = 4
"""Number of groupings whose power ``best`` compares: those with the best score."""


def plan_pipelines(
    policy: str,
    workloads: Sequence[Workload],
    profiles: Mapping[str, ClockProfile],
    device: DeviceType,
    rules: PipelineRules,
) -> PipelinePlan:
    """Plan services on a fleet of equal GPUs.

    Args:
        policy: ``muserve``, or ``best`` for segmentation, moves and swaps.
        workloads: The services.
        profiles: Clock profile of each model, all of one device type.
        device: The GPUs.
        rules: Constraints and choices of the plan.

    Raises:
        ConfigError: No services, no such policy, or a model without clock scores.
        DataError: A clock profile without power.
        InfeasibleError: A model that fits no group, or cannot be in time even alone; the binding constraint is named.
    """
    if policy not in ("muserve", "best"):
        raise ConfigError("no such preset for pipelines", got=policy, expected="muserve or best")
    if not workloads:
        raise ConfigError("there is nothing to plan", pointer="services", hint="list at least one service")
    improved = policy == "best"
    partition = replace(rules.partition, segmentation=improved)
    cuts = [_cut(workload, profiles, partition) for workload in workloads]
    options = tuple(
        grouping
        for grouping in groupings(device.count)
        if all(shape.devices <= rules.devices_per_model for shape in grouping.shapes)
    )
    task = Task(tuple(workloads), tuple(cuts), device, rules, improved)
    tables = {shape: _table(task, shape) for grouping in options for shape in grouping.shapes}
    _check(task, tables)
    requests = arrivals(workloads, rules.requests, rules.seed)
    search = PlacementSearch(
        {shape: table for shape, (table, _) in tables.items()}, requests, device.memory_bytes, rules.overheads
    )
    found = search.ranked(options, beam=rules.beam)
    stages = {shape: cut for shape, (_, cut) in tables.items()}
    return _least_power(task, search, found[: _GROUPINGS_JUDGED if improved else 1], stages, policy)


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """A placement with its clocks and its power."""

    power_w: float
    name: str
    placed: PlacedStages
    clocks: IntArray
    judge: Judge
    found: FoundPipelines


def _least_power(
    task: Task, search: PlacementSearch, found: Sequence[FoundPipelines], stages: Mapping[Shape, Cuts], policy: str
) -> PipelinePlan:
    """The plan of the placement of least power among those within the SLOs that the search's best meets."""
    needed = np.zeros(len(task.workloads))
    judged: list[_Judged] = []
    violated: list[str] = []
    for each in found:
        own = PlacedStages.of(each.hosting, stages, task)
        judge = Judge(own.fleet(task), search.workload, task.aimed, task.rules.overheads.request_s)
        if not judged:
            needed = np.minimum(task.aimed, judge.attained_at_top(own.replicas)) - 1e-12
        for name, placed in own.alternatives(task):
            if bool(np.any(judge.attained_at_top(placed.replicas) < needed)):
                violated.append(name)
                continue
            clocks = judge.best_clocks(placed.replicas)
            power_w = float(judge.power_under(placed.replicas, clocks).sum())
            judged.append(_Judged(power_w, name, placed, clocks, judge, each))
            if not task.improved:
                break
    best = min(judged, key=lambda each: each.power_w)
    why = f"{best.name}: {best.power_w:.0f} W"
    if len(judged) > 1:
        why += f", the least of {len(judged)} placements (up to {max(each.power_w for each in judged):.0f} W)"
    if violated and not task.improved:
        why += f"; {', '.join(violated)} would violate SLOs that it meets"
    unseen = replace(best.judge, workload=arrivals(task.workloads, task.rules.requests, task.rules.seed + 1))
    outcome = unseen.serve(best.placed.replicas, best.clocks[None, :], exact=True)
    simulated = sum(each.simulated_requests for each in found)
    return predicted(task, unseen, best.placed, best.clocks, outcome, policy, simulated, why)


def _cut(workload: Workload, profiles: Mapping[str, ClockProfile], rules: PartitionRules) -> CutModel:
    if workload.model not in profiles:
        raise ConfigError(
            f"model {workload.model} of service {workload.id} has no clock scores",
            pointer=workload.id,
            expected=", ".join(profiles) or "a profile",
            hint=f"run: joulery profile {workload.model} --clocks --scores FILE, and name it: plan.pipelines.scores",
        )
    profile = profiles[workload.model]
    if not bool(np.isfinite(profile.power_w).all() and np.isfinite(profile.idle_w).all()):
        raise DataError(
            f"the clock profile of {workload.model} has no power: no meter read it",
            hint=f"profile it where a meter reads the device, or emulated: joulery profile {workload.model} --clocks",
        )
    return cut_model(profile, rules)


def _table(task: Task, shape: Shape) -> tuple[ShapeTable, Cuts]:
    """Time and memory of every model in a shape."""
    known: dict[str, tuple[Stage, ...] | None] = {}
    for cut in task.cuts:
        if cut.profile.model not in known:
            known[cut.profile.model] = cut.stages(shape)
    stages = tuple(known[cut.profile.model] for cut in task.cuts)
    stage_s = np.full((len(task.cuts), shape.stages), np.inf)
    memory = np.full((len(task.cuts), shape.stages), np.inf)
    for at, parts in enumerate(stages):
        if parts is not None:
            stage_s[at] = [part.latency_s for part in parts]
            memory[at] = [part.memory_bytes for part in parts]
    return ShapeTable(stage_s, memory), stages


def _check(task: Task, tables: Mapping[Shape, tuple[ShapeTable, Cuts]]) -> None:
    """Check that every model fits somewhere, and is in time when it runs alone at the highest clock.

    Raises:
        InfeasibleError: One does not; the error names the service, and whether memory, devices or time binds.
    """
    for at, workload in enumerate(task.workloads):
        runs = [
            (float(table.memory_bytes[at].max()), task.lone_s(table.stage_s[at]), shape)
            for shape, (table, _) in tables.items()
            if np.isfinite(table.stage_s[at]).all()
        ]
        fitting = [run for run in runs if run[0] <= task.device.memory_bytes]
        if not fitting:
            raise _too_large(task, at, runs)
        fastest = min(fitting, key=lambda run: run[1])
        if fastest[1] > workload.slo.latency_s:
            raise InfeasibleError(
                f"service {workload.id} cannot answer within {workload.slo.latency_s:g} s: alone at full clock, "
                f"{workload.model} takes {fastest[1]:.3g} s in {fastest[2].stages} stages × {fastest[2].shards} shards",
                binding="latency",
                nearest={"workload": workload.id, "latency_s": fastest[1]},
                hint="relax the SLO, or allow more devices a model",
            )


def _too_large(task: Task, at: int, runs: Sequence[tuple[float, float, Shape]]) -> InfeasibleError:
    workload, room = task.workloads[at], task.device.memory_bytes / 2**30
    weights = task.cuts[at].profile.parameter_bytes / 2**30
    least = min((run[0] for run in runs), default=float("inf")) / 2**30
    whole = task.device.count * room
    message = f"model {workload.model} of service {workload.id} fits nowhere: {weights:.3g} GiB of weights, "
    if weights > whole:
        message += f"the whole cluster of {task.device.count} GPUs has room for {whole:.3g} GiB"
        binding = "memory of the cluster"
    else:
        message += f"at least {least:.3g} GiB on a GPU with room for {room:.3g} GiB"
        binding = "memory" if task.rules.devices_per_model >= task.device.count else "devices per model"
    return InfeasibleError(
        message,
        binding=binding,
        nearest={"workload": workload.id, "least_gib_per_gpu": least, "room_gib_per_gpu": room},
        hint="use GPUs with more memory, more of them, or allow more devices a model",
    )
