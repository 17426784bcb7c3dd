"""Order in which requests run: speculative shortest job first, with aging (μ-Serve, ATC'24, section 3.3).

At a dispatch the request of least ``T - alpha * waited`` goes first. Every key falls at the same rate, so the order
is that of the static key ``T + alpha * arrival``: one heap, O(log n). ``alpha = 0`` is pure shortest-job-first, a
large one is first-come-first-served. A request that arrives later than ``a + (T_max - T_min) / alpha`` never
overtakes one that arrived at ``a``: that is the starvation bound. Delayed aging lets a request age only after it has
waited ``grace_s``.

Boost (Yu and Scully, "Strongly Tail-Optimal Scheduling in the Light-Tailed M/G/1", SIGMETRICS 2024) serves by time of
arrival less a head start, ``decay * ln(1 / (1 - exp(-T / decay)))``: large for short requests, next to none for long
ones. It keeps the tail near that of first come first served.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from joulery.domain.errors import ConfigError

_Entry = tuple[float, float, int, int]
_SHORTEST_S = 1e-3
"""Predicted times below this have the same head start, because head starts grow without bound as times approach 0."""


@dataclass(frozen=True, slots=True)
class Aging:
    """Rules of aging: the reward for waiting.

    Attributes:
        rate: Seconds of predicted service forgiven per second waited (the paper's alpha), >= 0.
        grace_s: Wait before aging begins; 0 is plain linear aging.
        decay_s: Decay of Boost: the larger, the more short requests gain and the longer the tail; 0 for no Boost.
    """

    rate: float = 0.02
    grace_s: float = 0.0
    decay_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.rate >= 0 and self.grace_s >= 0 and self.decay_s >= 0):
            raise ConfigError(
                "aging needs a rate, a grace and a decay of at least 0",
                got=f"{self.rate}, {self.grace_s} s, {self.decay_s} s",
            )

    @classmethod
    def boost(cls, decay_s: float) -> Aging:
        """Order by arrival less a head start; a second of waiting counts as one of head start."""
        return cls(1.0, 0.0, decay_s)

    def size_s(self, predicted_s: float) -> float:
        """Initial size of a request: its predicted time, or minus its head start."""
        if self.decay_s == 0:
            return predicted_s
        return self.decay_s * math.log(-math.expm1(-max(predicted_s, _SHORTEST_S) / self.decay_s))

    def key_s(self, predicted_s: float, waited_s: float) -> float:
        """Sort key at a dispatch: the smallest runs first."""
        return self.size_s(predicted_s) - self.rate * max(0.0, waited_s - self.grace_s)


class SpeculativeQueue:
    """Waiting requests of one model instance, shortest predicted first, ties by arrival and then by number.

    Young requests (waited at most the grace) lie in a heap by predicted time, aged ones in a heap by their static
    key; an entry changes heaps once. Push and pop are O(log n); a cancelled entry stays in its heap until it surfaces.
    """

    __slots__ = ("_aged", "_due", "_live", "_ticket_of", "_tickets", "_young", "aging")

    def __init__(self, aging: Aging | None = None) -> None:
        self.aging = aging or Aging()
        self._young: list[_Entry] = []
        self._aged: list[_Entry] = []
        self._due: list[tuple[float, int, float, int]] = []
        self._live: dict[int, list[_Entry]] = {}
        self._ticket_of: dict[int, int] = {}
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self._ticket_of)

    def push(self, number: int, arrival_s: float, predicted_s: float) -> None:
        """Add a request with its predicted service time.

        Raises:
            ConfigError: ``number`` waits already, or a time is not finite.
        """
        if number in self._ticket_of:
            raise ConfigError("a request may wait once", got=str(number))
        if not (math.isfinite(arrival_s) and math.isfinite(predicted_s)):
            raise ConfigError(f"request {number} needs finite times", got=f"{arrival_s} s, {predicted_s} s")
        ticket, predicted_s = next(self._tickets), self.aging.size_s(predicted_s)
        self._ticket_of[number] = ticket
        if self.aging.grace_s > 0 and self.aging.rate > 0:
            self._place(self._young, (predicted_s, arrival_s, number, ticket))
            heapq.heappush(self._due, (arrival_s, number, predicted_s, ticket))
        else:
            self._place(self._aged, (predicted_s + self.aging.rate * arrival_s, arrival_s, number, ticket))

    def cancel(self, number: int) -> bool:
        """Forget a waiting request; False when it does not wait."""
        ticket = self._ticket_of.pop(number, None)
        return ticket is not None and self._live.pop(ticket, None) is not None

    def pop(self, now_s: float) -> int:
        """Take the request that runs next at ``now_s``.

        Raises:
            IndexError: Nothing waits.
        """
        number = self.first(now_s)
        if number is None:
            raise IndexError("pop from an empty queue")
        self.cancel(number)
        return number

    def first(self, now_s: float) -> int | None:
        """The request that :meth:`pop` would take; None when nothing waits."""
        self._promote_aged(now_s)
        heads = [heap[0] for heap in (self._surface(self._young), self._surface(self._aged)) if heap]
        return min(heads, key=lambda entry: self._present_key(entry, now_s))[2] if heads else None

    def _present_key(self, entry: _Entry, now_s: float) -> tuple[float, float, int]:
        key_s, arrival_s, number, ticket = entry
        if self._live[ticket] is self._aged and self.aging.grace_s > 0:
            key_s -= self.aging.rate * (now_s - self.aging.grace_s)
        return (key_s, arrival_s, number)

    def _place(self, heap: list[_Entry], entry: _Entry) -> None:
        self._live[entry[3]] = heap
        heapq.heappush(heap, entry)

    def _surface(self, heap: list[_Entry]) -> list[_Entry]:
        while heap and self._live.get(heap[0][3]) is not heap:
            heapq.heappop(heap)
        return heap

    def _promote_aged(self, now_s: float) -> None:
        while self._due and now_s - self._due[0][0] > self.aging.grace_s:
            arrival_s, number, predicted_s, ticket = heapq.heappop(self._due)
            if ticket in self._live:
                self._place(self._aged, (predicted_s + self.aging.rate * arrival_s, arrival_s, number, ticket))
