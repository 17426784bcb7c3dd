"""The routes of the dashboard and of the JSON API that it uses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from joulery.domain.serving.timeline import NowSnapshot
from joulery.ui.dashboard.screen import screen
from joulery.ui.kit.html import static_text

_TYPES = {
    "uplot.min.js": "text/javascript",
    "charts.js": "text/javascript",
    "dashboard.js": "text/javascript",
    "uplot.min.css": "text/css",
    "joulery.css": "text/css",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
Latest = Callable[[], NowSnapshot | None]


def dashboard_routes(latest: Latest) -> list[BaseRoute]:
    """All routes of the dashboard.

    Args:
        latest: Returns the latest snapshot; None before the first. Called once per request, must not block.

    Returns:
        ``/`` and ``/dashboard`` (the page), ``/static/NAME``, ``/api/screen`` (HTML fragment), ``/api/now`` and
        ``/api/decisions`` (JSON; ``?since=`` Unix seconds leaves out what the caller has).
    """
    api = _Api(latest)
    return [
        Route("/", _home),
        Route("/dashboard", _page),
        Route("/static/{name}", _static),
        Route("/api/screen", api.screen),
        Route("/api/now", api.now),
        Route("/api/decisions", api.decisions),
    ]


class _Api:
    def __init__(self, latest: Latest) -> None:
        self._latest = latest

    async def screen(self, request: Request) -> Response:
        snapshot = self._latest()
        if snapshot is None:
            return _starting()
        return Response(
            screen(snapshot.site), media_type="text/html", headers={**_HEADERS, "cache-control": "no-store"}
        )

    async def now(self, request: Request) -> Response:
        snapshot, since_s = self._latest(), _since(request)
        if since_s is None:
            return _bad_since(request)
        if snapshot is None:
            return _starting()
        return _json(
            {
                "site": snapshot.site,
                "started_s": snapshot.started_s,
                "now_s": snapshot.now_s,
                "ticks": [tick for tick in snapshot.ticks if tick.t_s > since_s],
                "warnings": snapshot.warnings,
                "meters": snapshot.meters,
            }
        )

    async def decisions(self, request: Request) -> Response:
        snapshot, since_s = self._latest(), _since(request)
        if since_s is None:
            return _bad_since(request)
        if snapshot is None:
            return _starting()
        return _json({"decisions": [record for record in snapshot.decisions if record.t_s > since_s]})


def _since(request: Request) -> float | None:
    """The ``since`` of a request, minus infinity without one; None when it is not a number."""
    text = request.query_params.get("since")
    if text is None:
        return -math.inf
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _json(value: Any, status: int = 200, **headers: str) -> Response:
    """A JSON response: dataclasses by their fields, NaN and infinity as null."""
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, status, {**_HEADERS, "cache-control": "no-store", **headers}, "application/json")


def _starting() -> Response:
    error = {"kind": "starting", "message": "no reading yet", "hint": "ask again in a second"}
    return _json({"error": error}, 503, **{"retry-after": "1"})


def _bad_since(request: Request) -> Response:
    text = request.query_params["since"]
    error = {"kind": "config", "message": f"since is {text!r}, expected Unix seconds", "hint": "?since=1790000000.5"}
    return _json({"error": error}, 400)


async def _home(request: Request) -> Response:
    return RedirectResponse("/dashboard", 307, _HEADERS)


async def _page(request: Request) -> Response:
    headers = {**_HEADERS, "cache-control": "no-cache"}
    return Response(static_text("dashboard.html"), media_type="text/html", headers=headers)


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _TYPES:
        return _json({"error": {"kind": "unknown", "message": "no such file", "hint": ""}}, 404)
    headers = {**_HEADERS, "cache-control": "no-cache", "etag": _etag(name)}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(static_text(name), media_type=_TYPES[name], headers=headers)


@cache
def _etag(name: str) -> str:
    return f'"{hashlib.sha256(static_text(name).encode()).hexdigest()[:20]}"'
