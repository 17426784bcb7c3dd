"""Convert footprints to and from JSON objects; their keys are defined here only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.energy.footprint import Footprint, Part
from joulery.domain.errors import DataError
from joulery.domain.json_numbers import known_number
from joulery.domain.quality import Quality
from joulery.store.fields import instant, number, text


def footprint_to_dict(footprint: Footprint) -> dict[str, Any]:
    """The object that ``report --json`` prints for a footprint.

    Unknown is null, never 0: ``energy_j``, ``idle_j`` and ``unattributed_j`` when no time was covered by readings,
    ``carbon_g`` when no joule has a known intensity. Where ``carbon_coverage_ratio`` is below 1, ``carbon_g`` counts
    the covered joules alone; where ``coverage_ratio`` is below 1, the joules count the covered time alone.
    """
    known = footprint.covered_s > 0 or not footprint.duration_s > 0
    grams = footprint.signal is not None and (footprint.carbon_covered_j > 0 or (known and footprint.energy_j == 0))
    return {
        "energy_j": footprint.energy_j if known else None,
        "carbon_g": footprint.counted_g if grams and known else None,
        "idle_j": footprint.idle_j if known else None,
        "unattributed_j": footprint.unattributed_j if known else None,
        "duration_s": footprint.duration_s,
        "coverage_ratio": footprint.coverage_ratio,
        "quality": footprint.quality.value,
        "parts": [
            {
                "device": part.device,
                "component": part.component,
                "energy_j": part.energy_j,
                "quality": part.quality.value,
                "meter": part.meter,
                "band_j": part.band_j,
                "carbon_g": known_number(part.carbon_g) if grams and known else None,
            }
            for part in footprint.parts
        ],
        "band_j": footprint.band_j,
        "idle_quality": footprint.idle_quality.value,
        "idle_band_j": footprint.idle_band_j,
        "idle_g": known_number(footprint.idle_g) if grams and known else None,
        "unattributed_g": known_number(footprint.unattributed_g) if grams and known else None,
        "start_s": known_number(footprint.start_s),
        "end_s": known_number(footprint.end_s),
        "covered_s": footprint.covered_s,
        "carbon_covered_j": footprint.carbon_covered_j,
        "carbon_coverage_ratio": footprint.carbon_coverage_ratio if footprint.signal is not None else 0.0,
        "carbon_signal": footprint.signal.value if footprint.signal else None,
        "carbon_scope": footprint.scope.value if footprint.scope else None,
        "carbon_quality": footprint.carbon_quality.value if footprint.signal else None,
        "embodied_g": footprint.embodied_g,
        "facility_j": footprint.facility_j if known else None,
        "pue": footprint.pue,
    }


def footprint_from_dict(value: Mapping[str, Any]) -> Footprint:
    """The footprint of an object that :func:`footprint_to_dict` made; further keys are ignored.

    Raises:
        DataError: A key is missing or holds the wrong kind of value.
    """
    try:
        unknown_g = 0.0 if value.get("carbon_g") is None else math.nan
        return Footprint(
            parts=tuple(_part(part, unknown_g) for part in value["parts"]),
            idle_j=number(value["idle_j"] or 0.0),
            unattributed_j=number(value["unattributed_j"] or 0.0),
            carbon_g=number(value["carbon_g"] or 0.0) if value["carbon_signal"] else None,
            carbon_covered_j=number(value["carbon_covered_j"]),
            embodied_g=number(value["embodied_g"]),
            facility_j=number(value["facility_j"] or 0.0),
            start_s=instant(value["start_s"]),
            end_s=instant(value["end_s"]),
            duration_s=number(value["duration_s"]),
            covered_s=number(value["covered_s"]),
            idle_quality=Quality(value["idle_quality"]),
            idle_band_j=number(value.get("idle_band_j", 0.0)),
            idle_g=_grams(value, "idle_g", unknown_g),
            unattributed_g=_grams(value, "unattributed_g", unknown_g),
            signal=Signal(value["carbon_signal"]) if value["carbon_signal"] else None,
            scope=Scope(value["carbon_scope"]) if value["carbon_scope"] else None,
            carbon_quality=Quality(value.get("carbon_quality") or Quality.MEASURED),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a footprint: {type(error).__name__} {error}") from error


def _part(value: Mapping[str, Any], unknown_g: float) -> Part:
    return Part(
        text(value["device"]),
        text(value["component"]),
        number(value["energy_j"]),
        Quality(value["quality"]),
        text(value["meter"]),
        number(value["band_j"]),
        _grams(value, "carbon_g", unknown_g),
    )


def _grams(value: Mapping[str, Any], key: str, unknown_g: float) -> float:
    """Grams of a part; ``unknown_g`` where they are null, or the document is older than the key."""
    return unknown_g if value.get(key) is None else number(value[key])
