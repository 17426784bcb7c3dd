"""Fit of the coefficients of Eqs. 1-11 to profiling runs, as the paper derives them (section 3.1).

Few runs suffice: nine solo points a model (three batches by three shares), three cache readings, one run of two copies,
and one to five copies of one model for the hardware. All fits are least squares; Eq. 11 is linear in all but ``k4``, so
its five coefficients are found by a search over ``k4`` alone, which has one minimum and needs no starting value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.perf.interference.model import (
    LARGEST_BATCH,
    GpuCoefficients,
    ModelCoefficients,
    ModelFit,
    Neighbourhood,
    colocated_latency,
    solo,
)

_FINITE_RATIO = 0.9
"""Limit of ``-k4`` as a ratio of the smallest share, which would be infinitely slow at 1."""
_LEAST_WORK_RATIO = 1e-6


class SoloPoint(NamedTuple):
    """One solo run: time, power and clock of a model alone.

    Attributes:
        batch: Batch size.
        share_percent: Share of the SMs.
        gpu_ms: Execution on the GPU, transfers not included.
        power_w: Power of the board.
        clock_mhz: Clock.
    """

    batch: float
    share_percent: float
    gpu_ms: float
    power_w: float
    clock_mhz: float


class CachePoint(NamedTuple):
    """One solo run under a cache profiler."""

    batch: float
    share_percent: float
    gpu_ms: float
    cache_percent: float


class CopiesPoint(NamedTuple):
    """One run of equal copies of one model on one GPU.

    Attributes:
        power_w: Power of the board.
        clock_mhz: Clock.
        idle_per_kernel_ms: Mean time a kernel waits to be launched.
    """

    power_w: float
    clock_mhz: float
    idle_per_kernel_ms: float


@dataclass(frozen=True, slots=True)
class TwoCopies:
    """A run of one copy and a run of two copies of a model, for its sensitivity to cache contention.

    Attributes:
        one_active_ms, two_active_ms: Time kernels ran, alone and beside the copy.
        two_clock_mhz: Clock beside the copy.
        cache_percent: L2 utilisation of one copy alone.
    """

    one_active_ms: float
    two_active_ms: float
    two_clock_mhz: float
    cache_percent: float


@dataclass(frozen=True, slots=True)
class GpuRuns:
    """Measurements that the hardware coefficients are fitted on.

    Attributes:
        name: GPU type.
        power_cap_w, clock_max_mhz, idle_w, pcie_bytes_per_ms, unit_percent: Properties of the device.
        copies: Runs of 1, 2, 3 ... equal copies.
    """

    name: str
    power_cap_w: float
    clock_max_mhz: float
    idle_w: float
    pcie_bytes_per_ms: float
    unit_percent: float
    copies: Sequence[CopiesPoint]


@dataclass(frozen=True, slots=True)
class ModelRuns:
    """Measurements that the coefficients of one model are fitted on.

    Attributes:
        load_bytes, feedback_bytes: Input and result of one request.
        kernels: Kernels of one inference.
        launch_ms: Their total launch delay when alone.
        points: Solo runs; at least five, of two batches and two shares or more.
        cache: Solo runs under a cache profiler, at least two.
        two_copies: The co-location run.
    """

    load_bytes: float
    feedback_bytes: float
    kernels: float
    launch_ms: float
    points: Sequence[SoloPoint]
    cache: Sequence[CachePoint]
    two_copies: TwoCopies


def fit_gpu(runs: GpuRuns) -> GpuCoefficients:
    """Fit the clock against power, and the launch delay against the number of processes (Eqs. 6 and 9).

    Raises:
        DataError: Fewer than three runs of copies.
    """
    if len(runs.copies) < 3:
        raise DataError(f"{runs.name}: {len(runs.copies)} runs of equal copies, at least 3 are needed")
    delay_slope, delay_offset = _delay(runs)
    return GpuCoefficients(
        name=runs.name,
        power_cap_w=runs.power_cap_w,
        clock_max_mhz=runs.clock_max_mhz,
        idle_w=runs.idle_w,
        pcie_bytes_per_ms=runs.pcie_bytes_per_ms,
        clock_mhz_per_w=_clock_slope(runs),
        delay_ms_per_neighbour=delay_slope,
        delay_offset_ms=delay_offset,
        unit_percent=runs.unit_percent,
    )


def _clock_slope(runs: GpuRuns) -> float:
    """alpha_f: a throttled board reports its cap, so its demand is extrapolated from the unthrottled runs."""
    throttled = [point.clock_mhz < runs.clock_max_mhz - 1 for point in runs.copies]
    first = throttled.index(True) if True in throttled else len(throttled)
    if first < 2:
        raise DataError(
            f"{runs.name}: fewer than two runs of copies at full clock", hint="run copies of a lighter model"
        )
    step_w = (runs.copies[first - 1].power_w - runs.copies[0].power_w) / (first - 1)
    if first == len(throttled):
        return 0.0
    demand_w = runs.copies[first - 1].power_w + step_w * np.arange(1, len(throttled) - first + 1)
    excess_w = demand_w - runs.power_cap_w
    lost_mhz = np.array([point.clock_mhz - runs.clock_max_mhz for point in runs.copies[first:]])
    return float(excess_w @ lost_mhz / (excess_w @ excess_w))


def _delay(runs: GpuRuns) -> tuple[float, float]:
    """alpha_sch and beta_sch: a kernel's wait at full clock beyond its wait alone, against the number of copies."""
    waits = [point.idle_per_kernel_ms * point.clock_mhz / runs.clock_max_mhz for point in runs.copies]
    return _line(np.arange(2.0, len(waits) + 1), np.array(waits[1:]) - waits[0])


def fit_model(gpu: GpuCoefficients, runs: ModelRuns) -> ModelCoefficients:
    """Fit all coefficients of one model (Eq. 11 and the two lines below it, alpha_cache of Eq. 8).

    Raises:
        DataError: The runs do not determine the coefficients.
    """
    if len(runs.points) < 5 or len(runs.cache) < 2:
        raise DataError(f"{len(runs.points)} solo and {len(runs.cache)} cache runs, at least 5 and 2 are needed")
    batch, share, gpu_ms, power_w, clock_mhz = np.array(runs.points, np.float64).T
    active_ms = gpu_ms * np.minimum(clock_mhz / gpu.clock_max_mhz, 1.0) - runs.launch_ms
    k1, k2, k3, k4, k5 = fit_active(batch, share, active_ms, unit_percent=gpu.unit_percent)
    full = clock_mhz > gpu.clock_max_mhz - 1
    ability = 1000.0 * batch / (gpu_ms - runs.launch_ms)
    power_slope, power_offset_w = _line(ability[full], power_w[full] - gpu.idle_w)
    cache_batch, _, cache_ms, cache_percent = np.array(runs.cache, np.float64).T
    cache_slope, cache_offset = _line(1000.0 * cache_batch / (cache_ms - runs.launch_ms), cache_percent)
    pair = runs.two_copies
    stretch = pair.two_active_ms * pair.two_clock_mhz / gpu.clock_max_mhz / pair.one_active_ms - 1
    return ModelCoefficients(
        load_bytes=runs.load_bytes,
        feedback_bytes=runs.feedback_bytes,
        kernels=runs.kernels,
        launch_ms=runs.launch_ms,
        k1=k1,
        k2=k2,
        k3=k3,
        k4=k4,
        k5=k5,
        power_slope=power_slope,
        power_offset_w=power_offset_w,
        cache_slope=cache_slope,
        cache_offset_percent=cache_offset,
        cache_sensitivity=stretch / pair.cache_percent,
    )


def fit_active(
    batch: FloatArray,
    share_percent: FloatArray,
    active_ms: FloatArray,
    weight: FloatArray | None = None,
    *,
    unit_percent: float | None = None,
) -> tuple[float, float, float, float, float]:
    """Fit k1..k5 of Eq. 11 by weighted least squares.

    Times of a busy machine scatter, and the best fit may make a small share infinitely slow, or give a batch no work.
    Then the best fit that avoids both is returned; its error states the distance to the times.

    Args:
        batch, share_percent, active_ms: The runs, float64[n].
        weight: Weight of each residual, float64[n]; 1 each when left out (the paper's way).
        unit_percent: The smallest share, which must not be infinitely slow; None for the smallest that was measured.

    Returns:
        k1, k2, k3, k4, k5, in ms and percent.

    Raises:
        DataError: The runs do not determine five coefficients.
    """
    weights = np.ones(len(batch)) if weight is None else weight
    if len(batch) < 5 or len(np.unique(share_percent)) < 2 or len(np.unique(batch)) < 2:
        raise DataError("Eq. 11 needs at least five solo runs of two or more batches and shares")
    low, high = -_FINITE_RATIO * float(np.min(share_percent)), 10.0 * float(np.max(share_percent))
    grid = low + (high - low) * np.linspace(0.0, 1.0, 241) ** 3
    if unit_percent is not None and -_FINITE_RATIO * unit_percent > low:
        low = -_FINITE_RATIO * unit_percent
        grid = np.concatenate(([low], grid[grid > low]))

    def best(solve: Callable[[FloatArray, FloatArray], FloatArray]) -> tuple[float, float, float, float, float]:
        def solved(k4: float) -> tuple[float, FloatArray]:
            basis = np.column_stack([batch**2, batch, np.ones(len(batch))]) / (share_percent + k4)[:, None]
            design = np.column_stack([basis, np.ones(len(batch))]) * weights[:, None]
            found = solve(design, active_ms * weights)
            residual = design @ found - active_ms * weights
            return float(residual @ residual), found

        at = int(np.argmin([solved(k4)[0] for k4 in grid]))
        k4 = _golden(lambda x: solved(x)[0], float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)]))
        k1, k2, k3, k5 = (float(value) for value in solved(k4)[1])
        return k1, k2, k3, k4, k5

    found = best(_least_squares)
    return found if _is_work(*found[:3]) else best(_least_squares_above_0)


def _is_work(k1: float, k2: float, k3: float) -> bool:
    """Whether every batch that a service may have takes time."""
    return all(k1 * batch * batch + k2 * batch + k3 > 0 for batch in range(1, LARGEST_BATCH + 1))


def _least_squares(design: FloatArray, wanted: FloatArray) -> FloatArray:
    found, *_ = np.linalg.lstsq(design, wanted, rcond=None)
    return np.asarray(found, np.float64)


def _least_squares_above_0(design: FloatArray, wanted: FloatArray) -> FloatArray:
    """Least squares with no coefficient below 0, and the work of a batch a little above 0."""
    from scipy.optimize import nnls

    found, _ = nnls(design, wanted)
    least = _LEAST_WORK_RATIO * float(np.max(np.abs(wanted))) / max(float(np.max(design[:, 2])), 1e-300)
    return np.asarray([*found[:2], max(float(found[2]), least), found[3]], np.float64)


def _golden(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one minimum in ``[low, high]``, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-10 * (1 + abs(low)):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Slope and offset of the least-squares line."""
    if len(x) < 2 or float(np.ptp(x)) == 0:
        raise DataError("a line needs two runs that differ", hint="profile more batches or shares at full clock")
    dx = x - x.mean()
    slope = float(dx @ (y - y.mean()) / (dx @ dx))
    return slope, float(y.mean() - slope * x.mean())


def solo_fit(gpu: GpuCoefficients, name: str, model: ModelCoefficients, points: Sequence[SoloPoint]) -> ModelFit:
    """Errors of the coefficients on the solo runs (execution on the GPU)."""
    errors = []
    for point in points:
        own = solo(model, point.batch, point.share_percent)
        predicted = colocated_latency(gpu, model, int(point.batch), own, Neighbourhood().with_process(own))
        errors.append(predicted.gpu_ms / point.gpu_ms - 1)
    return ModelFit(name, "solo", tuple(errors))
