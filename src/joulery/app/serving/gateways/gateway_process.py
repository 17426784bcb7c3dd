"""The process of one of several gateways: joins an engine server and answers clients with its engine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from joulery import __version__
from joulery.adapters.engines.shared.client import EngineClient, GatewayName
from joulery.app.wiring.grpc import grpc_server
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.serving.engine import RequestRecord
from joulery.gateway.access import address, read_token
from joulery.gateway.app import Gateway
from joulery.gateway.body import Limits
from joulery.gateway.joined.admin import forwarding_app
from joulery.gateway.joined.labels import LatestCall
from joulery.gateway.joined.language_models import RelayedText
from joulery.gateway.joined.metrics import OwnMetrics
from joulery.gateway.server import GatewayServer, ServerLimits
from joulery.gateway.tls import TlsFiles, client_context

_PATIENCE_S = 0.2


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """The flags of ``joulery gateway``.

    Attributes:
        join: ``unix:PATH`` or ``HOST:PORT`` of the engine server.
        listen: ``HOST:PORT`` for clients; port 0 takes a free one.
        name: Name of the gateway.
        token_file: File with the bearer token of clients; None for no token.
        join_token_file: File with the token of gateways on other machines; None on the engine server's own machine.
        tls: Certificate and key; None for plain HTTP.
        shared_port: Whether other gateways listen on the same port.
        open_monitoring: Whether probes and Prometheus need no token.
        drain_s: Seconds that a stop waits for running requests.
        give_up_s: Seconds without the engine server after which the gateway ends; None for never.
        start: Hash of the version and settings that the gateway was started with.
        join_certificate: Certificate that encrypts the connection to the engine server; None for no encryption.
        grpc: ``HOST:PORT`` of the Open Inference Protocol over gRPC; None for HTTP alone.
    """

    join: str
    listen: str
    name: str
    token_file: Path | None = None
    join_token_file: Path | None = None
    tls: TlsFiles | None = None
    shared_port: bool = False
    open_monitoring: bool = False
    drain_s: float = 10.0
    give_up_s: float | None = None
    start: str = ""
    join_certificate: Path | None = None
    grpc: str | None = None


def tls_files(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """The certificate and key; None for plain HTTP.

    Raises:
        ConfigError: One is given without the other.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("TLS needs a certificate and its key", expected="--tls-certificate and --tls-key")
    return TlsFiles(certificate, key)


async def run_gateway(request: GatewayRequest, ready: Callable[[str, str, str], None]) -> None:
    """Answer clients until SIGTERM or SIGINT.

    Args:
        request: The flags of the gateway.
        ready: Receives the address, the name and the gRPC address (empty without gRPC) once the gateway listens.

    Raises:
        JouleryError: A flag is wrong, the port is not available, or the engine server refuses the gateway or was away
            for too long.
    """
    host, port = address(request.listen)
    token = None if request.token_file is None else read_token(request.token_file)
    secret = None if request.join_token_file is None else read_token(request.join_token_file).encode()
    made = _Parts(request, token, secret)
    server = GatewayServer(
        made.gateway,
        host,
        port,
        limits=ServerLimits(drain_s=request.drain_s),
        protected=token is not None,
        tls=request.tls,
        shared_port=request.shared_port,
        beside=grpc_server(
            made.gateway,
            request.grpc,
            token=token,
            tls=request.tls,
            drain_s=request.drain_s,
            joined=True,
            shared_port=request.shared_port,
        ),
    )
    made.connections = lambda: server.connections
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    made.engine.url = server.url
    joining = asyncio.create_task(made.engine.run(), name="join")
    try:
        ready(server.url, request.name, server.beside_address)
        await _until(stop, made.engine, request.give_up_s)
    finally:
        await server.stop()
        await made.engine.close()
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)


class _Parts:
    """The gateway, its connection to the engine server, and its metrics."""

    def __init__(self, request: GatewayRequest, token: str | None, secret: bytes | None) -> None:
        self.connections: Callable[[], int] = lambda: 0
        self._text_ready = False
        self.engine = EngineClient(
            request.join,
            GatewayName(request.name, __version__, request.start, secret),
            tls=None if request.join_certificate is None else client_context(request.join_certificate),
            connections=lambda: self.connections(),
            changed=self._configure,
        )
        self.metrics, self._call, registry = OwnMetrics(request.name, self.engine), LatestCall(), CollectorRegistry()
        registry.register(self.metrics)
        self.gateway = Gateway(
            self.engine,
            token=token,
            open_monitoring=request.open_monitoring,
            attribute=self.engine.attribute,
            telemetry=(self.metrics.count, self._record),
            admin=forwarding_app(self.engine.page, registry),
        )
        self.gateway.feedback = self._call
        self.gateway.label = self.engine.label
        self.gateway.health = lambda: _health(request.name, self.engine)

    def _configure(self, settings: Mapping[str, Any]) -> None:
        if "body_bytes" in settings:
            self.gateway.bodies.limits = Limits.of(int(settings["body_bytes"]))

        if "language_models" in settings:
            self._text_ready = bool(settings["language_models"])
            self.gateway.text = self.gateway.text or RelayedText(self.engine.text, self.gateway.bodies, self._can_write)
        else:
            self.gateway.text = None

    def _can_write(self) -> bool:
        """Whether the gateway counts as ready for language models; services answer on without the controller."""
        alone = not self.engine.replicas()
        return not alone or (self._text_ready and self.engine.controller_away_s is None and self.engine.joined)

    def _record(self, record: RequestRecord) -> None:
        self.engine.record(record, self._call.take())


def _health(name: str, engine: EngineClient) -> dict[str, Any]:
    """Further facts of the health page."""
    found: dict[str, Any] = {"gateway": name, "engine": "connected" if engine.joined else "lost"}
    if not engine.joined:
        return found | ({"reason": engine.refused} if engine.refused else {})
    away_s = engine.controller_away_s
    if away_s is None:
        return found | {"controller": "connected"}
    return found | {"controller": "lost", "controller_away_s": round(away_s, 1)}


async def _until(stop: asyncio.Event, engine: EngineClient, give_up_s: float | None) -> None:
    """Wait until ``stop`` is set.

    Raises:
        CapabilityError: The engine server refuses the gateway, or was away for too long.
    """
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), _PATIENCE_S)
        except TimeoutError:
            if engine.joined:
                continue
            if engine.refused and engine.never_joined:
                raise CapabilityError(
                    f"the engine server does not take this gateway: {engine.refused}", resource=engine.where
                ) from None
            if give_up_s is not None and time.monotonic() - engine.away_since_s > give_up_s:
                raise CapabilityError(
                    f"the engine server was away for {give_up_s:g} s", resource=engine.where
                ) from None
