"""Handling of gaps in carbon intensity by the rule the user named: kept, filled or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from joulery.adapters.carbon.series import Meaning
from joulery.adapters.carbon.timestamps import iso_utc
from joulery.domain.arrays import BoolArray, FloatArray
from joulery.domain.energy.carbon import CarbonSeries, Fill, FillRule
from joulery.domain.errors import DataError, StaleDataError
from joulery.domain.ports import CarbonSource


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Line of a file, for error messages; None where the series is not from a file."""

    file: str | None = None
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Filled:
    """A source with the gaps in its history handled by a rule: kept, filled or refused."""

    source: CarbonSource
    rule: FillRule

    def history(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The source's history, with its gaps handled by the rule.

        Raises:
            StaleDataError: The source ends before ``t1_s`` and the rule does not bridge that.
            DataError: Another gap that the rule does not bridge.
        """
        return complete(self.source.history(t0_s, t1_s), t0_s, t1_s, self.rule)

    def forecast(self, t0_s: float, t1_s: float) -> CarbonSeries:
        """The source's forecast, unchanged; NaN where it does not reach. The rule applies to history only."""
        return self.source.forecast(t0_s, t1_s)


def complete(
    series: CarbonSeries, t0_s: float, t1_s: float, rule: FillRule, place: Callable[[int], FilePlace] | None = None
) -> CarbonSeries:
    """The series with every gap that meets ``[t0_s, t1_s)`` filled by ``rule``; it must cover that interval.

    Args:
        series: The intensities.
        t0_s, t1_s: The interval, Unix seconds.
        rule: What to do about gaps.
        place: Line of a file that a step comes from, by the step's number; for the message.

    Raises:
        StaleDataError: The values end before ``t1_s``, and the rule does not bridge that.
        DataError: Another gap that the rule does not bridge.
    """
    values, flags = series.g_per_kwh.copy(), series.estimated.copy()
    for first, last in _gaps(np.isnan(values)):
        start_s, end_s = float(series.edges_s[first]), float(series.edges_s[last])
        if end_s <= t0_s or start_s >= t1_s or rule.kind is Fill.GAP:
            continue
        filled = _bridge(series, first, last, rule)
        if filled is None:
            raise _refusal(series, first, last, t1_s, rule, place(first) if place else FilePlace())
        values[first:last] = filled
        flags[first:last] = True
    meaning = Meaning(series.zone, series.signal, series.scope, series.source, series.quality)
    return meaning.series(series.edges_s, values, flags, series.issued_at_s)


def _gaps(missing: BoolArray) -> list[tuple[int, int]]:
    """Runs ``[first, last)`` of missing steps."""
    change = np.flatnonzero(np.diff(np.concatenate([[False], missing, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in change.reshape(-1, 2)]


def _bridge(series: CarbonSeries, first: int, last: int, rule: FillRule) -> FloatArray | None:
    """Values for the missing steps ``[first, last)``; None where the rule does not reach."""
    edges, values = series.edges_s, series.g_per_kwh
    if float(edges[last] - edges[first]) > rule.longest_s or first == 0:
        return None
    if rule.kind is Fill.PREVIOUS:
        return np.full(last - first, values[first - 1])
    if rule.kind is Fill.LINEAR and last < len(values):
        middles = (edges[:-1] + edges[1:]) / 2
        known = [first - 1, last]
        return np.asarray(np.interp(middles[first:last], middles[known], values[known]), np.float64)
    return None


def _refusal(series: CarbonSeries, first: int, last: int, t1_s: float, rule: FillRule, place: FilePlace) -> DataError:
    start_s, end_s = float(series.edges_s[first]), float(series.edges_s[last])
    hint = "choose how to fill it (gap, previous:3h, linear:3h; for GB also forecast), or use another source"
    if rule.longest_s:
        hint = f"the rule {rule} does not bridge it: allow a longer gap, keep it (gap), or use another source"
    what = f"{series.source}: no intensity of {series.zone} from {iso_utc(start_s)} to {iso_utc(end_s)}"
    if last == len(series) and first > 0 and end_s >= t1_s:
        what = f"{what}; the newest value ends at {iso_utc(start_s)}"
        return StaleDataError(what, file=place.file, row=place.row, hint=hint)
    return DataError(what, file=place.file, row=place.row, hint=hint)
