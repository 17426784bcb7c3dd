"""Streams of OpenAI-compatible servers under load: connections that close, queues that wait, answers put together."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream
from joulery.adapters.engines.remote.openai_answers import AnswerAssembler, TokenCount, usage_in
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import Dialect, GenerationKind, GenerationRequest
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.waiting import eventually


def chat(prompt="hello", *, stream=True, **body):
    messages = [{"role": "user", "content": prompt}]
    return GenerationRequest("m", GenerationKind.CHAT, {"model": "m", "messages": messages, **body}, prompt, stream)


async def read(engine, request):
    return [event async for event in engine.generate(request, None)]


class ClosesAfterAnswer:
    """Answers one request in full, announces keep-alive, and closes it when the next request arrives.

    llama.cpp behaves like this: its connection looks alive after a stream and is closed a moment later.
    """

    chunk = json.dumps({"model": "m", "choices": [{"index": 0, "delta": {"content": "a"}}]})

    def __init__(self):
        self.requests = 0

    async def __call__(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            self.requests += 1
            body = f"data: {self.chunk}\n\ndata: [DONE]\n\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            await writer.drain()
            await reader.read(1)  # the next request, or the end of the connection
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(handler):
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_streams_of_a_server_that_closes_its_connections_never_fail() -> None:
    server = ClosesAfterAnswer()
    async with listening(server) as url:
        engine = OpenAiEngine(Upstream(url, "m"))
        for _ in range(3):
            answers = await asyncio.gather(*(read(engine, chat()) for _ in range(8)))
            assert [len(events) for events in answers] == [1] * 8
        await engine.close()
    assert server.requests == 24


async def test_a_stream_that_waits_in_the_engines_queue_is_not_given_up_while_the_server_answers() -> None:
    fake = FakeServer(order="vllm")
    fake.gate.clear()
    async with running(fake) as url:
        engine = OpenAiEngine(Upstream(url, "fake-1", dialect=Dialect.VLLM, stall_s=0.05))
        waiting = asyncio.create_task(read(engine, chat()))
        await eventually(lambda: fake.probed >= 3, "three silent intervals, each with a server that answers")
        assert not waiting.done()
        fake.gate.set()
        assert len(await waiting) == 4
        await engine.close()


async def test_a_stream_of_a_server_that_answers_nothing_any_more_is_given_up() -> None:
    fake = FakeServer(order="vllm")
    fake.gate.clear()
    fake.deaf = True
    async with running(fake) as url:
        engine = OpenAiEngine(Upstream(url, "fake-1", dialect=Dialect.VLLM, stall_s=0.05, connect_s=0.1))
        with pytest.raises(RequestError) as caught:
            await read(engine, chat())
        assert caught.value.outcome is Outcome.DEADLINE
        await engine.close()


async def test_tokens_of_a_whole_answer_are_counted_while_it_is_generated() -> None:
    fake = FakeServer()
    async with running(fake) as url:
        engine = OpenAiEngine(Upstream(url, "fake-1"))
        *progress, answer = await read(engine, chat(stream=False))
        await engine.close()
    assert [event.tokens for event in progress] == [1, 1, 1]
    assert all(event.data == {} for event in progress)
    assert answer.data["choices"][0]["message"] == {"role": "assistant", "content": "w0 w1 w2 "}
    assert (answer.tokens, answer.usage) == (0, (7, 3, True))


async def test_a_response_is_read_as_a_stream_and_given_whole_to_a_client_that_wants_it_whole() -> None:
    fake = FakeServer()
    async with running(fake) as url:
        engine = OpenAiEngine(Upstream(url, "fake-1"))
        asked = GenerationRequest("m", GenerationKind.RESPONSE, {"input": "hello"}, "hello")
        *progress, answer = await read(engine, asked)
        fake.fault = "failed"
        with pytest.raises(RequestError, match="no memory"):
            await read(engine, asked)
        (waiting,) = await read(engine, asked._replace(body={"input": "hello", "background": True}))
        await engine.close()
    assert [each["stream"] for each in fake.asked] == [True, True, False]
    assert [event.tokens for event in progress] == [1, 1]
    assert answer.data["output"][0]["content"][0]["text"] == waiting.data["output"][0]["content"][0]["text"] == "w0 w1 "
    assert (answer.tokens, answer.usage) == (0, (4, 2, True))


async def test_messages_to_clients_hold_no_address_of_the_server() -> None:
    for fault in ("500", "html", "lie", "break", "garbage"):
        fake = FakeServer()
        fake.fault = fault
        async with running(fake) as url:
            engine = OpenAiEngine(Upstream(url, "fake-1"))
            with pytest.raises(RequestError) as caught:
                await read(engine, chat())
            assert "127.0.0.1" not in str(caught.value)
            await engine.close()
    engine = OpenAiEngine(Upstream("http://127.0.0.1:9", "fake-1"))
    with pytest.raises(RequestError) as caught:
        await read(engine, chat())
    assert "127.0.0.1" not in str(caught.value)
    await engine.close()


def test_chunks_make_the_answer_that_a_request_without_stream_gets() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"ci'}}
    rest = {"index": 0, "function": {"arguments": 'ty": "Rome"}'}}
    chunks = [
        {"role": "assistant", "reasoning": "It is "},
        {"reasoning": "a question."},
        {"content": "Let me "},
        {"content": "look.", "tool_calls": [call]},
        {"tool_calls": [rest]},
    ]
    assembler = AnswerAssembler(GenerationKind.CHAT)
    count = TokenCount()
    for delta in chunks:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": {"content": [{"token": "t"}]}}
        data = {"id": "x", "created": 5, "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
        assembler.add(data)
        count.add(data, None)
    assembler.add({"model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    assembler.add({"model": "m", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 5}})
    answer = assembler.answer()
    assert count.counted == 5
    assert (answer["object"], answer["id"], answer["usage"]["completion_tokens"]) == ("chat.completion", "x", 5)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["logprobs"]["content"]) == 5
    assert choice["message"] == {
        "role": "assistant",
        "reasoning": "It is a question.",
        "content": "Let me look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    }


def test_usage_so_far_counts_exactly_where_a_chunk_holds_several_tokens() -> None:
    count = TokenCount()
    totals = []
    for total in (1, 5, 5, 9):
        data = {"choices": [{"delta": {"content": "abc"}}], "usage": {"prompt_tokens": 3, "completion_tokens": total}}
        totals.append(count.add(data, usage_in(data)))
    assert totals == [1, 4, 0, 4]
