"""Read plan files of every kind that :mod:`joulery.store.plan_documents` writes.

It also reads files without ``kind``, files of schema ``joulery.pool-plan/1`` and the key ``promised_ratio``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from joulery.domain.errors import DataError
from joulery.domain.gpu.language_plan import PlannedEngine
from joulery.domain.gpu.layout_plan import (
    LayoutBaseline,
    LayoutBound,
    LayoutInstance,
    LayoutPlan,
    LayoutService,
    PlannedLayout,
    PoolOfSize,
)
from joulery.domain.gpu.optimum import (
    CertifiedCost,
    CertifiedInstance,
    CertifiedPartition,
    CertifiedPattern,
    CertifiedSlice,
    PlanCertificate,
    PlanObjective,
)
from joulery.domain.gpu.pipeline_plan import PipelineGpu, PipelinePlan, PlannedPart, PlannedService
from joulery.domain.gpu.plan_change import RunningGpu, RunningProcess
from joulery.domain.gpu.provisioning import (
    LatencyParts,
    PlanBound,
    PlannedGpu,
    PlannedInstance,
    ProvisionPlan,
    Violation,
)
from joulery.domain.json_numbers import or_nan
from joulery.domain.quality import Quality
from joulery.store.files import require_json
from joulery.store.plan_documents import Plan

_T = TypeVar("_T")
_MAYBE = ("accuracy_ratio", "overhead_w", "requests_w", "provided_rps")
"""Figures of an instance that only some policies provide."""
_HINT = "write one with `joulery plan SITE --out plan.json`"
_CLOCK_HINT = "write one with: joulery plan SITE --preset muserve (or joint) --out FILE"


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan file, parsed as JSON; each method reads the part it needs and raises :class:`DataError` without it.

    Attributes:
        file: The file it was read from.
        document: The object.
    """

    file: Path
    document: Any

    @property
    def kind(self) -> str:
        """``shares``, ``stages``, ``layouts`` or ``language``."""
        document = self.document
        if not isinstance(document, Mapping) or not ("gpus" in document or "layouts" in document):
            raise self._wrong("not a plan: no key gpus or layouts")
        if "kind" in document:
            return str(document["kind"])
        if "layouts" in document:
            return "layouts"
        return "stages" if "services" in document else "shares"

    def plan(self) -> Plan:
        """The whole plan.

        Raises:
            DataError: A key is missing or holds another type.
        """
        readers: dict[str, Callable[[Mapping[str, Any]], Plan]] = {
            "shares": _shares_plan,
            "stages": _stages_plan,
            "layouts": _layouts_plan,
        }
        read = readers.get(self.kind)
        if read is None:
            raise self._wrong(f"no such kind of plan: {self.kind}, expected shares, stages or layouts")
        return self._read(read)

    def gpus(self) -> tuple[PlannedGpu, ...]:
        """The GPUs of a plan of shares or slices, with the predictions for every instance.

        Raises:
            DataError: It is not such a plan.
        """
        if self.kind != "shares":
            raise self._wrong(f"a plan of {self.kind}, expected a plan of shares", "plan with preset best or igniter")
        return self._read(lambda document: tuple(_shares_gpu(gpu) for gpu in document["gpus"]))

    def shares(self) -> tuple[PlannedGpu, ...]:
        """The GPUs of a plan of shares, with the predictions for every instance.

        Raises:
            DataError: It is not a plan of shares, or it has MIG slices.
        """
        gpus = self.gpus()
        if any(gpu.sliced for gpu in gpus):
            raise self._wrong(
                "the plan puts services on MIG slices, which cannot be taken for shares",
                "joulery plan simulates such a plan when it makes it; for a plan of shares, plan without measurements",
            )
        return gpus

    def engines(self) -> tuple[PlannedEngine, ...]:
        """The engines of a plan of language models.

        Raises:
            DataError: It is not such a plan.
        """
        if self.kind != "language":
            raise self._wrong(f"a plan of {self.kind}, expected a plan of language models", "plan with plan.language")
        return self._read(
            lambda document: tuple(
                PlannedEngine(
                    str(each["workload"]),
                    str(each["model"]),
                    str(each["precision"]),
                    int(each["gpus_a_replica"]),
                    int(each["max_num_seqs"]),
                    int(each["replicas"]),
                )
                for each in document["services"]
            )
        )

    def running(self) -> tuple[RunningGpu, ...]:
        """The processes of a plan of shares: replica, share and batch.

        Raises:
            DataError: It is not a plan of shares.
        """
        return self._read(
            lambda document: tuple(
                RunningGpu(str(gpu["type"]), tuple(_running(each) for each in gpu["instances"]))
                for gpu in document["gpus"]
            )
        )

    def hosts(self) -> tuple[tuple[str, int], ...]:
        """The GPU that hosts each model, counted from 0.

        Raises:
            DataError: The plan has no instances, or a model on more than one GPU.
        """
        found: dict[str, int] = {}
        try:
            placed = [
                (str(each["model"]), at) for at, gpu in enumerate(self.document["gpus"]) for each in gpu["instances"]
            ]
        except (KeyError, TypeError):
            raise self._wrong("not a plan of pipelines", _CLOCK_HINT) from None
        for model, at in placed:
            if found.setdefault(model, at) != at:
                raise self._wrong(
                    f"the plan has {model} on several GPUs",
                    "plan with devices_per_model: 1 and one replica a model, or simulate without the plan",
                )
        if not found:
            raise self._wrong("the plan hosts no model", _CLOCK_HINT)
        return tuple(found.items())

    def clock_bounds(self, gpu: int) -> tuple[float, float]:
        """Lowest and highest clock that the plan allows a governor of one GPU, MHz.

        Args:
            gpu: The GPU, counted from 1.

        Raises:
            DataError: The plan has no such GPU, or no clock bounds.
        """
        try:
            gpus = self.document["gpus"]
            if not 1 <= gpu <= len(gpus):
                raise self._wrong(f"the plan has {len(gpus)} GPUs, not a GPU {gpu}", "count from 1")
            floor, ceiling = float(gpus[gpu - 1]["clock_floor_mhz"]), float(gpus[gpu - 1]["clock_ceiling_mhz"])
        except (KeyError, TypeError, ValueError):
            raise self._wrong("the plan bounds no clocks", _CLOCK_HINT) from None
        if not 0 < floor <= ceiling < math.inf:
            raise self._wrong(f"a clock cannot be kept between {floor} and {ceiling} MHz", _CLOCK_HINT)
        return floor, ceiling

    def _read(self, read: Callable[[Mapping[str, Any]], _T]) -> _T:
        try:
            return read(self.document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._wrong(f"not a plan: {type(error).__name__} {error}") from None

    def _wrong(self, message: str, hint: str = _HINT) -> DataError:
        return DataError(message, file=str(self.file), hint=hint)


def read_plan(file: Path) -> PlanFile:
    """Read a plan file.

    Raises:
        DataError: It does not exist, or is not JSON.
    """
    try:
        return PlanFile(file, require_json(file))
    except DataError as error:
        raise DataError(f"cannot read the plan: {error.message}", file=str(file), hint=_HINT) from None


def _violations(document: Mapping[str, Any]) -> tuple[Violation, ...]:
    return tuple(
        Violation(each["workload"], each["gpu"], each["what"], _known(each["predicted"]), each["allowed"])
        for each in document["violations"]
    )


def _running(each: Mapping[str, Any]) -> RunningProcess:
    replica, share_percent = int(each.get("replica", 0)), 100.0 * float(each["share_ratio"])
    return RunningProcess(str(each["workload"]), replica, share_percent, int(each["batch"]))


def _known(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _certificate(document: Mapping[str, Any]) -> PlanCertificate | None:
    """The certificate of a joint plan; None for plans of other policies."""
    if "certificate" not in document:
        return None
    known, bound = document["certificate"], document["bound"]
    objective = PlanObjective(
        str(document["objective"]),
        str(document["objective_unit"]),
        float(known["per_w"]),
        float(known["per_usd"]),
        known["g_per_kwh"],
        float(known["pue"]),
        float(known["embodied_g_per_hour"]),
        float(known["per_gpu"]),
    )
    return PlanCertificate(
        objective=objective,
        value=float(document["value"]),
        bound=float(bound["value"]),
        method=str(bound["method"]),
        relaxed=or_nan(bound.get("relaxed_value")),
        optimal=bool(document["optimal"]),
        power_w=float(document["power_w"]),
        demand_price=dict(known["demand_price"]),
        accuracy_price=dict(known["accuracy_price"]),
        pool_price=dict(known["pool_price"]),
        power_price=float(known["power_price"]),
        rates_rps=dict(known["rates_rps"]),
        floors_ratio=dict(known["floors_ratio"]),
        available=dict(known["available"]),
        power_cap_w=known["power_cap_w"],
        carbon_cap_g_per_hour=known.get("carbon_cap_g_per_hour"),
        costs=tuple(
            CertifiedCost(**{**each, "accuracy_ratio": or_nan(each["accuracy_ratio"])}) for each in known["costs"]
        ),
        patterns=tuple(
            CertifiedPattern(**{**each, "instances": tuple(CertifiedInstance(**one) for one in each["instances"])})
            for each in known["columns"]
        ),
        slices=tuple(
            CertifiedSlice(**{**each, "accuracy_ratio": or_nan(each["accuracy_ratio"])})
            for each in known.get("slices", ())
        ),
        partitions=tuple(
            CertifiedPartition(**{**each, "slices": tuple(each["slices"])}) for each in known.get("cuts", ())
        ),
        alike=tuple(tuple(names) for names in known.get("alike", ())),
        limit_reached=bool(bound.get("limit_reached", False)),  # files of earlier versions do not say
    )


def _shares_plan(document: Mapping[str, Any]) -> ProvisionPlan:
    bound, certificate = document["bound"], _certificate(document)
    return ProvisionPlan(
        policy=str(document["policy"]),
        gpus=tuple(_shares_gpu(gpu) for gpu in document["gpus"]),
        violations=_violations(document),
        certificate=certificate,
        bound=None
        if bound is None or certificate is not None
        else PlanBound(
            bound["gpus"], bound["cost_usd_per_hour"], bound["relaxed_cost_usd_per_hour"], str(bound["method"])
        ),
        quality=Quality(document["quality"]),
    )


def _shares_gpu(gpu: Mapping[str, Any]) -> PlannedGpu:
    return PlannedGpu(
        type=str(gpu["type"]),
        usd_per_hour=float(gpu["usd_per_hour"]),
        clock_mhz=float(gpu["frequency_mhz"]),
        clock_max_mhz=float(gpu["frequency_max_mhz"]),
        demand_w=float(gpu["power_demand_w"]),
        power_w=float(gpu["power_w"]),
        instances=tuple(_instance(each) for each in gpu["instances"]),
        clock_set_mhz=None if gpu.get("clock_mhz") is None else float(gpu["clock_mhz"]),
        idle_w=or_nan(gpu.get("idle_w")),
        host_w=or_nan(gpu.get("host_w")),
        memory_limit_bytes=or_nan(gpu.get("memory_limit_bytes")),
        host=gpu.get("host"),
        clock_ceiling_mhz=None if gpu.get("clock_ceiling_mhz") is None else float(gpu["clock_ceiling_mhz"]),
    )


def _instance(each: Mapping[str, Any]) -> PlannedInstance:
    return PlannedInstance(
        workload=str(each["workload"]),
        model=str(each["model"]),
        replica=int(each["replica"]),
        replicas=int(each["replicas"]),
        rate_rps=float(each["rate_rps"]),
        share_ratio=float(each["share_ratio"]),
        batch=int(each["batch"]),
        max_delay_s=_known(each["max_delay_s"]),
        wait_s=or_nan(each["wait_s"]),
        parts=_latency_parts(each),
        limit_s=float(each["limit_s"]),
        throughput_rps=float(each["throughput_rps"]),
        slo_s=float(each["slo_s"]),
        **{name: or_nan(each.get(name)) for name in (*_MAYBE, "memory_bytes")},
        slice=str(each.get("slice", "")),
        processes=int(each.get("processes", 1)),
    )


def _latency_parts(each: Mapping[str, Any]) -> LatencyParts:
    """The parts of an instance's latency; on a slice it was measured as a whole."""
    parts = each["latency_parts_s"]
    if parts is None:
        return LatencyParts(0.0, 0.0, float(each["latency_s"]), 0.0, 0.0)
    return LatencyParts(**{f"{name}_s": _known(value) for name, value in parts.items()})


def _stages_plan(document: Mapping[str, Any]) -> PipelinePlan:
    return PipelinePlan(
        policy=str(document["policy"]),
        gpus=tuple(_stages_gpu(gpu) for gpu in document["gpus"]),
        services=tuple(_stages_service(each) for each in document["services"]),
        violations=_violations(document),
        quality=Quality(document["quality"]),
        grouping=str(document["grouping"]),
        placement=str(document["placement"]),
        scatter=float(document["scatter"]),
        simulated_requests=int(document["simulated_requests"]),
    )


def _stages_gpu(gpu: Mapping[str, Any]) -> PipelineGpu:
    return PipelineGpu(
        type=str(gpu["type"]),
        usd_per_hour=float(gpu["usd_per_hour"]),
        clock_mhz=float(gpu["frequency_mhz"]),
        clock_max_mhz=float(gpu["frequency_max_mhz"]),
        clock_floor_mhz=float(gpu["clock_floor_mhz"]),
        clock_ceiling_mhz=float(gpu["clock_ceiling_mhz"]),
        power_w=float(gpu["power_w"]),
        full_power_w=float(gpu["power_full_clock_w"]),
        busy_ratio=float(gpu["busy_ratio"]),
        memory_bytes=float(gpu["memory_bytes"]),
        parts=tuple(_part(each) for each in gpu["instances"]),
    )


def _part(each: Mapping[str, Any]) -> PlannedPart:
    same = _fields(PlannedPart, each, "latency_s", "operators")
    first, last = each["operators"]
    return PlannedPart(latency_s=float(each["stage_latency_s"]), operators=(int(first), int(last)), **same)


def _stages_service(each: Mapping[str, Any]) -> PlannedService:
    required = each.get("required_ratio", each.get("promised_ratio"))
    same = _fields(PlannedService, each, "required_ratio", "latency_s")
    return PlannedService(required_ratio=float(required), latency_s=_known(each["latency_s"]), **same)


def _layouts_plan(document: Mapping[str, Any]) -> LayoutPlan:
    bound_w = document["bound_w"]
    return LayoutPlan(
        policy=str(document.get("policy", document.get("preset"))),
        layouts=tuple(
            PlannedLayout(
                str(each["gpu"]),
                each["clock_mhz"],
                int(each["count"]),
                tuple(LayoutInstance(one["slice"], one["service"], one["variant"]) for one in each["instances"]),
                float(each.get("usd_per_hour", 0.0)),
            )
            for each in document["layouts"]
        ),
        services=tuple(
            LayoutService(
                baseline=LayoutBaseline(**_fields(LayoutBaseline, each["baseline"])),
                **_fields(LayoutService, each, "baseline"),
            )
            for each in document["services"]
        ),
        gpus_off=int(document["gpus_off"]),
        cost_w=float(document["cost_w"]),
        idle_w=float(document.get("idle_w", math.nan)),
        g_per_kwh=document["intensity_g_per_kwh"],
        bound=None
        if bound_w is None
        else LayoutBound(
            bound_w, document["gap_ratio"], document["corrected_bound_w"], document["corrected_gap_ratio"]
        ),
        boxes=int(document["boxes"]),
        trials=int(document["trials"]),
        by_gpus=tuple(
            PoolOfSize(one["gpus"], one["cost_w"], tuple(one["accuracy_ratio"]), tuple(one["latency_s"]))
            for one in document["by_gpus"]
        ),
        quality=str(document["quality"]),
    )


def _fields(noun: Any, document: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Values of a document under the names of a dataclass's fields."""
    return {field.name: document[field.name] for field in dataclasses.fields(noun) if field.name not in without}
