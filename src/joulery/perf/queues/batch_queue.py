"""Waiting times of random requests that are served in batches of all waiting requests.

The queue: requests arrive one by one; whenever the server is free it takes all waiting requests, at most ``batch`` of
them, and serves them together; a batch of ``j`` takes ``s(j)``. (Real servers call this dynamic batching with no
delay.) The number of requests that wait at the end of a batch is a Markov chain, because the arrivals during the next
batch depend on its size alone. The chain's stationary state gives the share of requests that take longer than a
deadline.

The number of requests in a time is Poisson, or, for another squared coefficient of variation ``scv`` of the gaps, has
the same mean and ``scv`` times the variance, which a renewal process approaches over longer times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray

_STATES_MAX = 160
"""Longest queue counted request by request; beyond, requests are counted in bundles."""
_DEEP_REQUESTS, _DEEP_BATCHES = 80, 8
"""Numbers of arrivals and of batches within the deadline above which the tail is bounded in closed form."""
_STEEP, _HALVINGS = 64.0, 50
"""Steepest decay of the tail per request, and bisection steps of the search for the decay."""
_MOMENTS, _WEIGHTS = np.polynomial.legendre.leggauss(6)
"""Moments within a batch at which arrivals are evaluated, and their weights."""
_SPREAD = ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6))
"""Requests that join a request's own batch behind it: standard deviations from the mean, and their weights."""


def late_ratio(rate_rps: float, scv: float, batch_s: Sequence[float], deadline_s: float) -> float:
    """The share of requests that take longer than a deadline, from arrival to the end of their batch.

    Args:
        rate_rps: Arrivals a second.
        scv: Squared coefficient of variation of their gaps; 1 for Poisson.
        batch_s: Service time of a batch of 1, 2 ... requests; the last is that of the largest batch.
        deadline_s: The deadline.

    Returns:
        A ratio; 1 when the server cannot keep up, or not even a single request is in time.
    """
    batch = len(batch_s)
    if rate_rps * batch_s[-1] >= batch or batch_s[0] > deadline_s:
        return 1.0
    times = np.asarray(batch_s, np.float64)
    if rate_rps * deadline_s > max(_DEEP_REQUESTS, _DEEP_BATCHES * batch):
        return _deep_queue(rate_rps, scv, times, deadline_s)
    bundle = max(1, math.ceil((2 * batch + 2 * rate_rps * deadline_s) / _STATES_MAX))
    size = max(1, batch // bundle)
    return _late_ratio(rate_rps * size / batch, scv * size / batch, _bundled(times, size), deadline_s)


def _bundled(times: FloatArray, size: int) -> FloatArray:
    """Service times of batches of 1 to ``size`` bundles, instead of single requests."""
    batch = len(times)
    if size == batch:
        return times
    return np.interp(np.arange(1, size + 1) * batch / size, np.arange(1, batch + 1), times)


def _deep_queue(rate: float, scv: float, times: FloatArray, deadline: float) -> float:
    """Upper bound of the late ratio where many full batches of requests come within the deadline.

    Only a long queue makes a request late then, and the waiting time of a long queue falls exponentially (Kingman,
    1970): ``P(wait > t) <= exp(-decay * t)``. The batch in service and the request's own batch come on top of the wait.
    """
    full_s = float(times[-1])
    return min(1.0, math.exp(-_decay(rate, scv, len(times), full_s) * max(deadline - 2 * full_s, 0.0)))


def _decay(rate: float, scv: float, batch: int, full_s: float) -> float:
    """Rate at which the tail of the waiting time falls, 1/s, while every batch is full.

    The probability of a long queue falls by ``z`` a request, where ``z > 1`` solves ``z ** batch = E[z ** N]`` for the
    arrivals ``N`` during one full batch, which shortens the wait by ``full_s``.
    """
    mean = rate * full_s

    def excess(log_z: float) -> float:
        z = math.exp(log_z)
        if scv > 1 + 1e-9:
            room = scv - (scv - 1) * z
            return math.inf if room <= 0 else -mean / (scv - 1) * math.log(room) - batch * log_z
        return mean * (1 - scv) * log_z + mean * scv * (z - 1) - batch * log_z

    low, high = 0.0, 1.0
    while excess(high) < 0:
        high *= 2
        if high > _STEEP:
            return _STEEP * batch / full_s
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return low * batch / full_s


def _late_ratio(rate: float, scv: float, times: FloatArray, deadline: float) -> float:
    batch = len(times)
    states = 2 * batch + math.ceil(2 * rate * deadline) + 8
    waiting = np.arange(states)
    served = np.clip(waiting, 1, batch)
    left = np.maximum(waiting - served, 0)
    queue = _stationary(left, _counts(rate * times, scv, states)[served - 1])
    idle = float(queue[0])
    likely = queue > _UNLIKELY
    queue, left, served = queue[likely], left[likely], served[likely]
    duration = times[served - 1]
    # A request that comes at a moment of a batch finds those left behind and those that came before it.
    moments = times[:, None] * (1 + _MOMENTS) / 2
    came = _counts(rate * moments.ravel(), scv, states)
    reach = int(np.flatnonzero(came.max(axis=0) > _NEGLIGIBLE)[-1]) + 1
    waiting, came = waiting[:reach], came[:, :reach].reshape(batch, len(_MOMENTS), reach)[served - 1]
    # Of a bursty process an arrival sees more than a random moment: what comes with it.
    ahead = left[:, None, None] + waiting[None, None, :] + max(0, math.ceil((scv - 1) / 2))
    start = (duration[:, None] - moments[served - 1])[:, :, None] + (ahead // batch) * times[-1]
    behind, spread = rate * start, np.sqrt(scv * rate * start)
    late = np.zeros(ahead.shape[:1] + start.shape[1:])
    for sigmas, weight in _SPREAD:
        joining = np.rint(np.maximum(behind + sigmas * spread, 0.0)).astype(np.int64)
        together = np.minimum(batch, ahead % batch + 1 + joining)
        late += weight * (start + times[together - 1] > deadline * (1 + 1e-12))
    late_now = ((came * late).sum(axis=2) @ _WEIGHTS) / 2
    arrivals = queue * rate * duration
    # A request that finds the server idle is served at once, alone.
    return float(min(1.0, (arrivals @ late_now) / (arrivals.sum() + idle)))


_UNLIKELY = 1e-13
"""Probability below which a queue length is left out of the sum over requests."""
_NEGLIGIBLE = 1e-18
"""Probability below which a number of arrivals, and every greater number, is left out of that sum."""
_RARE = 1e-100
"""Least probability with which a queue is assumed to shrink."""


def _stationary(left: IntArray, counts: FloatArray) -> FloatArray:
    """The stationary state of the chain: requests left plus arrivals; the last state includes all longer queues.

    States are eliminated from the last to the first (Grassmann, Taksar and Heyman, 1985): no subtraction, no pivots. No
    state leads to one that is more than a batch lower, whichever were eliminated.
    """
    states = len(left)
    batch = int((np.arange(states) - left).max())
    source = np.arange(states)[None, :] - left[:, None]
    step = np.where(source >= 0, np.take_along_axis(counts, np.maximum(source, 0), axis=1), 0.0)
    step[:, -1] += np.maximum(1 - step.sum(axis=1), 0.0)
    for state in range(states - 1, 0, -1):
        lowest = max(0, state - batch)
        below = step[state, lowest:state]
        into = step[:state, state] / max(np.add.reduce(below), _RARE)
        step[:state, state] = into
        step[:state, lowest:state] += into[:, None] * below
    weight = np.zeros(states)
    weight[0] = 1.0
    for state in range(1, states):
        weight[state] = weight[:state] @ step[:state, state]
        if weight[state] > 1 / _RARE:  # an overloaded queue is almost never short: keep the weights in range
            weight[: state + 1] /= weight[state]
    return np.asarray(weight / weight.sum(), np.float64)


def _counts(mean: FloatArray, scv: float, most: int) -> FloatArray:
    """Probability of 0, 1 ... ``most - 1`` arrivals for each mean, float64[len(mean), most].

    The variance is ``scv`` times the mean: Poisson at 1, negative binomial above it, and below it a certain, steady
    part plus a Poisson part.
    """
    n = np.arange(most, dtype=np.float64)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(n[1:]))])
    mean = np.maximum(mean, 1e-12)[:, None]
    if scv > 1 + 1e-9:
        # Negative binomial: its gamma functions as running sums of log(size + k).
        size = mean / (scv - 1)
        rising = np.concatenate([np.zeros_like(mean), np.cumsum(np.log(size + n[:-1]), axis=1)], axis=1)
        log = rising - log_factorial + n * math.log1p(-1 / scv) - size * math.log(scv)
        return np.asarray(np.exp(log), np.float64)
    random = np.exp(n * np.log(mean * scv + 1e-300) - mean * scv - log_factorial)
    steady = mean * (1 - scv)
    if float(steady.max()) < 1e-9:
        return np.asarray(random, np.float64)
    whole = np.floor(steady)
    part = steady - whole
    return np.asarray((1 - part) * _shifted(random, whole) + part * _shifted(random, whole + 1), np.float64)


def _shifted(probability: FloatArray, by: FloatArray) -> FloatArray:
    """Each row moved ``by`` places to the right."""
    source = np.arange(probability.shape[1])[None, :] - by.astype(np.int64)
    taken = np.take_along_axis(probability, np.maximum(source, 0), axis=1)
    return np.asarray(np.where(source >= 0, taken, 0.0), np.float64)
