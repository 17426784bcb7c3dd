"""Controllers of a burst study: the live policy, or Proteus's rule as published.

Proteus (Ahmad et al., ASPLOS 2024) estimates the demand by an exponentially weighted mean of arrivals a second, chooses
by a mixed integer program the most accurate variants whose throughput covers 1.05 times that demand, re-solves every
10 s (every 2 s while its artifact's bursty traces exceed a rate), routes requests in the proportions of the solution,
and drops a request that cannot be answered in time. Here one service runs on a few slices, so that the program is
solved exactly by enumeration. Both controllers use the batch sizes of the profile; without them, a batch is one
request. Proteus's variants are loaded everywhere, so a change costs nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks._elastic_service import ElasticService
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.serving.mix import OWN, MixCounter, VariantMix
from joulery.perf.layouts import Predictor
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_WEIGHTS, Observation, tail_latency_s
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.stepper import PolicyStepper


@dataclass(eq=False)
class PolicyController:
    """The live service policy.

    Attributes:
        policy: The policy.
        g_per_kwh: Carbon intensity: a constant, or a function of time.
        decisions: ``(t_s, decision)`` so far.
    """

    policy: ServicePolicy
    g_per_kwh: Any = 200.0
    decisions: list[tuple[float, Any]] = field(default_factory=list)
    _service: ElasticService | None = None
    _steering: MixCounter = field(default_factory=MixCounter)

    def __post_init__(self) -> None:
        self._stepper = PolicyStepper(self.policy, self._observe, self._watch)

    @property
    def state(self) -> Any:
        """The policy's state."""
        return self._stepper.state

    def decide(self, now_s: float, service: ElasticService) -> None:
        """Run one step of the policy; two at the start if variants are loaded everywhere, as a live session does."""
        self._service = service
        started = service.running is not None
        self._step(now_s, service)
        if not started and service.settings.loaded:
            self._step(now_s, service)

    def _step(self, now_s: float, service: ElasticService) -> None:
        for decision in self._stepper.step(now_s).decisions:
            self.decisions.append((now_s, decision))
            if decision.kind == SET_WEIGHTS:
                self._steering.mix = VariantMix.of(decision.value)
                service.steering = self._steering
                service.note(f"weights {dict(self._steering.mix.steady)}")
            elif decision.kind != KEEP_LAYOUT or service.changing:
                service.run(Layout.parse(decision.value))

    def _watch(self, now_s: float, seen: Observation, step: Any) -> None:
        assert self._service is not None
        self._service.limit = self.policy.queue_limit(step.state, seen)

    def _observe(self, now_s: float) -> Observation:
        service = self._service
        assert service is not None
        span_s = service.settings.window_s
        ended = service.ended_since(now_s - span_s)
        answers: dict[str, list[int]] = {}
        for request in ended:
            answers.setdefault(service.variant_of(request), []).append(request)
        answers = dict(sorted(answers.items()))
        parts = {name: 1.0 / service.batch_of(mine) for name, mine in answers.items()}
        batches = any(part.min() < 1.0 for part in parts.values())
        latencies_s, quantile = service.latency_of(ended), self.policy.objectives.slo.quantile
        latency_s = float(np.quantile(latencies_s, quantile)) if ended else math.nan
        answered_s = service.arrival_s[ended] + latencies_s
        g_per_kwh = self.g_per_kwh(now_s) if callable(self.g_per_kwh) else self.g_per_kwh
        return Observation(
            now_s=now_s,
            g_per_kwh=g_per_kwh,
            rate_rps=service.arrivals_between(now_s - span_s, now_s) / span_s if now_s >= span_s else math.nan,
            latency_s=latency_s,
            requests=len(ended),
            served={name: len(mine) for name, mine in answers.items()},
            power_w=math.nan,
            running=service.running,
            arrival_rps=service.recent_rps(now_s),
            queued=service.queued,
            oldest_wait_s=service.oldest_wait_s(now_s),
            loaded=service.settings.loaded if service.running is not None else (),
            mix=self._steering.mix if service.steering is not None else OWN,
            occupied_s={name: float(np.mean(service.occupied_s(mine))) for name, mine in answers.items()},
            tail_latency_s=tail_latency_s(latencies_s.tolist(), answered_s.tolist(), now_s),
            changing=service.changing,
            held_s=service.held_s(now_s),
            batched={name: len(part) / math.fsum(part) for name, part in parts.items()} if batches else {},
        )


@dataclass(slots=True, eq=False)
class ProteusController:
    """Proteus's rule; see the module.

    Attributes:
        predictor: The profile.
        layout: The layout whose slices stay fixed; it runs unchanged if no variant is fast enough.
        quantile: Quantile of the SLO; a variant's service time at this quantile must be within the SLO.
        beta: Ratio of throughput to demand that a solution must reach.
        decay: Ratio of the weights of successive seconds' arrivals, of the last ten; the newest weigh most.
        interval_s, bursty_interval_s: Seconds between two solutions; the second applies while a second of the last ten
            had more than ``burst_rps`` arrivals.
        burst_rps: Arrivals a second above which the load is bursty, as in the artifact.
    """

    predictor: Predictor
    layout: Layout
    quantile: float = 0.95
    beta: float = 1.05
    decay: float = 1.6
    interval_s: float = 10.0
    bursty_interval_s: float = 2.0
    burst_rps: float = 200.0
    _counts: list[float] = field(default_factory=list)
    _solved_s: float = -math.inf

    def decide(self, now_s: float, service: ElasticService) -> None:
        """Count the last second's arrivals; solve when it is time."""
        period_s = service.settings.period_s
        if now_s > 0:
            self._counts = [*self._counts, service.arrivals_between(now_s - period_s, now_s) / period_s][-10:]
        bursty = any(count > self.burst_rps for count in self._counts)
        if now_s - self._solved_s < (self.bursty_interval_s if bursty else self.interval_s) - 1e-9:
            return
        self._solved_s = now_s
        service.run(self.solve(self.demand_rps, service.settings.slo_s))

    @property
    def demand_rps(self) -> float:
        """The exponentially weighted mean of the last seconds' arrivals; the newest weigh most."""
        if not self._counts:
            return 0.0
        weights = self.decay ** np.arange(len(self._counts))
        return float(np.average(self._counts, weights=weights))

    def solve(self, demand_rps: float, slo_s: float) -> Layout:
        """The most accurate layout whose throughput covers the demand, or else the one with most throughput.

        A variant that is slower than the SLO on a slice is not used there.
        """
        options = []
        for names in itertools.product(sorted(self.predictor.accuracy_ratio), repeat=len(self.layout.slices)):
            layout = Layout(Instance(name, piece) for name, piece in zip(names, self.layout.slices, strict=True))
            entries = self.predictor.instances(layout)
            if any(entry.slowest_s(self.quantile) > slo_s for entry in entries):
                continue
            rate_rps = math.fsum(1.0 / entry.each_s for entry in entries)
            covers = rate_rps >= self.beta * demand_rps
            accuracy_ratio = self.predictor.when_busy(layout, 1.0).accuracy_ratio
            options.append(((covers, accuracy_ratio if covers else rate_rps, rate_rps), layout))
        return max(options, key=lambda one: one[0])[1] if options else self.layout
