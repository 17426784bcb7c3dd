"""The event kernel of every simulated plant: a deterministic heap of timed events, without a clock or threads.

An event is ``(t_s, rank, seq, kind, payload)``. The heap orders events by time; at one instant by rank; within a rank
by the order in which they were scheduled. The rank of an event belongs to its kind:

====  ==============  ==========================================================================
rank  name            why here
====  ==============  ==========================================================================
0     ``COMPLETION``  what ends at t leaves first, so that its instance is free again
1     ``ARRIVAL``     what arrives at t finds the resources that were freed at t
2     ``TELEMETRY``   meters read the state after the instant's completions and arrivals
3     ``POLICY``      policies decide last, on readings of the same instant
====  ==============  ==========================================================================

An event scheduled for the instant that is being handled runs within that instant, after the handler that scheduled
it, whatever its rank. A handler is called with ``(t_s, payload)`` and may schedule more. Events are not cancelled: a
plant whose schedule changes puts a version in the payload and ignores the stale event.

>>> kernel = Kernel()
>>> kernel.on("done", Rank.COMPLETION, lambda t_s, job: print(f"{t_s:g} s: {job} leaves"))
>>> kernel.on("job", Rank.ARRIVAL, lambda t_s, job: kernel.at(t_s + 2.0, "done", job))
>>> kernel.at(1.0, "job", "a")
>>> kernel.at(3.0, "job", "b")
>>> kernel.run()
3 s: a leaves
5 s: b leaves
4
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.domain.errors import DataError

Handler = Callable[[float, Any], None]


class Rank(IntEnum):
    """Order of events at one instant, first to last."""

    COMPLETION = 0
    ARRIVAL = 1
    TELEMETRY = 2
    POLICY = 3


class Kernel:
    """Runs events in order of ``(t_s, rank, seq)``; the same schedule always gives the same run.

    Attributes:
        now_s: Time of the event being handled, seconds; between runs, how far the simulation has come. Only
            the kernel sets it.

    Args:
        start_s: Where simulated time begins.
    """

    __slots__ = ("_handlers", "_heap", "_ranks", "_seq", "now_s")

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self._heap: list[tuple[float, int, int, str, Any]] = []
        self._handlers: dict[str, Handler] = {}
        self._ranks: dict[str, int] = {}
        self._seq = 0

    def on(self, kind: str, rank: Rank, handler: Handler) -> None:
        """Declare a kind of event, its rank and its handler.

        Raises:
            ValueError: The kind is already declared.
        """
        if kind in self._ranks:
            raise ValueError(f"event kind {kind!r} is already declared")
        self._ranks[kind] = int(rank)
        self._handlers[kind] = handler

    def at(self, t_s: float, kind: str, payload: Any = None) -> None:
        """Schedule one event.

        Raises:
            ValueError: ``t_s`` is NaN or lies in the past.
            KeyError: The kind was never declared.
        """
        if not t_s >= self.now_s:
            raise ValueError(f"{kind!r} scheduled for {t_s} s, but it is already {self.now_s} s")
        self._seq += 1
        heappush(self._heap, (t_s, self._ranks[kind], self._seq, kind, payload))

    def feed(self, times_s: npt.ArrayLike, kind: str) -> None:
        """Schedule one event for each time, with its index as payload; only the next one waits on the heap.

        Args:
            times_s: float64[n], seconds, non-decreasing.
            kind: A declared kind.

        Raises:
            DataError: A time is NaN, lies in the past, or the times are out of order.
            KeyError: The kind was never declared.
        """
        column = np.asarray(times_s, np.float64)
        if len(column) == 0:
            return
        if not (column[0] >= self.now_s and bool(np.all(np.diff(column) >= 0))):
            raise DataError(
                f"the times fed as {kind!r} must start at {self.now_s} s or later and never step back",
                hint="sort the recorded times, or start the kernel earlier",
            )
        times, handler = column.tolist(), self._handlers[kind]
        source = f"{kind} feed {self._seq}"

        def deliver(t_s: float, index: int) -> None:
            if index + 1 < len(times):
                self.at(times[index + 1], source, index + 1)
            handler(t_s, index)

        self.on(source, Rank(self._ranks[kind]), deliver)
        self.at(times[0], source, 0)

    def run(self, until_s: float = math.inf) -> int:
        """Handle every event before ``until_s`` (events at ``until_s`` wait for the next run).

        Returns:
            How many events were handled.
        """
        heap, handlers, handled = self._heap, self._handlers, 0
        while heap and heap[0][0] < until_s:
            event = heappop(heap)
            self.now_s = event[0]
            handlers[event[3]](event[0], event[4])
            handled += 1
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)
        return handled

    @property
    def next_s(self) -> float:
        """Time of the next event, seconds; infinity when there is none."""
        return self._heap[0][0] if self._heap else math.inf
