"""What came to a language model and was answered lately."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SPAN_S = 60.0
"""How far back it looks."""
_LEAST_SPAN_S = 10.0
"""Over no shorter time is a rate told: one request in the first second is no stream of them."""
_MOST = 2048


class Served(NamedTuple):
    """An answer.

    Attributes:
        end_s: When it ended, Unix seconds.
        latency_s: How long after its arrival.
        work_s: What it took in the engine, seconds at full clock.
        energy_j: What it cost, J; None where that is not known.
    """

    end_s: float
    latency_s: float
    work_s: float
    energy_j: float | None


class RecentTraffic:
    """Arrivals and answers of the last :data:`SPAN_S` seconds, the latest two thousand of them."""

    def __init__(self) -> None:
        self._arrivals_s: deque[float] = deque(maxlen=_MOST)
        self._served: deque[Served] = deque(maxlen=_MOST)
        self._first_s: float | None = None

    def came(self, at_s: float) -> None:
        """A request was accepted, Unix seconds."""
        self._first_s = at_s if self._first_s is None else self._first_s
        self._arrivals_s.append(at_s)

    def answered(self, end_s: float, latency_s: float, work_s: float, energy_j: float | None) -> None:
        """A request was answered to its end."""
        self._served.append(Served(end_s, latency_s, work_s, energy_j))

    def served(self, now_s: float) -> tuple[Served, ...]:
        """The answers of the last span, by their end."""
        while self._served and self._served[0].end_s < now_s - SPAN_S:
            self._served.popleft()
        return tuple(self._served)

    def rate_rps(self, now_s: float) -> float:
        """Requests a second over the last span; 0 where none came."""
        if self._first_s is None:
            return 0.0
        while self._arrivals_s and self._arrivals_s[0] < now_s - SPAN_S:
            self._arrivals_s.popleft()
        seen_s = min(SPAN_S, max(now_s - self._first_s, _LEAST_SPAN_S))
        if len(self._arrivals_s) == _MOST:
            seen_s = max(now_s - self._arrivals_s[0], 1e-3)
        return len(self._arrivals_s) / seen_s
