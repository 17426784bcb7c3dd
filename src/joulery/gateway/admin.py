"""The routes outside the inference protocol: ``/metrics``, and mounted routes (the dashboard)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from joulery.gateway.metrics import Metrics


def admin_app(metrics: Metrics, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Create the application for all paths outside ``/v2``.

    Args:
        metrics: The metrics of ``/metrics``.
        routes: Further routes.
    """

    async def exposition(request: Request) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return Starlette(
        routes=[Route("/metrics", exposition), *routes], exception_handlers={HTTPException: _error_as_json}
    )


async def _error_as_json(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
