"""HTTP API of the monitor, as an ASGI application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from pydantic_core import PydanticCustomError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from joulery.config.parsing.quantity import TIME, parse_quantity
from joulery.domain.errors import CapabilityError, ConfigError, DataError, JouleryError
from joulery.runtime.measuring.monitor import Monitor, WatchedProcess

_COLUMNS = "t_ns,device,component,power_w,counter_j,quality"
_OF = ("process", "machine")
_FIELDS = frozenset({"pid", "period", "out"})


def monitor_app(monitor: Monitor) -> Starlette:
    """Create the HTTP API of a monitor."""

    async def start(request: Request) -> Response:
        pid, out, period_s = _order(await request.body())
        return _json(_described(await run_in_threadpool(monitor.start, pid, out=out, period_s=period_s)), 201)

    async def sessions(request: Request) -> Response:
        return _json([_described(watched) for watched in monitor.watched])

    async def power(request: Request) -> Response:
        since = request.query_params.get("since_ns", "0")
        if not since.isdigit():
            raise ConfigError("not a time", pointer="since_ns", got=since, expected="Unix nanoseconds")
        of = request.query_params.get("of", "process")
        if of not in _OF:
            raise ConfigError("no such power", pointer="of", got=of, expected=" or ".join(_OF))
        name, whole = request.path_params["name"], of == "machine"
        rows = await run_in_threadpool(lambda: list(monitor.read(name, int(since), whole=whole)))
        lines = [",".join("" if cell is None else str(cell) for cell in row) for row in rows]
        return PlainTextResponse("\n".join([_COLUMNS, *lines, ""]), media_type="text/csv")

    async def stop(request: Request) -> Response:
        return _json(await run_in_threadpool(monitor.stop, request.path_params["name"]))

    return Starlette(
        routes=[
            Route("/sessions", start, methods=["POST"]),
            Route("/sessions", sessions, methods=["GET"]),
            Route("/sessions/{name}/power", power, methods=["GET"]),
            Route("/sessions/{name}", stop, methods=["DELETE"]),
        ],
        exception_handlers={JouleryError: _refused},  # type: ignore[dict-item]  # it takes any exception
    )


def _order(body: bytes) -> tuple[int, Path | None, float | None]:
    """Parse the body of a POST: process id, run folder and period.

    Raises:
        ConfigError: The body is not such an object.
    """
    try:
        order = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"no JSON: {error}", expected='{"pid": 1234}') from error
    if not isinstance(order, dict) or type(order.get("pid")) is not int:
        raise ConfigError(
            "not a process", pointer="pid", got=body.decode(errors="replace")[:80], expected='{"pid": 1234}'
        )
    if unknown := sorted(set(order) - _FIELDS):
        raise ConfigError("no such key", got=", ".join(unknown), expected=", ".join(sorted(_FIELDS)))
    try:
        period_s = None if order.get("period") is None else parse_quantity(str(order["period"]), TIME)
    except PydanticCustomError as error:
        raise ConfigError(f"no time: {error}", pointer="period", got=str(order["period"])) from error
    return order["pid"], None if order.get("out") is None else Path(str(order["out"])), period_s


def _described(watched: WatchedProcess) -> dict[str, Any]:
    return {"id": watched.name, "run": str(watched.path), "pid": watched.process, "warnings": watched.recorder.warnings}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE), status, media_type="application/json")


async def _refused(request: Request, error: JouleryError) -> Response:
    status = 404 if isinstance(error, DataError) else 409 if isinstance(error, CapabilityError) else 400
    return _json({"error": {"kind": error.kind, "message": str(error), "hint": error.hint}}, status)
