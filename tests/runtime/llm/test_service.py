"""One language model's service: order, deadlines, retries, disconnecting clients; each request is answered once."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import Dialect
from joulery.policies.ordering import Aging
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService, LLMSettings
from tests.adapters.engines.support import until
from tests.runtime.llm.fakes import FakeEngine, FakeMachine, ask, forecaster


def service_of(engine, meter=None, **settings):
    if meter is not None:
        meter.join("llm", engine.cpu_s)
    return LLMService("llm", engine, forecaster(), LLMSettings(**settings), meter)


async def read(job):
    return [event async for event in job.events()]


async def backlog(llm, engine, prompts, **fields):
    """Requests that come one by one while the first holds the engine; then it goes on."""
    engine.gate.clear()
    first = asyncio.create_task(read(llm.accept(ask("first"))))
    await until(lambda: engine.begun == ["first"])
    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(read(llm.accept(ask(prompt, **fields)))))
        before = llm.waiting
        await until(lambda before=before: llm.waiting > before)
    engine.gate.set()
    await asyncio.gather(first, *tasks)
    return engine.begun[1:]


async def test_the_shortest_predicted_goes_first_and_ties_go_by_arrival() -> None:
    engine = FakeEngine()
    order = await backlog(service_of(engine), engine, ["a3", "b0", "c3", "d1", "e0"])
    assert order == ["b0", "e0", "d1", "a3", "c3"]
    assert Counter(engine.ended) == Counter(engine.begun)


async def test_first_come_first_served_where_asked_or_where_aging_outweighs_all() -> None:
    prompts = ["a3", "b0", "c3", "d1"]
    for aging in (None, Aging(1e6)):
        engine = FakeEngine()
        assert await backlog(service_of(engine, aging=aging), engine, prompts) == prompts


async def test_a_predictor_that_throws_costs_no_answer() -> None:
    engine = FakeEngine()
    llm = service_of(engine)
    order = await backlog(llm, engine, ["boom a", "boom b", "z0", "boom c"])
    assert order == ["z0", "boom a", "boom b", "boom c"]
    assert llm.forecaster.failures == {"ZeroDivisionError": 3}
    assert llm.forecaster.sources == {"mean": 3, "predictor": 2}


async def test_lanes_are_filled_and_never_overfilled() -> None:
    engine = FakeEngine()
    llm = service_of(engine, max_num_seqs=3)
    engine.gate.clear()
    tasks = [asyncio.create_task(read(llm.accept(ask(f"p{i}")))) for i in range(8)]
    await until(lambda: len(engine.begun) == 3 and llm.waiting == 5)
    assert llm.running == 3
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert len(engine.ended) == 8
    assert (llm.running, llm.waiting) == (0, 0)


async def test_an_engine_that_orders_holds_no_more_than_the_queue_may() -> None:
    engine = FakeEngine(Dialect.VLLM)
    llm = service_of(engine, queue=2)
    engine.gate.clear()
    tasks = [asyncio.create_task(read(llm.accept(ask(f"p{i}")))) for i in range(2)]
    await until(lambda: len(engine.begun) == 2)
    with pytest.raises(RequestError, match=r"full.*2"):
        llm.accept(ask("p2"))
    engine.gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("dialect", [Dialect.VLLM, Dialect.SGLANG])
async def test_an_engine_that_orders_gets_every_request_at_once_with_its_rank(dialect) -> None:
    engine = FakeEngine(dialect)
    llm = service_of(engine, max_num_seqs=1)
    engine.gate.clear()
    tasks = [asyncio.create_task(read(llm.accept(ask(prompt)))) for prompt in ("a3", "b0", "c1")]
    await until(lambda: len(engine.begun) == 3)
    assert llm.waiting == 0
    rank = dict(zip(engine.begun, engine.priorities, strict=True))
    assert rank["b0"] < rank["c1"] < rank["a3"]
    assert all(isinstance(each, int) for each in rank.values())
    engine.gate.set()
    await asyncio.gather(*tasks)


async def test_the_rank_of_boost_is_arrival_less_the_head_start() -> None:
    engine = FakeEngine(Dialect.VLLM)
    llm = service_of(engine, max_num_seqs=1, aging=Aging.boost(60.0))
    engine.gate.clear()
    tasks = [asyncio.create_task(read(llm.accept(ask(prompt)))) for prompt in ("a3", "b0", "c1")]
    await until(lambda: len(engine.begun) == 3)
    rank = dict(zip(engine.begun, engine.priorities, strict=True))
    assert rank["b0"] < rank["c1"] < rank["a3"] < 10_000, "a head start comes off the milliseconds since the start"
    engine.gate.set()
    await asyncio.gather(*tasks)


async def test_an_engines_own_queue_is_not_taken_for_its_pace() -> None:
    engine = FakeEngine(Dialect.VLLM)
    llm = service_of(engine)
    known = llm.forecaster.pace.service_s(100.0)
    engine.whole = True
    whole = llm.accept(ask("whole 3"))
    await read(whole)
    engine.whole = False
    assert llm.forecaster.pace.service_s(100.0) == known
    (served,) = llm.traffic.served(0.0)
    assert served.work_s == whole.forecast.service_s
    await read(llm.accept(ask("in pieces 3", stream=True)))
    assert llm.forecaster.pace.service_s(100.0) != known


async def test_the_rank_is_arrival_alone_under_first_come_first_served() -> None:
    now = iter(range(100))
    engine = FakeEngine(Dialect.VLLM)
    llm = LLMService("llm", engine, forecaster(), LLMSettings(aging=None), clock=lambda: float(next(now)))
    for prompt in ("a3", "b0"):
        await read(llm.accept(ask(prompt)))
    assert engine.priorities == sorted(engine.priorities)


async def test_a_full_queue_and_a_closed_service_reject_requests() -> None:
    engine = FakeEngine()
    llm = service_of(engine, queue=1)
    engine.gate.clear()
    first = asyncio.create_task(read(llm.accept(ask("first"))))
    await until(lambda: llm.running == 1)
    second = asyncio.create_task(read(llm.accept(ask("second"))))
    await until(lambda: llm.waiting == 1)
    with pytest.raises(RequestError, match=r"full.*1") as caught:
        llm.accept(ask("third"))
    assert caught.value.outcome is Outcome.OVERLOADED
    assert (caught.value.retry_after_s or 0) > 0
    await llm.close()
    with pytest.raises(RequestError, match="closing"):
        await second
    with pytest.raises(RequestError, match="closing"):
        llm.accept(ask("fourth"))
    engine.gate.set()
    await first
    assert engine.ended == ["first"]


async def test_a_deadline_passes_in_the_queue_and_in_the_engine() -> None:
    engine = FakeEngine()
    llm = service_of(engine)
    engine.gate.clear()
    holds = asyncio.create_task(read(llm.accept(ask("holds", timeout_s=0.6))))
    await until(lambda: llm.running == 1)
    waits = asyncio.create_task(read(llm.accept(ask("waits", timeout_s=0.05))))
    for task in (waits, holds):
        with pytest.raises(RequestError, match=r"0.0?[56] s") as caught:
            await task
        assert caught.value.outcome is Outcome.DEADLINE
    assert (llm.waiting, llm.running) == (0, 0)
    engine.gate.set()
    assert len(await read(llm.accept(ask("next")))) == 4


async def test_who_goes_away_while_waiting_or_being_answered_leaves_the_lane_to_the_next() -> None:
    engine = FakeEngine()
    llm = service_of(engine)
    engine.gate.clear()
    jobs = [llm.accept(ask(prompt)) for prompt in ("holds", "waits", "next")]
    tasks = [asyncio.create_task(read(job)) for job in jobs]
    await until(lambda: llm.waiting == 2)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert llm.waiting == 1
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    engine.gate.set()
    assert len(await tasks[2]) == 4
    assert engine.begun == ["holds", "next"]
    assert jobs[1].cost is not None and np.isnan(jobs[1].cost.start_s)
    assert (llm.waiting, llm.running) == (0, 0)


async def test_a_turn_that_comes_while_its_client_goes_is_passed_on() -> None:
    engine = FakeEngine()
    llm = service_of(engine)
    engine.gate.clear()
    tasks = [asyncio.create_task(read(llm.accept(ask(prompt)))) for prompt in ("holds", "waits", "next")]
    await until(lambda: llm.waiting == 2)
    tasks[0].cancel()
    await asyncio.sleep(0)
    tasks[1].cancel()  # perhaps after its turn was called
    engine.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert engine.ended == ["next"]
    assert llm.running == 0


async def test_an_unanswered_request_is_given_to_a_new_engine_once_and_an_answered_one_never() -> None:
    engine = FakeEngine()
    engine.deaths = 1
    llm = service_of(engine, retries=1)
    job = llm.accept(ask("again"))
    assert len(await read(job)) == 4
    assert (engine.begun, job.attempts) == (["again", "again"], 2)
    engine.deaths = 2
    with pytest.raises(RequestError, match="died"):
        await read(llm.accept(ask("twice dead")))
    engine.deaths = 1
    with pytest.raises(RequestError, match="died"):
        await read(service_of(engine, retries=0).accept(ask("an engine of another machine")))

    async def dies_after_a_word(request, priority, /):
        async for event in FakeEngine().generate(request, priority):
            yield event
            raise RequestError("died", Outcome.CRASHED)

    engine.generate = dies_after_a_word
    job = llm.accept(ask("half", stream=True))
    with pytest.raises(RequestError, match="died"):
        await read(job)
    assert (job.attempts, job.started) == (1, True)
    assert llm.running == 0


async def test_answers_are_kept_and_failures_are_not() -> None:
    engine, kept = FakeEngine(), []
    llm = LLMService("llm", engine, forecaster(), keep=lambda request, tokens: kept.append((request.prompt, tokens)))
    await read(llm.accept(ask("whole")))
    await read(llm.accept(ask("cut", max_tokens=3)))
    await read(llm.accept(ask("short of its limit", max_tokens=4)))
    engine.deaths = 1
    with pytest.raises(RequestError):
        await read(llm.accept(ask("dies")))
    assert kept == [("whole", 3), ("cut", 3), ("short of its limit", 3)]


async def test_an_answer_knows_what_it_took() -> None:
    machine, engine = FakeMachine(), FakeEngine()
    meter = RequestMeter([machine], lambda: machine.busy_s, lambda t_s: 360.0, pue=2.0, clock=lambda: machine.now_s)
    llm = service_of(engine, meter)
    job = llm.accept(ask("p1"))
    async for event in job.events():
        if event.tokens:
            engine.used_cpu_s += 0.25
            machine.spend(1.0, 30.0, busy_s=0.5)
    cost = job.cost
    assert cost is not None and cost.energy is not None
    # 3 s at 30 W, of which 10 W idle; half of the busy seconds were the engine's.
    assert cost.energy.energy_j == pytest.approx(30.0)
    assert cost.energy_per_token_j == pytest.approx(10.0)
    assert cost.energy.carbon_g == pytest.approx(30.0 * 2.0 * 360.0 / 3.6e6)
    assert (cost.usage, cost.source) == ((5, 3, True), "predictor")
    assert cost.predicted_tokens == pytest.approx(50.0)
    totals = meter.totals
    assert (totals.requests_j, totals.idle_j, totals.total_j) == pytest.approx((30.0, 30.0, 90.0))
    assert totals.unattributed_j == pytest.approx(30.0)


async def test_many_clients_are_each_answered_once_or_have_disconnected() -> None:
    engine = FakeEngine()
    llm = service_of(engine, max_num_seqs=2)
    random = np.random.default_rng(3)
    tasks = [asyncio.create_task(read(llm.accept(ask(f"p{i} {random.integers(5)}")))) for i in range(120)]
    for index in random.permutation(120)[:40].tolist():
        await asyncio.sleep(0)
        tasks[index].cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    answered = [events for events in ended if isinstance(events, list)]
    assert all(len(events) == 4 for events in answered)
    assert len(answered) >= 80
    assert max(Counter(engine.begun).values()) == 1
    assert len(engine.ended) == len(answered)
    assert (llm.waiting, llm.running) == (0, 0)
