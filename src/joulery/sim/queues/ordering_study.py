"""Compare orders of serving on one server, with requests of unknown length and imperfect predictions.

Under one seed every order faces the same requests at the same instants. Predictions are calibrated on requests that the
simulation does not replay, so no order but the oracle's has seen a true length (μ-Serve, ATC'24, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import ConfigError, DataError
from joulery.perf.lengths.classes import CLASSES
from joulery.perf.lengths.remaining import LengthDistribution
from joulery.policies.ordering import Aging, SpeculativeQueue
from joulery.policies.reranking import Reranking
from joulery.sim.core.arrivals import gamma
from joulery.sim.core.streams import Streams
from joulery.sim.queues.interrupted_server import Interruptions, reranked
from joulery.sim.queues.single_server import ServedQueue, by_key, by_queue, fcfs

ORDERS: Mapping[str, str] = {
    "fcfs": "first come, first served",
    "ssjf": "speculative shortest job first, linear aging",
    "ssjf-delayed": "speculative shortest job first, aging after a grace",
    "boost": "arrival less a head start for short predictions",
    "rerank": "arrival less a head start for short expected remainders, running answers interrupted",
    "rerank-waiting": "the same in front of an engine that interrupts nothing",
    "sjf-predicted": "shortest predicted job first, no aging",
    "oracle": "shortest job first by true lengths, no aging",
}
"""Orders by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Requests of a log: how long their answers were, and how long they were predicted to be.

    Attributes:
        tokens: Length of each answer, float64[n], > 0.
        predicted: Predicted class of each, int64[n].
    """

    tokens: FloatArray
    predicted: IntArray

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.predicted):
            raise DataError(f"{len(self.tokens)} lengths and {len(self.predicted)} predictions do not fit")
        if len(self.tokens) < 100 or not bool(np.all(self.tokens > 0)):
            raise DataError("a comparison of orders needs at least 100 answers, each of at least one token")


@dataclass(frozen=True, slots=True)
class OrderingSetting:
    """The server and its load.

    Attributes:
        constant_s, per_token_s: Service time of an answer: constant plus so much a token.
        load_ratio: Offered load, below 1 for a queue that settles.
        cv: Variability of the gaps between arrivals: 1 is Poisson.
        requests: Requests simulated for each seed.
        warmup: Number of first requests that are served but not counted.
        calibration_ratio: Share of the log that calibrates predictions and is not replayed.
        linear, delayed, boost: Aging of the three speculative orders.
        rerank: The order that is revised while answers are written.
        interruptions: What interrupting an answer costs.
    """

    constant_s: float = 0.1
    per_token_s: float = 0.02
    load_ratio: float = 0.9
    cv: float = 1.0
    requests: int = 20_000
    warmup: int = 2_000
    calibration_ratio: float = 0.25
    linear: Aging = field(default_factory=lambda: Aging(0.02))
    delayed: Aging = field(default_factory=lambda: Aging(0.08, 105.0))
    boost: Aging = field(default_factory=lambda: Aging.boost(120.0))
    rerank: Reranking = field(default_factory=Reranking)
    interruptions: Interruptions = field(default_factory=Interruptions)


@dataclass(frozen=True, slots=True)
class OrderOutcome:
    """Result of an order for one seed's requests.

    Attributes:
        mean_jct_s, p99_jct_s: Arrival to completion.
        max_wait_s: Longest wait for service.
        throughput_rps: Requests over makespan: the same for every order that never idles.
        early_throughput_rps: Completion rate over the first quarter of the requests to finish, the artifact's measure.
        interruptions_ratio: Interruptions of running answers a request.
    """

    mean_jct_s: float
    p99_jct_s: float
    max_wait_s: float
    throughput_rps: float
    early_throughput_rps: float
    interruptions_ratio: float = 0.0


class PredictedQueue:
    """A speculative queue fed with predicted service times."""

    def __init__(self, aging: Aging, predicted_s: list[float]) -> None:
        self._queue, self._predicted_s = SpeculativeQueue(aging), predicted_s

    def push(self, job: int, arrival_s: float) -> None:
        """Add a job with its predicted service time."""
        self._queue.push(job, arrival_s, self._predicted_s[job])

    def pop(self, now_s: float) -> int:
        """Remove and return the job to serve next."""
        return self._queue.pop(now_s)


def _by_class(lengths: Lengths, setting: OrderingSetting) -> list[FloatArray]:
    """Service times of each predicted class on the calibration part, s; of all where a class does not occur there."""
    count = int(len(lengths.tokens) * setting.calibration_ratio)
    service_s, predicted = _service_s(lengths.tokens[:count], setting), lengths.predicted[:count]
    classes = max(CLASSES, int(lengths.predicted.max()) + 1)
    return [service_s[predicted == c] if bool(np.any(predicted == c)) else service_s for c in range(classes)]


def simulate_orders(
    names: tuple[str, ...], lengths: Lengths, setting: OrderingSetting, streams: Streams
) -> dict[str, OrderOutcome]:
    """Serve the same requests in each order.

    Raises:
        ConfigError: No such order.
    """
    for name in names:
        if name not in ORDERS:
            raise ConfigError("no such order", got=name, expected=", ".join(ORDERS))
    first = int(len(lengths.tokens) * setting.calibration_ratio)
    count = min(setting.requests, len(lengths.tokens) - first)
    chosen = first + streams("requests").permutation(len(lengths.tokens) - first)[:count]
    service_s = _service_s(lengths.tokens[chosen], setting)
    classes, calibration = lengths.predicted[chosen], _by_class(lengths, setting)
    rate_rps = setting.load_ratio / float(_service_s(lengths.tokens[first:], setting).mean())
    arrival_s = gamma(rate_rps, setting.cv).times_s(3.0 * count / rate_rps, streams("arrivals"))[:count]
    work = _Work(arrival_s, service_s, classes, calibration)
    return {name: _outcome(*_serve(name, work, setting), setting) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Requests of one seed: arrivals, service times, predicted classes, and what is known of each class."""

    arrival_s: FloatArray
    service_s: FloatArray
    classes: IntArray
    calibration: list[FloatArray]


def _service_s(tokens: FloatArray, setting: OrderingSetting) -> FloatArray:
    return np.asarray(np.round(setting.constant_s + setting.per_token_s * tokens, 2), np.float64)


def _serve(name: str, work: _Work, setting: OrderingSetting) -> tuple[ServedQueue, int]:
    """Times of each request, and the number of interruptions."""
    arrival_s, service_s = work.arrival_s, work.service_s
    if name == "fcfs":
        return fcfs(arrival_s, service_s), 0
    if name == "oracle":
        return by_key(arrival_s, service_s, service_s), 0
    if name in ("rerank", "rerank-waiting"):
        known = [LengthDistribution.of(each) for each in work.calibration]
        expected = [known[label] for label in work.classes.tolist()]
        average_s = float(np.mean(np.concatenate(work.calibration)))
        cost = setting.interruptions if name == "rerank" else None
        return reranked(arrival_s, service_s, expected, setting.rerank, average_s=average_s, interruptions=cost)
    predicted_s = np.array([float(each.mean()) for each in work.calibration])[work.classes]
    if name == "sjf-predicted":
        return by_key(arrival_s, service_s, predicted_s), 0
    aging = {"ssjf": setting.linear, "ssjf-delayed": setting.delayed, "boost": setting.boost}[name]
    return by_queue(arrival_s, service_s, PredictedQueue(aging, predicted_s.tolist())), 0


def _outcome(served: ServedQueue, interruptions: int, setting: OrderingSetting) -> OrderOutcome:
    counted = slice(min(setting.warmup, len(served.arrival_s) // 2), None)
    finish_s = np.sort(served.finish_s)
    quarter = max(1, len(finish_s) // 4)
    start_s = float(served.arrival_s[0])
    return OrderOutcome(
        mean_jct_s=float(np.mean(served.sojourn_s[counted])),
        p99_jct_s=float(np.quantile(served.sojourn_s[counted], 0.99)),
        max_wait_s=float(np.max(served.wait_s[counted])),
        throughput_rps=len(finish_s) / (float(finish_s[-1]) - start_s),
        early_throughput_rps=quarter / (float(finish_s[quarter - 1]) - start_s),
        interruptions_ratio=interruptions / len(served.arrival_s),
    )


def synthetic_lengths(streams: Streams, count: int = 60_000) -> Lengths:
    """Generate answer lengths with the spread of real ones, and predictions of which six in ten are right.

    Lengths are log-normal, between 2 and 511 tokens; a prediction is the true quartile class blurred by noise.
    """
    rng = streams("lengths")
    raw = rng.lognormal(4.7, 1.25, 4 * count)
    tokens = raw[(raw >= 2) & (raw < 512)][:count].round()
    rank = np.argsort(np.argsort(tokens, kind="stable"), kind="stable") / len(tokens)
    blurred = np.clip(rank + rng.normal(0, 0.14, len(tokens)), 0, 1)
    predicted = np.searchsorted([0.25, 0.50, 0.75, 0.99], blurred, "right")
    return Lengths(np.asarray(tokens, np.float64), np.asarray(predicted, np.int64))
