"""Simulation of one serving device under the policy that learns its power limit, as ``joulery up`` runs the policy.

The plant is a queue with several servers. Its true slowdown and power at each limit, and its noise, are its own; the
policy sees only requests and joules. A running request continues at the speed of the limit that is set.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from joulery.policies.clocks.limit_comparison import WorkTotals
from joulery.policies.clocks.service_limit import (
    ServiceLimitState,
    ServiceLimitTuner,
    ServicePressure,
    ServingDeviceView,
)

Response = Callable[[float], tuple[float, float]]
"""Maps a limit (a share of full power) to service time and power above idle, both against full power."""
Truth = Callable[[float], Response]
"""Maps a time, s, to the response at that time."""


@dataclass(frozen=True, slots=True)
class LimitedServiceLoad:
    """Load of a device.

    Attributes:
        rate_rps: Arrivals at a time, 1/s; Poisson within a period.
        service_s: Mean service time at full power by kind, s; kinds arrive equally often.
        noise: Standard deviation of the logarithm of a service time.
        servers: Requests that run at once.
        slo_s: Latency of the SLO, s; kept by 95 % of the answers.
        idle_w, busy_w: Power of the idle device, and above it with every server busy, W.
    """

    rate_rps: Callable[[float], float]
    service_s: tuple[float, ...] = (0.05, 0.2)
    noise: float = 0.3
    servers: int = 4
    slo_s: float = 10.0
    idle_w: float = 60.0
    busy_w: float = 180.0


@dataclass(slots=True)
class _Request:
    kind: int
    arrival_s: float
    base_s: float
    """Service time of the request at full power, s."""
    left_s: float
    start_s: float = math.nan
    fresh: bool = False


@dataclass(slots=True)
class LimitedServiceRun:
    """Result of a run.

    Attributes:
        timeline: When each limit was set: ``(s, share of full power)``.
        answered: Requests answered.
        service_s: Sum of their service times, s.
        base_s: The same at full power, s: the truth, which the policy does not see.
        in_time: Answered requests within the SLO.
        energy_j: Energy, J.
        state: The policy's last state.
    """

    timeline: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 1.0)])
    answered: int = 0
    service_s: float = 0.0
    base_s: float = 0.0
    in_time: int = 0
    energy_j: float = 0.0
    state: ServiceLimitState = field(default_factory=ServiceLimitState)

    @property
    def slowdown(self) -> float:
        """Service time over that at full power; NaN without an answer."""
        return self.service_s / self.base_s if self.base_s > 0 else math.nan


@dataclass(slots=True)
class _Plant:
    load: LimitedServiceLoad
    truth: Truth
    settle_s: float
    rng: np.random.Generator
    run: LimitedServiceRun
    now_s: float = 0.0
    ratio: float = 1.0
    set_s: float = -math.inf
    queue: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    answers: dict[str, WorkTotals] = field(default_factory=dict)
    late: deque[bool] = field(default_factory=lambda: deque(maxlen=100))

    def advance(self, until_s: float) -> None:
        """Serve until ``until_s``, event by event."""
        span_s = until_s - self.now_s
        count = self.rng.poisson(self.load.rate_rps(self.now_s) * span_s)
        arrivals = deque(np.sort(self.now_s + span_s * self.rng.random(count)).tolist())
        while self.now_s < until_s:
            slowdown, power = self.truth(self.now_s)(self.ratio)
            end_s = self.now_s + min([one.left_s for one in self.running], default=math.inf) * slowdown
            next_s = min(end_s, arrivals[0] if arrivals else math.inf, until_s)
            dt_s, busy = next_s - self.now_s, len(self.running) / self.load.servers
            self.run.energy_j += dt_s * (self.load.idle_w + busy * self.load.busy_w * power)
            for one in self.running:
                one.left_s -= dt_s / slowdown if math.isfinite(slowdown) else 0.0
            self.now_s = next_s
            if arrivals and next_s == arrivals[0]:
                self._arrive(arrivals.popleft())
            self._end()
            self._start()

    def _arrive(self, at_s: float) -> None:
        kind = int(self.rng.integers(len(self.load.service_s)))
        sigma = self.load.noise
        base_s = self.load.service_s[kind] * math.exp(sigma * self.rng.standard_normal() - sigma**2 / 2)
        self.queue.append(_Request(kind, at_s, base_s, base_s))

    def _start(self) -> None:
        while self.queue and len(self.running) < self.load.servers:
            one = self.queue.popleft()
            one.start_s, one.fresh = self.now_s, self.now_s >= self.set_s + self.settle_s
            self.running.append(one)

    def _end(self) -> None:
        for one in [each for each in self.running if each.left_s <= 1e-12]:
            self.running.remove(one)
            took_s, fresh = self.now_s - one.start_s, one.fresh and one.start_s >= self.set_s
            kind = f"kind {one.kind}"
            before = self.answers.pop(kind, None) or WorkTotals(kind)
            self.answers[kind] = WorkTotals(
                kind,
                before.count + 1,
                before.size + 1,
                before.service_s + took_s,
                before.fresh_count + fresh,
                before.fresh_size + fresh,
                before.fresh_s + (took_s if fresh else 0.0),
            )
            self.run.answered += 1
            self.run.service_s += took_s
            self.run.base_s += one.base_s
            in_time = self.now_s - one.arrival_s <= self.load.slo_s
            self.run.in_time += in_time
            self.late.append(not in_time)

    def view(self) -> ServingDeviceView:
        """The policy's view of the device; clears the answers counted since the last view."""
        ages = [self.now_s - one.arrival_s for one in (*self.queue, *self.running)]
        judged = 1 - sum(self.late) / len(self.late) if self.late else math.nan
        pressure = ServicePressure(
            "service", self.load.slo_s, 0.95, max(ages, default=0.0), 0.0, judged, len(self.late)
        )
        answers, self.answers = tuple(self.answers.values()), {}
        return ServingDeviceView(
            self.now_s,
            self.ratio,
            self.set_s,
            self.run.energy_j,
            self.load.servers,
            math.fsum(self.now_s - one.start_s for one in self.running),
            answers,
            (pressure,),
        )


def run_limited_service(
    tuner: ServiceLimitTuner,
    load: LimitedServiceLoad,
    truth: Truth,
    elapsed_s: float,
    seed: int,
    watch: Callable[[ServingDeviceView, LimitedServiceRun, ServiceLimitState], None] | None = None,
) -> LimitedServiceRun:
    """Simulate the device under the policy, which runs once a period; limits take effect at once.

    Args:
        tuner: The policy.
        load: Load and device.
        truth: True response to a limit, by time.
        elapsed_s: Length of the run, s.
        seed: Seed of arrivals and service times.
        watch: Called after every step with the view, the result so far and the policy's state.
    """
    run = LimitedServiceRun(state=tuner.initial())
    plant = _Plant(load, truth, tuner.settle_s, np.random.default_rng(seed), run)
    while plant.now_s < elapsed_s:
        plant.advance(min(plant.now_s + tuner.period_s, elapsed_s))
        view = plant.view()
        step = tuner.step(run.state, view)
        run.state = step.state
        for decision in step.decisions:
            plant.ratio, plant.set_s = float(decision.value), plant.now_s
            run.timeline.append((plant.now_s, plant.ratio))
        if watch is not None:
            watch(view, run, step.state)
    return run
