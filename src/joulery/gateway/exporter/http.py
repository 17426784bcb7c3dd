"""A small HTTP server for ``/metrics`` and ``/healthz``, with few connections and short time limits."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from joulery.domain.errors import ConfigError

Render = Callable[[str], tuple[bytes, str]]
"""Returns the exposition and its content type, by the scraper's ``Accept``."""
MAX_CONNECTIONS = 16
TIMEOUT_S = 5.0
_INDEX = b"joulery export: /metrics for Prometheus, /healthz for probes\n"


class MetricsServer(ThreadingHTTPServer):
    """HTTP server that answers scrapes.

    Args:
        host, port: Where it listens; port 0 for a free one.
        render: Returns the exposition and its content type, by the scraper's ``Accept``.
        healthy: Returns an error message, empty while samples are taken.
        pointer: The flag with the address, for the error.
        page: Returns an HTML page for ``/`` and ``/dashboard``, at each request; None for none.

    Raises:
        ConfigError: The address is not available.
    """

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        host: str,
        port: int,
        render: Render,
        healthy: Callable[[], str],
        page: Callable[[], bytes] | None = None,
        pointer: str = "--port",
    ) -> None:
        self.render, self.healthy, self.page = render, healthy, page
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            taken = getattr(error, "errno", None) == errno.EADDRINUSE
            if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                pointer = "--listen"  # the address is at fault, whatever the port
            raise ConfigError(
                "another process listens there"
                if taken
                else f"cannot listen there: {getattr(error, 'strerror', None) or error}",
                pointer=pointer,
                got=f"{host}:{port}",
                hint="port 0 takes a free one" if taken else "",
            ) from error

    def server_bind(self) -> None:
        """Bind without looking the host's name up: a name server that hangs must not delay the start."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; close connections beyond the limit."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnect early."""


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S
    server: MetricsServer
    server_version, sys_version = "joulery", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.page is not None and path in ("/", "/dashboard"):
            self._answer(HTTPStatus.OK, self.server.page(), "text/html; charset=utf-8")
        elif path == "/metrics":
            self._answer(HTTPStatus.OK, *self.server.render(self.headers.get("Accept", "")))
        elif path in ("/healthz", "/health", "/-/healthy"):
            trouble = self.server.healthy()
            status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
            self._answer(status, f"{trouble or 'ok'}\n".encode(), "text/plain; charset=utf-8")
        elif path == "/":
            self._answer(HTTPStatus.OK, _INDEX, "text/plain; charset=utf-8")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain; charset=utf-8")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log scrapes."""

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
