"""A model of a service with a few parameters, fitted to trials: predicts every configuration from a few measured ones.

Joules a request are those of the idle GPUs plus each variant's own, in known shares; the latency follows from the
instances. Host time, device time, slowdown on slices and joules of each variant, and contention, jitter and idle power
of the service, explain every configuration through :mod:`joulery.perf.queues.pull_model`. Their logarithms start from a
prior tied to the measured baseline and are fitted to all trials (Gauss-Newton on the posterior). The residual of a
trial is assumed to hold for other configurations too, less the more their instances differ (a Gaussian process).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.gpu.mig import MigMenu
from joulery.perf.queues.pull_model import predict
from joulery.policies.serving.search.annealing import TrialMetrics
from joulery.policies.serving.search.configuration_graph import GraphSpace

_SLICE_EXPONENT = 0.92
"""A net that fills the GPU slows down by this power of GPU over slice size (A100: MISO, ParvaGPU measurements)."""
_SPREAD = np.array([0.05, 0.02])
"""Prior error of the closed form: log latency and log joules of a trial."""
_LEAST_DOUBT = np.array([0.04, 0.004])
"""Smallest error that is assumed after trials have shown the closed form to be more exact."""
_GLANCE = np.array([0.12, 0.02])
"""Standard deviation of log latency and log joules assumed where the parameters' own is not computed."""
_BUSY = 0.6
"""Utilisation beyond which the queue dominates the latency and the closed form becomes uncertain."""
_NEAR_SATURATION = 0.8
"""Growth of that uncertainty with utilisation."""
_REACH = 0.6
"""Difference in the shares of instances at which the residuals of two configurations correlate by 1/e."""
_REPEAT = 0.1
"""Part of a residual that is a configuration's own."""
_ROUNDS = 4
"""Gauss-Newton steps of a fit; the fit after the next trial continues from there."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The measured run that candidates are compared with: the most accurate variant under the reference load.

    Attributes:
        metrics: Measured metrics of the run; the latency scales the prior.
        rate_rps: Requests a second of that run.
        row: Its configuration; the most accurate variant on a whole GPU when None.
        idle_ratio: Assumed part of its joules that idle GPUs take; small where joules are counted above idle.
    """

    metrics: TrialMetrics
    rate_rps: float
    row: int | None = None
    idle_ratio: float = 0.65


@dataclass(frozen=True, slots=True, eq=False)
class ServiceSetting:
    """Description of a service before its first trial.

    Attributes:
        space: The configurations of one GPU, all GPUs alike, or of all GPUs together (``copies`` of 1); its variants in
            order of accuracy, least first.
        menu: MIG partitions of a GPU.
        accuracy_ratio: Accuracy of each variant, float64[variants].
        gpus: GPUs that serve.
        rate_rps: Demand.
        baseline: The run that sets the latency limit.
        copies: How often a configuration of the space runs; on every GPU when None.
        service_s: Profiled mean service time of each variant on each slice, float64[variants, profiles], NaN where not
            measured; None for no profile.
        request_j: Profiled joules a request of each variant above idle, float64[variants]; None for no profile.
    """

    space: GraphSpace
    menu: MigMenu
    accuracy_ratio: FloatArray
    gpus: int
    rate_rps: float
    baseline: Baseline
    copies: int | None = None
    service_s: FloatArray | None = None
    request_j: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PredictedTrial:
    """Predicted outcome of trials of some configurations.

    Attributes:
        log_latency: Logarithm of the latency in seconds, float64[n].
        latency_doubt: Its standard deviation.
        energy_j: Joules a request.
        energy_doubt: Standard deviation of the logarithm of the joules.
        accuracy_ratio: Mean accuracy.
    """

    log_latency: FloatArray
    latency_doubt: FloatArray
    energy_j: FloatArray
    energy_doubt: FloatArray
    accuracy_ratio: FloatArray


def _prior(setting: ServiceSetting) -> tuple[FloatArray, FloatArray]:
    """Means and standard deviations of the logarithms of the parameters.

    Four per variant (host time, device time and joules against the level of all, slowdown against a net that fills the
    GPU), then seven of the service: levels of host and device time, contention, jitter, spread of sizes, idle watts of
    a GPU, length of waits against the closed form's.
    """
    if setting.service_s is not None and setting.request_j is not None:
        return _profiled_prior(setting, setting.service_s, setting.request_j)
    variants = len(setting.space.variants)
    below = np.arange(variants) - (variants - 1.0)  # 0 for the most accurate, then -1, -2 ...
    limit_s, energy_j = setting.baseline.metrics.latency_s, setting.baseline.metrics.energy_j
    idle = setting.baseline.idle_ratio
    idle_w = idle * energy_j * setting.baseline.rate_rps / setting.gpus
    mean = (
        np.zeros(variants),
        0.5 * below,
        np.linspace(-1.0, 0.0, variants),
        math.log((1 - idle) * energy_j) + below,
        np.log([0.6 * limit_s, 0.2 * limit_s, 0.1, 0.03 * limit_s, 0.15, idle_w, 1.0]),
    )
    per_variant = np.repeat([0.15, 0.5, 0.5, 0.8], variants)
    return np.concatenate(mean), np.concatenate((per_variant, [0.35, 0.6, 0.7, 0.7, 0.9, 0.3, 0.4]))


_HOST_PART = 0.3
"""Part of a profiled service time that is taken for host time; the rest is the device's."""


def _profiled_prior(
    setting: ServiceSetting, service_s: FloatArray, request_j: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """As :func:`_prior`, from a measured profile; its times of each variant do not depend on the baseline's queue."""
    variants, slices = service_s.shape
    known = np.isfinite(service_s)
    first, last = known.argmax(axis=1), slices - 1 - known[:, ::-1].argmax(axis=1)  # largest, smallest slice measured
    at = np.arange(variants)
    whole, small = service_s[at, first], service_s[at, last]
    cut = np.array([setting.menu.compute_slices / profile.compute_slices for profile in setting.menu.profiles])
    excess = cut**_SLICE_EXPONENT - 1.0
    # Service time on a slice is host + device * (1 + excess * slow): solved for the ratio of the two slices measured.
    ratio = small / whole
    device = 1.0 - _HOST_PART
    below = excess[last] - ratio * excess[first]
    slow = np.where(last > first, (ratio - 1.0) / (device * np.where(below > 0, below, np.inf)), 1.0)
    slow = np.clip(slow, 1e-2, 3.0)
    alone = whole / (_HOST_PART + device * (1.0 + excess[first] * slow))  # on a device that is not cut
    idle_w = setting.baseline.idle_ratio * float(request_j[-1]) * setting.baseline.rate_rps / setting.gpus
    mean = (
        np.log(alone / alone[-1]),
        np.log(alone / alone[-1]),
        np.log(slow),
        np.log(request_j),
        np.log([_HOST_PART * alone[-1], device * alone[-1], 0.02, 0.05 * alone[-1], 0.1, max(idle_w, 1e-9), 1.0]),
    )
    per_variant = np.repeat([0.1, 0.1, 0.2, 0.1], variants)
    return np.concatenate(mean), np.concatenate((per_variant, [0.2, 0.2, 0.7, 0.7, 0.7, 0.3, 0.4]))


class LearnedService:
    """Model of a service that predicts trials; :meth:`learn` fits it to the trials so far."""

    def __init__(self, setting: ServiceSetting) -> None:
        self._setting = setting
        self._mean, self._scale = _prior(setting)
        self._at = np.zeros(len(self._mean))  # parameters, in standard deviations from the prior
        self._covariance: FloatArray = np.eye(len(self._mean))
        self._fitted = -1
        slices = np.array([setting.menu.compute_slices / profile.compute_slices for profile in setting.menu.profiles])
        self._excess = np.tile(slices**_SLICE_EXPONENT - 1.0, len(setting.space.variants))
        self._variant_of = np.repeat(np.arange(len(setting.space.variants)), len(slices))
        whole = [(setting.space.variants[-1], setting.menu.profiles[0].name)]
        row = setting.baseline.row
        self._base = setting.space.index(setting.space.vector(whole)) if row is None else row
        graphs = setting.space.graphs
        self._portions = graphs / graphs.sum(axis=1, keepdims=True)
        # A configuration uses few of the edges: predict those alone, padded to the same number with none.
        used = int((graphs > 0).sum(axis=1).max())
        self._edges = np.argsort(graphs == 0, axis=1, kind="stable")[:, :used]
        self._counts = (setting.copies or setting.gpus) * np.take_along_axis(graphs, self._edges, axis=1).astype(
            np.float64
        )
        self._remember(np.zeros(0, np.int64), np.zeros((0, 2)))

    def learn(self, known: Mapping[int, TrialMetrics]) -> None:
        """Fit to every trial so far, by row, and to the baseline."""
        if len(known) == self._fitted:
            return
        self._fitted = len(known)
        rows = np.array([self._base, *known], np.int64)
        rates = np.array([self._setting.baseline.rate_rps] + [self._setting.rate_rps] * len(known))
        seen = [self._setting.baseline.metrics, *known.values()]
        target = np.log(np.array([[each.latency_s, each.energy_j] for each in seen]))
        precision: FloatArray = np.asarray(np.eye(len(self._at)), np.float64)
        for _ in range(_ROUNDS):
            found, slope = self._linearised(rows, rates)
            spread: FloatArray = np.tile(_SPREAD, (len(rows), 1))
            # The queue of a saturated trial grows with its length: the latency only says "too slow".
            spread[:, 0] += 2.0 * np.clip(found[:, 2] - _BUSY, 0.0, 1.0)
            residual = np.clip((target - found[:, :2]) / spread, -8.0, 8.0).ravel()
            lean = (slope / spread[..., None]).reshape(-1, len(self._at))
            precision = np.asarray(lean.T @ lean + np.eye(len(self._at)), np.float64)
            step = np.linalg.solve(precision, lean.T @ residual - self._at)
            self._at = self._at + step * min(1.0, 1.5 / max(float(np.abs(step).max()), 1e-9))
        self._covariance = np.asarray(np.linalg.inv(precision), np.float64)
        off = target - self._forward(self._at[None], rows, rates)[0, :, :2]
        self._remember(rows[1:], np.clip(off, -1.0, 1.0)[1:])

    def predict(self, rows: IntArray) -> PredictedTrial:
        """Predict the trials of some rows."""
        found, slope = self._linearised(rows, np.full(len(rows), self._setting.rate_rps))
        return self._corrected(rows, found, np.einsum("rki,ij,rkj->rk", slope, self._covariance, slope))

    def predict_roughly(self, rows: IntArray) -> PredictedTrial:
        """As :meth:`predict`, at a fraction of the work: the uncertainty of the parameters is assumed."""
        found = self._forward(self._at[None], rows, np.full(len(rows), self._setting.rate_rps))[0]
        return self._corrected(rows, found, np.tile(_GLANCE**2, (len(rows), 1)))

    def _remember(self, rows: IntArray, off: FloatArray) -> None:
        """Keep the residual of each trial."""
        # With few trials the fit passes through them; then the prior error stands.
        self._doubt = np.maximum(np.sqrt((4 * _SPREAD**2 + (off**2).sum(axis=0)) / (4 + len(off))), _LEAST_DOUBT)
        self._tried, self._off = rows, off
        self._weights = np.linalg.inv(self._alike(rows, rows) + _REPEAT * np.eye(len(rows)))

    def _alike(self, rows: IntArray, others: IntArray) -> FloatArray:
        """Correlation of residuals: 1 for equal configurations, less the more their instances differ."""
        apart = np.abs(self._portions[rows][:, None] - self._portions[others][None]).sum(axis=-1)
        return np.asarray(np.exp(-apart / _REACH), np.float64)

    def _corrected(self, rows: IntArray, found: FloatArray, variance: FloatArray) -> PredictedTrial:
        """Add the residuals of similar configurations, and the remaining uncertainty."""
        alike = self._alike(rows, self._tried)
        explained = np.einsum("ri,ij,rj->r", alike, self._weights, alike)
        left = np.maximum(1.0 - explained, 0.05)[:, None] * self._doubt**2
        left[:, 0] += (_NEAR_SATURATION * np.clip(found[:, 2] - _BUSY, 0.0, 0.5)) ** 2
        mean, spread = found[:, :2] + alike @ self._weights @ self._off, np.sqrt(variance + left)
        return PredictedTrial(mean[:, 0], spread[:, 0], np.exp(mean[:, 1]), spread[:, 1], found[:, 3])

    def _linearised(self, rows: IntArray, rates: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Outcomes float64[rows, 4], and slopes of the first two, float64[rows, 2, parameters]."""
        step = 1e-3
        points = np.concatenate([self._at[None], self._at[None] + step * np.eye(len(self._at))])
        found = self._forward(points, rows, rates)
        return found[0], np.moveaxis((found[1:, :, :2] - found[0, :, :2]) / step, 0, -1)

    def _forward(self, points: FloatArray, rows: IntArray, rates: FloatArray) -> FloatArray:
        """Outcomes under sets of parameters, float64[points, rows, 4]: log s, log J, utilisation, accuracy."""
        setting, variants, edges = self._setting, len(self._setting.space.variants), self._edges[rows]
        values = self._mean + self._scale * points
        each = values[:, : 4 * variants].reshape(len(points), 4, variants)
        host, device, slow, joules = np.moveaxis(each[..., self._variant_of[edges]], 1, 0)
        host_level, device_level, contention, jitter, size_cv, idle, wait = values[:, 4 * variants :].T[..., None]
        pool = predict(
            self._counts[rows],
            np.exp(host_level[..., None] + host),
            np.exp(device_level[..., None] + device) * (1 + self._excess[edges] * np.exp(slow)),
            np.exp(contention),
            np.exp(jitter),
            np.exp(size_cv),
            rates,
            np.exp(wait),
        )
        energy_j = setting.gpus * np.exp(idle) / rates + (pool.share * np.exp(joules)).sum(axis=-1)
        accuracy = (pool.share * setting.accuracy_ratio[self._variant_of[edges]]).sum(axis=-1)
        # Beyond its capacity a queue has no latency; a finite, steep stand-in keeps the fit going the right way.
        worst = 3.0 * setting.baseline.metrics.latency_s * np.maximum(pool.utilisation, 1.0) ** 4
        return np.stack([np.log(np.minimum(pool.latency_s, worst)), np.log(energy_j), pool.utilisation, accuracy], -1)


@dataclass(slots=True, eq=False)
class FittedServices:
    """Cache of services fitted to sequences of trials, so that a policy without own state need not fit them again.

    A fit starts from the fit to all trials but the last. Equal arguments therefore give equal services, whether they
    are cached or fitted again.
    """

    _fits: dict[Any, LearnedService] = field(default_factory=dict)

    def fitted(self, key: Hashable, setting: ServiceSetting, known: Mapping[int, TrialMetrics]) -> LearnedService:
        """The service fitted to these trials, one after the other in their order.

        Args:
            key: Identifies the setting.
            setting: The service before its first trial.
            known: Trials by row.
        """
        trials = tuple(known.items())
        count = next((n for n in range(len(trials), -1, -1) if (key, trials[:n]) in self._fits), -1)
        service = LearnedService(setting) if count < 0 else copy(self._fits[key, trials[:count]])
        for length in range(max(count, -1) + 1, len(trials) + 1):
            service.learn(dict(trials[:length]))
            self._fits[key, trials[:length]] = service
            service = copy(service)
        while len(self._fits) > _REMEMBERED:
            del self._fits[next(iter(self._fits))]
        return self._fits[key, trials]


_REMEMBERED = 64
"""Largest number of fits that are cached."""
