"""Re-ranking in a service: a running answer gives way, goes on, and is accounted as one."""

import asyncio
from typing import NamedTuple

import numpy as np
import pytest

from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import GenerationEvent, TokenUsage
from joulery.policies.ordering import Aging
from joulery.policies.reranking import Reranking
from joulery.runtime.llm.governed import colocated_llms
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService, LLMSettings
from joulery.runtime.llm.slots import EngineSlots
from tests.adapters.engines.support import until
from tests.runtime.llm.fakes import FakeEngine, FakeMachine, ask, forecaster

LONG, SHORT = "long 4", "short 0"


class Queued(NamedTuple):
    """A request as the queue sees it."""

    number: int
    asked_s: float
    remaining_s: float


class PausingEngine(FakeEngine):
    """Writes a token whenever the test says so, or freely; remembers who wrote each."""

    pauses = True

    def __init__(self):
        super().__init__()
        self.written = []
        self.step = asyncio.Semaphore(0)
        self.free = False

    async def generate(self, request, priority, pause=None, /):
        self.begun.append(request.prompt)
        count = self.tokens.get(request.prompt, 3)
        for number in range(count):
            if not self.free:
                await self.step.acquire()
            self.on_token()
            self.written.append(request.prompt)
            yield GenerationEvent({"choices": [{}]}, 1)
            if pause is not None and number < count - 1 and pause():
                yield GenerationEvent({}, paused=True)
            await asyncio.sleep(0)
        yield GenerationEvent({"choices": []}, 0, TokenUsage(5, count, reported=True))
        self.ended.append(request.prompt)


def service_of(engine, meter=None, **settings):
    if meter is not None:
        meter.join("llm", engine.cpu_s)
    settings = {"reranking": Reranking(), "aging": None, **settings}
    return LLMService("llm", engine, forecaster(), LLMSettings(**settings), meter)


def answered(llm, prompt, **fields):
    task = llm.accept(ask(prompt, **fields))

    async def read():
        return [event async for event in task.events()]

    return task, asyncio.create_task(read())


async def steps(engine, count):
    """So many tokens more, of the request that runs."""
    wanted = len(engine.written) + count
    for _ in range(count):
        engine.step.release()
    await until(lambda: len(engine.written) >= wanted)


def finish(engine):
    """From now on everyone writes freely."""
    engine.free = True
    for _ in range(8):
        engine.step.release()


async def test_a_short_request_interrupts_a_long_answer_which_then_goes_on() -> None:
    engine = PausingEngine()
    engine.tokens = {LONG: 6, SHORT: 2}
    llm = service_of(engine)
    long, whole = answered(llm, LONG)
    await steps(engine, 2)
    assert long.in_engine and long.generating
    _, quick = answered(llm, SHORT)
    await until(lambda: llm.waiting == 1)
    await steps(engine, 2)
    await until(lambda: long.paused)
    assert (llm.running, llm.waiting, long.in_engine, long.generating) == (1, 1, False, False)
    finish(engine)
    events = await whole
    await quick
    assert engine.ended == [SHORT, LONG]
    assert engine.written == [LONG] * 3 + [SHORT] * 2 + [LONG] * 3
    assert not any(event.paused for event in events), "its client sees one answer"
    assert (long.cost.usage.completion, long.attempts, llm.slots.pauses) == (6, 1, 1)
    assert llm.running == llm.waiting == 0


async def test_equals_and_longer_ones_wait_for_the_end() -> None:
    engine = PausingEngine()
    engine.tokens = {LONG: 5}
    llm = service_of(engine)
    _, first = answered(llm, LONG)
    await steps(engine, 1)
    others = [answered(llm, prompt)[1] for prompt in ("another 4", "third 3")]
    await until(lambda: llm.waiting == 2)
    finish(engine)
    await asyncio.gather(first, *others)
    assert engine.ended[0] == LONG and llm.slots.pauses == 0


async def test_an_engine_that_cannot_pause_is_not_asked_to() -> None:
    engine = FakeEngine()
    llm = service_of(engine)
    engine.gate.clear()
    _, first = answered(llm, LONG)
    await until(lambda: engine.begun == [LONG])
    rest = []
    for prompt in ("middle 3", SHORT):
        rest.append(answered(llm, prompt)[1])
        await until(lambda: llm.waiting == len(rest))
    engine.gate.set()
    await asyncio.gather(first, *rest)
    assert engine.ended == [LONG, SHORT, "middle 3"]


async def test_of_several_running_answers_the_last_in_rank_gives_way() -> None:
    engine = PausingEngine()
    engine.tokens = {LONG: 30, "middle 2": 30, SHORT: 1}
    llm = service_of(engine, max_num_seqs=2)
    middle, first = answered(llm, "middle 2")
    long, second = answered(llm, LONG)
    await steps(engine, 4)
    _, quick = answered(llm, SHORT)
    await until(lambda: llm.waiting == 1)
    await steps(engine, 2)
    await until(lambda: long.paused)
    assert middle.generating and llm.running == 2
    finish(engine)
    await asyncio.gather(first, second, quick)
    assert llm.slots.pauses == 1


async def test_a_client_that_goes_while_its_answer_is_paused_leaves_nothing() -> None:
    machine = FakeMachine()
    meter = RequestMeter([machine], lambda: machine.busy_s, lambda at_s: 100.0, clock=lambda: machine.now_s)
    engine = PausingEngine()
    engine.tokens = {LONG: 9, SHORT: 4}
    llm = service_of(engine, meter)
    long, whole = answered(llm, LONG)
    await steps(engine, 2)
    _, quick = answered(llm, SHORT)
    await until(lambda: llm.waiting == 1)
    await steps(engine, 1)
    await until(lambda: long.paused)
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    assert (llm.waiting, llm.running, long.paused) == (0, 1, False)
    assert long.cost.usage.completion == 3 and long.cost.energy is not None
    finish(engine)
    await quick
    assert llm.running == 0 and engine.ended == [SHORT]


async def test_the_deadline_passes_while_paused() -> None:
    engine = PausingEngine()
    engine.tokens = {LONG: 9, SHORT: 9}
    llm = service_of(engine)
    long, whole = answered(llm, LONG, timeout_s=0.5)
    await steps(engine, 2)
    _, quick = answered(llm, SHORT)
    await until(lambda: llm.waiting == 1)
    await steps(engine, 1)
    await until(lambda: long.paused)
    with pytest.raises(RequestError) as caught:
        await whole
    assert caught.value.outcome is Outcome.DEADLINE and llm.waiting == 0
    finish(engine)
    await quick
    assert llm.running == 0


async def test_pauses_are_not_taken_for_work_and_energy_is_the_sum() -> None:
    machine = FakeMachine()
    meter = RequestMeter([machine], lambda: machine.busy_s, lambda at_s: 100.0, clock=lambda: machine.now_s)
    engine = PausingEngine()

    def spend():
        engine.used_cpu_s += 1.0
        machine.spend(1.0, 30.0, busy_s=1.0)

    engine.on_token = spend
    engine.tokens = {LONG: 6, SHORT: 4}
    meter.join("llm", engine.cpu_s)
    llm = LLMService(
        *("llm", engine, forecaster(), LLMSettings(aging=None, reranking=Reranking()), meter),
        clock=lambda: machine.now_s,
    )
    long, whole = answered(llm, LONG)
    await steps(engine, 2)
    short, quick = answered(llm, SHORT)
    await until(lambda: llm.waiting == 1)
    finish(engine)
    await asyncio.gather(whole, quick)
    assert llm.slots.pauses == 1
    works = sorted(each.work_s for each in llm.traffic.served(long.cost.end_s))
    assert works == pytest.approx([4.0, 6.0], abs=1.01)
    assert long.cost.energy.energy_j + short.cost.energy.energy_j == pytest.approx(10 * 20.0, rel=0.01)
    assert long.cost.energy.energy_j == pytest.approx(120.0, rel=0.2)


async def test_the_governor_sees_a_paused_answer_as_waiting() -> None:
    engine = PausingEngine()
    engine.tokens = {LONG: 9, SHORT: 9}
    llm = service_of(engine)
    long, whole = answered(llm, LONG)
    await steps(engine, 2)
    _, quick = answered(llm, SHORT)
    await until(lambda: llm.waiting == 1)
    await steps(engine, 1)
    await until(lambda: long.paused)
    (found,) = colocated_llms([llm], 0.0)
    running = [each.batched.running for each in found.pending]
    assert running == [False, False] and np.isnan(found.pending[-1].start_s)
    assert found.pending[-1].batched.kv_tokens > found.pending[0].batched.kv_tokens - 1
    finish(engine)
    await asyncio.gather(whole, quick)


async def test_what_completions_show_revises_the_queue() -> None:
    """Class 1 proves to be no shorter than class 3: a request that waits loses its lead."""
    engine = FakeEngine()
    llm = service_of(engine, reranking=Reranking(Aging(0.0)))
    short, long = llm.accept(ask("x1")), llm.accept(ask("y3"))
    assert llm.slots.key_s(short) < llm.slots.key_s(long)
    for number in range(60):
        forecast = llm.forecaster.forecast(ask(f"{number} 1"))
        llm.forecaster.completed(ask(f"{number} 1"), forecast, TokenUsage(5, 2000, reported=True), 40.0)
    llm.slots.rerank()
    assert llm.slots.key_s(short) == pytest.approx(llm.slots.key_s(long))
    assert short.forecast.tokens < long.forecast.tokens, "the forecast itself is what was said at arrival"


async def test_an_answer_that_outlives_its_prediction_is_expected_to_take_longer() -> None:
    llm = service_of(FakeEngine())
    for number in range(40):
        request = ask(f"question number {number} 1")
        forecast = llm.forecaster.forecast(request)
        tokens = 10 if number % 4 else 400
        llm.forecaster.completed(request, forecast, TokenUsage(5, tokens, reported=True), 0.1 + 0.02 * tokens)
    request = ask("the next 1")
    forecast = llm.forecaster.forecast(request)
    begun, late = (llm.forecaster.remaining_s(request, forecast, each, started=True) for each in (0, 60))
    assert late > 2 * begun
    bound = request._replace(max_tokens=70)
    assert llm.forecaster.remaining_s(bound, forecast, 60, started=True) == pytest.approx(0.2, rel=0.1)


async def test_the_order_follows_the_backlog_that_answers_leave_behind() -> None:
    """As in :mod:`joulery.sim.queues.interrupted_server`: revised as an answer ends, by what is left then."""
    average_s = 1.0
    slots = EngineSlots(1, None, Reranking(), lambda: average_s, lambda: 0.0)
    turns = [Queued(number, 0.0, remaining_s) for number, remaining_s in enumerate((2.0, 30.0, 70.0))]
    waiting = [asyncio.create_task(slots.acquire(turn)) for turn in turns]
    await until(lambda: slots.waiting == 2)
    assert slots.key_s(turns[2]) == Reranking().aged(average_s).key_s(70.0, 0.0)
    slots.release(turns[0])
    slots.rerank()
    assert slots.key_s(turns[2]) == Reranking().aged(average_s, 100.0, 100.0).key_s(70.0, 0.0)
    for turn in turns[1:]:
        slots.release(turn)
    await asyncio.gather(*waiting)
