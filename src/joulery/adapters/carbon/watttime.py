"""WattTime, API v3: marginal operating emission rate (MOER), every five minutes. Needs an account.

The API reports pounds per megawatt-hour; sources return grams per kilowatt-hour. The free account covers the region
``CAISO_NORTH``. Requests span at most 32 days; tokens are valid for 30 minutes. https://docs.watttime.org
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from joulery.adapters.carbon import answers
from joulery.adapters.carbon.http import CarbonService, RequestRefusedError
from joulery.adapters.carbon.series import Meaning, Reading, assemble
from joulery.adapters.carbon.timestamps import instant_s, iso_utc
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import CapabilityError, DataError

NAME = "WattTime"
SIGNAL_TYPE = "co2_moer"
UNITS = "lbs_co2_per_mwh"
G_PER_KWH = 453.59237 / 1000.0
"""One pound per megawatt-hour in grams per kilowatt-hour."""

STEP_S = 300.0
LONGEST_S = 32 * 86400.0
HORIZON_H = 72


def default_service() -> CarbonService:
    """The public service."""
    return CarbonService(NAME, "https://api.watttime.org")


@dataclass(slots=True)
class WattTime:
    """Marginal carbon intensity of one grid region.

    Attributes:
        zone: WattTime's region (``CAISO_NORTH``).
        user: Account name.
        password: Its password. Never shown.
        estimates: False to leave out points with imputed data; they are gaps then.
        service: HTTP client of the service.
    """

    zone: str
    user: str
    password: str = field(repr=False)
    estimates: bool = True
    service: CarbonService = field(default_factory=default_service)
    _token: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.user and self.password):
            raise CapabilityError(
                f"{NAME} needs an account",
                hint="put it into the environment (WATTTIME_USER and WATTTIME_PASSWORD), or use a file",
            )

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """Marginal intensity, imputed points flagged; NaN where nothing is published yet.

        Raises:
            CapabilityError: The account does not allow it.
            DataError: The region is unknown, the service does not answer, or it answers nonsense.
        """
        readings = [reading for answer in self._past(t0_s, t1_s) for reading in self._readings(answer)]
        return assemble(readings, t0_s, t1_s, self._meaning("history"), step_s=STEP_S)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """Forecast marginal intensity, at most 72 hours ahead.

        Raises:
            CapabilityError: The account does not allow it.
            DataError: The region is unknown, the service does not answer, or it answers nonsense.
        """
        ahead_h = -(-(t1_s - self.service.now_s()) // 3600)
        horizon = int(max(0, min(HORIZON_H, ahead_h)))
        answer = self._ask("/v3/forecast", {"horizon_hours": str(horizon)})
        issued_at_s = instant_s(answers.text(self._meta(answer), "generated_at", NAME))
        return assemble(
            self._readings(answer), t0_s, t1_s, self._meaning("forecast"), step_s=STEP_S, issued_at_s=issued_at_s
        )

    def _past(self, t0_s: float, t1_s: float) -> Iterator[Any]:
        begin_s = t0_s // STEP_S * STEP_S
        while begin_s < t1_s:
            end_s = min(begin_s + LONGEST_S, -(-t1_s // STEP_S) * STEP_S)
            yield self._ask("/v3/historical", {"start": iso_utc(begin_s), "end": iso_utc(end_s)})
            begin_s = end_s

    def _ask(self, path: str, params: dict[str, str]) -> Any:
        """Request a path; log in first where there is no token yet, or where the present one has expired."""
        params = {"region": self.zone, "signal_type": SIGNAL_TYPE, **params}
        if self._token:
            try:
                return self.service.get(path, params=params, headers=self._bearer())
            except RequestRefusedError as refused:
                if refused.status_code != 401:
                    raise
        login = self.service.get("/login", auth=(self.user, self.password))
        self._token = answers.text(login if isinstance(login, dict) else {}, "token", NAME)
        return self.service.get(path, params=params, headers=self._bearer())

    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _meta(self, answer: Any) -> dict[str, Any]:
        """The answer's metadata, checked for unit, signal and region: a fallback region would be wrong."""
        meta = answer.get("meta") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            raise DataError(f"{NAME} answered without meta: {str(answer)[:80]}")
        for key, expected in (("units", UNITS), ("signal_type", SIGNAL_TYPE), ("region", self.zone)):
            if meta.get(key) != expected:
                raise DataError(f"{NAME} answered {key} {str(meta.get(key))[:40]!r}, expected {expected}")
        return meta

    def _readings(self, answer: Any) -> list[Reading]:
        period_s = answers.number(self._meta(answer), "data_point_period_seconds", NAME)
        if not period_s > 0:
            raise DataError(f"{NAME} answered steps of {period_s} s")
        found = []
        for row in answers.rows(answer, "data", NAME):
            start_s = instant_s(answers.text(row, "point_time", NAME))
            imputed = row.get("imputed_data_used") is True
            value = answers.number(row, "value", NAME) * G_PER_KWH
            found.append(
                Reading(start_s, start_s + period_s, value if self.estimates or not imputed else float("nan"), imputed)
            )
        return found

    def _meaning(self, what: str) -> Meaning:
        return Meaning(self.zone, Signal.MARGINAL, Scope.DIRECT, f"{NAME}, {what}")
