"""Cost of a run under the baseline, estimated from the periods in which the baseline ran.

The periods of a switchback are a random sample of a run (:mod:`joulery.policies.serving.switchback`). A cost of the
whole run under the baseline is estimated by ratio: cost of the periods over their size (requests, or seconds), times
the size of the whole run (W. G. Cochran, *Sampling Techniques*, 3rd ed., chapter 6).

The periods are spread over the run, one a block, so a drift over the day is sampled evenly and is no error. The
interval therefore comes from the differences between successive periods (K. M. Wolter, *Introduction to Variance
Estimation*, chapter 8), which contain the variation from one to the next but not the drift. Requests within a period
are never counted as independent. With few periods the interval is wide, by Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError

MIN_PERIODS = 3
"""Least number of periods for an interval; with fewer, the baseline counts as not observed."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class SampledCost:
    """One kind of cost in the periods of the baseline, and the size of the whole run.

    Attributes:
        cost: Joules or grams of each period, float64[periods].
        size: Size of each period that its cost is proportional to, such as requests or seconds, float64[periods].
        total_size: Size of the whole run.
    """

    cost: FloatArray
    size: FloatArray
    total_size: float

    def __init__(self, cost: npt.ArrayLike, size: npt.ArrayLike, total_size: float) -> None:
        costs, sizes = np.asarray(cost, np.float64), np.asarray(size, np.float64)
        if costs.shape != sizes.shape or costs.ndim != 1:
            raise DataError(f"{costs.shape} costs and {sizes.shape} sizes are no periods")
        object.__setattr__(self, "cost", costs)
        object.__setattr__(self, "size", sizes)
        object.__setattr__(self, "total_size", float(total_size))

    @property
    def ratio(self) -> float:
        """Cost a unit of size."""
        return float(self.cost.sum() / self.size.sum())

    @property
    def influence(self) -> FloatArray:
        """Influence of each period on the total, to first order, float64[periods]; the sum is 0.

        It is divided by the share of the other periods, as the jackknife does: a large period pulls the ratio towards
        itself, so its own residual is too small.
        """
        share = self.size / self.size.sum()
        residual = (self.cost - self.ratio * self.size) / self.size.sum()
        return np.asarray(self.total_size * residual / (1.0 - share))


def sums_by_period(at_s: FloatArray, values: FloatArray, periods: Sequence[tuple[float, float]]) -> FloatArray:
    """Sums of the values whose time lies in each period, float64[periods].

    Args:
        at_s: Times, Unix seconds, float64[n]; in any order.
        values: Values at those times, float64[n].
        periods: ``(from_s, until_s)``, in order of time, none overlapping another.
    """
    if not periods:
        return np.zeros(0)
    from_s, until_s = np.array(periods, np.float64).T
    index = np.searchsorted(from_s, at_s, "right") - 1
    inside = (index >= 0) & (at_s < until_s[np.maximum(index, 0)])
    return np.bincount(index[inside], values[inside], len(periods)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class TotalEstimate:
    """A cost of the whole run under the baseline.

    Attributes:
        total: The estimate.
        low, high: Its interval; ``low`` is not below 0.
        periods: Number of periods it is estimated from.
    """

    total: float
    low: float
    high: float
    periods: int

    def saving(self, spent: float) -> tuple[float, float, float]:
        """The saved share of the baseline's cost, and its interval: estimate, low, high.

        Args:
            spent: Actual cost of the run. A total whose lower end is 0 leaves the saving unbounded below.
        """

        def against(total: float) -> float:
            return 1.0 - spent / total if total > 0 else -math.inf

        return against(self.total), against(self.low), against(self.high)


def estimate_total(costs: Sequence[SampledCost], confidence: float = CONFIDENCE) -> TotalEstimate:
    """Estimate the sum of several costs of the whole run, each in proportion to its own size.

    Args:
        costs: Costs such as joules above idle by requests, and idle joules by seconds; of the same periods, in one
            order.
        confidence: Confidence of the interval.

    Raises:
        DataError: There are fewer than :data:`MIN_PERIODS` periods, or nothing was served in them.
    """
    from scipy.special import stdtrit

    periods = {len(one.cost) for one in costs}
    count = next(iter(periods), 0)
    if len(periods) != 1 or count < MIN_PERIODS:
        raise DataError(f"an interval needs {MIN_PERIODS} periods or more, of all costs: found {sorted(periods)}")
    if any(not one.size.sum() > 0 for one in costs):
        raise DataError("nothing was served in the periods of the baseline")
    total = math.fsum(one.ratio * one.total_size for one in costs)
    influence = np.sum([one.influence for one in costs], axis=0)
    differences = float(np.sum(np.diff(influence) ** 2))
    error = math.sqrt(count / (2 * (count - 1)) * differences)
    freedom = 2 * (count - 1) ** 2 / (3 * count - 4)  # of the mean square of successive differences (von Neumann)
    half = float(stdtrit(freedom, (1.0 + confidence) / 2.0)) * error
    return TotalEstimate(total, max(0.0, total - half), total + half, count)
