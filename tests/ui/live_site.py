"""The dashboard under a real server on a free port, with snapshots that a test sets."""

import contextlib
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse

from joulery.domain.serving.timeline import NowSnapshot
from joulery.ui.dashboard import dashboard_routes
from tests.waiting import wait_until


class LiveSite:
    """What the server shows: ``snapshot``, or 401 without ``token`` where one is set."""

    def __init__(self) -> None:
        self.snapshot: NowSnapshot | None = None
        self.token: str | None = None
        self.url = ""

    def app(self) -> Starlette:
        app = Starlette(routes=dashboard_routes(lambda: self.snapshot))

        async def guarded(scope, receive, send):
            secret = f"Bearer {self.token}".encode()
            if (
                self.token
                and scope.get("path", "").startswith("/api/")
                and dict(scope["headers"]).get(b"authorization") != secret
            ):
                await JSONResponse({"error": {}}, 401)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return guarded


@contextlib.contextmanager
def live_site() -> Iterator[LiveSite]:
    """Serve until the block ends."""
    site = LiveSite()
    server = uvicorn.Server(uvicorn.Config(site.app(), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, "the server")
    site.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield site
    finally:
        server.should_exit = True
        thread.join()
