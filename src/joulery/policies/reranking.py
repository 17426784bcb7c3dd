"""Which answer runs, revised while answers are written: expected remainders in place of predicted lengths.

The order is that of :mod:`joulery.policies.ordering`, by what a request is still expected to take given what has been
written of it (:mod:`joulery.perf.lengths.remaining`). A running answer that outlives its prediction so falls behind,
one about to end comes forward. It is interrupted only for a request that would outrank it even if that took
``switch_ratio`` times as long as expected, because changing over costs time and expectations vary with every token.

With exact lengths, no aging and ``switch_ratio`` 1 this is shortest remaining processing time first (Schrage, 1968);
where lengths are exponential and nothing sets requests apart, first come first served. A key is the arrival less a
head start under Boost, so a request that arrives later than the largest head start never overtakes.
"""

from __future__ import annotations

from dataclasses import dataclass

from joulery.domain.errors import ConfigError
from joulery.policies.ordering import Aging

DECAY_ANSWERS = 40.0
"""Decay of Boost in mean answers, where none is stated."""


@dataclass(frozen=True, slots=True)
class Reranking:
    """Ranks waiting and running requests by their expected remainders.

    Attributes:
        aging: How waiting is rewarded, without a grace; None for Boost with a decay of 40 mean answers.
        switch_ratio: Factor on the remainder of a waiting request that has to outrank a running one, >= 1.
    """

    aging: Aging | None = None
    switch_ratio: float = 2.0

    def __post_init__(self) -> None:
        if not self.switch_ratio >= 1:
            raise ConfigError("a switch ratio is at least 1", got=f"{self.switch_ratio}")
        if self.aging is not None and self.aging.grace_s > 0:
            raise ConfigError("an order that is revised has no grace", got=f"{self.aging.grace_s} s")

    def aged(self, average_s: float) -> Aging:
        """How waiting is rewarded where a mean answer takes ``average_s``, > 0."""
        return self.aging or Aging.boost(DECAY_ANSWERS * average_s)

    @staticmethod
    def key_s(aging: Aging, arrival_s: float, remaining_s: float) -> float:
        """What is compared; the smallest runs. Constant in time, so waiting requests keep their order."""
        return aging.size_s(remaining_s) + aging.rate * arrival_s

    def interrupts(self, aging: Aging, waiting: tuple[float, float], running: tuple[float, float]) -> bool:
        """Whether a waiting request takes the place of a running one.

        Args:
            aging: As :meth:`aged` gave it.
            waiting, running: Arrival and expected remainder of each, s.
        """
        arrival_s, remaining_s = waiting
        return self.key_s(aging, arrival_s, self.switch_ratio * remaining_s) < self.key_s(aging, *running)
