"""Tensor events of a program, as columns.

An operation is named by its *qualified tensor name* (QTN, Smaragdine, ICSE'24, section 3.1): the path of modules that
led to it and the operation itself, joined by ``/`` (``bert/encoder/layer_0/attention/self/query/addmm``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import IntArray, readonly
from joulery.domain.errors import DataError

NO_LANE = -1
"""Lane of an event outside any call stack: it does not nest."""

UNNAMED = "<no module>"
"""First component of the name of an operation that belongs to no module."""

WAIT = "<wait>"
"""Leaf of the time a host thread spends blocked on a device or another thread."""

SELF = "<self>"
"""Child that represents a node's own part where the node also has children."""


@dataclass(frozen=True, slots=True, eq=False)
class EventTrace:
    """Tensor events, one row each; row order is the order of the source.

    Attributes:
        ops: Qualified names, the string table of ``op``.
        devices: Device names (``CPU:0``, ``GPU:1``), the string table of ``device``.
        phases: ``forward``, ``backward``, ``recompute``, ``optimizer``, ``data`` or none: the table of ``phase``.
        op: Index into ``ops``, int64[n].
        start_ns: Unix nanoseconds, or nanoseconds of a clock the reader names, int64[n].
        dur_ns: Nanoseconds, >= 0, int64[n]; the event is the half-open interval ``[start_ns, start_ns + dur_ns)``.
        device: Index into ``devices``, int64[n].
        lane: Thread or stream, int64[n]; ``NO_LANE`` for a lane of its own. Events of one CPU lane nest.
        phase: Index into ``phases``, int64[n].
        composite: Operations that each represent many which the framework does not report (compiled regions, CUDA
            graphs).
        feeds: (producer, consumer) of operations, by name, where the source has the dataflow; empty where not.
        lanes: (process, thread) of each lane by the system's numbers, thread 0 for a stream; empty where not known.
        notes: Assumptions and omissions of the reader, one sentence each, for people.

    Raises:
        DataError: Column lengths differ, an index is outside its table, a duration is negative, or time leaves int64.
    """

    ops: tuple[str, ...]
    devices: tuple[str, ...]
    phases: tuple[str, ...]
    op: IntArray
    start_ns: IntArray
    dur_ns: IntArray
    device: IntArray
    lane: IntArray
    phase: IntArray
    composite: frozenset[str] = frozenset()
    feeds: frozenset[tuple[str, str]] = frozenset()
    lanes: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        ops: Sequence[str],
        devices: Sequence[str],
        phases: Sequence[str],
        *,
        op: npt.ArrayLike,
        start_ns: npt.ArrayLike,
        dur_ns: npt.ArrayLike,
        device: npt.ArrayLike,
        lane: npt.ArrayLike,
        phase: npt.ArrayLike,
        composite: frozenset[str] = frozenset(),
        feeds: frozenset[tuple[str, str]] = frozenset(),
        lanes: Sequence[tuple[int, int]] = (),
        notes: Sequence[str] = (),
    ) -> None:
        columns = {"op": op, "start_ns": start_ns, "dur_ns": dur_ns, "device": device, "lane": lane, "phase": phase}
        arrays = {name: readonly(values, np.int64) for name, values in columns.items()}
        lengths = {name: len(column) for name, column in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"event columns differ in length: {lengths}")
        for name, table in (("op", ops), ("device", devices), ("phase", phases)):
            _within(name, arrays[name], len(table))
        _intervals(arrays["start_ns"], arrays["dur_ns"])
        for name, column in arrays.items():
            object.__setattr__(self, name, column)
        tables = {"ops": ops, "devices": devices, "phases": phases, "lanes": lanes, "notes": notes}
        for name, value in tables.items():
            object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "composite", frozenset(composite))
        object.__setattr__(self, "feeds", frozenset(feeds))

    def __len__(self) -> int:
        return len(self.op)

    @property
    def end_ns(self) -> IntArray:
        """First nanosecond after each event, int64[n]."""
        return np.asarray(self.start_ns + self.dur_ns, np.int64)

    @property
    def extent_ns(self) -> tuple[int, int] | None:
        """Earliest start and latest end; None without events."""
        if not len(self):
            return None
        return int(self.start_ns.min()), int(self.end_ns.max())


def with_devices(trace: EventTrace, names: Sequence[str], notes: Sequence[str] | None = None) -> EventTrace:
    """The same events with other device names, one for each of ``trace.devices``; equal names become one device.

    Args:
        trace: The events.
        names: The new names.
        notes: The new notes; those of the trace when not given.
    """
    table = list(dict.fromkeys(names))
    index = np.array([table.index(name) for name in names], np.int64)
    device = index[trace.device] if len(trace) else trace.device
    return replace(trace, devices=tuple(table), device=device, notes=trace.notes if notes is None else tuple(notes))


def shifted(trace: EventTrace, by_ns: int) -> EventTrace:
    """The same events, shifted by ``by_ns``."""
    return replace(trace, start_ns=trace.start_ns + by_ns)


def of_process(trace: EventTrace, process: int) -> EventTrace:
    """The same events with all lanes assigned to one process, instead of the processes that the trace names."""
    count = max(int(trace.lane.max(initial=NO_LANE)) + 1, len(trace.lanes))
    threads = [thread for _, thread in trace.lanes] + [0] * (count - len(trace.lanes))
    return replace(trace, lanes=tuple((process, thread) for thread in threads))


def joined(traces: Sequence[EventTrace]) -> EventTrace:
    """Join several traces into one; equal names are merged, lanes stay separate."""
    if len(traces) == 1:
        return traces[0]
    tables: dict[str, dict[str, int]] = {"ops": {}, "devices": {}, "phases": {}}
    columns: dict[str, list[IntArray]] = {name: [] for name in ("op", "device", "phase", "lane")}
    lanes = 0
    owners: list[tuple[int, int]] = []
    for trace in traces:
        for table, column in (("ops", "op"), ("devices", "device"), ("phases", "phase")):
            known = tables[table]
            index = np.array([known.setdefault(name, len(known)) for name in getattr(trace, table)], np.int64)
            columns[column].append(index[getattr(trace, column)] if len(trace) else np.zeros(0, np.int64))
        columns["lane"].append(np.where(trace.lane == NO_LANE, NO_LANE, trace.lane + lanes))
        count = max(int(trace.lane.max(initial=NO_LANE)) + 1, len(trace.lanes))
        owners += [*trace.lanes, *[(0, 0)] * (count - len(trace.lanes))]
        lanes += count
    return EventTrace(
        list(tables["ops"]),
        list(tables["devices"]),
        list(tables["phases"]),
        **{name: np.concatenate([np.zeros(0, np.int64), *parts]) for name, parts in columns.items()},
        start_ns=np.concatenate([np.zeros(0, np.int64), *(trace.start_ns for trace in traces)]),
        dur_ns=np.concatenate([np.zeros(0, np.int64), *(trace.dur_ns for trace in traces)]),
        composite=frozenset[str]().union(*(trace.composite for trace in traces)),
        feeds=frozenset[tuple[str, str]]().union(*(trace.feeds for trace in traces)),
        lanes=owners if any(trace.lanes for trace in traces) else (),
        notes=list(dict.fromkeys(note for trace in traces for note in trace.notes)),
    )


def qualified(*components: str) -> str:
    """Join the non-empty components into a qualified name; a ``/`` inside a component becomes ``|``."""
    return "/".join(part.replace("/", "|") for part in components if part)


def module_components(dotted: str) -> tuple[str, ...]:
    """Path components of a dotted module name; an index is appended to the name before it, ``layer.0`` -> ``layer_0``.

    >>> module_components("encoder.layer.0.attention.self")
    ('encoder', 'layer_0', 'attention', 'self')
    >>> module_components("net.0.1")
    ('net_0', '1')
    """
    parts: list[str] = []
    joined = True
    for part in dotted.split("."):
        if part.isdigit() and not joined:
            parts[-1] = f"{parts[-1]}_{part}"
            joined = True
        elif part:
            parts.append(part.replace("/", "|"))
            joined = part.isdigit()
    return tuple(parts)


def _within(name: str, column: IntArray, size: int) -> None:
    if len(column) and (int(column.min()) < 0 or int(column.max()) >= size):
        at = int(np.argmax((column < 0) | (column >= size)))
        raise DataError(f"event {at}: {name} {int(column[at])} is outside its table of {size}")


def _intervals(start_ns: IntArray, dur_ns: IntArray) -> None:
    if not len(start_ns):
        return
    if int(dur_ns.min()) < 0:
        at = int(np.argmax(dur_ns < 0))
        raise DataError(f"event {at} ends {-int(dur_ns[at])} ns before it starts", hint="durations are >= 0")
    if int(start_ns.min()) < -(2**62) or int(start_ns.max()) > 2**62 or int(dur_ns.max()) > 2**62:
        at = int(np.argmax((np.abs(start_ns) > 2**62) | (dur_ns > 2**62)))
        raise DataError(f"event {at}: start {int(start_ns[at])} ns, duration {int(dur_ns[at])} ns are beyond any clock")
