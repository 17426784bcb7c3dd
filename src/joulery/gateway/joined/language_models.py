"""The OpenAI API where several gateways share the language models of one controller.

A gateway reads requests within its limits and forwards them; the controller has a single queue per model, orders it,
and charges each answer once. An answer is returned as it is generated, so that a stream remains a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson

from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.relay import Passed, RelayedPart, RelayedRequest
from joulery.gateway.app import STATUS, Exchange, Headers, MountedRoutes, reply
from joulery.gateway.body import BodyReader, RefusedError
from joulery.gateway.openai_protocol import error_document

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_JSON = (b"content-type", b"application/json")
_OF_ONE_CONNECTION = frozenset(
    {b"authorization", b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
Stream = Callable[[RelayedRequest], AsyncGenerator[RelayedPart, None]]
"""Forwards a request and yields the parts of its answer."""


class RelayedText:
    """The routes under ``/v1`` of a joined gateway. Implements :class:`joulery.gateway.app.MountedRoutes`.

    Args:
        stream: Passes a request on to the controller.
        bodies: Reads requests within the gateway's limits.
        is_ready: Returns whether the controller's language models can answer.
    """

    def __init__(self, stream: Stream, bodies: BodyReader, is_ready: Callable[[], bool]) -> None:
        self._stream, self._bodies, self._is_ready = stream, bodies, is_ready

    @property
    def ready(self) -> bool:
        """Whether the language models can answer."""
        return self._is_ready()

    async def __call__(self, scope: Scope, exchange: Exchange | None, receive: Receive, send: Send) -> None:
        """Forward a request, and return its answer to the client.

        Raises:
            RefusedError: The request is not forwarded.
        """
        if exchange is not None:
            exchange.begin()
        body, answer = b"", _Answer(send, exchange)
        try:
            body = await self._bodies.read(dict(scope["headers"]), receive)
            headers = tuple(
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in scope["headers"]
                if name not in _OF_ONE_CONNECTION
            )
            request = RelayedRequest(scope["method"], scope["path"], headers, body)
            async with aclosing(self._stream(request)) as parts:
                async for part in parts:
                    await answer.add(part)
        except RefusedError:
            raise
        except RequestError as error:
            await answer.fail(error)
        except asyncio.CancelledError:
            if exchange is None or not exchange.lost:
                await answer.fail(RequestError("the gateway is closing", Outcome.UNAVAILABLE))
        finally:
            self._bodies.give_back(body)
            if exchange is not None:
                exchange.end()


class _Answer:
    """Sends an answer to the client."""

    def __init__(self, send: Send, exchange: Exchange | None) -> None:
        self._send, self._exchange, self._streams, self._begun = send, exchange, False, False

    async def add(self, part: RelayedPart) -> None:
        """Send the next part."""
        if part.error:
            await self.fail(RequestError(part.error, Outcome.UNAVAILABLE))
            return
        if part.status:
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in part.headers]
            self._begun = True
            self._streams = any(one == (b"content-type", b"text/event-stream; charset=utf-8") for one in headers)
            await self._send({"type": "http.response.start", "status": part.status, "headers": headers})
        if part.body or not part.more:
            await self._send({"type": "http.response.body", "body": part.body, "more_body": part.more})

    async def fail(self, error: RequestError) -> None:
        """End the answer with an error; a stream that has begun ends with the error, without its closing event."""
        content = orjson.dumps(error_document(error))
        if self._begun:
            body = b"data: " + content + b"\n\n" if self._streams else b""
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
            return
        headers: Headers = [_JSON]
        if error.outcome is Outcome.UNAVAILABLE:
            headers.append((b"retry-after", b"1"))
        await reply(self._send, self._exchange, STATUS[error.outcome], content, headers)


class _Elsewhere:
    """Exchange of a request whose client is connected to another process. A cancelled task needs no answer."""

    lost = True

    def begin(self) -> None:
        """Do nothing: the gateway watches the client."""

    def end(self) -> None:
        """Do nothing."""

    def answer(self, status: int, headers: Headers, body: bytes, *, last: bool = False) -> bool:
        """Return False: the answer is sent as ASGI messages."""
        return False


async def answer_relayed(routes: MountedRoutes | None, request: RelayedRequest, passed: Passed) -> None:
    """Answer a request that a gateway has forwarded; cancelled when its client disconnects.

    Args:
        routes: The language models; None where there are none.
        request: The request.
        passed: Receives the answer.
    """
    started: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            started.append(message)
            return
        first: Any = started.pop() if started else {"status": 0, "headers": ()}
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in first["headers"])
        passed(RelayedPart(first["status"], headers, message.get("body", b""), message.get("more_body", False)))

    scope: dict[str, Any] = {
        "type": "http",
        "method": request.method,
        "path": request.path,
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers],
    }
    try:
        if routes is None:
            raise RefusedError(503, "the language models are starting", (b"retry-after", b"1"))
        await routes(scope, _Elsewhere(), receive, send)
    except RefusedError as error:
        content = orjson.dumps(error_document(error))
        await reply(send, None, error.status, content, [_JSON, *error.headers])
