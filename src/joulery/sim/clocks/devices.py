"""Emulated devices whose clock changes while requests run, for the study of clock governors.

Each device serves its models first come, first served, one request at a time. A request is ``work`` passes of its
model; a pass takes ``latency_s[model, clock]``, and the rest of a pass continues at the new clock after a clock
change. Board power is that of a busy or an idle device at the present clock; a new clock takes ``switch_s`` to
apply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.decisions import Decision
from joulery.domain.errors import DataError
from joulery.domain.ports import Policy
from joulery.domain.quantile import quantile_of
from joulery.policies.clocks.governor import DeviceView, GovernorState, Waiting, late_budget
from joulery.policies.clocks.lowest_clock import PartitionLatency
from joulery.sim.core.driver import Driver
from joulery.sim.core.kernel import Kernel, Rank

_COUNTED = 1000
"""Number of latest answers of a device over which late ones are counted."""


@dataclass(frozen=True, slots=True, eq=False)
class ClockedPlant:
    """True properties of the devices.

    Attributes:
        clocks_mhz: Supported clocks, ascending, float64[clocks].
        busy_w, idle_w: Board power at each clock, W, float64[clocks].
        latency_s: Time of one pass of each model at each clock, s, float64[models, clocks].
        slo_s: Latency allowance of each model, s, float64[models].
        elasticity: Relative slowdown per relative clock loss of each model, float64[models]; for reacting governors.
        device_of: Device of each model, int64[models].
        believed_latency_s: ``latency_s`` as governors assume it; None where they know the true values.
        believed_energy_j: Energy above idle of one pass of each model at each clock as governors assume it, J,
            float64[models, clocks]; None where they know the true values.
        switch_s: Delay from a decision to the new clock, s.
        least_devices: Minimum number of devices; devices without a model idle.
        slo_quantile: Share of the answers that must be within ``slo_s``.
    """

    clocks_mhz: FloatArray
    busy_w: FloatArray
    idle_w: FloatArray
    latency_s: FloatArray
    slo_s: FloatArray
    elasticity: FloatArray
    device_of: IntArray
    switch_s: float = 0.02
    least_devices: int = 0
    believed_latency_s: FloatArray | None = None
    believed_energy_j: FloatArray | None = None
    slo_quantile: float = 0.99

    @property
    def devices(self) -> int:
        """Number of devices."""
        return max(int(self.device_of.max()) + 1, self.least_devices)


@dataclass(frozen=True, slots=True, eq=False)
class ModelRequests:
    """The workload: arrival time, model, true work and predicted work of each request.

    Attributes:
        arrival_s: Non-decreasing, s, float64[n].
        model: Which model, int64[n].
        work: Passes of the model, float64[n], > 0.
        predicted_work: What a governor assumes, float64[n], > 0.
    """

    arrival_s: FloatArray
    model: IntArray
    work: FloatArray
    predicted_work: FloatArray

    def __post_init__(self) -> None:
        lengths = {len(self.arrival_s), len(self.model), len(self.work), len(self.predicted_work)}
        if len(lengths) != 1:
            raise DataError(f"columns of requests differ in length: {sorted(lengths)}")
        if not bool(np.all(self.work > 0)) or not bool(np.all(self.predicted_work > 0)):
            raise DataError("the work of a request must be positive")


@dataclass(frozen=True, slots=True, eq=False)
class ClockedRun:
    """Result of a run.

    Attributes:
        latency_s: Arrival to completion of each request, s, float64[n].
        energy_j: Energy of each device until the last event or the end of the workload, J, float64[devices].
        duration_s: How long each device was metered, s, float64[devices].
        decisions: Every decision with its instant, in order.
    """

    latency_s: FloatArray
    energy_j: FloatArray
    duration_s: FloatArray
    decisions: tuple[tuple[float, Decision], ...]

    @property
    def power_w(self) -> float:
        """Mean board power of a device, W."""
        return float(np.mean(self.energy_j / self.duration_s))

    def attainment_ratio(self, slo_s: npt.ArrayLike) -> float:
        """Share of requests answered within their SLO."""
        return float(np.mean(self.latency_s <= np.asarray(slo_s, np.float64))) if len(self.latency_s) else 1.0


class _Device:
    """One device inside a run: a queue, a clock, and the energy so far."""

    def __init__(self, run: _Run, index: int, clock: int) -> None:
        self.run, self.index, self.clock = run, index, clock
        self.queue: deque[int] = deque()
        self.models = np.flatnonzero(run.plant.device_of == index)
        self.hosted = [(float(run.plant.slo_s[m]), float(run.plant.latency_s[m, -1])) for m in self.models]
        self.recent: dict[int, deque[tuple[float, float]]] = {int(m): deque(maxlen=400) for m in self.models}
        self.in_time: deque[bool] = deque(maxlen=_COUNTED)
        self.late = 0
        self.energy_j = 0.0
        self.since_s = 0.0
        self.version = 0
        self.wanted = clock
        self.driver: Driver[GovernorState, DeviceView] | None = None

    def advance(self, now_s: float) -> None:
        """Account for the time since the last event: energy, and the work done on the head of the queue."""
        plant, elapsed_s = self.run.plant, now_s - self.since_s
        self.energy_j += elapsed_s * float((plant.busy_w if self.queue else plant.idle_w)[self.clock])
        if self.queue:
            head = self.queue[0]
            done = elapsed_s / plant.latency_s[self.run.requests.model[head], self.clock]
            self.run.left[head] -= done
            self.run.predicted_left[head] = max(self.run.predicted_left[head] - done, 0.0)
        self.since_s = now_s

    def judge(self, in_time: bool) -> None:
        """Add an answer, in time or late, to the count of the latest answers."""
        if len(self.in_time) == self.in_time.maxlen:
            self.late -= not self.in_time[0]
        self.in_time.append(in_time)
        self.late += not in_time

    def replan(self) -> None:
        """Schedule the completion of the head at the present clock; older schedules become stale."""
        self.version += 1
        if self.queue:
            head = self.queue[0]
            pass_s = self.run.plant.latency_s[self.run.requests.model[head], self.clock]
            finish_s = self.since_s + max(self.run.left[head], 0.0) * pass_s
            self.run.kernel.at(finish_s, "done", (self.index, self.version))


class _Run:
    """One simulation: the plant, the workload, one governor a device, in one kernel."""

    def __init__(
        self,
        plant: ClockedPlant,
        requests: ModelRequests,
        governor: Callable[[int], Policy[GovernorState, DeviceView]],
        period_s: float | None,
    ) -> None:
        self.plant, self.requests, self.kernel = plant, requests, Kernel()
        self.reacts_to_events = period_s is None
        self.left = requests.work.copy()
        self.predicted_left = requests.predicted_work.copy()
        self.latency_s = np.zeros(len(requests.work))
        self.unanswered = len(requests.work)
        self.decisions: list[tuple[float, Decision]] = []
        self.index_of: dict[float, int] = {float(clock): k for k, clock in enumerate(plant.clocks_mhz)}
        self.pass_s = plant.latency_s if plant.believed_latency_s is None else plant.believed_latency_s
        true_j = (plant.busy_w - plant.idle_w[0])[None, :] * plant.latency_s
        self.pass_j = true_j if plant.believed_energy_j is None else plant.believed_energy_j
        self.kernel.on("done", Rank.COMPLETION, self._done)
        self.kernel.on("clock", Rank.COMPLETION, self._clock)
        self.kernel.on("request", Rank.ARRIVAL, self._arrive)
        self.kernel.feed(requests.arrival_s, "request")
        self.devices = [_Device(self, index, len(plant.clocks_mhz) - 1) for index in range(plant.devices)]
        for device in self.devices:
            device.driver = self._drive(device, governor(device.index), period_s)

    def _drive(
        self, device: _Device, policy: Policy[GovernorState, DeviceView], period_s: float | None
    ) -> Driver[GovernorState, DeviceView]:
        return Driver(
            self.kernel,
            f"device {device.index}",
            policy,
            lambda now_s: self._view(device, now_s),
            lambda now_s, decision: self._act(device, now_s, decision),
            period_s=period_s,
        )

    def _arrive(self, now_s: float, number: int) -> None:
        device = self.devices[int(self.plant.device_of[self.requests.model[number]])]
        device.advance(now_s)
        device.queue.append(number)
        if len(device.queue) == 1:
            device.replan()
        self._poke(device)

    def _done(self, now_s: float, payload: tuple[int, int]) -> None:
        device = self.devices[payload[0]]
        if payload[1] != device.version:
            return
        device.advance(now_s)
        number = device.queue.popleft()
        latency_s = now_s - float(self.requests.arrival_s[number])
        self.latency_s[number] = latency_s
        self.unanswered -= 1
        model = int(self.requests.model[number])
        device.recent[model].append((now_s, latency_s))
        device.judge(latency_s <= float(self.plant.slo_s[model]))
        device.replan()
        self._poke(device)

    def _clock(self, now_s: float, payload: tuple[int, int]) -> None:
        device, clock = self.devices[payload[0]], payload[1]
        if clock != device.wanted:
            return
        device.advance(now_s)
        device.clock = clock
        device.replan()

    def _act(self, device: _Device, now_s: float, decision: Decision) -> None:
        self.decisions.append((now_s, decision))
        if decision.kind == "set_clock":
            device.wanted = self._index_of(float(decision.value))
            self.kernel.at(now_s + self.plant.switch_s, "clock", (device.index, device.wanted))

    def _index_of(self, clock_mhz: float) -> int:
        """Index of the lowest supported clock that is not below the requested one; of the highest clock if all are."""
        exact = self.index_of.get(clock_mhz)
        top = len(self.plant.clocks_mhz) - 1
        return exact if exact is not None else min(int(np.searchsorted(self.plant.clocks_mhz, clock_mhz)), top)

    def _poke(self, device: _Device) -> None:
        if device.driver is not None and self.reacts_to_events:
            device.driver.poke()

    def _view(self, device: _Device, now_s: float) -> DeviceView:
        device.advance(now_s)
        plant, requests = self.plant, self.requests
        waiting: list[Waiting] = []
        finish_s = np.zeros(len(plant.clocks_mhz))
        for place, number in enumerate(device.queue):
            model, left = requests.model[number], max(self.predicted_left[number], 0.02)
            finish_s = finish_s + left * self.pass_s[model]
            slo_s = float(plant.slo_s[model])
            deadline_s = float(requests.arrival_s[number]) + slo_s
            waiting.append(Waiting(deadline_s, slo_s, finish_s, left * self.pass_j[model], queued=place > 0))
        shortest_s = float(plant.slo_s[device.models].min()) if len(device.models) else float("inf")
        clock_mhz = float(plant.clocks_mhz[device.wanted])
        partitions = [self._tail(device, int(model), now_s) for model in device.models]
        budget = late_budget(len(device.in_time), device.late, plant.slo_quantile)
        return DeviceView(
            now_s, str(device.index), clock_mhz, waiting, shortest_s, partitions, device.hosted, late_budget=budget
        )

    def _tail(self, device: _Device, model: int, now_s: float) -> PartitionLatency:
        """p99 of the last 10 s or 20 completions, whichever holds more; a waiting request counts with its age."""
        recent = device.recent[model]
        while len(recent) > 20 and recent[0][0] < now_s - 10.0:
            recent.popleft()
        ages = [now_s - float(self.requests.arrival_s[n]) for n in device.queue if self.requests.model[n] == model]
        idle = not ages and not (recent and recent[-1][0] >= now_s - 10.0)
        latency_s = 0.0 if idle or not recent else quantile_of([latency for _, latency in recent], 0.99)
        slo_s = float(self.plant.slo_s[model])
        return PartitionLatency(slo_s, max([latency_s, *ages]), float(self.plant.elasticity[model]))


def run_clocked_devices(
    plant: ClockedPlant,
    requests: ModelRequests,
    governor: Callable[[int], Policy[GovernorState, DeviceView]],
    *,
    duration_s: float,
    period_s: float | None = None,
) -> ClockedRun:
    """Serve every request under one governor a device.

    Args:
        plant: The devices.
        requests: The workload.
        governor: Makes the governor of a device.
        duration_s: Meter at least this long.
        period_s: Step the governors once a period; None to step them on every arrival and completion.
    """
    run = _Run(plant, requests, governor, period_s)
    run.kernel.run(until_s=duration_s)
    while run.unanswered:
        run.kernel.run(until_s=run.kernel.now_s + 1.0)
    for device in run.devices:
        device.advance(run.kernel.now_s)
    energy_j = np.array([device.energy_j for device in run.devices])
    return ClockedRun(run.latency_s, energy_j, np.full(len(energy_j), run.kernel.now_s), tuple(run.decisions))


def balanced_devices(latency_s: npt.ArrayLike, devices: int) -> IntArray:
    """Assign models to devices, longest latency first, each to the least loaded device so far: int64[models]."""
    latency = np.asarray(latency_s, np.float64)
    load, device_of = np.zeros(devices), np.zeros(len(latency), np.int64)
    for model in np.argsort(-latency, kind="stable"):
        device_of[model] = int(np.argmin(load))
        load[device_of[model]] += latency[model]
    return device_of


def best_static_clocks(
    plant: ClockedPlant, runs: Mapping[int, ClockedRun], requests: ModelRequests, attainment_ratio: float
) -> list[int]:
    """For each device, the clock of least energy among those whose own requests reach the attainment.

    Args:
        plant: The devices.
        runs: A run with every device at one clock, by clock index.
        requests: The workload of the runs.
        attainment_ratio: What each device must reach; its highest clock is taken where none does.
    """
    device = plant.device_of[requests.model]
    slo_s = plant.slo_s[requests.model]
    best: list[int] = []
    for index in range(plant.devices):
        mine = device == index
        fit: Sequence[int] = [
            k
            for k, run in runs.items()
            if not mine.any() or np.mean(run.latency_s[mine] <= slo_s[mine]) >= attainment_ratio
        ] or [max(runs)]
        best.append(min(fit, key=lambda k: float(runs[k].energy_j[index] / runs[k].duration_s[index])))
    return best
