"""Comparing policies over seeds: means with confidence intervals, and differences paired by seed.

Under one seed every policy faces the same requests, so the difference of two policies varies far less than either of
them: the interval is therefore taken over the paired differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.errors import DataError


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean over seeds and the interval that holds the true mean with the requested confidence (Student's t).

    Attributes:
        mean: Mean over seeds.
        low: Lower end; NaN with fewer than two seeds.
        high: Upper end; NaN with fewer than two seeds.
        seeds: How many seeds.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def half_width(self) -> float:
        """Half of the interval's length."""
        return (self.high - self.low) / 2

    def as_dict(self) -> dict[str, float | int | None]:
        """JSON-ready; an unknown or infinite number is null."""
        numbers = {"mean": self.mean, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()} | {
            "seeds": self.seeds
        }


def interval(values: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """Mean and confidence interval of one number per seed.

    Raises:
        DataError: There is no value.
    """
    count = len(values)
    if count == 0:
        raise DataError("a mean needs at least one seed")
    sample = np.asarray(values, np.float64)
    with np.errstate(invalid="ignore"):
        mean, spread = float(sample.mean()), float(sample.std(ddof=1)) if count > 1 else math.nan
    if count == 1:
        return MeanInterval(mean, math.nan, math.nan, 1)
    from scipy.special import stdtrit

    half = float(stdtrit(count - 1, (1 + confidence) / 2)) * spread / math.sqrt(count)
    return MeanInterval(mean, mean - half, mean + half, count)


def paired(values: Sequence[float], against: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """The difference ``values - against``, seed by seed.

    Raises:
        DataError: The two have different numbers of seeds.
    """
    if len(values) != len(against):
        raise DataError(f"{len(values)} and {len(against)} seeds cannot be paired")
    return interval([one - other for one, other in zip(values, against, strict=True)], confidence)
