"""What a batch of random requests may take: the time at which just the required part of them is within the SLO.

The time is sought in steps of a thousandth of the longest there could be. Where a like one was found before, at a rate
hardly different, the search begins there; it ends at the same step wherever it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from joulery.perf.queues.batch_queue import late_ratio

_HALVINGS = 10
"""Halvings of the interval in which a limit is sought."""
_STEPS = 1 << _HALVINGS
_NEAR, _WIDER = 3, 4
"""Steps from the one before to the first ones tried, and how many times more with each try."""
_RARE = 1e-12
"""Late ratios below this are the same in a logarithm."""


class KnownLimits:
    """The step at which each search ended last, by what was sought."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, int] = {}

    def begin(self, sought: Hashable) -> int:
        """The step to begin at; 0 where nothing is known."""
        return self._steps.get(sought, 0)

    def keep(self, sought: Hashable, step: int) -> None:
        """Remember where a search ended."""
        self._steps[sought] = step


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
        known: Where searches ended before; a search that is not among them halves the whole interval.
        sought: What is sought, but for the rate.

    Returns:
        0 where no time is short enough.
    """

    def late_at(full_ms: float) -> float:
        times_s = [(transfer_ms * (size + 1) + full_ms * part) / 1e3 for size, part in enumerate(shape)]
        return late_ratio(rate_rps, scv, times_s, deadline_ms / 1e3)

    longest = min(deadline_ms, 1000.0 * len(shape) / rate_rps)
    begin = 0 if known is None else known.begin(sought)
    if begin:
        low = longest * _last_step(lambda at: late_at(longest * at / _STEPS), late, begin) / _STEPS
    elif late_at(longest * 1e-3) > late:
        return 0.0
    else:
        low = _halved(late_at, late, longest)
    if known is not None:
        known.keep(sought, round(low / longest * _STEPS))
    return low


def _halved(late_at: Callable[[float], float], late: float, longest: float) -> float:
    low, high = 0.0, longest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if late_at(middle) > late else (middle, high)
    return low


def _last_step(late_at: Callable[[int], float], late: float, begin: int) -> int:
    """The last step that is short enough; 0 where the first one is too long."""
    low, high, ratios = 0, _STEPS, dict[int, float]()
    at, reach = begin, _NEAR
    while high - low > 1:
        ratios[at] = late_at(at)
        low, high = (low, at) if ratios[at] > late else (at, high)
        if low in ratios and high in ratios:
            at = _between(low, high, *(math.log(max(each, _RARE) / late) for each in (ratios[low], ratios[high])))
        elif low in ratios:
            at, reach = min(low + reach, high - 1), _WIDER * reach
        else:
            at, reach = max(high - reach, low + 1), _WIDER * reach
    return low


def _between(low: int, high: int, below: float, above: float) -> int:
    """A step between two, where a straight line between their values is 0."""
    at = low + round((high - low) * below / (below - above)) if below < above else (low + high) // 2
    return min(max(at, low + 1), high - 1)
