"""The gateway's HTTP server: uvicorn with a guard that limits the resources of a connection.

The guard closes connections that send a request too slowly or do not receive their answer, limits the head of a request
and the number of connections (the longest idle one is closed for a new one), answers malformed HTTP as JSON, and
cancels a request when its client disconnects.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from joulery.config.serving import is_loopback
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ReplicaSpec, Transition
from joulery.gateway.tls import TlsFiles

if TYPE_CHECKING:
    from starlette.types import ASGIApp


_LAST = b"connection: close\r\n\r\n"
_SWEEP_S = 1.0
_LINGER_S = 2.0
_SPARE_FILES = 128
"""File descriptors left for everything that is not a client."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on clients of the server.

    Attributes:
        connections: Number of concurrent clients; lower where the process may open fewer files.
        head_bytes: Longest request line and headers.
        receive_s: Time within which a request must arrive, and an answer must be received.
        keep_alive_s: How long an idle connection stays open.
        drain_s: How long a stop waits for running requests.
    """

    connections: int = 5000
    head_bytes: int = 65536
    receive_s: float = 30.0
    keep_alive_s: float = 75.0
    drain_s: float = 10.0


class _Exchange:
    """One request on a connection. Implements :class:`joulery.gateway.app.Exchange`."""

    __slots__ = ("connection", "cycle", "task")

    def __init__(self, connection: _GuardedProtocol) -> None:
        self.connection = connection
        self.cycle = connection.cycle
        self.task: asyncio.Task[Any] | None = None

    @property
    def lost(self) -> bool:
        """Whether the client has disconnected."""
        return self.cycle.disconnected

    def begin(self) -> None:
        """Cancel the current task if the client goes away."""
        self.task = asyncio.current_task()
        self.connection.running = self

    def end(self) -> None:
        """Mark the request as finished."""
        self.connection.running = None
        # Here ends a circle of references: without it each request waits for the garbage collector.
        self.task = None
        self.cycle.scope["extensions"] = {}

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, last: bool = False) -> bool:
        """Send an answer in one write, where uvicorn needs two; return False to leave special cases to uvicorn."""
        cycle, connection = self.cycle, self.connection
        if cycle.disconnected or cycle.response_started or connection.flow.write_paused:
            return False
        if cycle.scope["method"] == "HEAD":
            return False
        unread = last and cycle.more_body
        if unread:
            cycle.keep_alive = False
        cycle.response_started = cycle.response_complete = True
        pieces = [STATUS_LINE[status]]
        for name, value in (*connection.server_state.default_headers, *headers):
            pieces += (name, b": ", value, b"\r\n")
        pieces += (b"content-length: %d\r\n" % len(body), b"\r\n" if cycle.keep_alive else _LAST, body)
        connection.transport.write(b"".join(pieces))
        cycle.message_event.set()
        if unread:
            connection.linger()
        elif not cycle.keep_alive:
            connection.transport.close()
        cycle.on_response()
        return True


class _GuardedProtocol(HttpToolsProtocol):
    """A connection whose time and size are limited."""

    limits: ServerLimits
    most_connections: int
    idle: dict[_GuardedProtocol, None]
    """Connections of the server without a request, the longest idle one first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.running: _Exchange | None = None
        self.late_at_s = float("inf")
        self._refused = False
        self._in_head = True
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a client, closing the longest idle connection if there are too many (asyncio callback)."""
        super().connection_made(transport)
        self.late_at_s = self.loop.time() + self.limits.receive_s
        if len(self.connections) > self.most_connections:
            if not self.idle:
                self._refuse(503, "there are too many connections", b"retry-after: 1\r\n")
                return
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.close()
        self.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request of a client that has disconnected (asyncio callback)."""
        super().connection_lost(exc)
        self.idle.pop(self, None)
        if self.running is not None and self.running.task is not None:
            self.running.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request (asyncio callback)."""
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.head_bytes:
            self._refuse(431, f"the head of the request is longer than {self.limits.head_bytes} bytes")

    def on_message_begin(self) -> None:
        """Handle the first byte of a request (httptools callback)."""
        super().on_message_begin()
        self.idle.pop(self, None)
        self.late_at_s = self.loop.time() + self.limits.receive_s

    def on_headers_complete(self) -> None:
        """Handle the complete head of a request (httptools callback)."""
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()
        self.scope["extensions"] = {"joulery.exchange": cast(dict[object, object], _Exchange(self))}

    def on_message_complete(self) -> None:
        """Handle the complete request (httptools callback)."""
        self._in_head = True
        self.late_at_s = float("inf")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Mark the connection as idle after an answer (uvicorn callback)."""
        super().on_response_complete()
        receiving = self.late_at_s < float("inf")
        if self.cycle.response_complete and not receiving and not self.transport.is_closing():
            self.idle[self] = None

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not receive its answer (asyncio callback)."""
        self.late_at_s = self.loop.time() + self.limits.receive_s
        super().pause_writing()

    def resume_writing(self) -> None:
        """Clear the time limit once the client receives its answer again (asyncio callback)."""
        self.late_at_s = float("inf")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP (uvicorn callback)."""
        self._refuse(400, msg)

    def linger(self) -> None:
        """End the connection, but receive the client's remaining data for a while, so that it can read the answer.

        If data is unread on closing, the kernel resets the connection, and the client may never read the answer.
        """
        self._refused = True
        self.late_at_s = self.loop.time() + _LINGER_S
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS cannot: the client reads the answer by its length
            self.transport.write_eof()

    def _refuse(self, status: int, message: str, headers: bytes = b"") -> None:
        body = orjson.dumps({"error": message})
        self.transport.write(
            b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b"
            % (status, len(body), headers, body)
        )
        self.linger()


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: the caller handles signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and set ``listening``."""
        await super().startup(sockets=sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class BesideServer(Protocol):
    """A server of another protocol that starts and stops with the HTTP server."""

    @property
    def address(self) -> str:
        """Its address for clients, host:port."""
        ...

    async def start(self) -> None:
        """Listen."""
        ...

    async def stop(self) -> None:
        """Take no more requests, let running ones finish."""
        ...


class GatewayServer:
    """HTTP server of an application. Use ``start`` and ``stop`` on one event loop.

    Args:
        app: The application that answers.
        host: Where to listen.
        port: Where to listen; 0 for a free one.
        limits: Limits on clients.
        protected: Whether the application requires a token.
        tls: Its certificate and key; None for plain HTTP.
        beside: Another server of the same gateway (gRPC): it starts after this one and stops with it.
        shared_port: Whether other gateways listen on the same port (``SO_REUSEPORT``).

    Raises:
        ConfigError: The host is reachable from other machines and there is no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        limits: ServerLimits = ServerLimits(),
        protected: bool = False,
        tls: TlsFiles | None = None,
        beside: BesideServer | None = None,
        shared_port: bool = False,
    ) -> None:
        if not protected:
            only_loopback(host, "serving.listen")
        self.host = host
        self.port = port
        self.limits = limits
        self.tls = tls
        self.beside = beside
        self.shared_port = shared_port
        self._app = app
        self._server: _QuietServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Its URL for clients."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{self.host}]:{self.port}" if ":" in self.host else f"{scheme}://{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """Number of connected clients."""
        return 0 if self._server is None else len(self._server.server_state.connections)

    @property
    def beside_address(self) -> str:
        """Address (host:port) of the other server of the gateway; empty without one."""
        return "" if self.beside is None else self.beside.address

    async def start(self) -> None:
        """Listen.

        Raises:
            CapabilityError: The port is in use or may not be taken.
            ConfigError: There is no such host, or the certificate and key cannot be used.
        """
        if self.tls is not None:
            self.tls.check()
        listener = listening_socket(self.host, self.port, shared_port=self.shared_port)
        self.port = listener.getsockname()[1]
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = self.limits.connections
        if files != resource.RLIM_INFINITY:
            most = min(most, max(16, files - _SPARE_FILES))
        fields = {"limits": self.limits, "most_connections": most, "idle": {}}
        config = uvicorn.Config(
            self._app,
            http=type("GuardedProtocol", (_GuardedProtocol,), fields),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ssl_certfile=None if self.tls is None else self.tls.certificate,
            ssl_keyfile=None if self.tls is None else self.tls.key,
            timeout_keep_alive=self.limits.keep_alive_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=self.limits.drain_s,  # type: ignore[arg-type]
        )
        self._server = _QuietServer(config)
        serving = asyncio.create_task(self._server.serve([listener]), name="gateway")
        self._tasks = [serving, asyncio.create_task(self._sweep(self._server), name="gateway sweep")]
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if serving.done():
            await serving
        if self.beside is not None:
            try:
                await self.beside.start()
            except BaseException:
                await self.stop()
                raise

    async def stop(self) -> None:
        """Take no more connections, let running requests finish within ``drain_s``. Safe to call twice."""
        if self._server is None:
            return
        self._server.should_exit = True
        serving, sweeping = self._tasks
        sweeping.cancel()
        beside = [] if self.beside is None else [self.beside.stop()]
        await asyncio.gather(serving, sweeping, *beside, return_exceptions=True)
        self._server = None

    async def wait(self) -> None:
        """Wait until the server has stopped.

        Raises:
            Exception: The server ended for another reason than ``stop``.
        """
        if self._tasks:
            await self._tasks[0]

    async def _sweep(self, server: _QuietServer) -> None:
        """Close connections that exceed their time limit."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_SWEEP_S, self.limits.receive_s / 4))
            now_s = loop.time()
            for connection in list(server.server_state.connections):
                if not isinstance(connection, _GuardedProtocol) or connection.late_at_s > now_s:
                    continue
                # A client with a next request behind its last one is kept waiting by the server.
                if not connection.flow.read_paused:
                    connection.transport.abort()


def only_loopback(host: str, pointer: str) -> None:
    """Refuse to listen without a token where other machines can connect.

    Raises:
        ConfigError: ``host`` is not a loopback address.
    """
    if not is_loopback(host):
        raise ConfigError(
            "listening beyond this machine needs a token",
            pointer=pointer,
            got=host,
            hint="add serving.token_file, or listen on 127.0.0.1",
        )


def listening_socket(host: str, port: int, *, shared_port: bool = False) -> socket.socket:
    """Open a listening socket.

    Raises:
        CapabilityError: The port is in use or may not be taken.
        ConfigError: There is no such host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048, reuse_port=shared_port)
    except OSError as error:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        hint = "choose another: --listen HOST:PORT, or serving.listen in the site file; port 0 takes a free one"
        if error.errno == errno.EADDRINUSE:
            raise CapabilityError(f"cannot listen on {where}: the port is in use", resource=where, hint=hint) from error
        # A name that cannot be resolved has a negative number.
        if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:
            raise ConfigError(
                "this machine has no such address", pointer="serving.listen", got=where, hint=hint
            ) from error
        raise CapabilityError(f"cannot listen on {where}: {error.strerror}", resource=where, hint=hint) from error
    listener.setblocking(False)
    return listener


async def serve(
    engine: Engine,
    server: GatewayServer,
    target: Sequence[ReplicaSpec],
    ready: Callable[[Transition], None] = lambda transition: None,
) -> None:
    """Serve ``target`` until SIGTERM or SIGINT, then stop: no new connections, running requests finish, replicas end.

    The port is opened first, so that one in use is an error before any model is loaded; until ``ready`` is called the
    gateway reports that it is alive and not ready.

    Raises:
        JouleryError: The port or a replica is not available; nothing is left running.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        await server.start()
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(engine.apply(target))
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            ready(starting.result())
            serving = asyncio.create_task(server.wait())
            await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
    finally:
        await server.stop()
        await engine.close()
        for number in signals:
            loop.remove_signal_handler(number)
