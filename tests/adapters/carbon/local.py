"""A real HTTP server on 127.0.0.1 that plays a carbon service."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from joulery.adapters.carbon.http import CarbonService, Patience


@dataclass
class Question:
    """What came in."""

    path: str
    params: dict[str, str]
    headers: dict[str, str]


@dataclass
class Answer:
    """What goes out."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Local:
    """The running server: where it is, what it was asked, how long its clients slept."""

    url: str
    questions: list[Question]
    slept: list[float]

    def service(self, name: str, now_s: float = 1_700_000_000.0, tries: int = 3, spread: float = 0.0) -> CarbonService:
        patience = Patience(timeout_s=5.0, tries=tries)
        wait = self.slept.append
        return CarbonService(name, self.url, patience, sleep=wait, now_s=lambda: now_s, spread=lambda: spread)


@contextmanager
def served(answer: Callable[[Question], Answer]) -> Iterator[Local]:
    """A server that answers every GET with ``answer(question)``; its body is JSON unless it is bytes."""
    local = Local("", [], [])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            question = Question(
                parts.path, dict(parse_qsl(parts.query)), {k.lower(): v for k, v in self.headers.items()}
            )
            local.questions.append(question)
            reply = answer(question)
            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in {"content-type": "application/json", **reply.headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            local.url = f"http://127.0.0.1:{server.server_address[1]}"
            yield local
        finally:
            server.shutdown()
            thread.join()
