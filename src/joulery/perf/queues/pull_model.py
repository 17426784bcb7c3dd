"""Latency, energy and accuracy of a pool of instances that pull from one queue, in closed form.

The pool is the one of :mod:`joulery.sim.queues.fifo_pull`; the simulation is exact, this model is fast and
differentiable, for searches that evaluate a thousand configurations between two trials. It uses three observations:

* The instance that has been idle longest goes first, so all instances wait equally long for work: a cycle is that wait
  ``w`` plus the service time, instance ``i`` answers a share proportional to ``1 / (w + t_i)``, and ``w`` is such that
  the rates add up to the demand.
* A request finds as many neighbours busy as are busy on average: that stretches the host part.
* A request that finds every instance busy waits: Erlang's C gives the share of such requests, an exponential the wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray

_STEPS = 26
"""Bisection steps: relative precision 1e-7."""
_NEWTON_STEPS = 5
"""Relative precision 1e-10 where service times differ by a factor of 1000, and more where they differ by less."""


@dataclass(frozen=True, slots=True, eq=False)
class PullPrediction:
    """Predictions, one row for each configuration (and one layer for each set of parameters).

    Attributes:
        latency_s: 95th percentile, arrival to answer; infinite where the demand exceeds the capacity.
        share: Share of the requests that each edge's instances answer, summing to 1 over the last axis.
        utilisation: Demand over capacity.
    """

    latency_s: FloatArray
    share: FloatArray
    utilisation: FloatArray


def predict(
    counts: FloatArray,
    host_s: FloatArray,
    gpu_s: FloatArray,
    contention: FloatArray,
    jitter_s: FloatArray,
    size_cv: FloatArray,
    rate_rps: FloatArray | float,
    wait_ratio: FloatArray | float = 1.0,
    quantile: float = 0.95,
) -> PullPrediction:
    """Predict configurations under Poisson demand.

    Args:
        counts: Instances on each edge (a variant on a slice), float64[..., edges].
        host_s: Host part of each edge, broadcastable to ``counts``.
        gpu_s: Device part of each edge, broadcastable to ``counts``.
        contention: Stretch of the host part per busy neighbour, broadcastable to ``counts[..., 0]``.
        jitter_s: Standard deviation of a request's service time that is independent of its size, likewise.
        size_cv: Coefficient of variation of the device part, likewise.
        rate_rps: Demand, likewise.
        wait_ratio: Factor on the length of waits, likewise.
        quantile: Quantile of the latency.
    """
    rate = np.asarray(rate_rps, np.float64)[..., None]
    busy: FloatArray = np.zeros(np.broadcast_shapes(counts.shape, host_s.shape))
    for _ in range(3):  # busy instances depend on service times, and these on busy instances
        service = host_s * (1 + contention[..., None] * busy) + gpu_s
        wait = _idle_wait(counts, service, rate)
        each = service / (wait + service)
        busy = np.maximum((counts * each).sum(axis=-1, keepdims=True) - each, 0.0)
    share = counts / (wait + service)
    share = share / share.sum(axis=-1, keepdims=True)
    capacity = (counts / service).sum(axis=-1)
    utilisation = rate[..., 0] / capacity
    crowd = (counts * each * (1 - each)).sum(axis=-1, keepdims=True)  # how much the number of busy ones varies
    spread = np.sqrt(
        jitter_s[..., None] ** 2 + (size_cv[..., None] * gpu_s) ** 2 + (host_s * contention[..., None]) ** 2 * crowd
    )
    mean = (share * service).sum(axis=-1)
    second = (share * (service**2 + spread**2)).sum(axis=-1)
    late, pace = _waiting(counts.sum(axis=-1), utilisation, capacity, rate[..., 0], second / mean**2)
    latency = _quantile(share, service, spread, late, pace / wait_ratio, 1 - quantile)
    return PullPrediction(np.where(utilisation < 1, latency, math.inf), share, utilisation)


def _idle_wait(counts: FloatArray, service: FloatArray, rate: FloatArray) -> FloatArray:
    """Time that an instance waits for work; 0 where the demand exceeds the capacity.

    The time between two requests, ``1 / sum(counts / (wait + service))``, is concave in the wait, and linear where all
    services take equally long: Newton's steps approach the solution from below and never pass it.
    """
    shape = np.broadcast_shapes(counts.shape[:-1], service.shape[:-1], rate.shape[:-1])
    wait: FloatArray = np.zeros(shape)[..., None]
    for _ in range(_NEWTON_STEPS):
        each = wait + service
        speed = counts / each
        served = speed.sum(axis=-1, keepdims=True)
        wait = np.maximum(wait + served * (served / rate - 1.0) / (speed / each).sum(axis=-1, keepdims=True), 0.0)
    return wait


def _waiting(
    servers: FloatArray, utilisation: FloatArray, capacity: FloatArray, rate: FloatArray, second: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Probability that a request waits (Erlang C), and the rate at which waits end.

    ``second`` is the second moment of the service time over the square of its mean: half of it is how much longer
    (2, exponential: 1) or shorter (1, constant: 1/2) a wait is than with exponential service times.
    """
    load = np.minimum(utilisation, 0.999) * servers
    most = int(servers.max())
    block: FloatArray = np.ones(np.broadcast_shapes(load.shape, servers.shape))
    for number in range(1, most + 1):  # Erlang B, one server at a time
        block = np.where(number <= servers, load * block / (number + load * block), block)
    late = block / (1 - np.minimum(utilisation, 0.999) * (1 - block))
    return late, 2.0 / second * np.maximum(capacity - rate, 1e-3 * capacity)


def _quantile(
    share: FloatArray, service: FloatArray, spread: FloatArray, late: FloatArray, pace: FloatArray, tail: float
) -> FloatArray:
    """The latency that a share ``tail`` of the requests exceeds, by bisection."""
    from scipy.special import ndtr

    longest = (service * (share > 0)).max(axis=-1)
    low: FloatArray = np.zeros_like(longest)
    width = longest + 6 * spread.max(axis=-1) + math.log(1 / tail) * 1.5 / pace
    at_once, waits = share * (1 - late[..., None]), share * late[..., None]
    falls, steepness = -pace[..., None], -1.0 / spread
    for _ in range(_STEPS):  # a search makes this step ten thousand times: as few operations as it takes
        width = width / 2
        middle = low + width
        over = middle[..., None] - service
        exceed = at_once * ndtr(over * steepness) + waits * np.exp(np.minimum(over * falls, 0.0))
        low = np.where(exceed.sum(axis=-1) > tail, middle, low)
    return np.asarray(low + width / 2, np.float64)
