"""Client of an engine server, which a gateway shares with other gateways: the engine of one gateway.

The client joins again whenever the connection ends; meanwhile requests get ``UNAVAILABLE``. Records of requests that
ended in between are sent when it has joined again.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from joulery.adapters.engines.embedded.wire import Frame, FrameReader, encode
from joulery.adapters.engines.shared import messages as m
from joulery.adapters.engines.shared.server import PageAnswer
from joulery.domain.errors import CapabilityError, DataError
from joulery.domain.serving.charging import ChargeTable
from joulery.domain.serving.engine import (
    EnergyShare,
    InferRequest,
    InferResponse,
    Outcome,
    ReplicaSpec,
    ReplicaView,
    RequestError,
    RequestRecord,
    Transition,
)
from joulery.domain.serving.ledger import RecordMarks
from joulery.domain.serving.relay import RelayedPart, RelayedRequest
from joulery.domain.serving.tensors import Tensor
from joulery.steady_time import unix_s

_RETRY_S = 0.25
_FIRST_S = 2.0
"""Longest time that first requests wait until the gateway has joined: a new gateway listens before that."""
_UNREACHED: PageAnswer = (
    503,
    {"content-type": "application/json"},
    b'{"error":"the engine server cannot be reached"}',
)
_MOST_UNSENT = 100_000
"""Maximum number of records kept while the engine server is away."""
_MOST_KEPT = 20_000
"""Maximum number of sent records kept until a controller stores them; older ones are lost if the server is lost."""


class _Kept(NamedTuple):
    """A sent record, kept until a controller has stored it: its number, its engine server and its content."""

    number: int
    instance: str
    record: RequestRecord
    call_id: str


class _Passed(NamedTuple):
    """The request that a task has forwarded: the numbers of connection and request, and the engine server."""

    connection: int = 0
    instance: str = ""
    number: int = 0


_NONE = _Passed()
_REQUEST: ContextVar[_Passed] = ContextVar("request of this task", default=_NONE)


@dataclass(frozen=True, slots=True)
class GatewayName:
    """Identity with which a gateway joins.

    Attributes:
        name: Its name among the gateways.
        version: Its version of joulery.
        start: Identifies how it was started.
        secret: The token of gateways on other machines; None on the engine server's own machine.
    """

    name: str
    version: str
    start: str = ""
    secret: bytes | None = None


class EngineClient:
    """An engine server as a gateway's engine. Implements :class:`joulery.domain.ports.Engine` except for changes.

    Args:
        where: ``unix:PATH`` or ``HOST:PORT``.
        name: Identity with which the gateway joins.
        tls: Encrypts the connection, and states which certificates are trusted; None for no encryption.
        connections: Clients connected to the gateway now.
        changed: Called when the engine server's settings have arrived or changed.

    Attributes:
        url: Where the gateway listens; set before :meth:`run`.
        refused: Why the engine server refuses this gateway; empty where it accepts it, or has not been reached.
        process: Identifies this process: records are numbered within it.
    """

    def __init__(
        self,
        where: str,
        name: GatewayName,
        *,
        tls: ssl.SSLContext | None = None,
        connections: Callable[[], int] = lambda: 0,
        changed: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        self.where, self.name, self.url, self.refused = where, name, "", ""
        self.charges = ChargeTable()
        self.away_since_s = time.monotonic()
        self.unsent_dropped = 0
        self._connections, self._changed, self._tls = connections, changed, tls
        self._views: tuple[ReplicaView, ...] = ()
        self._settings: Mapping[str, Any] = {}
        self._controller_s: float | None = None
        self._link: _Link | None = None
        self._links = self._number = 0
        self._first, self._wait_until_s = asyncio.Event(), time.monotonic() + _FIRST_S
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._texts: dict[int, asyncio.Queue[RelayedPart]] = {}
        self._unsent: deque[tuple[_Passed, RequestRecord, str]] = deque()
        self.process, self._recorded = secrets.token_hex(8), 0
        self._kept: deque[_Kept] = deque(maxlen=_MOST_KEPT)

    @property
    def joined(self) -> bool:
        """Whether the gateway is joined to the engine server."""
        return self._link is not None

    @property
    def never_joined(self) -> bool:
        """Whether the gateway has never joined the engine server."""
        return self._links == 0

    @property
    def controller_away_s(self) -> float | None:
        """Seconds since the engine server lost its controller; None while it has one, or is not reached itself."""
        return None if self._controller_s is None or not self.joined else time.monotonic() - self._controller_s

    async def run(self) -> None:
        """Keep the gateway joined to the engine server until cancelled."""
        while True:
            link = _Link(self)
            try:
                await self._connect(link)
                await link.ended
            except (OSError, CapabilityError) as error:
                self.refused = self._encryption_failure(link, error) or self.refused
            self._lost(link)
            await asyncio.sleep(_RETRY_S)

    def replicas(self) -> tuple[ReplicaView, ...]:
        """The replicas as the engine server last described them; none while it is away."""
        return self._views if self.joined else ()

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        """The answer of the engine server.

        Raises:
            RequestError: The request was not answered; ``outcome`` gives the reason.
        """
        arrival_s = unix_s()
        link = self._link or await self._first_link(request.timeout_s)
        if link is None:
            raise RequestError("the engine server cannot be reached", Outcome.UNAVAILABLE, retry_after_s=1.0)
        sent_s = unix_s()
        number = self._numbered()
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        _REQUEST.set(_Passed(link.number, link.instance, number))
        try:
            link.send(m.request_header(number, service, request, sent_s - arrival_s), request.inputs)
            header, outputs = await answer
        except asyncio.CancelledError:
            link.send({"m": m.CANCEL, "n": number})
            raise
        finally:
            self._calls.pop(number, None)
        if "e" in header:
            raise m.error_of(header)
        return InferResponse(
            outputs,
            header["v"],
            header["r"],
            arrival_s,
            sent_s + header["w"],
            unix_s(),
            m.seconds(header["s"]),
            m.seconds(header["c"]),
            header["k"],
            header["g"],
        )

    def attribute(self, service: str, variant: str, cpu_s: float, service_s: float, end_s: float) -> EnergyShare | None:
        """The charge of one request by the controller's table. Without a controller its carbon is None."""
        share = self.charges.charge(service, variant, cpu_s)
        return share if share is None or self._controller_s is None else share._replace(carbon_g=None)

    def record(self, record: RequestRecord, call_id: str = "") -> None:
        """Report how a request of the current task ended."""
        passed = _REQUEST.get()
        _REQUEST.set(_NONE)
        if self._link is not None:
            self._report(self._link, passed, record, call_id)
            return
        self._unsent.append((passed, record, call_id))
        if len(self._unsent) > _MOST_UNSENT:
            self._unsent.popleft()
            self.unsent_dropped += 1

    async def label(self, service: str, body: bytes) -> tuple[int, bytes]:
        """Send labels to be counted; return HTTP status and body of the answer."""
        content = np.frombuffer(body, np.uint8)
        status, _, answer = await self._content({"m": m.LABEL, "s": service}, {"body": content})
        return status, answer

    async def page(self, path: str, query: str, accept: str) -> PageAnswer:
        """Request a page from the controller."""
        return await self._content({"m": m.PAGE, "path": path, "query": query, "accept": accept}, {})

    async def text(self, request: RelayedRequest) -> AsyncGenerator[RelayedPart, None]:
        """The controller's answer to a request, part by part; closing the iterator early withdraws the request."""
        link = self._link or await self._first_link()
        if link is None:
            yield RelayedPart(more=False, error="the engine server cannot be reached")
            return
        number, more = self._numbered(), True
        parts = self._texts[number] = asyncio.Queue()
        try:
            link.send(*m.text_message(number, request))
            while more:
                part = await parts.get()
                more = part.more
                yield part
        finally:
            del self._texts[number]
            if more:
                link.send({"m": m.CANCEL, "n": number})

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        """Raise an error: the controller changes replicas, a gateway does not.

        Raises:
            CapabilityError: Always.
        """
        raise CapabilityError("a gateway does not change replicas; its controller does")

    async def close(self) -> None:
        """Close the connection to the engine server. Safe to call twice."""
        if self._link is not None:
            self._link.end()

    async def _first_link(self, timeout_s: float | None = None) -> _Link | None:
        """Wait for the first connection and return it; None where it takes too long, or has ended."""
        left_s = min(self._wait_until_s - time.monotonic(), math.inf if timeout_s is None else timeout_s)
        if self.never_joined and left_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._first.wait(), left_s)
        return self._link

    async def _content(self, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> PageAnswer:
        link = self._link or await self._first_link()
        if link is None:
            return _UNREACHED
        number = self._numbered()
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            link.send({**header, "n": number}, tensors)
            found = await answer
        except RequestError:
            return _UNREACHED
        finally:
            self._calls.pop(number, None)
        return int(found.header["status"]), dict(found.header["headers"]), found.tensors["body"].tobytes()

    def _numbered(self) -> int:
        self._number += 1
        return self._number

    async def _connect(self, link: _Link) -> None:
        """Connect and join.

        Raises:
            OSError: The engine server cannot be reached.
            CapabilityError: The engine server refuses this gateway.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(m.SILENT_S):
            if self.where.startswith("unix:"):
                await loop.create_unix_connection(lambda: link, self.where.removeprefix("unix:"))
            else:
                host, _, port = self.where.rpartition(":")
                transport, _ = await loop.create_connection(lambda: link, host.strip("[]"), int(port), ssl=self._tls)
                raw = transport.get_extra_info("socket")
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await link.joined
        self._links += 1
        link.number = self._links
        self._link, self.refused = link, ""
        self._first.set()
        link.beating = loop.create_task(self._beat(link))
        while self._unsent:
            self._report(link, *self._unsent.popleft())

    def _encryption_failure(self, link: _Link, error: Exception) -> str:
        """Reason why encryption made a connection fail; empty where something else did."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is not the one that is trusted here: {error.verify_message}"
        if isinstance(error, ssl.SSLError):
            return "it does not speak TLS: add serving.gateways.join_tls to its site, or join without a certificate"
        speechless = isinstance(error, TimeoutError) and link.connected and not link.heard
        if speechless and self._tls is None and not self.where.startswith("unix:"):
            return "it says nothing to a connection without TLS: join with its certificate"
        return ""

    def _lost(self, link: _Link) -> None:
        """Handle the end of a connection: fail every call that waits for an answer."""
        link.end()
        if self._link is not link:
            return
        self._link, self.away_since_s = None, time.monotonic()
        for parts in self._texts.values():
            parts.put_nowait(RelayedPart(more=False, error="the engine server was lost"))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(RequestError("the engine server was lost", Outcome.UNAVAILABLE, retry_after_s=1.0))

    def _report(self, link: _Link, passed: _Passed, record: RequestRecord, call_id: str) -> None:
        """Send a record.

        An engine server closes the requests of a connection when it ends. Records of such requests are therefore sent
        only to another engine server, which has no entry for the request.
        """
        number = passed.number if passed.connection == link.number else 0
        if passed.number and not number and passed.instance == link.instance:
            return
        self._recorded += 1
        self._kept.append(_Kept(self._recorded, link.instance, record, call_id))
        header = m.record_header(number, record, unix_s())
        header["q"] = self._recorded
        if call_id:
            header["id"] = call_id
        link.send(header)

    def _settle(self, link: _Link, marks: RecordMarks) -> None:
        """Drop the records that a controller has stored; send again those that were lost with an engine server.

        Records of an engine server unknown to the controller are dropped: an earlier controller may have stored them.
        """
        kept, lost = self._kept, []
        while kept:
            first = kept[0]
            taken = first.number <= marks.get(first.instance, {}).get(self.process, 0)
            if first.instance == link.instance and not taken:
                break
            if not taken and first.instance in marks:
                lost.append(first)
            kept.popleft()
        for one in lost:
            self._report(link, _NONE, one.record, one.call_id)

    async def _beat(self, link: _Link) -> None:
        while True:
            link.send({"m": m.BEAT, "connections": self._connections(), "cpu_s": time.process_time()})
            await asyncio.sleep(m.BEAT_S)
            if time.monotonic() - link.heard_s > m.SILENT_S:
                link.end()

    def _take(self, frame: Frame) -> None:
        header = frame.header
        if header["m"] in (m.ANSWER, m.CONTENT):
            call = self._calls.get(header["n"])
            if call is not None and not call.done():
                call.set_result(frame)
        elif header["m"] == m.PART:
            parts = self._texts.get(header["n"])
            if parts is not None:
                parts.put_nowait(m.part_of(header, frame.tensors))
        elif header["m"] == m.STATE:
            self._views = m.views_of(header["replicas"])
            away = header["controller"]
            self._controller_s = None if away else time.monotonic() - header["away_s"]
            if header["charges"] is not None:
                self.charges = ChargeTable.of(header["charges"])
            if header["marks"] is not None and self._link is not None:
                self._settle(self._link, header["marks"])
            if header["settings"] != self._settings:
                self._settings = header["settings"]
                self._changed(self._settings)


class _Link(asyncio.Protocol):
    """One connection to the engine server."""

    def __init__(self, client: EngineClient) -> None:
        loop = asyncio.get_running_loop()
        self.client, self.number, self.instance = client, 0, ""
        self.joined: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.heard_s = time.monotonic()
        self.connected = self.heard = False
        self.beating: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle the opened connection (asyncio callback)."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.connected = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection (asyncio callback)."""
        self._transport = None
        if not self.joined.done():
            self.joined.set_exception(CapabilityError(self.client.refused or "the engine server closed the connection"))
        if not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, which may end within a message (asyncio callback)."""
        self.heard_s, self.heard = time.monotonic(), True
        try:
            for frame in self._frames.feed(data):
                if self.joined.done():
                    self.client._take(frame)
                else:
                    self._handshake(frame.header)
        except (DataError, KeyError, TypeError, ValueError) as error:
            self.client.refused = f"a message of the engine server cannot be read: {error}"
            self.end()

    def send(self, header: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send one message; do nothing where the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(encode(header, tensors or {}))

    def end(self) -> None:
        """End the connection."""
        if self.beating is not None:
            self.beating.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _handshake(self, header: Mapping[str, Any]) -> None:
        client, kind = self.client, header["m"]
        if kind == m.CHALLENGE:
            join = {
                "m": m.JOIN,
                "protocol": m.PROTOCOL,
                "name": client.name.name,
                "version": client.name.version,
                "start": client.name.start,
                "url": client.url,
                "pid": os.getpid(),
                "process": client.process,
            }
            if client.name.secret is not None:
                join["proof"] = m.proof(client.name.secret, str(header["nonce"]), client.name.name)
            self.send(join)
        elif kind == m.REFUSED:
            client.refused = str(header["why"])
            self.end()
        elif kind == m.WELCOME:
            self.instance = str(header["instance"])
            self.joined.set_result(None)
