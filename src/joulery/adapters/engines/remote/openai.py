"""Engine for servers of the OpenAI API: sends a request, returns its answer or its stream.

Every answer is read as a stream, also for a client that wants it whole: so tokens are counted, and energy is charged,
while they are generated. Each fault has its own status: the connection is refused or breaks (502), the server
refuses the request (its own 4xx, or 429), fails (502), is silent and does not answer a probe (504), sends an invalid
answer (502), or answers with another model (502). A request is sent once; the caller decides whether to send it again.
Closing the iterator closes the connection, which ends the request at such servers. Messages for clients name the model,
never the address of its server.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import orjson

from joulery.adapters.engines.remote.engine_metrics import engine_load
from joulery.adapters.engines.remote.http11 import Http11Transport
from joulery.adapters.engines.remote.openai_answers import (
    AnswerAssembler,
    StreamError,
    TokenCount,
    sse_messages,
    usage_in,
)
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import Dialect, EngineLoad, GenerationEvent, GenerationKind, GenerationRequest

PATHS = {
    GenerationKind.CHAT: "/v1/chat/completions",
    GenerationKind.COMPLETION: "/v1/completions",
    GenerationKind.RESPONSE: "/v1/responses",
    GenerationKind.EMBEDDING: "/v1/embeddings",
}
_CONTENT_KEYS = {GenerationKind.RESPONSE: "output", GenerationKind.EMBEDDING: "data"}
"""Key of an answer's content by kind; ``choices`` for all other kinds."""
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
_MAX_ANSWER_BYTES = 64 << 20
_PROBES = 3
"""Unanswered probes in a row after which a silent server is given up."""
_OWN_KEYS = ("priority", "stream_options", "model")
"""Keys of a request that joulery sets."""
_UNSTREAMED_KEYS = ("best_of", "use_beam_search", "prompt_logprobs", "audio")
"""A request with one of these is answered whole: servers refuse to stream it."""
_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server, and the settings of connections to it.

    Attributes:
        url: Its address, without ``/v1``.
        model: Its name for the model.
        dialect: Its priority scheme.
        token: Bearer token to send; empty for none.
        connect_s: How long it may take to accept a connection, or to answer a probe.
        stall_s: How long it may be silent: once a stream has begun, before it is given up; before that, or while it
            orders requests itself, before it is probed.
        answer_s: How long an answer may take that cannot be streamed.
        connections: Maximum number of connections at once.
        check_model: Refuse answers that name another model.
    """

    url: str
    model: str
    dialect: Dialect = Dialect.PLAIN
    token: str = ""
    connect_s: float = 5.0
    stall_s: float = 30.0
    answer_s: float = 600.0
    connections: int = 1000
    check_model: bool = True


class OpenAiEngine:
    """A server as a :class:`~joulery.domain.serving.generation.LLMEngine`.

    Args:
        upstream: The server.
        transport: Replaces the connection in tests.
        cpu_s: Reads the CPU seconds of the server's process, where it runs on this machine.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        cpu_s: Callable[[], float] = lambda: math.nan,
    ) -> None:
        self.upstream = upstream
        self.ready = True
        self._cpu_s = cpu_s
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._probing: asyncio.Task[bool] | None = None

    @property
    def name(self) -> str:
        """Its address."""
        return self.upstream.url

    @property
    def variant(self) -> str:
        """The model it runs."""
        return self.upstream.model

    @property
    def dialect(self) -> Dialect:
        """Its priority scheme."""
        return self.upstream.dialect

    def cpu_s(self) -> float:
        """CPU seconds of its process; NaN where unknown."""
        return self._cpu_s()

    async def load(self) -> EngineLoad | None:
        """The load of vLLM and SGLang by their ``/metrics``; None for other servers, and where it cannot be read."""
        if not self.dialect.orders:
            return None
        try:
            answer = await self._open().get("/metrics", timeout=self.upstream.connect_s)
            return engine_load(answer.text) if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            _log.debug("%s: /metrics cannot be read: %s", self.upstream.url, error)
            return None

    async def start(self) -> None:
        """Does nothing: a server that is down now may be up when a request arrives."""

    async def close(self) -> None:
        """Close its connections. Safe to call twice."""
        client, self._client = self._client, None
        probing, self._probing = self._probing, None
        if probing is not None:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        if client is not None:
            await client.aclose()

    @property
    def pauses(self) -> bool:
        """False: it is unknown whether a server continues an answer, and from a cache."""
        return False

    async def generate(
        self, request: GenerationRequest, priority: int | None, pause: Callable[[], bool] | None = None, /
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The answer as it arrives; see :meth:`joulery.domain.serving.generation.LLMEngine.generate`."""
        streamed = _can_stream(request)
        async with self._faults():
            sending = self._open().send(self._request(request, priority, streamed), stream=True)
            answer = await (self._wait_for_data(sending) if streamed else sending)
            try:
                if answer.status_code != 200:
                    raise self._refusal(answer.status_code, answer.headers, await _bounded(answer))
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    yield self._unstreamed(request.kind, await _bounded(answer))
                    return
                async with aclosing(self._stream(answer, request)) as events:
                    async for event in events:
                        yield event
            finally:
                await answer.aclose()

    @asynccontextmanager
    async def _faults(self) -> AsyncIterator[None]:
        """Turn errors of the transport into errors for clients; only the log contains the address."""
        try:
            yield
        except httpx.TimeoutException as error:
            what = "accepts no connection" if isinstance(error, httpx.ConnectTimeout) else "does not answer"
            raise self._error(what, Outcome.DEADLINE, error) from error
        except httpx.ConnectError as error:
            raise self._error("cannot be reached", Outcome.CRASHED, error, retry_after_s=1.0) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise self._error("broke the connection", Outcome.CRASHED, error) from error
        except StreamError as error:
            raise self._error(str(error), Outcome.CRASHED, error) from error

    def _error(
        self, what: str, outcome: Outcome, cause: Exception | None = None, *, retry_after_s: float | None = None
    ) -> RequestError:
        if cause is not None:
            _log.warning("%s (%s) %s: %s", self.upstream.url, self.variant, what, cause)
        message = f"the server of model {self.variant} {what}"
        return RequestError(message, outcome, retry_after_s=retry_after_s, variant=self.variant)

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = self._make_client(self.upstream.connections)
        return self._client

    def _make_client(self, connections: int) -> httpx.AsyncClient:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self.upstream.token:
            headers["authorization"] = f"Bearer {self.upstream.token}"
        return httpx.AsyncClient(
            base_url=self.upstream.url,
            headers=headers,
            transport=self._transport or _plain_transport(self.upstream.url),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=0),
            trust_env=False,
        )

    def _time_limits(self, read_s: float | None) -> httpx.Timeout:
        return httpx.Timeout(read_s, connect=self.upstream.connect_s, pool=None)

    def _request(self, request: GenerationRequest, priority: int | None, streamed: bool) -> httpx.Request:
        return self._open().build_request(
            "POST",
            PATHS[request.kind],
            content=self._body(request, priority, streamed),
            headers=list(request.headers),
            timeout=self._time_limits(None if streamed else self.upstream.answer_s),
        )

    def _body(self, request: GenerationRequest, priority: int | None, streamed: bool) -> bytes:
        body: dict[str, Any] = {key: value for key, value in request.body.items() if key not in _OWN_KEYS}
        body["model"] = self.upstream.model
        if priority is not None and self.dialect.orders:
            body["priority"] = self.dialect.priority(priority)
        if request.kind is not GenerationKind.EMBEDDING:
            body["stream"] = streamed
        if streamed:
            if request.kind is GenerationKind.RESPONSE:
                return orjson.dumps(body)
            given = request.body.get("stream_options")
            options = {**(given if isinstance(given, dict) else {}), "include_usage": True}
            if self.dialect is Dialect.VLLM:
                options["continuous_usage_stats"] = True
            body["stream_options"] = options
        return orjson.dumps(body)

    async def _wait_for_data(self, arrival: Coroutine[Any, Any, T], *, waits: bool = True) -> T:
        """Wait for something to arrive: at most ``stall_s``, or longer if ``waits`` is true and probes are answered.

        Raises:
            httpx.ReadTimeout: The server is silent.
        """
        pending = asyncio.ensure_future(arrival)
        try:
            while True:
                done, _ = await asyncio.wait({pending}, timeout=self.upstream.stall_s)
                if done:
                    return pending.result()
                if not (waits and await self._answers_probe()):
                    raise httpx.ReadTimeout(f"nothing arrived for {self.upstream.stall_s:g} s")
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)

    async def _answers_probe(self) -> bool:
        """Whether the server is alive: while a request waits in its queue, it is silent, too.

        Requests that wait at the same time share one probe. A busy server may miss one: only three in a row count.
        """
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(), name="probe")
        return await asyncio.shield(self._probing)

    async def _probe(self) -> bool:
        # A client of its own: the connections of the other one may all be taken by requests that wait.
        async with self._make_client(_PROBES) as client:
            for _ in range(_PROBES):
                try:
                    answer = await client.get("/v1/models", timeout=self.upstream.connect_s)
                except httpx.HTTPError:
                    continue
                if answer.status_code < 500:
                    return True
        return False

    def _unstreamed(self, kind: GenerationKind, content: bytes) -> GenerationEvent:
        return self._final(kind, self._checked(self._object(content)))

    def _final(self, kind: GenerationKind, data: dict[str, Any], counted: int = 0) -> GenerationEvent:
        """The event of a whole answer, of which ``counted`` tokens were reported before."""
        key = _CONTENT_KEYS.get(kind, "choices")
        if not isinstance(data.get(key), list) or not data[key]:
            raise self._error(f"sent an answer without {key}", Outcome.CRASHED)
        usage = usage_in(data)
        return GenerationEvent(data, 0 if usage is None else max(0, usage.completion - counted), usage)

    async def _stream(
        self, answer: httpx.Response, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        finished, count, assembler = False, TokenCount(), AnswerAssembler(request.kind)
        async with aclosing(self._pieces(answer)) as pieces, aclosing(sse_messages(pieces)) as messages:  # type: ignore[type-var]
            async for message, more in messages:
                if message == b"[DONE]":
                    finished = True
                    break
                data = self._checked(self._object(message))
                usage = usage_in(data)
                tokens = count.add(data, usage)
                finished = finished or data.get("type") in _LAST_EVENTS
                if request.stream:
                    yield GenerationEvent(data, tokens, usage, more=more)
                    continue
                assembler.add(data)
                if tokens:
                    yield GenerationEvent({}, tokens)
        if not finished:
            raise self._error("ended its stream before it was done", Outcome.CRASHED)
        if not request.stream:
            yield self._final(request.kind, self._checked(assembler.answer()), count.counted)

    async def _pieces(self, answer: httpx.Response) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream; a silent one is given up, unless its request may be waiting in the engine's queue."""
        begun = False
        iterator = answer.aiter_bytes()
        while True:
            piece = await self._wait_for_data(_next(iterator), waits=not begun or self.dialect.orders)
            if not piece:
                return
            begun = True
            yield piece

    def _checked(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the message; raise RequestError where it is an error or from another model."""
        error = data.get("error")
        if error:
            text = error.get("message", error) if isinstance(error, dict) else error
            raise self._error(f"failed: {text}", Outcome.CRASHED)
        response = data.get("response")
        named = response.get("model") if isinstance(response, dict) else data.get("model")
        # Pieces without text may name no model: those of a Responses stream, some servers' usage at the end.
        textless = str(data.get("type", "")).startswith("response.") or not data.get("choices", True)
        unnamed = named is None and textless
        if self.upstream.check_model and not unnamed and not _same_model(named, self.upstream.model):
            raise self._error(f"answered as model {named!r}", Outcome.CRASHED)
        return data

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            data = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise self._error(f"sent invalid JSON: {error}", Outcome.CRASHED) from error
        if not isinstance(data, dict):
            raise self._error(
                f"sent {content[:40].decode('utf-8', 'replace')!r} instead of a JSON object", Outcome.CRASHED
            )
        return data

    def _refusal(self, status: int, headers: httpx.Headers, content: bytes) -> RequestError:
        """The error for a status other than 200."""
        text = content[:500].decode("utf-8", "replace").strip()
        try:
            reported = orjson.loads(content)["error"]
            text = reported["message"] if isinstance(reported, dict) else str(reported)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            pass
        text = text.replace(self.upstream.url, "the server")
        what = f"answered {status}: {text}" if text else f"answered {status}"
        retry = headers.get("retry-after", "")
        retry_s = float(retry) if retry.isdigit() else 1.0
        if status == 429:
            return self._error(what, Outcome.OVERLOADED, retry_after_s=retry_s)
        if status in (503, 529):
            return self._error(what, Outcome.UNAVAILABLE, retry_after_s=retry_s)
        if status in (400, 405, 413, 422, 501):
            return self._error(what, Outcome.INVALID)
        # 401, 403 and 404 concern joulery's own access to the server: the client's request is valid.
        _log.warning("%s (%s) %s", self.upstream.url, self.variant, what)
        return self._error(what, Outcome.CRASHED)


async def _next(iterator: AsyncIterator[bytes]) -> bytes:
    """The next bytes; empty at the end."""
    return await anext(iterator, b"")


def _can_stream(request: GenerationRequest) -> bool:
    """Whether the answer is read as a stream; what servers answer at once, or refuse to stream, is not."""
    if request.kind is GenerationKind.EMBEDDING:
        return False
    if request.kind is GenerationKind.RESPONSE:
        return request.stream or not request.body.get("background")
    return not any(request.body.get(key) for key in _UNSTREAMED_KEYS)


def _plain_transport(url: str) -> Http11Transport | None:
    """The light transport for plain HTTP; None, which is httpx's own, for HTTPS."""
    parsed = httpx.URL(url)
    if parsed.scheme != "http":
        return None
    return Http11Transport(parsed.host, parsed.port or 80)


def _same_model(named: Any, asked: str) -> bool:
    """Whether an answer's model is the one asked for; a dated release is (``m`` asked, ``m-2026-01-31`` named)."""
    return isinstance(named, str) and (named == asked or named.startswith(f"{asked}-2"))


async def _bounded(answer: httpx.Response) -> bytes:
    pieces, size = [], 0
    async for piece in answer.aiter_bytes():
        size += len(piece)
        if size > _MAX_ANSWER_BYTES:
            raise httpx.DecodingError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)
