"""Serves one language model: queues its requests, orders them, and charges what each answer costs.

A request gets a length prediction, waits its turn (shortest predicted first, with aging:
:mod:`joulery.policies.ordering`), is answered by the engine, and is charged its energy. An engine that orders requests
by priority gets all of them at once, with the predicted key as ``priority``; joulery then keeps no queue of its own. An
engine that can pause answers pauses a running one when a waiting request outranks it
(:mod:`joulery.policies.reranking`); the paused answer continues when its turn comes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from joulery.domain.serving.engine import EnergyShare, Outcome, RequestError
from joulery.domain.serving.generation import (
    GenerationCost,
    GenerationEvent,
    GenerationKind,
    GenerationRequest,
    LLMEngine,
    TokenUsage,
)
from joulery.domain.serving.service import Slo
from joulery.perf.lengths.step_time import StepCost, StepTimes
from joulery.perf.queues.first_token import FirstTokens, slot_wait_s
from joulery.policies.ordering import Aging
from joulery.policies.reranking import Reranking
from joulery.runtime.llm.length_prediction import Forecast, Forecaster, prompt_tokens
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.slots import EngineSlots
from joulery.runtime.llm.statistics import EngineReports, RecentTraffic, StepObserver
from joulery.runtime.session.progress_clock import ProgressClock


@dataclass(frozen=True, slots=True)
class LLMSettings:
    """Settings for serving one model's requests.

    Attributes:
        max_num_seqs: Requests given at once to an engine that keeps no queue of its own.
        aging: Aging of the order; None for first come, first served.
        reranking: Revises the order while answers are written, in place of ``aging``; None for an order that stays.
        queue: Most requests that may wait.
        deadline_s: Latest end of an answer after its arrival, for requests that set no shorter limit.
        retries: How often a request is repeated if its engine died before the client got any of the answer.
        slo: The latency SLO that a clock governor keeps; the deadline where it is None.
    """

    max_num_seqs: int = 1
    aging: Aging | None = field(default_factory=Aging)
    reranking: Reranking | None = None
    queue: int = 1024
    deadline_s: float = 300.0
    retries: int = 0
    slo: Slo | None = None


class LLMService:
    """Serves one language model.

    Args:
        name: Its name for clients.
        engine: Runs the model.
        forecaster: Predicts lengths and service times.
        settings: How requests are served.
        meter: Charges requests; None to charge nothing.
        owner: Owner that the requests are charged to.
        keep: Called with every answered request and its tokens.
        clock: Monotonic seconds.

    Attributes:
        work_clock: Seconds at full clock; a device whose clock is lowered does less work a second.
        traffic: Recent arrivals and answers.
        steps: The time of the engine's steps, learned from tokens as they arrive.
        reports: What the engine reports of its load.
        slots: The engine's slots and the queue in front of them.
        changed: Called when a request arrives or ends, for a governor that acts on events.
    """

    def __init__(
        self,
        name: str,
        engine: LLMEngine,
        forecaster: Forecaster,
        settings: LLMSettings = LLMSettings(),
        meter: RequestMeter | None = None,
        *,
        owner: str = "default",
        keep: Callable[[GenerationRequest, int], None] = lambda request, tokens: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.owner, self.engine, self.forecaster, self.settings = name, owner, engine, forecaster, settings
        self.keep = keep
        self.changed: Callable[[], None] = lambda: None
        self._meter, self._clock = meter, clock
        self.work_clock, self.traffic = ProgressClock(clock), RecentTraffic()
        first_cost = StepCost(forecaster.pace.per_token_s)
        self.steps = StepObserver(StepTimes(first_cost), clock, lambda: self.work_clock.now_s())
        self.reports = EngineReports(clock)
        self.first_tokens = FirstTokens()
        self._tasks: dict[int, GenerationTask] = {}
        slots = None if engine.dialect.orders else settings.max_num_seqs
        self.slots = EngineSlots(slots, settings.aging, settings.reranking, lambda: forecaster.average_s, clock)
        self._numbers = itertools.count()
        self._epoch_s = clock()
        self._closed = False

    async def read_load(self) -> None:
        """Ask the engine for its load: it may have other clients, whose requests slow joulery's down."""
        before = self.running
        load = await self.engine.load()
        self.reports.add(load, max(before, self.running))  # requests end while the report comes
        self.steps.others = self.others
        if self._meter is not None:
            self._meter.share_engine(self.name, self.reports.own_ratio)

    def predicted_wait_s(self) -> float:
        """Predicted wait for the engine of a request that arrives now, by the predicted lengths before it, s."""
        now_s, running, queued = self._clock(), [], []
        for task in self._tasks.values():
            if task.in_engine:
                running.append(task.left_s(now_s))
            else:
                queued.append(task.forecast.service_s)
        if len(running) + len(queued) < self.settings.max_num_seqs:
            return 0.0
        return slot_wait_s(running, queued, self.settings.max_num_seqs)

    @property
    def idle(self) -> bool:
        """Whether the service has no request."""
        return not self._tasks

    @property
    def others(self) -> float:
        """Requests of other clients in the engine's batch; 0 where it reports none."""
        load = self.reports.load
        return 0.0 if load is None else max(0.0, load.running - sum(task.generating for task in self._tasks.values()))

    def now_s(self) -> float:
        """Seconds of its clock."""
        return self._clock()

    @property
    def waiting(self) -> int:
        """Requests in joulery's queue."""
        return self.slots.waiting

    @property
    def running(self) -> int:
        """Requests in the engine, in its own queue or in its batch."""
        return self.slots.running

    def accept(self, request: GenerationRequest) -> GenerationTask:
        """Accept a request. Its length is predicted now; it enters the queue when its events are read.

        Raises:
            RequestError: The queue is full, or the service is closing.
        """
        if self._closed:
            raise RequestError("the service is closing", Outcome.UNAVAILABLE)
        held = self.running if self.engine.dialect.orders else self.waiting
        if held >= self.settings.queue:
            retry_s = held * self.forecaster.average_s / self.settings.max_num_seqs
            raise RequestError(
                f"the queue of {self.name} is full ({held} requests)", Outcome.OVERLOADED, retry_after_s=retry_s
            )
        arrival_s, asked_s = time.time(), self._clock()
        self.traffic.arrived(arrival_s)
        forecast, wait_s = self.forecaster.forecast(request), self.predicted_wait_s()
        return GenerationTask(self, next(self._numbers), request, forecast, arrival_s, asked_s, wait_s)

    def tasks(self) -> tuple[GenerationTask, ...]:
        """Accepted requests that have not ended: running ones first, then queued ones in the order of service."""

        def turn(task: GenerationTask) -> tuple[bool, float, int]:
            key_s = task.asked_s if task.in_engine else self.slots.key_s(task)
            return (not task.in_engine, key_s, task.number)

        return tuple(sorted(self._tasks.values(), key=turn))

    async def close(self) -> None:
        """Reject queued requests and close the engine. Safe to call twice."""
        self._closed = True
        self.slots.reject(RequestError("the service is closing", Outcome.UNAVAILABLE))
        await self.engine.close()

    def rank(self, forecast: Forecast) -> int | None:
        """The rank for an engine that orders by priority: predicted milliseconds plus aging; None for other engines."""
        if not self.engine.dialect.orders:
            return None
        aging = self.settings.aging
        since_s = self._clock() - self._epoch_s
        return round(1000 * (since_s if aging is None else aging.size_s(forecast.service_s) + aging.rate * since_s))

    def register(self, task: GenerationTask) -> None:
        """Add a task whose events are being read."""
        self._tasks[task.number] = task
        self.changed()

    def unregister(self, task: GenerationTask) -> None:
        """Remove a task that has ended."""
        del self._tasks[task.number]
        self.changed()

    async def acquire_slot(self, task: GenerationTask) -> None:
        """Wait for a slot in the engine; :meth:`release_slot` frees it."""
        await self.slots.acquire(task)
        if self._meter is not None:
            whole = task.request.kind is GenerationKind.EMBEDDING
            self._meter.began(self.name, task.number, prompt_tokens(task.request) if whole else 0.0)

    def release_slot(self, task: GenerationTask) -> EnergyShare | None:
        """Free the slot of a request for the next one. Returns what the request cost since it got the slot."""
        try:
            return None if self._meter is None else self._meter.ended(self.name, task.number)
        finally:
            self.slots.release(task)

    def count_tokens(self, number: int, *, read: int = 0, written: int = 0) -> None:
        """Count tokens that the engine has read or generated for a request."""
        self.reports.generated(written)
        if self._meter is not None:
            self._meter.moved(self.name, number, read=read, written=written)


class GenerationTask:
    """One accepted request. Read its ``events`` once.

    Attributes:
        request: The request.
        forecast: Its predicted length and service time.
        cost: What it cost; set when its events have ended.
        started: Whether the engine has begun to answer.
        paused: Whether its answer was interrupted and waits for a slot to continue.
        number: Its number at this service.
        arrival_s, asked_s: Its arrival in Unix seconds and on the service's clock.
        start_s: Its latest start in the engine, Unix seconds; NaN before that.
        first_token_s: First message of the engine, Unix seconds; NaN before that.
    """

    def __init__(
        self,
        service: LLMService,
        number: int,
        request: GenerationRequest,
        forecast: Forecast,
        arrival_s: float,
        asked_s: float,
        wait_s: float = 0.0,
    ) -> None:
        self.request, self.forecast = request, forecast
        self.started = self.paused = False
        self.cost: GenerationCost | None = None
        self.number, self.arrival_s, self.asked_s = number, arrival_s, asked_s
        self._service, self._wait_s = service, wait_s
        self._attempt = 0
        self.start_s = math.nan
        self._prompt_counted = False
        self._begun_work_s = self._begun_s = 0.0
        self._written, self._messages = 0, 0
        self._usage: TokenUsage | None = None
        self._energy: list[EnergyShare | None] = []
        self._has_slot = self._resuming = False
        self.first_token_s = math.nan

    @property
    def attempts(self) -> int:
        """Number of times that the engine got it."""
        return self._attempt

    @property
    def in_engine(self) -> bool:
        """Whether it runs: it is in the engine or, where the engine keeps a queue, its answer has begun."""
        if self._service.engine.dialect.orders:
            return self.started
        return not (math.isnan(self.start_s) or self.paused)

    @property
    def generating(self) -> bool:
        """Whether its answer has begun and is not paused."""
        return self.started and not self.paused

    @property
    def remaining_s(self) -> float:
        """Seconds that it is still expected to take in the engine; under re-ranking, by the tokens written so far."""
        service = self._service
        if service.settings.reranking is None:
            return self.forecast.service_s
        return service.forecaster.remaining_s(self.request, self.forecast, self._written, started=self.started)

    def left_s(self, now_s: float) -> float:
        """Time still needed in the engine, by its predicted length, s; 0 where it takes longer than predicted."""
        return max(0.0, self.forecast.service_s - (now_s - self._begun_s))

    @property
    def tokens_written(self) -> int:
        """Tokens generated so far."""
        return self._written

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """The engine's messages. A stream is never restarted once the client has got a part of it.

        Raises:
            RequestError: The request failed, or its answer broke off.
        """
        service = self._service
        limit_s = service.settings.deadline_s
        if self.request.timeout_s is not None:
            limit_s = min(limit_s, self.request.timeout_s)
        deadline_s = asyncio.get_running_loop().time() + limit_s
        service.register(self)
        try:
            while True:
                try:
                    async with aclosing(self._attempt_once(deadline_s)) as events:
                        async for event in events:
                            self.started = True
                            yield event
                    break
                except RequestError as error:
                    repeatable = error.outcome is Outcome.CRASHED and not (self.started and self.request.stream)
                    if not repeatable or self._attempt > service.settings.retries:
                        raise
            self._learn()
        except TimeoutError:
            service.traffic.missed()
            raise RequestError(
                f"no answer within {limit_s:g} s", Outcome.DEADLINE, variant=service.engine.variant
            ) from None
        finally:
            service.unregister(self)
            self.cost = self._make_cost()

    async def _attempt_once(self, deadline_s: float) -> AsyncGenerator[GenerationEvent, None]:
        """Make one attempt: take a slot, yield the engine's events, charge the request; pause while it is outranked."""
        service, engine = self._service, self._service.engine
        await self._take_slot(deadline_s)
        self._attempt += 1
        self.start_s = time.time()
        self._begin_work()
        rank = service.rank(self.forecast)
        pausable = service.settings.reranking is not None and engine.pauses
        answer = (
            engine.generate(self.request, rank, lambda: service.slots.should_pause(self))
            if pausable
            else engine.generate(self.request, rank)
        )
        try:
            async with aclosing(answer) as events:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline_s):
                            event = await anext(events)
                    except StopAsyncIteration:
                        return
                    if event.paused:
                        await self._pause(deadline_s)
                        continue
                    self._count(event)
                    yield event
        finally:
            self.paused = False
            if self._has_slot:
                self._leave_slot()

    async def _take_slot(self, deadline_s: float) -> None:
        async with asyncio.timeout_at(deadline_s):
            await self._service.acquire_slot(self)
        self._has_slot = True

    def _leave_slot(self) -> None:
        self._has_slot = False
        self._service.steps.ended(self.number)
        self._energy.append(self._service.release_slot(self))

    async def _pause(self, deadline_s: float) -> None:
        """Give the slot to a request that outranks this one, and wait for the next slot."""
        service = self._service
        began_s, began_work_s = service.now_s(), service.work_clock.now_s()
        self.paused = True
        self._leave_slot()
        service.changed()
        await self._take_slot(deadline_s)
        self.paused = False
        self._begun_s += service.now_s() - began_s
        self._begun_work_s += service.work_clock.now_s() - began_work_s
        self._resuming = True
        service.changed()

    def _begin_work(self) -> None:
        self._begun_s, self._begun_work_s = self._service.now_s(), self._service.work_clock.now_s()

    def _count(self, event: GenerationEvent) -> None:
        self._messages += 1
        if not self._prompt_counted:
            self._prompt_counted = True
            self.first_token_s = time.time()
            now_s = self._service.now_s()
            self._service.first_tokens.add(now_s, now_s - self.asked_s, self._wait_s)
            if self._service.engine.dialect.orders:
                self._begin_work()  # the time before was spent in its queue
            read = event.usage.prompt if event.usage is not None else prompt_tokens(self.request)
            self._service.count_tokens(self.number, read=read)
            self._service.steps.began(self.number, read)
            self._written += event.tokens  # the first message says when the answer began, not how long a step takes
            self._service.count_tokens(self.number, written=event.tokens)
        elif event.tokens:
            self._written += event.tokens
            self._service.count_tokens(self.number, written=event.tokens)
            if self._resuming:
                self._resuming = False
                self._service.steps.began(self.number, prompt_tokens(self.request) + self._written)
            else:
                self._service.steps.generated(self.number, event.tokens)
        if event.usage is not None:
            self._usage = event.usage

    @property
    def _counted(self) -> TokenUsage:
        """Its tokens: as reported, else as counted; none where the engine never answered."""
        if self._usage is not None or not self.started:
            return self._usage or TokenUsage(0, 0, reported=False)
        return TokenUsage(prompt_tokens(self.request), self._written, reported=False)

    def _learn(self) -> None:
        """Give the complete answer to the forecaster and the statistics."""
        usage, service = self._counted, self._service
        # An engine with a queue of its own shows when it began only where its answer comes in several messages.
        known = self._messages > 1 or not service.engine.dialect.orders
        took_s = self._work_s() if known else None
        service.forecaster.completed(self.request, self.forecast, usage, took_s)
        service.slots.rerank()
        share = _sum(self._energy)
        energy_j = None if share is None else share.energy_j
        work_s = self.forecast.service_s if took_s is None else took_s
        tokens = usage.completion if known else 0
        service.traffic.answered(time.time(), time.time() - self.arrival_s, work_s, energy_j, tokens)
        service.keep(self.request, usage.completion)

    def _work_s(self) -> float:
        """Its time in the engine, converted to seconds at the highest clock by what a lower clock costs this engine."""
        service = self._service
        took_s, worked_s = service.now_s() - self._begun_s, service.work_clock.now_s() - self._begun_work_s
        if took_s <= 0 or worked_s <= 0:
            return max(0.0, worked_s)
        slower = max(took_s / worked_s - 1.0, 0.0)
        return took_s / (1.0 + service.steps.times.cost.elasticity_ratio * slower)

    def _make_cost(self) -> GenerationCost:
        return GenerationCost(
            variant=self._service.engine.variant,
            replica=self._service.engine.name,
            arrival_s=self.arrival_s,
            start_s=self.start_s,
            end_s=time.time(),
            usage=self._counted,
            energy=_sum(self._energy),
            predicted_tokens=self.forecast.tokens,
            source=self.forecast.source,
            first_token_s=self.first_token_s,
            kind=self.request.kind,
        )


def _sum(shares: list[EnergyShare | None]) -> EnergyShare | None:
    """Cost of all attempts; None when one is unknown, or there was none."""
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return None
    grams = [share.carbon_g for share in known if share.carbon_g is not None]
    carbon_g = math.fsum(grams) if len(grams) == len(known) else None
    return EnergyShare(math.fsum(share.energy_j for share in known), carbon_g, known[-1].quality)
