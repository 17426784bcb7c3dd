"""One language model being served: who waits, who is next, what each answer took.

A request is forecast, waits its turn (shortest predicted first, waiting forgiven: :mod:`joulery.policies.ordering`), is
written by the engine, and is charged. An engine that orders by priority itself is handed every request at once, with
the predicted key as its ``priority``: there is never a second queue in front of a first.
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
from joulery.domain.serving.generation import GenerationCost, GenerationEvent, GenerationRequest, LLMEngine, TokenUsage
from joulery.domain.serving.service import Slo
from joulery.policies.ordering import Aging, SpeculativeQueue
from joulery.runtime.llm.length_prediction import Forecast, Forecaster, prompt_tokens
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.statistics import RecentTraffic
from joulery.runtime.serving.colocated import ProgressClock


@dataclass(frozen=True, slots=True)
class LLMSettings:
    """How one model's requests are treated.

    Attributes:
        max_num_seqs: Requests given at once to an engine that keeps no order of its own.
        aging: Of the order; None for first come first served.
        queue: Requests that may wait.
        deadline_s: A request that names no shorter limit is answered within this.
        retries: How often a request that died with its engine, unanswered, is given to it again.
        slo: What is promised of answers, for whoever governs the clock of the device; the deadline where it is None.
    """

    max_num_seqs: int = 1
    aging: Aging | None = field(default_factory=Aging)
    queue: int = 1024
    deadline_s: float = 300.0
    retries: int = 0
    slo: Slo | None = None


@dataclass(slots=True, eq=False)
class _Turn:
    """A waiting request: its turn comes when ``called`` is done."""

    number: int
    called: asyncio.Future[None]

    @property
    def came(self) -> bool:
        """Whether it was given a lane."""
        return self.called.done() and not self.called.cancelled() and self.called.exception() is None


class LLMService:
    """Serves one model.

    Args:
        name: What clients call it.
        engine: Who writes.
        forecaster: Who guesses lengths.
        settings: How requests are treated.
        meter: Who charges; None to charge nothing.
        owner: Whom it is charged to.
        keep: Called with every request that was answered, and its tokens.
        clock: Monotonic seconds.

    Attributes:
        work_clock: What the engine's seconds are counted by: those of a device whose clock is governed are slower.
        traffic: What came and was answered lately.
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
        self._meter, self._clock = meter, clock
        self.work_clock, self.traffic = ProgressClock(clock), RecentTraffic()
        self._jobs: dict[int, GenerationTask] = {}
        self._queue = SpeculativeQueue(settings.aging or Aging(0.0))
        self._turns: dict[int, _Turn] = {}
        self._numbers = itertools.count()
        self._working = 0
        self._epoch_s = clock()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return len(self._queue)

    @property
    def working(self) -> int:
        """Requests the engine has."""
        return self._working

    def accept(self, request: GenerationRequest) -> GenerationTask:
        """Take a request in: it is forecast, and has a place in the queue when its events are asked for.

        Raises:
            RequestError: The queue is full, or the llm is closing.
        """
        if self._closed:
            raise RequestError("the service is closing", Outcome.UNAVAILABLE)
        held = self._working if self.engine.dialect.orders else len(self._queue)
        if held >= self.settings.queue:
            retry_s = held * self.forecaster.average_s / self.settings.max_num_seqs
            raise RequestError(
                f"{self.name} has {held} requests waiting, which is all it takes",
                Outcome.OVERLOADED,
                retry_after_s=retry_s,
            )
        arrival_s, asked_s = time.time(), self._clock()
        self.traffic.came(arrival_s)
        return GenerationTask(self, next(self._numbers), request, self.forecaster.forecast(request), arrival_s, asked_s)

    def jobs(self) -> tuple[GenerationTask, ...]:
        """Requests that were accepted and have not ended: first those the engine has, then as they would be served."""
        now_s, aging = self._clock(), self.settings.aging

        def turn(job: GenerationTask) -> tuple[bool, float, int]:
            waited_s = now_s - job.asked_s
            key_s = -waited_s if aging is None else aging.key_s(job.forecast.service_s, waited_s)
            return (not job.in_engine, job.asked_s if job.in_engine else key_s, job.number)

        return tuple(sorted(self._jobs.values(), key=turn))

    async def close(self) -> None:
        """Turn away who waits, end the engine. Safe to call twice."""
        self._closed = True
        for turn in list(self._turns.values()):
            if not turn.called.done():
                turn.called.set_exception(RequestError("the service is closing", Outcome.UNAVAILABLE))
        await self.engine.close()

    def rank(self, forecast: Forecast) -> int | None:
        """The priority for an engine that orders by itself: predicted milliseconds plus what waiting forgives."""
        if not self.engine.dialect.orders:
            return None
        aging = self.settings.aging
        since_s = self._clock() - self._epoch_s
        return round(1000 * (since_s if aging is None else forecast.service_s + aging.rate * since_s))

    def begin(self, job: GenerationTask) -> None:
        """A request's events are asked for."""
        self._jobs[job.number] = job

    def end(self, job: GenerationTask) -> None:
        """A request has ended, however it did."""
        del self._jobs[job.number]

    async def enter(self, number: int, forecast: Forecast, arrival_s: float) -> None:
        """Wait for a lane; on return the request has one, which ``leave`` gives back.

        ``arrival_s`` is on the llm's clock.
        """
        if not self.engine.dialect.orders and (self._working >= self.settings.max_num_seqs or len(self._queue)):
            turn = _Turn(number, asyncio.get_running_loop().create_future())
            self._turns[number] = turn
            predicted_s = 0.0 if self.settings.aging is None else forecast.service_s
            self._queue.push(number, arrival_s, predicted_s)
            try:
                await turn.called
            except BaseException:
                if not self._queue.cancel(number) and turn.came:
                    self._free()  # its turn came while it was going away
                raise
            finally:
                del self._turns[number]
        else:
            self._working += 1
        if self._meter is not None:
            self._meter.began(self.name, number)

    def leave(self, number: int) -> EnergyShare | None:
        """The engine is done with a request: its lane goes to the next, its share is what it cost."""
        try:
            return None if self._meter is None else self._meter.ended(self.name, number)
        finally:
            self._free()

    def moved(self, number: int, *, read: int = 0, written: int = 0) -> None:
        """The engine read or wrote tokens of a request."""
        if self._meter is not None:
            self._meter.moved(self.name, number, read=read, written=written)

    def _free(self) -> None:
        self._working -= 1
        while len(self._queue) and self._working < self.settings.max_num_seqs:
            turn = self._turns[self._queue.pop(self._clock())]
            if not turn.called.done():
                self._working += 1
                turn.called.set_result(None)


class GenerationTask:
    """One request on its way. Ask for ``events`` once.

    Attributes:
        request: What was asked.
        forecast: What was expected of it.
        cost: What it took; set when its events have ended, however they did.
        started: Whether the engine has begun to answer.
        number: Its number at this llm.
        arrival_s, asked_s: When it came, Unix seconds and on the llm's clock.
        start_s: When the engine got it last, Unix seconds; NaN before that.
    """

    def __init__(
        self,
        llm: LLMService,
        number: int,
        request: GenerationRequest,
        forecast: Forecast,
        arrival_s: float,
        asked_s: float,
    ) -> None:
        self.request, self.forecast = request, forecast
        self.started = False
        self.cost: GenerationCost | None = None
        self.number, self.arrival_s, self.asked_s = number, arrival_s, asked_s
        self._llm = llm
        self._attempt = 0
        self.start_s = math.nan
        self._met_prompt = False
        self._begun_work_s = 0.0
        self._written = 0
        self._usage: TokenUsage | None = None
        self._energy: list[EnergyShare | None] = []

    @property
    def attempts(self) -> int:
        """How often the engine had it."""
        return self._attempt

    @property
    def in_engine(self) -> bool:
        """Whether the engine works on it: has it, or, where it keeps a queue of its own, has begun to answer."""
        return self.started if self._llm.engine.dialect.orders else not math.isnan(self.start_s)

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """The engine's messages, one request or none of it: an answer that has begun is never begun again.

        Raises:
            RequestError: It was not answered, or not to the end.
        """
        llm = self._llm
        patience_s = llm.settings.deadline_s
        if self.request.timeout_s is not None:
            patience_s = min(patience_s, self.request.timeout_s)
        deadline_s = asyncio.get_running_loop().time() + patience_s
        llm.begin(self)
        try:
            while True:
                try:
                    async with aclosing(self._written_by_engine(deadline_s)) as events:
                        async for event in events:
                            self.started = True
                            yield event
                    break
                except RequestError as error:
                    again = error.outcome is Outcome.CRASHED and not self.started
                    if not again or self._attempt > llm.settings.retries:
                        raise
            self._learn()
        except TimeoutError:
            raise RequestError(
                f"not answered within {patience_s:g} s", Outcome.DEADLINE, variant=llm.engine.variant
            ) from None
        finally:
            llm.end(self)
            self.cost = self._make_cost()

    async def _written_by_engine(self, deadline_s: float) -> AsyncGenerator[GenerationEvent, None]:
        """One attempt, lane and charge included."""
        llm = self._llm
        async with asyncio.timeout_at(deadline_s):
            await llm.enter(self.number, self.forecast, self.asked_s)
        self._attempt += 1
        self.start_s, self._begun_work_s = time.time(), llm.work_clock.now_s()
        try:
            async with aclosing(llm.engine.write(self.request, llm.rank(self.forecast))) as events:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline_s):
                            event = await anext(events)
                    except StopAsyncIteration:
                        return
                    self._count(event)
                    yield event
        finally:
            self._energy.append(llm.leave(self.number))

    def _count(self, event: GenerationEvent) -> None:
        if not self._met_prompt:
            self._met_prompt = True
            if self._llm.engine.dialect.orders:
                self._begun_work_s = self._llm.work_clock.now_s()  # what came before was its queue
            read = event.usage.prompt if event.usage is not None else prompt_tokens(self.request)
            self._llm.moved(self.number, read=read)
        if event.tokens:
            self._written += event.tokens
            self._llm.moved(self.number, written=event.tokens)
        if event.usage is not None:
            self._usage = event.usage

    @property
    def _counted(self) -> TokenUsage:
        """Its tokens: as reported, else as counted; none where the engine never answered."""
        if self._usage is not None or not self.started:
            return self._usage or TokenUsage(0, 0, reported=False)
        return TokenUsage(prompt_tokens(self.request), self._written, reported=False)

    def _learn(self) -> None:
        """The answer came to its end: let the forecaster know."""
        usage, llm = self._counted, self._llm
        # An engine with a queue of its own says when it began only where the answer comes in pieces.
        told = self.request.stream or not llm.engine.dialect.orders
        took_s = max(0.0, llm.work_clock.now_s() - self._begun_work_s) if told else None
        llm.forecaster.completed(self.request, self.forecast, usage, took_s)
        share = _sum(self._energy)
        work_s = self.forecast.service_s if took_s is None else took_s
        energy_j = None if share is None else share.energy_j
        llm.traffic.answered(time.time(), time.time() - self.arrival_s, work_s, energy_j)
        llm.keep(self.request, usage.completion)

    def _make_cost(self) -> GenerationCost:
        return GenerationCost(
            variant=self._llm.engine.variant,
            replica=self._llm.engine.name,
            arrival_s=self.arrival_s,
            start_s=self.start_s,
            end_s=time.time(),
            usage=self._counted,
            energy=_sum(self._energy),
            predicted_tokens=self.forecast.tokens,
            source=self.forecast.source,
        )


def _sum(shares: list[EnergyShare | None]) -> EnergyShare | None:
    """What all attempts cost; unknown when one of them is, or there was none."""
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return None
    grams = [share.carbon_g for share in known if share.carbon_g is not None]
    carbon_g = math.fsum(grams) if len(grams) == len(known) else None
    return EnergyShare(math.fsum(share.energy_j for share in known), carbon_g, known[-1].quality)
