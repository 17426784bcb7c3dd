"""What a governor sees of a language model: who runs and waits, in which order, and what that takes."""

import asyncio
import math

import pytest

from joulery.domain.serving.engine import RequestError
from joulery.domain.serving.generation import Dialect
from joulery.domain.serving.service import Slo
from joulery.policies.ordering import Aging
from joulery.runtime.llm.governed import capacity, colocated_llms, slo_of
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.statistics import SPAN_S, RecentTraffic, StepObserver
from joulery.runtime.session.progress_clock import ProgressClock
from tests.adapters.engines.support import until
from tests.runtime.llm.fakes import FakeEngine, FakeMachine, ask
from tests.runtime.llm.test_service import read, service_of


async def waiting_for(llm, engine, prompts):
    """Tasks whose requests the llm has, the engine held."""
    engine.gate.clear()
    tasks = [asyncio.create_task(read(llm.accept(ask(prompt)))) for prompt in prompts]
    await until(lambda: len(llm.tasks()) == len(prompts) and llm.running + llm.waiting == len(prompts))
    return tasks


async def test_who_runs_comes_first_then_the_queue_in_its_own_order() -> None:
    engine = FakeEngine()
    llm = service_of(engine, slo=Slo(8.0, 0.9))
    tasks = await waiting_for(llm, engine, ["runs 4", "long 3", "short 0", "middle 1"])
    now_s = llm.tasks()[0].arrival_s + 1.0
    (seen,) = colocated_llms([llm], now_s)
    assert [task.request.prompt for task in llm.tasks()] == ["runs 4", "short 0", "middle 1", "long 3"]
    assert [math.isnan(each.start_s) for each in seen.pending] == [False, True, True, True]
    forecast = llm.forecaster.forecast(ask("long 3")).service_s
    assert seen.pending[-1].service_s == pytest.approx(forecast)
    assert seen.pending[1].service_s < seen.pending[2].service_s < seen.pending[3].service_s
    assert (seen.name, seen.slo, seen.work.servers) == ("llm", Slo(8.0, 0.9), 1)
    assert seen.work.rate_rps == pytest.approx(0.4)
    engine.gate.set()
    await asyncio.gather(*tasks)
    (seen,) = colocated_llms([llm], now_s)
    assert (seen.pending, len(seen.answered)) == ([], 4)


async def test_waiting_moves_a_request_forward_as_it_does_in_the_queue() -> None:
    engine, now = FakeEngine(), [0.0]
    for aging, order in ((Aging(1.0), ["runs 4", "old 3", "new 0"]), (None, ["runs 4", "old 3", "new 0"])):
        llm = service_of(engine, aging=aging)
        llm._clock = lambda: now[0]
        tasks = await waiting_for(llm, engine, ["runs 4", "old 3"])
        now[0] += 1000.0
        tasks.append(asyncio.create_task(read(llm.accept(ask("new 0")))))
        await until(lambda llm=llm: len(llm.tasks()) == 3)
        assert [task.request.prompt for task in llm.tasks()] == order
        engine.gate.set()
        await asyncio.gather(*tasks)


async def test_an_engine_with_a_queue_of_its_own_works_on_what_it_has_begun_to_answer() -> None:
    engine = FakeEngine(Dialect.VLLM)
    llm = service_of(engine, max_num_seqs=4)
    tasks = await waiting_for(llm, engine, ["a 3", "b 0"])
    await until(lambda: len(engine.begun) == 2)
    (seen,) = colocated_llms([llm], llm.tasks()[0].arrival_s)
    assert [math.isnan(each.start_s) for each in seen.pending] == [True, True]
    assert seen.work.servers == 4
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert llm.tasks() == ()


async def test_work_is_learned_in_seconds_at_full_clock_and_in_joules_a_second() -> None:
    machine, engine, now = FakeMachine(), FakeEngine(), [0.0]
    llm = service_of(engine, RequestMeter([machine], lambda: machine.busy_s, clock=lambda: machine.now_s))
    llm.work_clock = ProgressClock(lambda: now[0])
    llm._clock = lambda: now[0]
    llm.work_clock.run_at(0.5)
    job = llm.accept(ask("p1"))
    async for event in job.events():
        if event.tokens:
            now[0] += 2.0
            engine.used_cpu_s += 1.0
            machine.spend(1.0, 30.0, busy_s=1.0)
    (served,) = llm.traffic.served(job.cost.end_s)
    assert served.work_s == pytest.approx(3.0)  # six seconds at half the clock
    assert served.energy_j == pytest.approx(60.0)
    (seen,) = colocated_llms([llm], job.cost.end_s)
    assert (seen.work.service_s, seen.work.own_tail_s, seen.work.energy_j) == pytest.approx((3.0, 3.0, 60.0))
    tasks = await waiting_for(llm, engine, ["q1"])
    (seen,) = colocated_llms([llm], job.cost.end_s)
    assert seen.pending[0].energy_j == pytest.approx(20.0 * seen.pending[0].service_s)
    engine.gate.set()
    await asyncio.gather(*tasks)


async def test_requests_that_fail_or_go_away_are_not_seen_any_more() -> None:
    engine = FakeEngine()
    llm = service_of(engine)
    tasks = await waiting_for(llm, engine, ["holds", "waits"])
    for task in reversed(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert llm.tasks() == ()
    assert llm.traffic.served(0.0) == ()


def test_the_limit_is_the_slo_or_the_deadline() -> None:
    assert slo_of(service_of(FakeEngine(), slo=Slo(2.0, 0.9))) == Slo(2.0, 0.9)
    assert slo_of(service_of(FakeEngine(), deadline_s=30.0)) == Slo(30.0, 0.99)


def test_rates_and_answers_are_of_the_last_minute() -> None:
    traffic = RecentTraffic()
    assert traffic.rate_rps(0.0) == 0.0
    for second in range(100):
        traffic.arrived(1000.0 + second)
        traffic.answered(1000.5 + second, 0.5, 0.4, None)
    assert traffic.rate_rps(1100.0) == pytest.approx(1.0, abs=0.02)
    assert len(traffic.served(1100.0)) == SPAN_S
    assert traffic.rate_rps(1130.0) == pytest.approx(0.5, abs=0.02)
    assert (traffic.rate_rps(1300.0), traffic.served(1300.0)) == (0.0, ())
    few = RecentTraffic()
    few.arrived(5.0)
    assert few.rate_rps(5.0) == pytest.approx(0.1)
    many = RecentTraffic()
    for request in range(10_000):
        many.arrived(request / 1000)
    assert many.rate_rps(10.0) == pytest.approx(1000, rel=0.01)


async def test_a_memory_bound_answer_is_learned_as_long_as_it_is_at_every_clock() -> None:
    """2.00 s at any clock, mostly low ones, were learned as 1.46 s."""
    engine, now = FakeEngine(), [0.0]
    llm = service_of(engine)
    llm._clock = lambda: now[0]
    llm.work_clock = ProgressClock(lambda: now[0])
    llm.steps = StepObserver(llm.steps.times, lambda: now[0], lambda: llm.work_clock.now_s())
    engine.tokens = {"p": 100}

    def generated() -> None:
        now[0] += 0.02

    engine.on_token = generated
    for number in range(60):
        llm.work_clock.run_at(1.0 if number % 4 == 0 else 1000.0 / 1380.0)
        await read(llm.accept(ask("p")))
    assert llm.steps.times.cost.elasticity_ratio < 0.1
    assert llm.traffic.served(0.0)[-1].work_s == pytest.approx(2.0, rel=0.05)
    assert llm.forecaster.pace.service_s(100.0) == pytest.approx(2.0, rel=0.05)


async def test_the_room_of_an_engine_that_queues_is_what_runs_while_a_request_waits() -> None:
    engine, now_s = FakeEngine(Dialect.VLLM), 1000.0
    llm = service_of(engine, max_num_seqs=8)
    tasks = [llm.accept(ask(f"p{number}")) for number in range(12)]
    for number, task in enumerate(tasks):
        task.start_s, task.started = now_s - 20.0, number < 10
    assert capacity(llm, tasks, now_s) == 10  # two have waited for 20 s
    for task in tasks[10:]:
        task.start_s = now_s - 0.1
    assert capacity(llm, tasks, now_s) > 1000  # two have just come
    plain = service_of(FakeEngine(), max_num_seqs=3)
    assert capacity(plain, [], now_s) == 3


async def test_requests_that_end_at_their_deadline_count_as_late() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    llm = service_of(engine, deadline_s=0.01, slo=Slo(5.0, 0.99))
    before = llm.traffic.late_budget(Slo(5.0, 0.99))
    with pytest.raises(RequestError):
        await read(llm.accept(ask("p")))
    assert llm.traffic.late_budget(Slo(5.0, 0.99)) < before - 0.9
