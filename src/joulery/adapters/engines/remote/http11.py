"""HTTP/1.1 for requests that pass a gateway, at a quarter of the CPU time of httpx's own transport.

An ``httpx.AsyncBaseTransport``: every request has a connection of its own, a response is streamed as it arrives, and
closing a response closes its connection. Connections are not reused: servers of language models close them after a
stream (llama.cpp) while they still look alive, and a request written to a closed connection is lost. Opening one takes
about 0.1 ms on one machine, a generated token takes longer. Plain HTTP only, no redirects, no proxies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import httptools
import httpx

_MAX_BUFFERED_BYTES = 1 << 18
"""Bytes of a body that may be buffered before reading from the server pauses."""


class Http11Transport(httpx.AsyncBaseTransport):
    """Transport that sends each request over a connection of its own.

    Args:
        host, port: The server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Returns the response as soon as its head has arrived.

        Raises:
            httpx.TransportError: The server refuses the connection, is silent, or sends invalid HTTP.
        """
        timeout = request.extensions["timeout"]
        connection = await self._connect(timeout["connect"])
        try:
            connection.send(_wire(request))
            async with _time_limit(timeout["read"], httpx.ReadTimeout):
                status = await connection.head()
        except BaseException:
            connection.abort()
            raise
        return httpx.Response(status, headers=connection.headers, stream=_Body(connection, timeout["read"]))

    async def _connect(self, limit_s: float | None) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with _time_limit(limit_s, httpx.ConnectTimeout):
                _, made = await loop.create_connection(_Connection, self._host, self._port)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return made


class _Connection(asyncio.Protocol):
    """A connection for one request and its response."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self._complete = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: deque[bytes] = deque()
        self.buffered_bytes = 0
        self._paused = False
        self._head_done = False
        self._error: httpx.TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def send(self, data: bytes) -> None:
        """Write the whole request."""
        if self._transport is not None:
            self._transport.write(data)

    async def head(self) -> int:
        """The status, once the headers have arrived."""
        while not self._head_done:
            await self._wait()
        return int(self._parser.get_status_code())

    async def piece(self) -> bytes:
        """The next bytes of the body; empty at its end."""
        while not self._pieces:
            if self._complete:
                return b""
            await self._wait()
        piece = self._pieces.popleft()
        self.buffered_bytes -= len(piece)
        if self._paused and self.buffered_bytes < _MAX_BUFFERED_BYTES and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return piece

    def abort(self) -> None:
        """Close the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle the opened connection (asyncio callback)."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes of the response (asyncio callback)."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"invalid HTTP: {error}")
            self.abort()
        if not self._paused and self.buffered_bytes >= _MAX_BUFFERED_BYTES and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection, which ends a body without a length (asyncio callback)."""
        if self._head_done and not self._complete and self._ends_with_connection():
            self._complete = True
        self._fail("the connection ended before the response did" if exc is None else str(exc))
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header (httptools callback)."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Handle a complete head (httptools callback)."""
        self._head_done = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        """Store bytes of the body, without chunk framing (httptools callback)."""
        self._pieces.append(body)
        self.buffered_bytes += len(body)

    def on_message_complete(self) -> None:
        """Handle a complete response; skip an interim one, status 1xx (httptools callback)."""
        if self._parser.get_status_code() < 200:
            self.headers, self._head_done = [], False
            return
        self._complete = True

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
    """The body of a response, as it arrives."""

    def __init__(self, connection: _Connection, limit_s: float | None) -> None:
        self.connection, self._limit_s = connection, limit_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            async with _time_limit(self._limit_s, httpx.ReadTimeout):
                piece = await self.connection.piece()
            if not piece:
                return
            yield piece

    async def aclose(self) -> None:
        """Close the connection. Safe to call twice."""
        self.connection.abort()


@asynccontextmanager
async def _time_limit(seconds: float | None, error: type[httpx.TimeoutException]) -> AsyncIterator[None]:
    """Raise ``error`` if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise error(f"nothing arrived for {seconds:g} s") from None


def _wire(request: httpx.Request) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b\r\n" % (name, value) for name, value in request.headers.raw if name.lower() != b"connection"]
    return b"".join((*lines, b"connection: close\r\n\r\n", request.content))
