"""A governor's view of the services of its device: the end of each pending request at each clock.

The live controller and the simulator build their views here, so that a rule is tested on the views of live operation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.serving.service import Slo
from joulery.perf.lengths.step_time import BatchedRequest, StepCost, batch_finish_s
from joulery.policies.clocks.governor import Waiting

_MIN_LEFT_RATIO = 0.02
"""Least share of its predicted work that a running request is taken to have left."""


@dataclass(frozen=True, slots=True)
class BatchingEngine:
    """An engine with continuous batching.

    Attributes:
        cost: Cost of one step.
        capacity: Sequences that fit into a batch.
    """

    cost: StepCost
    capacity: int


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one service's requests at the highest clock.

    Attributes:
        service_s, own_tail_s: Mean of the service time, and its quantile by the SLO, s.
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
        energy_j: Joules above idle of that service; 0 where unknown.
        start_s: Its start, Unix seconds; NaN while it waits.
        batched: Its tokens in an engine with continuous batching; None in others.
    """

    arrival_s: float
    service_s: float
    energy_j: float
    start_s: float = math.nan
    batched: BatchedRequest | None = None


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
        work: Work of its requests.
        pending: Running and waiting requests, in the order of service.
        answered: Its latest answers, by their end.
        eventful: Whether every arrival and completion steps the governor; else it predicts the arrivals of a period.
        batch: Its engine, where that batches continuously; every pending request then has its tokens.
        late_budget: Further answers that may be late within the SLO; None where answers are not counted.
    """

    name: str
    slo: Slo
    work: Work
    pending: Sequence[Pending]
    answered: Sequence[CompletedRequest]
    eventful: bool = False
    batch: BatchingEngine | None = None
    late_budget: float | None = None

    @property
    def elasticity_ratio(self) -> float:
        """Elasticity of its time to the clock; 1, as for arithmetic, where it is not learned."""
        return 1.0 if self.batch is None else self.batch.cost.elasticity_ratio


@dataclass(frozen=True, slots=True)
class ClockCurves:
    """Dependence of work on the clock of a device.

    Attributes:
        slowdown: Time of the same work at each clock over that at the highest, by the elasticity of the work.
        above_idle: Power above idle at each clock over that at the highest, float64[clocks].
    """

    slowdown: Callable[[float], FloatArray]
    above_idle: FloatArray


def pending_requests(
    residents: Sequence[ColocatedService], now_s: float, curves: ClockCurves, rate: float
) -> tuple[tuple[Waiting, ...], FloatArray]:
    """Every pending request with its predicted end, and the start of one that arrives now, s, float64[clocks].

    A language model alone on its device is predicted step by step (:func:`batch_finish_s`). Services that share a
    device take turns by arrival, requests of one service run side by side on its servers.

    Args:
        residents: The services of the device.
        now_s: Unix seconds.
        curves: Clock curves of the device.
        rate: Work done a second at the present clock over that at the highest, for work bound by arithmetic.
    """
    if len(residents) == 1 and residents[0].batch is not None:
        return _batched(residents[0], residents[0].batch, curves)
    return _in_turns(residents, now_s, curves, rate)


def _batched(
    one: ColocatedService, engine: BatchingEngine, curves: ClockCurves
) -> tuple[tuple[Waiting, ...], FloatArray]:
    slowdown = curves.slowdown(one.elasticity_ratio)
    requests = [each.batched or BatchedRequest(0.0) for each in one.pending]
    # The last one arrives now and reads nothing: it ends when it starts.
    end_s = batch_finish_s(engine.cost, [*requests, BatchedRequest(0.0)], engine.capacity)
    alone_s = [each.read_s + each.left_tokens * engine.cost.step_s(1, each.kv_tokens) for each in requests]
    waiting = [
        _waiting(
            request, one, own_s / request.service_s if request.service_s > 0 else 0.0, float(end), slowdown, curves
        )
        for request, own_s, end in zip(one.pending, alone_s, end_s, strict=False)
    ]
    return tuple(waiting), float(end_s[-1]) * slowdown


def _in_turns(
    residents: Sequence[ColocatedService], now_s: float, curves: ClockCurves, rate: float
) -> tuple[tuple[Waiting, ...], FloatArray]:
    turns: list[tuple[float, int, Pending]] = []
    for index, one in enumerate(residents):
        turn_s = 0.0
        for each in one.pending:
            turn_s = max(turn_s, each.arrival_s)  # each service has an order of its own
            turns.append((turn_s, index, each))
    turns.sort(key=lambda turn: turn[:2])
    free_s = [[0.0] * max(1, one.work.servers) for one in residents]
    slowdown = curves.slowdown(max((one.elasticity_ratio for one in residents), default=1.0))
    waiting = []
    for _, index, request in turns:
        one, servers = residents[index], free_s[index]
        left = _left_ratio(request, now_s, rate)
        end_s = servers[0] + left * request.service_s
        heapq.heapreplace(servers, end_s)
        for other in range(len(residents)):
            if other != index:
                delay_s = left * request.service_s / len(servers)
                free_s[other] = [each_s + delay_s for each_s in free_s[other]]
        waiting.append(_waiting(request, one, left, end_s, slowdown, curves))
    return tuple(waiting), max((servers[0] for servers in free_s), default=0.0) * slowdown


def _left_ratio(request: Pending, now_s: float, rate: float) -> float:
    """Share of the work of a request that is left."""
    if math.isnan(request.start_s) or request.service_s <= 0:
        return 1.0
    return max(1.0 - rate * (now_s - request.start_s) / request.service_s, _MIN_LEFT_RATIO)


def _waiting(
    request: Pending, one: ColocatedService, left: float, end_s: float, slowdown: FloatArray, curves: ClockCurves
) -> Waiting:
    # Where no energy is known, one watt above idle: only the shape of the curve matters then.
    energy_j = request.energy_j if request.energy_j > 0 else request.service_s
    return Waiting(
        deadline_s=request.arrival_s + one.slo.latency_s,
        slo_s=one.slo.latency_s,
        finish_s=end_s * slowdown,
        energy_j=left * energy_j * np.asarray(curves.above_idle) * slowdown,
        queued=math.isnan(request.start_s),
    )
