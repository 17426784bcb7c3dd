"""The slots of one engine and the queue in front of them.

A request waits for a slot in the order of its policy. Under :class:`~joulery.policies.reranking.Reranking` the order is
revised whenever an answer ends, since then more is known of lengths, and a running request may have to give up its slot
to a waiting one (:meth:`EngineSlots.should_pause`). An engine that keeps a queue of its own gets every request at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from joulery.policies.ordering import Aging, SpeculativeQueue
from joulery.policies.reranking import BacklogHistory, Reranking


class Turn(Protocol):
    """A request in the queue or in a slot.

    Attributes:
        number: Its number at the service.
        asked_s: Its arrival on the service's clock.
    """

    number: int
    asked_s: float

    @property
    def remaining_s(self) -> float:
        """Seconds that it is still expected to take in the engine."""
        ...


@dataclass(slots=True, eq=False)
class _Waiter:
    """A queued request; its slot is free when ``admitted`` is done."""

    turn: Turn
    admitted: asyncio.Future[None]

    @property
    def has_slot(self) -> bool:
        """Whether it was given a slot."""
        return self.admitted.done() and not self.admitted.cancelled() and self.admitted.exception() is None


class EngineSlots:
    """Slots of one engine.

    Args:
        max_num_seqs: Slots; None for an engine that keeps the queue itself.
        aging: Aging of the order; None for first come, first served.
        reranking: Revises the order, in place of ``aging``.
        average_s: Seconds of a mean answer, as known now.
        clock: Monotonic seconds.

    Attributes:
        pauses: How often a running request gave up its slot.
    """

    def __init__(
        self,
        max_num_seqs: int | None,
        aging: Aging | None,
        reranking: Reranking | None,
        average_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._slots, self._order, self._reranking = max_num_seqs, aging, reranking
        self._average_s, self._clock, self._backlog = average_s, clock, BacklogHistory()
        self._aging = self._aged()
        self._queue = SpeculativeQueue(self._aging)
        self._waiters: dict[int, _Waiter] = {}
        self._running: dict[int, Turn] = {}
        self._pausing: int | None = None
        self.pauses = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    def key_s(self, turn: Turn) -> float:
        """Current sort key of a request; the smallest key is served next."""
        waited_s = self._clock() - turn.asked_s
        if self._reranking is None and self._order is None:
            return -waited_s
        return self._aging.key_s(turn.remaining_s, waited_s)

    async def acquire(self, turn: Turn) -> None:
        """Wait for a slot; :meth:`release` frees it."""
        if self._slots is None or (len(self._running) < self._slots and not len(self._queue)):
            self._running[turn.number] = turn
            return
        waiter = _Waiter(turn, asyncio.get_running_loop().create_future())
        self._waiters[turn.number] = waiter
        self._push(turn)
        try:
            await waiter.admitted
        except BaseException:
            if not self._queue.cancel(turn.number) and waiter.has_slot:
                self.release(turn)  # it was cancelled in the moment its slot became free
            raise
        finally:
            del self._waiters[turn.number]

    def release(self, turn: Turn) -> None:
        """Free a request's slot for the next one."""
        del self._running[turn.number]
        if self._pausing == turn.number:
            self._pausing = None
        while self._slots is not None and len(self._queue) and len(self._running) < self._slots:
            waiter = self._waiters[self._queue.pop(self._clock())]
            if not waiter.admitted.done():
                self._running[waiter.turn.number] = waiter.turn
                waiter.admitted.set_result(None)

    def reject(self, error: Exception) -> None:
        """End the wait of every queued request with an error."""
        for waiter in list(self._waiters.values()):
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def should_pause(self, turn: Turn) -> bool:
        """Whether a running request has to give up its slot now: a waiting one outranks it, and it is the last in rank.

        The caller then ends its work in the engine and calls :meth:`release`; one request does so at a time.
        """
        policy, waiting = self._reranking, self._queue.first(self._clock())
        if policy is None or waiting is None or self._pausing is not None:
            return False
        first, own = self._waiters[waiting].turn, (turn.asked_s, turn.remaining_s)
        if not policy.interrupts(self._aging, (first.asked_s, first.remaining_s), own):
            return False
        key_s = policy.key_s(self._aging, *own)
        others = (other for other in self._running.values() if other.number != turn.number)
        if any(policy.key_s(self._aging, other.asked_s, other.remaining_s) > key_s for other in others):
            return False
        self._pausing = turn.number
        self.pauses += 1
        return True

    def rerank(self) -> None:
        """Revise the order of the queue after an answer has ended."""
        if self._reranking is None:
            return
        queued = [waiter.turn for waiter in self._waiters.values() if not waiter.admitted.done()]
        left_s = math.fsum(turn.remaining_s for turn in (*queued, *self._running.values()))
        self._backlog.add(left_s / (self._slots or 1))
        self._aging = self._aged()
        self._queue = SpeculativeQueue(self._aging)
        for turn in queued:
            self._push(turn)

    def _push(self, turn: Turn) -> None:
        expected_s = 0.0 if self._reranking is None and self._order is None else turn.remaining_s
        self._queue.push(turn.number, turn.asked_s, expected_s)

    def _aged(self) -> Aging:
        if self._reranking is not None:
            seen = self._backlog
            return self._reranking.aged(max(self._average_s(), 1e-3), seen.high_s, seen.now_s)
        return self._order or Aging(0.0)
