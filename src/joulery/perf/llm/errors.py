"""Prediction errors, from measurements that are left out of the fit.

Points are left out in the ways in which a requested point may differ from the measurements: a load between two measured
ones, a load beyond them, a configuration or task, a model, an architecture, a GPU type. The error of a prediction is
the deviation that the process states there, times a factor found from the left-out points.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.perf.llm.runs import LlmPoint

TYPICAL, NINE_OF_TEN = 2 / 3, 0.9
"""Shares of the rows left out whose errors are within the two figures of a band."""
_FEWEST = 12
"""Least number of residuals from which the scales of a distance are computed."""

_Point = TypeVar("_Point")


class Distance(StrEnum):
    """Distance of a requested point from the measurements, nearest first."""

    MEASURED = "measured"
    """Exactly this load was measured."""
    INSIDE = "between measured loads"
    """The configuration was measured with fewer and with more requests in flight."""
    BEYOND = "beyond measured loads"
    """The configuration was measured, with fewer or with more requests in flight only."""
    CONFIGURATION = "another configuration"
    """The model was measured, on other GPUs, at another precision or with another task."""
    MODEL = "another model"
    """The model was not measured; one of the same architecture and size was."""
    ARCHITECTURE = "another architecture"
    """No model of that architecture and size was measured."""
    GPU = "another GPU type"
    """Nothing was measured on that GPU type."""

    @property
    def basis(self) -> str:
        """Basis of a prediction: ``measured``, ``fitted`` or ``transferred``."""
        if self is Distance.MEASURED:
            return "measured"
        return "fitted" if self in (Distance.INSIDE, Distance.BEYOND) else "transferred"


class Band(NamedTuple):
    """Relative errors of rows left out in the same way.

    Attributes:
        typical_ratio: Two of three were within it.
        p90_ratio: Nine of ten were within it.
    """

    typical_ratio: float
    p90_ratio: float


class Scales(NamedTuple):
    """Factors on a stated deviation: for two of three, and for nine of ten."""

    typical: float = 1.0
    p90: float = 1.645

    def band(self, deviation: float) -> Band:
        """The band of a predicted logarithm with a given deviation."""
        return Band(float(np.expm1(self.typical * deviation)), float(np.expm1(self.p90 * deviation)))


Groups = Mapping[Distance, Sequence[npt.NDArray[np.int_]]]


def leave_out_groups(points: Sequence[LlmPoint]) -> Groups:
    """Indices of points to leave out together, by the distance that leaving them out simulates."""
    series = grouped(points, lambda point: point.series)
    inside, beyond = [], []
    for each in series:
        order = each[np.argsort([points[i].batch for i in each], kind="stable")]
        inside += [order[[k]] for k in range(1, len(order) - 1)]
        if len(order) > 2:
            beyond += [order[[0]], order[[-1]]]
        if len(order) > 4:
            beyond.append(order[-2:])
    found = {
        Distance.INSIDE: inside,
        Distance.BEYOND: beyond,
        Distance.CONFIGURATION: series,
        Distance.MODEL: grouped(points, lambda point: point.model_id),
        Distance.ARCHITECTURE: grouped(points, lambda point: point.facts.backbone),
        Distance.GPU: grouped(points, lambda point: point.gpu.name),
    }
    return {how: [group for group in groups if len(group) < len(points)] for how, groups in found.items()}


def scales_of(left: Mapping[Distance, tuple[FloatArray, FloatArray]]) -> dict[Distance, Scales]:
    """Compute the scales of each distance.

    Args:
        left: Residuals and stated deviations of the rows left out. With too few rows, the scales of the next nearer
            distance apply, but no less than the process itself states.
    """
    scales, last = {}, Scales()
    for how in Distance:
        residual, deviation = left.get(how, (np.empty(0), np.empty(0)))
        if len(residual) >= _FEWEST:
            ratio = np.abs(residual) / deviation
            last = Scales(float(np.quantile(ratio, TYPICAL)), float(np.quantile(ratio, NINE_OF_TEN)))
            scales[how] = last
        else:
            scales[how] = Scales(max(last.typical, 1.0), max(last.p90, 1.645))
    return scales


def grouped(points: Sequence[_Point], key: Callable[[_Point], Hashable]) -> list[npt.NDArray[np.int_]]:
    """Indices of the points that have the same key, by key, in the order of their first point."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, point in enumerate(points):
        groups[key(point)].append(index)
    return [np.array(group) for group in groups.values()]
