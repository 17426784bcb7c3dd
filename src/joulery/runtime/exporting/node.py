"""The exporter of one node: each sample divides the energy since the last one, and books its joules and grams."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from joulery.accounting.node_energy import NodeBook, NodeUse, divide
from joulery.domain.energy.channel import Channel
from joulery.domain.energy.workload import OTHER, NodeWorkload, WorkloadUse
from joulery.runtime.exporting.channels import IdleBoards, NodeChannels
from joulery.runtime.exporting.engines import EngineWatch, Holders, ask_all
from joulery.runtime.exporting.intensity_feed import IntensityFeed
from joulery.runtime.measuring.share import BusyMeter, BusyReader, SharedMeter

MAX_WORKLOADS = 100
"""Most workloads that are exported by name."""
NAMED_FROM = 0.01
"""CPUs that a command without a control group must use to be exported by name."""
ENDED_AFTER_S = 300.0
"""Time after which a workload that has ended is exported no more."""


class WorkloadReader(Protocol):
    """Reads which processes run and what CPU time they took."""

    @property
    def hidden(self) -> bool:
        """Whether the processes of other users are hidden."""
        ...

    def read(self) -> WorkloadUse:
        """CPU seconds since the last reading."""
        ...

    def family(self, pid: int) -> frozenset[int]:
        """A process and its descendants."""
        ...


@dataclass(frozen=True, slots=True)
class NodeReaders:
    """Readers of an exporter.

    Attributes:
        channels: The meters.
        busy: CPU time of all processes.
        workloads: CPU time of each workload.
        intensity: Carbon intensity; None for no grams.
        pue: Facility energy per IT energy.
    """

    channels: NodeChannels
    busy: BusyReader
    workloads: WorkloadReader
    intensity: IntensityFeed | None = None
    pue: float = 1.0


@dataclass(slots=True)
class _Names:
    """Workloads that are exported by name."""

    seen_at_s: dict[NodeWorkload, float] = field(default_factory=dict)

    def shown(self, workload: NodeWorkload, cpus: float, now_s: float) -> NodeWorkload:
        """The workload, or :data:`OTHER` where it is too small or too many are named already."""
        if workload not in self.seen_at_s:
            small = workload.kind == "process" and not cpus >= NAMED_FROM
            if small or len(self.seen_at_s) >= MAX_WORKLOADS:
                return OTHER
        self.seen_at_s[workload] = now_s
        return workload

    def ended(self, now_s: float) -> list[NodeWorkload]:
        """Remove and return the workloads that have not been seen for :data:`ENDED_AFTER_S`."""
        gone = [workload for workload, at_s in self.seen_at_s.items() if now_s - at_s >= ENDED_AFTER_S]
        for workload in gone:
            del self.seen_at_s[workload]
        return gone


class NodeExporter:
    """Keeps the energy and carbon books of one node.

    Args:
        readers: Readers of the node.
        engines: Engines to watch.
        clock_s: Seconds of a monotonic clock.
        unix_s: Unix seconds.
        say: Receives what a person should know, once.

    Attributes:
        book: Joules and grams of the node.
        lock: Held while a sample is booked; hold it to read the books.
        sampled_at_s: When the last sample was taken, by ``clock_s``.
        interval_s: Time to the next sample, as its loop sets it.
    """

    def __init__(
        self,
        readers: NodeReaders,
        engines: tuple[EngineWatch, ...],
        clock_s: Callable[[], float],
        unix_s: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self.readers, self.engines, self.book, self.lock = readers, engines, NodeBook(), threading.Lock()
        self._clock_s, self._unix_s, self._say = clock_s, unix_s, say
        self._names, self._idle = _Names(), IdleBoards()
        self._cpus = sum(readers.busy.cpus)
        if readers.workloads.hidden:
            say("processes of other users are hidden here (hidepid): their joules are unattributed")
        self.sampled_at_s, self.interval_s = clock_s(), 0.0
        self._print_notes(readers.channels.advance(self.sampled_at_s))
        self._busy_s = math.fsum(readers.busy.read())
        readers.workloads.read()
        self._holders()
        self._computed()
        self._ask()
        self._print_all_notes()

    def now_s(self) -> float:
        """Seconds of the exporter's clock."""
        return self._clock_s()

    def intensity(self) -> float:
        """g/kWh now, facility overhead not included; NaN unknown."""
        feed = self.readers.intensity
        return math.nan if feed is None else feed.at(self._unix_s())

    def advance(self) -> None:
        """Read the meters between two samples."""
        with self.lock:
            self._print_notes(self.readers.channels.advance(self._clock_s()))

    def sample(self, *, ask: bool) -> None:
        """Take a sample.

        Args:
            ask: Whether the engines are asked, too.
        """
        with self.lock:
            self._sample()
        if ask:
            self._ask()
        self._print_all_notes()

    def _ask(self) -> None:
        answers = ask_all(self.engines)
        with self.lock:
            for engine, answer in zip(self.engines, answers, strict=True):
                engine.observe(answer, self._clock_s())

    def _sample(self) -> None:
        now_s = self._clock_s()
        elapsed_s, self.sampled_at_s = now_s - self.sampled_at_s, now_s
        if elapsed_s <= 0:
            return
        channels = self.readers.channels
        self._print_notes(channels.advance(now_s))
        taken = [(one.channel, *one.take()) for one in channels.channels]
        use = self.readers.workloads.read()
        busy_s = math.fsum(self.readers.busy.read())
        grown_s, self._busy_s = busy_s - self._busy_s, busy_s
        holders = self._holders()
        shown = self._shown(use, elapsed_s, now_s)
        cpu_s: dict[NodeWorkload, float] = {}
        for workload, spent_s in use.cpu_s.items():
            cpu_s[shown[workload]] = cpu_s.get(shown[workload], 0.0) + spent_s
        idle = self._idle_boards(taken, holders, elapsed_s)
        boards = {
            device: _by_workload(dict.fromkeys(pids or {}, 0.0) if device in idle else pids, use, shown)
            for device, pids in holders.items()
        }
        divisions = divide(
            [(channel, energy_j) for channel, energy_j, _ in taken],
            NodeUse(elapsed_s, self._cpus * elapsed_s, max(0.0, grown_s), cpu_s, boards, self._idle.power_w),
        )
        g_per_kwh = self.intensity() * self.readers.pue
        self.book.settle(divisions, g_per_kwh)
        for workload in self._names.ended(now_s):
            self.book.retire(workload)
        by_device = {division.device: division for division in divisions}
        whole = all(known for _, _, known in taken)
        for engine in self.engines:
            engine.spend(by_device, use, holders, self.readers.workloads.family, g_per_kwh, whole=whole)

    def _idle_boards(
        self, taken: Sequence[tuple[Channel, float, bool]], holders: Holders, elapsed_s: float
    ) -> frozenset[str]:
        """GPUs on which nothing computed over an interval; their mean power is kept as their idle power."""
        computed = self._computed()
        idle = frozenset(
            device for device, pids in holders.items() if pids == {} or (pids and computed.get(device) is False)
        )
        for device in idle:
            mine = [(energy_j, known) for channel, energy_j, known in taken if channel.device == device]
            if mine and all(known for _, known in mine):
                self._idle.learn(device, math.fsum(energy_j for energy_j, _ in mine), elapsed_s)
        return idle

    def _computed(self) -> dict[str, bool | None]:
        """Whether anything computed on each GPU since the last call; None where the driver does not report it."""
        found: dict[str, bool | None] = {}
        for meter in self.readers.channels.meters:
            if isinstance(meter, BusyMeter):
                found.update(meter.busy())
        return found

    def _shown(self, use: WorkloadUse, elapsed_s: float, now_s: float) -> dict[NodeWorkload, NodeWorkload]:
        alive = {*use.cpu_s, *use.workload_of.values()}
        return {each: self._names.shown(each, use.cpu_s.get(each, 0.0) / elapsed_s, now_s) for each in sorted(alive)}

    def _holders(self) -> Holders:
        found: dict[str, Mapping[int, float] | None] = {}
        for meter in self.readers.channels.meters:
            if isinstance(meter, SharedMeter):
                found.update(meter.holders())
        return found

    def _print_all_notes(self) -> None:
        for engine in self.engines:
            self._print_notes(engine.notes())
        if self.readers.intensity is not None:
            self._print_notes(self.readers.intensity.notes())

    def _print_notes(self, notes: list[str]) -> None:
        for text in notes:
            self._say(text)


def _by_workload(
    pids: Mapping[int, float] | None, use: WorkloadUse, shown: Mapping[NodeWorkload, NodeWorkload]
) -> dict[NodeWorkload, float] | None:
    """Shares of a board by workload; a process that is not visible here counts as :data:`OTHER`."""
    if pids is None:
        return None
    shares: dict[NodeWorkload, float] = {}
    for pid, share in pids.items():
        workload = shown.get(use.workload_of[pid], OTHER) if pid in use.workload_of else OTHER
        shares[workload] = shares.get(workload, 0.0) + share
    return shares
