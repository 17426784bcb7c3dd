"""Sensitivity of a model to the clock, operator by operator (μ-Serve, ATC'24, section 3.1), emulated or calibrated.

``s = (L(f/2) - L(f)) / L(f) / (1/2)``: 0 for launch-bound work, about 0.9 for memory-bound, 2 for compute-bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.domain.gpu.clock_profile import ClockProfile, ScoredOperator
from joulery.domain.quality import Quality, weakest
from joulery.domain.trace.operators import OperationCost
from joulery.perf.power.clock_curves import ClockModel, operation_scores


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """Measurements of one model at several clocks.

    Attributes:
        device: The measured device.
        clocks_mhz: Ascending, float64[n].
        latency_s: One pass at each clock, float64[n].
        power_w: Board power while it runs, float64[n]; NaN where no meter read it.
        idle_w: Board power while nothing runs, float64[n]; NaN where no meter read it.
        source: Method of the measurement, as text.
    """

    device: str
    clocks_mhz: FloatArray
    latency_s: FloatArray
    power_w: FloatArray
    idle_w: FloatArray
    source: str


def supported_clocks(gpu: ClockModel, step_mhz: float = 100.0) -> FloatArray:
    """Clocks of an emulated GPU: multiples of a step within its range, and its highest."""
    inside = np.arange(math.ceil(gpu.min_mhz / step_mhz) * step_mhz, gpu.max_mhz, step_mhz)
    return np.append(inside, gpu.max_mhz)


def emulated_profile(
    model: str,
    operations: Sequence[OperationCost],
    gpu: ClockModel,
    *,
    latency_s: float | None = None,
    clocks_mhz: npt.ArrayLike | None = None,
) -> ClockProfile:
    """The clock profile of a model on an emulated GPU.

    Args:
        model: Its name.
        operations: Its operators in topological order.
        gpu: The GPU type.
        latency_s: Measured (or published) latency of one pass at the highest clock, to calibrate to; the sum of the
            operators' times when None.
        clocks_mhz: Clocks of the curve; :func:`supported_clocks` when None.

    Raises:
        DataError: The model has no operators, or only ones that never run.
    """
    clocks = supported_clocks(gpu) if clocks_mhz is None else np.asarray(clocks_mhz, np.float64)
    operators, sum_s = _scored(model, operations, gpu)
    factor = 1.0 if latency_s is None else latency_s / sum_s
    calibrated = tuple(ScoredOperator(each.cost, each.score, factor * each.time_s) for each in operators)
    how = "" if latency_s is None else f", calibrated to {latency_s:g} s at {gpu.max_mhz:g} MHz"
    return ClockProfile(
        model=model,
        device=gpu.name,
        quality=weakest([gpu.quality, Quality.MODELLED]),
        source=f"emulated {gpu.name}{how}; {gpu.source}",
        operators=calibrated,
        clocks_mhz=clocks,
        latency_s=factor * gpu.latency_s([each.cost for each in operators], clocks),
        power_w=gpu.busy_power_w(clocks),
        idle_w=gpu.idle_power_w(clocks),
        calibration_ratio=factor,
    )


def measured_profile(
    model: str, operations: Sequence[OperationCost], gpu: ClockModel, curve: MeasuredCurve
) -> ClockProfile:
    """The clock profile of a model whose latency was measured at several clocks.

    The curve is the measured one. Operators cannot be timed one by one this way: their times and scores are the
    emulator's, and the times are scaled to the latency measured at the highest clock.

    Raises:
        DataError: As :func:`emulated_profile`.
    """
    operators, sum_s = _scored(model, operations, gpu)
    factor = float(curve.latency_s[-1]) / sum_s
    return ClockProfile(
        model=model,
        device=curve.device,
        quality=Quality.MEASURED,
        source=f"{curve.source}; scores of operators modelled on an emulated {gpu.name}",
        operators=tuple(ScoredOperator(each.cost, each.score, factor * each.time_s) for each in operators),
        clocks_mhz=curve.clocks_mhz,
        latency_s=curve.latency_s,
        power_w=curve.power_w,
        idle_w=curve.idle_w,
        calibration_ratio=factor,
    )


def _scored(model: str, operations: Sequence[OperationCost], gpu: ClockModel) -> tuple[list[ScoredOperator], float]:
    run = [operation for operation in operations if operation.count > 0]
    if not run:
        raise DataError(f"{model} has no operators", hint="an empty model cannot be profiled or placed")
    scores = operation_scores(gpu, run)
    times_s = gpu.operation_s(run, gpu.max_mhz)[:, 0] * [operation.count for operation in run]
    scored = [
        ScoredOperator(operation, float(score), float(time_s))
        for operation, score, time_s in zip(run, scores, times_s, strict=True)
    ]
    return scored, float(np.sum(times_s))
