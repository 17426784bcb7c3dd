"""The engine server: one engine, shared by several gateways and controlled by one controller at a time.

Gateways send requests and report how they ended; the server keeps them in one ledger
(:mod:`joulery.domain.serving.ledger`), which the controller fetches. Without a controller the engine continues with
its last layout, weights and limits.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from joulery.adapters.engines.embedded.wire import FrameReader, encode
from joulery.adapters.engines.shared import messages as m
from joulery.domain.errors import DataError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import InferRequest, Outcome, RequestError
from joulery.domain.serving.ledger import RecordMarks, RequestLedger
from joulery.domain.serving.relay import Passed, RelayedPart, RelayedRequest
from joulery.domain.serving.tensors import Tensor

_log = logging.getLogger(__name__)
PageAnswer = tuple[int, dict[str, str], bytes]
"""HTTP status, headers and body."""
_JSON = {"content-type": "application/json"}
_AWAY = "no controller has started the replicas yet"


class AnswerLabels(Protocol):
    """Counts labels of answers."""

    def answered(self, service: str, request: str, variant: str) -> None:
        """Record that a request with an id was answered."""
        ...

    def label(self, service: str, body: bytes) -> tuple[int, bytes]:
        """Count labels; return HTTP status and body of the answer."""
        ...

    def tally(self, service: str) -> dict[str, tuple[int, int]]:
        """Numbers of right and of labelled answers, by variant."""
        ...


@dataclass(slots=True)
class GatewayStatus:
    """The engine server's record of one gateway.

    Attributes:
        name: Its name.
        url: Where it listens.
        pid: Its process; 0 on another machine.
        version: Its version of joulery.
        start: Identifies how it was started; empty on another machine.
        received, ended: Requests that arrived and ended through it.
        silent_s: Seconds since its last message.
        connected: Whether it is joined now.
        connections: Clients that are connected to it.
        cpu_s: CPU seconds of its process.
    """

    name: str
    url: str = ""
    pid: int = 0
    version: str = ""
    start: str = ""
    received: int = 0
    ended: int = 0
    silent_s: float = 0.0
    connected: bool = True
    connections: int = 0
    cpu_s: float = 0.0


@dataclass(slots=True)
class ServerState:
    """State sent to every gateway.

    Attributes:
        settings: Limits and services, from the controller.
        charges: The table of charges.
        controller: Whether a controller is connected.
        left_s: When the last controller left, on the monotonic clock.
        marks: Which records a controller has stored; None before the first controller.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    charges: dict[str, Any] | None = None
    controller: bool = False
    left_s: float = field(default_factory=time.monotonic)
    marks: RecordMarks | None = None


class EngineServer:
    """Server of one engine for many gateways.

    Args:
        labels: Counts labels of answers.
        secret: Token of gateways of other machines; None where none may join.
        services: The site's services, until a controller publishes its settings.

    Attributes:
        engine: Answers requests; None before a controller has opened it.
        ledger: The requests and their outcomes.
        gateways: Every gateway that ever joined, by name.
        state: The state that gateways are sent.
        ask_page: Requests a page from the controller; None without a controller.
        ask_text: Passes a request to the controller, and returns a function that withdraws it; None without one.
        instance: Identifies this process: random at each start.
        latest: The newest answered request of each service, for shadow replays.
    """

    def __init__(self, labels: AnswerLabels, secret: bytes | None = None, services: Sequence[str] = ()) -> None:
        self.engine: Engine | None = None
        self.ledger = RequestLedger()
        self.labels, self.secret = labels, secret
        self.gateways: dict[str, GatewayStatus] = {}
        self.state = ServerState({"services": list(services)})
        self.latest: dict[str, InferRequest] = {}
        self.ask_page: Callable[[str, str, str], asyncio.Future[PageAnswer]] | None = None
        self.ask_text: Callable[[RelayedRequest, Passed], Callable[[], None]] | None = None
        self.instance = secrets.token_hex(8)
        self._links: set[GatewayConnection] = set()
        self._beating: asyncio.Task[None] | None = None

    @property
    def links(self) -> tuple[GatewayConnection, ...]:
        """Connections of the gateways that are joined."""
        return tuple(link for link in self._links if link.name)

    def start(self) -> None:
        """Start sending the state to the gateways at regular intervals."""
        self._beating = asyncio.create_task(self._beat(), name="engine server")

    async def stop(self) -> None:
        """Close the connections to all gateways. Safe to call twice."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        for link in list(self._links):
            link.close()

    def protocol(self, *, guarded: bool = False) -> GatewayConnection:
        """The protocol of one connection; where ``guarded`` is true, the gateway must know the token."""
        return GatewayConnection(self, guarded=guarded)

    def statuses(self) -> list[GatewayStatus]:
        """The status of each gateway, by name."""
        now_s, found = time.monotonic(), []
        for name, status in sorted(self.gateways.items()):
            link = next((one for one in self.links if one.name == name), None)
            status.connected = link is not None
            status.silent_s = 0.0 if link is None else now_s - link.heard_s
            status.received, status.ended = self.ledger.received[name], self.ledger.ended[name]
            found.append(status)
        return found

    def tell(self) -> None:
        """Send the state to every gateway now."""
        views = () if self.engine is None else self.engine.replicas()
        away_s = 0.0 if self.state.controller else time.monotonic() - self.state.left_s
        (piece,) = _complete_message(
            {
                "m": m.STATE,
                "replicas": m.views_to_json(views),
                "settings": self.state.settings,
                "charges": self.state.charges,
                "controller": self.state.controller,
                "away_s": away_s,
                "marks": self.state.marks,
            }
        )
        for link in self.links:
            link.write(piece)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(m.BEAT_S / 4)
            self.tell()
            now_s = time.monotonic()
            for link in list(self._links):
                if now_s - link.heard_s > m.SILENT_S:
                    link.close()

    def joined(self, link: GatewayConnection, header: Mapping[str, Any]) -> str:
        """Admit a gateway; return why it is refused, empty where it is admitted."""
        name = str(header.get("name", ""))
        if header.get("protocol") != m.PROTOCOL:
            return f"this engine server speaks protocol {m.PROTOCOL}, the gateway {header.get('protocol')}"
        if not name or not name.isprintable() or len(name) > 63:
            return "a gateway needs a name of at most 63 characters"
        if link.guarded:
            known = self.secret is not None and m.proof(self.secret, link.nonce, name)
            if not known or not hmac.compare_digest(known, str(header.get("proof", ""))):
                return "the token is wrong"
        for other in self.links:
            if other.name == name:
                if time.monotonic() - other.heard_s < 2 * m.BEAT_S:
                    return f"there is a gateway {name!r} already"
                other.close()
        link.name, link.process = name, str(header.get("process", ""))
        pid = 0 if link.guarded else int(header.get("pid", 0))
        self.gateways[name] = GatewayStatus(
            name, str(header.get("url", "")), pid, str(header.get("version", "")), str(header.get("start", ""))
        )
        return ""

    def left(self, link: GatewayConnection) -> None:
        """Handle the end of a gateway's connection."""
        self._links.discard(link)
        if link.name:
            self.ledger.lose(id(link), time.monotonic())


class GatewayConnection(asyncio.Protocol):
    """The engine server's connection to one gateway.

    Attributes:
        name: Its name; empty until it has joined.
        process: Identifies its process.
        heard_s: When its last message arrived, on the monotonic clock.
        nonce: Random text that its proof must be made from.
    """

    def __init__(self, server: EngineServer, *, guarded: bool) -> None:
        self.server, self.guarded = server, guarded
        self.name, self.process, self.nonce = "", "", secrets.token_hex(16)
        self.heard_s = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._texts: dict[int, Callable[[], None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Challenge a gateway that has connected (asyncio callback)."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.server._links.add(self)
        self.send({"m": m.CHALLENGE, "nonce": self.nonce, "protocol": m.PROTOCOL})

    def connection_lost(self, exc: Exception | None) -> None:
        """Withdraw the requests of a gateway that has disconnected (asyncio callback)."""
        self._transport = None
        for task in self._running.values():
            task.cancel()
        for withdraw in list(self._texts.values()):
            withdraw()
        self.server.left(self)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, which may end within a message (asyncio callback)."""
        self.heard_s = time.monotonic()
        try:
            for frame in self._frames.feed(data):
                self._take(frame.header, frame.tensors)
        except (DataError, KeyError, TypeError, ValueError) as error:
            _log.warning("a message of gateway %r cannot be read: %r", self.name, error)
            self.send({"m": m.REFUSED, "why": f"a message cannot be read: {error!r}"})
            self.close()

    def send(self, header: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send one message; do nothing where the gateway is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(encode(header, tensors or {}))

    def write(self, piece: bytes | memoryview) -> None:
        """Send an encoded message."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(piece)

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort() if self.name else self._transport.close()

    def _take(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        kind = header.get("m")
        if not self.name:
            why = self.server.joined(self, header) if kind == m.JOIN else "a gateway joins first"
            if why:
                self.send({"m": m.REFUSED, "why": why})
                self.close()
                return
            self.send({"m": m.WELCOME, "instance": self.server.instance})
            self.server.tell()
        elif kind == m.INFER:
            self._infer(header, tensors)
        elif kind == m.END:
            self._end(header)
        elif kind == m.CANCEL:
            running = self._running.get(int(header["n"]))
            if running is not None:
                running.cancel()
            withdraw = self._texts.pop(int(header["n"]), None)
            if withdraw is not None:
                withdraw()
        elif kind == m.BEAT:
            status = self.server.gateways[self.name]
            status.connections, status.cpu_s = int(header["connections"]), float(header["cpu_s"])
        elif kind == m.LABEL:
            status_code, content = self.server.labels.label(str(header["s"]), tensors["body"].tobytes())
            self._content(int(header["n"]), status_code, _JSON, content)
        elif kind == m.PAGE:
            self._do(self._page(header))
        elif kind == m.TEXT:
            self._text(int(header["n"]), m.text_of(header, tensors))

    def _text(self, number: int, request: RelayedRequest) -> None:
        """Pass a request for a language model to the controller, which answers it."""

        def passed(part: RelayedPart) -> None:
            if not part.more:
                self._texts.pop(number, None)
            self.send(*m.part_message(number, part))

        if self.server.ask_text is None:
            passed(RelayedPart(more=False, error="the controller is away, and with it the language models"))
        else:
            self._texts[number] = self.server.ask_text(request, passed)

    def _do(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _infer(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        number, service = int(header["n"]), str(header["s"])
        self.server.ledger.open(self.name, id(self), number, service, time.monotonic() - float(header["a"]))
        task = self._do(self._answer(number, service, m.request_of(header, tensors)))
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def _answer(self, number: int, service: str, request: InferRequest) -> None:
        engine = self.server.engine
        try:
            if engine is None:
                raise RequestError(_AWAY, Outcome.UNAVAILABLE, retry_after_s=1.0)
            response = await engine.infer(service, request)
        except RequestError as error:
            self._answered(number, error.variant, "", error.service_s, error.cpu_s)
            if error.outcome is Outcome.UNKNOWN and self._starts(engine, service, request):
                error = RequestError(f"the replicas of {service} are starting", Outcome.UNAVAILABLE, retry_after_s=1.0)
            self.send(m.error_header(number, error))
            return
        variant, replica = response.variant, response.replica
        self._answered(number, variant, replica, response.service_s, response.cpu_s)
        self.server.latest[service] = request
        header = {
            "m": m.ANSWER,
            "n": number,
            "v": variant,
            "r": replica,
            "w": response.start_s - response.arrival_s,
            "s": response.service_s,
            "c": response.cpu_s,
            "k": response.attempts,
            "g": response.batch,
        }
        try:
            self.send(header, response.outputs)
        except DataError as error:
            self.send(m.error_header(number, RequestError(str(error), Outcome.FAILED, variant=variant)))

    def _starts(self, engine: Engine | None, service: str, request: InferRequest) -> bool:
        """Whether a service of the site is unknown to the engine because its first replicas are not ready."""
        known = service in self.server.state.settings.get("services", ())
        runs = engine is not None and any(view.spec.service == service for view in engine.replicas())
        return known and not (request.variant and runs)

    def _answered(self, number: int, variant: str, replica: str, service_s: float, cpu_s: float) -> None:
        if variant:
            self.server.ledger.answered(id(self), number, variant, replica, service_s, cpu_s)

    def _end(self, header: Mapping[str, Any]) -> None:
        record = m.record_of(header, time.monotonic())
        if record.service not in self.server.state.settings.get("services", ()):
            record = record._replace(service="")
        source = (self.process, int(header.get("q", 0)))
        closed = self.server.ledger.close(self.name, id(self), int(header["n"]), record, source)
        if closed and record.outcome is Outcome.OK and header.get("id"):
            self.server.labels.answered(record.service, str(header["id"]), record.variant)

    async def _page(self, header: Mapping[str, Any]) -> None:
        """Request a page from the controller and send it to the gateway."""
        number, ask = int(header["n"]), self.server.ask_page
        answer: PageAnswer = (503, _JSON, b'{"error":"the controller is away"}')
        if ask is not None:
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(m.SILENT_S / 2):
                    answer = await ask(str(header["path"]), str(header["query"]), str(header["accept"]))
        self._content(number, *answer)

    def _content(self, number: int, status: int, headers: dict[str, str], content: bytes) -> None:
        body = np.frombuffer(content, np.uint8)
        self.send({"m": m.CONTENT, "n": number, "status": status, "headers": headers}, {"body": body})


def _complete_message(header: dict[str, Any]) -> list[bytes]:
    """One message in one piece."""
    return [b"".join(bytes(piece) for piece in encode(header, {}))]
