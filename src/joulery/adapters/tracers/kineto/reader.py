"""Reader of PyTorch's profiler (Kineto) JSON as columns: operations, ranges, runtime calls, kernels, gradient flows.

``prof.export_chrome_trace`` writes such files; CUDA and ROCm traces have the same format. :mod:`kineto_names` turns the
columns into named events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from joulery.adapters.tracers.chrome import Block, ChromeTrace, microseconds_ns, numbers, stamps_ns
from joulery.adapters.tracers.inject.compiled import CALL
from joulery.adapters.tracers.source_names import WHERE, frame_component, written_path
from joulery.domain.arrays import IntArray
from joulery.domain.errors import DataError


class EventKind(IntEnum):
    """Kind of an event of the file."""

    OP = 0
    """A host operation (``aten::mm``, an autograd node)."""
    RANGE = 1
    """A ``record_function`` range: a module, an optimizer step, the user's own."""
    RUNTIME = 2
    """A CUDA or HIP call on the host: a launch or a wait."""
    KERNEL = 3
    """Work on an accelerator: a kernel, a copy, a fill."""
    FRAME = 4
    """A Python function of the program that was running; no work of its own."""


_KINDS = {
    "cpu_op": EventKind.OP,
    "user_annotation": EventKind.RANGE,
    "cuda_runtime": EventKind.RUNTIME,
    "cuda_driver": EventKind.RUNTIME,
    "hip_runtime": EventKind.RUNTIME,
    "xpu_runtime": EventKind.RUNTIME,
    "kernel": EventKind.KERNEL,
    "gpu_memcpy": EventKind.KERNEL,
    "gpu_memset": EventKind.KERNEL,
    "xpu_driver": EventKind.RUNTIME,
    "privateuse1_runtime": EventKind.RUNTIME,
    "mtia_runtime": EventKind.RUNTIME,
    "mtia_ccp_events": EventKind.KERNEL,
    # PyTorch 1.8 to 1.12.
    "Operator": EventKind.OP,
    "Runtime": EventKind.RUNTIME,
    "Kernel": EventKind.KERNEL,
    "Memcpy": EventKind.KERNEL,
    "Memset": EventKind.KERNEL,
}
_IGNORED = frozenset(
    {None, "ac2g", "async", "fwdbwd", "gpu_user_annotation", "Trace", "overhead", "Overhead", "python_function"}
    | {"Activity Buffer Request", "cpu_instant_event", "instant", "async_cpu_to_gpu", "async_gpu"}
)
"""Categories without work of their own."""
_NONE = -1
STACKED = "nn.Module: "
"""Prefix of the Python frames of a module's call, in traces recorded ``with_stack=True``: ``nn.Module: Linear_7``."""
_FRAME = "python_function"
DISTRIBUTED = "torch.distributed."
"""Prefix of the ranges of PyTorch's own distributed training, of category ``cpu_op``: they are no operations."""
MODULE_RANGE = "QTN:"
"""Prefix of the ranges that forward hooks record around a module's forward; the cheapest are of category ``cpu_op``."""


@dataclass(slots=True)
class KinetoColumns:
    """A Kineto trace as columns, one row for each event; ``-1`` where a number is absent.

    Attributes:
        names: String table of ``name``.
        lanes: Table of ``lane``: ``(process, thread)`` of host rows, ``(device, stream)`` of kernels.
        kind: :class:`EventKind`, int64[n].
        name, lane: Indices, int64[n].
        start_ns, dur_ns: int64[n].
        seq: Autograd sequence number, int64[n].
        fwd: Autograd's number of the forward thread, on nodes of the backward pass, int64[n].
        correlation: Links a kernel to the call that launched it, int64[n].
        external: Links a kernel to the operation that was running, where no correlation does, int64[n].
        graph, graph_node: Numbers of the CUDA graph and of the node that a kernel belongs to, int64[n].
        flow_lane, flow_ns: Ends of the forward-backward arrows, as (tail, head) rows, int64[f, 2].
        source: Caller that the operation's own arguments state, index into ``sources``, int64[n].
        sources: Paths, and whether they consist of modules; otherwise they consist of functions.
        base_ns: Time added to the file's stamps; 0 when the file has none.
        unknown: Events of categories that are not read, by category.
    """

    names: list[str]
    lanes: list[tuple[Any, Any]]
    kind: IntArray
    name: IntArray
    lane: IntArray
    start_ns: IntArray
    dur_ns: IntArray
    seq: IntArray
    fwd: IntArray
    correlation: IntArray
    external: IntArray
    graph: IntArray
    graph_node: IntArray
    flow_lane: IntArray
    flow_ns: IntArray
    source: IntArray
    sources: list[tuple[str, bool]]
    base_ns: int
    unknown: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(slots=True)
class _Rows:
    """The rows of one block, column by column."""

    kind: list[int] = field(default_factory=list)
    name: list[int] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    stamp: list[int] = field(default_factory=list)
    dur: list[Any] = field(default_factory=list)
    seq: list[Any] = field(default_factory=list)
    fwd: list[Any] = field(default_factory=list)
    correlation: list[Any] = field(default_factory=list)
    external: list[Any] = field(default_factory=list)
    graph: list[Any] = field(default_factory=list)
    graph_node: list[Any] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    flows: list[tuple[int, int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Collector:
    """Builder of the columns, block by block."""

    file: str
    names: dict[str, int] = field(default_factory=dict)
    lanes: dict[tuple[Any, Any], int] = field(default_factory=dict)
    sources: dict[tuple[str, bool], int] = field(default_factory=dict)
    frames: dict[str, EventKind | None] = field(default_factory=dict)
    columns: list[IntArray] = field(default_factory=list)
    flows: list[IntArray] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    seen: int = 0

    def add(self, block: Block) -> None:
        """Add the events of one block."""
        stamps, rows = self._rows(block)
        start_ns = stamps_ns(block, stamps, file=self.file)
        if rows.kind:
            at = np.array(rows.stamp, np.int64)
            columns = [rows.kind, rows.name, rows.lane, start_ns[at], self._durations(rows.dur)]
            links = (rows.seq, rows.fwd, rows.correlation, rows.external, rows.graph, rows.graph_node)
            columns += [_integers(values) for values in links]
            columns.append(rows.source)
            self.columns.append(np.stack([np.asarray(column, np.int64) for column in columns]))
        if rows.flows:
            arrows = np.array(rows.flows, np.int64)
            arrows[:, 3] = start_ns[arrows[:, 3]]
            self.flows.append(arrows)
        self.seen += len(block.events)

    def _rows(self, block: Block) -> tuple[list[Any], _Rows]:
        """All stamps of the block, and the rows to keep, in one pass: the slowest loop of reading a trace."""
        stamps: list[Any] = []
        rows = _Rows()
        names, lanes, kernel = self.names, self.lanes, int(EventKind.KERNEL)
        event: Any = {}
        try:
            for event in block.events:
                kind = _KINDS.get(event.get("cat"))
                if kind is None and event.get("cat") == _FRAME:
                    kind = self._frame(str(event.get("name")))
                if "ts" in event or kind is not None:
                    stamps.append(event["ts"])
                if kind is None:
                    if event.get("cat") == "fwdbwd":
                        lane = lanes.setdefault((event["pid"], event["tid"]), len(lanes))
                        rows.flows.append((event["id"], event["ph"] != "s", lane, len(stamps) - 1))
                    elif event.get("ph") == "X" and event.get("cat") not in _IGNORED:
                        self.unknown[str(event["cat"])] += 1
                    continue
                args = event.get("args") or {}
                if kind == kernel:
                    place = (args.get("device", event["pid"]), args.get("stream", event["tid"]))
                else:
                    place = (event["pid"], event["tid"])
                rows.kind.append(kind)
                rows.name.append(names.setdefault(event["name"], len(names)))
                rows.lane.append(lanes.setdefault(place, len(lanes)))
                rows.stamp.append(len(stamps) - 1)
                rows.dur.append(event["dur"])
                rows.seq.append(args.get("Sequence number", _NONE))
                rows.fwd.append(args.get("Fwd thread id", _NONE))
                rows.correlation.append(args.get("correlation", _NONE))
                rows.external.append(args.get("External id", args.get("external id", _NONE)))
                rows.graph.append(args.get("graph id", _NONE))
                rows.graph_node.append(args.get("graph node id", _NONE))
                rows.source.append(self._source(args) if WHERE & args.keys() else _NONE)
        except (AttributeError, KeyError, TypeError) as error:
            raise DataError(
                f"an event of the trace is malformed ({type(error).__name__} {error}): {str(event)[:200]}",
                file=self.file,
                hint="every timed event needs name, pid, tid, ts and dur",
            ) from error
        return stamps, rows

    def _frame(self, name: str) -> EventKind | None:
        """The kind of a Python frame: the call of a module or a function of the program; None for any other."""
        if name not in self.frames:
            module = name.startswith(STACKED)
            self.frames[name] = EventKind.RANGE if module else EventKind.FRAME if frame_component(name) else None
        return self.frames[name]

    def _source(self, args: dict[str, Any]) -> int:
        """The index of the caller that an operation's arguments state; -1 without one."""
        path = written_path(args)
        return self.sources.setdefault(path, len(self.sources)) if path[0] else _NONE

    def _durations(self, durations: list[Any]) -> IntArray:
        values = numbers(durations, "a duration", file=self.file)
        if bool(np.any(values < 0)):
            raise DataError(f"a duration is {values.min()} us, expected at least 0", file=self.file)
        return microseconds_ns(values)

    def finish(self, base_ns: int) -> KinetoColumns:
        """The columns of all blocks together."""
        table = np.concatenate(self.columns, axis=1) if self.columns else np.zeros((12, 0), np.int64)
        kind, name, lane, start_ns, dur_ns, seq, fwd, correlation, external, graph, graph_node, source = table
        ranges = [at for text, at in self.names.items() if text.startswith((MODULE_RANGE, DISTRIBUTED))]
        kind = np.where((kind == EventKind.OP) & np.isin(name, ranges), int(EventKind.RANGE), kind)
        calls = [at for text, at in self.names.items() if text.startswith(CALL)]
        kind = np.where(np.isin(name, calls), int(EventKind.OP), kind)
        tails, heads = self._arrows()
        return KinetoColumns(
            names=list(self.names),
            lanes=list(self.lanes),
            kind=kind,
            name=name,
            lane=lane,
            start_ns=start_ns + base_ns,
            dur_ns=dur_ns,
            seq=seq,
            fwd=fwd,
            correlation=correlation,
            external=external,
            graph=graph,
            graph_node=graph_node,
            flow_lane=np.stack([tails[:, 0], heads[:, 0]], axis=1),
            flow_ns=np.stack([tails[:, 1], heads[:, 1]], axis=1) + base_ns,
            source=source,
            sources=list(self.sources),
            base_ns=base_ns,
        )

    def _arrows(self) -> tuple[IntArray, IntArray]:
        """(lane, time) of the tail and of the head of each arrow that has both."""
        if not self.flows:
            return np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64)
        flows = np.concatenate(self.flows)
        ends = []
        for side in (0, 1):
            rows = flows[flows[:, 1] == side]
            _, first = np.unique(rows[:, 0], return_index=True)
            ends.append(rows[first])
        _, tail, head = np.intersect1d(ends[0][:, 0], ends[1][:, 0], return_indices=True)
        return ends[0][tail, 2:], ends[1][head, 2:]


def read_columns(path: Path) -> KinetoColumns:
    """The columns of a Kineto file.

    Raises:
        DataError: The file cannot be read, ends early, or an event is malformed.
    """
    trace = ChromeTrace(path)
    collector = _Collector(str(path))
    for block in trace.blocks():
        collector.add(block)
    base = trace.meta.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise DataError(f"baseTimeNanoseconds is {base!r}, expected whole nanoseconds", file=str(path))
    if not collector.columns and collector.unknown:
        raise DataError(
            f"the trace has no operation: its {collector.unknown.total()} events are of the unknown categories "
            + ", ".join(sorted(collector.unknown)[:8]),
            file=str(path),
            hint="operations are of category cpu_op or kernel, as torch.profiler exports them",
        )
    return replace(collector.finish(base), unknown=dict(collector.unknown))


def _integers(values: list[Any]) -> IntArray:
    """Integers as int64[n]; any other value becomes -1 (absent)."""
    if set(map(type, values)) <= {int}:
        return np.array(values, np.int64)
    return np.array([value if type(value) is int else _NONE for value in values], np.int64)
