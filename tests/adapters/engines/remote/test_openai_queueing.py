"""Requests that wait for long in the queue of vLLM or SGLang, in virtual time: waiting is not silence."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import Dialect, GenerationKind, GenerationRequest
from joulery.runtime.llm.length_prediction import Forecaster
from joulery.runtime.llm.service import LLMService, LLMSettings

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Waits for nothing: time jumps to the next timer instead."""

    jumped_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.jumped_s += timeout or 0.0
        return super().select(0)


def in_virtual_time(play: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result of a coroutine without sockets, and the seconds it would have taken."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.jumped_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(play), selector.jumped_s
    finally:
        loop.close()


class QueueingServer(httpx.AsyncBaseTransport):
    """A vLLM of ``seqs`` sequences that take ``answer_s`` each; it answers the head of a stream only at its turn.

    Attributes:
        deaf: It answers no probe any more.
        missed: Probes it still misses.
    """

    def __init__(self, seqs: int, answer_s: float) -> None:
        self._turns, self._answer_s = asyncio.Semaphore(seqs), answer_s
        self.deaf, self.missed, self.probes = False, 0, 0
        self.pause_s = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            self.probes += 1
            if self.deaf or self.missed > 0:
                self.missed -= 1
                raise httpx.ConnectTimeout("busy")
            return httpx.Response(200, json={"data": []})
        await self._turns.acquire()
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=_Words(self))

    async def words(self) -> AsyncIterator[bytes]:
        try:
            for number in range(2):
                await asyncio.sleep(self._answer_s / 2 + (self.pause_s if number else 0.0))
                word = {"model": "m", "choices": [{"index": 0, "delta": {"content": "w "}}]}
                yield f"data: {json.dumps(word)}\n\n".encode()
            yield b"data: [DONE]\n\n"
        finally:
            self._turns.release()


class _Words(httpx.AsyncByteStream):
    def __init__(self, server: QueueingServer) -> None:
        self._server = server

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._server.words():
            yield piece


def service(server: QueueingServer, dialect: Dialect = Dialect.VLLM, deadline_s: float = 3600.0) -> LLMService:
    upstream = Upstream("http://vllm", "m", dialect=dialect, stall_s=30.0, connections=64)
    engine = OpenAiEngine(upstream, transport=server)
    return LLMService("m", engine, Forecaster("m"), LLMSettings(max_num_seqs=64, deadline_s=deadline_s))


async def answered(llm: LLMService, *, stream: bool = True) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    task = llm.accept(GenerationRequest("m", GenerationKind.CHAT, body, "hello", stream))
    return sum([event.tokens async for event in task.events()])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", list(Dialect))
def test_requests_that_wait_for_minutes_in_the_engines_queue_are_all_answered(dialect: Dialect, stream: bool) -> None:
    async def play() -> list[int]:
        server = QueueingServer(seqs=2, answer_s=20.0)
        llm = service(server, dialect)
        found = await asyncio.gather(*(answered(llm, stream=stream) for _ in range(64)))
        assert server.probes <= 20 * 64 / 2 / 30.0 + 2  # one probe an interval, not one a request
        await llm.close()
        return found

    tokens, took_s = in_virtual_time(play())
    assert tokens == [2] * 64
    assert took_s == pytest.approx(640.0)  # the last one waited for more than ten minutes, `stall` is 30 s


def test_a_sequence_that_vllm_preempts_in_the_middle_of_its_answer_is_waited_for() -> None:
    async def play() -> int:
        server = QueueingServer(seqs=1, answer_s=2.0)
        server.pause_s = 90.0
        return await answered(service(server))

    assert in_virtual_time(play())[0] == 2


def test_one_probe_that_a_busy_server_misses_kills_no_request() -> None:
    async def play() -> int:
        server = QueueingServer(seqs=1, answer_s=90.0)
        server.missed = 2
        return await answered(service(server))

    assert in_virtual_time(play())[0] == 2


def test_a_server_that_answers_no_probe_any_more_is_given_up() -> None:
    async def play() -> Outcome:
        server = QueueingServer(seqs=1, answer_s=900.0)
        server.deaf = True
        with pytest.raises(RequestError) as caught:
            await answered(service(server))
        return caught.value.outcome

    outcome, took_s = in_virtual_time(play())
    assert (outcome, took_s) == (Outcome.DEADLINE, 30.0)


def test_the_stated_deadline_still_ends_a_request_that_waits() -> None:
    async def play() -> str:
        with pytest.raises(RequestError) as caught:
            await answered(service(QueueingServer(seqs=1, answer_s=900.0), deadline_s=100.0))
        return str(caught.value)

    said, took_s = in_virtual_time(play())
    assert "within 100 s" in said
    assert took_s == 100.0
