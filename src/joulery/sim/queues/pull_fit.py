"""Fit the costs of requests to measured points of the whole service, by simulating each point.

The points hold accuracy, a latency quantile and joules a request of a few configurations under a few loads. Fitted
are factors on a first estimate: host time, device time, dynamic joules, contention, jitter and idle power. The
simulation serves the same requests for every candidate, so the residuals are smooth enough for least squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.perf.queues.pull_costs import PullPoint, ServiceCosts, VariantCosts
from joulery.sim.core.streams import Streams
from joulery.sim.queues.fifo_pull import PullInstance, PullMetrics, Requests, ServiceTimes, metrics, pull

_ENERGY_WEIGHT = 3.0
"""Weight of an energy residual against a latency quantile's: a mean over a run is more certain than a tail."""
_PRIOR_SPREAD = 0.7
"""Distance, in logarithms, of a factor from the first estimate that counts like a bad residual of 100 %."""


@dataclass(frozen=True, slots=True)
class PointError:
    """Errors of a fitted service at one point.

    Attributes:
        point: The measured point.
        accuracy_points: Simulated minus measured accuracy, percentage points.
        energy_ratio: Simulated over measured energy, minus 1.
        p95_ratio: Simulated over measured latency quantile, minus 1.
    """

    point: PullPoint
    accuracy_points: float
    energy_ratio: float
    p95_ratio: float


def instances_of(costs: ServiceCosts, edges: Sequence[tuple[str, str]]) -> list[PullInstance]:
    """The instances of all GPUs of a service, every GPU carrying ``edges`` (variant and slice profile)."""
    return [_instance(costs[variant], profile) for _ in range(costs.gpus) for variant, profile in edges]


def _instance(variant: VariantCosts, profile: str) -> PullInstance:
    return PullInstance(
        name=f"{variant.name} on {profile}",
        host_s=variant.host_s,
        gpu_s=variant.gpu_s * variant.slowdown[profile],
        floor_s=0.5 * (variant.host_s + variant.gpu_s),
        dynamic_j=variant.dynamic_j,
        accuracy_ratio=variant.accuracy_ratio,
    )


def simulate(
    costs: ServiceCosts, edges: Sequence[tuple[str, str]], gaps: FloatArray, interarrival_s: float, streams: Streams
) -> PullMetrics:
    """One measurement window of a configuration, without warm-up, as the published runs were measured.

    Args:
        costs: The service.
        edges: Variant and slice profile of each instance of one GPU.
        gaps: Times between requests in units of their mean, float64[n].
        interarrival_s: Mean time between requests, s.
        streams: Random streams of sizes and jitter.
    """
    return MeasurementWindow(costs, gaps, interarrival_s, streams).metrics(edges)


class MeasurementWindow:
    """The requests of one measurement window, which any configuration of the service can serve.

    Args:
        costs, gaps, interarrival_s, streams: As for :func:`simulate`.
    """

    def __init__(self, costs: ServiceCosts, gaps: FloatArray, interarrival_s: float, streams: Streams) -> None:
        arrival_s = np.cumsum(gaps) * interarrival_s
        self._costs = costs
        self._work = Requests.draw(arrival_s, streams, size_cv=costs.size_cv, jitter_s=costs.jitter_s)
        self._times = ServiceTimes(self._work)

    def metrics(self, edges: Sequence[tuple[str, str]]) -> PullMetrics:
        """Metrics of a configuration in the window: variant and slice profile of each instance of one GPU."""
        costs, pool = self._costs, instances_of(self._costs, edges)
        pulled = pull(self._work, pool, contention=costs.contention, times=self._times)
        return metrics(self._work, pulled, pool, idle_w=costs.gpus * costs.idle_w)


def errors(costs: ServiceCosts, points: Sequence[PullPoint], gaps: FloatArray, seeds: int = 5) -> list[PointError]:
    """Errors of a service at measured points, the mean over seeds of sizes and jitter.

    Args:
        costs: The service.
        points: The measured points.
        gaps: Times between requests in units of their mean, at least as many as the longest point has.
        seeds: Samples of sizes and jitter.
    """
    found = []
    for point in points:
        runs = [
            simulate(costs, point.instances, gaps[: point.requests], point.interarrival_s, Streams(seed))
            for seed in range(seeds)
        ]
        found.append(
            PointError(
                point,
                100 * (float(np.mean([run.accuracy_ratio for run in runs])) - point.accuracy_ratio),
                float(np.mean([run.energy_j_per_request for run in runs])) / point.energy_j - 1,
                float(np.mean([run.p95_s for run in runs])) / point.p95_s - 1,
            )
        )
    return found


def fit(first: ServiceCosts, points: Sequence[PullPoint], gaps: FloatArray) -> ServiceCosts:
    """Fit the costs of a service to measured points.

    Each variant that occurs in a point gets its own factors for host time, device time and joules. All other variants
    share one factor for each of the three.

    Args:
        first: Costs to start from; slowdowns and accuracies are taken from it as they are.
        points: The measured points.
        gaps: Times between requests in units of their mean.

    Returns:
        The fitted service; ``source`` states that it is a calibration.
    """
    from scipy.optimize import least_squares

    seen = sorted({variant for point in points for variant, _ in point.instances})

    def residuals(x: FloatArray) -> FloatArray:
        found = errors(scaled(first, seen, x), points, gaps, seeds=1)
        energy = [_ENERGY_WEIGHT * math.log1p(error.energy_ratio) for error in found]
        p95 = [math.log1p(error.p95_ratio) for error in found]
        return np.array([*energy, *p95, *(0.1 * x / _PRIOR_SPREAD)])

    found = least_squares(residuals, np.zeros(3 * len(seen) + 4), diff_step=2e-2, bounds=(-2.5, 2.5), max_nfev=60)
    fitted = scaled(first, seen, found.x)
    return replace(fitted, source=f"{first.source}; calibrated on {len(points)} measured points")


def scaled(first: ServiceCosts, seen: Sequence[str], x: FloatArray) -> ServiceCosts:
    """The costs with factors ``exp(x)``: host, device and joules of each seen variant, then the service's four.

    The four are contention, jitter, spread of sizes and idle power. Variants not seen take the geometric mean of the
    seen ones' factors.
    """
    factors = np.exp(x[: 3 * len(seen)]).reshape(len(seen), 3)
    common = np.exp(np.log(factors).mean(axis=0))
    rows = {name: factors[number] for number, name in enumerate(seen)}
    variants = []
    for variant in first.variants:
        host, device, joules = rows.get(variant.name, common).tolist()
        variants.append(
            replace(
                variant,
                host_s=variant.host_s * host,
                gpu_s=variant.gpu_s * device,
                dynamic_j=variant.dynamic_j * joules,
            )
        )
    contention, jitter, size, idle = np.exp(x[3 * len(seen) :]).tolist()
    return replace(
        first,
        variants=tuple(variants),
        contention=first.contention * contention,
        jitter_s=first.jitter_s * jitter,
        size_cv=first.size_cv * size,
        idle_w=first.idle_w * idle,
    )
