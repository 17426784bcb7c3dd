"""Simulation of a GPU that serves a language model with continuous batching while the live governor sets its clock.

The simulated engine follows :mod:`joulery.perf.lengths.step_time` exactly: each step generates a token of every running
request, and its duration depends on the batch, the KV cache and the clock. The governor receives the input of the live
controller: requests with predicted lengths (:func:`pending_requests`), and step times learned from observed steps.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.decisions import Decision
from joulery.domain.errors import DataError
from joulery.domain.ports import Policy
from joulery.domain.serving.service import Slo
from joulery.perf.lengths.step_time import BatchedRequest, StepCost, StepTimes
from joulery.perf.power.clock_scaling import slowdown_ratio
from joulery.policies.clocks.governor import DeviceView, GovernorState, late_budget
from joulery.policies.clocks.observation import (
    BatchingEngine,
    ClockCurves,
    ColocatedService,
    Pending,
    Work,
    pending_requests,
)
from joulery.sim.core.driver import Driver
from joulery.sim.core.kernel import Kernel, Rank

_COUNTED = 1000
_OVERRUN_RATIO = 0.25
_FIRST_GUESS = StepCost(0.02)


@dataclass(frozen=True, slots=True, eq=False)
class BatchedPlant:
    """The true properties of a GPU and its engine.

    Attributes:
        clocks_mhz: Supported clocks, ascending, float64[clocks].
        busy_w, idle_w: Board power at each clock, W, float64[clocks].
        cost: Cost of one step; its elasticity states how much a lower clock slows the step down.
        per_read_s: Time to read one prompt token at the highest clock, s; the other requests stop meanwhile.
        capacity: Sequences that fit into a batch.
        slo: Latency of an answer, from arrival to its last token.
        switch_s: Delay from a decision to the new clock, s.
    """

    clocks_mhz: FloatArray
    busy_w: FloatArray
    idle_w: FloatArray
    cost: StepCost
    per_read_s: float
    capacity: int
    slo: Slo
    switch_s: float = 0.02

    @property
    def slowdown(self) -> FloatArray:
        """Time of the same work at each clock over that at the highest."""
        return slowdown_ratio(self.clocks_mhz, self.cost.elasticity_ratio)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """The workload: requests in order of arrival.

    Attributes:
        arrival_s: Non-decreasing, s, float64[n].
        prompt_tokens, tokens: Tokens of the prompt and of the answer, float64[n], > 0.
        predicted_tokens: Tokens of the answer that the governor plans for, float64[n], > 0.
    """

    arrival_s: FloatArray
    prompt_tokens: FloatArray
    tokens: FloatArray
    predicted_tokens: FloatArray

    def __post_init__(self) -> None:
        lengths = {len(self.arrival_s), len(self.prompt_tokens), len(self.tokens), len(self.predicted_tokens)}
        if len(lengths) != 1 or not bool(np.all(self.tokens > 0)):
            raise DataError("an answer has an arrival, a prompt, tokens and predicted tokens above 0")


@dataclass(frozen=True, slots=True, eq=False)
class BatchedRun:
    """Result: latency of each answer, s, float64[n]; mean board power, W; clock changes; learned step cost."""

    latency_s: FloatArray
    power_w: float
    changes: int
    learned: StepCost

    def attainment_ratio(self, slo: Slo) -> float:
        """Share of answers within the SLO."""
        return float(np.mean(self.latency_s <= slo.latency_s))


class _Engine:
    """State of the engine during a run."""

    def __init__(self, plant: BatchedPlant, load: Answers, curves: ClockCurves | None) -> None:
        self.plant, self.load, self.kernel = plant, load, Kernel()
        self.waiting: deque[int] = deque()
        self.left: dict[int, float] = {}
        self.read_left_s = 0.0
        self.kv = 0.0
        self.clock = self.wanted = len(plant.clocks_mhz) - 1
        self.since_s = self.energy_j = 0.0
        self.version = self.changes = 0
        self.latency_s = np.full(len(load.tokens), math.nan)
        self.in_time: deque[bool] = deque(maxlen=_COUNTED)
        self.times = StepTimes(_FIRST_GUESS)
        self.slowdown = plant.slowdown
        above_w = plant.busy_w - plant.idle_w[0]
        full = plant.clocks_mhz[-1] / plant.clocks_mhz
        self.curves = curves or ClockCurves(lambda elasticity: 1.0 + elasticity * (full - 1.0), above_w / above_w[-1])
        self.full = full

    def step_s(self) -> float:
        return self.plant.cost.step_s(len(self.left), self.kv) * float(self.slowdown[self.clock])

    def advance(self, now_s: float) -> None:
        """Add the energy and the work since the last event."""
        passed_s, self.since_s = now_s - self.since_s, now_s
        self.energy_j += passed_s * float((self.plant.busy_w if self.left else self.plant.idle_w)[self.clock])
        if not self.left or passed_s <= 0:
            return
        slowdown = float(self.slowdown[self.clock])
        read_s = min(self.read_left_s, passed_s / slowdown)
        self.read_left_s -= read_s
        steps = max(passed_s - read_s * slowdown, 0.0) / self.step_s()
        if steps >= 2:
            self.times.observe(self.step_s(), len(self.left), self.kv, float(self.full[self.clock]))
        for number in self.left:
            self.left[number] -= steps
        self.kv += steps * len(self.left)

    def admit(self) -> None:
        while self.waiting and len(self.left) < self.plant.capacity:
            number = self.waiting.popleft()
            self.left[number] = float(self.load.tokens[number])
            self.kv += float(self.load.prompt_tokens[number])
            self.read_left_s += self.plant.per_read_s * float(self.load.prompt_tokens[number])

    def replan(self) -> None:
        self.version += 1
        if self.left:
            left = max(min(self.left.values()), 0.0)
            due_s = self.read_left_s * float(self.slowdown[self.clock]) + left * self.step_s()
            self.kernel.at(self.since_s + due_s, "done", self.version)

    def finish(self, now_s: float) -> None:
        for number in [number for number, left in self.left.items() if left <= 1e-6]:
            del self.left[number]
            self.kv -= float(self.load.prompt_tokens[number] + self.load.tokens[number])
            self.latency_s[number] = now_s - float(self.load.arrival_s[number])
            self.in_time.append(bool(self.latency_s[number] <= self.plant.slo.latency_s))
        self.kv = max(self.kv, 0.0) if self.left else 0.0

    def view(self, now_s: float) -> DeviceView:
        self.advance(now_s)
        slo, plant = self.plant.slo, self.plant
        mean_s = plant.cost.step_s(max(1, len(self.left)), self.kv) * float(np.mean(self.load.predicted_tokens))
        pending = [self._pending(number, True, mean_s) for number in self.left]
        pending += [self._pending(number, False, mean_s) for number in self.waiting]
        budget = late_budget(len(self.in_time), self.in_time.count(False), slo.quantile)
        work = Work(mean_s, mean_s, mean_s, plant.capacity, 0.0)
        batch = BatchingEngine(self.times.cost, plant.capacity)
        resident = ColocatedService("llm", slo, work, pending, (), True, batch, budget)
        rate = 1.0 / float(self.full[self.clock])
        waiting, start_s = pending_requests([resident], now_s, self.curves, rate)
        hosted = ((slo.latency_s, mean_s),)
        clock_mhz = float(plant.clocks_mhz[self.wanted])
        return DeviceView(
            now_s,
            "gpu:0",
            clock_mhz,
            waiting,
            slo.latency_s,
            hosted=hosted,
            start_s=start_s,
            late_budget=budget,
            batched=True,
        )

    def _pending(self, number: int, running: bool, mean_s: float) -> Pending:
        predicted, prompt = float(self.load.predicted_tokens[number]), float(self.load.prompt_tokens[number])
        written = float(self.load.tokens[number]) - self.left[number] if running else 0.0
        left = max(predicted - written, _OVERRUN_RATIO * predicted, 1.0)
        batched = BatchedRequest(left, prompt + written, 0.0 if running else self.plant.per_read_s * prompt, running)
        arrival_s = float(self.load.arrival_s[number])
        return Pending(arrival_s, mean_s, mean_s, arrival_s if running else math.nan, batched)


def run_batched_engine(
    plant: BatchedPlant,
    load: Answers,
    governor: Policy[GovernorState, DeviceView],
    *,
    duration_s: float,
    curves: ClockCurves | None = None,
) -> BatchedRun:
    """Simulate all requests under a governor that runs one step at each arrival and completion.

    Args:
        plant: The GPU and its engine.
        load: The requests.
        governor: Policy that sets the clock.
        duration_s: Meter at least this long.
        curves: Clock curves that the governor assumes; the true power with the learned elasticity if None.
    """
    engine = _Engine(plant, load, curves)
    kernel = engine.kernel
    driver: Driver[GovernorState, DeviceView] | None = None

    def changed() -> None:
        engine.admit()
        engine.replan()
        if driver is not None:
            driver.poke()

    def arrive(now_s: float, number: int) -> None:
        engine.advance(now_s)
        engine.waiting.append(number)
        changed()

    def done(now_s: float, version: int) -> None:
        if version == engine.version:
            engine.advance(now_s)
            engine.finish(now_s)
            changed()

    def clock(now_s: float, index: int) -> None:
        if index == engine.wanted:
            engine.advance(now_s)
            engine.clock = index
            engine.replan()

    def act(now_s: float, decision: Decision) -> None:
        if decision.kind == "set_clock":
            engine.changes += 1
            engine.wanted = int(np.searchsorted(plant.clocks_mhz[:-1], float(decision.value) - 1e-6))
            kernel.at(now_s + plant.switch_s, "clock", engine.wanted)

    kernel.on("done", Rank.COMPLETION, done)
    kernel.on("clock", Rank.COMPLETION, clock)
    kernel.on("request", Rank.ARRIVAL, arrive)
    kernel.feed(load.arrival_s, "request")
    driver = Driver(kernel, "gpu:0", governor, engine.view, act, period_s=None)
    kernel.run(until_s=duration_s)
    while bool(np.any(np.isnan(engine.latency_s))):
        kernel.run(until_s=kernel.now_s + 1.0)
    engine.advance(kernel.now_s)
    return BatchedRun(engine.latency_s, engine.energy_j / kernel.now_s, engine.changes, engine.times.cost)
