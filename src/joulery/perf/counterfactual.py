"""Cost of the same requests under a layout that was not observed, replayed from its profile, with an uncertainty band.

The same arrivals are simulated in the queue twice (:mod:`~joulery.perf.queues.pull_queue`): once with the layouts that
really ran, once with the baseline's. The first has a measured counterpart, so the model's own error is known and
reported. The second has none. Where its variants answered requests in the same run, its cost is corrected by their
ratio of live to modelled cost. Where they never did, it is not corrected: the error of another variant's profile shows
how wrong profiles can be, but does not apply to this one. The band is then as wide as the largest of those errors, and
never less than :data:`UNSEEN_BAND`.

A measured baseline replaces all of this: :mod:`joulery.perf.switchback`.
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
"""Least number of answered requests with which a variant's live cost is used."""
UNSEEN_BAND = 1.5
"""Least error assumed for the profile of a variant that never ran, as a factor in both directions."""
SHADOW_BAND = 1.2
"""Error assumed for shadow replays against the cost under load, as a factor in both directions."""
STEERED_RATIO = 0.02
"""Largest share of answers by variants other than the layout's own at which the replay's errors are meaningful."""
_FEWEST_BLOCKS = 10
"""Blocks that a bootstrap resamples at least: with one or two, its interval has no width."""
_REPLICATES = 1000
_BLOCK = 50
"""Requests resampled together: requests close in time share the machine's other load."""


@dataclass(frozen=True, slots=True, eq=False)
class CounterfactualAnswers:
    """The requests of a run that were answered, in order of arrival.

    Attributes:
        arrival_s: Unix seconds, float64[n].
        variant: The variant that answered each, n names.
        cpu_s: CPU seconds of each in its replica, float64[n].
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
    """A run compared with its baseline. Ratios are of the requests' own cost, without idle power, equal in both.

    Attributes:
        requests: Number of requests compared.
        cpu_s: CPU seconds of these requests.
        base_cpu_s: CPU seconds of each request under the baseline, float64[n].
        saving_ratio: Carbon saved relative to the baseline; energy where no intensity is known.
        low_ratio, high_ratio: 95 % interval around it; an assumed band where the baseline's variants never ran.
        energy_saving_ratio: Energy saved relative to the baseline.
        base_latency_s: The quantile of the latencies under the baseline, modelled.
        cpu_error_ratio: Modelled over measured cost of the layouts that really ran, minus one.
        latency_error_ratio: The same for the latency quantile.
        correction_ratio: Live over modelled cost by variant, for the variants seen often enough.
        seen_live: Whether the baseline's variants were seen often enough.
        shadowed: Number of shadow replays behind the correction, where the variants were not seen live.
        steered_ratio: Share of the answers by variants other than their layout's own. The replay follows the layouts,
            so its errors are meaningless where this is more than :data:`STEERED_RATIO`.
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
    shadowed: int = 0
    steered_ratio: float = 0.0

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
    shadow: Mapping[str, FloatArray] | None = None,
    batch_delay_s: float = 0.0,
) -> Counterfactual:
    """Replay the requests of a run under the baseline.

    Args:
        answered: The requests.
        ran: ``(from_s, instances)``: the layouts that really ran.
        base: Instances of the baseline.
        quantile: Quantile of the latencies to compare.
        overhead_s: Time that a request spends outside queue and replica.
        seed: Seed of the service times and of the bootstrap.
        shadow: Live over modelled cost of each shadow replay, by variant; used for variants that were not seen live.
        batch_delay_s: Time that a batch that is not full waits for more requests.

    Raises:
        DataError: No request was answered.
    """
    if len(answered) == 0:
        raise DataError("no request was answered: there is nothing to compare")
    picks = uniform_draws(len(answered), seed)
    modelled = replay(answered.arrival_s, picks, ran, batch_delay_s)
    modelled_base = replay(answered.arrival_s, picks, [(-math.inf, base)], batch_delay_s)
    weight = _carbon_weight(answered)
    corrections = _corrections(answered, modelled, ran)
    own = sorted({item.variant for item in base})
    seen_live = all(variant in corrections for variant in own)
    replayed = _replayed(shadow or {}, own, corrections)
    corrections = {**corrections, **replayed}
    estimate, spread = _base_correction(answered, corrections, own, base, seed)
    if replayed:  # without load, and at idle times only: the estimate may be off either way
        spread = spread * np.where(np.arange(_REPLICATES) % 2, SHADOW_BAND, 1 / SHADOW_BAND)
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
        shadowed=sum(len(ratios) for ratios in replayed.values()),
        steered_ratio=_steered_ratio(answered, ran),
    )


def _steered_ratio(answered: CounterfactualAnswers, ran: Sequence[tuple[float, Sequence[SliceProfile]]]) -> float:
    """Share of the answers by variants that the layout in force did not run as its own."""
    own = [frozenset(item.variant for item in instances) for _, instances in ran]
    index = np.searchsorted([from_s for from_s, _ in ran], answered.arrival_s, "right") - 1
    others = [name not in own[max(0, at)] for name, at in zip(answered.variant, index.tolist(), strict=True)]
    return sum(others) / len(others)


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


def _replayed(
    shadow: Mapping[str, FloatArray], own: Sequence[str], corrections: Mapping[str, FloatArray]
) -> dict[str, FloatArray]:
    """The shadow replays of the baseline's variants that were not seen live, where there are enough."""
    return {
        variant: ratios
        for variant, ratios in shadow.items()
        if variant in own and variant not in corrections and len(ratios) >= MIN_REQUESTS
    }


def _base_correction(
    answered: CounterfactualAnswers,
    corrections: Mapping[str, FloatArray],
    own: Sequence[str],
    base: Sequence[SliceProfile],
    seed: int,
) -> tuple[float, FloatArray]:
    """Live over modelled cost of the baseline: the estimate and its distribution.

    Both come from the baseline's own variants where they were seen live. Else the estimate is 1, and the distribution
    covers the band, widened by the sampling error of the baseline's profile.
    """
    rng = np.random.default_rng([seed, 2])
    if all(variant in corrections for variant in own):
        pooled = np.concatenate([corrections[variant] for variant in own])
        block = min(_BLOCK, max(1, len(pooled) // _FEWEST_BLOCKS))
        return float(pooled.mean()), _bootstrap_means(pooled, rng, block)
    profile = np.concatenate([item.loaded.cpu_s / item.loaded.mean_cpu_s for item in base])
    errors = [abs(math.log(float(np.mean(ratios)))) for ratios in corrections.values()]
    width = max(math.log(UNSEEN_BAND), *errors, 0.0)
    ends = np.exp(width * np.where(np.arange(_REPLICATES) % 2, 1.0, -1.0))
    return 1.0, np.asarray(_bootstrap_means(profile, rng, 1) * ends)


def _bootstrap_means(values: FloatArray, rng: np.random.Generator, block: int) -> FloatArray:
    """Means of samples with replacement in runs of ``block`` consecutive values, float64[1000]."""
    edges = np.arange(0, len(values), block)
    sums, counts = np.add.reduceat(values, edges), np.diff(np.append(edges, len(values)))
    sampled = rng.integers(0, len(edges), (_REPLICATES, len(edges)))
    return np.asarray(sums[sampled].sum(axis=1) / counts[sampled].sum(axis=1))
