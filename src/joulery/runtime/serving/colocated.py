"""The services and language models of a governed device: their SLOs, their pending requests and their work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from joulery.domain.serving.service import Slo


@dataclass(frozen=True, slots=True)
class Work:
    """What one service's requests take at the highest clock.

    Attributes:
        service_s, own_tail_s: Mean of the service time, and its quantile of the SLO, s.
        energy_j: Joules above idle per request; 0 where unknown.
        servers: Requests that run at once.
        rate_rps: Recent arrivals, 1/s.
    """

    service_s: float
    own_tail_s: float
    energy_j: float
    servers: int
    rate_rps: float


class Pending(NamedTuple):
    """A request that runs or waits.

    Attributes:
        arrival_s: Its arrival, Unix seconds.
        service_s: Its predicted service time at the highest clock, s.
        energy_j: Joules above idle of that; 0 where unknown.
        start_s: Its start, Unix seconds; NaN while it waits.
    """

    arrival_s: float
    service_s: float
    energy_j: float
    start_s: float = math.nan


class CompletedRequest(NamedTuple):
    """An answer: its end, Unix seconds, and its latency, s."""

    end_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, eq=False)
class ColocatedService:
    """One service or language model on a device.

    Attributes:
        name: Its name.
        slo: Its latency SLO.
        work: What its requests take.
        pending: Running and waiting requests, in the order of service.
        answered: Its latest answers, by their end.
        eventful: Whether every arrival and completion steps the governor; else it predicts the arrivals of a period.
    """

    name: str
    slo: Slo
    work: Work
    pending: Sequence[Pending]
    answered: Sequence[CompletedRequest]
    eventful: bool = False


ColocatedServices = Callable[[float], Sequence[ColocatedService]]
"""The services of a device at an instant, Unix seconds."""


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
        """From now on the device does ``rate`` of the work it does at the highest clock."""
        now_s = self._clock()
        self._done_s, self._since_s, self.rate = self._at(now_s), now_s, rate

    def _at(self, clock_s: float) -> float:
        return self._done_s + self.rate * (clock_s - self._since_s)
