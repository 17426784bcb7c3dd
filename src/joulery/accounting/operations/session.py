"""A trace cut to a session: exclusive pieces of running time, and the footprint rows they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from joulery.domain.arrays import BoolArray, IntArray
from joulery.domain.errors import DataError
from joulery.domain.trace.events import NO_LANE, EventTrace
from joulery.domain.trace.nesting import exclusive_pieces

_ACCELERATORS = frozenset({"gpu", "cuda", "hip", "rocm", "tpu", "xpu", "npu", "hpu", "mps"})


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a footprint: each (operation, device, phase) of the session, sorted by their names.

    Attributes:
        op, device, phase: Key of each row, by name.
        count: Events of the row that touch the window, int64[k].
    """

    op: tuple[str, ...]
    device: tuple[str, ...]
    phase: tuple[str, ...]
    count: IntArray

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True, eq=False)
class OtherUse:
    """Intervals that share a device's power and belong to no operation: start, end and weight, int64[n]."""

    start_ns: IntArray
    end_ns: IntArray
    weight: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Pieces of operations that ran inside a window.

    Attributes:
        window_ns: The window, half-open.
        rows: Rows that the pieces belong to.
        row: Row of each piece, int64[p].
        start_ns, end_ns: Exclusive running time inside the window, half-open, by start, int64[p].
        median_ns: Median exclusive time of the events of each row, int64[k].
        first_ns: Start of the first event of each row, int64[k].
        outside: Events that do not touch the window.
        lane: Lane of each piece, ``NO_LANE`` for none, int64[p].
        weight: Weight of each piece where not all are alike (:mod:`joulery.accounting.operations.cpu_lanes`), int64[p].
        rest: By device, the use that shares its power with the pieces and belongs to no operation.
        weighed: Devices with weighed pieces.
    """

    window_ns: tuple[int, int]
    rows: Rows
    row: IntArray
    start_ns: IntArray
    end_ns: IntArray
    median_ns: IntArray
    first_ns: IntArray
    outside: int
    lane: IntArray
    weight: IntArray | None = None
    rest: Mapping[str, OtherUse] = field(default_factory=dict)
    weighed: tuple[str, ...] = ()

    def weight_on(self, pieces: IntArray) -> IntArray | None:
        """Weights of the pieces of one device; None where all are alike."""
        known = self.weight is not None and len(pieces) and self.rows.device[int(self.row[pieces[0]])] in self.weighed
        return self.weight[pieces] if self.weight is not None and known else None

    def rest_on(self, pieces: IntArray) -> OtherUse | None:
        """The use that shares the power of the device of some pieces and belongs to no operation; None without."""
        return self.rest.get(self.rows.device[int(self.row[pieces[0]])]) if len(pieces) else None

    def on(self, device: str) -> IntArray:
        """Pieces that ran on a device, int64[...]."""
        here = np.array([name == device for name in self.rows.device], np.bool_)
        return np.flatnonzero(here[self.row]) if len(self.row) else np.zeros(0, np.int64)


def session(trace: EventTrace, window_ns: tuple[int, int]) -> Session:
    """Cut a trace to a window.

    Of nested events of one lane only the innermost runs; events of a GPU stream do not nest, and neither do events
    without a lane. Overlapping events of one lane that do not nest count as lanes of their own. Events of no length
    inside the window are counted and run for no time.

    Raises:
        DataError: The window is empty.
    """
    t0, t1 = window_ns
    if not t1 > t0:
        raise DataError(f"the session window [{t0}, {t1}) ns is empty", hint="give a window that starts before it ends")
    end_ns = trace.end_ns
    touching = (trace.start_ns < t1) & (end_ns > t0)
    touching |= (trace.dur_ns == 0) & (trace.start_ns >= t0) & (trace.start_ns <= t1)
    rows, row_of_event = _rows(trace, touching)
    event, start_ns, end_ns = _running(trace, end_ns)
    start_ns, end_ns = np.maximum(start_ns, t0), np.minimum(end_ns, t1)
    kept = np.flatnonzero(end_ns > start_ns)
    kept = kept[np.argsort(start_ns[kept], kind="stable")]
    event, start_ns, end_ns = event[kept], start_ns[kept], end_ns[kept]
    own_ns = np.bincount(event, end_ns - start_ns, len(trace)).astype(np.int64)[touching]
    median_ns = _medians(row_of_event[touching], own_ns, rows.count)
    first_ns = np.full(len(rows), t1, np.int64)
    np.minimum.at(first_ns, row_of_event[touching], trace.start_ns[touching])
    outside = len(trace) - int(np.count_nonzero(touching))
    lane = trace.lane[event]
    return Session((t0, t1), rows, row_of_event[event], start_ns, end_ns, median_ns, first_ns, outside, lane)


def _running(trace: EventTrace, end_ns: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Exclusive pieces of all events: event, start, end."""
    stacked = _stacked(trace)
    alone = np.flatnonzero(~stacked)
    rows = np.flatnonzero(stacked)
    if not len(rows):
        return alone, trace.start_ns[alone], end_ns[alone]
    lane = trace.lane[rows] * len(trace.devices) + trace.device[rows]
    pieces = exclusive_pieces(trace.start_ns[rows], end_ns[rows], lane)
    if not len(alone):
        return rows[pieces.event], pieces.start_ns, pieces.end_ns
    return (
        np.concatenate([rows[pieces.event], alone]),
        np.concatenate([pieces.start_ns, trace.start_ns[alone]]),
        np.concatenate([pieces.end_ns, end_ns[alone]]),
    )


def _stacked(trace: EventTrace) -> BoolArray:
    """Events that are part of a call stack: those of a lane, except on accelerators."""
    host = np.array([not is_accelerator(name) for name in trace.devices], np.bool_)
    on_host = host[trace.device] if len(trace) else np.zeros(0, np.bool_)
    return np.asarray(on_host & (trace.lane != NO_LANE), np.bool_)


def is_accelerator(device: str) -> bool:
    """Whether a device runs kernels in streams instead of call stacks, by its name (``GPU:0``, ``tpu:3``)."""
    return device.partition(":")[0].strip().lower() in _ACCELERATORS


def _rows(trace: EventTrace, touching: BoolArray) -> tuple[Rows, IntArray]:
    """Rows of the footprint in name order, and the row of each event."""
    wide = len(trace.devices) * len(trace.phases)
    key = (trace.op * len(trace.devices) + trace.device) * len(trace.phases) + trace.phase
    space = len(trace.ops) * wide
    table = space <= 4 * len(key) + 1024
    present = np.flatnonzero(np.bincount(key[touching], minlength=space)) if table else np.unique(key[touching])
    of_op, rest = np.divmod(present, max(1, wide))
    of_device, of_phase = np.divmod(rest, max(1, len(trace.phases)))
    names = [
        (trace.ops[o], trace.devices[d], trace.phases[p])
        for o, d, p in zip(of_op.tolist(), of_device.tolist(), of_phase.tolist(), strict=True)
    ]
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    row_of_event = _ranks(key, present, rank, space if table else 0)
    count = np.bincount(row_of_event[touching], minlength=len(rank))
    op, device, phase = zip(*(names[i] for i in order), strict=True) if order else ((), (), ())
    return Rows(op, device, phase, count.astype(np.int64)), row_of_event


def _ranks(key: IntArray, present: IntArray, rank: IntArray, space: int) -> IntArray:
    """Row of each key, 0 where it has none; through a table of ``space`` keys where that is small enough."""
    if not len(present):
        return np.zeros(len(key), np.int64)
    if not space:
        return np.asarray(rank[np.minimum(np.searchsorted(present, key), len(present) - 1)], np.int64)
    table = np.zeros(space, np.int64)
    table[present] = rank
    return np.asarray(table[key], np.int64)


def _medians(row: IntArray, value: IntArray, count: IntArray) -> IntArray:
    """Lower median of the values of each row; ``count`` holds how many there are."""
    if not len(value):
        return np.zeros(len(count), np.int64)
    span = int(value.max()) + 1
    composite = span <= 2**62 // len(count)
    middle = np.cumsum(count) - count + (count - 1) // 2
    if composite:
        return np.asarray(np.sort(row * span + value)[middle] % span, np.int64)
    return np.asarray(value[np.lexsort((value, row))][middle], np.int64)


def unions(row: IntArray, start_ns: IntArray, end_ns: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Merge the overlapping and touching intervals of each row.

    Args:
        row: Any non-negative integers, int64[p].
        start_ns: Beginnings, not decreasing, int64[p].
        end_ns: Ends, int64[p].

    Returns:
        Row of each merged interval, the interval that begins it and the interval that ends it (indices into the
        arguments), by row and start.
    """
    if not len(row):
        return row, row, row
    first, span = int(start_ns[0]), int(end_ns.max()) - int(start_ns[0]) + 1
    if span > 2**62 // (int(row.max()) + 1):
        _, ranked = np.unique(np.concatenate([start_ns, end_ns]), return_inverse=True)
        return unions(row, ranked[: len(row)], ranked[len(row) :])
    # numpy sorts 16-bit keys by radix, five times as fast.
    order = np.argsort(row.astype(np.uint16) if int(row.max()) < 1 << 16 else row, kind="stable")
    row, start_ns, end_ns = row[order], start_ns[order] - first, end_ns[order] - first
    # A running maximum that starts afresh at each row: every row is lifted above all times of the one before.
    lifted = end_ns + row * span
    reach = np.maximum.accumulate(lifted)
    fresh = np.ones(len(row), np.bool_)
    fresh[1:] = start_ns[1:] + row[1:] * span > reach[:-1]
    if bool(fresh.all()):
        return row, order, order
    begins = np.flatnonzero(fresh)
    furthest = np.maximum.accumulate(np.where(lifted == reach, np.arange(len(row)), 0))
    return row[begins], order[begins], order[furthest[np.append(begins[1:], len(row)) - 1]]
