"""What a governor sees of a language model: who runs and waits, in which order, and what that takes."""

import asyncio
import math

import pytest

from joulery.domain.serving.generation import Dialect
from joulery.domain.serving.service import Slo
from joulery.policies.ordering import Aging
from joulery.runtime.llm.governed import desk_residents, promise
from joulery.runtime.llm.request_meter import TextMeter
from joulery.runtime.llm.traffic import SPAN_S, Traffic
from joulery.runtime.serving.colocated import ProgressClock
from tests.adapters.engines.support import until
from tests.runtime.llm.fakes import FakeEngine, FakeMachine, ask
from tests.runtime.llm.test_service import desk_of, read


async def waiting_for(desk, engine, prompts):
    """Tasks whose requests the desk has, the engine held."""
    engine.gate.clear()
    tasks = [asyncio.create_task(read(desk.accept(ask(prompt)))) for prompt in prompts]
    await until(lambda: len(desk.jobs()) == len(prompts) and desk.working + desk.waiting == len(prompts))
    return tasks


async def test_who_runs_comes_first_then_the_queue_in_its_own_order() -> None:
    engine = FakeEngine()
    desk = desk_of(engine, slo=Slo(8.0, 0.9))
    tasks = await waiting_for(desk, engine, ["runs 4", "long 3", "short 0", "middle 1"])
    now_s = desk.jobs()[0].arrival_s + 1.0
    (seen,) = desk_residents([desk], now_s)
    assert [job.request.prompt for job in desk.jobs()] == ["runs 4", "short 0", "middle 1", "long 3"]
    assert [math.isnan(each.start_s) for each in seen.pending] == [False, True, True, True]
    forecast = desk.forecaster.forecast(ask("long 3")).service_s
    assert seen.pending[-1].service_s == pytest.approx(forecast)
    assert seen.pending[1].service_s < seen.pending[2].service_s < seen.pending[3].service_s
    assert (seen.name, seen.slo, seen.work.servers) == ("llm", Slo(8.0, 0.9), 1)
    assert seen.work.rate_rps == pytest.approx(0.4)
    engine.gate.set()
    await asyncio.gather(*tasks)
    (seen,) = desk_residents([desk], now_s)
    assert (seen.pending, len(seen.answered)) == ([], 4)


async def test_waiting_moves_a_request_forward_as_it_does_in_the_queue() -> None:
    engine, now = FakeEngine(), [0.0]
    for aging, order in ((Aging(1.0), ["runs 4", "old 3", "new 0"]), (None, ["runs 4", "old 3", "new 0"])):
        desk = desk_of(engine, aging=aging)
        desk._clock = lambda: now[0]
        tasks = await waiting_for(desk, engine, ["runs 4", "old 3"])
        now[0] += 1000.0
        tasks.append(asyncio.create_task(read(desk.accept(ask("new 0")))))
        await until(lambda desk=desk: len(desk.jobs()) == 3)
        assert [job.request.prompt for job in desk.jobs()] == order
        engine.gate.set()
        await asyncio.gather(*tasks)


async def test_an_engine_with_a_queue_of_its_own_works_on_what_it_has_begun_to_answer() -> None:
    engine = FakeEngine(Dialect.VLLM)
    desk = desk_of(engine, lanes=4)
    tasks = await waiting_for(desk, engine, ["a 3", "b 0"])
    await until(lambda: len(engine.begun) == 2)
    (seen,) = desk_residents([desk], desk.jobs()[0].arrival_s)
    assert [math.isnan(each.start_s) for each in seen.pending] == [True, True]
    assert seen.work.servers == 4
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert desk.jobs() == ()


async def test_work_is_learned_in_seconds_at_full_clock_and_in_joules_a_second() -> None:
    machine, engine, now = FakeMachine(), FakeEngine(), [0.0]
    desk = desk_of(engine, TextMeter([machine], lambda: machine.busy_s, clock=lambda: machine.now_s))
    desk.work_clock = ProgressClock(lambda: now[0])
    desk.work_clock.run_at(0.5)
    job = desk.accept(ask("p1"))
    async for event in job.events():
        if event.tokens:
            now[0] += 2.0
            engine.used_cpu_s += 1.0
            machine.spend(1.0, 30.0, busy_s=1.0)
    (served,) = desk.traffic.served(job.cost.end_s)
    assert served.work_s == pytest.approx(3.0)  # six seconds at half the clock
    assert served.energy_j == pytest.approx(60.0)
    (seen,) = desk_residents([desk], job.cost.end_s)
    assert (seen.work.service_s, seen.work.own_tail_s, seen.work.energy_j) == pytest.approx((3.0, 3.0, 60.0))
    tasks = await waiting_for(desk, engine, ["q1"])
    (seen,) = desk_residents([desk], job.cost.end_s)
    assert seen.pending[0].energy_j == pytest.approx(20.0 * seen.pending[0].service_s)
    engine.gate.set()
    await asyncio.gather(*tasks)


async def test_requests_that_fail_or_go_away_are_not_seen_any_more() -> None:
    engine = FakeEngine()
    desk = desk_of(engine)
    tasks = await waiting_for(desk, engine, ["holds", "waits"])
    for task in reversed(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert desk.jobs() == ()
    assert desk.traffic.served(0.0) == ()


def test_a_promise_is_the_slo_or_the_deadline() -> None:
    assert promise(desk_of(FakeEngine(), slo=Slo(2.0, 0.9))) == Slo(2.0, 0.9)
    assert promise(desk_of(FakeEngine(), deadline_s=30.0)) == Slo(30.0, 0.99)


def test_rates_and_answers_are_of_the_last_minute() -> None:
    traffic = Traffic()
    assert traffic.rate_rps(0.0) == 0.0
    for second in range(100):
        traffic.came(1000.0 + second)
        traffic.answered(1000.5 + second, 0.5, 0.4, None)
    assert traffic.rate_rps(1100.0) == pytest.approx(1.0, abs=0.02)
    assert len(traffic.served(1100.0)) == SPAN_S
    assert traffic.rate_rps(1130.0) == pytest.approx(0.5, abs=0.02)
    assert (traffic.rate_rps(1300.0), traffic.served(1300.0)) == (0.0, ())
    few = Traffic()
    few.came(5.0)
    assert few.rate_rps(5.0) == pytest.approx(0.1)
    many = Traffic()
    for request in range(10_000):
        many.came(request / 1000)
    assert many.rate_rps(10.0) == pytest.approx(1000, rel=0.01)
