"""Confidence in a footprint: similarity of accountings, and the sensor's resolution.

The paper's measures (Smaragdine, ICSE'24, section 5.4) are correlations between footprints: under sparser sampling
(ASSS) and under more repetitions (ASSW). A correlation close to 1 proves little: footprints that are wrong by a tenth
everywhere correlate at 0.99. So every row also states how its operation compares with what the sensor resolves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from joulery.accounting.steps import NS_PER_S
from joulery.domain.energy.power import PowerTrace
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.errors import DataError


class Sight(StrEnum):
    """Degree to which a sensor resolves an operation."""

    RESOLVED = "resolved"
    """Longer than the sensor's resolution: its own power was measured."""
    ESTIMATED = "estimated"
    """Shorter than the resolution; its power was estimated over many readings (regression)."""
    SHARED = "time-share within windows"
    """Shorter than the resolution; it has its share of the time of the readings it fell into."""
    UNSEEN = "not metered"
    """There is no reading of its power."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """One row of a footprint compared with its sensor.

    Attributes:
        ratio: Median duration over the sensor's resolution; NaN without a sensor.
        sight: Degree to which the sensor resolves the row.
        error_ratio: Two standard errors of its energy over the steps, as a ratio of it; NaN where no steps are known.
    """

    ratio: float
    sight: Sight
    error_ratio: float


def resolution(footprint: TensorFootprint) -> list[Resolution]:
    """Each row of a footprint compared with its sensor."""
    devices = {entry.device: entry for entry in footprint.devices}
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.where(footprint.energy_j > 0, 2 * footprint.error_j / footprint.energy_j, np.nan)
    result = []
    rows = zip(footprint.device, footprint.median_ns.tolist(), footprint.unread.tolist(), errors.tolist(), strict=True)
    for device, median_ns, unread, error in rows:
        entry = devices[device]
        if unread or not entry.metered or math.isnan(entry.resolution_s):
            result.append(Resolution(math.nan, Sight.UNSEEN, math.nan))
            continue
        ratio = median_ns / NS_PER_S / entry.resolution_s
        shorter = Sight.ESTIMATED if entry.estimator == "regression" else Sight.SHARED
        result.append(Resolution(ratio, Sight.RESOLVED if ratio >= 1 else shorter, error))
    return result


def pearson(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Pearson correlation of two footprints over the operations that both have.

    Raises:
        DataError: They share fewer than two operations.
    """
    common = sorted(one.keys() & other.keys())
    if len(common) < 2:
        raise DataError(f"the footprints share {len(common)} operations", hint="compare runs of alike models")
    a, b = (np.array([values[name] for name in common]) for values in (one, other))
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm > 0 else math.nan


def mean_difference(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Mean of ``one`` minus ``other`` over the operations that both have; NaN where there are none."""
    common = sorted(one.keys() & other.keys())
    return math.fsum(one[name] - other[name] for name in common) / len(common) if common else math.nan


def matrix(
    footprints: Sequence[Mapping[str, float]], compare: Callable[[Mapping[str, float], Mapping[str, float]], float]
) -> list[list[float]]:
    """Every footprint against every other: ``result[row][column] = compare(row, column)``."""
    return [[compare(row, column) for column in footprints] for row in footprints]


def thinned(trace: PowerTrace, period_s: float) -> PowerTrace:
    """The trace as a slower sensor would have recorded it: the first reading at or after every multiple of the period.

    Raises:
        DataError: The period is shorter than the trace's own.
    """
    if period_s < trace.period_s * (1 - 1e-9):
        raise DataError(f"readings every {trace.period_s} s cannot be thinned to every {period_s} s")
    if not len(trace):
        return trace
    step_ns = max(1, round(period_s * NS_PER_S))
    grid = np.arange(int(trace.t_ns[0]), int(trace.t_ns[-1]) + 1, step_ns)
    kept = np.unique(np.searchsorted(trace.t_ns, grid, "left"))
    return PowerTrace(trace.channel, trace.t_ns[kept], trace.values[kept], period_s)


def mean_energies(footprints: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean energy of each operation over repetitions; one that is missing from a repetition used none there."""
    names = sorted(set().union(*footprints))
    return {name: math.fsum(f.get(name, 0.0) for f in footprints) / len(footprints) for name in names}
