"""Conversion of a placement and its clocks into a plan: parts and power of each GPU, services, SLO violations."""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import IntArray
from joulery.domain.gpu.pipeline_plan import PipelineGpu, PipelinePlan, PlannedPart, PlannedService
from joulery.domain.gpu.provisioning import Violation
from joulery.domain.quality import weakest
from joulery.perf.queues.pipeline_queue import PipelineOutcome
from joulery.policies.placement.pipelines.by_sensitivity import scatter
from joulery.policies.placement.pipelines.placed import PlacedStages
from joulery.policies.placement.pipelines.static_clocks import Fleet, Judge
from joulery.policies.placement.pipelines.task import Task


def predicted(
    task: Task,
    judge: Judge,
    placed: PlacedStages,
    clocks: IntArray,
    outcome: PipelineOutcome,
    policy: str,
    simulated_requests: int,
    why: str,
) -> PipelinePlan:
    """The plan, with its predicted power, SLO attainment and SLO violations.

    Args:
        task: The planning task.
        judge: Judge of the placement and its clocks.
        placed: The placement.
        clocks: Index of the clock of each device, int64[devices].
        outcome: Outcome of the requests at these clocks.
        policy: Name of the preset.
        simulated_requests: Requests simulated in the search.
        why: Name of the placement that was taken, and the reason.
    """
    attained = judge.attainment(outcome)[0]
    services = tuple(_service(task, placed, clocks, at, float(attained[at])) for at in range(len(task.workloads)))
    violations = tuple(
        Violation(
            each.workload,
            next((placed.boards[r.devices[0]][0] for r in placed.replicas if r.model == at), 0),
            "attainment",
            each.attainment_ratio,
            each.required_ratio,
        )
        for at, each in enumerate(services)
        if each.attainment_ratio < each.required_ratio - 1e-9
    )
    partitions = placed.partitions(task)
    return PipelinePlan(
        policy=policy,
        gpus=_gpus(task, judge, placed, clocks, outcome),
        services=services,
        violations=violations,
        quality=weakest(cut.profile.quality for cut in task.cuts),
        grouping=str(placed.grouping),
        placement=why,
        scatter=scatter(partitions, placed.assignment()),
        simulated_requests=simulated_requests,
    )


def _service(task: Task, placed: PlacedStages, clocks: IntArray, at: int, attained: float) -> PlannedService:
    workload, cut = task.workloads[at], task.cuts[at]
    mine = [each for each in placed.replicas if each.model == at]
    first = mine[0] if mine else None
    latency_s = float("inf")
    if first is not None:
        latency_s = task.rules.overheads.request_s + sum(
            time_s * first.slowdown[stage, clocks[first.devices[stage]]] for stage, time_s in enumerate(first.stage_s)
        )
    return PlannedService(
        workload=workload.id,
        model=workload.model,
        rate_rps=workload.rate_rps,
        slo_s=workload.slo.latency_s,
        required_ratio=workload.slo.quantile,
        attainment_ratio=attained,
        latency_s=float(latency_s),
        clusters=len(cut.clusters),
        score=cut.profile.score,
        replicas=len(mine),
        stages=len(first.devices) if first else 0,
        shards=placed.shards[first.devices[0]] if first else 0,
    )


def _gpus(
    task: Task, judge: Judge, placed: PlacedStages, clocks: IntArray, outcome: PipelineOutcome
) -> tuple[PipelineGpu, ...]:
    fleet = judge.fleet
    full = np.full((1, fleet.devices), fleet.top)
    busy_s = judge.busy_s(placed.replicas, clocks[None, :], outcome)
    power = judge.power_w(clocks[None, :], busy_s)[0] / fleet.boards
    at_top = judge.serve(placed.replicas, full)
    full_power = judge.power_w(full, judge.busy_s(placed.replicas, full, at_top))[0] / fleet.boards
    return tuple(
        PipelineGpu(
            type=task.device.name,
            usd_per_hour=task.device.usd_per_hour,
            clock_mhz=float(fleet.clocks_mhz[clocks[device]]),
            clock_max_mhz=float(fleet.clocks_mhz[-1]),
            clock_floor_mhz=_floor_mhz(task, placed, fleet, device),
            clock_ceiling_mhz=_ceiling_mhz(task, placed, fleet, device, int(clocks[device])),
            power_w=float(power[device]),
            full_power_w=float(full_power[device]),
            busy_ratio=float(min(busy_s[0, device] / judge.horizon_s, 1.0)),
            memory_bytes=task.device.memory_bytes,
            parts=_parts(task, placed, clocks, device, shard),
        )
        for device, boards in enumerate(placed.boards)
        for shard in range(len(boards))
    )


def _ceiling_mhz(task: Task, placed: PlacedStages, fleet: Fleet, device: int, planned: int) -> float:
    """The lowest clock at which every stage on a device is nearly at its fastest; never below the planned one."""
    highest = planned
    for each in placed.replicas:
        for stage, where in enumerate(each.devices):
            if where == device:
                enough = each.slowdown[stage] <= 1.0 + task.rules.ceiling_loss_ratio
                highest = max(highest, int(np.argmax(enough)))
    return float(fleet.clocks_mhz[highest])


def _floor_mhz(task: Task, placed: PlacedStages, fleet: Fleet, device: int) -> float:
    """The lowest clock at which each hosted model answers a request that does not wait within its SLO."""
    lowest = 0
    for each in placed.replicas:
        if device in each.devices:
            latency_s = np.asarray(each.stage_s) @ each.slowdown + task.rules.overheads.request_s
            in_time = latency_s <= task.workloads[each.model].slo.latency_s
            lowest = max(lowest, int(np.argmax(in_time)) if in_time.any() else fleet.top)
    return float(fleet.clocks_mhz[lowest])


def _parts(task: Task, placed: PlacedStages, clocks: IntArray, device: int, shard: int) -> tuple[PlannedPart, ...]:
    found: list[PlannedPart] = []
    copies = np.bincount([each.model for each in placed.replicas], minlength=len(task.workloads))
    seen = np.zeros(len(task.workloads), np.int64)
    for at, each in enumerate(placed.replicas):
        number = int(seen[each.model])
        seen[each.model] += 1
        workload = task.workloads[each.model]
        for stage, where in enumerate(each.devices):
            if where != device:
                continue
            part = placed.parts[at][stage]
            found.append(
                PlannedPart(
                    workload=workload.id,
                    model=workload.model,
                    replica=number,
                    replicas=int(copies[each.model]),
                    stage=stage,
                    stages=len(each.devices),
                    shard=shard,
                    shards=placed.shards[device],
                    rate_rps=workload.rate_rps / int(copies[each.model]),
                    latency_s=float(each.stage_s[stage] * each.slowdown[stage, clocks[device]]),
                    score=part.score,
                    memory_bytes=part.memory_bytes,
                    operators=(part.first, part.last),
                )
            )
    return tuple(found)
