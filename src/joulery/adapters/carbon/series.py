"""Assembly of a service's readings into a series of contiguous steps; unknown values become NaN steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulery.adapters.carbon.timestamps import iso_utc
from joulery.domain.energy.carbon import CarbonSeries, Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality


@dataclass(frozen=True, slots=True)
class Reading:
    """One step as a service reports it: ``[start_s, end_s)`` in Unix seconds; NaN where it has no value."""

    start_s: float
    end_s: float
    g_per_kwh: float
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Meaning:
    """Metadata of a series, which give its numbers their meaning.

    Attributes:
        zone: The zone, such as ``GB`` or ``US-CAL-CISO``.
        signal: Average or marginal.
        scope: Direct or life-cycle.
        source: Origin of the numbers, as text.
        quality: Of the steps not flagged as estimated; None for measured history and modelled forecasts.
    """

    zone: str
    signal: Signal
    scope: Scope
    source: str
    quality: Quality | None = None

    def series(
        self,
        edges_s: npt.ArrayLike,
        g_per_kwh: npt.ArrayLike,
        estimated: npt.ArrayLike | None = None,
        issued_at_s: float | None = None,
    ) -> CarbonSeries:
        """A series with this meaning.

        Args:
            edges_s: float64[n + 1], Unix seconds, increasing.
            g_per_kwh: float64[n], grams of CO2-equivalent per kWh; NaN where unknown.
            estimated: bool[n], whether a step is an estimate; None for none.
            issued_at_s: When a forecast was issued, Unix seconds; None for history.

        Raises:
            DataError: The values are not such a series.
        """
        return CarbonSeries(
            self.zone,
            edges_s,
            g_per_kwh,
            signal=self.signal,
            scope=self.scope,
            source=self.source,
            issued_at_s=issued_at_s,
            estimated=estimated,
            quality=self.quality,
        )


def assemble(
    readings: Iterable[Reading],
    t0_s: float,
    t1_s: float,
    meaning: Meaning,
    *,
    step_s: float,
    issued_at_s: float | None = None,
) -> CarbonSeries:
    """A series over at least ``[t0_s, t1_s)``; time without a reading is filled with NaN steps of ``step_s``.

    Readings outside the interval are dropped; a step that two answers repeat counts once. An empty interval is taken as
    the step it lies in.

    Args:
        readings: Steps as the source gave them, in any order.
        t0_s, t1_s: The interval, Unix seconds.
        meaning: Zone, signal, scope and source of the series.
        step_s: The source's step, seconds.
        issued_at_s: When a forecast was issued, Unix seconds; None for history.

    Raises:
        DataError: Two readings overlap or contradict each other, or one (or the interval) ends before it starts.
    """
    if t1_s < t0_s:
        raise DataError(f"{meaning.source}: asked for {iso_utc(t0_s)} to {iso_utc(t1_s)}, which ends before it starts")
    if t1_s == t0_s:
        t1_s = (t0_s // step_s + 1) * step_s
    kept: dict[tuple[float, float], Reading] = {}
    for reading in readings:
        if not reading.end_s > reading.start_s:
            raise DataError(f"{meaning.source}: a step ends at {iso_utc(reading.end_s)}, before it starts")
        if reading.end_s <= t0_s or reading.start_s >= t1_s:
            continue
        key = (reading.start_s, reading.end_s)
        known = kept.get(key)
        if known is not None and not np.array_equal(known.g_per_kwh, reading.g_per_kwh, equal_nan=True):
            at, both = iso_utc(reading.start_s), f"{known.g_per_kwh} and {reading.g_per_kwh}"
            raise DataError(f"{meaning.source}: two values for {at}: {both}")
        kept[key] = reading
    edges: list[float] = [t0_s]
    values: list[float] = []
    flags: list[bool] = []
    ordered = [kept[key] for key in sorted(kept)]
    if ordered:
        edges[0] = min(t0_s, ordered[0].start_s)
    for reading in ordered:
        if reading.start_s < edges[-1]:
            raise DataError(f"{meaning.source}: steps overlap at {iso_utc(reading.start_s)}")
        _gap(edges, values, flags, reading.start_s, step_s)
        edges.append(reading.end_s)
        values.append(reading.g_per_kwh)
        flags.append(reading.estimated)
    _gap(edges, values, flags, t1_s, step_s)
    return meaning.series(np.array(edges), np.array(values), np.array(flags, bool), issued_at_s)


def _gap(edges: list[float], values: list[float], flags: list[bool], until_s: float, step_s: float) -> None:
    """Append NaN steps from the last edge up to ``until_s``, split at multiples of ``step_s``."""
    while edges[-1] < until_s:
        edges.append(min(until_s, (edges[-1] // step_s + 1) * step_s))
        values.append(float("nan"))
        flags.append(False)


def window(series: CarbonSeries, t0_s: float, t1_s: float, *, step_s: float) -> CarbonSeries:
    """The steps of ``series`` that meet ``[t0_s, t1_s)`` (Unix seconds); elsewhere NaN steps of ``step_s`` seconds.

    Raises:
        DataError: The interval ends before it starts.
    """
    meaning = Meaning(series.zone, series.signal, series.scope, series.source, series.quality)
    inside = (series.edges_s[1:] > t0_s) & (series.edges_s[:-1] < t1_s)
    readings = [
        Reading(float(start), float(end), float(value), bool(flag))
        for start, end, value, flag in zip(
            series.edges_s[:-1][inside],
            series.edges_s[1:][inside],
            series.g_per_kwh[inside],
            series.estimated[inside],
            strict=True,
        )
    ]
    return assemble(readings, t0_s, t1_s, meaning, step_s=step_s, issued_at_s=series.issued_at_s)
