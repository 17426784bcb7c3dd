"""Time to first token of a language model under a constant number of requests in flight.

The physical form is the arithmetic of a prompt and an overhead; the remainder is a Gaussian process over load, lengths,
sizes, GPUs and the use of the KV cache, as in :mod:`joulery.perf.llm.predictor`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.llm.errors import Band, Distance, grouped, scales_of
from joulery.perf.llm.gaussian_process import GaussianProcess, KernelInputs, KernelShape, Term
from joulery.perf.llm.replica import FIRST_OVERHEAD_S, prompt_time_s
from joulery.perf.llm.roofline import memory_limit
from joulery.perf.llm.runs import LlmPoint

MOST_POINTS = 4000
"""Points that may be fitted at once."""
_SHAPE = KernelShape(
    offset=0.5,
    slope=0.2,
    sloped=(0, 1, 2, 4),
    load_slope=0.05,
    variance=0.3,
    length=2.0,
    lengths=(2.0, 2.0, 1.5, 1.5, 1.2, 1.0, 1.5),
    damping={"gpu": 0.5, "engine": 0.5},
    terms=(
        Term(("engine",), 0.0, 0.1, 2.0),
        Term(("backbone",), 0.05, 0.1, 2.0),
        Term(("backbone", "engine"), 0.05, 0.1, 2.0),
        Term(("gpu", "engine"), 0.02, 0.05, 2.0),
        Term(("configuration",), 0.1, 0.1, 1.5, True),
        Term(("lengths",), 0.05, 0.1, 1.5, True),
        Term(("series",), 0.05, 0.15, 1.0, True),
    ),
    noise=0.01,
)
"""Chosen by hand on the silicon samples of NVIDIA AIConfigurator (Apache-2.0), not optimised."""
_FULLEST = 3.0


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A closed loop of requests of equal lengths.

    Attributes:
        point: Model, GPUs, load and lengths; prompts and answers have a length.
        engine: The engine; empty where unknown.
        version: Its version; empty where unknown.
        parallelism: Division of the model among the GPUs, as free text.
        ttft_s: Mean time to first token, s; None where it is to be predicted.
    """

    point: LlmPoint
    engine: str = ""
    version: str = ""
    parallelism: str = ""
    ttft_s: float | None = None

    @property
    def configuration(self) -> tuple[Hashable, ...]:
        """Key of all properties except lengths, version and load."""
        return (*self.point.configuration, self.engine, self.parallelism)

    @property
    def lengths(self) -> tuple[Hashable, ...]:
        """Key of all properties except version and load."""
        return (*self.configuration, self.point.input_tokens, self.point.output_tokens)

    @property
    def series(self) -> tuple[Hashable, ...]:
        """Key of all properties except the load."""
        return (*self.lengths, self.version)


class FirstToken(NamedTuple):
    """A predicted time to first token.

    Attributes:
        ttft_s: The time, s.
        distance: Distance of the point from the measurements.
        band: Errors of rows left out in the same way.
    """

    ttft_s: float
    distance: Distance
    band: Band

    @property
    def basis(self) -> str:
        """Basis of the prediction: ``measured``, ``fitted`` or ``transferred``."""
        return self.distance.basis


class FirstTokenPredictor:
    """Predictor of the time to first token, fitted to measured load points.

    Args:
        points: The measured points, each with its time to first token.

    Raises:
        DataError: Fewer than two points, more than :data:`MOST_POINTS`, or one without its time.
    """

    def __init__(self, points: Sequence[LoadPoint]) -> None:
        if not 2 <= len(points) <= MOST_POINTS:
            raise DataError(f"{len(points)} load points", hint=f"a fit needs 2 to {MOST_POINTS}")
        times = [point.ttft_s for point in points]
        if None in times:
            raise DataError("a load point has no time to first token")
        self._points = tuple(points)
        rest = np.log(np.array(times, np.float64)) - _base(points)
        self._process = GaussianProcess(_SHAPE, _inputs(points), rest)
        left = {}
        for how, key in _KEYS.items():
            groups = grouped(points, key)
            if len(groups) > 1:
                left[how] = tuple(self._process.left_out(groups))
        self._left = {how: (residual, deviation) for how, (residual, deviation) in left.items()}
        self._scales = scales_of(self._left)
        self._known = {name: {getattr(point, name) for point in points} for name in ("series", "configuration")}
        self._loads: dict[tuple[Hashable, ...], list[LoadPoint]] = defaultdict(list)
        for point in points:
            self._loads[point.series].append(point)

    def predict(self, points: Sequence[LoadPoint]) -> list[FirstToken]:
        """Times to first token, in the order of ``points``."""
        if not points:
            return []
        predicted = self._process.predict(_inputs(points))
        values = np.exp(_base(points) + predicted.mean)
        found = []
        for point, value, deviation in zip(points, values, predicted.deviation, strict=True):
            distance = self._distance(point)
            same = [each.ttft_s for each in self._loads[point.series] if each.point.batch == point.point.batch]
            time_s = float(np.median(np.array(same, np.float64))) if same else float(value)
            found.append(FirstToken(time_s, distance, self._scales[distance].band(float(deviation))))
        return found

    def left_out(self) -> dict[Distance, FloatArray]:
        """Relative errors of points left out, predicted over measured less 1, by the way of leaving out."""
        return {how: np.asarray(np.expm1(residual), np.float64) for how, (residual, _) in self._left.items()}

    def _distance(self, point: LoadPoint) -> Distance:
        loads = [each.point.batch for each in self._loads[point.series]]
        if point.point.batch in loads:
            return Distance.MEASURED
        if loads:
            return Distance.INSIDE if min(loads) < point.point.batch < max(loads) else Distance.BEYOND
        if point.point.gpu.name not in {each.point.gpu.name for each in self._points}:
            return Distance.GPU
        if point.configuration in self._known["configuration"]:
            return Distance.CONFIGURATION
        known = {each.point.facts.backbone for each in self._points}
        return Distance.MODEL if point.point.facts.backbone in known else Distance.ARCHITECTURE


_KEYS: Mapping[Distance, Callable[[LoadPoint], Hashable]] = {
    Distance.INSIDE: lambda each: (each.series, each.point.batch),
    Distance.CONFIGURATION: lambda each: each.lengths,
    Distance.MODEL: lambda each: each.configuration,
    Distance.ARCHITECTURE: lambda each: each.point.facts.backbone,
    Distance.GPU: lambda each: each.point.gpu.name,
}
"""Points left out together: all repetitions of a load, of a pair of lengths, of a configuration, a model, a GPU type.
A load beyond those measured has the error of a load between them, and no less."""


def _base(points: Sequence[LoadPoint]) -> FloatArray:
    """Logarithm of the physical form."""
    return np.log([FIRST_OVERHEAD_S + prompt_time_s(each.point, each.point.input_tokens or 1.0) for each in points])


def _inputs(points: Sequence[LoadPoint]) -> KernelInputs:
    smooth = []
    for each in points:
        point = each.point
        prompt, answer = point.input_tokens or 1.0, point.output_tokens or 1.0
        room = max(memory_limit(point), 1e-3)
        smooth.append(
            (
                math.log(point.facts.active_parameters),
                math.log(point.facts.parameters),
                math.log(prompt),
                math.log(answer),
                math.log(point.num_gpus),
                math.log(point.facts.weights_bytes(point.precision) / point.facts.parameters),
                min(math.log(point.batch / room), _FULLEST),
            )
        )
    labels = {
        "gpu": [each.point.gpu.name for each in points],
        "engine": [each.engine for each in points],
        "backbone": [each.point.facts.backbone for each in points],
        "configuration": ["|".join(map(str, each.configuration)) for each in points],
        "lengths": ["|".join(map(str, each.lengths)) for each in points],
        "series": ["|".join(map(str, each.series)) for each in points],
    }
    return KernelInputs(
        np.array([math.log(each.point.batch) for each in points], np.float64),
        np.array(smooth, np.float64).reshape(len(points), 7),
        {name: np.array(values, dtype=np.str_) for name, values in labels.items()},
        np.zeros(len(points)),
    )
