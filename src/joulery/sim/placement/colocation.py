"""Instances that share a GPU, event by event: neighbours affect one another only while they execute.

The batching rule is that of :mod:`joulery.sim.queues.batching`. Arrival times are known beforehand, so the
time of the next batch follows from them: only batches have events, requests have none. Between two changes of the
executing batches, each batch progresses at the speed that the GPU's true behaviour gives it beside the others; at each
change the remaining work is carried over to the new speed. Power is integrated over the same stretches.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray, readonly
from joulery.sim.core.kernel import Kernel, Rank
from joulery.sim.placement.gpu import GpuTruth, SimulatedProcess
from joulery.sim.queues.batching import Batches, BatchRule

_CODE_BITS = 16
"""Bits of each tenant in the number that identifies a set of executing processes; a tenant has fewer variants."""


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """One instance and the requests routed to it.

    Attributes:
        model: Which model it runs.
        share_ratio: Its share of the GPU, 0 to 1.
        rule: When its batches form.
        arrival_s: Its requests, float64[n], non-decreasing.
        noise: Factor on the work of its first, second ... batch, float64[n].
    """

    model: str
    share_ratio: float
    rule: BatchRule
    arrival_s: FloatArray
    noise: FloatArray


@dataclass(frozen=True, slots=True)
class GpuRun:
    """Result for one GPU.

    Attributes:
        batches: The batches of each tenant.
        busy_s: Seconds within the window that each tenant executed.
        dynamic_j: Joules above idle that each tenant drew within the window.
        idle_j: Idle energy of the window.
        clock_mhz: Mean clock over the time within the window that anything executed; NaN if nothing did.
    """

    batches: tuple[Batches, ...]
    busy_s: tuple[float, ...]
    dynamic_j: tuple[float, ...]
    idle_j: float
    clock_mhz: float


def serve_together(truth: GpuTruth, tenants: Sequence[Tenant], begin_s: float, end_s: float) -> GpuRun:
    """Serve every request of every tenant on one GPU; energy and busy time count within ``[begin_s, end_s)``."""
    return GpuSimulation(truth, tenants, begin_s, end_s).run()


class _Instance:
    """State of one tenant during a simulation."""

    __slots__ = (
        "busy",
        "busy_s",
        "code",
        "due_s",
        "dynamic_j",
        "executing",
        "index",
        "loaded",
        "next_s",
        "processes",
        "remaining",
        "slot",
        "taken",
        "watts",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.taken = 0  # requests in batches so far
        self.slot = 0  # requests of the batch that loads or waits loaded
        self.loaded = False  # whether it waits loaded
        self.executing: SimulatedProcess | None = None
        self.code = 0  # of what executes, in the code of the company
        self.processes: dict[tuple[float, str, int], tuple[SimulatedProcess, int]] = {}
        self.remaining = self.busy = self.watts = 0.0  # share of the work left; its whole time and power in company
        self.due_s = self.next_s = math.inf  # when it is complete, and the first event that looks whether it is
        self.busy_s = self.dynamic_j = 0.0


class GpuSimulation:
    """One GPU and its tenants, event by event.

    Attributes:
        tenants: The instances on it; replacing one changes what its next batches run with.
        kernel: The event kernel; other components may schedule events on it too.

    Args:
        truth: How the GPU behaves.
        tenants: Its tenants.
        begin_s, end_s: Energy and busy time count within.
    """

    def __init__(self, truth: GpuTruth, tenants: Sequence[Tenant], begin_s: float, end_s: float) -> None:
        self.truth, self.tenants = truth, list(tenants)
        self.begin_s, self.end_s = begin_s, end_s
        self.instances = [_Instance(index) for index in range(len(tenants))]
        self.running: list[_Instance] = []
        self.company = 0  # the sum of the codes of what executes: one number for each company
        self.arrivals = [tenant.arrival_s.tolist() for tenant in tenants]
        self.noise = [tenant.noise.tolist() for tenant in tenants]
        self.records: list[list[tuple[int, float, float]]] = [[] for _ in tenants]
        self.known: dict[int, tuple[tuple[tuple[float, float], ...], float]] = {}
        self.load_s: dict[tuple[int, int], float] = {}
        self.changed_s, self.clock, self.clock_time, self.active_time = -math.inf, 0.0, 0.0, 0.0
        self.kernel = Kernel()
        self.kernel.on("loaded", Rank.COMPLETION, self._on_loaded)
        self.kernel.on("done", Rank.COMPLETION, self._on_done)
        self.kernel.on("form", Rank.POLICY, self._on_form)

    def run(self) -> GpuRun:
        """Serve every request of every tenant."""
        for one in self.instances:
            self._consider(self.kernel.now_s, one)
        self.kernel.run()
        self._elapse(self.end_s)
        batches = []
        for record in self.records:
            sizes, starts, finishes = zip(*record, strict=True) if record else ((), (), ())
            batches.append(
                Batches(readonly(sizes, np.int64), readonly(starts, np.float64), readonly(finishes, np.float64))
            )
        return GpuRun(
            batches=tuple(batches),
            busy_s=tuple(each.busy_s for each in self.instances),
            dynamic_j=tuple(each.dynamic_j for each in self.instances),
            idle_j=self.truth.idle_w * (self.end_s - self.begin_s),
            clock_mhz=self.clock_time / self.active_time if self.active_time > 0 else math.nan,
        )

    def latencies(self, index: int, since_s: float, arrived_s: float = -math.inf) -> FloatArray:
        """Latencies of a tenant's requests answered after ``since_s`` that arrived at ``arrived_s`` or later."""
        arrivals, found = self.arrivals[index], []
        first = sum(size for size, _, _ in self.records[index])
        for size, _, finish_s in reversed(self.records[index]):
            first -= size
            if math.isnan(finish_s):
                continue
            if finish_s <= since_s:
                break
            found += [finish_s - came_s for came_s in arrivals[first : first + size] if came_s >= arrived_s]
        return np.array(found, np.float64)

    def _consider(self, t_s: float, one: _Instance) -> None:
        """Form the next batch or schedule its formation, unless a batch already loads or waits loaded."""
        index, arrivals = one.index, self.arrivals[one.index]
        if one.slot or one.taken >= len(arrivals):
            return
        rule = self.tenants[index].rule
        last = one.taken + rule.batch - 1
        form_s: float = arrivals[last] if last < len(arrivals) else math.inf
        if one.executing is None:
            form_s = min(form_s, arrivals[one.taken] + rule.max_delay_s)
        if form_s <= t_s:
            self._on_form(t_s, one)
        elif form_s < math.inf:
            self.kernel.at(form_s, "form", one)

    def _on_form(self, t_s: float, one: _Instance) -> None:
        """Form a batch of the waiting requests, if the batch rule allows it now."""
        index, arrivals = one.index, self.arrivals[one.index]
        if one.slot or one.taken >= len(arrivals):
            return
        tenant = self.tenants[index]
        most = min(len(arrivals), one.taken + tenant.rule.batch)
        waiting = bisect_right(arrivals, t_s, one.taken, most) - one.taken
        if waiting < tenant.rule.batch:
            patient = not waiting or t_s < arrivals[one.taken] + tenant.rule.max_delay_s
            if patient or one.executing is not None:
                return
        one.slot = waiting
        one.taken += waiting
        newcomer, code = self._process(one, tenant, waiting)
        key = self.company - one.code, code
        load_s = self.load_s.get(key)
        if load_s is None:
            others = [each.executing for each in self.running if each.executing is not None and each is not one]
            load_s = self.load_s[key] = self.truth.conditions((*others, newcomer)).effects[-1].load_s
        self.kernel.at(t_s + load_s, "loaded", one)

    def _process(self, one: _Instance, tenant: Tenant, size: int) -> tuple[SimulatedProcess, int]:
        """Process of an instance for a batch size, and its code: sums of codes identify sets of processes."""
        key = tenant.share_ratio, tenant.model, size
        found = one.processes.get(key)
        if found is None:
            code = (len(one.processes) + 1) << (_CODE_BITS * one.index)
            found = one.processes[key] = SimulatedProcess(tenant.model, tenant.share_ratio, size), code
        return found

    def _on_loaded(self, t_s: float, one: _Instance) -> None:
        one.loaded = True
        if one.executing is None:
            self._start(t_s, one)

    def _start(self, t_s: float, one: _Instance) -> None:
        index, tenant = one.index, self.tenants[one.index]
        self._elapse(t_s)
        one.loaded = False
        one.executing, one.code = self._process(one, tenant, one.slot)
        self.company += one.code
        self.running = [each for each in self.instances if each.executing is not None]
        one.remaining = self.noise[index][len(self.records[index])]
        one.busy, one.next_s = 0.0, math.inf
        self.records[index].append((one.slot, t_s, math.nan))
        one.slot = 0
        self._regroup(t_s)
        self._consider(t_s, one)

    def _on_done(self, t_s: float, one: _Instance) -> None:
        if one.executing is None or t_s != one.next_s:
            return  # an earlier event looked, or looks, in its place
        if t_s < one.due_s:  # its company slowed it down since
            one.next_s = one.due_s
            self.kernel.at(one.due_s, "done", one)
            return
        self._elapse(t_s)
        record = self.records[one.index]
        size, start_s, _ = record[-1]
        record[-1] = (size, start_s, t_s)
        one.executing = None
        self.company -= one.code
        one.code = 0
        self.running.remove(one)
        self._regroup(t_s)
        if one.loaded:
            self._start(t_s, one)
        else:
            self._consider(t_s, one)

    def _elapse(self, t_s: float) -> None:
        """Carry work, energy and clock forward to ``t_s``."""
        since_s, self.changed_s = self.changed_s, t_s
        if not self.running:
            return
        inside_s = max(0.0, min(t_s, self.end_s) - max(since_s, self.begin_s))
        for one in self.running:
            one.remaining -= (t_s - since_s) / one.busy
            one.busy_s += inside_s
            one.dynamic_j += inside_s * one.watts
        self.active_time += inside_s
        self.clock_time += inside_s * self.clock

    def _regroup(self, t_s: float) -> None:
        """Set the speed of every executing batch to that beside the batches that execute now."""
        if not self.running:
            return
        found = self.known.get(self.company)
        if found is None:
            together = tuple(one.executing for one in self.running if one.executing is not None)
            effects, clock = self.truth.conditions(together)
            found = self.known[self.company] = tuple((each.busy_s, each.dynamic_w) for each in effects), clock
        speeds, self.clock = found
        for one, (busy_s, watts) in zip(self.running, speeds, strict=True):
            one.watts = watts
            if busy_s != one.busy:
                one.busy = busy_s
                one.due_s = max(t_s, t_s + one.remaining * busy_s)
                if one.due_s < one.next_s:
                    one.next_s = one.due_s
                    self.kernel.at(one.due_s, "done", one)
