"""Observation of a service by its policy, and the kinds of decisions that the policy makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.mix import OWN, VariantMix

SET_LAYOUT = "set_layout"
KEEP_LAYOUT = "keep_layout"
TRY_LAYOUT = "try_layout"
SET_WEIGHTS = "set_weights"
TAIL_QUANTILE = 0.99
"""Share of the answers that admission keeps within the SLO where the service times allow it."""
_RECENT_S, _TAIL_ANSWERS, _LEAST_ANSWERS = 1.0, 100, 10
_STEERED_RATIO = 0.02
"""Share of answers by other variants above which a sample does not represent its layout."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The latest requests of a service that arrived since its layout took over.

    Attributes:
        layout: The layout that answered them.
        since_s: Time from which arrivals count, Unix seconds.
        requests: Requests that ended.
        failed: Requests among them that failed or were refused; their latency is infinite.
        latency_s, latency_low_s, latency_high_s: The SLO's quantile and its confidence interval.
        energy_j: Joules a request; NaN where unknown.
        energy_band_j: Half-width of its confidence interval; infinite where there are too few requests for one.
        served: Answers by variant.
        deaths: Replicas that died since the layout took over; the requests around a death are left out.
        accuracy_ratio: Observed accuracy of the answers; NaN where it follows from ``served``.
    """

    layout: Layout
    since_s: float
    requests: int
    failed: int
    latency_s: float
    latency_low_s: float
    latency_high_s: float
    energy_j: float
    energy_band_j: float
    served: Mapping[str, int]
    deaths: int = 0
    accuracy_ratio: float = math.nan

    @property
    def answers(self) -> int:
        """Requests that were answered."""
        return sum(self.served.values())

    @property
    def is_own(self) -> bool:
        """Whether the layout's own variants gave the answers, except for at most 2 % while the queue was long."""
        own = sum(count for name, count in self.served.items() if name in self.layout.counts)
        return own >= (1.0 - _STEERED_RATIO) * self.answers

    def suffices(self, min_requests: int) -> bool:
        """Whether at least ``min_requests`` ended, some were answered, and their joules are known."""
        return self.requests >= min_requests and self.answers > 0 and 0 < self.energy_j < math.inf

    def accuracy(self, accuracy_ratio: Mapping[str, float]) -> tuple[float, float]:
        """Mean accuracy over the answers and its standard error; NaN for no answer.

        Answers of other variants, such as one that joined and has its first share, count for neither.

        Args:
            accuracy_ratio: Accuracy of each variant that counts.
        """
        if not self.answers:
            return math.nan, math.nan
        if math.isfinite(self.accuracy_ratio):
            return self.accuracy_ratio, 0.0
        counts = [(accuracy_ratio[name], count) for name, count in self.served.items() if name in accuracy_ratio]
        answers = math.fsum(count for _, count in counts)
        if not answers:
            return math.nan, math.nan
        mean = math.fsum(ratio * count for ratio, count in counts) / answers
        spread = math.fsum(count * (ratio - mean) ** 2 for ratio, count in counts) / answers
        return mean, math.sqrt(spread / answers)

    def as_dict(self) -> dict[str, Any]:
        """The sample as a JSON-ready dictionary; NaN is null, an infinite number is a string."""
        counts = {"requests": self.requests, "failed": self.failed, "deaths": self.deaths}
        observed = {} if math.isnan(self.accuracy_ratio) else {"accuracy_ratio": self.accuracy_ratio}
        return {
            "layout": self.layout.names(),
            "since_s": self.since_s,
            **{name: _written(getattr(self, name)) for name in _SAMPLE_NUMBERS},
            **counts,
            **observed,
            "served": dict(self.served),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is not what ``as_dict`` writes.
        """
        return cls(
            layout=Layout.parse(data["layout"]),
            since_s=float(data["since_s"]),
            requests=int(data["requests"]),
            failed=int(data["failed"]),
            served={str(name): int(count) for name, count in data["served"].items()},
            deaths=int(data["deaths"]),
            accuracy_ratio=float(data.get("accuracy_ratio", math.nan)),
            **{name: math.nan if data[name] is None else float(data[name]) for name in _SAMPLE_NUMBERS},
        )


_SAMPLE_NUMBERS = ("latency_s", "latency_low_s", "latency_high_s", "energy_j", "energy_band_j")


def _written(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True, slots=True)
class Observation:
    """A policy's observation of one service.

    Attributes:
        now_s: Unix seconds.
        g_per_kwh: Carbon intensity now; NaN while unknown.
        rate_rps: Requests a second over the observer's window; NaN while unknown.
        latency_s: The SLO's quantile of the latencies in that window; NaN where nothing was answered.
        requests: Number of latencies behind the quantile.
        served: Answers in that window, by variant.
        power_w: Power of the machine; NaN while unknown.
        running: The layout that runs; None while none does.
        sample: The requests since that layout took over; None where no trials are made, or nothing ended yet.
        waits_for: Another service, whose trials would be disturbed by trials of this one; empty when it may make
            trials.
        arrival_rps: Requests that arrived a second over the last second, or over the last fifty where they took longer,
            refused ones included; NaN while unknown.
        queued: Requests that wait for a replica now.
        oldest_wait_s: Seconds that the oldest queued request has waited.
        loaded: Variants that every replica has loaded; empty where requests cannot be steered among variants.
        mix: The mix of them in force.
        occupied_s: Mean seconds that a request of each variant kept its replica busy lately; its part of a batch's.
        batched: Mean requests of the batches that each variant answered; empty where they are answered one by one.
        tail_latency_s: The 99th percentile of the latest latencies (:func:`tail_latency_s`); NaN while unknown.
        held_s: Seconds that a replica has been working on the oldest request of each variant, where that is longer than
            the SLO's latency.
        changing: Whether a decision is being carried out: ``running`` is what serves meanwhile.
    """

    now_s: float
    g_per_kwh: float
    rate_rps: float
    latency_s: float
    requests: int
    served: Mapping[str, int]
    power_w: float
    running: Layout | None
    sample: Sample | None = None
    waits_for: str = ""
    arrival_rps: float = math.nan
    queued: int = 0
    oldest_wait_s: float = 0.0
    loaded: tuple[str, ...] = ()
    mix: VariantMix = OWN
    occupied_s: Mapping[str, float] = field(default_factory=dict)
    tail_latency_s: float = math.nan
    changing: bool = False
    batched: Mapping[str, float] = field(default_factory=dict)
    held_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def demand_rps(self) -> float:
        """Arrivals a second where they are counted, else requests that ended; NaN while unknown."""
        return self.rate_rps if math.isnan(self.arrival_rps) else self.arrival_rps

    def as_dict(self) -> dict[str, Any]:
        """The observation as a JSON-ready dictionary; unknown numbers are null."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        queue = {} if not self.queued else {"queued": self.queued, "oldest_wait_s": self.oldest_wait_s}
        return {
            "now_s": self.now_s,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "requests": self.requests,
            "served": dict(self.served),
            "running": None if self.running is None else self.running.names(),
            **({} if self.sample is None else {"sample": self.sample.as_dict()}),
            **({"waits_for": self.waits_for} if self.waits_for else {}),
            **({} if math.isnan(self.arrival_rps) else {"arrival_rps": self.arrival_rps}),
            **queue,
            **({"loaded": list(self.loaded)} if self.loaded else {}),
            **({"mix": self.mix.as_list()} if self.mix.steps else {}),
            **({"occupied_s": dict(self.occupied_s)} if self.occupied_s else {}),
            **({} if math.isnan(self.tail_latency_s) else {"tail_latency_s": self.tail_latency_s}),
            **({"changing": True} if self.changing else {}),
            **({"batched": dict(self.batched)} if self.batched else {}),
            **({"held_s": dict(self.held_s)} if self.held_s else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Observation:
        """The inverse of :meth:`as_dict`."""
        numbers = {name: math.nan if data[name] is None else float(data[name]) for name in _NUMBERS}
        return cls(
            now_s=float(data["now_s"]),
            requests=int(data["requests"]),
            served={str(name): int(count) for name, count in data["served"].items()},
            running=None if data["running"] is None else Layout.parse(data["running"]),
            sample=None if data.get("sample") is None else Sample.from_dict(data["sample"]),
            waits_for=str(data.get("waits_for", "")),
            arrival_rps=float(data.get("arrival_rps", math.nan)),
            queued=int(data.get("queued", 0)),
            oldest_wait_s=float(data.get("oldest_wait_s", 0.0)),
            loaded=tuple(str(name) for name in data.get("loaded", ())),
            mix=VariantMix.of(data.get("mix", ())),
            occupied_s={str(name): float(value) for name, value in data.get("occupied_s", {}).items()},
            tail_latency_s=float(data.get("tail_latency_s", math.nan)),
            changing=bool(data.get("changing", False)),
            batched={str(name): float(value) for name, value in data.get("batched", {}).items()},
            held_s={str(name): float(value) for name, value in data.get("held_s", {}).items()},
            **numbers,
        )


_NUMBERS = ("g_per_kwh", "rate_rps", "latency_s", "power_w")


def tail_latency_s(latencies_s: Sequence[float], answered_s: Sequence[float], now_s: float) -> float:
    """The 99th percentile over the answers of the last second, or the latest hundred where they took longer, seconds.

    Args:
        latencies_s: Latencies of answers; NaN is returned for fewer than ten.
        answered_s: When each was given, Unix seconds.
        now_s: Unix seconds.
    """
    if len(latencies_s) < _LEAST_ANSWERS:
        return math.nan
    latest = sorted(zip(answered_s, latencies_s, strict=True))
    recent = sum(at_s > now_s - _RECENT_S for at_s, _ in latest)
    return float(np.quantile([latency_s for _, latency_s in latest[-max(recent, _TAIL_ANSWERS) :]], TAIL_QUANTILE))
