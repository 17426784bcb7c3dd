"""Write plans of every kind as JSON objects (schema ``joulery.plan/1``).

``kind`` states what a plan contains: ``shares`` (services on MPS shares of GPUs), ``stages`` (models divided into
pipeline stages, with a clock a GPU), ``layouts`` (variants on MIG slices) or ``language`` (replicas of language
models). Every kind has ``policy``, ``quality``, ``gpus``, ``cost_usd_per_hour``, ``violations``, ``gap_ratio``,
``optimal`` and ``binding``. A plan of shares of preset ``joint`` adds its objective, power and certificate.
:mod:`joulery.store.plans` reads them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from joulery.domain.gpu.language_plan import LanguageCertificate, LanguagePlan, LanguageReplicas
from joulery.domain.gpu.layout_plan import LayoutPlan
from joulery.domain.gpu.optimum import PlanCertificate
from joulery.domain.gpu.pipeline_plan import PipelineGpu, PipelinePlan, PlannedPart, PlannedService
from joulery.domain.gpu.plan_change import PlanDifference
from joulery.domain.gpu.provisioning import Binding, PlannedGpu, PlannedInstance, ProvisionPlan, Violation
from joulery.domain.json_numbers import known_number

SCHEMA = "joulery.plan/1"
Plan = ProvisionPlan | PipelinePlan | LayoutPlan | LanguagePlan
"""Any plan."""


def document_of(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object."""
    if isinstance(plan, LanguagePlan):
        return _language_document(plan)
    if isinstance(plan, LayoutPlan):
        return _layouts_document(plan)
    return _stages_document(plan) if isinstance(plan, PipelinePlan) else _shares_document(plan)


def comparison_document(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Plans of several policies side by side, one entry a policy."""
    return [_compared(plan) for plan in plans]


def difference_document(difference: PlanDifference) -> dict[str, Any]:
    """Changes against a running plan."""
    return {
        "migrations": difference.migrations,
        "moves": difference.migrations,
        "starts": difference.count("start"),
        "stops": difference.count("stop"),
        "resizes": difference.count("resize"),
        "gpus_opened": difference.opened,
        "gpus_closed": difference.closed,
        "changes": [
            {
                "workload": each.workload,
                "replica": each.replica,
                "what": each.what,
                "source": each.source,
                "target": each.target,
                "before": _share_and_batch(each.before),
                "after": _share_and_batch(each.after),
            }
            for each in difference.changes
        ],
    }


def _head(plan: Plan, kind: str, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": kind,
        "policy": plan.policy,
        "quality": str(plan.quality),
        "gpus": gpus,
        "cost_usd_per_hour": round(plan.usd_per_hour, 6),
    }


def _violation(each: Violation) -> dict[str, Any]:
    return {**dataclasses.asdict(each), "predicted": known_number(each.predicted)}


def _binding(found: Binding | None) -> dict[str, Any] | None:
    return None if found is None else {**found._asdict(), "slack_ratio": known_number(found.slack_ratio)}


def _share_and_batch(found: tuple[float, int] | None) -> dict[str, Any] | None:
    return None if found is None else {"share_ratio": found[0] / 100, "batch": found[1]}


def _compared(plan: Plan) -> dict[str, Any]:
    if isinstance(plan, PipelinePlan):
        return {
            "policy": plan.policy,
            "gpus": len(plan.gpus),
            "power_w": plan.power_w,
            "saving_ratio": plan.saving_ratio,
            "violations": len(plan.violations),
        }
    if isinstance(plan, LanguagePlan):
        return {"policy": plan.policy, "gpus": plan.gpus, "cost_w": plan.power_w, "violations": 0}
    if isinstance(plan, LayoutPlan):
        return {"policy": plan.policy, "gpus": plan.gpus_on, "cost_w": plan.cost_w, "violations": 0}
    certificate = plan.certificate
    return {
        "policy": plan.policy,
        "gpus": len(plan.gpus),
        "cost_usd_per_hour": round(plan.usd_per_hour, 6),
        **({} if certificate is None else {"value": certificate.value, "power_w": certificate.power_w}),
        "share_ratio": round(math.fsum(gpu.share_ratio for gpu in plan.gpus), 9),
        "violations": len(plan.violations),
        "violating": sorted({each.workload for each in plan.violations}),
    }


def _shares_document(plan: ProvisionPlan) -> dict[str, Any]:
    bound = plan.bound
    return {
        **_head(plan, "shares", [_shares_gpu_document(gpu) for gpu in plan.gpus]),
        "violations": [_violation(each) for each in plan.violations],
        "bound": None
        if bound is None
        else {
            "gpus": bound.gpus,
            "cost_usd_per_hour": round(bound.usd_per_hour, 6),
            "relaxed_cost_usd_per_hour": round(bound.relaxed_usd_per_hour, 6),
            "method": bound.method,
        },
        "gap_ratio": known_number(plan.gap_ratio),
        "optimal": plan.optimal,
        "binding": _binding(plan.binding),
        **({} if plan.certificate is None else _optimum_document(plan.certificate, len(plan.gpus))),
    }


def _optimum_document(certificate: PlanCertificate, gpus: int) -> dict[str, Any]:
    """The keys that a joint plan adds to a plan of shares; ``bound`` replaces its bound.

    A checker of the bound needs nothing else. A request a second of a service's variant on a GPU type at a clock is
    worth ``max(0, demand_price + accuracy_price (accuracy - floor) - (per_w + power_price) request_j)``. No layout of a
    GPU may be worth more than ``(per_w + power_price) (standing_w + overheads) + per_usd usd + per_gpu + pool_price``.
    A MIG partition is worth the sum, over its slices, of the best entry of ``slices`` for each. ``costs`` and
    ``columns`` name the first of the services that are ``alike``, for all of them.
    Then ``Σ demand_price rate - power_price cap - Σ pool_price available`` is a bound: ``relaxed_value`` where branch
    and bound proves more.
    """
    objective = certificate.objective
    return {
        "objective": objective.name,
        "objective_unit": objective.unit,
        "value": certificate.value,
        "bound": {
            "value": certificate.bound,
            "gap_ratio": certificate.gap_ratio,
            "unit": objective.unit,
            "method": certificate.method,
            "limit_reached": certificate.limit_reached,
            **({} if math.isnan(certificate.relaxed) else {"relaxed_value": certificate.relaxed}),
        },
        "power_w": certificate.power_w,
        "carbon_g_per_hour": objective.carbon_g_per_hour(certificate.power_w, gpus),
        "certificate": {
            "per_w": objective.per_w,
            "per_usd": objective.per_usd,
            "per_gpu": objective.per_gpu,
            "g_per_kwh": objective.g_per_kwh,
            "pue": objective.pue,
            "embodied_g_per_hour": objective.embodied_g_per_hour,
            "demand_price": dict(certificate.demand_price),
            "accuracy_price": dict(certificate.accuracy_price),
            "pool_price": dict(certificate.pool_price),
            "power_price": certificate.power_price,
            "rates_rps": dict(certificate.rates_rps),
            "floors_ratio": dict(certificate.floors_ratio),
            "available": dict(certificate.available),
            "power_cap_w": certificate.power_cap_w,
            "carbon_cap_g_per_hour": certificate.carbon_cap_g_per_hour,
            "carbon_price": certificate.carbon_price,
            "costs": [
                {**each._asdict(), "accuracy_ratio": known_number(each.accuracy_ratio)} for each in certificate.costs
            ],
            "columns": [
                {**each._asdict(), "instances": [one._asdict() for one in each.instances]}
                for each in certificate.patterns
            ],
            "slices": [
                {**each._asdict(), "accuracy_ratio": known_number(each.accuracy_ratio)} for each in certificate.slices
            ],
            "cuts": [{**each._asdict(), "slices": list(each.slices)} for each in certificate.partitions],
            "alike": [list(names) for names in certificate.alike],
        },
    }


def _shares_gpu_document(gpu: PlannedGpu) -> dict[str, Any]:
    return {
        "type": gpu.type,
        "usd_per_hour": gpu.usd_per_hour,
        "share_ratio": round(gpu.share_ratio, 9),
        "frequency_mhz": gpu.clock_mhz,
        "frequency_max_mhz": gpu.clock_max_mhz,
        "power_w": gpu.power_w,
        "power_demand_w": gpu.demand_w,
        **({} if gpu.clock_set_mhz is None else {"mode": gpu.mode, **_clocks_document(gpu, gpu.clock_set_mhz)}),
        **({} if math.isnan(gpu.idle_w) else {"idle_w": gpu.idle_w, "host_w": gpu.host_w}),
        "memory_bytes": known_number(gpu.memory_bytes),
        "memory_limit_bytes": known_number(gpu.memory_limit_bytes),
        **({} if gpu.host is None else {"host": gpu.host}),
        "instances": [
            _instance_document(each)
            if gpu.clock_set_mhz is None
            else {**_instance_document(each), **_chosen_document(each, gpu.mode, gpu.clock_set_mhz)}
            for each in gpu.instances
        ],
    }


def _clocks_document(gpu: PlannedGpu, set_mhz: float) -> dict[str, float]:
    """The clock of a joint plan, and the bounds for a governor."""
    floor_mhz, ceiling_mhz = gpu.clock_bounds_mhz or (set_mhz, gpu.clock_max_mhz)
    return {"clock_mhz": set_mhz, "clock_floor_mhz": floor_mhz, "clock_ceiling_mhz": ceiling_mhz}


def _chosen_document(each: PlannedInstance, mode: str, clock_mhz: float) -> dict[str, Any]:
    """Choices of a joint plan for an instance, and the watts it adds."""
    return {
        "variant": each.model,
        "mode": mode,
        "clock_mhz": clock_mhz,
        "accuracy_ratio": known_number(each.accuracy_ratio),
        "overhead_w": known_number(each.overhead_w),
        "requests_w": known_number(each.requests_w),
        "provided_rps": known_number(each.provided_rps),
        **({"slice": each.slice, "processes": each.processes} if each.slice else {}),
    }


def _instance_document(each: PlannedInstance) -> dict[str, Any]:
    parts = each.parts
    return {
        "workload": each.workload,
        "model": each.model,
        "replica": each.replica,
        "replicas": each.replicas,
        "rate_rps": each.rate_rps,
        "share_ratio": round(each.share_ratio, 12 if each.slice else 9),
        "batch": each.batch,
        "max_delay_s": known_number(each.max_delay_s),
        "latency_s": known_number(each.latency_s),
        "latency_parts_s": None
        if each.slice
        else {
            "load": parts.load_s,
            "schedule": parts.schedule_s,
            "active": parts.active_s,
            "throttle": known_number(parts.throttle_s),
            "feedback": parts.feedback_s,
        },
        "wait_s": known_number(each.wait_s),
        "limit_s": each.limit_s,
        "slack_s": known_number(each.slack_s),
        "throughput_rps": each.throughput_rps,
        "slo_s": each.slo_s,
        "memory_bytes": known_number(each.memory_bytes),
    }


def _stages_document(plan: PipelinePlan) -> dict[str, Any]:
    services = {each.workload: each for each in plan.services}
    return {
        **_head(plan, "stages", [_stages_gpu_document(gpu, services) for gpu in plan.gpus]),
        "power_w": plan.power_w,
        "saving_ratio": plan.saving_ratio,
        "services": [_stages_service_document(each) for each in plan.services],
        "violations": [_violation(each) for each in plan.violations],
        "bound": None,
        "gap_ratio": None,
        "optimal": False,
        "binding": _binding(plan.binding),
        "grouping": plan.grouping,
        "placement": plan.placement,
        "scatter": plan.scatter,
        "simulated_requests": plan.simulated_requests,
    }


def _stages_gpu_document(gpu: PipelineGpu, services: Mapping[str, PlannedService]) -> dict[str, Any]:
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
        "instances": [_part_document(part, services[part.workload]) for part in gpu.parts],
    }


def _part_document(part: PlannedPart, service: PlannedService) -> dict[str, Any]:
    return {
        "workload": part.workload,
        "model": part.model,
        "replica": part.replica,
        "replicas": part.replicas,
        "rate_rps": part.rate_rps,
        "latency_s": known_number(service.latency_s),
        "slo_s": service.slo_s,
        "slack_s": known_number(service.slo_s - service.latency_s),
        "stage": part.stage,
        "stages": part.stages,
        "shard": part.shard,
        "shards": part.shards,
        "stage_latency_s": part.latency_s,
        "operators": list(part.operators),
        "score": part.score,
        "memory_bytes": part.memory_bytes,
    }


def _stages_service_document(each: PlannedService) -> dict[str, Any]:
    document = dataclasses.asdict(each)
    return {**document, "latency_s": known_number(each.latency_s), "promised_ratio": each.required_ratio}


def _layouts_document(plan: LayoutPlan) -> dict[str, Any]:
    bound = plan.bound
    return {
        **_head(plan, "layouts", _layouts_gpus(plan)),
        "preset": plan.policy,
        "intensity_g_per_kwh": plan.g_per_kwh,
        "gpus_on": plan.gpus_on,
        "gpus_off": plan.gpus_off,
        "layouts": [
            {
                "gpu": layout.gpu,
                "clock_mhz": layout.clock_mhz,
                "count": layout.count,
                "usd_per_hour": layout.usd_per_hour,
                "instances": [one._asdict() for one in layout.instances],
            }
            for layout in plan.layouts
        ],
        "services": [dataclasses.asdict(each) for each in plan.services],
        "cost_w": plan.cost_w,
        "idle_w": plan.idle_w,
        "bound_w": None if bound is None else bound.cost_w,
        "gap_ratio": None if bound is None else bound.gap_ratio,
        "corrected_bound_w": None if bound is None else bound.corrected_cost_w,
        "corrected_gap_ratio": None if bound is None else bound.corrected_gap_ratio,
        "violations": [],
        "optimal": bound is not None and bound.gap_ratio <= 1e-9,
        "binding": _binding(plan.binding),
        "boxes": plan.boxes,
        "trials": plan.trials,
        "by_gpus": [
            {**one._asdict(), "accuracy_ratio": list(one.accuracy_ratio), "latency_s": list(one.latency_s)}
            for one in plan.by_gpus
        ],
    }


def _layouts_gpus(plan: LayoutPlan) -> list[dict[str, Any]]:
    """Every GPU that is on, as other kinds of plan list them."""
    return [
        {
            "type": layout.gpu,
            "usd_per_hour": layout.usd_per_hour,
            "clock_mhz": layout.clock_mhz,
            "instances": [
                {"workload": one.service, "model": one.variant, "slice": one.slice} for one in layout.instances
            ],
        }
        for layout in plan.layouts
        for _ in range(layout.count)
    ]


def _language_document(plan: LanguagePlan) -> dict[str, Any]:
    tightest = min(
        ((part.slack_ratio, each, part) for each in plan.replicas for part in each.parts), key=lambda found: found[0]
    )
    return {
        **_head(plan, "language", _language_gpus(plan)),
        "objective": plan.objective,
        "objective_value": plan.objective_value,
        "bound": plan.bound._asdict(),
        "gap_ratio": plan.bound.gap_ratio,
        "optimal": plan.bound.gap_ratio <= 1e-9,
        "power_w": plan.power_w,
        "carbon_g_per_hour": plan.carbon_g_per_hour,
        "intensity_g_per_kwh": plan.g_per_kwh,
        "pue": plan.pue,
        "candidates": plan.candidates,
        "services": [_replicas_document(each) for each in plan.replicas],
        "alternatives": [each._asdict() for each in plan.alternatives],
        "violations": [
            {"workload": each.service, "what": name, "predicted": known_number(seconds), "allowed": part.limit_s}
            for each in plan.violations
            for name, seconds in each.simulated_s
            for part in each.parts
            if part.name == name and seconds > part.limit_s
        ],
        "binding": {
            "workload": tightest[1].service,
            "what": tightest[2].name,
            "slack_ratio": tightest[0],
        },
        "source": plan.source,
        "notes": list(plan.notes),
        "certificate": None if plan.certificate is None else _language_certificate(plan.certificate),
    }


def _language_certificate(proof: LanguageCertificate) -> dict[str, Any]:
    return {
        "relaxed": proof.relaxed,
        "demand_price": dict(proof.demand_price),
        "pool_price": dict(proof.pool_price),
        "rates_rps": dict(proof.rates_rps),
        "available": dict(proof.available),
        "columns": [each._asdict() for each in proof.candidates],
        "looser": [each._asdict() for each in proof.looser],
    }


def _language_gpus(plan: LanguagePlan) -> list[dict[str, Any]]:
    """Every GPU with its instances; the GPUs of one replica are listed one after the other."""
    found = []
    for each in plan.replicas:
        for replica in range(1, each.count + 1):
            for shard in range(1, each.gpus + 1):
                instance = {
                    "workload": each.service,
                    "model": each.model,
                    "variant": each.variant,
                    "mode": "whole",
                    "clock_mhz": None,
                    "accuracy_ratio": each.quality_ratio,
                    "replica": replica,
                    "replicas": each.count,
                    "shard": shard,
                    "shards": each.gpus,
                    "rate_rps": each.rate_rps,
                    "max_num_seqs": each.max_num_seqs,
                }
                found.append(
                    {
                        "type": each.gpu,
                        "usd_per_hour": each.usd_per_hour / each.gpus,
                        "mode": "whole",
                        "clock_mhz": None,
                        "power_w": each.power_w / each.gpus,
                        "host_w": each.host_w / each.gpus,
                        "instances": [instance],
                    }
                )
    return found


def _replicas_document(each: LanguageReplicas) -> dict[str, Any]:
    return {
        "workload": each.service,
        "model": each.model,
        "precision": each.precision,
        "variant": each.variant,
        "mode": "whole",
        "clock_mhz": None,
        "accuracy_ratio": each.quality_ratio,
        "gpu": each.gpu,
        "gpus_a_replica": each.gpus,
        "replicas": each.count,
        "max_num_seqs": each.max_num_seqs,
        "vllm_command": each.command,
        "rate_rps": each.rate_rps,
        "in_flight": each.in_flight,
        "power_w": each.power_w,
        "host_w": each.host_w,
        "usd_per_hour": each.usd_per_hour,
        "energy_per_token_j": each.energy_per_token_j,
        "basis": each.basis,
        "error_ratio": each.error_ratio,
        "slo": [
            {**part._asdict(), "slack_ratio": part.slack_ratio, "simulated_s": dict(each.simulated_s).get(part.name)}
            for part in each.parts
        ],
    }
