"""The Carbon Intensity API of Great Britain's National Energy System Operator (CC BY 4.0). Needs no key.

Half-hours of generation emissions, for the nation, for 17 regions and for any postcode. National answers carry
``actual`` (null until it is known) and ``forecast``; regional answers carry only a forecast.
https://carbon-intensity.github.io/api-definitions
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from joulery.adapters.carbon import answers
from joulery.adapters.carbon.http import CarbonService
from joulery.adapters.carbon.series import Meaning, Reading, assemble
from joulery.adapters.carbon.timestamps import instant_s, iso_utc
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import ConfigError, DataError

NAME = "UK Carbon Intensity API"
STEP_S = 1800.0
LONGEST_S = 14 * 86400.0
"""The API answers at most 14 days at once."""

REGIONS = (
    "North Scotland",
    "South Scotland",
    "North West England",
    "North East England",
    "Yorkshire",
    "North Wales and Merseyside",
    "South Wales",
    "West Midlands",
    "East Midlands",
    "East England",
    "South West England",
    "South England",
    "London",
    "South East England",
    "England",
    "Scotland",
    "Wales",
)
"""Regions in the order of their numbers, from 1."""

_POSTCODE = re.compile(r"[A-Z]{1,2}[0-9][A-Z0-9]?")


def default_service() -> CarbonService:
    """The public service."""
    return CarbonService(NAME, "https://api.carbonintensity.org.uk")


@dataclass(frozen=True, slots=True)
class UkCarbon:
    """Carbon intensity of Great Britain or one of its regions.

    Attributes:
        zone: ``GB``; ``GB-1`` to ``GB-17`` or ``GB-London`` for a region; ``GB-RG10`` for an outward postcode.
        forecast_as_history: Take the forecast, flagged as estimated, where no actual value is published: for a region,
            at every step.
        service: HTTP client of the service.

    Raises:
        ConfigError: No such zone.
    """

    zone: str = "GB"
    forecast_as_history: bool = False
    service: CarbonService = field(default_factory=default_service)

    def __post_init__(self) -> None:
        _place(self.zone)

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """Actual intensity by half-hour; NaN where none is published and ``forecast_as_history`` is false.

        Raises:
            DataError: The service does not answer, or answers nonsense.
        """
        readings = [self._actual(row) for row in self._rows(t0_s, t1_s)]
        return assemble(readings, t0_s, t1_s, self._meaning("actual"), step_s=STEP_S)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """Forecast intensity by half-hour, at most four days ahead.

        Raises:
            DataError: The service does not answer, or answers nonsense.
        """
        readings = [_reading(row, _intensity(row, "forecast"), False) for row in self._rows(t0_s, t1_s)]
        issued_at_s = self.service.now_s()
        return assemble(readings, t0_s, t1_s, self._meaning("forecast"), step_s=STEP_S, issued_at_s=issued_at_s)

    def _meaning(self, what: str) -> Meaning:
        return Meaning(self.zone, Signal.AVERAGE, Scope.DIRECT, f"{NAME}, {what}")

    def _actual(self, row: dict[str, Any]) -> Reading:
        actual = _intensity(row, "actual")
        if actual != actual and self.forecast_as_history:
            return _reading(row, _intensity(row, "forecast"), True)
        return _reading(row, actual, False)

    def _rows(self, t0_s: float, t1_s: float) -> Iterator[dict[str, Any]]:
        """The half-hours of the interval, in requests of at most 14 days."""
        begin_s = t0_s // STEP_S * STEP_S
        while begin_s < t1_s:
            end_s = min(begin_s + LONGEST_S, -(-t1_s // STEP_S) * STEP_S)
            span = f"{_minute(begin_s)}/{_minute(end_s)}"
            place = _place(self.zone)
            answer = self.service.get(f"/regional/intensity/{span}/{place}" if place else f"/intensity/{span}")
            if place and isinstance(answer, dict):
                answer = answer.get("data")
            yield from answers.rows(answer, "data", NAME)
            begin_s = end_s


def _place(zone: str) -> str:
    """The last part of the path of a region; empty for the nation.

    Raises:
        ConfigError: No such zone.
    """
    if zone.upper() == "GB":
        return ""
    part = zone[3:] if zone.upper().startswith("GB-") else ""
    names = {name.lower(): number for number, name in enumerate(REGIONS, 1)}
    number = names.get(part.lower(), int(part) if part.isascii() and part.isdigit() else 0)
    if 1 <= number <= len(REGIONS):
        return f"regionid/{number}"
    if _POSTCODE.fullmatch(part.upper()):
        return f"postcode/{part.upper()}"
    raise ConfigError(
        "unknown zone of Great Britain",
        got=zone,
        expected=f"GB, GB-1 to GB-{len(REGIONS)}, GB-London and so on, or an outward postcode such as GB-RG10",
    )


def _reading(row: dict[str, Any], g_per_kwh: float, estimated: bool) -> Reading:
    start_s, end_s = (instant_s(answers.text(row, key, NAME)) for key in ("from", "to"))
    return Reading(start_s, end_s, g_per_kwh, estimated)


def _intensity(row: dict[str, Any], which: str) -> float:
    found = row.get("intensity")
    if not isinstance(found, dict):
        raise DataError(f"{NAME} answered a half-hour without an intensity: {str(row)[:80]}")
    return answers.number(found, which, NAME)


def _minute(t_s: float) -> str:
    return iso_utc(t_s)[:16] + "Z"
