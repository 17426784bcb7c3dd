"""Service order of training jobs: least footprint caused first, or first come, first served.

By what they have caused (GREEN, Eq. 5): a footprint counts up to a ceiling and in levels, a factor moves high-power
jobs into green hours and low-power ones into dirty hours (section 5.2), and the oldest go ahead of the rest.

The lengths of past jobs decide between the two orders: least attained service needs no lengths and ends short jobs
early when lengths vary widely, but among jobs of about the same length it delays all of them for each other. The
squared coefficient of variation of the lengths (variance over squared mean) separates the two cases: sharing a server
gives a shorter mean completion time than first come, first served exactly where it is above 1 (Kleinrock, Queueing
Systems II, section 4.4). Jobs that are not over count with the service they have had: the lengths of ended jobs alone
are biased towards short ones while long ones still run. The estimate is the product limit (Kaplan and Meier, 1958).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import BoolArray, FloatArray

ENDED_JOBS = 1000
"""Number of the latest ended jobs whose lengths are observed."""
_EVIDENCE = 1.0
"""Standard errors, each 1 over the root of the number of ended jobs, by which the estimate must lie below 1."""
_LEVEL_RATIO = 4.0
_LEFT_WEIGHT = 0.25
_WIDEST = 2
_AVERAGE = 4


class ShiftRule(StrEnum):
    """Treatment of low-power jobs by the shifting factor."""

    PAPER = "paper"
    """Fig. 5a read literally: P* or 1/P* by quadrant."""
    MIRRORED = "mirrored"
    """The same directions, monotone in power within each quadrant."""


def normalised_power(gpu_w: npt.ArrayLike, mu: float) -> FloatArray:
    """P*: power scaled linearly to [1, mu]; all 1 when all jobs have the same power (section 5.2)."""
    power = np.asarray(gpu_w, np.float64)
    low, high = (float(np.min(power)), float(np.max(power))) if len(power) else (0.0, 0.0)
    if high <= low:
        return np.ones(len(power))
    return np.asarray((power - low) / (high - low) * (mu - 1.0) + 1.0, np.float64)


def shifting_factor(
    gpu_w: npt.ArrayLike, g_per_kwh: float, mean_g_per_kwh: float, mu: float, rule: ShiftRule
) -> FloatArray:
    """The factor that brings high-power jobs into green hours and low-power jobs into dirty ones.

    Larger runs later. A job is high-power at or above the median; the hour is green below the mean of its window.
    All 1 for ``mu = 1``.

    Args:
        gpu_w: Power of one GPU of each job, W, float64[n].
        g_per_kwh: Intensity now.
        mean_g_per_kwh: Mean intensity over the active window.
        mu: Strength, at least 1.
        rule: The paper's table or its mirrored form.
    """
    power = np.asarray(gpu_w, np.float64)
    if not len(power):
        return np.ones(0)
    star = normalised_power(power, mu)
    ordered = np.sort(power)  # np.median takes ten times as long for so few
    high = power >= (ordered[(len(power) - 1) // 2] + ordered[len(power) // 2]) / 2
    green = g_per_kwh < mean_g_per_kwh
    if rule is ShiftRule.PAPER:
        late = high != green
        return np.where(late, star, 1.0 / star)
    mirror = mu + 1.0 - star
    low_factor = mirror if green else 1.0 / mirror
    return np.where(high, 1.0 / star if green else star, low_factor)


def ceiling_kg(footprint_kg: FloatArray, attained_gpu_s: FloatArray, ceiling_gpu_s: float | None) -> float:
    """The footprint of ``ceiling_gpu_s`` of service of the average job; no footprint counts for more.

    Args:
        footprint_kg: Footprints, float64[n]; or service, where that is what is counted.
        attained_gpu_s: Service of the same jobs, float64[n].
        ceiling_gpu_s: None for no ceiling.

    Returns:
        Infinite where there is no ceiling, or no job has had any service.
    """
    total_s = float(attained_gpu_s.sum())
    if ceiling_gpu_s is None or total_s <= 0:
        return math.inf
    return ceiling_gpu_s * float(footprint_kg.sum()) / total_s


def in_levels(footprint_kg: FloatArray, ceiling: float, levels: int | None) -> FloatArray:
    """Footprints up to the ceiling, and below it rounded down to a quarter of it, a sixteenth …, the lowest of
    ``levels`` for whatever is less; not rounded without levels or without a ceiling.

    Returns:
        float64[n], a new array.
    """
    counted = np.minimum(footprint_kg, ceiling)
    if levels is None or ceiling == math.inf:
        return counted
    edges = ceiling * _LEVEL_RATIO ** -np.arange(levels, -1.0, -1.0)
    return np.asarray(edges[np.maximum(np.searchsorted(edges, counted, side="right") - 1, 0)], np.float64)


def lesser_kg(
    footprint_kg: FloatArray, attained_gpu_s: FloatArray, remaining_gpu_s: FloatArray, reported: BoolArray
) -> FloatArray:
    """Footprint of each job, or a quarter of what is left at its own rate, where it reports progress and that is less.

    Args:
        footprint_kg, attained_gpu_s: So far, float64[n].
        remaining_gpu_s: Left, float64[n]; used where reported.
        reported: Which jobs report progress, bool[n]; their service is above zero.

    Returns:
        float64[n], a new array.
    """
    lesser = np.array(footprint_kg, np.float64)
    left_kg = footprint_kg[reported] * remaining_gpu_s[reported] / attained_gpu_s[reported]
    lesser[reported] = np.minimum(lesser[reported], _LEFT_WEIGHT * left_kg)
    return lesser


def uppermost(counted: FloatArray, ceiling: float, levels: int | None) -> BoolArray:
    """Mask of the jobs in the highest level that any job is in, unless that is the lowest level.

    Returns:
        bool[n].
    """
    lowest = 0.0 if levels is None or ceiling == math.inf else ceiling * _LEVEL_RATIO**-levels
    return np.asarray((counted >= counted.max(initial=0.0)) & (counted > lowest), np.bool_)


def oldest_first(
    age_s: FloatArray, counted_kg: FloatArray, submit_s: FloatArray, wants: Sequence[int], gpus: int
) -> dict[int, None]:
    """The oldest jobs, which go before all others, as many as fit.

    Args:
        age_s: float64[n]; among equally old jobs the one with the smaller footprint goes first, then the earlier one.
        counted_kg: Their footprints as counted, float64[n].
        submit_s: float64[n].
        wants: GPUs of each; 0 for a job that may not be one of them.
        gpus: How many GPUs they may have in all; a job that does not fit is passed over.

    Returns:
        Positions, first to run first, as keys.
    """
    chosen: dict[int, None] = {}
    for at in np.lexsort((submit_s, counted_kg, -age_s)).tolist() if gpus else ():
        if 0 < wants[at] <= gpus:
            chosen[at], gpus = None, gpus - wants[at]
        if not gpus:
            break
    return chosen


def oldest_gpus(share: float, gpus: int, least: Sequence[int]) -> tuple[int, bool]:
    """Number of GPUs that go to the oldest jobs first.

    Their share; or what several average jobs need, where jobs need different numbers of GPUs and the share does not
    hold two of the widest. Footprints alone put the widest last: it would never find room behind the others.

    Args:
        share: Share of the GPUs; 0 for none.
        gpus: GPUs of the cluster.
        least: Fewest GPUs that each job can use.

    Returns:
        The number, and whether jobs are wide: the last of the oldest then gets all it needs, even beyond this number.
    """
    plain, widest = int(share * gpus), max(least, default=0)
    if share == 0 or _WIDEST * widest <= plain or widest == min(least, default=0):
        return plain, False
    return min(max(plain, _AVERAGE * sum(least) // len(least)), gpus), True


def length_scv(ended_s: npt.ArrayLike, unfinished_s: npt.ArrayLike = ()) -> float:
    """Squared coefficient of variation of the lengths of jobs, unfinished ones included.

    Args:
        ended_s: Service of ended jobs, GPU-seconds, float64[n].
        unfinished_s: Service so far of jobs that are not over, float64[m].

    Returns:
        At least 0; NaN where no job has ended. Entries that are not positive and finite do not count.
    """
    ended, unfinished = np.sort(_positive(ended_s)), np.sort(_positive(unfinished_s))
    if not len(ended):
        return math.nan
    # Both sorted, the unfinished behind the ended ones of equal length: the ended ones are at risk together with them.
    unfinished_at = np.searchsorted(ended, unfinished, side="right") + np.arange(len(unfinished))
    over = np.ones(len(ended) + len(unfinished))
    over[unfinished_at] = 0.0
    length = np.empty(len(over))
    length[over == 1.0], length[unfinished_at] = ended, unfinished
    length /= length[-1]  # scaled, so that squares of huge lengths stay finite
    at_risk = np.arange(len(length), 0.0, -1.0)
    survival = np.cumprod(1.0 - over / at_risk)
    mass = np.diff(np.concatenate(([1.0], survival))) * -1.0
    mass[-1] += survival[-1]  # whatever outlives the longest is taken to end there
    mean = float(mass @ length)
    return max(0.0, float(mass @ length**2) / mean**2 - 1.0)


def first_come(scv: float, ended: int, before: bool) -> bool:
    """Whether jobs are served in the order of their submission.

    Args:
        scv: Squared coefficient of variation of the lengths, from :func:`length_scv`.
        ended: Number of ended jobs behind it.
        before: Whether they were served in this order until now; they then are until ``scv`` exceeds 1.

    Returns:
        False where nothing is known.
    """
    if math.isnan(scv) or ended < 1:
        return False
    return scv <= 1.0 if before else scv <= 1.0 - _EVIDENCE / math.sqrt(ended)


def _positive(lengths_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
    found = np.asarray(lengths_s, np.float64)
    return found[(found > 0) & np.isfinite(found)]
