"""Equal requests of a batch pay equal shares, streamed or not."""

import asyncio
import math

import pytest

from joulery.domain.serving.generation import GenerationKind
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService, LLMSettings
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.runtime.llm.fakes import FakeEngine, FakeMachine, ask, forecaster
from tests.waiting import eventually

TOKENS = 40


async def shares(engine, machine, *, streamed, kind=GenerationKind.CHAT, begun=lambda: None):
    """Joules of four equal requests that run side by side in an engine which has a device to itself.

    ``begun`` is called once all of them are in the engine.
    """
    meter = RequestMeter([machine], lambda: machine.busy_s, clock=lambda: machine.now_s)
    meter.join("llm", lambda: math.nan, ["gpu:0"])
    llm = LLMService("llm", engine, forecaster(), LLMSettings(max_num_seqs=4), meter)

    async def one():
        body = {"messages": [{"role": "user", "content": "p"}], "input": "p"}
        task = llm.accept(ask(stream=streamed)._replace(body=body, kind=kind))
        async for _ in task.events():
            pass
        return task.cost.energy.energy_j

    async def wait():
        await eventually(lambda: llm.running == 4, "all four are in the engine")
        begun()

    *found, _ = await asyncio.gather(*(one() for _ in range(4)), wait())
    meter.settle()
    assert math.fsum(found) == pytest.approx(meter.totals.requests_j)
    await llm.close()
    return found


@pytest.mark.parametrize("streamed", [True, False])
async def test_equal_requests_of_a_batch_cost_the_same(streamed) -> None:
    machine, engine = FakeMachine(device="gpu:0"), FakeEngine()
    engine.tokens["p"] = TOKENS
    engine.on_token = lambda: machine.spend(0.01, 60.0)
    found = await shares(engine, machine, streamed=streamed)
    assert found == pytest.approx([sum(found) / 4] * 4, rel=0.05)
    assert sum(found) == pytest.approx(4 * TOKENS * 0.01 * 50.0, rel=0.02)


@pytest.mark.parametrize("streamed", [True, False])
async def test_equal_requests_to_a_server_cost_the_same(streamed) -> None:
    from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream

    machine, fake = FakeMachine(device="gpu:0"), FakeServer(max_num_seqs=4)
    fake.words["p"] = TOKENS
    fake.on_word = lambda: machine.spend(0.01, 60.0)
    async with running(fake) as url:
        found = await shares(OpenAiEngine(Upstream(url, "fake-1")), machine, streamed=streamed)
    assert found == pytest.approx([sum(found) / 4] * 4, rel=0.05)


async def test_equal_responses_that_clients_want_whole_cost_the_same() -> None:
    from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream

    machine, fake = FakeMachine(device="gpu:0"), FakeServer()
    fake.on_word = lambda: machine.spend(0.01, 60.0)
    async with running(fake) as url:
        engine = OpenAiEngine(Upstream(url, "fake-1"))
        found = await shares(engine, machine, streamed=False, kind=GenerationKind.RESPONSE)
    assert all(asked["stream"] for asked in fake.asked)
    assert found == pytest.approx([sum(found) / 4] * 4, rel=0.2)  # of two tokens each, and four that may be ahead


async def test_equal_embeddings_that_an_engine_answers_together_cost_the_same() -> None:
    from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream

    machine, fake = FakeMachine(device="gpu:0"), FakeServer()
    fake.gate.clear()

    def begun():
        machine.spend(1.0, 60.0)
        fake.gate.set()

    async with running(fake) as url:
        engine = OpenAiEngine(Upstream(url, "fake-1"))
        found = await shares(engine, machine, streamed=False, kind=GenerationKind.EMBEDDING, begun=begun)
    assert found == pytest.approx([50.0 / 4] * 4, rel=0.05)
