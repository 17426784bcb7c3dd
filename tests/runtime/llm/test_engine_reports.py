"""What an engine reports of itself: other clients, its queue, its cache; and what follows for governor and joules."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.serving.generation import Dialect, EngineLoad
from joulery.runtime.llm.governed import capacity, colocated_llms
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService, LLMSettings
from joulery.runtime.llm.statistics import EngineReports
from tests.adapters.engines.support import until
from tests.runtime.llm.fakes import FakeEngine, FakeMachine, ask, forecaster


class Time:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=20))
def test_the_share_of_the_own_tokens_is_a_share_and_one_without_other_clients(steps) -> None:
    time, alone, beside, made, both = Time(), EngineReports(lambda: 0.0), None, 0, 0
    beside = EngineReports(time)
    alone.add(EngineLoad(1, 0, generated_tokens=0))
    beside.add(EngineLoad(1, 0, generated_tokens=0))
    for own, other in steps:
        time.now_s += 1.0
        made, both = made + own, both + own + other
        alone.generated(own)
        beside.generated(own)
        alone.add(EngineLoad(1, 0, generated_tokens=made))
        beside.add(EngineLoad(1, 0, generated_tokens=both))
        assert alone.own_ratio == 1.0
        assert 0.0 <= beside.own_ratio <= 1.0


def test_an_equal_other_client_has_half_and_a_restart_or_silence_changes_nothing() -> None:
    time = Time()
    reports = EngineReports(time)
    for second in range(5):
        time.now_s = float(second)
        reports.add(EngineLoad(2, 0, generated_tokens=200.0 * second))
        reports.generated(100)
    assert reports.own_ratio == pytest.approx(0.5)
    reports.add(EngineLoad(2, 0, generated_tokens=3.0))  # the engine was started again
    reports.add(None)
    assert reports.own_ratio == pytest.approx(0.5) and reports.load is not None
    time.now_s += 60.0
    assert reports.load is None


def test_tokens_that_arrive_late_are_no_other_clients() -> None:
    """A gateway that is slower than its engine: the engine reports what has not arrived yet, for seconds."""
    time = Time()
    reports, made, own = EngineReports(time), 0.0, 0
    for second in range(8):
        time.now_s = float(second)
        reports.add(EngineLoad(48, 16, generated_tokens=made), own_requests=64)
        assert reports.own_ratio == 1.0
        made += 10_000 if second < 5 else 0
        own += 6_000
        reports.generated(6_000)
    reports.generated(int(made) - own)
    time.now_s += 1.0
    reports.add(EngineLoad(0, 0, generated_tokens=made))
    assert reports.own_ratio == 1.0


def test_another_client_beside_own_requests_is_seen_by_its_requests_and_its_tokens() -> None:
    time = Time()
    reports = EngineReports(time)
    for second in range(8):
        time.now_s = float(second)
        reports.add(EngineLoad(6, 0, generated_tokens=400.0 * second), own_requests=4)
        reports.generated(300)
    assert reports.own_ratio == pytest.approx(0.75)


async def test_queue_and_cache_say_how_many_fit() -> None:
    engine = FakeEngine(Dialect.VLLM)
    llm = LLMService("llm", engine, forecaster(), LLMSettings())
    for load, room in ((EngineLoad(9, 0, 0.3), 4096), (EngineLoad(9, 2, 0.3), 1), (EngineLoad(9, 0, 0.99), 1)):
        engine.reported = load
        await llm.read_load()
        assert capacity(llm, (), 0.0) == room
    assert llm.others == 9.0 and llm.steps.others == 9.0


async def test_sequences_of_other_clients_make_a_step_longer() -> None:
    engine = FakeEngine(Dialect.VLLM)
    llm = LLMService("llm", engine, forecaster(), LLMSettings())
    for batch in (1, 2, 4, 8, 16, 32) * 3:
        llm.steps.times.observe(0.02 + 0.001 * batch, batch, 0.0)
    (before,) = colocated_llms([llm], 0.0)
    engine.reported = EngineLoad(20, 0)
    await llm.read_load()
    (after,) = colocated_llms([llm], 0.0)
    assert after.batch.cost.step_s(1, 0.0) == pytest.approx(before.batch.cost.step_s(21, 0.0))


async def test_joules_of_other_clients_are_not_charged_to_requests() -> None:
    machine, engine = FakeMachine(), FakeEngine(Dialect.VLLM)
    meter = RequestMeter([machine], lambda: machine.busy_s, clock=lambda: machine.now_s)
    meter.join("llm", lambda: machine.busy_s)
    llm = LLMService("llm", engine, forecaster(), LLMSettings(), meter, clock=lambda: machine.now_s)
    engine.reported = EngineLoad(2, 0, generated_tokens=0)
    await llm.read_load()
    for _ in range(2):  # of six tokens a request, three were another client's
        engine.on_token = lambda: machine.spend(0.1, 30.0, busy_s=0.1)
        task = llm.accept(ask())
        assert [event async for event in task.events()]
        engine.reported = EngineLoad(2, 0, generated_tokens=engine.reported.generated_tokens + 6)
        await llm.read_load()
    before = meter.totals
    assert llm.reports.own_ratio == pytest.approx(0.5)
    task = llm.accept(ask())
    assert [event async for event in task.events()]
    spent_j = meter.totals.total_j - meter.totals.idle_j - before.total_j + before.idle_j
    assert task.cost.energy.energy_j == pytest.approx(spent_j / 2)
    assert meter.totals.unattributed_j - before.unattributed_j == pytest.approx(spent_j / 2)


async def test_requests_that_end_while_a_report_comes_are_joulerys_own() -> None:
    """The report counts them; they are gone when it is read."""
    engine = FakeEngine(Dialect.VLLM)
    llm, counted = LLMService("llm", engine, forecaster(), LLMSettings()), []
    llm.reports.add = lambda load, own: counted.append(own)
    engine.gate.clear()
    tasks = [asyncio.create_task(collected(llm.accept(ask(f"q{number}")))) for number in range(3)]
    await until(lambda: len(engine.begun) == 3)

    async def slow_report():
        engine.gate.set()
        await asyncio.gather(*tasks)
        return EngineLoad(3, 0)

    engine.load = slow_report
    await llm.read_load()
    assert counted == [3] and llm.idle


async def collected(task):
    return [event async for event in task.events()]
