"""Conversion of the costs of services to JSON and back (schema ``joulery.pull-costs/1``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from joulery.domain.errors import DataError
from joulery.perf.queues.pull_costs import ServiceCosts, VariantCosts

SCHEMA = "joulery.pull-costs/1"


def as_document(services: Mapping[str, ServiceCosts]) -> dict[str, Any]:
    """The costs of services as a JSON-ready object."""
    return {"schema": SCHEMA, "services": [_service(costs) for costs in services.values()]}


def from_document(data: Any, *, file: str) -> dict[str, ServiceCosts]:
    """The services of a document, by name.

    Raises:
        DataError: The data is not such a document, or has an impossible number; the message names ``file``.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise DataError(f"not a document of schema {SCHEMA}", file=file, hint="write one with joulery profile --fit")
    try:
        found = [_costs(service) for service in data["services"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not costs of services: {type(error).__name__} {error}", file=file) from None
    return {costs.name: costs for costs in found}


def _service(costs: ServiceCosts) -> dict[str, Any]:
    variants = [
        {
            "name": each.name,
            "accuracy_ratio": each.accuracy_ratio,
            "host_s": each.host_s,
            "gpu_s": each.gpu_s,
            "dynamic_j": each.dynamic_j,
            "slowdown": dict(each.slowdown),
        }
        for each in costs.variants
    ]
    numbers = {name: getattr(costs, name) for name in ("contention", "size_cv", "jitter_s", "idle_w", "gpus")}
    return {
        "name": costs.name,
        **numbers,
        "loads_s": list(costs.loads_s),
        "source": costs.source,
        "variants": variants,
    }


def _costs(data: Mapping[str, Any]) -> ServiceCosts:
    variants = tuple(
        VariantCosts(
            name=str(each["name"]),
            accuracy_ratio=_positive(each, "accuracy_ratio"),
            host_s=_positive(each, "host_s"),
            gpu_s=_positive(each, "gpu_s"),
            dynamic_j=_positive(each, "dynamic_j", least=0.0),
            slowdown=MappingProxyType({str(name): float(ratio) for name, ratio in each["slowdown"].items()}),
        )
        for each in data["variants"]
    )
    if not variants:
        raise ValueError("a service without variants")
    return ServiceCosts(
        name=str(data["name"]),
        variants=variants,
        contention=_positive(data, "contention", least=0.0),
        size_cv=_positive(data, "size_cv", least=0.0),
        jitter_s=_positive(data, "jitter_s", least=0.0),
        idle_w=_positive(data, "idle_w", least=0.0),
        gpus=int(data["gpus"]),
        loads_s=tuple(float(load_s) for load_s in data["loads_s"]),
        source=str(data["source"]),
    )


def _positive(data: Mapping[str, Any], key: str, least: float | None = None) -> float:
    value = float(data[key])
    if not (math.isfinite(value) and (value > 0 if least is None else value >= least)):
        raise ValueError(f"{key} is {value}")
    return value
