"""The calibrated form of the predictor: co-location terms fitted on measured pairs.

The paper derives the contention terms of a model from one run beside a copy of itself, and assumes PCIe to be free of
contention. Where latencies of co-located pairs were measured, more terms can be fitted. The form stays that
of Eqs. 1-11; per model, fitted jointly on all solo latencies and all pairs by relative error:

* ``k1..k5`` (Eq. 11),
* ``cache_sensitivity``, at least 0,
* ``pcie_contention``: transfers of a shared GPU take this many times longer, at least 1,
* ``shared_launch_ms``: launch delay added once the GPU is shared, at least 0,

and for the GPU ``clock_mhz_per_w``. Everything else (bytes, kernels, power and cache lines) is taken from the starting
profile. Errors beyond a few per cent count linearly (soft L1), so that outliers do not dominate the fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.perf.interference.fit import fit_active
from joulery.perf.interference.model import InterferenceProfile, ModelCoefficients, ModelFit, launch_delay_ms

_SOLO_WEIGHT = 0.3
"""Weight of a solo error against a pair error: plans are made of shared GPUs."""
_OUTLIER_RATIO = 0.01
"""Relative error from which on errors count linearly."""
_FASTEST_CACHE_PERCENT = 30.0
"""L2 utilisation assumed for a model of unknown cache use at its highest measured throughput."""
_PAIRS_MIN = 10
"""Least number of pairs from which the co-location terms can be fitted."""


class SoloLatency(NamedTuple):
    """Measured latency of a model alone (transfers included)."""

    model: str
    batch: int
    share_percent: float
    latency_ms: float


class PairLatency(NamedTuple):
    """Measured latencies of two co-located processes (transfers included)."""

    model_1: str
    batch_1: int
    share_1_percent: float
    latency_1_ms: float
    model_2: str
    batch_2: int
    share_2_percent: float
    latency_2_ms: float


def calibrate(
    start: InterferenceProfile,
    solo: Sequence[SoloLatency],
    pairs: Sequence[PairLatency],
    *,
    source: str,
    monotone: bool = False,
) -> InterferenceProfile:
    """Fit the calibrated form.

    Args:
        start: The profile whose bytes, kernels, power and cache lines are kept, and where the search starts.
        solo: Solo latencies; every model of ``start`` that is in ``pairs`` needs some.
        pairs: Latencies of co-located pairs.
        source: Origin of the measurements, as text.
        monotone: Keep k1 to k5 at 0 or above, so that a larger batch is never less work and a larger share never more
            time, even outside the measured range: for few and noisy runs.

    Returns:
        The calibrated profile, errors on the fitted data and on pairs held out in turn included.

    Raises:
        DataError: A measured model is not in ``start``, or there are too few measurements.
    """
    data = _Data(start, solo, pairs, monotone=monotone)
    everything = np.ones(len(data.own_ms), bool)
    terms = _fit(data, everything)
    fits = (
        *_by_model(data, "solo", data.alone.model, data.alone_error(terms)),
        *_by_model(data, "pairs", data.own.model, data.pair_error(terms, everything)),
        *_held_out(data, held_out_batches(pairs)),
    )
    return replace(data.profile(terms, source), fits=fits)


def starting_profile(base: InterferenceProfile, solo: Sequence[SoloLatency]) -> InterferenceProfile:
    """A profile that contains every measured model: those of ``base``, and estimates for the rest.

    For a model that is not in ``base``, only the solo latencies are known. Eq. 11 is fitted to them; transfers and
    kernel launches are assumed to be part of it, its power to be 0 (its clock is never lowered), and its use of the L2
    cache to be proportional to its throughput, with an assumed factor that the fit of the sensitivities compensates.
    The profile's notes state this.

    Raises:
        DataError: A model has too few solo latencies to fit Eq. 11.
    """
    models, notes = dict(base.models), list(base.notes)
    for name in sorted({each.model for each in solo} - base.models.keys()):
        batch, share, latency_ms = np.array([each[1:] for each in solo if each.model == name], np.float64).T
        try:
            k1, k2, k3, k4, k5 = fit_active(
                batch, share, latency_ms, 1.0 / latency_ms, unit_percent=base.gpu.unit_percent
            )
        except DataError as error:
            raise DataError(f"{name}: {error.message}", hint="measure more batches and shares alone") from None
        fastest_rps = float(np.max(1000.0 * batch / latency_ms))
        models[name] = ModelCoefficients(
            load_bytes=0.0,
            feedback_bytes=0.0,
            kernels=0.0,
            launch_ms=0.0,
            k1=k1,
            k2=k2,
            k3=k3,
            k4=k4,
            k5=max(k5, 0.0),
            power_slope=0.0,
            power_offset_w=0.0,
            cache_slope=_FASTEST_CACHE_PERCENT / fastest_rps,
            cache_offset_percent=0.0,
            cache_sensitivity=0.002,
        )
        notes.append(f"{name}: transfers, kernels, power and cache use were not measured; estimated")
    return replace(base, models=models, notes=tuple(notes))


def held_out_batches(pairs: Iterable[PairLatency]) -> tuple[int, ...]:
    """Batches that can be held out: those between a smaller and a larger one, so that no fit extrapolates."""
    batches = sorted({batch for pair in pairs for batch in (pair.batch_1, pair.batch_2)})
    return tuple(batches[1:-1])


def _held_out(data: _Data, batches: Sequence[int]) -> tuple[ModelFit, ...]:
    """Errors on pairs outside the fit: in turn, all pairs with one of the batches are left out of the fit."""
    errors, models = [], []
    for batch in batches:
        unseen = (data.own.batch == batch) | (data.other.batch == batch)
        errors.append(data.pair_error(_fit(data, ~unseen), unseen))
        models.append(data.own.model[unseen])
    return _by_model(data, "held-out pairs", np.concatenate(models), np.concatenate(errors)) if errors else ()


def _by_model(data: _Data, name: str, model: npt.NDArray[np.int64], error: FloatArray) -> tuple[ModelFit, ...]:
    return tuple(
        ModelFit(each, name, tuple(float(value) for value in error[model == index]))
        for index, each in enumerate(data.names)
        if bool(np.any(model == index))
    )


class _Terms(NamedTuple):
    """Fitted numbers: float64[models, 5], float64[models] each, and one number for the GPU."""

    k: FloatArray
    cache_sensitivity: FloatArray
    pcie_contention: FloatArray
    shared_launch_ms: FloatArray
    clock_mhz_per_w: float


class _Kept(NamedTuple):
    """Numbers taken over from the starting profile, float64[models] each."""

    transfer_ms: FloatArray
    launch_ms: FloatArray
    kernels: FloatArray
    power_slope: FloatArray
    power_offset_w: FloatArray
    cache_slope: FloatArray
    cache_offset_percent: FloatArray


class _Rows(NamedTuple):
    """Processes: index of the model, batch and share, one entry each."""

    model: npt.NDArray[np.int64]
    batch: FloatArray
    share_percent: FloatArray

    def where(self, chosen: npt.NDArray[np.bool_]) -> _Rows:
        """The chosen processes."""
        return _Rows(self.model[chosen], self.batch[chosen], self.share_percent[chosen])


class _Data:
    """The measurements as arrays, and Eqs. 1-11 applied to them. A pair counts twice, once for each process."""

    def __init__(
        self,
        start: InterferenceProfile,
        solo: Sequence[SoloLatency],
        pairs: Sequence[PairLatency],
        *,
        monotone: bool = False,
    ) -> None:
        _check(start, solo, pairs)
        self.start, self.least_k = start, 0.0 if monotone else -math.inf
        self.names = tuple(sorted({each.model for each in solo}))
        index = {name: at for at, name in enumerate(self.names)}
        self.alone = _rows([(index[each.model], each.batch, each.share_percent) for each in solo])
        self.alone_ms = np.array([each.latency_ms for each in solo], np.float64)
        first = [(index[p.model_1], p.batch_1, p.share_1_percent) for p in pairs]
        second = [(index[p.model_2], p.batch_2, p.share_2_percent) for p in pairs]
        self.own, self.other = _rows(first + second), _rows(second + first)
        self.own_ms = np.array([p.latency_1_ms for p in pairs] + [p.latency_2_ms for p in pairs], np.float64)
        self.kept = self._kept()

    def _kept(self) -> _Kept:
        models = [self.start.models[name] for name in self.names]
        bandwidth = self.start.gpu.pcie_bytes_per_ms
        rows = [
            (
                (m.load_bytes + m.feedback_bytes) / bandwidth,
                m.launch_ms,
                m.kernels,
                m.power_slope,
                m.power_offset_w,
                m.cache_slope,
                m.cache_offset_percent,
            )
            for m in models
        ]
        return _Kept(*np.array(rows, np.float64).T)

    def start_vector(self) -> FloatArray:
        """Start of the search, in the scale of :meth:`terms`: coefficients relative to the starting profile."""
        n = len(self.names)
        k = self.k_scale()
        first = np.array([self._k(name) for name in self.names]) / k
        return np.concatenate([first.ravel(), np.ones(n), np.full(n, 1.3), np.full(n, 0.01), np.ones(1)])

    def k_scale(self) -> FloatArray:
        """Sizes of k1..k5, float64[models, 5]; never 0."""
        return np.asarray(np.abs([self._k(name) for name in self.names]) + 1e-3, np.float64)

    def _k(self, name: str) -> tuple[float, ...]:
        model = self.start.models[name]
        return model.k1, model.k2, model.k3, model.k4, model.k5

    def terms(self, vector: FloatArray) -> _Terms:
        """Convert a vector of the search to coefficients."""
        n = len(self.names)
        k, cache, pcie, launch, clock = np.split(vector, [5 * n, 6 * n, 7 * n, 8 * n])
        sensitivity = np.array([max(self.start.models[name].cache_sensitivity, 1e-4) for name in self.names])
        slope = min(self.start.gpu.clock_mhz_per_w, -1e-3)
        return _Terms(k.reshape(n, 5) * self.k_scale(), cache * sensitivity, pcie, launch, float(clock[0]) * slope)

    def alone_error(self, terms: _Terms) -> FloatArray:
        """Relative errors of the solo latencies."""
        active_ms, power_w, _ = self._solo(terms, self.alone)
        model = self.alone.model
        gpu_ms = (self.kept.launch_ms[model] + active_ms) * self._slowdown(terms, power_w)
        return np.asarray((gpu_ms + self.kept.transfer_ms[model] * self.alone.batch) / self.alone_ms - 1)

    def pair_error(self, terms: _Terms, chosen: npt.NDArray[np.bool_]) -> FloatArray:
        """Relative errors of the chosen processes of pairs."""
        own, other = self.own.where(chosen), self.other.where(chosen)
        active_ms, power_w, _ = self._solo(terms, own)
        _, other_w, other_cache = self._solo(terms, other)
        model, kept = own.model, self.kept
        schedule_ms = (
            kept.launch_ms[model]
            + kept.kernels[model] * launch_delay_ms(self.start.gpu, 2)
            + terms.shared_launch_ms[model]
        )
        stretched_ms = active_ms * (1 + terms.cache_sensitivity[model] * other_cache)
        gpu_ms = (schedule_ms + stretched_ms) * self._slowdown(terms, power_w + other_w)
        transfer_ms = kept.transfer_ms[model] * own.batch * terms.pcie_contention[model]
        return np.asarray((gpu_ms + transfer_ms) / self.own_ms[chosen] - 1)

    def _solo(self, terms: _Terms, rows: _Rows) -> tuple[FloatArray, FloatArray, FloatArray]:
        """k_act, p and c of every process alone."""
        k, kept, batch = terms.k[rows.model], self.kept, rows.batch
        work = k[:, 0] * batch**2 + k[:, 1] * batch + k[:, 2]
        active_ms = work / (rows.share_percent + k[:, 3]) + k[:, 4]
        ability = 1000.0 * batch / active_ms
        power_w = kept.power_slope[rows.model] * ability + kept.power_offset_w[rows.model]
        return active_ms, power_w, kept.cache_slope[rows.model] * ability + kept.cache_offset_percent[rows.model]

    def _slowdown(self, terms: _Terms, power_w: FloatArray) -> FloatArray:
        gpu = self.start.gpu
        excess_w = np.maximum(gpu.idle_w + power_w - gpu.power_cap_w, 0.0)
        clock = np.maximum(gpu.clock_max_mhz + terms.clock_mhz_per_w * excess_w, 0.05 * gpu.clock_max_mhz)
        return np.asarray(gpu.clock_max_mhz / clock, np.float64)

    def profile(self, terms: _Terms, source: str) -> InterferenceProfile:
        """The profile that predicts with these coefficients; models that were not measured are left out."""
        models = {
            name: replace(
                self.start.models[name],
                **dict(zip(("k1", "k2", "k3", "k4", "k5"), map(float, terms.k[at]), strict=True)),
                cache_sensitivity=float(terms.cache_sensitivity[at]),
                pcie_contention=float(terms.pcie_contention[at]),
                shared_launch_ms=float(terms.shared_launch_ms[at]),
            )
            for at, name in enumerate(self.names)
        }
        gpu = replace(self.start.gpu, clock_mhz_per_w=terms.clock_mhz_per_w)
        return InterferenceProfile(gpu, models, "calibrated", source, Quality.MODELLED, (), self.start.notes)


def _rows(rows: Sequence[tuple[int, int, float]]) -> _Rows:
    model, batch, share = np.array(rows, np.float64).T
    return _Rows(model.astype(np.int64), batch, share)


def _check(start: InterferenceProfile, solo: Sequence[SoloLatency], pairs: Sequence[PairLatency]) -> None:
    alone = {each.model for each in solo}
    paired = {model for pair in pairs for model in (pair.model_1, pair.model_2)}
    if unknown := sorted((alone | paired) - start.models.keys()):
        raise DataError(
            f"measurements of {', '.join(unknown)}, which the profile of {start.gpu.name} does not know",
            hint="start from a profile that holds every measured model",
        )
    if missing := sorted(paired - alone):
        raise DataError(f"pairs of {', '.join(missing)} but no solo latencies", hint="measure them alone too")
    if len(pairs) < _PAIRS_MIN:
        raise DataError(f"{len(pairs)} co-located pairs, at least {_PAIRS_MIN} are needed to calibrate")
    latencies = [each.latency_ms for each in solo] + [ms for p in pairs for ms in (p.latency_1_ms, p.latency_2_ms)]
    if not all(0 < latency_ms < math.inf for latency_ms in latencies):
        raise DataError("a measured latency is not above 0 ms")


def _fit(data: _Data, chosen: npt.NDArray[np.bool_]) -> _Terms:
    """The coefficients that fit all solo latencies and the chosen processes of pairs best."""
    from scipy.optimize import least_squares

    def errors(vector: FloatArray) -> FloatArray:
        terms = data.terms(vector)
        return np.concatenate([_SOLO_WEIGHT * data.alone_error(terms), data.pair_error(terms, chosen)])

    n = len(data.names)
    low = np.concatenate([np.full(5 * n, data.least_k), np.zeros(n), np.ones(n), np.zeros(n), np.full(1, 1e-3)])
    found = least_squares(
        errors, np.maximum(data.start_vector(), low), bounds=(low, np.inf), loss="soft_l1", f_scale=_OUTLIER_RATIO
    )
    return data.terms(found.x)
