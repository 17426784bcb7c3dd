"""Longest time of a batch of random requests that keeps the required part of them within the SLO.

The search has steps of about a thousandth of the longest possible time. Where a limit for a similar rate is known, the
search begins near it. The result does not depend on where the search begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from joulery.perf.queues.batch_queue import late_ratio

_STEPS = 1 << 10
"""Number of steps that the longest possible time is divided into."""
_NEAR, _WIDER = 1, 4
"""Distance from the expected step to the first step tried, and the factor on the distance with each try."""
_FAR = _STEPS // 4
"""The first distance where no step is expected."""
_RARE = 1e-12
"""Late ratios below this are replaced by it before their logarithm is taken."""
_STEEP = -6.0
"""Logarithm of a late ratio over the greatest allowed one, below which the search bisects and does not interpolate."""
_KEPT = 48
"""Number of rates whose limits are kept for each search key; the oldest entry is dropped first."""


class KnownLimits:
    """The steps at which searches ended, by search key and rate."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, dict[float, int]] = {}

    def exactly(self, sought: Hashable, rate_rps: float) -> int | None:
        """The step for exactly this rate; None when it is unknown."""
        return self._steps.get(sought, {}).get(rate_rps)

    def expected(self, sought: Hashable, rate_rps: float) -> int:
        """Estimate of the step, on the line through those of the two nearest rates; 0 where none is known."""
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
        """Store the step at which a search ended."""
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
        shape: Execution times of batches of 1 ... the largest size, as fractions of the largest batch's.
        transfer_ms: Time that each request of a batch adds to the execution.
        deadline_ms: The deadline.
        late: Part of the requests that may miss it.
        known: Results of earlier searches.
        sought: Key of the search in ``known``: it identifies all of the above but the rate.

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
        """The longest possible execution time of a full batch."""
        return min(self.deadline_ms, 1000.0 * len(self.shape) / self.rate_rps)

    def late_at(self, step: int) -> float:
        """The late ratio where a full batch takes ``step`` steps of the longest time."""
        full_ms = self.longest_ms * step / _STEPS
        times_s = [(self.transfer_ms * (size + 1) + full_ms * part) / 1e3 for size, part in enumerate(self.shape)]
        return late_ratio(self.rate_rps, self.scv, times_s, self.deadline_ms / 1e3)


@lru_cache(maxsize=2048)
def _searched(queue: _Queue, late: float) -> int:
    """The last step that is short enough, without an estimate; cached, as plans of one site repeat searches."""
    return _last_step(queue.late_at, late, 0)


def _last_step(late_at: Callable[[int], float], late: float, expected: int) -> int:
    """The last step that is short enough; 0 where the first one is too long.

    Args:
        late_at: The late ratio at a step; it never falls from one to the next.
        late: The greatest late ratio allowed.
        expected: Estimate of the step; 0 where it is unknown.
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
