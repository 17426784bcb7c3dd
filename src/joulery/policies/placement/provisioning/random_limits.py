"""Longest time of a batch of random requests that keeps the required part of them within the SLO.

The time is sought in steps of a thousandth of the longest there could be. Where a like one was found before, at a rate
hardly different, the search begins there; it ends at the same step wherever it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from joulery.perf.queues.batch_queue import late_ratio

_STEPS = 1 << 10
"""Steps of the longest time in which a limit is sought."""
_NEAR, _WIDER = 1, 4
"""Steps from the expected one to the first ones tried, and how many times more with each try."""
_FAR = _STEPS // 4
"""The same where nothing is expected."""
_RARE = 1e-12
"""Late ratios below this are the same in a logarithm."""
_STEEP = -6.0
"""Logarithm of a late ratio, over the greatest that will do, below which it says little of where that one is."""
_KEPT = 48
"""Rates whose limits are kept for one thing that is sought: those asked for last."""


class KnownLimits:
    """The steps at which searches ended, by what was sought and the rate."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, dict[float, int]] = {}

    def exactly(self, sought: Hashable, rate_rps: float) -> int | None:
        """The step for this very rate, where it is known."""
        return self._steps.get(sought, {}).get(rate_rps)

    def expected(self, sought: Hashable, rate_rps: float) -> int:
        """About where the step is: on the line through those of the two nearest rates; 0 where none is known."""
        known = self._steps.get(sought)
        if not known:
            return 0
        near = sorted(known, key=lambda each: abs(each - rate_rps))[:2]
        first = known[near[0]]
        if len(near) == 1 or first == 0 or known[near[1]] == 0:
            return first
        slope = (known[near[1]] - first) / (near[1] - near[0])
        at = round(first + slope * (rate_rps - near[0]))
        return at if abs(at - first) <= _FAR else first

    def keep(self, sought: Hashable, rate_rps: float, step: int) -> None:
        """Remember where a search ended."""
        known = self._steps.setdefault(sought, {})
        known[rate_rps] = step
        if len(known) > _KEPT:
            del known[next(iter(known))]


def random_limit_ms(
    rate_rps: float,
    scv: float,
    shape: Sequence[float],
    transfer_ms: float,
    deadline_ms: float,
    late: float,
    known: KnownLimits | None = None,
    sought: Hashable = None,
) -> float:
    """The execution time of a full batch at which just the required part of random requests is in time, ms.

    Args:
        rate_rps: Arrivals a second.
        scv: Squared coefficient of variation of their gaps.
        shape: Execution time of batches of 1 ... the largest as parts of the largest.
        transfer_ms: What each request of a batch adds beside the execution.
        deadline_ms: The deadline.
        late: Part of the requests that may miss it.
        known: Where searches ended before.
        sought: What is sought: everything above but the rate.

    Returns:
        0 where no time is short enough.
    """
    queue = _Queue(rate_rps, scv, tuple(shape), transfer_ms, deadline_ms)
    if known is None:
        return queue.longest_ms * _searched(queue, late) / _STEPS
    step = known.exactly(sought, rate_rps)
    if step is None:
        step = _last_step(queue.late_at, late, known.expected(sought, rate_rps))
    known.keep(sought, rate_rps, step)
    return queue.longest_ms * step / _STEPS


class _Queue(NamedTuple):
    """Input of :func:`random_limit_ms`."""

    rate_rps: float
    scv: float
    shape: tuple[float, ...]
    transfer_ms: float
    deadline_ms: float

    @property
    def longest_ms(self) -> float:
        """The longest time there could be."""
        return min(self.deadline_ms, 1000.0 * len(self.shape) / self.rate_rps)

    def late_at(self, step: int) -> float:
        """The late ratio where a full batch takes so many steps of the longest time."""
        full_ms = self.longest_ms * step / _STEPS
        times_s = [(self.transfer_ms * (size + 1) + full_ms * part) / 1e3 for size, part in enumerate(self.shape)]
        return late_ratio(self.rate_rps, self.scv, times_s, self.deadline_ms / 1e3)


@lru_cache(maxsize=2048)
def _searched(queue: _Queue, late: float) -> int:
    """The last step that is short enough, from no expectation: plans of one site ask for the same again and again."""
    return _last_step(queue.late_at, late, 0)


def _last_step(late_at: Callable[[int], float], late: float, expected: int) -> int:
    """The last step that is short enough; 0 where the first one is too long.

    Args:
        late_at: The late ratio at a step; it never falls from one to the next.
        late: The greatest that will do.
        expected: About where it is; 0 where that is unknown.
    """
    low, high, at, side = 0, _STEPS, expected or _STEPS // 2, 0
    below = above = math.nan  # logarithms of the late ratios at both ends, over the greatest that will do
    reach = _NEAR if expected else _FAR
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        there = math.log(max(late_at(at), _RARE) / late)
        if there > 0:
            high, above, below = at, there, below / 2 if side > 0 else below
        else:
            low, below, above = at, there, above / 2 if side < 0 else above
        side = 1 if there > 0 else -1
        if math.isnan(below):
            at, reach = high - reach, _WIDER * reach
        elif math.isnan(above):
            at, reach = low + reach, _WIDER * reach
        elif below < _STEEP:
            at = (low + high) // 2
        else:
            # An end that stays twice counts less (Illinois), so that both come nearer.
            at = low + round((high - low) * below / (below - above)) if below < above else (low + high) // 2
    return low
