"""What trials of a few configurations say about all of them: a service learned as a handful of parameters.

Joules a request are those of the idle GPUs plus each variant's own, in known shares; the latency is that of the
instances there are. So host time, device time, slowdown on slices and joules of each variant, and contention, jitter
and idle power of the service, explain every configuration through :mod:`joulery.perf.queues.pull_model`. Their
logarithms start from rough guesses tied to the yardstick, which has been measured, and are fitted to all trials
(Gauss-Newton on the posterior). What the parameters leave unexplained of a trial is taken to hold, the less the more
instances differ, for other configurations too (a Gaussian process); and what nobody can know yet is doubt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.gpu.mig import MigMenu
from joulery.perf.queues.pull_model import predict
from joulery.policies.serving.annealing import TrialMetrics
from joulery.policies.serving.configuration_graph import GraphSpace

_SLICE_EXPONENT = 0.92
"""A net that fills the GPU slows down with this power of the part it loses (A100: MISO, ParvaGPU measurements)."""
_SPREAD = np.array([0.05, 0.02])
"""How far, in logarithms, the closed form may be off the latency and the joules of a trial."""
_LEAST_DOUBT = np.array([0.04, 0.004])
"""What remains of that at least once it has been seen to be nearer."""
_GLANCE = np.array([0.12, 0.02])
"""Doubt about latency and joules that the parameters are taken to cause where it is not worked out."""
_BUSY = 0.6
"""Utilisation beyond which a queue decides the latency and a closed form is less and less sure."""
_NEAR_SATURATION = 0.8
"""How fast the doubt about a latency grows with the utilisation beyond that."""
_REACH = 0.6
"""Difference in the portions of instances at which what is unexplained of two configurations correlates by 1/e."""
_REPEAT = 0.1
"""Part of the unexplained that is a configuration's own."""
_ROUNDS = 4
"""Gauss-Newton steps a fit; the next trial's fit goes on from there."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The measured run that sets the promise: the most accurate variant on whole GPUs under the reference load.

    Attributes:
        metrics: What it showed; its latency is the limit.
        rate_rps: Requests a second of that run.
        row: Its configuration, where that was not the most accurate variant on a whole GPU.
        idle_ratio: The part of its joules that idle GPUs are guessed to take; what is counted above idle has little.
    """

    metrics: TrialMetrics
    rate_rps: float
    row: int | None = None
    idle_ratio: float = 0.65


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What is known before the first trial.

    Attributes:
        space: The configurations of one GPU, all GPUs alike, or of all GPUs together (``copies`` of 1); its variants in
            order of accuracy, least first.
        menu: How a GPU is cut.
        accuracy_ratio: Accuracy of each variant, float64[variants].
        gpus: GPUs that serve.
        rate_rps: Demand.
        yardstick: The run that sets the promise.
        copies: How often a configuration of the space runs; on every GPU when None.
    """

    space: GraphSpace
    menu: MigMenu
    accuracy_ratio: FloatArray
    gpus: int
    rate_rps: float
    yardstick: Baseline
    copies: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PredictedTrial:
    """What trials of some configurations would show.

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


def _first_guess(setting: Setting) -> tuple[FloatArray, FloatArray]:
    """Means and standard deviations of the logarithms of the parameters.

    Four per variant (host time, device time and joules against the level of all, slowdown against a net that fills the
    GPU), then seven of the service: levels of host and device time, contention, jitter, spread of sizes, idle watts of
    a GPU, length of waits against the closed form's.
    """
    variants = len(setting.space.variants)
    below = np.arange(variants) - (variants - 1.0)  # 0 for the most accurate, then -1, -2 ...
    limit_s, energy_j = setting.yardstick.metrics.latency_s, setting.yardstick.metrics.energy_j
    idle = setting.yardstick.idle_ratio
    idle_w = idle * energy_j * setting.yardstick.rate_rps / setting.gpus
    mean = (
        np.zeros(variants),
        0.5 * below,
        np.linspace(-1.0, 0.0, variants),
        math.log((1 - idle) * energy_j) + below,
        np.log([0.6 * limit_s, 0.2 * limit_s, 0.1, 0.03 * limit_s, 0.15, idle_w, 1.0]),
    )
    per_variant = np.repeat([0.15, 0.5, 0.5, 0.8], variants)
    return np.concatenate(mean), np.concatenate((per_variant, [0.35, 0.6, 0.7, 0.7, 0.9, 0.3, 0.4]))


class LearnedService:
    """A service as far as it is known; :meth:`learn` makes it known better."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._mean, self._scale = _first_guess(setting)
        self._at = np.zeros(len(self._mean))  # parameters, in standard deviations from the first guess
        self._covariance: FloatArray = np.eye(len(self._mean))
        self._fitted = -1
        slices = np.array([setting.menu.compute_slices / profile.compute_slices for profile in setting.menu.profiles])
        self._excess = np.tile(slices**_SLICE_EXPONENT - 1.0, len(setting.space.variants))
        self._variant_of = np.repeat(np.arange(len(setting.space.variants)), len(slices))
        whole = [(setting.space.variants[-1], setting.menu.profiles[0].name)]
        row = setting.yardstick.row
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
        """Fit to every trial so far, by row, and to the yardstick."""
        if len(known) == self._fitted:
            return
        self._fitted = len(known)
        rows = np.array([self._base, *known], np.int64)
        rates = np.array([self._setting.yardstick.rate_rps] + [self._setting.rate_rps] * len(known))
        seen = [self._setting.yardstick.metrics, *known.values()]
        target = np.log(np.array([[each.latency_s, each.energy_j] for each in seen]))
        precision: FloatArray = np.asarray(np.eye(len(self._at)), np.float64)
        for _ in range(_ROUNDS):
            found, slope = self._linearised(rows, rates)
            spread: FloatArray = np.tile(_SPREAD, (len(rows), 1))
            # A saturated queue grows with the length of the trial: its latency says "too slow" and little else.
            spread[:, 0] += 2.0 * np.clip(found[:, 2] - _BUSY, 0.0, 1.0)
            residual = np.clip((target - found[:, :2]) / spread, -8.0, 8.0).ravel()
            lean = (slope / spread[..., None]).reshape(-1, len(self._at))
            precision = np.asarray(lean.T @ lean + np.eye(len(self._at)), np.float64)
            step = np.linalg.solve(precision, lean.T @ residual - self._at)
            self._at = self._at + step * min(1.0, 1.5 / max(float(np.abs(step).max()), 1e-9))
        self._covariance = np.asarray(np.linalg.inv(precision), np.float64)
        off = target - self._forward(self._at[None], rows, rates)[0, :, :2]
        self._remember(rows[1:], np.clip(off, -1.0, 1.0)[1:])

    def outlook(self, rows: IntArray) -> PredictedTrial:
        """What trials of these rows would show, as well as it is known."""
        found, slope = self._linearised(rows, np.full(len(rows), self._setting.rate_rps))
        return self._corrected(rows, found, np.einsum("rki,ij,rkj->rk", slope, self._covariance, slope))

    def glance(self, rows: IntArray) -> PredictedTrial:
        """The same at a fraction of the work: the doubt that the parameters cause is a guess."""
        found = self._forward(self._at[None], rows, np.full(len(rows), self._setting.rate_rps))[0]
        return self._corrected(rows, found, np.tile(_GLANCE**2, (len(rows), 1)))

    def _remember(self, rows: IntArray, off: FloatArray) -> None:
        """Keep what the parameters leave unexplained of each trial."""
        # With few trials the fit passes through them; then the first guess of the error stands.
        self._doubt = np.maximum(np.sqrt((4 * _SPREAD**2 + (off**2).sum(axis=0)) / (4 + len(off))), _LEAST_DOUBT)
        self._tried, self._off = rows, off
        self._weights = np.linalg.inv(self._alike(rows, rows) + _REPEAT * np.eye(len(rows)))

    def _alike(self, rows: IntArray, others: IntArray) -> FloatArray:
        """Correlation of what is unexplained, 1 for equal configurations, less the more their instances differ."""
        apart = np.abs(self._portions[rows][:, None] - self._portions[others][None]).sum(axis=-1)
        return np.asarray(np.exp(-apart / _REACH), np.float64)

    def _corrected(self, rows: IntArray, found: FloatArray, variance: FloatArray) -> PredictedTrial:
        """Add what trials of like configurations left unexplained, and the doubt that they leave."""
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
        worst = 3.0 * setting.yardstick.metrics.latency_s * np.maximum(pool.utilisation, 1.0) ** 4
        return np.stack([np.log(np.minimum(pool.latency_s, worst)), np.log(energy_j), pool.utilisation, accuracy], -1)
