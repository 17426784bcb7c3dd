"""The llama.cpp process: started, asked, dead and started again, gone."""

import asyncio
import os
import signal

import pytest

from joulery.adapters.engines.remote.llama import LlamaEngine, LlamaSettings
from joulery.adapters.models import smollm2
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import GenerationKind, GenerationRequest
from joulery.runtime.llm.length_prediction import Forecaster
from joulery.runtime.llm.service import LLMService, LLMSettings
from tests.adapters.engines.support import until

FAKE = "tests.adapters.engines.remote.fake_llama"


def ask(prompt="p", **body):
    return GenerationRequest("m", GenerationKind.COMPLETION, {"prompt": prompt, **body}, prompt)


def engine_of(tmp_path, behaviour="ok", **settings):
    model = tmp_path / "m.gguf"
    model.write_text(behaviour)
    return LlamaEngine(LlamaSettings(model, "m", **settings), module=FAKE)


async def read(engine, request):
    return [event async for event in engine.generate(request, None)]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_answers_counts_its_cpu_time_and_leaves_nothing(tmp_path):
    engine = engine_of(tmp_path)
    assert not engine.ready and engine.cpu_s() == 0.0
    await engine.start()
    (event,) = await read(engine, ask())
    assert event.usage == (1, 2, True)
    spent, pid = engine.cpu_s(), engine.pid
    assert spent > 0 and alive(pid)
    await engine.close()
    await engine.close()
    assert not alive(pid)
    assert engine.cpu_s() >= spent
    with pytest.raises(RequestError, match="closing"):
        await read(engine, ask())


async def test_several_prompts_in_one_request_are_refused_before_they_cost_anything(tmp_path):
    """llama.cpp writes an answer to each and sends null; numbers of tokens are one prompt."""
    engine = engine_of(tmp_path)
    for several in (["a", "b"], [[1, 2], [3]]):
        with pytest.raises(RequestError, match="one prompt") as caught:
            await read(engine, GenerationRequest("m", GenerationKind.COMPLETION, {"prompt": several}, ""))
        assert caught.value.outcome is Outcome.INVALID
    await engine.start()
    for one in (["a"], [1, 2]):
        (event,) = await read(engine, GenerationRequest("m", GenerationKind.COMPLETION, {"prompt": one}, ""))
        assert event.usage == (1, 2, True)
    await engine.close()


async def test_a_process_that_dies_is_started_again_and_its_request_fails(tmp_path):
    engine = engine_of(tmp_path)
    await engine.start()
    first = engine.pid
    with pytest.raises(RequestError) as caught:
        await read(engine, ask("die"))
    assert caught.value.outcome is Outcome.CRASHED
    assert len(await read(engine, ask())) == 1  # it waited for the next process
    assert engine.pid not in (0, first) and engine.restarts == 1
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.restarts == 2 and engine.ready)
    assert len(await read(engine, ask())) == 1
    await engine.close()


async def test_a_request_that_dies_with_the_process_is_answered_by_the_next(tmp_path):
    engine = engine_of(tmp_path)
    await engine.start()
    llm = LLMService("m", engine, Forecaster("m"), LLMSettings(retries=1))
    job = llm.accept(ask("die once"))
    assert len([event async for event in job.events()]) == 1
    assert (job.attempts, engine.restarts) == (2, 1)
    await llm.close()


@pytest.mark.parametrize(("prompt", "outcome"), [("refuse", Outcome.INVALID), ("fail", Outcome.CRASHED)])
async def test_an_answer_that_is_an_error_frees_the_slot_at_once(tmp_path, monkeypatch, prompt, outcome):
    noticed = []

    async def notice(self, gone):
        noticed.append(gone)

    monkeypatch.setattr(LlamaEngine, "_notice", notice)
    engine = engine_of(tmp_path)
    await engine.start()
    with pytest.raises(RequestError) as caught:
        await read(engine, ask(prompt))
    await engine.close()
    assert caught.value.outcome is outcome
    assert not noticed  # only a broken connection may mean that the process ends


@pytest.mark.parametrize(
    ("behaviour", "error", "said"),
    [("broken", CapabilityError, "RuntimeError: no model"), ("silent", ActuationError, "not ready after")],
)
async def test_a_model_that_does_not_come_up_is_said_and_nothing_is_left(tmp_path, behaviour, error, said):
    engine = engine_of(tmp_path, behaviour, launch_s=10.0 if behaviour == "broken" else 0.5)
    with pytest.raises(error, match=said):
        await engine.start()
    assert engine.pid == 0
    await engine.close()


async def test_a_module_that_is_not_there_is_a_capability(tmp_path):
    engine = engine_of(tmp_path)
    engine._module = "tests.no_such_module"
    with pytest.raises(CapabilityError, match="did not start"):
        await engine.start()
    await engine.close()


async def test_the_real_one(tmp_path):
    pytest.importorskip("xllamacpp", reason="joulery[llm] is not installed")
    if not smollm2.installed():
        pytest.skip(f"the small language model is not installed: {smollm2.HOW}")
    missing = LlamaEngine(LlamaSettings(tmp_path / "none.gguf", "none"))
    with pytest.raises(CapabilityError, match="there is no model"):
        await missing.start()
    await missing.close()
    engine = LlamaEngine(LlamaSettings(smollm2.weights(), smollm2.NAME, context_tokens=512))
    await engine.start()
    try:
        whole = GenerationRequest(
            "m", GenerationKind.CHAT, {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}, ""
        )
        *_, event = await read(engine, whole)
        assert event.data["model"] == smollm2.NAME
        assert event.usage is not None and 1 <= event.usage.completion <= 4
        events = engine.generate(whole._replace(stream=True, body={**whole.body, "max_tokens": 400}), None)
        assert (await anext(events)).data["choices"]
        await events.aclose()  # the client is gone: the slot is free at once
        async with asyncio.timeout(60):
            assert (await read(engine, whole))[-1].usage is not None
        with pytest.raises(RequestError) as caught:
            await read(engine, ask("word " * 2000, max_tokens=1))
        assert caught.value.outcome is Outcome.INVALID
    finally:
        await engine.close()


async def test_sixteen_streams_at_once_are_all_answered(tmp_path):
    pytest.importorskip("xllamacpp", reason="joulery[llm] is not installed")
    if not smollm2.installed():
        pytest.skip(f"the small language model is not installed: {smollm2.HOW}")
    engine = LlamaEngine(LlamaSettings(smollm2.weights(), smollm2.NAME, context_tokens=512))
    await engine.start()
    llm = LLMService("m", engine, Forecaster("m"), LLMSettings(max_num_seqs=1))
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 3}
    request = GenerationRequest("m", GenerationKind.CHAT, body, "Say hello.", stream=True)

    async def answered():
        task = llm.accept(request)
        events = [event async for event in task.events()]
        return events[-1].usage is not None and task.attempts == 1

    try:
        assert all(await asyncio.gather(*(answered() for _ in range(16))))
        assert engine.restarts == 0
    finally:
        await llm.close()
