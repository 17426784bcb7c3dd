"""Certificates of joint plans as JSON objects, and back: the prices, joules and layouts with which a bound is checked.

A checker needs nothing else: a request a second of a service's variant on a GPU type at a clock is worth
``max(0, demand_price + accuracy_price (accuracy - floor) - (per_w + power_price) request_j)``; no layout of a GPU
may be worth more than ``(per_w + power_price) (standing_w + overheads) + per_usd usd + per_gpu + pool_price``; then
``Σ demand_price rate - power_price cap - Σ pool_price available`` is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from joulery.domain.gpu.optimum import (
    CertifiedCost,
    CertifiedInstance,
    CertifiedPattern,
    PlanCertificate,
    PlanObjective,
)


def optimum_document(certificate: PlanCertificate, gpus: int) -> dict[str, Any]:
    """The keys that a joint plan adds to a plan of shares; ``bound`` replaces its bound."""
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
            "costs": [{**each._asdict(), "accuracy_ratio": _finite(each.accuracy_ratio)} for each in certificate.costs],
            "columns": [
                {**each._asdict(), "instances": [one._asdict() for one in each.instances]}
                for each in certificate.patterns
            ],
        },
    }


def certificate_of(document: Mapping[str, Any]) -> PlanCertificate | None:
    """The certificate of a plan's document; None where it has none.

    Raises:
        KeyError, TypeError, ValueError: It is not what :func:`optimum_document` writes.
    """
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
        costs=tuple(
            CertifiedCost(**{**each, "accuracy_ratio": _known(each["accuracy_ratio"])}) for each in known["costs"]
        ),
        patterns=tuple(
            CertifiedPattern(**{**each, "instances": tuple(CertifiedInstance(**one) for one in each["instances"])})
            for each in known["columns"]
        ),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)
