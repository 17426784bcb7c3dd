"""Electricity Maps, API v3: flow-traced average intensity of more than 200 zones. Needs a token.

The free plan provides the last 24 hours of one zone (``history``); older data needs a plan with ``past-range``, which
answers at most 10 days of hours at once. https://portal.electricitymaps.com/developer-hub/api/reference
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from joulery.adapters.carbon import answers
from joulery.adapters.carbon.http import CarbonService, UnknownError
from joulery.adapters.carbon.series import Meaning, Reading, assemble
from joulery.adapters.carbon.timestamps import instant_s, iso_utc
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import CapabilityError, DataError

NAME = "Electricity Maps"
STEP_S = 3600.0
LONGEST_S = 10 * 86400.0
"""``past-range`` answers at most 10 days of hours at once."""

RECENT_S = 23 * 3600.0
"""``history`` holds the last 24 hours; one is left as a margin."""

HORIZONS_H = (6, 24, 48, 72)


def default_service() -> CarbonService:
    """The public service."""
    return CarbonService(NAME, "https://api.electricitymaps.com/v3")


@dataclass(frozen=True, slots=True)
class ElectricityMaps:
    """Carbon intensity of one zone.

    Attributes:
        zone: Electricity Maps' key (``DE``, ``US-CAL-CISO``).
        token: API token. Never shown.
        scope: Life-cycle or direct emission factors.
        estimates: False to leave out the hours the provider estimated; they are gaps then.
        service: HTTP client of the service.
    """

    zone: str
    token: str = field(repr=False)
    scope: Scope = Scope.LIFECYCLE
    estimates: bool = True
    service: CarbonService = field(default_factory=default_service)

    def __post_init__(self) -> None:
        if not self.token:
            raise CapabilityError(
                f"{NAME} needs a token", hint="put one into the environment (ELECTRICITYMAPS_TOKEN), or use a file"
            )

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """Intensity by hour, the provider's estimates flagged; NaN where nothing is published yet.

        Raises:
            CapabilityError: The token does not allow it.
            DataError: The zone is unknown, the service does not answer, or it answers nonsense.
        """
        recent = t0_s >= self.service.now_s() - RECENT_S
        found = self._recent() if recent else self._past(t0_s, t1_s)
        return assemble([self._reading(row) for row in found], t0_s, t1_s, self._meaning("history"), step_s=STEP_S)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """Forecast intensity by hour, at most 72 hours ahead.

        Raises:
            CapabilityError: The token does not allow it.
            DataError: The zone is unknown, the service does not answer, or it answers nonsense.
        """
        ahead_h = (t1_s - self.service.now_s()) / STEP_S
        horizon = next((hours for hours in HORIZONS_H if hours >= ahead_h), HORIZONS_H[-1])
        answer = self._ask("forecast", {"horizonHours": str(horizon)})
        readings = [self._reading(row) for row in answers.rows(answer, "forecast", NAME)]
        issued_at_s = instant_s(answers.text(answer, "updatedAt", NAME))
        return assemble(readings, t0_s, t1_s, self._meaning("forecast"), step_s=STEP_S, issued_at_s=issued_at_s)

    def zones(self) -> tuple[str, ...]:
        """The keys of the zones that the token gives access to.

        Raises:
            CapabilityError: The token is refused.
            DataError: The service does not answer, or answers nonsense.
        """
        answer = self.service.get("/zones", headers={"auth-token": self.token})
        if not isinstance(answer, dict):
            raise DataError(f"{NAME} answered no zones: {str(answer)[:80]}")
        return tuple(sorted(answer))

    def _recent(self) -> list[dict[str, Any]]:
        return answers.rows(self._ask("history", {}), "history", NAME)

    def _past(self, t0_s: float, t1_s: float) -> Iterator[dict[str, Any]]:
        begin_s = t0_s // STEP_S * STEP_S
        while begin_s < t1_s:
            end_s = min(begin_s + LONGEST_S, -(-t1_s // STEP_S) * STEP_S)
            answer = self._ask("past-range", {"start": iso_utc(begin_s), "end": iso_utc(end_s)})
            yield from answers.rows(answer, "data", NAME)
            begin_s = end_s

    def _ask(self, what: str, params: dict[str, str]) -> Any:
        common = {"zone": self.zone, "emissionFactorType": self.scope.value, "temporalGranularity": "hourly"}
        if not self.estimates:
            common["disableEstimations"] = "true"
        path, headers = f"/carbon-intensity/{what}", {"auth-token": self.token}
        try:
            return self.service.get(path, params={**common, **params}, headers=headers)
        except UnknownError as error:
            zones = self.zones()
            if self.zone in zones:
                raise
            near = difflib.get_close_matches(self.zone, zones, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the token knows {len(zones)} zones"
            raise DataError(f"{NAME} knows no zone {self.zone}: {error.message}", hint=hint) from error

    def _reading(self, row: dict[str, Any]) -> Reading:
        start_s = instant_s(answers.text(row, "datetime", NAME))
        kind = row.get("emissionFactorType")
        if kind is not None and kind != self.scope.value:
            raise DataError(f"{NAME} answered {kind} factors where {self.scope} was asked")
        g_per_kwh, estimated = answers.number(row, "carbonIntensity", NAME), row.get("isEstimated") is True
        if estimated and not self.estimates:
            g_per_kwh = float("nan")
        return Reading(start_s, start_s + STEP_S, g_per_kwh, estimated)

    def _meaning(self, what: str) -> Meaning:
        return Meaning(self.zone, Signal.AVERAGE, self.scope, f"{NAME}, {what}")
