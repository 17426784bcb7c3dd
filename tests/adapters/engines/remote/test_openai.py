"""Any OpenAI-compatible server as an engine, honest and otherwise."""

import asyncio
import json

import httpx
import pytest

from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import Dialect, GenerationKind, GenerationRequest
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.adapters.engines.support import until


def chat(prompt="hello", *, stream=True, **body):
    messages = [{"role": "user", "content": prompt}]
    return GenerationRequest("m", GenerationKind.CHAT, {"model": "m", "messages": messages, **body}, prompt, stream)


async def answers(url, request, priority=None, **options):
    engine = OpenAiEngine(Upstream(url, options.pop("model", "fake-1"), **options))
    try:
        return [event async for event in engine.generate(request, priority)]
    finally:
        await engine.close()


async def refused(url, request=None, **options):
    with pytest.raises(RequestError) as caught:
        await answers(url, request or chat(), **options)
    return caught.value


async def test_a_stream_comes_chunk_by_chunk_with_its_usage() -> None:
    fake = FakeServer()
    async with running(fake) as url:
        events = await answers(url, chat(stream_options={"x": 1}))
    assert [event.tokens for event in events] == [1, 1, 1, 0]
    assert events[-1].usage == (7, 3, True)
    assert [event.usage for event in events[:-1]] == [None] * 3
    (sent,) = fake.asked
    assert (sent["model"], sent["stream"], sent["stream_options"]) == ("fake-1", True, {"x": 1, "include_usage": True})


async def test_an_answer_that_cannot_be_streamed_is_one_event() -> None:
    fake = FakeServer()
    async with running(fake) as url:
        (event,) = await answers(url, chat(stream=False, best_of=2))
        *_, text = await answers(url, GenerationRequest("m", GenerationKind.COMPLETION, {"prompt": "p"}, "p"))
    assert event.data["choices"][0]["message"]["content"] == "w0 w1 w2 "
    assert (event.tokens, event.usage) == (3, (7, 3, True))
    assert text.data["choices"][0]["text"] == "w0 w1 w2 "
    assert text.data["object"] == "text_completion"
    assert "stream_options" not in fake.asked[0]


@pytest.mark.parametrize(("dialect", "sent"), [(Dialect.PLAIN, None), (Dialect.VLLM, 12), (Dialect.SGLANG, -12)])
async def test_a_priority_is_written_in_the_engines_own_sign_and_a_clients_is_left_out(dialect, sent) -> None:
    fake = FakeServer(order=dialect.value)
    async with running(fake) as url:
        await answers(url, chat(priority=99), 12, dialect=dialect)
    assert fake.asked[0].get("priority") == sent


@pytest.mark.parametrize(
    ("fault", "outcome", "said"),
    [
        ("500", Outcome.CRASHED, "500: out of memory"),
        ("html", Outcome.CRASHED, "502: <html>"),
        ("429", Outcome.OVERLOADED, "slow down"),
        ("lie", Outcome.CRASHED, "another-model"),
        ("break", Outcome.CRASHED, "ended its stream before it was done"),
        ("garbage", Outcome.CRASHED, "invalid JSON"),
        ("stall", Outcome.DEADLINE, "does not answer"),
    ],
)
async def test_every_fault_of_a_server_has_a_name(fault, outcome, said) -> None:
    fake = FakeServer()
    fake.fault = fault
    async with running(fake) as url:
        error = await refused(url, stall_s=1.0)
    assert error.outcome is outcome
    assert said in str(error)


async def test_another_model_is_refused_in_a_whole_answer_too_and_a_dated_release_is_not() -> None:
    fake = FakeServer()
    fake.fault = "lie"
    async with running(fake) as url:
        assert "another-model" in str(await refused(url, chat(stream=False)))
        assert await answers(url, chat(stream=False), check_model=False)

    def dated(request):
        return httpx.Response(200, json={"model": "gpt-9-2026-01-31", "choices": [{"text": "x"}]})

    engine = OpenAiEngine(Upstream("http://far", "gpt-9"), transport=httpx.MockTransport(dated))
    (event,) = [event async for event in engine.generate(chat(stream=False), None)]
    await engine.close()
    assert event.usage is None


async def test_a_last_piece_that_names_no_model_does_not_end_the_answer() -> None:
    """Some servers name the model in the pieces of text alone, not in the one with the usage."""
    pieces = [
        {"model": "gpt-9", "choices": [{"delta": {"content": "x"}}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
    ]
    text = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text, headers=headers))
    engine = OpenAiEngine(Upstream("http://far", "gpt-9"), transport=transport)
    events = [event async for event in engine.generate(chat(), None)]
    await engine.close()
    assert events[-1].usage is not None and events[-1].usage.completion == 1


async def test_a_server_that_is_not_there_or_does_not_know_the_model() -> None:
    error = await refused("http://127.0.0.1:9")
    assert (error.outcome, error.retry_after_s) == (Outcome.CRASHED, 1.0)
    async with running(FakeServer()) as url:
        assert "404: no model other" in str(await refused(url, model="other"))


@pytest.mark.parametrize(
    ("status", "outcome"), [(400, Outcome.INVALID), (401, Outcome.CRASHED), (503, Outcome.UNAVAILABLE)]
)
async def test_what_a_refusal_means_for_the_client(status, outcome) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json={"error": "no"}))
    engine = OpenAiEngine(Upstream("http://far", "m", token="secret"), transport=transport)
    with pytest.raises(RequestError) as caught:
        _ = [event async for event in engine.generate(chat(), None)]
    await engine.close()
    assert caught.value.outcome is outcome
    assert "secret" not in str(caught.value)


async def test_closing_the_iterator_ends_the_request_at_the_server() -> None:
    fake = FakeServer()
    fake.words["hello"] = 1000
    fake.fault = "stall"
    async with running(fake) as url:
        engine = OpenAiEngine(Upstream(url, "fake-1"))
        events = engine.generate(chat(), None)
        await anext(events)
        await events.aclose()
        await until(lambda: fake.cancelled == 1)
        await engine.close()
    assert fake.cancelled == 1, "once"


async def test_a_server_without_usage_is_counted_by_pieces() -> None:
    fake = FakeServer()
    fake.fault = "no-usage"
    async with running(fake) as url:
        events = await answers(url, chat())
    assert [event.tokens for event in events] == [1, 1, 1]
    assert all(event.usage is None for event in events)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_answer_that_cannot_be_streamed_is_given_up_after_its_own_limit() -> None:
    fake = FakeServer()
    fake.fault = "hang"
    async with running(fake) as url:
        error = await refused(url, chat(stream=False, best_of=2), answer_s=0.5, stall_s=600.0)
        assert error.outcome is Outcome.DEADLINE
        await until(lambda: fake.cancelled == 1)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"model": "m", "choices": [{"text": "x"}], "error": {"message": "out of memory"}}, "failed: out of memory"),
        ({"model": "m", "choices": [{"text": "x"}], "error": "out of memory"}, "failed: out of memory"),
        ({"choices": [{"text": "x"}]}, "model None"),
        ({"model": "m", "choices": []}, "an answer without choices"),
    ],
)
async def test_an_answer_with_status_200_that_is_none_is_refused(said, why) -> None:
    engine = OpenAiEngine(
        Upstream("http://far", "m"), transport=httpx.MockTransport(lambda request: httpx.Response(200, json=said))
    )
    with pytest.raises(RequestError, match=why) as caught:
        _ = [event async for event in engine.generate(chat(stream=False), None)]
    await engine.close()
    assert caught.value.outcome is Outcome.CRASHED
