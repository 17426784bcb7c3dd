"""A plan of pipelines as one JSON object: the keys of other plans (``joulery.plan/1``) where they mean the same."""

from __future__ import annotations

import math
from typing import Any

from joulery.domain.gpu.pipeline_plan import PipelineGpu, PipelinePlan, PlannedPart, PlannedService
from joulery.ui.reports.plan.document import SCHEMA


def pipeline_document(plan: PipelinePlan) -> dict[str, Any]:
    """The plan, whole."""
    services = {each.workload: each for each in plan.services}
    return {
        "schema": SCHEMA,
        "policy": plan.policy,
        "quality": plan.quality.value,
        "gpus": [_gpu(gpu, services) for gpu in plan.gpus],
        "cost_usd_per_hour": round(plan.usd_per_hour, 6),
        "power_w": plan.power_w,
        "saving_ratio": plan.saving_ratio,
        "services": [_service(each) for each in plan.services],
        "violations": [
            {
                "workload": each.workload,
                "gpu": each.gpu,
                "what": each.what,
                "predicted": each.predicted,
                "allowed": each.allowed,
            }
            for each in plan.violations
        ],
        "bound": None,
        "gap_ratio": None,
        "optimal": False,
        "binding": binding_service(plan),
        "grouping": plan.grouping,
        "placement": plan.placement,
        "scatter": plan.scatter,
        "simulated_requests": plan.simulated_requests,
    }


def binding_service(plan: PipelinePlan) -> dict[str, Any] | None:
    """The promise with the least slack: of a latency without waiting, or of the share of requests in time."""
    found = [
        (slack, {"workload": each.workload, "gpu": _first_gpu(plan, each.workload), "what": what, "slack_ratio": slack})
        for each in plan.services
        for what, slack in (
            ("latency", 1 - each.latency_s / each.slo_s),
            ("attainment", each.attainment_ratio - each.promised_ratio),
        )
        if math.isfinite(slack)
    ]
    return min(found, key=lambda each: each[0])[1] if found else None


def _first_gpu(plan: PipelinePlan, workload: str) -> int | None:
    hosts = (at for at, gpu in enumerate(plan.gpus) if any(part.workload == workload for part in gpu.parts))
    return next(hosts, None)


def _gpu(gpu: PipelineGpu, services: dict[str, PlannedService]) -> dict[str, Any]:
    return {
        "type": gpu.type,
        "usd_per_hour": gpu.usd_per_hour,
        "frequency_mhz": gpu.clock_mhz,
        "frequency_max_mhz": gpu.clock_max_mhz,
        "clock_floor_mhz": gpu.clock_floor_mhz,
        "clock_ceiling_mhz": gpu.clock_ceiling_mhz,
        "power_w": gpu.power_w,
        "power_full_clock_w": gpu.full_power_w,
        "busy_ratio": gpu.busy_ratio,
        "memory_bytes": gpu.memory_bytes,
        "free_bytes": gpu.free_bytes,
        "instances": [_part(part, services[part.workload]) for part in gpu.parts],
    }


def _part(part: PlannedPart, service: PlannedService) -> dict[str, Any]:
    return {
        "workload": part.workload,
        "model": part.model,
        "replica": part.replica,
        "replicas": part.replicas,
        "rate_rps": part.rate_rps,
        "latency_s": _finite(service.latency_s),
        "slo_s": service.slo_s,
        "slack_s": _finite(service.slo_s - service.latency_s),
        "stage": part.stage,
        "stages": part.stages,
        "shard": part.shard,
        "shards": part.shards,
        "stage_latency_s": part.latency_s,
        "operators": list(part.operators),
        "score": part.score,
        "memory_bytes": part.memory_bytes,
    }


def _service(each: PlannedService) -> dict[str, Any]:
    return {
        "workload": each.workload,
        "model": each.model,
        "rate_rps": each.rate_rps,
        "slo_s": each.slo_s,
        "promised_ratio": each.promised_ratio,
        "attainment_ratio": each.attainment_ratio,
        "latency_s": _finite(each.latency_s),
        "clusters": each.clusters,
        "score": each.score,
        "replicas": each.replicas,
        "stages": each.stages,
        "shards": each.shards,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
