"""Cost of the same requests under another layout: replayed, calibrated, with an interval.

The same arrivals are played through the queue twice (:mod:`~joulery.perf.queues.pull_queue`): once with the layouts
that really ran, once with the baseline's. The first has a measured counterpart, so the model's own error is known and
reported. The second has none; its cost is corrected by what was seen of its variant in the same run, live cost over
modelled cost. Where the variant was never seen live, the corrections of the others bound it.

docs/how-it-works/how-savings-are-computed.md says what could fool this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError
from joulery.domain.serving.profile import SliceProfile
from joulery.perf.queues.pull_queue import Replay, replay, uniform_draws

MIN_REQUESTS = 30
"""A variant answered fewer requests than this: its live cost says nothing."""
_REPLICATES = 1000
_BLOCK = 50
"""Requests resampled together: neighbours in time share whatever else the machine was doing."""


@dataclass(frozen=True, slots=True, eq=False)
class CounterfactualAnswers:
    """The requests of a run that were answered, in order of arrival.

    Attributes:
        arrival_s: Unix seconds, float64[n].
        variant: The variant that answered each, n names.
        cpu_s: CPU seconds each cost in its replica, float64[n].
        latency_s: Arrival to answer, float64[n].
        g_per_kwh: Intensity when it was answered, float64[n]; NaN where unknown.
    """

    arrival_s: FloatArray
    variant: Sequence[str]
    cpu_s: FloatArray
    latency_s: FloatArray
    g_per_kwh: FloatArray

    def __post_init__(self) -> None:
        lengths = {len(self.arrival_s), len(self.variant), len(self.cpu_s), len(self.latency_s), len(self.g_per_kwh)}
        if len(lengths) != 1:
            raise DataError(f"columns of requests have different lengths: {sorted(lengths)}")
        if bool(np.any(np.diff(self.arrival_s) < 0)):
            raise DataError("requests must be in order of arrival")

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True, eq=False)
class Counterfactual:
    """A run beside its baseline. Ratios are of the requests' own cost; idle is the same in both and left out.

    Attributes:
        requests: How many requests it rests on.
        cpu_s: CPU seconds they cost.
        base_cpu_s: CPU seconds they would have cost each, calibrated, float64[n].
        saving_ratio: Carbon saved relative to the baseline; energy where no intensity is known.
        low_ratio, high_ratio: 95 % interval around it.
        energy_saving_ratio: Energy saved relative to the baseline.
        base_latency_s: The quantile of the latencies under the baseline, modelled.
        cpu_error_ratio: Modelled over measured cost of the layouts that really ran, minus one.
        latency_error_ratio: The same of the latency quantile.
        correction_ratio: Live over modelled cost by variant, of the variants seen often enough.
        seen_live: Whether the baseline's variants were; if not, the others' corrections bound it.
    """

    requests: int
    cpu_s: float
    base_cpu_s: FloatArray
    saving_ratio: float
    low_ratio: float
    high_ratio: float
    energy_saving_ratio: float
    base_latency_s: float
    cpu_error_ratio: float
    latency_error_ratio: float
    correction_ratio: Mapping[str, float]
    seen_live: bool

    @property
    def low_factor(self) -> float:
        """The baseline's lower bound over its estimate."""
        return (1 - self.saving_ratio) / (1 - self.low_ratio)

    @property
    def high_factor(self) -> float:
        """The baseline's upper bound over its estimate."""
        return (1 - self.saving_ratio) / (1 - self.high_ratio)


def compare(
    answered: CounterfactualAnswers,
    ran: Sequence[tuple[float, Sequence[SliceProfile]]],
    base: Sequence[SliceProfile],
    *,
    quantile: float = 0.95,
    overhead_s: float = 0.0,
    seed: int = 0,
) -> Counterfactual:
    """Replay the requests of a run under the baseline.

    Args:
        answered: The requests.
        ran: ``(from_s, instances)``: the layouts that really ran.
        base: Instances of the baseline.
        quantile: Of the latencies to compare.
        overhead_s: What a request spends outside queue and replica.
        seed: Of the service times and of the bootstrap.

    Raises:
        DataError: No request was answered.
    """
    if len(answered) == 0:
        raise DataError("no request was answered: there is nothing to compare")
    picks = uniform_draws(len(answered), seed)
    modelled = replay(answered.arrival_s, picks, ran)
    modelled_base = replay(answered.arrival_s, picks, [(-math.inf, base)])
    weight = _carbon_weight(answered)
    corrections = _corrections(answered, modelled, ran)
    own = sorted({item.variant for item in base})
    seen_live = all(variant in corrections for variant in own)
    estimate, spread = _base_correction(answered, corrections, own, base, seed)
    base_cpu_s = modelled_base.cpu_s * estimate
    low, high = (float(value) / estimate for value in np.quantile(spread, [0.025, 0.975]))
    actual, baseline = float(answered.cpu_s @ weight), float(base_cpu_s @ weight)
    latency_s = float(np.quantile(modelled.latency_s, quantile)) + overhead_s
    return Counterfactual(
        requests=len(answered),
        cpu_s=float(answered.cpu_s.sum()),
        base_cpu_s=base_cpu_s,
        saving_ratio=1 - actual / baseline,
        low_ratio=1 - actual / (baseline * min(low, 1.0)),
        high_ratio=1 - actual / (baseline * max(high, 1.0)),
        energy_saving_ratio=1 - float(answered.cpu_s.sum() / base_cpu_s.sum()),
        base_latency_s=float(np.quantile(modelled_base.latency_s, quantile)) + overhead_s,
        cpu_error_ratio=float(modelled.cpu_s.sum() / answered.cpu_s.sum()) - 1,
        latency_error_ratio=latency_s / float(np.quantile(answered.latency_s, quantile)) - 1,
        correction_ratio={variant: float(np.mean(ratios)) for variant, ratios in corrections.items()},
        seen_live=seen_live,
    )


def _carbon_weight(answered: CounterfactualAnswers) -> FloatArray:
    """Grams a joule, up to a constant; one for all where no intensity is known. Requests in a gap do not count."""
    known = np.isfinite(answered.g_per_kwh)
    if not bool(known.any()) or not float(np.sum(answered.g_per_kwh[known])) > 0:
        return np.ones(len(answered))
    return np.where(known, answered.g_per_kwh, 0.0)


def _corrections(
    answered: CounterfactualAnswers, modelled: Replay, ran: Sequence[tuple[float, Sequence[SliceProfile]]]
) -> dict[str, FloatArray]:
    """Live cost of each request over the mean modelled cost of its variant, for the variants seen often enough."""
    names = [[item.variant for item in instances] for _, instances in ran]
    model_variant = np.array([names[e][s] for e, s in zip(modelled.epoch, modelled.server, strict=True)])
    live_variant = np.array(answered.variant)
    found: dict[str, FloatArray] = {}
    for variant in sorted(set(answered.variant)):
        live, model = answered.cpu_s[live_variant == variant], modelled.cpu_s[model_variant == variant]
        if min(len(live), len(model)) >= MIN_REQUESTS:
            found[variant] = live / model.mean()
    return found


def _base_correction(
    answered: CounterfactualAnswers,
    corrections: Mapping[str, FloatArray],
    own: Sequence[str],
    base: Sequence[SliceProfile],
    seed: int,
) -> tuple[float, FloatArray]:
    """Live over modelled cost of the baseline: the estimate and its bootstrap distribution.

    Of its own variants where they were seen live; else the mean of the others' corrections, and anywhere between them
    and no correction at all, widened by the sampling error of the baseline's profile.
    """
    rng = np.random.default_rng([seed, 2])
    if all(variant in corrections for variant in own):
        pooled = np.concatenate([corrections[variant] for variant in own])
        return float(pooled.mean()), _bootstrap_means(pooled, rng, _BLOCK)
    profile = np.concatenate([item.loaded.cpu_s / item.loaded.mean_cpu_s for item in base])
    spread = _bootstrap_means(profile, rng, 1)
    means = [float(np.mean(ratios)) for ratios in corrections.values()] or [1.0]
    return float(np.mean(means)), np.asarray(spread * rng.uniform(min(*means, 1.0), max(*means, 1.0), len(spread)))


def _bootstrap_means(values: FloatArray, rng: np.random.Generator, block: int) -> FloatArray:
    """Means of samples with replacement in runs of ``block`` consecutive values, float64[1000]."""
    edges = np.arange(0, len(values), block)
    sums, counts = np.add.reduceat(values, edges), np.diff(np.append(edges, len(values)))
    sampled = rng.integers(0, len(edges), (_REPLICATES, len(edges)))
    return np.asarray(sums[sampled].sum(axis=1) / counts[sampled].sum(axis=1))
