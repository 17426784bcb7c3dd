"""One server whose job may be interrupted: the order is revised while a job runs (:mod:`joulery.policies.reranking`).

The queue decides at arrivals, at completions, and at every ``period_s`` of service while jobs wait, as in a gateway
that receives tokens. A job that resumes after an interruption first takes ``resume_s``: its prompt is found in a
cache, or computed again. Where the policy follows the backlog, the order of waiting jobs is revised at completions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import readonly
from joulery.domain.errors import DataError
from joulery.perf.lengths.remaining import LengthDistribution
from joulery.policies.reranking import BacklogHistory, Reranking
from joulery.sim.queues.single_server import ServedQueue, checked_columns


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Cost of an interruption, and how often one is considered.

    Attributes:
        period_s: Service between two checks of the order, > 0.
        resume_s: Extra service of a job that resumes.
    """

    period_s: float = 0.2
    resume_s: float = 0.03

    def __post_init__(self) -> None:
        if not (self.period_s > 0 and self.resume_s >= 0):
            raise DataError(f"expected a period above 0 s and a cost of at least 0 s, got {self}")


class _Server:
    """The jobs of one run and what is known of them."""

    def __init__(
        self, policy: Reranking, average_s: float, arrival_s: list[float], expected: list[LengthDistribution]
    ) -> None:
        self.policy, self.average_s = policy, average_s
        self.aging, self.backlog = policy.aged(average_s), BacklogHistory()
        self.arrival_s, self.expected = arrival_s, expected
        self.served_s = [0.0] * len(arrival_s)
        self.waiting: list[tuple[float, int]] = []

    def remaining_s(self, job: int) -> float:
        return self.expected[job].remaining(self.served_s[job])

    def push(self, job: int) -> None:
        key_s = self.policy.key_s(self.aging, self.arrival_s[job], self.remaining_s(job))
        heappush(self.waiting, (key_s, job))

    def revise(self) -> None:
        """Revise the order of the waiting jobs by the backlog, after a job has ended."""
        if self.policy.aging is not None:
            return
        jobs = [job for _, job in self.waiting]
        self.backlog.add(math.fsum(self.remaining_s(job) for job in jobs))
        self.aging = self.policy.aged(self.average_s, self.backlog.high_s, self.backlog.now_s)
        self.waiting = []
        for job in jobs:
            self.push(job)

    def yields(self, job: int) -> bool:
        """Whether a waiting job takes the place of the running one."""
        if not self.waiting:
            return False
        running_s = self.policy.key_s(self.aging, self.arrival_s[job], self.remaining_s(job))
        if running_s <= self.waiting[0][0]:
            return False  # what has to outrank it does so for no factor, if not as it is
        best = self.waiting[0][1]
        waiting, running = (self.arrival_s[best], self.remaining_s(best)), (self.arrival_s[job], self.remaining_s(job))
        return self.policy.interrupts(self.aging, waiting, running)


def reranked(
    arrival_s: npt.ArrayLike,
    service_s: npt.ArrayLike,
    expected: list[LengthDistribution],
    policy: Reranking,
    *,
    average_s: float,
    interruptions: Interruptions | None = None,
) -> tuple[ServedQueue, int]:
    """Serve jobs in an order that is revised while they run; also returns the number of interruptions.

    Args:
        arrival_s: float64[n], non-decreasing.
        service_s: float64[n], 0 or more, without the cost of interruptions.
        expected: The possible service times of each job, s.
        policy: Ranks them.
        average_s: Mean service time that the policy knows.
        interruptions: What they cost; None for an engine that interrupts nothing.

    Raises:
        DataError: Columns disagree, arrivals are out of order, a service time is negative or not finite.
    """
    arrivals, services = checked_columns(arrival_s, service_s)
    if len(expected) != len(arrivals):
        raise DataError(f"expected possible lengths of each of {len(arrivals)} jobs, got {len(expected)}")
    server = _Server(policy, average_s, arrivals.tolist(), expected)
    start, finish, order, count = _serve(server, services.tolist(), interruptions)
    served = ServedQueue(arrivals, readonly(start, np.float64), readonly(finish, np.float64), readonly(order, np.int64))
    return served, count


def _serve(
    server: _Server, left_s: list[float], interruptions: Interruptions | None
) -> tuple[list[float], list[float], list[int], int]:
    """Start and finish of each job, jobs in order of their first service, and the number of interruptions."""
    arrival_s, count = server.arrival_s, len(left_s)
    start, finish = [-1.0] * count, [0.0] * count
    order, interrupted, overhead_s = list[int](), 0, 0.0
    now_s, arrived, running = 0.0, 0, -1
    for _ in range(count):
        done = False
        while not done:
            if running < 0 and not server.waiting:
                now_s = max(now_s, arrival_s[arrived])
            while arrived < count and arrival_s[arrived] <= now_s:
                server.push(arrived)
                arrived += 1
            if running >= 0 and interruptions is not None and server.yields(running):
                server.push(running)
                running, interrupted = -1, interrupted + 1
            if running < 0:
                running = heappop(server.waiting)[1]
                overhead_s = 0.0
                if start[running] < 0:
                    start[running] = now_s
                    order.append(running)
                elif interruptions is not None:
                    overhead_s = interruptions.resume_s
            until_s = overhead_s + left_s[running]
            if interruptions is not None and arrived < count:
                until_s = min(until_s, arrival_s[arrived] - now_s)
            if interruptions is not None and server.waiting:
                until_s = min(until_s, overhead_s + interruptions.period_s)
            now_s += until_s
            spent_s = max(until_s - overhead_s, 0.0)
            overhead_s = max(overhead_s - until_s, 0.0)
            left_s[running] -= spent_s
            server.served_s[running] += spent_s
            done = overhead_s == 0 and left_s[running] <= 1e-9
        finish[running] = now_s
        running = -1
        server.revise()
    return start, finish, order, interrupted
