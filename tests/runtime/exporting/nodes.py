"""A node on an injected clock: scripted meters, stated use, an engine that counts what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from joulery.adapters.meters.fake import FakeMeter, Script
from joulery.domain.energy.workload import EngineCounters, ModelCounters, NodeWorkload, WorkloadUse
from joulery.domain.errors import CapabilityError
from joulery.runtime.exporting.channels import NodeChannels
from joulery.runtime.exporting.engines import EngineSpec, EngineWatch
from joulery.runtime.exporting.node import NodeExporter, NodeReaders

START_S = 1_700_000_000.0


class StatedBusy:
    """Processors that were busy for as long as is stated."""

    sockets, cpus = (0,), (4,)

    def __init__(self):
        self.busy_s = 0.0

    def read(self):
        return (self.busy_s,)

    def close(self):
        pass


class StatedUse:
    """Workloads by statement: process -> (workload, CPU seconds since the last reading)."""

    hidden = False

    def __init__(self):
        self.processes: dict[int, tuple[NodeWorkload, float]] = {}
        self.families: dict[int, frozenset[int]] = {}

    def read(self):
        cpu_s: dict[NodeWorkload, float] = {}
        for workload, spent_s in self.processes.values():
            cpu_s[workload] = cpu_s.get(workload, 0.0) + spent_s
        workload_of = {pid: workload for pid, (workload, _) in self.processes.items()}
        return WorkloadUse(cpu_s, workload_of, {pid: spent_s for pid, (_, spent_s) in self.processes.items()})

    def family(self, pid):
        return self.families.get(pid, frozenset({pid} & self.processes.keys()))


class HeldMeter(FakeMeter):
    """A scripted meter whose driver says which processes use its devices."""

    held: dict[str, dict[int, float] | None]

    computed: dict[str, bool | None]

    def holders(self):
        return self.held

    def busy(self):
        return dict(self.computed)


@dataclass
class StatedEngine:
    """An engine with stated counters."""

    pid: int = 0
    counted: dict[str, ModelCounters] = field(default_factory=dict)
    active: float = 0.0
    down: bool = False
    by_agent: bool = False

    def counters(self):
        if self.down:
            raise CapabilityError("does not answer")
        return EngineCounters("vllm", dict(self.counted), self.active, self.by_agent)

    def process(self):
        return self.pid


class Node:
    """The exporter and all that it reads."""

    def __init__(self, *scripts, engines=(), held=None, intensity=None, gpus=()):
        self.now_s = 100.0
        made = scripts or (Script(((0.0, 100.0),), idle_w=40.0),)
        self.meter = HeldMeter(made, lambda: self.now_s) if held is not None else FakeMeter(made, lambda: self.now_s)
        if held is not None:
            self.meter.held, self.meter.computed = held, {}
        self.busy, self.use, self.said = StatedBusy(), StatedUse(), []
        watches = tuple(EngineWatch(EngineSpec(f"engine:{i}", one, gpus)) for i, one in enumerate(engines))
        readers = NodeReaders(NodeChannels((self.meter,)), self.busy, self.use, intensity)
        self.exporter = NodeExporter(
            readers, watches, lambda: self.now_s, lambda: START_S + self.now_s, self.said.append
        )

    def run(self, seconds):
        """Let time pass, then take a sample."""
        self.now_s += seconds
        self.busy.busy_s += sum(spent_s for _, spent_s in self.use.processes.values())
        self.exporter.sample(ask=True)

    @property
    def book(self):
        return self.exporter.book
