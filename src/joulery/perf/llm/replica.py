"""One replica of a language model under random arrivals: its requests in flight and their waiting times.

A replica runs up to ``limit`` requests in one batch. With ``n`` of them each gets a token every T(n) seconds, so
requests end at n / (T(n) x tokens an answer) a second. As requests share the engine the number in flight is a
birth-death process of these rates (exact for exponential lengths, and for any lengths while none waits, because sharing
is insensitive to them); beyond the limit requests wait first come, first served. Its mean follows Little's law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.perf.llm.runs import LlmPoint

FIRST_OVERHEAD_S = 0.02
"""Time to first token beyond the prompt and its step, s: tokenising, scheduling, the network. Assumed."""
STEP_NOISE_RATIO = 0.1
"""Deviation of a step's time in logarithms. Assumed."""
PREFILL_FACTOR = 2.5
"""Time of a prompt over its arithmetic at the catalog's peak. Assumed: the fastest measured first tokens of long
prompts take 2.5 to 5 times it (NVIDIA AIConfigurator's silicon samples, dense models on H100 and H200)."""


@dataclass(frozen=True, slots=True)
class ReplicaCurve:
    """Performance of a replica with 1, 2, ... limit requests in flight.

    Attributes:
        token_time_s: Time a token takes a request, prompts of others included, s, shape (limit,).
        power_w: Power of its GPUs together, W, shape (limit,).
        itl_p50_s, itl_p99_s: Time between two tokens, s, shape (limit,).
        idle_w: Power without a request, W.
        stall_s: Time of a prompt's arithmetic: a step in which it is computed takes at least that, s.
        answer_tokens: Tokens an answer, mean.
    """

    token_time_s: FloatArray
    power_w: FloatArray
    itl_p50_s: FloatArray
    itl_p99_s: FloatArray
    idle_w: float
    stall_s: float
    answer_tokens: float

    @property
    def limit(self) -> int:
        """Most requests in one batch."""
        return len(self.token_time_s)

    @property
    def ends_rps(self) -> FloatArray:
        """Requests that end a second, by requests in flight, shape (limit,)."""
        return np.asarray(np.arange(1, self.limit + 1) / (self.token_time_s * self.answer_tokens), np.float64)

    def limited(self, limit: int) -> ReplicaCurve:
        """The same replica with a lower limit of requests at once."""
        return ReplicaCurve(
            self.token_time_s[:limit],
            self.power_w[:limit],
            self.itl_p50_s[:limit],
            self.itl_p99_s[:limit],
            self.idle_w,
            self.stall_s,
            self.answer_tokens,
        )


class SteadyLoad(NamedTuple):
    """A replica in its steady state.

    Attributes:
        rate_rps: Requests that arrive a second.
        in_flight: Mean requests in the batch.
        shares: Share of time with 0, 1, ... limit requests in the batch, shape (limit + 1,).
        wait_ratio: Share of requests that wait for a place.
        drain_rps: Rate at which their queue drains: ends at the limit less arrivals, requests/s.
        power_w: Mean power, W.
    """

    rate_rps: float
    in_flight: float
    shares: FloatArray
    wait_ratio: float
    drain_rps: float
    power_w: float


def prompt_time_s(point: LlmPoint, prompt_tokens: float) -> float:
    """Time the arithmetic of a prompt takes, s: a step in which it is computed takes no less."""
    width = {"bfloat16": "bf16", "fp8": "fp8", "fp4": "fp4"}.get(point.precision, "bf16")
    flops = 2 * point.facts.active_parameters * prompt_tokens
    return PREFILL_FACTOR * flops / (point.gpu.peak_flops(width) * point.num_gpus)


def steady_state(curve: ReplicaCurve, rate_rps: float) -> SteadyLoad | None:
    """The steady state at a rate; None where the replica cannot keep up."""
    ends = curve.ends_rps
    if rate_rps >= ends[-1]:
        return None
    weights = np.concatenate([[0.0], np.cumsum(np.log(rate_rps) - np.log(ends))])
    within = np.exp(weights - weights.max())
    rho = rate_rps / ends[-1]
    beyond = within[-1] * rho / (1 - rho)
    total = float(within.sum() + beyond)
    shares = within / total
    shares[-1] += beyond / total
    # Arrivals see time averages: a request waits where it finds the batch full.
    wait = float(shares[-1])
    power = float(shares[0] * curve.idle_w + shares[1:] @ curve.power_w)
    mean = float(shares[1:] @ np.arange(1, curve.limit + 1))
    return SteadyLoad(rate_rps, mean, np.asarray(shares, np.float64), wait, float(ends[-1] - rate_rps), power)


def tokens_within(curve: ReplicaCurve, state: SteadyLoad, limit_s: float) -> float:
    """Share of tokens that follow the previous token within a time.

    With ``n`` in flight the time between two tokens is modelled in two ways, and the worse holds: log-normal through
    the measured median and 99th percentile, which was measured with the prompts of the measured runs; and a step of the
    median's length with noise, or as long as the arithmetic of the prompts that arrived during the last one takes
    (their arithmetic hides the reading of weights: the longer of the two counts). Each ``n`` is weighted by the tokens
    that are written with ``n`` in flight.
    """
    tokens = state.shares[1:] * curve.ends_rps
    median = np.log(curve.itl_p50_s)
    spread = np.maximum(np.log(curve.itl_p99_s) - median, 1e-6) / _Z99
    below = _normal((math.log(limit_s) - median) / spread)
    prompts = state.rate_rps * curve.itl_p50_s
    stalled, chance = np.zeros_like(prompts), np.exp(-prompts)
    within_step = _normal((math.log(limit_s) - median) / STEP_NOISE_RATIO)
    for joined in range(_MOST_JOINED):
        if joined * curve.stall_s <= limit_s:
            stalled += chance * within_step
        chance = chance * prompts / (joined + 1)
    return float(tokens @ np.minimum(below, stalled) / tokens.sum())


def token_latency_s(curve: ReplicaCurve, state: SteadyLoad, quantile: float) -> float:
    """A quantile of the time between two tokens over all tokens, s; see :func:`tokens_within`."""
    low = math.log(float(curve.itl_p50_s.min())) - 3.0
    high = math.log(float(curve.itl_p99_s.max()) + _MOST_JOINED * curve.stall_s) + 3.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_within(curve, state, math.exp(middle)) < quantile else (low, middle)
    return math.exp(high)


def first_token_s(curve: ReplicaCurve, state: SteadyLoad, quantile: float) -> float:
    """A quantile of the time to first token, s: the wait for a place, the prompts of others, its own, and one step.

    The wait beyond the limit is exponential (the queue drains at a constant rate); prompts of others are a queue with
    one server and equal times.
    """
    busy = min(state.rate_rps * curve.stall_s, 0.99)
    tail = math.log(max(1 / (1 - quantile), 1.0 + 1e-12))
    others = curve.stall_s * busy / (2 * (1 - busy)) * tail
    place = max(0.0, math.log(max(state.wait_ratio, 1e-300) / (1 - quantile))) / state.drain_rps
    # A request waits for the end of the step that runs, then for its own.
    step = 2 * float(curve.itl_p50_s[max(0, min(round(state.in_flight), curve.limit) - 1)])
    return place + others + curve.stall_s + step + FIRST_OVERHEAD_S


def answer_time_s(curve: ReplicaCurve, state: SteadyLoad) -> float:
    """Mean time of an answer after its place is free, s, by Little's law."""
    return state.in_flight / state.rate_rps


_MOST_JOINED = 6
_Z99 = 2.3263478740408408
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _normal(at: FloatArray) -> FloatArray:
    """Standard normal distribution function (Abramowitz and Stegun 7.1.26, error below 1e-7)."""
    scaled = np.abs(at) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * scaled)
    tail = sum(each * t**power for power, each in enumerate(_ERF, 1)) * np.exp(-scaled * scaled)
    return np.asarray(np.where(at >= 0, 1 - tail / 2, tail / 2), np.float64)
