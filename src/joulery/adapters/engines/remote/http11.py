"""HTTP/1.1 to one server near by, for requests that pass a gateway: a quarter of the CPU of httpx's own transport.

An ``httpx.AsyncBaseTransport``: connections are kept and used again, a response is streamed as it comes, and closing
one that is not complete closes its connection. Plain HTTP only, no redirects, no proxies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import httptools
import httpx

_FULL_BYTES = 1 << 18
"""Bytes of a body that may lie here unread before the server is made to wait."""


class Http11Transport(httpx.AsyncBaseTransport):
    """Connections to one server.

    Args:
        host, port: Where it is.
        keep_alive_s: How long an idle connection is kept.
    """

    def __init__(self, host: str, port: int, *, keep_alive_s: float = 4.0) -> None:
        self._host, self._port, self._keep_alive_s = host, port, keep_alive_s
        self._idle: deque[_Connection] = deque()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; the response as soon as its head is here.

        Raises:
            httpx.TransportError: No connection, silence, or what is no HTTP.
        """
        timeout = request.extensions["timeout"]
        connection = await self._connection(timeout["connect"])
        try:
            connection.send(_wire(request))
            async with _patience(timeout["read"], httpx.ReadTimeout):
                status = await connection.head()
        except BaseException:
            connection.abort()
            raise
        return httpx.Response(status, headers=connection.headers, stream=_Body(self, connection, timeout["read"]))

    async def aclose(self) -> None:
        """Close what is idle. Safe to call twice."""
        while self._idle:
            self._idle.pop().abort()

    def put_back(self, connection: _Connection) -> None:
        """A response was read to its end."""
        if connection.reusable:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connection(self, patience_s: float | None) -> _Connection:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and loop.time() - connection.idle_since_s < self._keep_alive_s:
                return connection
            connection.abort()
        try:
            async with _patience(patience_s, httpx.ConnectTimeout):
                _, made = await loop.create_connection(_Connection, self._host, self._port)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return made


class _Connection(asyncio.Protocol):
    """One connection, one response at a time."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = True
        self.idle_since_s = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self._paused = False
        self._keep = False
        self._head_done = False
        self._error: httpx.TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent on it."""
        return self.complete and self._keep and self._error is None

    def send(self, data: bytes) -> None:
        """A request, whole."""
        self.headers, self.complete, self._head_done = [], False, False
        self._pieces.clear()
        self._held_bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is not None:
            self._transport.write(data)

    async def head(self) -> int:
        """The status, once the headers are here."""
        while not self._head_done:
            await self._wait()
        return int(self._parser.get_status_code())

    async def piece(self) -> bytes:
        """The next bytes of the body; empty at its end."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait()
        piece = self._pieces.popleft()
        self._held_bytes -= len(piece)
        if self._paused and self._held_bytes < _FULL_BYTES and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return piece

    def abort(self) -> None:
        """Close it now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: a part of a response."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what came is no HTTP: {error}")
            self.abort()
        if not self._paused and self._held_bytes >= _FULL_BYTES and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is closed. A body without a length ends here."""
        if self._head_done and not self.complete and self._ends_with_connection():
            self.complete = True
        self._keep = False
        self._fail("the connection ended before the answer did" if exc is None else str(exc))
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a header."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """httptools: the head is here."""
        self._head_done = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        """httptools: bytes of the body, chunks undone."""
        self._pieces.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        """httptools: the response is here; one that only says to go on is not the answer."""
        if self._parser.get_status_code() < 200:
            self.headers, self._head_done = [], False
            return
        self.complete = True
        self._keep = bool(self._parser.should_keep_alive())

    def _ends_with_connection(self) -> bool:
        names = {name.lower() for name, _ in self.headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _fail(self, reason: str) -> None:
        self._error = self._error or httpx.RemoteProtocolError(reason)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Body(httpx.AsyncByteStream):
    """The body of a response, as it comes."""

    def __init__(self, transport: Http11Transport, connection: _Connection, patience_s: float | None) -> None:
        self._transport, self._connection, self._patience_s = transport, connection, patience_s
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            async with _patience(self._patience_s, httpx.ReadTimeout):
                piece = await self._connection.piece()
            if not piece:
                return
            yield piece

    async def aclose(self) -> None:
        """Give the connection back, or close it where the response is not read to its end. Safe to call twice."""
        if self._open:
            self._open = False
            self._transport.put_back(self._connection)


@asynccontextmanager
async def _patience(seconds: float | None, error: type[httpx.TimeoutException]) -> AsyncIterator[None]:
    """So long and no longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise error(f"nothing came for {seconds:g} s") from None


def _wire(request: httpx.Request) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b\r\n" % (name, value) for name, value in request.headers.raw]
    return b"".join((*lines, b"\r\n", request.content))
