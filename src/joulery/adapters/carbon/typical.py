"""A typical day by month for GB, FR and DE: assumed values for where there is nothing better, asked for by name only.

Mean intensity of each UTC hour in each month of 2020, from ``typical_day.json`` (its citation is inside;
``tools/typical_day.py`` derives it). It says what a day of that month looked like in one past year: use it to try
things out, never to report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from joulery.adapters.carbon.series import Meaning
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class TypicalDay:
    """The typical day of a zone, for any date.

    Attributes:
        zone: ``GB``, ``FR`` or ``DE``.
        now_s: Unix seconds; stamps forecasts.

    Raises:
        ConfigError: Another zone.
    """

    zone: str
    now_s: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.zone not in table()["zones"]:
            raise ConfigError(
                "no typical day of this zone is bundled",
                got=self.zone,
                expected=", ".join(table()["zones"]),
                hint="use a file (--carbon FILE) or a service",
            )

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The typical intensity of each hour that meets ``[t0_s, t1_s)``, all of it flagged as estimated."""
        return self._series(t0_s, t1_s, None)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The same values: nothing is known of the days to come but what is typical."""
        return self._series(t0_s, t1_s, self.now_s())

    def _series(self, t0_s: float, t1_s: float, issued_at_s: float | None) -> CarbonSeries:
        first, last = int(t0_s // HOUR_S), max(int(-(-t1_s // HOUR_S)), int(t0_s // HOUR_S) + 1)
        hours = np.arange(first, last + 1)
        by_month = np.array(table()["zones"][self.zone])
        begins = [datetime.fromtimestamp(hour * HOUR_S, UTC) for hour in hours[:-1].tolist()]
        values = by_month[[begin.month - 1 for begin in begins], [begin.hour for begin in begins]]
        meaning = Meaning(
            self.zone, Signal.AVERAGE, Scope.LIFECYCLE, f"assumed typical day of {table()['year']}", Quality.ASSUMED
        )
        return meaning.series(hours * HOUR_S, values, np.ones(len(values), bool), issued_at_s)


@cache
def table() -> dict[str, Any]:
    """The bundled resource: ``source``, ``licence``, ``year`` and g/kWh by zone, month and UTC hour."""
    resource = files("joulery.adapters.carbon") / "typical_day.json"
    found: dict[str, Any] = json.loads(resource.read_text("utf-8"))
    return found
