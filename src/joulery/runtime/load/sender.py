"""Send requests at their times over a limited number of persistent connections, and record the outcome of each."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast
from urllib.parse import urlsplit

import httptools

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError
from joulery.runtime.load.load_plan import MAX_REQUESTS
from joulery.runtime.load.outcomes import ABANDONED, ANSWERED, Outcomes

_HEADERS = {b"x-joulery-variant": "variant", b"x-joulery-quality": "quality"}
_SHORT_S = 0.05
_NUMBERS = {b"x-joulery-energy-j": "energy_j", b"x-joulery-carbon-g": "carbon_g"}


class Sender:
    """Sends one load on one event loop.

    Args:
        url: The gateway.
        path: URL path of the requests.
        bodies: Request bodies with the length of their JSON part, sent in turn.
        connections: Most connections at once.
        timeout_s: How long to wait for an answer.
        token: Bearer token; None for none.
        certificate: PEM file of the only certificate that is trusted; None for those that this machine trusts.

    Raises:
        ConfigError: ``url`` is not the address of a gateway, or the certificate cannot be read.
    """

    def __init__(
        self,
        url: str,
        path: str,
        bodies: Sequence[tuple[bytes, int | None]],
        *,
        connections: int,
        timeout_s: float,
        token: str | None = None,
        certificate: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("not the address of a gateway", got=url, expected="http://HOST:PORT")
        self.host, self.port = parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
        self._tls = None if parts.scheme == "http" else _tls(certificate)
        self.timeout_s = timeout_s
        self.outcomes = Outcomes()
        self._requests = [_request(parts.netloc, path, token, body, json_bytes) for body, json_bytes in bodies]
        self._most = connections
        self._open: set[_Connection] = set()
        self._opening = 0
        self._free: list[_Connection] = []
        self._due: deque[int] = deque()
        self._idle = asyncio.Event()
        self._unix_s = time.time() - time.monotonic()
        self._closed_until_s = -1.0
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, times_s: FloatArray) -> None:
        """Send one request at each of ``times_s`` from now on, and wait for the running requests."""
        start_s = time.monotonic()
        for index, due_s in enumerate(times_s.tolist()):
            await self._sleep(start_s + due_s - time.monotonic())
            if self._stopped.is_set():
                break
            self._due.append(self.outcomes.add(index % len(self._requests), start_s + due_s + self._unix_s))
            self._send_due()
        await self._finish()

    async def run_closed(self, duration_s: float) -> None:
        """Keep every connection busy for ``duration_s``; a request is due when it is sent."""
        self._closed_until_s = time.monotonic() + duration_s
        for _ in range(self._most):
            self._next_closed()
        self._send_due()
        await self._sleep(duration_s)
        await self._finish()

    def stop(self) -> None:
        """Stop sending requests and stop waiting for answers."""
        self._stopped.set()
        self._idle.set()

    def answered(self, connection: _Connection, row: int, status: int, reusable: bool) -> None:
        """Record an answer, and free or close its connection."""
        self.outcomes.status[row] = status
        self.ended(row, ANSWERED)
        if reusable:
            self._free.append(connection)
        else:
            connection.close()
        self._send_due()

    def ended(self, row: int, error: str) -> None:
        """Record the end of a request."""
        now_s = time.monotonic()
        self.outcomes.texts["error"][row] = error
        self.outcomes.numbers["end_s"][row] = now_s + self._unix_s
        if now_s < self._closed_until_s and error != "refused":
            self._next_closed()

    def lost(self, connection: _Connection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
        self._send_due()

    async def _sleep(self, seconds: float) -> None:
        """Sleep for a time or until ``stop``; short sleeps are not interrupted."""
        if seconds < _SHORT_S:
            await asyncio.sleep(max(0.0, seconds))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    def _next_closed(self) -> None:
        """Queue the next request of a closed loop, due now."""
        if not self._stopped.is_set() and len(self.outcomes) < MAX_REQUESTS:
            which = len(self.outcomes) % len(self._requests)
            self._due.append(self.outcomes.add(which, time.monotonic() + self._unix_s))

    def _send_due(self) -> None:
        """Send due requests over free connections; open more connections where there are too few."""
        while self._due and self._free:
            row = self._due.popleft()
            self.outcomes.numbers["sent_s"][row] = time.monotonic() + self._unix_s
            self._free.pop().send(row, self._requests[self.outcomes.input[row]])
        for _ in range(min(len(self._due) - self._opening, self._most - len(self._open) - self._opening)):
            self._opening += 1
            task = asyncio.get_running_loop().create_task(self._connect())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not self._due and len(self._free) == len(self._open) and not self._opening:
            self._idle.set()
        else:
            self._idle.clear()

    async def _connect(self) -> None:
        """Open one more connection; on failure, end a waiting request as refused."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                _, protocol = await loop.create_connection(
                    lambda: _Connection(self), self.host, self.port, ssl=self._tls
                )
        except OSError:
            if self._due:
                self.ended(self._due.popleft(), "refused")
        else:
            self._open.add(protocol)
            self._free.append(protocol)
        finally:
            self._opening -= 1
        self._send_due()

    async def _finish(self) -> None:
        """Wait for the running requests, at most twice the request timeout, then close all connections."""
        self._send_due()
        if not self._stopped.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self.timeout_s):
                    await self._idle.wait()
        self._stopped.set()
        self._due.clear()
        for connection in list(self._open):
            connection.abandon()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Connection(asyncio.Protocol):
    """One connection; carries one request at a time."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._row = -1
        self._timer: asyncio.TimerHandle | None = None

    def send(self, row: int, pieces: tuple[bytes, bytes]) -> None:
        """Send a request."""
        assert self._transport is not None
        self._row = row
        self._timer = asyncio.get_running_loop().call_later(self._sender.timeout_s, self._too_late)
        self._transport.writelines(pieces)

    def close(self) -> None:
        """Abort the connection, with the request that it carries."""
        if self._transport is not None:
            self._transport.abort()

    def abandon(self) -> None:
        """Close the connection and mark its request as abandoned."""
        if self._row >= 0:
            self._sender.ended(self._row, ABANDONED)
            self._release()
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle the opened connection (asyncio callback)."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle a part of an answer (asyncio callback)."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection (asyncio callback)."""
        if self._row >= 0:
            self._sender.ended(self._row, "reset")
            self._release()
        self._sender.lost(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header of the answer (httptools callback)."""
        name = name.lower()
        if name in _HEADERS:
            self._sender.outcomes.texts[_HEADERS[name]][self._row] = value.decode("latin-1")
        elif name in _NUMBERS:
            self._sender.outcomes.numbers[_NUMBERS[name]][self._row] = float(value)

    def on_message_complete(self) -> None:
        """Handle the end of the answer (httptools callback)."""
        row, reusable = self._row, self._parser.should_keep_alive()
        self._release()
        self._sender.answered(self, row, self._parser.get_status_code(), reusable)

    def _too_late(self) -> None:
        self._sender.ended(self._row, "timeout")
        self._release()
        self.close()

    def _release(self) -> None:
        self._row = -1
        if self._timer is not None:
            self._timer.cancel()


def _request(host: str, path: str, token: str | None, body: bytes, json_bytes: int | None) -> tuple[bytes, bytes]:
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
    if json_bytes is not None:
        lines += ["content-type: application/octet-stream", f"inference-header-content-length: {json_bytes}"]
    else:
        lines.append("content-type: application/json")
    if token is not None:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join((*lines, "", "")).encode(), body


def _tls(certificate: str | None) -> ssl.SSLContext:
    """TLS context that trusts only the given certificate, whatever its host name, or else what this machine trusts.

    Raises:
        ConfigError: The certificate cannot be read.
    """
    context = ssl.create_default_context()
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(certificate)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificate cannot be read: {error}", file=certificate) from error
    return context
