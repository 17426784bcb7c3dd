"""The factor that moves high-power jobs into green hours and low-power ones into dirty hours (GREEN, section 5.2)."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray


class ShiftRule(StrEnum):
    """How the shifting factor treats low-power jobs."""

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
