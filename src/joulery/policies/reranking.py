"""Reorders requests while they are answered, by the expected remaining time in place of the predicted length.

The order is that of :mod:`joulery.policies.ordering`, by the time that a request is still expected to take, given the
part of its answer that exists (:mod:`joulery.perf.lengths.remaining`). So a running answer that exceeds its prediction
falls behind, and one about to end moves forward. It is interrupted only for a request that would outrank it even if
that took ``switch_ratio`` times as long as expected, because changing over costs time and expectations vary with every
token.

With exact lengths, no aging and ``switch_ratio`` 1 this is shortest remaining processing time first (Schrage, 1968);
where lengths are exponential and no request differs from another, it is first come, first served. A key is the arrival
less a head start under Boost, so a request that arrives later than the largest head start never overtakes.

The head starts that do not lengthen the tail depend on the traffic: those that help short answers at a backlog of
minutes harm long answers at a backlog of seconds. The decay therefore follows the recent backlog. While the present
backlog is much smaller, the tail is not at risk, and the decay is larger.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from joulery.domain.errors import ConfigError
from joulery.policies.ordering import Aging

DECAY_RATIO = 0.95
"""Default decay of Boost over the backlog that one request in a hundred meets, while half of that backlog waits."""
_MOST_LARGER = 4.0
"""Largest factor on the decay while less waits; it grows with the root of the high backlog over the present one."""
LEAST_ANSWERS = 3.0
"""Smallest decay, as a multiple of the time of a mean answer."""
_QUANTILE, _KEPT = 0.99, 2000


class BacklogHistory:
    """The backlogs at the ends of the latest 2,000 answers, in seconds of one slot.

    As many requests leave a queue of some length as meet one, so these are also the backlogs that arriving requests
    meet. They do not depend on the order of service.
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
        """Add the backlog at the end of an answer."""
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
            average_s: Time of a mean answer, > 0.
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
            aging: The rules from :meth:`aged`.
            waiting, running: Arrival and expected remainder of each, s.
        """
        arrival_s, remaining_s = waiting
        return self.key_s(aging, arrival_s, self.switch_ratio * remaining_s) < self.key_s(aging, *running)
