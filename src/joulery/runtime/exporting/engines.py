"""Inference engines of a node: their own counters beside the joules of their processes and GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from joulery.accounting.engine_energy import EngineBook
from joulery.accounting.node_energy import PROCESSORS, Division
from joulery.domain.energy.workload import EngineCounters, WorkloadUse
from joulery.domain.errors import JouleryError
from joulery.domain.quality import Quality, weakest

_AT_ONCE = 8


class EngineSource(Protocol):
    """Source of one engine's counters."""

    def counters(self) -> EngineCounters:
        """Counters of the engine so far.

        Raises:
            JouleryError: The engine does not answer, or its answer is not that of an engine.
        """
        ...

    def process(self) -> int:
        """Id of the process that answers the engine's requests; 0 where it cannot be found."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to watch.

    Attributes:
        name: Host and port, its label.
        source: Source of its counters.
        gpus: GPUs that are its own (``gpu:0``); empty to find them by its processes.
    """

    name: str
    source: EngineSource
    gpus: tuple[str, ...] = ()


Holders = Mapping[str, Mapping[int, float] | None]
"""Share of the busy time of each process, by GPU; None where the driver does not report it."""


_Part = tuple[float, float, Quality]
"""Joules of an engine on one device, those of the idle device among them, and their quality."""


class EngineWatch:
    """One engine and its book.

    Attributes:
        name: Its label.
        book: Its joules.
        kind: ``vllm`` ...; empty before it answered.
        up: Whether it answered the last time.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.name, self.book, self.kind, self.up = spec.name, EngineBook(), "", False
        self._source, self._gpus = spec.source, spec.gpus
        self._pid = 0
        self._reported_keys: set[str] = set()
        self._notes: list[str] = []

    def spend(
        self,
        divisions: Mapping[str, Division],
        use: WorkloadUse,
        holders: Holders,
        family: Callable[[int], frozenset[int]],
        g_per_kwh: float,
        *,
        whole: bool,
    ) -> None:
        """Add the joules of the engine over an interval.

        Args:
            divisions: The energy of the node, by device.
            use: CPU time of its processes.
            holders: Processes on GPUs.
            family: A process and its descendants.
            g_per_kwh: Intensity meanwhile; NaN unknown.
            whole: Whether every meter gave readings meanwhile.
        """
        pids = family(self._pid) if self._pid else frozenset()
        if not pids:
            self._pid = 0
        parts = [self._cpu(divisions.get(PROCESSORS), use, pids)]
        for device, division in divisions.items():
            if device != PROCESSORS:
                parts.append(self._gpu(division, holders.get(device), pids))
        known = [part for part in parts if part is not None]
        unseen = self._unseen(divisions, holders)
        if unseen or not known or not whole or not (pids or self._gpus):
            self.book.spend(math.nan, g_per_kwh, Quality.MEASURED)
            return
        quality = weakest(quality for energy_j, _, quality in known if energy_j > 0)
        energy_j = math.fsum(energy_j for energy_j, _, _ in known)
        self.book.spend(energy_j, g_per_kwh, quality, math.fsum(idle_j for _, idle_j, _ in known))

    def observe(self, answer: EngineCounters | JouleryError, now_s: float) -> None:
        """Record the engine's counters, or that it does not answer."""
        if isinstance(answer, JouleryError):
            if self.up or not self.kind:
                self._say(f"{self.name}: {answer}", key="down")
            self.up = False
            return
        if not self.up:
            self._reported_keys.discard("down")
            self.kind, self.up = answer.engine, True
        if not self._pid:
            self._pid = 0 if answer.by_agent else self._source.process()
            if answer.by_agent and not self._gpus:
                self._say(
                    f"{self.name}: Ray's agent prints these counters for the engines of its node, so none of "
                    f"them is charged joules; name their GPUs (--engine URL@gpu:0)",
                    key="process",
                )
            elif not self._pid and not self._gpus:
                self._say(
                    f"{self.name}: its process is not visible here, so it is charged no joules; name its GPUs "
                    f"(--engine URL@gpu:0) or run as root in the host's process and network namespaces",
                    key="process",
                )
            elif not self._pid:
                self._say(
                    f"{self.name}: its process is not visible here: it is charged the joules of its GPUs, and none of "
                    f"the processors",
                    key="process",
                )
        if self.book.observe(answer, now_s):
            self._pid = 0 if answer.by_agent else self._source.process()
            self._say(f"{self.name}: the engine's counters started again; that interval counts for no model", key="")

    def ask(self) -> EngineCounters | JouleryError:
        """Read the engine's counters; return the error where that fails."""
        try:
            return self._source.counters()
        except JouleryError as error:
            return error

    def notes(self) -> list[str]:
        """Notes that no earlier call returned."""
        notes, self._notes = self._notes, []
        return notes

    def _cpu(self, division: Division | None, use: WorkloadUse, pids: frozenset[int]) -> _Part | None:
        """Joules of the engine's share of the processors' work; idle processors are not its own."""
        if division is None or not pids:
            return None
        busy_j = math.fsum(division.workloads.values())
        busy_s = math.fsum(use.cpu_s.values())
        own_s = math.fsum(use.process_cpu_s.get(pid, 0.0) for pid in pids)
        return (busy_j * min(1.0, own_s / busy_s) if busy_s > 0 else 0.0), 0.0, division.quality

    def _gpu(self, division: Division, holders: Mapping[int, float] | None, pids: frozenset[int]) -> _Part | None:
        """Joules of a GPU: whole, its idle part apart, where the engine alone uses it; else its share of the work."""
        named = division.device in self._gpus
        if self._gpus and not named:
            return None
        own = [share for pid, share in (holders or {}).items() if pid in pids]
        whole = (division.energy_j, min(division.energy_j, division.idle_j), division.quality)
        if not own:
            return whole if named else None
        if len(own) == len(holders or {}):
            return whole
        share = math.fsum(own)
        above_j = division.energy_j - division.idle_j
        return (share if math.isnan(share) else min(1.0, share)) * above_j, 0.0, division.quality

    def _unseen(self, divisions: Mapping[str, Division], holders: Holders) -> bool:
        """Whether the engine may use a GPU unseen: the driver does not report its processes, and no GPU was named."""
        unseen = [device for device in divisions if device != PROCESSORS and holders.get(device) is None]
        if unseen and not self._gpus:
            self._say(
                f"{self.name}: the processes that use {', '.join(unseen)} are unknown, so it is charged no joules; "
                f"name its GPUs (--engine URL@gpu:0)",
                key="unseen",
            )
        return bool(unseen) and not self._gpus

    def _say(self, text: str, key: str) -> None:
        """Add a note once per key; with an empty key, each time."""
        if not key or key not in self._reported_keys:
            self._reported_keys.add(key)
            self._notes.append(text)


def ask_all(engines: tuple[EngineWatch, ...]) -> list[EngineCounters | JouleryError]:
    """Ask all engines at once, so that one that hangs delays the others by its own time limit only."""
    if len(engines) < 2:
        return [engine.ask() for engine in engines]
    with ThreadPoolExecutor(min(_AT_ONCE, len(engines)), "engine") as pool:
        return list(pool.map(EngineWatch.ask, engines))
