"""Order of answers, revised while they are written: expected remainders in place of predicted lengths.

The order is that of :mod:`joulery.policies.ordering`, by what a request is still expected to take given what has been
written of it (:mod:`joulery.perf.lengths.remaining`). A running answer that outlives its prediction so falls behind,
one about to end comes forward. It is interrupted only for a request that would outrank it even if that took
``switch_ratio`` times as long as expected, because changing over costs time and expectations vary with every token.

With exact lengths, no aging and ``switch_ratio`` 1 this is shortest remaining processing time first (Schrage, 1968);
where lengths are exponential and nothing sets requests apart, first come first served. A key is the arrival less a
head start under Boost, so a request that arrives later than the largest head start never overtakes.

How large head starts may be without a longer tail depends on the traffic: what short answers gain at a backlog of
minutes is, at one of seconds, what long answers lose. The decay so follows the backlog that was seen of late. While
much less is to be done than then, nothing of the tail is at stake, and it is larger.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from joulery.domain.errors import ConfigError
from joulery.policies.ordering import Aging

DECAY_RATIO = 0.95
"""Decay of Boost, where none is stated, by the backlog that one request in a hundred meets, while half of it waits."""
_MOST_LARGER = 4.0
"""Largest factor on it while less waits: it grows with the root of the one backlog over the other."""
LEAST_ANSWERS = 3.0
"""Its least, in mean answers."""
_QUANTILE, _KEPT = 0.99, 2000


class BacklogHistory:
    """The work that answers left behind when they ended, s of one slot; the latest 2,000.

    As many requests leave a queue of some length as meet one, so this is what requests find before them; it does not
    depend on the order of service.
    """

    __slots__ = ("_ascending", "_latest")

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ascending: list[float] = []

    @property
    def now_s(self) -> float:
        """Backlog behind the latest answer."""
        return self._latest[-1] if self._latest else 0.0

    def add(self, backlog_s: float) -> None:
        """An answer ended, and this is still to be done."""
        if len(self._latest) == _KEPT:
            del self._ascending[bisect_left(self._ascending, self._latest.popleft())]
        self._latest.append(backlog_s)
        insort(self._ascending, backlog_s)

    @property
    def high_s(self) -> float:
        """Backlog that one request in a hundred meets; 0 before any answer has ended."""
        count = len(self._ascending)
        return self._ascending[min(int(_QUANTILE * count), count - 1)] if count else 0.0


@dataclass(frozen=True, slots=True)
class Reranking:
    """Ranks waiting and running requests by their expected remainders.

    Attributes:
        aging: How waiting is rewarded, without a grace; None for Boost with a decay that follows the backlog.
        switch_ratio: Factor on the remainder of a waiting request that has to outrank a running one, >= 1.
    """

    aging: Aging | None = None
    switch_ratio: float = 2.0

    def __post_init__(self) -> None:
        if not self.switch_ratio >= 1:
            raise ConfigError("a switch ratio is at least 1", got=f"{self.switch_ratio}")
        if self.aging is not None and self.aging.grace_s > 0:
            raise ConfigError("an order that is revised has no grace", got=f"{self.aging.grace_s} s")

    def aged(self, average_s: float, high_s: float = 0.0, now_s: float = 0.0) -> Aging:
        """The aging rules in force.

        Args:
            average_s: What a mean answer takes, > 0.
            high_s, now_s: The backlog that one request in a hundred meets, and the present one.
        """
        larger = min(_MOST_LARGER, math.sqrt(high_s / (2.0 * now_s))) if now_s > 0 else _MOST_LARGER
        return self.aging or Aging.boost(max(LEAST_ANSWERS * average_s, DECAY_RATIO * larger * high_s))

    @staticmethod
    def key_s(aging: Aging, arrival_s: float, remaining_s: float) -> float:
        """Sort key; the smallest runs. Constant in time, so waiting requests keep their order."""
        return aging.size_s(remaining_s) + aging.rate * arrival_s

    def interrupts(self, aging: Aging, waiting: tuple[float, float], running: tuple[float, float]) -> bool:
        """Whether a waiting request takes the place of a running one.

        Args:
            aging: As :meth:`aged` gave it.
            waiting, running: Arrival and expected remainder of each, s.
        """
        arrival_s, remaining_s = waiting
        return self.key_s(aging, arrival_s, self.switch_ratio * remaining_s) < self.key_s(aging, *running)
