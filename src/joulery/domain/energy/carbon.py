"""Carbon intensity of the grid as a step function of time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from joulery.domain.arrays import BoolArray, FloatArray, readonly
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.quality import Quality

if TYPE_CHECKING:
    import numpy.typing as npt

JOULES_PER_KWH = 3.6e6


class Signal(StrEnum):
    """Kind of intensity, average or marginal. The two are never added."""

    AVERAGE = "average"
    MARGINAL = "marginal"


class Scope(StrEnum):
    """Emissions that are counted, direct or life-cycle. The two are never added."""

    DIRECT = "direct"
    LIFECYCLE = "lifecycle"


@dataclass(frozen=True, slots=True, eq=False)
class CarbonSeries:
    """Grid carbon intensity, constant on each right-open step ``[edges_s[i], edges_s[i+1])``.

    Attributes:
        zone: ``GB``, ``US-CAL-CISO`` ...
        edges_s: Unix seconds, strictly increasing, float64[n+1].
        g_per_kwh: Grams of CO2-equivalent per kilowatt-hour, float64[n]; NaN is a gap and stays one.
        signal: Average or marginal.
        scope: Direct (combustion) or life-cycle.
        source: Origin of the series, as text.
        issued_at_s: Unix seconds at which a forecast was issued; None for history.
        estimated: True where the provider estimated the value, bool[n].
        quality: Measured (published history), modelled (a forecast) or assumed (a typical day); the steps flagged
            ``estimated`` are modelled at best.

    Raises:
        DataError: Shapes disagree, edges do not increase, an intensity is infinite or, unless marginal, negative.
    """

    zone: str
    edges_s: FloatArray
    g_per_kwh: FloatArray
    signal: Signal
    scope: Scope
    source: str
    issued_at_s: float | None
    estimated: BoolArray
    quality: Quality

    def __init__(
        self,
        zone: str,
        edges_s: npt.ArrayLike,
        g_per_kwh: npt.ArrayLike,
        *,
        signal: Signal = Signal.AVERAGE,
        scope: Scope = Scope.LIFECYCLE,
        source: str,
        issued_at_s: float | None = None,
        estimated: npt.ArrayLike | None = None,
        quality: Quality | None = None,
    ) -> None:
        edges = readonly(edges_s, np.float64)
        values = readonly(g_per_kwh, np.float64)
        flags = readonly(np.zeros(len(values), bool) if estimated is None else estimated, np.bool_)
        if len(edges) != len(values) + 1 or len(flags) != len(values) or len(values) == 0:
            raise DataError(f"{zone}: {len(edges)} edges, {len(values)} intensities and {len(flags)} flags do not fit")
        if not bool(np.all(np.isfinite(edges))) or bool(np.any(np.diff(edges) <= 0)):
            raise DataError(f"{zone}: edges must be finite and increase")
        bad = np.isinf(values) | ((values < 0) & (signal is Signal.AVERAGE))
        if bool(np.any(bad)):
            at = int(np.argmax(bad))
            raise DataError(f"{zone}: intensity {at} is {float(values[at])} g/kWh, expected a finite value >= 0")
        for name, value in (
            ("zone", zone),
            ("edges_s", edges),
            ("g_per_kwh", values),
            ("signal", signal),
            ("scope", scope),
            ("source", source),
            ("issued_at_s", issued_at_s),
            ("estimated", flags),
            ("quality", quality or (Quality.MEASURED if issued_at_s is None else Quality.MODELLED)),
        ):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.g_per_kwh)

    @property
    def start_s(self) -> float:
        """First edge, Unix seconds."""
        return float(self.edges_s[0])

    @property
    def end_s(self) -> float:
        """Last edge, Unix seconds; the series has no values from here on."""
        return float(self.edges_s[-1])

    def at(self, t_s: npt.ArrayLike) -> FloatArray:
        """Intensity at each time, g/kWh; NaN outside the series and in its gaps."""
        times = np.atleast_1d(np.asarray(t_s, np.float64))
        index = np.searchsorted(self.edges_s, times, "right") - 1
        inside = (index >= 0) & (index < len(self.g_per_kwh))
        return np.where(inside, self.g_per_kwh[np.clip(index, 0, len(self.g_per_kwh) - 1)], np.nan)

    def covered_s(self, t0_s: float, t1_s: float) -> float:
        """Seconds of ``[t0_s, t1_s)`` with a known intensity."""
        length = self._overlap(t0_s, t1_s)
        return float(np.sum(length[~np.isnan(self.g_per_kwh)]))

    def integral(self, t0_s: float, t1_s: float) -> float:
        """Integral of the intensity over ``[t0_s, t1_s)``, g·s/kWh; NaN unless the whole interval is covered.

        Raises:
            DataError: ``t1_s < t0_s``.
        """
        length = self._overlap(t0_s, t1_s)
        inside = length > 0
        if bool(np.any(np.isnan(self.g_per_kwh[inside]))) or t0_s < self.start_s or t1_s > self.end_s:
            return float("nan") if t1_s > t0_s else 0.0
        return float(np.sum(length[inside] * self.g_per_kwh[inside]))

    def mean(self, t0_s: float, t1_s: float) -> float:
        """Time-weighted mean intensity over ``[t0_s, t1_s)``, g/kWh; NaN unless the whole interval is covered."""
        return self.integral(t0_s, t1_s) / (t1_s - t0_s) if t1_s > t0_s else float(self.at(t0_s)[0])

    def _overlap(self, t0_s: float, t1_s: float) -> FloatArray:
        if not t1_s >= t0_s:
            raise DataError(f"{self.zone}: interval ends at {t1_s} before it starts at {t0_s}")
        low, high = np.maximum(self.edges_s[:-1], t0_s), np.minimum(self.edges_s[1:], t1_s)
        return np.asarray(np.maximum(high - low, 0.0), np.float64)


_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_WRITTEN = re.compile(r"(error|gap|forecast)|(previous|linear):\s*([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(s|min|h|d)")


class Fill(StrEnum):
    """Rule for the gaps in carbon intensity."""

    ERROR = "error"
    """Raise an error that names the gap."""
    GAP = "gap"
    """Keep the gap: no grams are counted there and ``carbon_coverage_ratio`` drops."""
    PREVIOUS = "previous"
    """Repeat the last known step, flagged as estimated, over a gap of at most the stated length."""
    LINEAR = "linear"
    """Interpolate linearly between the known steps on both sides, flagged as estimated, over at most that length."""
    FORECAST = "forecast"
    """Use the same service's own forecast, flagged as estimated, where it publishes no actual value."""


@dataclass(frozen=True, slots=True)
class FillRule:
    """A rule and the longest gap it may bridge, seconds (0 where it bridges none).

    Raises:
        ConfigError: ``previous`` or ``linear`` without a positive length.
    """

    kind: Fill = Fill.ERROR
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        bridges = self.kind in {Fill.PREVIOUS, Fill.LINEAR}
        if bridges and not 0 < self.longest_s < float("inf"):
            raise ConfigError(
                f"filling by {self.kind} needs the longest gap it may bridge", expected=f"{self.kind}:3h, for instance"
            )

    @classmethod
    def parse(cls, text: str) -> FillRule:
        """Parse ``error``, ``gap``, ``forecast``, ``previous:3h`` or ``linear:90min``.

        Raises:
            ConfigError: The text is not a rule.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                "not a rule for gaps in carbon intensity",
                got=text,
                expected="error, gap, forecast, previous:LENGTH or linear:LENGTH (as in linear:3h)",
            )
        plain, kind, length, unit = match.groups()
        return cls(Fill(plain)) if plain else cls(Fill(kind), float(length) * _UNITS_S[unit])

    def __str__(self) -> str:
        return f"{self.kind}:{self.longest_s:g}s" if self.longest_s else str(self.kind)
