"""Throughput, power and token latency of a language model on a GPU type, by requests in flight.

The physical form comes first: a step reads weights and KV cache, multiplies and pays an overhead, each at a rate fitted
to the measurements. The remainder, in logarithms, is a Gaussian process (:mod:`joulery.perf.llm.gaussian_process`): it
follows measured neighbours of the same configuration and transfers the common effects of models, GPU types and tasks to
those that were not measured. Token times are made monotone over requests in flight; watts are not, because measured
watts fall with load in up to one case in four.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.isotonic import isotonic
from joulery.perf.llm.errors import Band, Distance, Scales, leave_out_groups, scales_of
from joulery.perf.llm.gaussian_process import GaussianProcess, KernelInputs
from joulery.perf.llm.models import precision_bytes
from joulery.perf.llm.roofline import DEFAULT_FACTORS, fit_factors, fits, memory_limit, step_times_s
from joulery.perf.llm.runs import LlmPoint, LlmRun
from joulery.perf.llm.shapes import SHAPES

MOST_RUNS = 4000
"""Runs that may be fitted at once: the fit inverts a matrix of that size."""
TOKEN_TIME, POWER, ITL_P50, ITL_P99, ENERGY = "throughput", "power", "itl_p50", "itl_p99", "energy_per_token"
_SAME_LOAD = 0.005
"""Loads that are this near (in logarithms) count as equal."""
_GRID = 25
_AT_ONCE = 1000
"""Points predicted at once: bounds the memory that many rows take."""
SMOOTH = ("active parameters", "parameters", "KV bytes", "GPUs", "precision")
"""The smooth features, logarithms each."""
_ROUNDS = 8
"""Number of projections of a curve onto curves that neither fall nor rise faster than the load."""


@dataclass(frozen=True, slots=True)
class LlmPrediction:
    """Prediction for a point; a figure that no run measured is None.

    Attributes:
        point: The requested point.
        distance: Its distance from the measurements.
        throughput_tps: Output tokens a second of the replica.
        power_w: Power of its GPUs together, W.
        itl_p50_s, itl_p99_s: Time between tokens, s.
        bands: Errors by figure: ``energy_per_token``, ``throughput``, ``power``, ``itl_p50``, ``itl_p99``.
        fits_memory: Whether weights and the KV cache of a request fit into the GPUs' memory, by the catalog's facts.
    """

    point: LlmPoint
    distance: Distance
    throughput_tps: float | None
    power_w: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    bands: Mapping[str, Band]
    fits_memory: bool

    @property
    def basis(self) -> str:
        """Basis of the prediction: ``measured``, ``fitted`` or ``transferred``."""
        return self.distance.basis

    @property
    def energy_per_token_j(self) -> float | None:
        """Joules of the GPUs an output token."""
        if self.power_w is None or self.throughput_tps is None:
            return None
        return self.power_w / self.throughput_tps


@dataclass(frozen=True, slots=True)
class _Fit:
    """One figure: its physical form, the process of its remainder, and the scales of its errors."""

    figure: str
    factors: tuple[float, ...]
    process: GaussianProcess
    scales: Mapping[Distance, Scales]
    left: Mapping[Distance, Mapping[int, tuple[float, float]]]

    def base(self, points: Sequence[LlmPoint]) -> FloatArray:
        return _base(self.figure, points, self.factors)

    def raw(self, points: Sequence[LlmPoint]) -> tuple[FloatArray, FloatArray]:
        """Logarithms and their deviations, before curves are made monotone."""
        parts = [self.process.predict(inputs_of(points[at : at + _AT_ONCE])) for at in range(0, len(points), _AT_ONCE)]
        mean = np.concatenate([part.mean for part in parts])
        return self.base(points) + mean, np.concatenate([part.deviation for part in parts])


class LlmPredictor:
    """Predictor of throughput, power and token latency, fitted to measured runs.

    Args:
        runs: The measured runs, at most :data:`MOST_RUNS`.

    Raises:
        DataError: Fewer than two runs, more than :data:`MOST_RUNS`, or none with a throughput.
    """

    def __init__(self, runs: Sequence[LlmRun]) -> None:
        if len(runs) < 2:
            raise DataError(
                f"{len(runs)} run is too few to fit a curve over requests in flight",
                hint="measure at least two loads, such as 8 and 64 requests in flight",
            )
        if len(runs) > MOST_RUNS:
            raise DataError(f"{len(runs)} runs are too many for one fit", hint=f"at most {MOST_RUNS}: choose by model")
        self._lengths = _lengths(runs)
        self.runs = tuple(replace(run, point=self._with_lengths(run.point)) for run in runs)
        if not any(run.throughput_tps is not None for run in runs):
            raise DataError("no run has a throughput in output tokens a second")
        self._fits = {
            figure: fit
            for figure in (TOKEN_TIME, POWER, ITL_P50, ITL_P99)
            if (fit := _fitted(figure, self.runs)) is not None
        }
        self._energy = self._energy_scales()
        self._series: dict[tuple[object, ...], list[LlmRun]] = defaultdict(list)
        for run in self.runs:
            self._series[run.point.series].append(run)
        self._tasks: dict[tuple[object, ...], set[str]] = defaultdict(set)
        for run in self.runs:
            self._tasks[run.point.configuration].add(run.point.task)
            self._tasks[()].add(run.point.task)
        self._models = {run.point.model_id for run in self.runs}
        self._backbones = {run.point.facts.backbone for run in self.runs}
        self._gpus = {run.point.gpu.name for run in self.runs}

    def predict(self, points: Sequence[LlmPoint]) -> list[LlmPrediction]:
        """The prediction for each point, in the order of ``points``."""
        asked = [self._placed(point) for point in points]
        series: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, point in enumerate(asked):
            series[(point.series, point.input_tokens, point.output_tokens)].append(index)
        found: dict[int, LlmPrediction] = {}
        for group in series.values():
            found.update(zip(group, self._one_series([asked[index] for index in group]), strict=True))
        return [replace(found[index], point=points[index]) for index in range(len(points))]

    def _distance(self, point: LlmPoint) -> Distance:
        """Distance of a point, under the task of its runs, from the measurements."""
        loads = [run.point.batch for run in self._series.get(point.series, ())]
        if loads:
            if self._same(point) is not None:
                return Distance.MEASURED
            return Distance.INSIDE if min(loads) < point.batch < max(loads) else Distance.BEYOND
        if point.gpu.name not in self._gpus:
            return Distance.GPU
        if point.model_id in self._models:
            return Distance.CONFIGURATION
        return Distance.MODEL if point.facts.backbone in self._backbones else Distance.ARCHITECTURE

    def left_out(self, figure: str) -> Mapping[Distance, FloatArray]:
        """Relative errors of ``figure`` on rows left out, predicted over measured less 1, by the way of leaving out."""
        return {
            how: np.asarray(np.expm1([residual for residual, _ in rows.values()]), np.float64)
            for how, rows in (self._energy_left() if figure == ENERGY else self._signed_left(figure)).items()
            if rows
        }

    def _one_series(self, points: list[LlmPoint]) -> list[LlmPrediction]:
        """Predictions of points that differ in their load alone."""
        values, deviations = {}, {}
        for figure, fit in self._fits.items():
            raw, deviations[figure] = fit.raw(points)
            if figure != POWER:
                raw = raw + self._correction(fit, points)
            values[figure] = np.exp(raw)
        return [self._prediction(point, index, values, deviations) for index, point in enumerate(points)]

    def _correction(self, fit: _Fit, points: list[LlmPoint]) -> FloatArray:
        """Correction that makes the curve through these loads monotone: to be added to the logarithms."""
        measured = [run.point.batch for run in self._series.get(points[0].series, ())]
        loads = np.log([*(point.batch for point in points), *measured])
        grid = np.unique(np.concatenate([loads, np.linspace(loads.min(), loads.max(), _GRID)]))
        curve, _ = fit.raw([points[0].at(math.exp(load)) for load in grid])
        straight = monotone_times(grid, curve) - curve
        at = np.searchsorted(grid, [math.log(point.batch) for point in points]).clip(0, len(grid) - 1)
        return np.asarray(straight[at], np.float64)

    def _prediction(
        self, point: LlmPoint, index: int, values: Mapping[str, FloatArray], deviations: Mapping[str, FloatArray]
    ) -> LlmPrediction:
        distance = self._distance(point)
        bands = {name: self._fits[name].scales[distance].band(float(deviations[name][index])) for name in values}
        time_s, power_w, p50_s, p99_s = (
            float(values[name][index]) if name in values else None for name in (TOKEN_TIME, POWER, ITL_P50, ITL_P99)
        )
        throughput = None if time_s is None else point.batch / time_s
        if power_w is not None and throughput is not None:
            both = math.hypot(float(deviations[TOKEN_TIME][index]), float(deviations[POWER][index]))
            bands[ENERGY] = self._energy[distance].band(both)
        if (run := self._same(point)) is not None:
            throughput = throughput if run.throughput_tps is None else run.throughput_tps
            power_w = power_w if run.power_w is None else run.power_w
            p50_s = p50_s if run.itl_p50_s is None else run.itl_p50_s
            p99_s = p99_s if run.itl_p99_s is None else run.itl_p99_s
        if p50_s is not None and p99_s is not None:
            p99_s = max(p99_s, p50_s)
        return LlmPrediction(
            point, distance, throughput, power_w, p50_s, p99_s, MappingProxyType(bands), _fits_memory(point)
        )

    def _same(self, point: LlmPoint) -> LlmRun | None:
        """The measured run with the load and limit of a point; None where there is none."""
        for run in self._series.get(point.series, ()):
            near = abs(math.log(run.point.batch / point.batch)) <= _SAME_LOAD
            limits = (run.point.max_num_seqs, point.max_num_seqs)
            if near and (None in limits or limits[0] == limits[1]):
                return run
        return None

    def _placed(self, point: LlmPoint) -> LlmPoint:
        """The point under the task of the runs it belongs to, with the length of its answers.

        Runs without a task match any task; a point without a task gets the measured one where there is only one.
        """
        tasks = self._tasks.get(point.configuration, self._tasks[()])
        if point.task not in tasks:
            if "" in tasks:
                point = replace(point, task="")
            elif not point.task and len(tasks) == 1:
                point = replace(point, task=next(iter(tasks)))
        return self._with_lengths(point)

    def _with_lengths(self, point: LlmPoint) -> LlmPoint:
        """The point with the length of its answers, from similar runs where it is not given."""
        if point.output_tokens is not None:
            return point
        for key in ((point.model_id, point.task), (point.task,)):
            if key in self._lengths:
                return replace(point, output_tokens=self._lengths[key])
        return point

    def _signed_left(self, figure: str) -> dict[Distance, dict[int, tuple[float, float]]]:
        """Residuals of the figure itself: throughput is the load over the token time, so its sign is reversed."""
        sign = -1.0 if figure == TOKEN_TIME else 1.0
        fit = self._fits.get(figure)
        if fit is None:
            return {}
        return {how: {i: (sign * r, d) for i, (r, d) in rows.items()} for how, rows in fit.left.items()}

    def _energy_left(self) -> dict[Distance, dict[int, tuple[float, float]]]:
        """Residuals of joules a token: the sums of those of power and of token time, for the runs that have both."""
        if TOKEN_TIME not in self._fits or POWER not in self._fits:
            return {}
        times, powers = self._fits[TOKEN_TIME].left, self._fits[POWER].left
        return {
            how: {
                run: (rows[run][0] + powers[how][run][0], math.hypot(rows[run][1], powers[how][run][1]))
                for run in rows
                if run in powers.get(how, {})
            }
            for how, rows in times.items()
        }

    def _energy_scales(self) -> Mapping[Distance, Scales]:
        return scales_of({how: _columns(rows) for how, rows in self._energy_left().items()})


def _fitted(figure: str, runs: Sequence[LlmRun]) -> _Fit | None:
    """The fit of one figure; None where fewer than two runs have it."""
    kept = [(index, value) for index, run in enumerate(runs) if (value := _measured(figure, run)) is not None]
    if len(kept) < 2:
        return None
    points, values = [runs[index].point for index, _ in kept], [value for _, value in kept]
    factors: tuple[float, ...] = DEFAULT_FACTORS if figure == POWER else fit_factors(points, values)
    rest = np.log(values) - _base(figure, points, factors)
    process = GaussianProcess(SHAPES[figure], inputs_of(points), rest)
    left: dict[Distance, dict[int, tuple[float, float]]] = {}
    for how, groups in leave_out_groups(points).items():
        if not groups:
            continue
        out = process.left_out(groups)
        rows = np.concatenate(groups)
        left[how] = {
            kept[int(row)][0]: (float(residual), float(deviation))
            for row, residual, deviation in zip(rows, out.residual, out.deviation, strict=True)
        }
    return _Fit(figure, factors, process, scales_of({how: _columns(rows) for how, rows in left.items()}), left)


def _columns(rows: Mapping[int, tuple[float, float]]) -> tuple[FloatArray, FloatArray]:
    table = np.array(list(rows.values()), np.float64).reshape(len(rows), 2)
    return table[:, 0], table[:, 1]


def _measured(figure: str, run: LlmRun) -> float | None:
    measured = {
        TOKEN_TIME: run.token_time_s,
        POWER: run.power_w,
        ITL_P50: run.itl_p50_s,
        ITL_P99: run.itl_p99_s,
    }
    return measured[figure]


def _base(figure: str, points: Sequence[LlmPoint], factors: Sequence[float]) -> FloatArray:
    """Logarithm of the physical form: the time of a step, or the power limit of the boards."""
    if figure == POWER:
        return np.log([point.gpu.tdp_w * point.num_gpus for point in points])
    return np.asarray(np.log(step_times_s(points, factors)), np.float64)


def _lengths(runs: Sequence[LlmRun]) -> dict[tuple[str, ...], float]:
    """Median length of answers by model and task, and by task."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for run in runs:
        if run.point.output_tokens is not None:
            found[(run.point.model_id, run.point.task)].append(run.point.output_tokens)
            found[(run.point.task,)].append(run.point.output_tokens)
    return {key: median(values) for key, values in found.items()}


def _fits_memory(point: LlmPoint) -> bool:
    return fits(point) and memory_limit(point) >= 1


def inputs_of(points: Sequence[LlmPoint]) -> KernelInputs:
    """Kernel inputs of points: their load, sizes, labels, and what the engine's limit leaves waiting."""
    smooth = [
        (
            math.log(point.facts.active_parameters),
            math.log(point.facts.parameters),
            math.log(point.facts.kv_bytes),
            math.log(point.num_gpus),
            math.log(precision_bytes(point.precision)),
        )
        for point in points
    ]
    labels = {
        "gpu": [point.gpu.name for point in points],
        "task": [point.task for point in points],
        "backbone": [point.facts.backbone for point in points],
        "configuration": [
            "|".join((point.facts.backbone, point.precision, point.gpu.name, str(point.num_gpus))) for point in points
        ],
        "series": ["|".join(map(str, point.series)) for point in points],
    }
    return KernelInputs(
        np.array([math.log(point.batch) for point in points], np.float64),
        np.array(smooth, np.float64).reshape(len(points), len(SMOOTH)),
        {name: np.array(values, dtype=np.str_) for name, values in labels.items()},
        np.array([math.log(max((point.max_num_seqs or 0) / point.batch, 1.0)) for point in points], np.float64),
    )


def monotone_times(load: FloatArray, times: FloatArray) -> FloatArray:
    """Adjust logarithms of token times, by a few projections, so that they never fall and rise no faster than the load.

    With ``n`` requests in flight and a token every ``t`` seconds for each, ``n / t`` tokens are written a second. So
    the slope of ln t over ln n lies between 0 (more requests make no token faster) and 1 (they cost no
    throughput).

    Args:
        load: Logarithms of requests in flight, ascending, shape (points,).
        times: Logarithms of times, shape (points,).
    """
    found = np.array(times, np.float64)
    for _ in range(_ROUNDS):
        found = load - isotonic(load - isotonic(found))
    for i in range(1, len(found)):
        found[i] = min(max(found[i], found[i - 1]), found[i - 1] + load[i] - load[i - 1])
    return np.asarray(found, np.float64)
