"""A simulated service under its live policy, with baseline periods, and the true saving that those periods estimate.

The kernel drives the same :class:`~joulery.policies.serving.switchback.AuditedPolicy` as the live service. The plant
(the simulated service) is a pool of replicas on one FIFO queue (:mod:`joulery.perf.queues.fifo_pool`) with true service
times; the policy sees a profile that may be wrong. Every request is served under the policy and again under the
baseline, with the same service time on the same variant, so the saving that an audit estimates is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.decisions import Decision
from joulery.domain.gpu.layout import Layout
from joulery.perf.queues.fifo_pool import PoolInstance, serve
from joulery.perf.switchback import SampledCost, estimate_total, sums_by_period
from joulery.policies.serving.observation import KEEP_LAYOUT, Observation
from joulery.policies.serving.switchback import AuditedPolicy, AuditTally, BaselinePeriod
from joulery.sim.core.driver import Driver
from joulery.sim.core.kernel import Kernel

_WINDOW_S, _RECENT_S = 8.0, 2.0


@dataclass(frozen=True, slots=True, eq=False)
class TrueService:
    """True costs of requests.

    Attributes:
        arrival_s: Arrivals, not decreasing, float64[n].
        cpu_s: CPU seconds that each would cost on an instance of each variant, float64[n] by variant.
        g_per_kwh: Intensity at each arrival, float64[n].
        active_w: Watts above idle of a busy core.
        idle_w: Watts of the machine with nothing to do.
        stretch_ratio: Share of a request's time that each busy neighbour adds.
        ready_s: Seconds from a decision until the new layout serves.
    """

    arrival_s: FloatArray
    cpu_s: Mapping[str, FloatArray]
    g_per_kwh: FloatArray
    active_w: float = 10.0
    idle_w: float = 20.0
    stretch_ratio: float = 0.0
    ready_s: float = 1.0

    def served(self, layout: Layout, first: int, last: int, free_s: Sequence[float]) -> Served:
        """Serve the requests from ``first`` up to ``last`` with one layout.

        Args:
            layout: The layout.
            first, last: Rows of the requests.
            free_s: From when each instance is free, Unix seconds.
        """
        work = {name: self.cpu_s[name][first:last] for name in layout.counts}
        pool = [
            PoolInstance(
                work[item.variant].tolist(), (self.stretch_ratio * work[item.variant]).tolist(), free_s=free_s[index]
            )
            for index, item in enumerate(layout.instances)
        ]
        run = serve(self.arrival_s[first:last].tolist(), pool)
        return Served(run.start_s, run.finish_s, run.service_s, run.free_s)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Start and end times and CPU seconds of some requests, float64[n].

    ``free_s`` is when each instance is free after the last request.
    """

    start_s: FloatArray
    end_s: FloatArray
    cpu_s: FloatArray
    free_s: FloatArray


@dataclass(slots=True, eq=False)
class AuditedService:
    """The simulated service: it serves the requests that have arrived whenever its policy observes it.

    Attributes:
        truth: What requests cost.
        quantile: Quantile of the SLO.
        layout: The layout that serves; None before the first decision.
        coming: Time of the next change of layout, and that layout; None if no change is pending.
        start_s, end_s, cpu_s: Start, end and CPU seconds of each served request, float64[n]; NaN for the others.
        done: Requests served so far.
    """

    truth: TrueService
    quantile: float
    layout: Layout | None = None
    coming: tuple[float, Layout] | None = None
    free_s: list[float] = field(default_factory=list)
    start_s: FloatArray = field(init=False)
    end_s: FloatArray = field(init=False)
    cpu_s: FloatArray = field(init=False)
    done: int = 0

    def __post_init__(self) -> None:
        blank = np.full(len(self.truth.arrival_s), math.nan)
        self.start_s, self.end_s, self.cpu_s = blank, blank.copy(), blank.copy()

    def advance(self, now_s: float) -> None:
        """Serve all requests that have arrived by ``now_s``."""
        if self.coming is not None and self.coming[0] <= now_s:
            at_s, layout = self.coming
            self._serve(at_s)
            self.layout, self.coming, self.free_s = layout, None, [at_s] * len(layout.instances)
        self._serve(now_s)

    def _serve(self, until_s: float) -> None:
        last = int(np.searchsorted(self.truth.arrival_s, until_s, "right"))
        if self.layout is None or last <= self.done:
            return
        part = slice(self.done, last)
        run = self.truth.served(self.layout, self.done, last, self.free_s)
        self.start_s[part], self.end_s[part], self.cpu_s[part] = run.start_s, run.end_s, run.cpu_s
        self.free_s, self.done = run.free_s.tolist(), last

    def observe(self, now_s: float) -> Observation:
        """The policy's observation."""
        self.advance(now_s)
        arrival_s = self.truth.arrival_s
        first, recent = np.searchsorted(arrival_s, [now_s - _WINDOW_S, now_s - _RECENT_S], "right")
        window = slice(int(first), self.done)
        ended = self.end_s[window] <= now_s
        waiting = self.start_s[window] > now_s
        latency_s = (self.end_s[window] - arrival_s[window])[ended]
        known = len(latency_s) > 0 and now_s >= _WINDOW_S
        row = min(max(self.done - 1, 0), len(arrival_s) - 1)
        return Observation(
            now_s=now_s,
            g_per_kwh=float(self.truth.g_per_kwh[row]),
            rate_rps=(self.done - int(first)) / _WINDOW_S if now_s >= _WINDOW_S else math.nan,
            latency_s=float(np.quantile(latency_s, self.quantile)) if known else math.nan,
            requests=len(latency_s),
            served={},
            power_w=math.nan,
            running=self.layout,
            arrival_rps=(self.done - int(recent)) / _RECENT_S if now_s >= _RECENT_S else math.nan,
            queued=int(np.count_nonzero(waiting)),
            oldest_wait_s=float(now_s - arrival_s[window][waiting].min()) if bool(waiting.any()) else 0.0,
        )

    def act(self, now_s: float, decision: Decision) -> None:
        """Carry out one decision."""
        if decision.kind != KEEP_LAYOUT:
            ready_s = 0.0 if self.layout is None else self.truth.ready_s
            self.coming = (now_s + ready_s, Layout.parse(decision.value))
            self.advance(now_s)


@dataclass(frozen=True, slots=True, eq=False)
class AuditedRun:
    """A run under an audited policy.

    Attributes:
        truth: What requests cost.
        baseline: The baseline layout.
        cpu_s, latency_s: CPU seconds and latency of each request, float64[n].
        base_cpu_s, base_latency_s: The same, had the baseline served all of them.
        periods: The periods in which the baseline really served.
        tally: Outcomes of the periods.
        duration_s: Length of the run.
    """

    truth: TrueService
    baseline: Layout
    cpu_s: FloatArray
    latency_s: FloatArray
    base_cpu_s: FloatArray
    base_latency_s: FloatArray
    periods: tuple[BaselinePeriod, ...]
    tally: AuditTally
    duration_s: float

    @property
    def true_saving_ratio(self) -> float:
        """Share of the baseline's grams above idle that the policy saves."""
        g = self.truth.g_per_kwh
        return 1.0 - float(self.cpu_s @ g) / float(self.base_cpu_s @ g)

    @property
    def true_machine_ratio(self) -> float:
        """Share of the machine's joules with the baseline, idle included, that the policy saves."""
        idle_j = self.truth.idle_w * self.duration_s
        return 1.0 - (idle_j + self._busy_j(self.cpu_s)) / (idle_j + self._busy_j(self.base_cpu_s))

    def saving(self) -> tuple[float, float, float]:
        """The estimate of :attr:`true_saving_ratio`, and its interval.

        Raises:
            DataError: There were too few periods.
        """
        g, at_s, spans = self.truth.g_per_kwh, self.truth.arrival_s, self._spans()
        cost = SampledCost(sums_by_period(at_s, self.cpu_s * g, spans), sums_by_period(at_s, g, spans), float(g.sum()))
        return estimate_total([cost]).saving(float(self.cpu_s @ g))

    def machine_saving(self) -> tuple[float, float, float]:
        """The estimate of :attr:`true_machine_ratio`, and its interval.

        Raises:
            DataError: There were too few periods.
        """
        at_s, spans = self.truth.arrival_s, self._spans()
        seconds = np.array([until_s - from_s for from_s, until_s in spans])
        busy_j = self.truth.active_w * sums_by_period(at_s, self.cpu_s, spans)
        requests = sums_by_period(at_s, np.ones(len(at_s)), spans)
        idle_j = self.truth.idle_w * seconds
        costs = [SampledCost(busy_j, requests, len(at_s)), SampledCost(idle_j, seconds, self.duration_s)]
        return estimate_total(costs).saving(self.truth.idle_w * self.duration_s + self._busy_j(self.cpu_s))

    def _busy_j(self, cpu_s: FloatArray) -> float:
        return self.truth.active_w * float(cpu_s.sum())

    def _spans(self) -> list[tuple[float, float]]:
        return [(one.from_s, one.until_s) for one in self.periods]


def run_audited(policy: AuditedPolicy, truth: TrueService, duration_s: float, *, step_s: float = 1.0) -> AuditedRun:
    """Simulate a service under an audited policy, and the same requests under the baseline.

    Args:
        policy: The policy, as the live service has it.
        truth: What requests cost.
        duration_s: Length of the run.
        step_s: Time between two steps of the policy.
    """
    kernel, service = Kernel(), AuditedService(truth, policy.policy.objectives.slo.quantile)
    periods: list[BaselinePeriod] = []

    def keep(_: float, __: Observation, step: object) -> None:
        latest = driver.state.latest
        if latest is not None and (not periods or periods[-1] != latest):
            periods.append(latest)

    driver = Driver(kernel, policy.service, policy, service.observe, service.act, period_s=step_s, watch=keep)
    kernel.run(until_s=duration_s)
    service.advance(duration_s)
    base = truth.served(policy.audit.baseline, 0, len(truth.arrival_s), [0.0] * len(policy.audit.baseline.instances))
    return AuditedRun(
        truth=truth,
        baseline=policy.audit.baseline,
        cpu_s=service.cpu_s,
        latency_s=service.end_s - truth.arrival_s,
        base_cpu_s=base.cpu_s,
        base_latency_s=base.end_s - truth.arrival_s,
        periods=tuple(periods),
        tally=driver.state.tally,
        duration_s=duration_s,
    )


def varying_arrivals(rate_rps: Callable[[FloatArray], FloatArray], duration_s: float, seed: int) -> FloatArray:
    """Arrivals of a Poisson process whose rate varies, by thinning, Unix seconds from 0.

    Args:
        rate_rps: The rate at given times.
        duration_s: Length of the process, s.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng([seed, 3])
    most = float(np.max(rate_rps(np.linspace(0.0, duration_s, 1000)))) * 1.05
    times_s = np.sort(rng.uniform(0.0, duration_s, rng.poisson(most * duration_s)))
    keep: IntArray = np.flatnonzero(rng.random(len(times_s)) * most < rate_rps(times_s))
    return np.asarray(times_s[keep])
