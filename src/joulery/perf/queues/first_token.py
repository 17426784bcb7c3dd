"""Predicted time to first token of an arriving request: wait for a slot, and a margin learned from recent errors.

The wait is that of list scheduling: requests in the queue take the slot that is free first. Effects that the prediction
leaves out (prompts to read, wrong lengths, a full batch) are in its errors: the margin is a quantile of the errors, as
in split conformal prediction (Vovk et al. 2005), so a bound that prediction plus margin meets is met at that quantile
as long as the distribution of the errors does not change.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

import numpy as np

_KEPT = 200
"""Number of latest first tokens from which the margin is computed."""
_LEAST = 20
"""First tokens below which there is no margin."""
_SPAN_S = 60.0
"""Age from which first tokens are ignored, s."""


def slot_wait_s(running_s: Iterable[float], queued_s: Iterable[float], slots: int) -> float:
    """Seconds until a slot is free for the next request; 0 where one is.

    Args:
        running_s: Remaining time of each running request, s.
        queued_s: Time of each queued request, in the order of the queue, s.
        slots: Requests at once; at least 1.
    """
    free_s = sorted(max(0.0, one) for one in running_s)
    if len(free_s) > slots:  # an engine with a queue of its own may report more than it runs
        free_s, early = free_s[:slots], free_s[slots:]
    else:
        early = []
    free_s += [0.0] * (slots - len(free_s))
    heapq.heapify(free_s)
    for needs_s in (*early, *queued_s):
        heapq.heapreplace(free_s, free_s[0] + max(0.0, needs_s))
    return free_s[0]


class FirstTokens:
    """Recent first tokens of one model, and the errors of their predictions."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)

    def add(self, at_s: float, took_s: float, predicted_s: float) -> None:
        """Add a first token.

        Args:
            at_s: Time of the first token, on the caller's clock.
            took_s: Time since the request's arrival, s.
            predicted_s: Its predicted wait, s.
        """
        self._seen.append((at_s, took_s, took_s - predicted_s))

    def margin_s(self, quantile: float, now_s: float) -> float:
        """Margin to add to a predicted wait so that first tokens are in time at a quantile, s.

        It is 0 while too few first tokens are known. It may be below 0, where waits were predicted too long.
        """
        errors = [error for at_s, _, error in self._seen if at_s >= now_s - _SPAN_S]
        if len(errors) < _LEAST:
            return 0.0
        rank = min(1.0, quantile * (len(errors) + 1) / len(errors))
        return sorted(errors)[math.ceil(rank * (len(errors) - 1))]  # as numpy.quantile's "higher"; few need no array

    def quantile_s(self, quantile: float, now_s: float) -> float:
        """A quantile of the recent times to first token, s; NaN while too few are known."""
        times = [took_s for at_s, took_s, _ in self._seen if at_s >= now_s - _SPAN_S]
        return float(np.quantile(times, quantile)) if len(times) >= _LEAST else math.nan
