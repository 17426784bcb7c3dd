"""A plan as one JSON object (schema ``joulery.plan/1``): what ``joulery plan --json`` prints and ``--out`` keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance, ProvisionPlan
from joulery.policies.placement.provisioning.replan import Difference

SCHEMA = "joulery.plan/1"


def document_of(plan: ProvisionPlan) -> dict[str, Any]:
    """The plan, whole."""
    bound = plan.bound
    return {
        "schema": SCHEMA,
        "policy": plan.policy,
        "quality": plan.quality.value,
        "gpus": [_gpu(gpu) for gpu in plan.gpus],
        "cost_usd_per_hour": round(plan.usd_per_hour, 6),
        "violations": [
            {
                "workload": each.workload,
                "gpu": each.gpu,
                "what": each.what,
                "predicted": _finite(each.predicted),
                "allowed": each.allowed,
            }
            for each in plan.violations
        ],
        "bound": None
        if bound is None
        else {
            "gpus": bound.gpus,
            "cost_usd_per_hour": round(bound.usd_per_hour, 6),
            "relaxed_cost_usd_per_hour": round(bound.relaxed_usd_per_hour, 6),
            "method": bound.method,
        },
        "gap_ratio": _finite(plan.gap_ratio),
        "optimal": plan.optimal,
        "binding": binding(plan),
    }


def gpus_of(document: Any, file: str) -> tuple[PlannedGpu, ...]:
    """The GPUs of a plan that :func:`document_of` wrote.

    Args:
        document: The object.
        file: Where it comes from, for messages.

    Raises:
        DataError: It is no plan.
    """
    try:
        return tuple(
            PlannedGpu(
                str(gpu["type"]),
                float(gpu["usd_per_hour"]),
                float(gpu["frequency_mhz"]),
                float(gpu["frequency_max_mhz"]),
                float(gpu["power_demand_w"]),
                float(gpu["power_w"]),
                tuple(_instance_of(each) for each in gpu["instances"]),
            )
            for gpu in document["gpus"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"not a plan: {type(error).__name__} {error}",
            file=file,
            hint="write one with `joulery plan SITE --out plan.json`",
        ) from None


def _instance_of(each: Mapping[str, Any]) -> PlannedInstance:
    parts = {f"{name}_s": _known(value) for name, value in each["latency_parts_s"].items()}
    return PlannedInstance(
        workload=str(each["workload"]),
        model=str(each["model"]),
        replica=int(each["replica"]),
        replicas=int(each["replicas"]),
        rate_rps=float(each["rate_rps"]),
        share_ratio=float(each["share_ratio"]),
        batch=int(each["batch"]),
        max_delay_s=_known(each["max_delay_s"]),
        wait_s=math.nan if each["wait_s"] is None else float(each["wait_s"]),
        parts=LatencyParts(**parts),
        limit_s=float(each["limit_s"]),
        throughput_rps=float(each["throughput_rps"]),
        slo_s=float(each["slo_s"]),
    )


def _known(value: float | None) -> float:
    """A number; JSON has null for infinity."""
    return math.inf if value is None else float(value)


def _gpu(gpu: PlannedGpu) -> dict[str, Any]:
    return {
        "type": gpu.type,
        "usd_per_hour": gpu.usd_per_hour,
        "share_ratio": round(gpu.share_ratio, 9),
        "frequency_mhz": gpu.clock_mhz,
        "frequency_max_mhz": gpu.clock_max_mhz,
        "power_w": gpu.power_w,
        "power_demand_w": gpu.demand_w,
        "instances": [_instance(each) for each in gpu.instances],
    }


def _instance(each: PlannedInstance) -> dict[str, Any]:
    parts = each.parts
    return {
        "workload": each.workload,
        "model": each.model,
        "replica": each.replica,
        "replicas": each.replicas,
        "rate_rps": each.rate_rps,
        "share_ratio": round(each.share_ratio, 9),
        "batch": each.batch,
        "max_delay_s": _finite(each.max_delay_s),
        "latency_s": _finite(each.latency_s),
        "latency_parts_s": {
            "load": parts.load_s,
            "schedule": parts.schedule_s,
            "active": parts.active_s,
            "throttle": _finite(parts.throttle_s),
            "feedback": parts.feedback_s,
        },
        "wait_s": _finite(each.wait_s),
        "limit_s": each.limit_s,
        "slack_s": _finite(each.slack_s),
        "throughput_rps": each.throughput_rps,
        "slo_s": each.slo_s,
    }


def binding(plan: ProvisionPlan) -> dict[str, Any] | None:
    """The promise with the least slack: of a latency, or of a throughput."""
    tightest: tuple[float, dict[str, Any]] | None = None
    for index, gpu in enumerate(plan.gpus):
        for each in gpu.instances:
            for what, slack in (
                ("latency", 1 - each.latency_s / each.limit_s if each.limit_s > 0 else -math.inf),
                ("throughput", 1 - each.rate_rps / each.throughput_rps if each.throughput_rps > 0 else -math.inf),
            ):
                if tightest is None or slack < tightest[0]:
                    found = {"workload": each.workload, "gpu": index, "what": what, "slack_ratio": _finite(slack)}
                    tightest = slack, found
    return None if tightest is None else tightest[1]


def difference_document(difference: Difference) -> dict[str, Any]:
    """What changes against a running plan."""
    return {
        "moves": difference.moves,
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
                "before": None
                if each.before is None
                else {"share_ratio": each.before[0] / 100, "batch": each.before[1]},
                "after": None if each.after is None else {"share_ratio": each.after[0] / 100, "batch": each.after[1]},
            }
            for each in difference.changes
        ],
    }


def comparison_document(plans: Sequence[ProvisionPlan]) -> list[dict[str, Any]]:
    """A line a policy."""
    return [
        {
            "policy": plan.policy,
            "gpus": len(plan.gpus),
            "cost_usd_per_hour": round(plan.usd_per_hour, 6),
            "share_ratio": round(math.fsum(gpu.share_ratio for gpu in plan.gpus), 9),
            "violations": len(plan.violations),
            "violating": sorted({each.workload for each in plan.violations}),
        }
        for plan in plans
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
