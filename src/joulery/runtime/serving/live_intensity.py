"""Carbon intensity of a running site, from the source that the site file names.

A source may be absent, answer late, end in the past or revise its values. Serving continues: known values count, the
newest answer takes precedence, and a time that no answer covers is unknown, never zero.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

import numpy as np

from joulery.config.carbon import (
    CarbonConfig,
    CarbonElectricityMaps,
    CarbonFile,
    CarbonUk,
    CarbonWattTime,
    ReplayConfig,
)
from joulery.domain.arrays import BoolArray, FloatArray
from joulery.domain.energy.carbon import CarbonSeries, Fill, FillRule
from joulery.domain.errors import DataError, JouleryError
from joulery.domain.ports import CarbonSource, Following
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import CarbonBasis, CarbonFeed, CarbonLabel

AHEAD_S = 600.0
ASK_AGAIN_S = 60.0
LOOK_BACK_S = 3600.0
PATIENCE_S = 5.0
"""Seconds that a start waits for the first answer; later queries are awaited for :data:`LATER_S` only."""
LATER_S = 0.5
_MISSED_STEPS = 2.0
"""Steps of the series after which a held value causes a warning."""


class LiveIntensity:
    """Carbon intensity by time. Implements :class:`joulery.domain.ports.CarbonSource` for the account of the run.

    Args:
        config: The carbon section; None for none.
        open_source: Makes the source of a section, beginning now.
        now_s: Unix seconds.

    Attributes:
        source: The source; None without a section.
        series: Known and held values; None until answered, or without a section.
        trouble: Error of the last request; empty where it did not fail.
        held_s: Seconds so far in which the last value was held because no newer one was known.
    """

    def __init__(
        self,
        config: CarbonConfig | None,
        open_source: Callable[[CarbonConfig], CarbonSource],
        now_s: Callable[[], float],
    ) -> None:
        self.source = None if config is None else open_source(config)
        self.series: CarbonSeries | None = None
        self.trouble = ""
        self.held_s = 0.0
        self._config = config
        self._now_s = now_s
        self._begins_s = now_s()
        self._asked_s = self._answered_s = self._seen_s = -math.inf
        self._asking: asyncio.Task[CarbonSeries] | None = None
        self._solid: CarbonSeries | None = None
        self._newest_s = math.inf
        """End of the newest value; infinite while none is held."""

    @property
    def remote(self) -> bool:
        """True for a source over a network, which has values of the past and the present only."""
        return isinstance(self._config, CarbonUk | CarbonElectricityMaps | CarbonWattTime)

    @property
    def follows(self) -> bool:
        """True for a source that may change under the run, such as a growing file."""
        return hasattr(self.source, "changed")

    @property
    def _replay(self) -> ReplayConfig | None:
        return getattr(self._config, "replay", None)

    def at(self, t_s: float) -> float:
        """g/kWh at a time; NaN while unknown."""
        if self.series is None:
            return math.nan
        return float(self.series.at(t_s)[0])

    def grid_s(self, t_s: float) -> float:
        """The grid's own clock: another time where intensities are played back."""
        replay = self._replay
        if replay is None:
            return t_s
        day_s = datetime.fromisoformat(replay.day).replace(tzinfo=UTC).timestamp()
        return day_s + (t_s - self._begins_s) % replay.duration_s * replay.span_s / replay.duration_s

    async def refresh(self) -> None:
        """Query the source where that is due. A failed query changes only ``trouble``; a slow one is not awaited."""
        now_s = self._now_s()
        if self.source is None:
            return
        if self._asking is None and self._due(now_s):
            self._asked_s = now_s
            self._asking = asyncio.create_task(asyncio.to_thread(self._ask, self.source, now_s), name="carbon")
            patience_s = PATIENCE_S if self._solid is None and not self.trouble else LATER_S
            await asyncio.wait({self._asking}, timeout=patience_s)
        if self._asking is not None and self._asking.done():
            self._take(self._asking, now_s)
            self._asking = None
        elif self._asking is not None and now_s - self._asked_s >= PATIENCE_S:
            self.trouble = "carbon intensity: the source has not answered yet"
        self._hold(now_s)
        if self.feed(now_s).age_s > 0 and math.isfinite(self._seen_s):
            self.held_s += max(0.0, now_s - self._seen_s)
        self._seen_s = now_s

    def _ask(self, source: CarbonSource, now_s: float) -> CarbonSeries:
        if self.follows:
            return cast(Following, source).known()
        if self.remote:
            return source.history(now_s - LOOK_BACK_S, now_s + 1.0)
        return source.history(self._begins_s, now_s + AHEAD_S)

    def _take(self, asked: asyncio.Task[CarbonSeries], now_s: float) -> None:
        """Add the answer of a query, or keep its error."""
        try:
            answer = asked.result()
        except JouleryError as error:
            self.trouble = f"carbon intensity: {error}"
            return
        self.trouble, self._answered_s = "", now_s
        self._add(answer, now_s)

    def _add(self, answer: CarbonSeries, now_s: float) -> None:
        known = self.series
        before = None if known is None or known.start_s >= now_s else cut(known, self._begins_s, now_s)
        self._solid = merged(before, cut(answer, self._begins_s, math.inf))
        self.series, self._newest_s = self._solid, answer.end_s

    def _hold(self, now_s: float) -> None:
        """Hold the last value until the next query, no longer than the rule for gaps allows."""
        solid = self._solid
        if solid is None or not (self.remote or self.follows):
            return
        if self.follows and not self.trouble:
            self._answered_s = now_s  # the file is there, and says no more
        until_s = min(self._answered_s + 2 * ASK_AGAIN_S, self._newest_s + self._longest_held_s)
        if until_s > solid.end_s:
            self.series = held(solid, until_s)

    @property
    def _longest_held_s(self) -> float:
        rule = getattr(self._config, "fill_rule", FillRule())
        if rule.kind is Fill.GAP:
            return 0.0
        return rule.longest_s if rule.kind is Fill.PREVIOUS else math.inf

    def _due(self, now_s: float) -> bool:
        if self.follows and cast(Following, self.source).changed():
            return True
        if self.remote or self.trouble:
            return now_s - self._asked_s >= ASK_AGAIN_S
        if self.follows:
            return self._solid is None
        return self.series is None or self.series.end_s < now_s + AHEAD_S / 2

    def feed(self, now_s: float) -> CarbonFeed:
        """State of the source now."""
        known = math.isfinite(self.at(now_s))
        age_s = max(0.0, now_s - self._newest_s) if known else 0.0
        return CarbonFeed(known, age_s, self.trouble)

    def warnings(self, now_s: float) -> list[str]:
        """Warnings about the source now."""
        found = [self.trouble] if self.trouble else []
        feed, solid = self.feed(now_s), self._solid
        if solid is not None and feed.age_s > max(2 * ASK_AGAIN_S, _MISSED_STEPS * _step_s(solid)):
            end = datetime.fromtimestamp(self._newest_s, UTC).isoformat(timespec="minutes").replace("+00:00", "Z")
            found.append(f"carbon intensity: the newest value of {solid.zone} ends at {end}; it is held")
        return found

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """Intensity of ``[t0_s, t1_s)`` as known now: the source's values of today, else those given during the run.

        Raises:
            DataError: No intensity of that time is known.
        """
        now_s, source = self._now_s(), self.source
        assert source is not None  # without one nothing is accounted by it
        if not (self.remote or self.follows):
            return source.history(t0_s, t1_s)
        try:
            answer = cast(Following, source).known() if self.follows else source.history(t0_s, t1_s)
            self._add(answer, now_s)
            self._hold(now_s)
        except JouleryError as error:
            self.trouble = f"carbon intensity: {error}"
        if self.series is None or not self.series.covered_s(t0_s, t1_s) > 0:
            raise DataError(self.trouble or "carbon intensity: the source has no value for this time")
        return cut(self.series, t0_s, t1_s)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The source's forecast.

        Raises:
            DataError, CapabilityError: As the source.
        """
        assert self.source is not None
        return self.source.forecast(t0_s, t1_s)

    def label(self) -> CarbonLabel | None:
        """Zone, source and kind of the intensities; None without a section, and until the source has answered."""
        series, replay = self.series, self._replay
        if series is None:
            return None
        basis = CarbonBasis.ASSUMED if series.quality is Quality.ASSUMED else CarbonBasis.LIVE
        if replay is not None and isinstance(self._config, CarbonFile):
            basis = CarbonBasis.REPLAYED
        speed = 1.0 if replay is None else replay.span_s / replay.duration_s
        return CarbonLabel(series.zone, series.source, basis, series.signal, series.scope, speed)


@dataclass(slots=True)
class _Steps:
    """Steps of several series, one after the other."""

    edges_s: FloatArray
    g_per_kwh: FloatArray
    estimated: BoolArray

    def add(self, series: CarbonSeries, from_s: float, until_s: float) -> None:
        """Append the part of a series within ``[from_s, until_s)``; the time before it is unknown."""
        inside = np.flatnonzero((series.edges_s[1:] > from_s) & (series.edges_s[:-1] < until_s))
        if not len(inside):
            return
        edges_s = np.clip(series.edges_s[inside[0] : inside[-1] + 2], from_s, until_s)
        values, flags = series.g_per_kwh[inside], series.estimated[inside]
        if not len(self.edges_s):
            self.edges_s, self.g_per_kwh, self.estimated = edges_s, values, flags
            return
        if edges_s[0] > self.edges_s[-1]:
            edges_s, values = np.insert(edges_s, 0, self.edges_s[-1]), np.insert(values, 0, np.nan)
            flags = np.insert(flags, 0, False)
        self.edges_s = np.append(self.edges_s, edges_s[1:])
        self.g_per_kwh = np.append(self.g_per_kwh, values)
        self.estimated = np.append(self.estimated, flags)


def merged(old: CarbonSeries | None, new: CarbonSeries) -> CarbonSeries:
    """One series: the new one, and before it the old one; time between the two that neither covers is NaN."""
    if old is None or (old.zone, old.signal, old.scope) != (new.zone, new.signal, new.scope):
        return new
    steps = _Steps(np.empty(0), np.empty(0), np.empty(0, bool))
    steps.add(old, -math.inf, new.start_s)
    steps.add(new, -math.inf, math.inf)
    return _like(new, steps.edges_s, steps.g_per_kwh, steps.estimated)


def cut(series: CarbonSeries, from_s: float, until_s: float) -> CarbonSeries:
    """The part of a series within ``[from_s, until_s)``; its last step where it ends before.

    ``until_s`` lies after its beginning.
    """
    from_s = min(from_s, float(series.edges_s[-2]))
    if from_s <= series.start_s and until_s >= series.end_s:
        return series
    steps = _Steps(np.empty(0), np.empty(0), np.empty(0, bool))
    steps.add(series, from_s, until_s)
    return _like(series, steps.edges_s, steps.g_per_kwh, steps.estimated)


def held(series: CarbonSeries, until_s: float) -> CarbonSeries:
    """A series that holds its last value until a time; what is added is flagged as estimated."""
    if series.end_s >= until_s:
        return series
    return _like(
        series,
        np.append(series.edges_s, until_s),
        np.append(series.g_per_kwh, series.g_per_kwh[-1]),
        np.append(series.estimated, True),
    )


def _like(series: CarbonSeries, edges_s: FloatArray, g_per_kwh: FloatArray, estimated: BoolArray) -> CarbonSeries:
    """A series with other steps and the metadata of ``series``."""
    return CarbonSeries(
        series.zone,
        edges_s,
        g_per_kwh,
        signal=series.signal,
        scope=series.scope,
        source=series.source,
        issued_at_s=series.issued_at_s,
        estimated=estimated,
        quality=series.quality,
    )


def _step_s(series: CarbonSeries) -> float:
    return float(np.median(np.diff(series.edges_s)))
