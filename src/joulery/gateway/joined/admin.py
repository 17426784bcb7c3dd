"""The routes outside the inference protocol where gateways share an engine: the controller renders the pages.

While the controller is away a gateway answers ``/metrics`` with its own metrics, and other pages with 503.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PageAnswer = tuple[int, dict[str, str], bytes]
"""HTTP status, headers and body."""
Page = Callable[[str, str, str], Awaitable[PageAnswer]]
"""A page by path, query and accepted types."""
_PLAIN = "text/plain"
_LENGTH = b"content-length"


def forwarding_app(page: Page, own: CollectorRegistry) -> Starlette:
    """Create the application of a gateway for all paths outside ``/v2``.

    Args:
        page: Requests a page from the controller.
        own: The gateway's own metrics.
    """

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(_PLAIN)
        mine = encode(own)
        status, _, body = await page("/metrics", "", _PLAIN)
        return Response(mine + body if status == 200 else mine, media_type=content_type)

    async def forwarded(request: Request) -> Response:
        query = request.url.query
        status, headers, body = await page(request.url.path, query, request.headers.get("accept", ""))
        return Response(body, status, headers=headers)

    return Starlette(routes=[Route("/metrics", metrics), Route("/{path:path}", forwarded)])


async def page_of(app: Any, path: str, query: str, accept: str) -> PageAnswer:
    """Render a page with an ASGI application.

    Args:
        app: The application.
        path, query, accept: Path, query and accepted types of a GET request.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"accept", accept.encode()), (b"host", b"controller")],
        "client": None,
        "server": ("controller", 80),
    }
    status, headers, body = 500, {"content-type": _PLAIN}, bytearray()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = int(message["status"])
            headers = {name.decode(): value.decode() for name, value in message["headers"] if name != _LENGTH}
        else:
            body.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, bytes(body)
