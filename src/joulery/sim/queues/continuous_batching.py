"""Simulate a replica of a language model step by step: requests join and leave one running batch.

At the start of a step waiting requests take free places, first come, first served; their prompts are computed in that
step, which takes at least as long as their arithmetic. At its end each running request has one more token, and those
with all their tokens leave. The time of a step is that of its batch size times a random factor, so that a plan is
not judged by the very model that made it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError
from joulery.sim.core.streams import Streams

MOST_STEPS = 150_000
"""Counted steps after which a trial ends early."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchedReplica:
    """True properties of a replica.

    Attributes:
        step_s: Time of a step with 1, 2, ... limit requests in the batch, s, shape (limit,).
        prefill_s: Time of a prompt's arithmetic: the step in which it is computed takes at least that, s.
        answer_tokens: Tokens an answer, mean; lengths are geometric.
        noise_ratio: Standard deviation of a step's time in logarithms.
        slower_ratio: Relative excess of all times over ``step_s`` and ``prefill_s``.
    """

    step_s: FloatArray
    prefill_s: float
    answer_tokens: float
    noise_ratio: float = 0.1
    slower_ratio: float = 0.0


class ReplicaTrial(NamedTuple):
    """Result for a replica after the warm-up.

    Attributes:
        first_token_s: Time to first token of each request, s.
        token_s, tokens: Times between tokens, and how many tokens each holds for.
        throughput_tps: Tokens a second.
        in_flight: Mean requests in the batch.
        waiting: Requests that waited at the end.
    """

    first_token_s: FloatArray
    token_s: FloatArray
    tokens: IntArray
    throughput_tps: float
    in_flight: float
    waiting: int

    def first_token_quantile_s(self, quantile: float) -> float:
        """A quantile of the time to first token, s; infinite where no request was answered."""
        return float(np.quantile(self.first_token_s, quantile)) if len(self.first_token_s) else float("inf")

    def token_quantile_s(self, quantile: float) -> float:
        """A quantile of the time between tokens over all tokens, s."""
        if not self.tokens.sum():
            return 0.0
        order = np.argsort(self.token_s, kind="stable")
        shares = np.cumsum(self.tokens[order]) / self.tokens.sum()
        return float(self.token_s[order][min(int(np.searchsorted(shares, quantile)), len(order) - 1)])


def open_trial(
    replica: BatchedReplica, arrivals_s: FloatArray, end_s: float, warmup_s: float, seed: int
) -> ReplicaTrial:
    """Simulate a replica whose requests arrive at given times.

    Args:
        replica: The replica.
        arrivals_s: Arrival times, s, ascending.
        end_s, warmup_s: End of the trial, and of its warm-up, which is not counted, s.
        seed: Of lengths and step times.

    Raises:
        DataError: The trial has no time after its warm-up.
    """
    return _run(replica, arrivals_s, None, end_s, warmup_s, seed)


def closed_trial(replica: BatchedReplica, clients: int, end_s: float, warmup_s: float, seed: int) -> ReplicaTrial:
    """Simulate a replica with clients that each send the next request as soon as their last one is answered.

    Raises:
        DataError: The trial has no time after its warm-up.
    """
    return _run(replica, np.zeros(clients), clients, end_s, warmup_s, seed)


def _run(
    replica: BatchedReplica, arrivals_s: FloatArray, clients: int | None, end_s: float, warmup_s: float, seed: int
) -> ReplicaTrial:
    if not 0 <= warmup_s < end_s:
        raise DataError(f"a trial of {end_s:g} s has no time after a warm-up of {warmup_s:g} s")
    streams, limit = Streams(seed), len(replica.step_s)
    lengths, noise = _Lengths(replica.answer_tokens, streams), _Noise(replica.noise_ratio, streams)
    waiting: deque[float] = deque()
    remaining = np.empty(0, np.int64)
    firsts, durations, counts = list[float](), list[float](), list[int]()
    now, next_arrival, area, began = 0.0, 0, 0.0, warmup_s
    slower = 1 + replica.slower_ratio
    while now < end_s and len(durations) < MOST_STEPS:
        while next_arrival < len(arrivals_s) and arrivals_s[next_arrival] <= now:
            waiting.append(float(arrivals_s[next_arrival]))
            next_arrival += 1
        joined = min(limit - len(remaining), len(waiting))
        running = len(remaining) + joined
        if running == 0:
            if next_arrival >= len(arrivals_s):
                break
            now = float(arrivals_s[next_arrival])
            continue
        step = slower * max(replica.step_s[running - 1] * noise.draw(), joined * replica.prefill_s)
        counted = now + step > warmup_s
        if counted and not durations:
            began = min(now, warmup_s)
        now += step
        for _ in range(joined):
            arrived = waiting.popleft()
            if counted:
                firsts.append(now - arrived)
        if counted:
            area += running * step
            durations.append(step)
            counts.append(len(remaining))
        remaining = np.concatenate([remaining, lengths.draw(joined)]) - 1
        left = int(np.count_nonzero(remaining == 0))
        if left:
            remaining = remaining[remaining > 0]
            if clients is not None:
                waiting.extend([now] * left)
    measured = max(now - began, 1e-9)
    tokens = sum(counts) + len(firsts)
    return ReplicaTrial(
        np.array(firsts),
        np.array(durations),
        np.array(counts, np.int64),
        tokens / measured,
        area / measured,
        len(waiting),
    )


class _Lengths:
    """Geometric lengths of answers."""

    def __init__(self, mean: float, streams: Streams) -> None:
        self._rng, self._p = streams("lengths"), 1 / max(mean, 1.0)

    def draw(self, count: int) -> IntArray:
        return np.asarray(self._rng.geometric(self._p, count), np.int64)


class _Noise:
    """Log-normal factors of mean one, drawn in blocks."""

    _BLOCK = 4096

    def __init__(self, deviation: float, streams: Streams) -> None:
        self._rng, self._deviation = streams("steps"), deviation
        self._drawn: list[float] = []

    def draw(self) -> float:
        if not self._drawn:
            logs = self._rng.normal(-(self._deviation**2) / 2, self._deviation, self._BLOCK)
            self._drawn = np.exp(logs).tolist()
        return self._drawn.pop()
