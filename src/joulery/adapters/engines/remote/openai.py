"""Any server that speaks the OpenAI API, as an engine: one request out, its answer or its stream back.

What a server may do wrong is told apart: it is not there or drops the connection (502), says no (its own 4xx, or 429),
fails (502), falls silent (504), sends what is no answer (502), or answers with another model than was asked for (502).
A request is sent once; whoever calls decides whether to send it again. Closing the iterator closes the connection,
which every such server takes as the end of the request.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from joulery.adapters.engines.remote.http11 import Http11Transport
from joulery.domain.errors import CapabilityError
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import Dialect, GenerationEvent, GenerationKind, GenerationRequest, TokenUsage

PATHS = {GenerationKind.CHAT: "/v1/chat/completions", GenerationKind.COMPLETION: "/v1/completions"}
_LONGEST_ANSWER_BYTES = 64 << 20
_LONGEST_LINE_BYTES = 8 << 20
_KEEP_ALIVE_S = 4.0
"""Idle connections are given up before servers do it (llama.cpp after 5 s): a request must not meet a closed one."""
_OURS = ("priority", "stream_options", "model")
"""Keys of a request that are joulery's to set."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server and how to talk to it.

    Attributes:
        url: Where it is, without ``/v1``.
        model: What it calls the model.
        dialect: How it takes priorities.
        token: Bearer token to send; empty for none.
        connect_s: How long it may take to accept a connection.
        stall_s: How long a stream may be silent.
        answer_s: How long a whole answer may take.
        connections: At once, at most.
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
        transport: The seam for tests; httpx's own when None.
        cpu_s: Reads the CPU seconds of the server's process, where it is one of this machine.
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

    @property
    def name(self) -> str:
        """Where it is."""
        return self.upstream.url

    @property
    def variant(self) -> str:
        """The model it runs."""
        return self.upstream.model

    @property
    def dialect(self) -> Dialect:
        """How it takes priorities."""
        return self.upstream.dialect

    def cpu_s(self) -> float:
        """CPU seconds of its process; NaN where it is not known."""
        return self._cpu_s()

    async def start(self) -> None:
        """Nothing is started; a server that is down now may be up when it is asked."""

    async def close(self) -> None:
        """Close its connections. Safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def served_models(self) -> list[str]:
        """The models it says it serves.

        Raises:
            CapabilityError: It does not answer, or not with a list of models.
        """
        try:
            answer = await self._open().get("/v1/models", timeout=self.upstream.connect_s)
            return [str(entry["id"]) for entry in orjson.loads(answer.content)["data"]]
        except (httpx.HTTPError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise CapabilityError(
                f"{self.name} does not list its models: {type(error).__name__} {error}", resource=self.name
            ) from error

    async def write(self, request: GenerationRequest, priority: int | None, /) -> AsyncGenerator[GenerationEvent, None]:
        """The answer as it comes; see :meth:`joulery.domain.serving.generation.LLMEngine.write`."""
        try:
            async with self._open().stream(
                "POST", PATHS[request.kind], content=self._body(request, priority), timeout=self._timeout(request)
            ) as answer:
                if answer.status_code != 200:
                    raise _refusal(self.name, answer.status_code, answer.headers, await _bounded(answer))
                if not request.stream:
                    yield self._whole(request, await _bounded(answer))
                    return
                async with aclosing(self._stream(answer, request)) as events:
                    async for event in events:
                        yield event
        except httpx.TimeoutException as error:
            what = "accepts no connection" if isinstance(error, httpx.ConnectTimeout) else "has fallen silent"
            raise RequestError(f"{self.name} {what}", Outcome.DEADLINE, variant=self.variant) from error
        except httpx.ConnectError as error:
            raise RequestError(
                f"{self.name} is not there: {error}", Outcome.CRASHED, retry_after_s=1.0, variant=self.variant
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _broken(self.name, f"broke the connection: {error}", self.variant) from error

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            headers = {"content-type": "application/json", "accept-encoding": "identity"}
            if self.upstream.token:
                headers["authorization"] = f"Bearer {self.upstream.token}"
            self._client = httpx.AsyncClient(
                base_url=self.upstream.url,
                headers=headers,
                transport=self._transport or _near(self.upstream.url),
                limits=httpx.Limits(max_connections=self.upstream.connections, keepalive_expiry=_KEEP_ALIVE_S),
                trust_env=False,
            )
        return self._client

    def _timeout(self, request: GenerationRequest) -> httpx.Timeout:
        silence_s = self.upstream.stall_s if request.stream else self.upstream.answer_s
        return httpx.Timeout(silence_s, connect=self.upstream.connect_s, pool=None)

    def _body(self, request: GenerationRequest, priority: int | None) -> bytes:
        body: dict[str, Any] = {key: value for key, value in request.body.items() if key not in _OURS}
        body["model"] = self.upstream.model
        body["stream"] = request.stream
        if request.stream:
            given = request.body.get("stream_options")
            body["stream_options"] = {**(given if isinstance(given, dict) else {}), "include_usage": True}
        if priority is not None and self.dialect.orders:
            body["priority"] = self.dialect.priority(priority)
        return orjson.dumps(body)

    def _whole(self, request: GenerationRequest, content: bytes) -> GenerationEvent:
        data = self._checked(_object(self.name, content, self.variant))
        choices = data.get("choices")
        if not isinstance(choices, list) or not choices:
            raise _broken(self.name, "sent an answer without choices", self.variant)
        usage = _usage(data)
        return GenerationEvent(data, usage.completion if usage is not None else 0, usage)

    async def _stream(
        self, answer: httpx.Response, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        finished = False
        async with aclosing(_messages(answer, self.name, self.variant)) as messages:
            async for message in messages:
                if message == b"[DONE]":
                    finished = True
                    break
                data = self._checked(_object(self.name, message, self.variant))
                yield GenerationEvent(data, _tokens(data), _usage(data))
        if not finished:
            raise _broken(self.name, "ended its stream before it was done", self.variant)

    def _checked(self, data: dict[str, Any]) -> dict[str, Any]:
        """The message, unless it is an error or another model's."""
        error = data.get("error")
        if error:
            text = error.get("message", error) if isinstance(error, dict) else error
            raise _broken(self.name, f"failed: {text}", self.variant)
        named = data.get("model")
        if self.upstream.check_model and not _same_model(named, self.upstream.model):
            raise _broken(self.name, f"answered with model {named!r}, asked was {self.upstream.model!r}", self.variant)
        return data


def _near(url: str) -> Http11Transport | None:
    """The light transport for plain HTTP; None, which is httpx's own, for anything else."""
    parsed = httpx.URL(url)
    if parsed.scheme != "http":
        return None
    return Http11Transport(parsed.host, parsed.port or 80, keep_alive_s=_KEEP_ALIVE_S)


def _same_model(named: Any, asked: str) -> bool:
    """Whether an answer's model is the one asked for; a dated release is (``m`` asked, ``m-2026-01-31`` named)."""
    return isinstance(named, str) and (named == asked or named.startswith(f"{asked}-2"))


async def _messages(answer: httpx.Response, name: str, variant: str) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event; comments and other fields are left out."""
    rest = b""
    data: list[bytes] = []
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LONGEST_LINE_BYTES:
            raise _broken(name, f"sent a line of more than {_LONGEST_LINE_BYTES} bytes", variant)
        for line in lines:
            field = line.rstrip(b"\r")
            if field.startswith(b"data:"):
                data.append(field[5:].strip())
            elif not field and data:
                yield b"\n".join(data)
                data = []
    if data:
        yield b"\n".join(data)


def _object(name: str, content: bytes, variant: str) -> dict[str, Any]:
    try:
        data = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise _broken(name, f"sent what is no JSON: {error}", variant) from error
    if not isinstance(data, dict):
        raise _broken(name, f"sent a {type(data).__name__}, not an object", variant)
    return data


async def _bounded(answer: httpx.Response) -> bytes:
    pieces, size = [], 0
    async for piece in answer.aiter_bytes():
        size += len(piece)
        if size > _LONGEST_ANSWER_BYTES:
            raise httpx.DecodingError(f"an answer of more than {_LONGEST_ANSWER_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _tokens(data: dict[str, Any]) -> int:
    """Pieces of text in a chunk: a token each, as near as can be told without the engine's tokenizer."""
    choices = data.get("choices")
    if not isinstance(choices, list):
        return 0
    return sum(_has_text(choice) for choice in choices if isinstance(choice, dict))


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls", "refusal"))


def _usage(data: dict[str, Any]) -> TokenUsage | None:
    usage = data.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not (isinstance(prompt, int) and isinstance(completion, int)):
        return None
    return TokenUsage(max(0, prompt), max(0, completion), reported=True)


def _broken(name: str, what: str, variant: str) -> RequestError:
    return RequestError(f"{name} {what}", Outcome.CRASHED, variant=variant)


def _refusal(name: str, status: int, headers: httpx.Headers, content: bytes) -> RequestError:
    """What a status other than 200 means for the client."""
    text = content[:500].decode("utf-8", "replace").strip()
    try:
        said = orjson.loads(content)["error"]
        text = said["message"] if isinstance(said, dict) else str(said)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        pass
    message = f"{name} answered {status}: {text}" if text else f"{name} answered {status}"
    retry = headers.get("retry-after", "")
    retry_s = float(retry) if retry.isdigit() else None
    if status == 429:
        return RequestError(message, Outcome.OVERLOADED, retry_after_s=retry_s or 1.0)
    if status == 503:
        return RequestError(message, Outcome.UNAVAILABLE, retry_after_s=retry_s or 1.0)
    if status in (400, 413, 422):
        return RequestError(message, Outcome.INVALID)
    # 401, 403 and 404 are between joulery and the server: the client asked for nothing wrong.
    return RequestError(message, Outcome.CRASHED)
