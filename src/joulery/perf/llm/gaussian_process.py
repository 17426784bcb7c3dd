"""A Gaussian process over logarithms, whose kernel states the similarity of measurements.

The covariance of two points is a sum: a smooth part over the size of the model, the GPUs and the load, and for every
label (GPU type, task, architecture, configuration) a curve of its own over the requests in flight. Where a
configuration was measured, its own curve prevails and runs between the measured points almost as a straight line;
where it was not, the curves that its model, GPU type and task share with others remain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class KernelInputs:
    """Positions of points.

    Attributes:
        load: Logarithm of requests in flight, shape (points,).
        smooth: Other numbers, logarithms too, shape (points, features).
        labels: Names by kind, each of shape (points,).
        queue: Logarithm of the queue beyond the load, shape (points,); 0 for none.
    """

    load: FloatArray
    smooth: FloatArray
    labels: Mapping[str, npt.NDArray[np.str_]]
    queue: FloatArray

    def __len__(self) -> int:
        return len(self.load)


class Term(NamedTuple):
    """A curve over the load that points with equal labels share.

    Attributes:
        same: Kinds of label that have to be equal.
        offset: Variance of its level.
        variance, length: Variance of its shape, and the change of load (in logarithms) over which it decays.
        rough: Whether it runs straight between points (exponential kernel) rather than smoothly (Matérn 5/2).
        queue: Length over the queue; infinite where the queue has no effect.
    """

    same: tuple[str, ...]
    offset: float
    variance: float
    length: float
    rough: bool = False
    queue: float = math.inf


class KernelShape(NamedTuple):
    """Parameters of a kernel.

    Attributes:
        offset: Variance of the overall mean.
        slope: Variance of the slope over each of the ``sloped`` smooth features.
        sloped: Indices of the smooth features with a slope.
        load_slope: Variance of the slope over the load.
        variance: Variance of the smooth part.
        length: Its length over the load.
        lengths: Its lengths over the smooth features.
        damping: By kind of label: the smooth part of points with different labels is reduced to 1 / (1 + d).
        terms: Curves by label.
        noise: Variance of one measurement.
    """

    offset: float
    slope: float
    sloped: tuple[int, ...]
    load_slope: float
    variance: float
    length: float
    lengths: tuple[float, ...]
    damping: Mapping[str, float]
    terms: tuple[Term, ...]
    noise: float


class Prediction(NamedTuple):
    """Mean and standard deviation at each point, shape (points,)."""

    mean: FloatArray
    deviation: FloatArray


class LeftOut(NamedTuple):
    """Points left out of the fit: their predictions minus their values, and the deviations of the predictions."""

    residual: FloatArray
    deviation: FloatArray


class GaussianProcess:
    """A process conditioned on measurements.

    Args:
        shape: Its kernel.
        inputs: Positions of the measurements.
        values: Measured values, shape (points,).
    """

    def __init__(self, shape: KernelShape, inputs: KernelInputs, values: FloatArray) -> None:
        self._shape, self._inputs, self._values = shape, inputs, values
        self._centre = (float(inputs.load.mean()), inputs.smooth.mean(axis=0))
        covariance = self._covariance(inputs, inputs)
        covariance[np.diag_indices_from(covariance)] += shape.noise
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ values

    def predict(self, inputs: KernelInputs) -> Prediction:
        """Mean and deviation of a measurement at each position."""
        cross = self._covariance(inputs, self._inputs)
        mean = cross @ self._weights
        variance = (
            self._prior(inputs)
            + self._shape.noise
            - np.einsum("ij,jk,ik->i", cross, self._inverse, cross, optimize=True)
        )
        return Prediction(mean, np.sqrt(np.maximum(variance, self._shape.noise)))

    def left_out(self, groups: Sequence[npt.NDArray[np.int_]]) -> LeftOut:
        """Predict each group from all other points, in closed form.

        Args:
            groups: Indices of points that are left out together.

        Returns:
            One value for each point of ``groups``, in their order.
        """
        residuals, deviations = [], []
        for group in groups:
            block = np.linalg.inv(self._inverse[np.ix_(group, group)])
            residuals.append(-block @ self._weights[group])
            deviations.append(np.sqrt(np.maximum(np.diag(block), self._shape.noise)))
        return LeftOut(np.concatenate(residuals), np.concatenate(deviations))

    def _prior(self, inputs: KernelInputs) -> FloatArray:
        """Variance at each point before anything was measured."""
        shape, (load, smooth) = self._shape, self._centre
        total = shape.offset + shape.variance + shape.load_slope * (inputs.load - load) ** 2
        for index in shape.sloped:
            total = total + shape.slope * (inputs.smooth[:, index] - smooth[index]) ** 2
        return np.asarray(total + sum(term.offset + term.variance for term in shape.terms), np.float64)

    def _covariance(self, one: KernelInputs, other: KernelInputs) -> FloatArray:
        shape = self._shape
        apart = np.abs(one.load[:, None] - other.load[None, :])
        equal = {name: one.labels[name][:, None] == other.labels[name][None, :] for name in other.labels}
        near = np.full_like(apart, shape.variance)
        for index, length in enumerate(shape.lengths):
            near *= np.exp(-0.5 * ((one.smooth[:, index, None] - other.smooth[None, :, index]) / length) ** 2)
        for name, damping in shape.damping.items():
            near *= np.where(equal[name], 1.0, 1.0 / (1.0 + damping))
        total = shape.offset + near * _matern(apart / shape.length)
        load, smooth = self._centre
        total += shape.load_slope * np.outer(one.load - load, other.load - load)
        for index in shape.sloped:
            total += shape.slope * np.outer(
                one.smooth[:, index] - smooth[index], other.smooth[:, index] - smooth[index]
            )
        waiting = np.abs(one.queue[:, None] - other.queue[None, :])
        for term in shape.terms:
            curve = np.exp(-apart / term.length) if term.rough else _matern(apart / term.length)
            if term.queue < math.inf:
                curve = curve * np.exp(-waiting / term.queue)
            same = np.logical_and.reduce([equal[name] for name in term.same])
            total += np.where(same, term.offset + term.variance * curve, 0.0)
        return np.asarray(total, np.float64)


def _matern(distance: FloatArray) -> FloatArray:
    scaled = math.sqrt(5) * distance
    return np.asarray((1 + scaled + scaled * scaled / 3) * np.exp(-scaled), np.float64)
