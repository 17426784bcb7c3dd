"""Instances that share a GPU, event by event: each feels its neighbours only while they execute.

The batching rule is that of :mod:`joulery.sim.queues.batching`. Between two changes in who executes, every executing
batch progresses at the speed the GPU's truth gives it in that company; at each change the remaining work is carried
over to the new speed. Power is integrated over the same stretches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from joulery.domain.arrays import FloatArray, readonly
from joulery.sim.core.kernel import Kernel, Rank
from joulery.sim.placement.gpu import Conditions, GpuTruth, SimulatedProcess
from joulery.sim.queues.batching import Batches, BatchRule


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
    """What happened on one GPU.

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
    """The moving parts of one tenant."""

    __slots__ = (
        "arrived",
        "busy",
        "busy_s",
        "dynamic_j",
        "executing",
        "remaining",
        "slot",
        "taken",
        "version",
        "watts",
    )

    def __init__(self) -> None:
        self.arrived = self.taken = 0
        self.slot = 0  # requests of the batch that loads or waits loaded
        self.executing: SimulatedProcess | None = None
        self.remaining = self.busy = self.watts = 0.0  # share of the work left; its whole time and power in company
        self.version = 0  # of the completion that is scheduled
        self.busy_s = self.dynamic_j = 0.0


class GpuSimulation:
    """One GPU and its tenants, event by event.

    Attributes:
        tenants: The instances on it; replacing one changes what its next batches run with.
        kernel: What it runs on; others may have events of their own there.

    Args:
        truth: How the GPU behaves.
        tenants: Its tenants.
        begin_s, end_s: Energy and busy time count within.
    """

    def __init__(self, truth: GpuTruth, tenants: Sequence[Tenant], begin_s: float, end_s: float) -> None:
        self.truth, self.tenants = truth, list(tenants)
        self.begin_s, self.end_s = begin_s, end_s
        self.instances = [_Instance() for _ in tenants]
        self.arrivals = [tenant.arrival_s.tolist() for tenant in tenants]
        self.records: list[list[tuple[int, float, float]]] = [[] for _ in tenants]
        self.known: dict[tuple[SimulatedProcess, ...], Conditions] = {}
        self.loaded: set[int] = set()
        self.changed_s, self.clock, self.clock_time, self.active_time = -math.inf, 0.0, 0.0, 0.0
        self.kernel = Kernel()
        self.kernel.on("loaded", Rank.COMPLETION, self._on_loaded)
        self.kernel.on("done", Rank.COMPLETION, self._on_done)
        self.kernel.on("form", Rank.POLICY, self._on_form)

    def run(self) -> GpuRun:
        """Serve every request there is."""
        for index, tenant in enumerate(self.tenants):
            kind = f"request {index}"
            self.kernel.on(kind, Rank.ARRIVAL, partial(self._on_request, index))
            self.kernel.feed(tenant.arrival_s, kind)
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
        """Latencies of a tenant's requests that were answered after ``since_s`` and had come from ``arrived_s`` on."""
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

    def _on_request(self, index: int, t_s: float, _number: int) -> None:
        self.instances[index].arrived += 1
        self._consider(t_s, index)

    def _consider(self, t_s: float, index: int) -> None:
        """Schedule the formation of the next batch if its time is known now."""
        one, rule = self.instances[index], self.tenants[index].rule
        waiting = one.arrived - one.taken
        if one.slot or not waiting:
            return
        if waiting >= rule.batch:
            self.kernel.at(t_s, "form", index)
        elif one.executing is None and rule.max_delay_s < math.inf:
            self.kernel.at(max(t_s, self.arrivals[index][one.taken] + rule.max_delay_s), "form", index)

    def _on_form(self, t_s: float, index: int) -> None:
        one, tenant = self.instances[index], self.tenants[index]
        waiting = one.arrived - one.taken
        if one.slot or not waiting:
            return
        patient = t_s < self.arrivals[index][one.taken] + tenant.rule.max_delay_s
        if waiting < tenant.rule.batch and (one.executing is not None or patient):
            return
        one.slot = min(waiting, tenant.rule.batch)
        one.taken += one.slot
        newcomer = SimulatedProcess(tenant.model, tenant.share_ratio, one.slot)
        others = [each.executing for each in self.instances if each.executing is not None and each is not one]
        self.kernel.at(t_s + self._conditions((*others, newcomer)).effects[-1].load_s, "loaded", index)

    def _on_loaded(self, t_s: float, index: int) -> None:
        self.loaded.add(index)
        if self.instances[index].executing is None:
            self._start(t_s, index)

    def _start(self, t_s: float, index: int) -> None:
        one, tenant = self.instances[index], self.tenants[index]
        self._elapse(t_s)
        self.loaded.remove(index)
        one.executing = SimulatedProcess(tenant.model, tenant.share_ratio, one.slot)
        one.remaining = float(tenant.noise[len(self.records[index])])
        one.busy = 0.0
        self.records[index].append((one.slot, t_s, math.nan))
        one.slot = 0
        self._regroup(t_s)
        self._consider(t_s, index)

    def _on_done(self, t_s: float, payload: tuple[int, int]) -> None:
        index, version = payload
        one = self.instances[index]
        if version != one.version:
            return  # its company changed since: another completion is scheduled
        self._elapse(t_s)
        size, start_s, _ = self.records[index][-1]
        self.records[index][-1] = (size, start_s, t_s)
        one.executing = None
        self._regroup(t_s)
        if index in self.loaded:
            self._start(t_s, index)
        else:
            self._consider(t_s, index)

    def _elapse(self, t_s: float) -> None:
        """Carry work, energy and clock forward to ``t_s``."""
        since_s, self.changed_s = self.changed_s, t_s
        inside_s = max(0.0, min(t_s, self.end_s) - max(since_s, self.begin_s))
        active = False
        for one in self.instances:
            if one.executing is not None:
                active = True
                one.remaining -= (t_s - since_s) / one.busy
                one.busy_s += inside_s
                one.dynamic_j += inside_s * one.watts
        if active:
            self.active_time += inside_s
            self.clock_time += inside_s * self.clock

    def _regroup(self, t_s: float) -> None:
        """Give every executing batch the speed of the present company."""
        executing = [(index, one) for index, one in enumerate(self.instances) if one.executing is not None]
        if not executing:
            return
        together = tuple(one.executing for _, one in executing if one.executing is not None)
        effects, self.clock = self._conditions(together)
        for (index, one), effect in zip(executing, effects, strict=True):
            one.watts = effect.dynamic_w
            if effect.busy_s != one.busy:
                one.busy = effect.busy_s
                one.version += 1
                self.kernel.at(max(t_s, t_s + one.remaining * one.busy), "done", (index, one.version))

    def _conditions(self, executing: tuple[SimulatedProcess, ...]) -> Conditions:
        found = self.known.get(executing)
        if found is None:
            found = self.known[executing] = self.truth.conditions(executing)
        return found
