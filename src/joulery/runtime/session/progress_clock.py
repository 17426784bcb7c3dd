"""Progress of work on a device whose clock is governed."""

from __future__ import annotations

import time
from collections.abc import Callable


class ProgressClock:
    """Seconds of work at the highest clock: it advances more slowly while the clock is low.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s, self._done_s, self.rate = clock(), 0.0, 1.0

    def now_s(self) -> float:
        """Seconds of work at the highest clock so far."""
        return self._at(self._clock())

    def run_at(self, rate: float) -> None:
        """Set the speed of the device from now on, as a share ``rate`` of that at the highest clock."""
        now_s = self._clock()
        self._done_s, self._since_s, self.rate = self._at(now_s), now_s, rate

    def _at(self, clock_s: float) -> float:
        return self._done_s + self.rate * (clock_s - self._since_s)
