"""Predictor of a layout's latency, energy and accuracy under a demand, from measured profiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.profile import Profile, SliceProfile
from joulery.perf.queues.pull_queue import capacity_rps, poisson_arrivals, replay, uniform_draws

SATURATION_RATIO = 0.95
"""Above this share of the capacity the queue has no useful steady state within a planning period: not predicted."""


BATCH_RATIO = 0.3
"""Share of the SLO that a batch may take: a request that just missed a batch waits for that one and its own."""


def batched_within(profile: Profile, max_batch: int, latency_s: float, quantile: float) -> Profile:
    """Limit the batches of a profile to sizes that leave each request enough time within an SLO.

    Args:
        profile: The profile.
        max_batch: Largest number of requests in a batch; 1 for no batches.
        latency_s: Latency of the SLO.
        quantile: Its quantile.
    """
    kept = []
    for entry in profile.entries:
        fits = [size for size, times in entry.batches.items() if times.quantile_s(quantile) <= BATCH_RATIO * latency_s]
        kept.append(entry.batched_to(min(max_batch, max(fits, default=1))))
    return replace(profile, entries=tuple(kept))


@dataclass(frozen=True, slots=True)
class LayoutMetrics:
    """Prediction of one layout under one demand.

    Attributes:
        latency_s: Quantile of the time from arrival to answer; infinite when the demand saturates the layout.
        energy_j: Joules above idle a request.
        accuracy_ratio: Mean over requests.
        shares: Share of the requests each variant answers, by variant.
        utilisation_ratio: Demand over capacity.
    """

    latency_s: float
    energy_j: float
    accuracy_ratio: float
    shares: Mapping[str, float]
    utilisation_ratio: float

    def as_dict(self) -> dict[str, Any]:
        """The prediction as a JSON-ready object; an infinite latency is null."""
        return {
            "latency_s": self.latency_s if math.isfinite(self.latency_s) else None,
            "energy_j": self.energy_j,
            "accuracy_ratio": self.accuracy_ratio,
            "shares": dict(self.shares),
            "utilisation_ratio": self.utilisation_ratio,
        }


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts layouts by replaying requests through a queue of their measured service times.

    Deterministic: the same arrivals and service-time samples for every layout, so differences are the layouts' own.

    Attributes:
        profile: Measured times and joules of each variant on each slice.
        accuracy_ratio: Accuracy of each variant.
        quantile: Quantile of the latency.
        overhead_s: Time of a request outside queue and replica (HTTP, copying).
        requests: Requests replayed; the first tenth only fills the queue.
        seed: Seed of arrivals and samples.
        batch_delay_s: Time that a batch that is not full waits for more requests.
    """

    profile: Profile
    accuracy_ratio: Mapping[str, float]
    quantile: float = 0.95
    overhead_s: float = 0.0
    requests: int = 3000
    seed: int = 0
    batch_delay_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The predictor as a JSON-ready object."""
        numbers = {name: getattr(self, name) for name in ("quantile", "overhead_s", "requests", "seed")}
        numbers |= {"batch_delay_s": self.batch_delay_s} if self.batch_delay_s else {}
        return {"profile": self.profile.as_dict(), "accuracy_ratio": dict(self.accuracy_ratio), **numbers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Predictor:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: The data does not come from ``as_dict``.
        """
        return cls(**{**data, "profile": Profile.from_dict(data["profile"])})

    def utilisation_ratio(self, layout: Layout, rate_rps: float) -> float:
        """Demand over the layout's capacity; above 1 its queue grows.

        Raises:
            DataError: A variant was not measured on its slice.
        """
        return rate_rps / capacity_rps(self.instances(layout))

    def instances(self, layout: Layout) -> tuple[SliceProfile, ...]:
        """The measurements of each instance of a layout.

        Raises:
            DataError: A variant was not measured on its slice.
        """
        return tuple(self.profile.entry(item.variant, item.slice) for item in layout.instances)

    def awake_w(self, layout: Layout) -> float:
        """Watts that a layout's replicas draw while they wait for requests.

        Raises:
            DataError: A variant was not measured on its slice.
        """
        return math.fsum(entry.awake_w for entry in self.instances(layout))

    def energy_error_ratio(self, layout: Layout) -> float:
        """Largest ratio by which measurement error alone can separate the joules a request of a layout and a part.

        It is the 95 % interval of the difference of two measured means: alone, and while the other slices work too. It
        is 0 where too few runs were measured.

        Raises:
            DataError: A variant was not measured on its slice.
        """
        entries = self.instances(layout)
        errors = (math.hypot(*(one.mean_cpu_error_ratio for one in (entry.alone, entry.loaded))) for entry in entries)
        return max((error for error in errors if math.isfinite(error)), default=0.0)

    def predict(self, layout: Layout, rate_rps: float) -> LayoutMetrics:
        """Predict a layout under a Poisson demand.

        Raises:
            DataError: A variant was not measured on its slice.
        """
        instances = self.instances(layout)
        utilisation_ratio = rate_rps / capacity_rps(instances)
        if utilisation_ratio > SATURATION_RATIO:
            return self.when_busy(layout, rate_rps)
        played = replay(
            poisson_arrivals(rate_rps, self.requests, self.seed),
            uniform_draws(self.requests, self.seed),
            [(-math.inf, instances)],
            self.batch_delay_s,
        )
        kept = slice(self.requests // 10, None)
        server = played.server[kept]
        weight = np.bincount(server, minlength=len(instances)) / len(server)
        watts = np.array([item.active_w for item in instances])
        return self._metrics(
            instances,
            weight.tolist(),
            energy_j=float(np.mean(played.cpu_s[kept] * watts[server])),
            latency_s=float(np.quantile(played.latency_s[kept], self.quantile)) + self.overhead_s,
            utilisation_ratio=utilisation_ratio,
        )

    def predict_slower(self, layout: Layout, rate_rps: float, slowdown_ratio: float) -> LayoutMetrics:
        """Predict a layout on a machine with service times longer by a ratio; the joules are those of the profile.

        A queue in which all times are ``k`` times as long is the same queue under ``k`` times the demand, ``k`` times
        as slow.

        Raises:
            DataError: A variant was not measured on its slice.
        """
        shown = self.predict(layout, rate_rps * slowdown_ratio)
        return shown if slowdown_ratio == 1.0 else replace(shown, latency_s=shown.latency_s * slowdown_ratio)

    def when_busy(self, layout: Layout, rate_rps: float) -> LayoutMetrics:
        """Predict a layout while all its replicas are busy: requests are shared by speed, the latency is unbounded.

        Raises:
            DataError: A variant was not measured on its slice.
        """
        instances = self.instances(layout)
        speed = np.array([1.0 / item.each_s for item in instances])
        weight = speed / speed.sum()
        energy_j = float(np.dot(weight, [item.busy_energy_j for item in instances]))
        return self._metrics(
            instances,
            weight.tolist(),
            energy_j=energy_j,
            latency_s=math.inf,
            utilisation_ratio=rate_rps / capacity_rps(instances),
        )

    def _metrics(
        self,
        instances: tuple[SliceProfile, ...],
        weight: list[float],
        *,
        energy_j: float,
        latency_s: float,
        utilisation_ratio: float,
    ) -> LayoutMetrics:
        shares: dict[str, float] = {}
        for item, part in zip(instances, weight, strict=True):
            shares[item.variant] = shares.get(item.variant, 0.0) + part
        accuracy_ratio = sum(part * self.accuracy_ratio[variant] for variant, part in shares.items())
        return LayoutMetrics(latency_s, energy_j, accuracy_ratio, shares, utilisation_ratio)
