"""Envelope files: joint plans over a price and a load, written once and looked up by later runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.gpu.envelope_floors import PlannedPoint
from joulery.domain.gpu.plan_envelope import Envelope, EnvelopePlan, PriceAxis
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.domain.json_numbers import known_number
from joulery.domain.quality import Quality
from joulery.store.files import require_json
from joulery.store.plan_documents import document_of
from joulery.store.plans import PlanFile

SCHEMA = "joulery.plan-envelope/1"
_HINT = "write one with: joulery plan SITE --preset joint --envelope --out FILE"


def envelope_document(envelope: Envelope) -> dict[str, Any]:
    """The envelope as one JSON object: its plans, the ranges where each is best, and the error bounds of look-ups.

    ``points`` are the loads and prices that plans were made for, with a proven bound: no plan costs less there than
    ``bound``. ``plans`` contain the GPUs at each plan's own ``load``. At a lower load, requests and the watts of
    requests scale in proportion. ``frontier`` lists, for each load, the best plans and the range of prices in which
    each is best.
    """
    axis = envelope.axis
    return {
        "schema": SCHEMA,
        "site": envelope.site,
        "quality": envelope.quality.value,
        "price": {**axis._asdict(), "unit": axis.unit},
        "prices": list(envelope.prices),
        "loads": list(envelope.loads),
        "least_requests_w": envelope.least_requests_w,
        "points": [each._asdict() for each in envelope.points],
        "gap_ratio": known_number(envelope.gap_ratio),
        "errors": [each._asdict() | {"error_ratio": known_number(each.error_ratio)} for each in envelope.errors()],
        "frontier": [
            {
                "load": load,
                "plans": [
                    {"name": plan.name, "from_price": low, "to_price": high, **_figures(envelope, plan, load)}
                    for plan, low, high in envelope.frontier(load)
                ],
            }
            for load in envelope.loads
        ],
        "plans": [
            {
                "name": each.name,
                "load": each.load,
                "made_load": each.made_load or each.load,
                "price": each.price,
                "bound": each.bound,
                "plan": document_of(ProvisionPlan("joint", each.gpus, quality=envelope.quality)),
            }
            for each in envelope.plans
        ],
    }


def _figures(envelope: Envelope, plan: EnvelopePlan, load: float) -> dict[str, Any]:
    power_w = plan.power_at_w(load)
    grams = envelope.axis.objective(1.0).carbon_g_per_hour(power_w, len(plan.gpus))
    return {
        "gpus": len(plan.gpus),
        "power_w": power_w,
        "usd_per_hour": plan.usd_per_hour,
        "carbon_g_per_hour": grams,
        "accuracy_ratio": known_number(plan.accuracy_ratio),
    }


def read_envelope(file: Path) -> Envelope:
    """Read an envelope that :func:`envelope_document` describes.

    Raises:
        DataError: The file cannot be read, or is not an envelope.
    """
    document = require_json(file)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DataError(f"not an envelope: no schema {SCHEMA}", file=str(file), hint=_HINT)
    try:
        price = {key: value for key, value in document["price"].items() if key != "unit"}
        plans = tuple(
            EnvelopePlan(
                str(each["name"]),
                _positive(each["load"]),
                float(each["price"]),
                float(each["bound"]),
                _gpus(file, each["plan"]),
                _made(each),
            )
            for each in document["plans"]
        )
        return Envelope(
            PriceAxis(**price),
            plans,
            tuple(float(each) for each in document["prices"]),
            tuple(_positive(each) for each in document["loads"]),
            str(document["site"]),
            Quality(document["quality"]),
            _from_zero(document.get("least_requests_w", 0.0)),  # older files have neither these watts nor points
            tuple(_point(each) for each in document.get("points", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"the envelope lacks or misstates {error}", file=str(file), hint=_HINT) from None


def _positive(value: Any) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError(f"a load above 0, not {value}")
    return float(value)


def _from_zero(value: Any) -> float:
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"a number from 0, not {value}")
    return float(value)


def _point(point: dict[str, Any]) -> PlannedPoint:
    return PlannedPoint(_positive(point["load"]), _from_zero(point["price"]), _from_zero(point["bound"]))


def _made(plan: dict[str, Any]) -> float:
    """Load that a plan was made for, where its ``load`` is higher; else 0."""
    load, made = _positive(plan["load"]), _positive(plan.get("made_load", plan["load"]))
    return made if made < load else 0.0


def _gpus(file: Path, document: Any) -> tuple[Any, ...]:
    plan = PlanFile(file, document).plan()
    if not isinstance(plan, ProvisionPlan):
        raise ValueError(f"a joint plan, not one of {plan.policy}")
    return plan.gpus
