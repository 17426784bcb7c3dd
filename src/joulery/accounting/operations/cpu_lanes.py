"""Weigh the operations of host threads by CPU time: a thread that waits or sleeps has no share of the socket.

A trace shows when an operation ran, not whether its thread was on a CPU. Readings of each thread's CPU time, a few
dozen a second, show how much CPU time a thread had in each window. Within a window that time goes to the operations of
the thread, and to the time between them, by the utilisation of each operation: the share of its time in which it was on
a CPU or ready for one, found over all windows together by expectation maximisation (Richardson-Lucy). How long a thread
was ready matters on a busy machine: there its CPU time depends more on the other threads than on its own work.

Threads without operations (OpenMP workers) count for the operations of their process, up to the CPU time of the
threads that called them. What is left, and CPU time of processes without operations, is the rest of the run: it has
its share of the power, and no operation has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.accounting.operations.estimators import split
from joulery.accounting.operations.session import OtherUse, Session, unions
from joulery.accounting.steps import NS_PER_S
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.trace.threads import ThreadTimes

PER_CPU = 1_000_000
"""Weight of one CPU; weights are integers, so that sums of them return to zero."""

_ITERATIONS = 200
_WAITS = 0.01
"""Operations ready for less of their time count as waiting: alone in a window, they would have all its joules."""
_SHORTEST_NS = 1_000_000
"""Windows shorter than this are merged with the next one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Readings:
    """CPU seconds of each thread in each window.

    Attributes:
        edges_ns: The windows, int64[k+1].
        process: Process of each thread, int64[t].
        index: Row of each (process, thread).
        cpu_s: float64[t, k].
        ready_s: Seconds on a CPU or ready for one, float64[t, k].
    """

    edges_ns: IntArray
    process: IntArray
    index: dict[tuple[int, int], int]
    cpu_s: FloatArray
    ready_s: FloatArray


def weighed(cut: Session, device: str, lanes: Sequence[tuple[int, int]], times: ThreadTimes) -> Session | None:
    """The session with the pieces of one device weighed by the CPU time of their threads.

    Args:
        cut: The session; its pieces have lanes.
        device: Device of the host threads.
        lanes: (process, thread) of each lane.
        times: Readings of the threads, on the clock of the session.

    Returns:
        The session with those pieces cut at the readings; None where the readings contain none of the lanes.
    """
    readings = _readings(times.between(*cut.window_ns), cut.window_ns)
    here = cut.on(device)
    if readings is None or not len(here):
        return None
    table = np.array([readings.index.get((process, thread), -1) for process, thread in lanes], np.int64)
    thread = np.where(cut.lane[here] >= 0, table[np.maximum(cut.lane[here], 0)], -1) if len(table) else here * 0 - 1
    if not bool(np.any(thread >= 0)):
        return None
    lane_threads = np.unique(table[table >= 0])
    busy = _Utilisation(readings, lane_threads, cut.row[here], thread, cut.start_ns[here], cut.end_ns[here])
    piece, start_ns, end_ns, weight = busy.pieces()
    rest = busy.rest()
    away = np.setdiff1d(np.arange(len(cut.row)), here)
    kept = np.concatenate([away, here[piece]])
    start = np.concatenate([cut.start_ns[away], start_ns])
    order = np.argsort(start, kind="stable")
    return replace(
        cut,
        row=cut.row[kept][order],
        lane=cut.lane[kept][order],
        start_ns=start[order],
        end_ns=np.concatenate([cut.end_ns[away], end_ns])[order],
        weight=np.concatenate([np.full(len(away), PER_CPU), weight])[order],
        rest={**cut.rest, device: rest},
        weighed=(*cut.weighed, device),
    )


@dataclass(frozen=True, slots=True, eq=False)
class RunCpu:
    """CPU time of all threads of the run.

    Attributes:
        edges_ns: Readings of the threads, Unix nanoseconds, int64[k+1].
        spent_s: CPU seconds from the first reading to each, float64[k+1].
    """

    edges_ns: IntArray
    spent_s: FloatArray

    def between(self, edges_ns: IntArray) -> FloatArray:
        """CPU seconds from each instant to the next, float64[n]; 0 outside the readings."""
        return np.asarray(np.diff(np.interp(edges_ns, self.edges_ns, self.spent_s)), np.float64)


def run_cpu(times: ThreadTimes, window_ns: tuple[int, int]) -> RunCpu | None:
    """CPU time of the run in a window; None with fewer than two sweeps."""
    readings = _readings(times.between(*window_ns), window_ns)
    if readings is None:
        return None
    return RunCpu(readings.edges_ns, np.concatenate([[0.0], np.cumsum(readings.cpu_s.sum(axis=0))]))


def silent_processes(times: ThreadTimes, lanes: Sequence[tuple[int, int]], window_ns: tuple[int, int]) -> list[float]:
    """CPU seconds in a window of each process of the run that has no operation, most first."""
    readings = _readings(times.between(*window_ns), window_ns)
    if readings is None:
        return []
    known = {process for process, _ in lanes}
    spent: dict[int, float] = {}
    for process, seconds in zip(readings.process.tolist(), readings.cpu_s.sum(axis=1).tolist(), strict=True):
        if process not in known:
            spent[process] = spent.get(process, 0.0) + seconds
    return sorted(spent.values(), reverse=True)


def _readings(times: ThreadTimes, window_ns: tuple[int, int]) -> _Readings | None:
    """CPU time by thread and window; None with fewer than two sweeps."""
    t0, t1 = window_ns
    sweeps, first = np.unique(times.sweep, return_index=True)
    if len(sweeps) < 2:
        return None
    stamps = times.t_ns[first]
    inner = stamps[(stamps > t0 + _SHORTEST_NS) & (stamps < t1 - _SHORTEST_NS)]
    inner = inner[np.diff(inner, prepend=t0) >= _SHORTEST_NS] if len(inner) else inner
    edges = np.concatenate([[t0], inner, [t1]]).astype(np.int64)
    keys = sorted(set(zip(times.process.tolist(), times.thread.tolist(), strict=True)))
    index = {key: number for number, key in enumerate(keys)}
    row = np.array([index[key] for key in zip(times.process.tolist(), times.thread.tolist(), strict=True)], np.int64)
    order = np.lexsort((times.t_ns, row))
    bounds = np.searchsorted(row[order], np.arange(len(keys) + 1))
    cpu_s, ready_s = np.zeros((2, len(keys), len(edges) - 1))
    ready = times.cpu_s + np.nan_to_num(times.wait_s)
    for at in range(len(keys)):
        mine = order[bounds[at] : bounds[at + 1]]
        before = int(np.searchsorted(sweeps, times.sweep[mine[0]])) - 1
        began = [float(stamps[before])] if before >= 0 else []  # the thread began after the sweep before
        t = np.append(began, times.t_ns[mine].astype(np.float64))
        alive = times.sweep[mine[-1]] == sweeps[-1]
        for table, column in ((cpu_s, times.cpu_s), (ready_s, ready)):
            spent = np.append(np.zeros(len(began)), column[mine])
            table[at] = np.diff(_cumulative(edges.astype(np.float64), t, spent, alive=alive))
    length_s = np.diff(edges) / NS_PER_S
    cpu_s = np.clip(cpu_s, 0.0, length_s)
    processes = np.array([process for process, _ in keys], np.int64)
    return _Readings(edges, processes, index, cpu_s, np.clip(ready_s, cpu_s, length_s))


def _cumulative(at: FloatArray, t: FloatArray, spent: FloatArray, *, alive: bool) -> FloatArray:
    """CPU seconds at some instants: linear between readings, extrapolated by the nearest slope before and after."""
    if len(t) < 2:
        return np.zeros(len(at))
    slopes = np.diff(spent) / np.diff(t)
    after = float(slopes[-1]) if alive else 0.0
    inside = np.interp(at, t, spent)
    return np.asarray(inside + np.minimum(at - t[0], 0.0) * slopes[0] + np.maximum(at - t[-1], 0.0) * after, np.float64)


class _Utilisation:
    """Share of the time on a CPU of the pieces of some threads, and of the time between them."""

    def __init__(
        self,
        readings: _Readings,
        lane_threads: IntArray,
        row: IntArray,
        thread: IntArray,
        start_ns: IntArray,
        end_ns: IntArray,
    ) -> None:
        self._readings = readings
        self._width = len(readings.edges_ns) - 1
        boost, self._excess_s = _helpers(readings, lane_threads)
        between_thread, between_start, between_end = _between(lane_threads, thread, start_ns, end_ns, readings.edges_ns)
        self._pieces = len(row)
        rows = int(row.max()) + 1 if len(row) else 1
        starts, ends = np.concatenate([start_ns, between_start]), np.concatenate([end_ns, between_end])
        source, window, begin, end = split(starts, ends, readings.edges_ns)
        of_thread = np.concatenate([thread, between_thread])[source]
        column = np.concatenate([np.maximum(thread, 0) * (rows + 1) + row, between_thread * (rows + 1) + rows])[source]
        self._source, self._window, self._start_ns, self._end_ns = source, window, begin, end
        self._thread = of_thread
        known = of_thread >= 0
        rate = np.ones(len(source))
        where = np.searchsorted(lane_threads, of_thread[known]) * self._width + window[known]
        ready_s, cpu_s = (table[lane_threads].ravel() for table in (readings.ready_s, readings.cpu_s))
        length_s = (end - begin)[known] / NS_PER_S
        found = _rates(column[known], where, length_s, ready_s, cpu_s)
        # What did not fit, for readings come late on a busy machine, goes to all parts of its thread.
        lane = np.searchsorted(lane_threads, of_thread[known])
        rate[known] = found * _explained(found * length_s, lane, readings.cpu_s[lane_threads].sum(axis=1))[lane]
        rate[known] *= boost[of_thread[known], window[known]]
        self._weight = np.rint(rate * PER_CPU).astype(np.int64)

    def pieces(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Piece, start, end and weight of each part of a piece."""
        mine = self._source < self._pieces
        return self._source[mine], self._start_ns[mine], self._end_ns[mine], self._weight[mine]

    def rest(self) -> OtherUse:
        """The time between the pieces, and the CPU time that none of their threads explains."""
        mine = (self._source >= self._pieces) & (self._weight > 0)
        edges = self._readings.edges_ns
        left = np.rint(self._excess_s / (np.diff(edges) / NS_PER_S) * PER_CPU).astype(np.int64)
        some = np.flatnonzero(left > 0)
        return OtherUse(
            np.concatenate([self._start_ns[mine], edges[:-1][some]]),
            np.concatenate([self._end_ns[mine], edges[1:][some]]),
            np.concatenate([self._weight[mine], left[some]]),
        )


def _helpers(readings: _Readings, lane_threads: IntArray) -> tuple[FloatArray, FloatArray]:
    """Factor by which helpers raise the threads with operations, float64[t, k], and CPU seconds left, float64[k].

    A helper works beside the threads that call it: of its time, at most as much as theirs counts for them.
    """
    boost, left_s = np.ones_like(readings.cpu_s), np.zeros(readings.cpu_s.shape[1])
    calling = np.zeros(len(readings.process), np.bool_)
    calling[lane_threads] = True
    for process in np.unique(readings.process).tolist():
        mine = readings.process == process
        callers_s = readings.cpu_s[mine & calling].sum(axis=0)
        helpers_s = readings.cpu_s[mine & ~calling]
        used_s = np.minimum(helpers_s, callers_s).sum(axis=0)
        left_s += helpers_s.sum(axis=0) - used_s
        boost[mine] = 1.0 + np.divide(used_s, callers_s, out=np.zeros_like(used_s), where=callers_s > 0)
    return boost, left_s


def _between(
    lane_threads: IntArray, thread: IntArray, start_ns: IntArray, end_ns: IntArray, edges_ns: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Thread, start and end of the time in which each thread runs none of its pieces."""
    known = thread >= 0
    first, last = int(edges_ns[0]), int(edges_ns[-1])
    of_thread, opener, closer = unions(thread[known], start_ns[known], end_ns[known])
    begins, ends = start_ns[known][opener], end_ns[known][closer]
    # Each thread's pieces lie between a piece of no length at the start of the window and one at its end.
    owner = np.concatenate([lane_threads, of_thread, lane_threads])
    begins = np.concatenate([np.full(len(lane_threads), first), begins, np.full(len(lane_threads), last)])
    ends = np.concatenate([np.full(len(lane_threads), first), ends, np.full(len(lane_threads), last)])
    order = np.lexsort((begins, owner))
    owner, begins, ends = owner[order], begins[order], ends[order]
    gap = np.flatnonzero((owner[1:] == owner[:-1]) & (begins[1:] > ends[:-1]))
    return owner[gap], ends[gap], begins[gap + 1]


def _rates(column: IntArray, cell: IntArray, seconds: FloatArray, ready_s: FloatArray, cpu_s: FloatArray) -> FloatArray:
    """Share of the time on a CPU of each part: of operation ``column``, in a thread's window ``cell``.

    Args:
        column, cell: Non-negative integers, int64[n].
        seconds: Length of each part, float64[n].
        ready_s: Seconds of each cell in which its thread was on a CPU or ready for one.
        cpu_s: CPU seconds of each cell.
    """
    _, column = np.unique(column, return_inverse=True)
    # Parts of one operation in one window are alike: far fewer numbers to iterate over.
    pair, of_pair = np.unique(column * len(cpu_s) + cell, return_inverse=True)
    pair_s = np.bincount(of_pair, seconds).astype(np.float64)
    pair_column, pair_cell = pair // max(1, len(cpu_s)), pair % max(1, len(cpu_s))
    length_s = np.bincount(pair_column, pair_s)
    utilisation = np.ones(len(length_s))
    for _ in range(_ITERATIONS):
        # No operation is ready for longer than it runs: without this bound, short ones take what is noise.
        rate = _bounded(utilisation[pair_column], pair_cell, pair_s, ready_s)
        spent_s = np.bincount(pair_column, rate * pair_s)
        utilisation = np.divide(spent_s, length_s, out=np.zeros(len(length_s)), where=length_s > 0)
    works = np.where(utilisation >= _WAITS, utilisation, 0.0)
    ready = _bounded(works[pair_column], pair_cell, pair_s, ready_s)
    return _bounded(ready, pair_cell, pair_s, cpu_s)[of_pair]


def _bounded(rate: FloatArray, cell: IntArray, seconds: FloatArray, cell_s: FloatArray) -> FloatArray:
    """Rates in the given proportions, none above 1, at which the parts of each cell sum to its seconds if they can."""
    return np.asarray(np.minimum(rate * _explained(rate * seconds, cell, cell_s)[cell], 1.0), np.float64)


def _explained(expected_s: FloatArray, cell: IntArray, cell_s: FloatArray) -> FloatArray:
    """Seconds read in each cell, over those expected there."""
    total_s = np.bincount(cell, expected_s, len(cell_s))
    return np.divide(cell_s, total_s, out=np.zeros(len(cell_s)), where=total_s > 0)
