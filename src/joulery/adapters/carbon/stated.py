"""Assumed intensities, labelled as such: a constant, the mix of an own supply, or a typical day by month.

Typical days (GB, FR, DE) hold the mean intensity of each UTC hour in each month of 2020, from ``typical_day.json`` (its
citation is inside; ``tools/typical_day.py`` derives it). They describe a day of that month in one past year, and
are used only where the user names them: try things out with them, never report them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
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

FACTORS_G_PER_KWH: Mapping[str, float] = {
    "coal": 820.0,
    "gas": 490.0,
    "biomass": 230.0,
    "solar": 48.0,
    "rooftop-solar": 41.0,
    "geothermal": 38.0,
    "hydro": 24.0,
    "offshore-wind": 12.0,
    "nuclear": 12.0,
    "wind": 11.0,
}
"""Median life-cycle emissions by technology: IPCC AR5 (2014), Working Group III, Annex III, Table A.III.2."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A source with one intensity at all times.

    Attributes:
        g_per_kwh: The value.
        zone: Name of the zone.
        source: Origin of the value, as text.
        signal: Average or marginal.
        scope: Direct or life-cycle.
        now_s: Clock in Unix seconds; gives forecasts their time of issue.

    Raises:
        ConfigError: The value is negative or not finite.
    """

    g_per_kwh: float
    zone: str = "stated"
    source: str = "stated by the user"
    signal: Signal = Signal.AVERAGE
    scope: Scope = Scope.LIFECYCLE
    now_s: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if not (math.isfinite(self.g_per_kwh) and self.g_per_kwh >= 0):
            raise ConfigError("a stated intensity must be finite and at least 0", got=f"{self.g_per_kwh} g/kWh")

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The value over ``[t0_s, t1_s)``."""
        return self._series(t0_s, t1_s, None)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The value over ``[t0_s, t1_s)``."""
        return self._series(t0_s, t1_s, self.now_s())

    def _series(self, t0_s: float, t1_s: float, issued_at_s: float | None) -> CarbonSeries:
        meaning = Meaning(self.zone, self.signal, self.scope, self.source, Quality.ASSUMED)
        return meaning.series([t0_s, max(t1_s, t0_s + 1.0)], [self.g_per_kwh], [True], issued_at_s)


def own_supply(shares: Mapping[str, float], *, zone: str = "own supply") -> Stated:
    """A source with the life-cycle intensity of an own supply, by technology (:data:`FACTORS_G_PER_KWH`).

    Args:
        shares: Share of the energy by technology, ratios that add up to 1.
        zone: Name of the zone.

    Raises:
        ConfigError: An unknown technology, a negative share, or shares that do not add up to 1.
    """
    unknown = sorted(set(shares) - set(FACTORS_G_PER_KWH))
    if unknown:
        raise ConfigError("unknown technology", got=", ".join(unknown), expected=", ".join(FACTORS_G_PER_KWH))
    total = math.fsum(shares.values())
    if min(shares.values(), default=0.0) < 0 or not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ConfigError("the shares of a supply must be at least 0 and add up to 100 %", got=f"{100 * total:g} %")
    g_per_kwh = math.fsum(share * FACTORS_G_PER_KWH[name] for name, share in shares.items())
    named = ", ".join(f"{100 * share:g} % {name}" for name, share in shares.items())
    return Stated(g_per_kwh, zone, f"own supply of {named}, IPCC AR5 median life-cycle factors")


HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class TypicalDay:
    """A source that returns the typical day of a zone, for any date.

    Attributes:
        zone: ``GB``, ``FR`` or ``DE``.
        now_s: Clock in Unix seconds; gives forecasts their time of issue.

    Raises:
        ConfigError: No typical day of the zone is bundled.
    """

    zone: str
    now_s: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.zone not in typical_table()["zones"]:
            raise ConfigError(
                "no typical day of this zone is bundled",
                got=self.zone,
                expected=", ".join(typical_table()["zones"]),
                hint="use a file (--carbon FILE) or a service",
            )

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The typical intensity of each hour that meets ``[t0_s, t1_s)``, all of it flagged as estimated."""
        return self._series(t0_s, t1_s, None)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The same values as :meth:`history`, as a forecast."""
        return self._series(t0_s, t1_s, self.now_s())

    def _series(self, t0_s: float, t1_s: float, issued_at_s: float | None) -> CarbonSeries:
        first, last = int(t0_s // HOUR_S), max(int(-(-t1_s // HOUR_S)), int(t0_s // HOUR_S) + 1)
        hours = np.arange(first, last + 1)
        by_month = np.array(typical_table()["zones"][self.zone])
        begins = [datetime.fromtimestamp(hour * HOUR_S, UTC) for hour in hours[:-1].tolist()]
        values = by_month[[begin.month - 1 for begin in begins], [begin.hour for begin in begins]]
        meaning = Meaning(
            self.zone,
            Signal.AVERAGE,
            Scope.LIFECYCLE,
            f"assumed typical day of {typical_table()['year']}",
            Quality.ASSUMED,
        )
        return meaning.series(hours * HOUR_S, values, np.ones(len(values), bool), issued_at_s)


@cache
def typical_table() -> dict[str, Any]:
    """The bundled resource: ``source``, ``licence``, ``year`` and g/kWh by zone, month and UTC hour."""
    resource = files("joulery.adapters.carbon") / "typical_day.json"
    found: dict[str, Any] = json.loads(resource.read_text("utf-8"))
    return found
