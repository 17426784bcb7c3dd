"""Call stacks from intervals: which event encloses which in a lane, and which is the innermost.

A lane (a thread) runs one thing at a time: of nested events only the innermost is running. The functions work on whole
columns, sorted once; they examine single events only where a lane is malformed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Nesting:
    """The call stacks of some lanes.

    Attributes:
        parent: Row of the innermost event that encloses each event in its lane, -1 for none, int64[n].
        order: Rows by lane, then start, outer before inner, int64[n].
        crossing: Events that overlap another of their lane without nesting; each counts as a lane of its own, bool[n].
    """

    parent: IntArray
    order: IntArray
    crossing: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Times in which each event was the innermost of its lane. The pieces of a lane are disjoint and cover its events.

    Attributes:
        event: Row of the event, int64[k].
        start_ns, end_ns: Half-open interval, ``end_ns > start_ns``, int64[k].
    """

    event: IntArray
    start_ns: IntArray
    end_ns: IntArray


def nesting(start_ns: IntArray, end_ns: IntArray, lane: IntArray) -> Nesting:
    """Find the innermost enclosing event of each event.

    Of two events of one lane with equal intervals the earlier row is the outer one. An event of no length has a
    parent but is never one. Two events that overlap without nesting cannot be one call stack: the one that starts
    later is marked ``crossing``.

    Args:
        start_ns, end_ns: Half-open intervals, ``end_ns >= start_ns``, int64[n].
        lane: Any integers; events of equal lane form one stack, int64[n].
    """
    order = _outer_first(start_ns, end_ns, lane)
    parent_at, clean = _parents(start_ns[order], end_ns[order], lane[order])
    crossing = np.zeros(len(order), np.bool_)
    if not clean:
        crossing = _crossing(start_ns, end_ns, lane, order)
        parent = np.full(len(order), -1, np.int64)
        kept = order[~crossing[order]]
        parent_at, _ = _parents(start_ns[kept], end_ns[kept], lane[kept])
        parent[kept] = np.where(parent_at >= 0, kept[parent_at], -1)
        return Nesting(parent, order, crossing)
    parent = np.empty(len(order), np.int64)
    parent[order] = np.where(parent_at >= 0, order[parent_at], -1)
    return Nesting(parent, order, crossing)


def exclusive_pieces(start_ns: IntArray, end_ns: IntArray, lane: IntArray) -> Pieces:
    """Each event's exclusive time: its interval without those of the events it encloses.

    Args:
        start_ns, end_ns, lane: As for :func:`nesting`. An event of no length has no piece.
    """
    stacks = nesting(start_ns, end_ns, lane)
    stacked = stacks.order[~stacks.crossing[stacks.order]]
    stacked = stacked[end_ns[stacked] > start_ns[stacked]]
    event, begin, end = _stack_pieces(start_ns, end_ns, lane, stacked, stacks.parent)
    alone = np.flatnonzero(stacks.crossing & (end_ns > start_ns))
    if not len(alone):
        return Pieces(event, begin, end)
    return Pieces(
        np.concatenate([event, alone]),
        np.concatenate([begin, start_ns[alone]]),
        np.concatenate([end, end_ns[alone]]),
    )


def _keys(start_ns: IntArray, end_ns: IntArray, lane: IntArray) -> tuple[IntArray, IntArray]:
    """One integer for each boundary that sorts by lane, then time: ``(of the start, of the end)``."""
    lowest, width = int(lane.min()), int(lane.max()) - int(lane.min()) + 1
    rank = lane - lowest
    if width > 4 * len(lane):
        lanes, rank = np.unique(lane, return_inverse=True)
        width = len(lanes)
    first, last = int(start_ns.min()), int(end_ns.max())
    begin, end, span = start_ns - first, end_ns - first, last - first + 1
    if span > 2**62 // width:
        times, ranked = np.unique(np.concatenate([start_ns, end_ns]), return_inverse=True)
        begin, end, span = ranked[: len(start_ns)], ranked[len(start_ns) :], len(times)
    base = rank.astype(np.int64) * span
    return base + begin, base + end


def _outer_first(start_ns: IntArray, end_ns: IntArray, lane: IntArray) -> IntArray:
    """Rows by lane, then start, then longest, then row."""
    if not len(start_ns):
        return np.zeros(0, np.int64)
    key, _ = _keys(start_ns, end_ns, lane)
    order = np.argsort(key, kind="stable").astype(np.int64)
    ordered = key[order]
    tied = np.zeros(len(key), np.bool_)
    tied[1:] = ordered[1:] == ordered[:-1]
    if tied.any():
        tied[:-1] |= tied[1:]
        rows = order[tied]
        order[tied] = rows[np.lexsort((-end_ns[rows], key[rows]))]
    return order


def _parents(start_ns: IntArray, end_ns: IntArray, lane: IntArray) -> tuple[IntArray, bool]:
    """Position of the enclosing event of each event already sorted outer first, and whether all of them nest."""
    count = len(start_ns)
    if not count:
        return np.zeros(0, np.int64), True
    parent = np.full(count, -1, np.int64)
    if bool(np.all((end_ns[:-1] <= start_ns[1:]) | (lane[:-1] != lane[1:]))):
        return parent, True
    opens, closes = _keys(start_ns, end_ns, lane)
    long = end_ns > start_ns
    index = np.arange(count, dtype=np.int64)
    depth = np.cumsum(long) - long - np.searchsorted(np.sort(closes[long]), opens, "right")
    inner = np.flatnonzero(depth > 0)
    if not len(inner):
        return parent, True
    stack = np.sort(depth[long] * count + index[long])
    found = np.searchsorted(stack, (depth[inner] - 1) * count + inner) - 1
    parent[inner] = stack[found] % count
    return parent, bool(np.all(end_ns[inner] <= end_ns[parent[inner]]))


def _crossing(start_ns: IntArray, end_ns: IntArray, lane: IntArray, order: IntArray) -> BoolArray:
    """Events that overlap an open event of their lane without nesting in it; one walk down each lane."""
    crossing = np.zeros(len(order), np.bool_)
    stack: list[int] = []
    current: int | None = None
    rows = zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), lane[order].tolist(), strict=True)
    for row, start, end, where in rows:
        if where != current:
            current = where
            stack.clear()
        while stack and stack[-1] <= start:
            stack.pop()
        if end == start:
            continue
        if stack and end > stack[-1]:
            crossing[row] = True
        else:
            stack.append(end)
    return crossing


def _stack_pieces(
    start_ns: IntArray, end_ns: IntArray, lane: IntArray, rows: IntArray, parent: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Pieces of nested events of positive length, sorted outer first, from one pass over their boundaries."""
    if not bool(np.any(parent[rows] >= 0)):
        return rows, start_ns[rows], end_ns[rows]
    opens, closes = _keys(start_ns[rows], end_ns[rows], lane[rows])
    # Of events that end together the innermost closes first: the one that was opened last.
    closing = np.argsort(closes[::-1], kind="stable")
    closing = len(rows) - 1 - closing
    closes = closes[closing]
    open_at = np.arange(len(rows)) + np.searchsorted(closes, opens, "right")
    close_at = np.arange(len(rows)) + np.searchsorted(opens, closes, "left")
    running = np.empty(2 * len(rows), np.int64)
    running[open_at], running[close_at] = rows, parent[rows[closing]]
    time = np.empty(2 * len(rows), np.int64)
    time[open_at], time[close_at] = start_ns[rows], end_ns[rows[closing]]
    kept = np.flatnonzero((running[:-1] >= 0) & (time[1:] > time[:-1]))
    return running[kept], time[kept], time[kept + 1]
