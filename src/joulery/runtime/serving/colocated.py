"""What shares a governed device: whose promises a governor keeps, what waits for them, and what their work takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from joulery.domain.serving.service import Slo


@dataclass(frozen=True, slots=True)
class Work:
    """What one service's requests take at full clock.

    Attributes:
        service_s, own_tail_s: Mean of the service time, and its quantile of the SLO, s.
        energy_j: Joules above idle a request.
        servers: Requests served at once.
        rate_rps: Arrivals lately, 1/s; 0 when there are none.
    """

    service_s: float
    own_tail_s: float
    energy_j: float
    servers: int
    rate_rps: float


class Pending(NamedTuple):
    """A request that runs or waits.

    Attributes:
        arrival_s: When it came, Unix seconds.
        service_s: What it takes at full clock from its beginning, s.
        energy_j: Joules above idle of that.
        start_s: When it began, Unix seconds; NaN while it waits.
    """

    arrival_s: float
    service_s: float
    energy_j: float
    start_s: float = math.nan


class CompletedRequest(NamedTuple):
    """An answer: when it ended, Unix seconds, and how long after its arrival."""

    end_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, eq=False)
class ColocatedService:
    """One service or language model on a device.

    Attributes:
        name: What it is called.
        slo: Its promise.
        work: What its requests take.
        pending: What runs and waits, in the order it will be served.
        answered: Its latest answers, by their end.
    """

    name: str
    slo: Slo
    work: Work
    pending: Sequence[Pending]
    answered: Sequence[CompletedRequest]


ColocatedServices = Callable[[float], Sequence[ColocatedService]]
"""Who is there at an instant, Unix seconds."""


class ProgressClock:
    """Seconds that a device would have needed at full clock: it advances more slowly while the clock is low.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s, self._done_s, self.rate = clock(), 0.0, 1.0

    def now_s(self) -> float:
        """Full-clock seconds so far."""
        return self._at(self._clock())

    def run_at(self, rate: float) -> None:
        """From now on it does ``rate`` of the work it would do at full clock."""
        now_s = self._clock()
        self._done_s, self._since_s, self.rate = self._at(now_s), now_s, rate

    def _at(self, clock_s: float) -> float:
        return self._done_s + self.rate * (clock_s - self._since_s)
