"""The gateway's ASGI application: the Open Inference Protocol over HTTP in front of an engine.

Raw ASGI, because the inference path is the hot one: a request passes one function here. Everything outside ``/v2`` goes
to the ``admin`` application. A variant of a service is a version of its model in the protocol: without one, the
policy's mix answers.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import orjson

from joulery import __version__
from joulery.domain.errors import DataError
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import (
    Attributor,
    EnergyShare,
    InferRequest,
    InferResponse,
    Outcome,
    ReplicaState,
    ReplicaView,
    RequestError,
    RequestRecord,
    Telemetry,
)
from joulery.gateway.body import BodyReader, Limits, RefusedError, first_header, length_of
from joulery.gateway.feedback import Feedback
from joulery.gateway.openai_protocol import error_document
from joulery.gateway.protocol import parse, render
from joulery.steady_time import unix_s

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

Headers = list[tuple[bytes, bytes]]

STATUS = {
    Outcome.OK: 200,
    Outcome.INVALID: 400,
    Outcome.UNKNOWN: 404,
    Outcome.OVERLOADED: 429,
    Outcome.CANCELLED: 499,
    Outcome.FAILED: 500,
    Outcome.CRASHED: 502,
    Outcome.UNAVAILABLE: 503,
    Outcome.DEADLINE: 504,
}
"""The HTTP status of every outcome; no client receives 499, since it has disconnected."""

OPEN_PATHS = ("/v2/health/live", "/", "/dashboard")
"""Paths that need no token: the liveness probe, and pages without data (and all paths under ``/static/``)."""
_OPENAI_PATHS = ("/v1", "/chat/completions", "/completions", "/responses", "/embeddings", "/models")
"""Paths of clients of language models whose base_url lacks /v1."""
MONITORING_PATHS = ("/metrics", "/v2/health/ready")
"""Paths of Prometheus and probes: need no token if ``serving.open_monitoring`` is set."""

EXTENSIONS = ("binary_tensor_data",)
"""Extensions of the protocol that this server supports."""

_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")
_NAN = float("nan")


class Exchange(Protocol):
    """Server extension of ASGI for one request, in ``scope["extensions"]["joulery.exchange"]``."""

    @property
    def lost(self) -> bool:
        """Whether the client has disconnected."""
        ...

    def begin(self) -> None:
        """Cancel the current task if the client goes away, until ``end``."""
        ...

    def end(self) -> None:
        """Mark the request as finished."""
        ...

    def answer(self, status: int, headers: Headers, body: bytes, *, last: bool = False) -> bool:
        """Send the whole answer in one write; return False if it must be sent as ASGI messages instead.

        Args:
            status, headers, body: The answer, without its length.
            last: Whether to close the connection afterwards, even if the request was not received in full.
        """
        ...


class MountedRoutes(Protocol):
    """Routes that are mounted in the gateway."""

    @property
    def ready(self) -> bool:
        """Whether the routes can answer now."""
        ...

    async def __call__(self, scope: Scope, exchange: Exchange | None, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            RefusedError: There is no such path, or it does not accept this method.
        """
        ...


class Gateway:
    """The gateway's ASGI application.

    Args:
        engine: The engine that answers.
        limits: Limits on a request.
        token: Bearer token that a request must carry unless its path is one of ``OPEN_PATHS``; None for none.
        open_monitoring: Whether :data:`MONITORING_PATHS` need no token either.
        attribute: Returns the charge of a request in joules and grams; None where it is unknown.
        telemetry: Called with the record of every inference request that ended.
        admin: Serves everything outside ``/v1`` and ``/v2``; 404 when None.

    Attributes:
        bodies: Reads requests within the limits.
        text: Serves ``/v1`` for language models; None where there are none.
        feedback: Counts labels of answers.
        label: Passes labels on, by service and body, and returns HTTP status and body; None to count them here.
        health: Returns further fields of the body of ``/v2/health/ready``.
        sample: Called with the service and the content of each answered request; None for no call.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        limits: Limits | None = None,
        token: str | None = None,
        open_monitoring: bool = False,
        attribute: Attributor | None = None,
        telemetry: Sequence[Telemetry] = (),
        admin: ASGIApp | None = None,
    ) -> None:
        self.engine = engine
        self.bodies = BodyReader(limits or Limits())
        self.attribute = attribute
        self.telemetry = tuple(telemetry)
        self.admin = admin
        self.text: MountedRoutes | None = None
        self.feedback = Feedback()
        self.label: Callable[[str, bytes], Awaitable[tuple[int, bytes]]] | None = None
        self.health: Callable[[], dict[str, Any]] = dict
        self.sample: Callable[[str, InferRequest], None] | None = None
        self._open = frozenset((*OPEN_PATHS, *(MONITORING_PATHS if open_monitoring else ())))
        self._credential = None if token is None else f"Bearer {token}".encode()
        self._variant_headers: dict[str, tuple[bytes, bytes]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        exchange: Exchange | None = scope.get("extensions", {}).get("joulery.exchange")
        try:
            if self._credential is not None and path not in self._open and not path.startswith("/static/"):
                self._authorise(scope["headers"])
            if path.startswith("/v2/") and path.endswith("/infer"):
                service, variant = _model_at(path)
                only(scope, "POST")
                await self._infer(scope, exchange, receive, send, service, variant)
                return
            if path.startswith("/v1/") or (self.text is not None and path in _OPENAI_PATHS):
                if self.text is None:
                    raise RefusedError(404, f"no endpoint {path[:200]}: this site serves no language model")
                await self.text(scope, exchange, receive, send)
                return
            if not path.startswith("/v2/") and path != "/v2":
                if self.admin is None:
                    raise RefusedError(404, f"there is nothing at {path}")
                await self.admin(scope, receive, send)
                return
            parts = path.split("/")
            if parts[-1] == "feedback" and parts[2:3] == ["models"] and len(parts) == 5:
                only(scope, "POST")
                await self._label(scope, exchange, receive, send, parts[3])
            else:
                only(scope, "GET", "HEAD")
                status, content = self._describe(parts)
                await reply(send, exchange, status, orjson.dumps(content), [_JSON])
        except RefusedError as error:
            openai = path.startswith("/v1/") or path in _OPENAI_PATHS
            document = error_document(error) if openai else {"error": str(error)}
            await reply(send, exchange, error.status, orjson.dumps(document), [_JSON, *error.headers], last=True)

    def _authorise(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        given = first_header(headers, b"authorization")
        if self._credential is None or not hmac.compare_digest(given, self._credential):
            raise RefusedError(401, "a bearer token is needed", (b"www-authenticate", b"Bearer"))

    async def _infer(
        self, scope: Scope, exchange: Exchange | None, receive: Receive, send: Send, service: str, variant: str
    ) -> None:
        """Handle an inference request, from its first byte to its record."""
        arrival_s = unix_s()
        if exchange is not None:
            exchange.begin()
        body = b""
        try:
            headers = dict(scope["headers"])
            timeout_s = seconds_of(headers.get(b"x-joulery-timeout-s"))
            json_bytes = length_of(headers.get(b"inference-header-content-length"), "Inference-Header-Content-Length")
            body = await self.bodies.read(headers, receive)
            call = parse(body, json_bytes, timeout_s=timeout_s, variant=variant)
            response = await self.engine.infer(service, call.request)
            try:
                answer = render(service, response.variant, call, response.outputs)
            except DataError as error:
                raise RequestError(str(error), Outcome.FAILED, variant=response.variant) from error
            share = self.charge(service, response)
            sent: Headers = [_JSON if answer.json_bytes is None else _BINARY, *self._cost(response.variant, share)]
            if answer.json_bytes is not None:
                sent.append((b"inference-header-content-length", b"%d" % answer.json_bytes))
            if exchange is None or not exchange.answer(200, sent, answer.body):
                await reply(send, None, 200, answer.body, sent)
            self.answered(service, call.id, call.request, arrival_s, response, share)
        except RequestError as error:
            await self._fail(send, exchange, service, arrival_s, error)
        except asyncio.CancelledError:
            # Either the client has gone, or a stop has waited long enough; this task ends here in both cases.
            if exchange is not None and exchange.lost:
                self.failed(service, arrival_s, RequestError("", Outcome.CANCELLED))
            else:
                gone = RequestError("the gateway is closing", Outcome.UNAVAILABLE)
                await self._fail(send, exchange, service, arrival_s, gone)
        finally:
            self.bodies.give_back(body)
            if exchange is not None:
                exchange.end()

    async def _label(self, scope: Scope, exchange: Exchange | None, receive: Receive, send: Send, service: str) -> None:
        """Handle labels for earlier answers of a service."""
        self._views(service, "")
        body = await self.bodies.read(dict(scope["headers"]), receive)
        try:
            if self.label is None:
                status, content = 200, orjson.dumps(self.feedback.label(service, bytes(body)))
            else:
                status, content = await self.label(service, bytes(body))
        finally:
            self.bodies.give_back(body)
        await reply(send, exchange, status, content, [_JSON])

    async def _fail(
        self, send: Send, exchange: Exchange | None, service: str, arrival_s: float, error: RequestError
    ) -> None:
        share = self.failed(service, arrival_s, error)
        headers: Headers = [_JSON]
        if error.variant:
            headers += self._cost(error.variant, share)
        if error.retry_after_s is not None or error.outcome is Outcome.UNAVAILABLE:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1))))
        status, last = STATUS[error.outcome], False
        if isinstance(error, RefusedError):
            status, headers, last = error.status, headers + error.headers, True
        await reply(send, exchange, status, orjson.dumps({"error": str(error)}), headers, last=last)

    def charge(self, service: str, response: InferResponse) -> EnergyShare | None:
        """The charge of an answer; None where it is unknown."""
        if self.attribute is None:
            return None
        return self.attribute(service, response.variant, response.cpu_s, response.service_s, response.end_s)

    def answered(
        self,
        service: str,
        call_id: str | None,
        request: InferRequest,
        arrival_s: float,
        response: InferResponse,
        share: EnergyShare | None,
    ) -> None:
        """Record a request whose answer has been given: for labels, samples and telemetry."""
        if call_id:
            self.feedback.answered(service, call_id, response.variant)
        if self.sample is not None:
            self.sample(service, request)
        self._record(_answered(service, arrival_s, response, share))

    def failed(self, service: str, arrival_s: float, error: RequestError) -> EnergyShare | None:
        """Record a request that got no answer; return its charge."""
        share = None
        if self.attribute is not None and error.variant and error.cpu_s > 0:
            share = self.attribute(service, error.variant, error.cpu_s, error.service_s, unix_s())
        self._record(_failed(service, arrival_s, error, share))
        return share

    def _cost(self, variant: str, share: EnergyShare | None) -> Headers:
        """Headers with the variant and the cost of an answer; unknown figures are left out."""
        header = self._variant_headers.get(variant)
        if header is None:
            header = self._variant_headers[variant] = (b"x-joulery-variant", quote(variant).encode())
        if share is None:
            return [header]
        headers = [
            header,
            (b"x-joulery-energy-j", b"%.6g" % share.energy_j),
            (b"x-joulery-quality", share.quality.value.encode()),
        ]
        if share.carbon_g is not None:
            headers.append((b"x-joulery-carbon-g", b"%.6g" % share.carbon_g))
        return headers

    def _record(self, record: RequestRecord) -> None:
        for sink in self.telemetry:
            sink(record)

    def _describe(self, parts: list[str]) -> tuple[int, dict[str, Any]]:
        """Status and body of paths under ``/v2`` other than inference."""
        match parts[2:]:
            case [] | [""]:
                return 200, {"name": "joulery", "version": __version__, "extensions": list(EXTENSIONS)}
            case ["health", "live"]:
                return 200, {"live": True}
            case ["health", "ready"]:
                ready = self.ready
                return 200 if ready else 503, {"live": True, "ready": ready, **self.health()}
            case ["models", *_]:
                service, variant = _model_of(parts)
                if parts[-1] == "ready":
                    ready = self.model_ready(service, variant)
                    return 200 if ready else 503, {"name": service, "ready": ready}
                return 200, self.model_metadata(service, variant)
        raise RefusedError(404, f"there is nothing at {'/'.join(parts)}")

    @property
    def ready(self) -> bool:
        """Whether every service has a replica that can answer."""
        views = self.engine.replicas()
        ready = {view.spec.service for view in views if view.state is ReplicaState.READY}
        if self.text is not None:
            return self.text.ready and ready == {view.spec.service for view in views}
        return bool(views) and ready == {view.spec.service for view in views}

    def model_ready(self, service: str, variant: str = "") -> bool:
        """Whether a replica of a service, or of one of its variants, can answer.

        Raises:
            RefusedError: There is no such service or variant.
        """
        return any(view.state is ReplicaState.READY for view in self._views(service, variant))

    def model_metadata(self, service: str, variant: str = "") -> dict[str, Any]:
        """A model's metadata, as declared by its newest ready replica.

        Raises:
            RefusedError: There is no such service or variant.
        """
        return _metadata(service, self._views(service, variant))

    def _views(self, service: str, variant: str) -> list[ReplicaView]:
        views = [view for view in self.engine.replicas() if view.spec.service == service]
        if not views:
            raise RefusedError(404, f"there is no service {service!r}")
        views = [view for view in views if variant in ("", view.spec.variant)]
        if not views:
            raise RefusedError(404, f"{service} runs no variant {variant!r} now")
        return views


def _metadata(service: str, views: list[ReplicaView]) -> dict[str, Any]:
    shown = max(views, key=lambda view: (view.state is ReplicaState.READY, view.platform != ""))
    inputs, outputs = (
        [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in side]
        for side in (shown.inputs, shown.outputs)
    )
    versions = sorted({view.spec.variant for view in views})
    return {"name": service, "versions": versions, "platform": shown.platform, "inputs": inputs, "outputs": outputs}


@lru_cache(64)
def _model_at(path: str) -> tuple[str, str]:
    """Service and variant of the path of an inference request."""
    return _model_of(path.split("/"))


def _model_of(parts: list[str]) -> tuple[str, str]:
    """Service and variant of ``/v2/models/NAME[/versions/VERSION][/infer|/ready]``; the variant is empty for any."""
    match parts[2:]:
        case ["models", name] | ["models", name, "infer" | "ready"] if name:
            return name, ""
        case ["models", name, "versions", version] | ["models", name, "versions", version, "infer" | "ready"] if (
            name and version
        ):
            return name, version
    raise RefusedError(404, f"there is nothing at {'/'.join(parts)}")


def only(scope: Scope, *methods: str) -> None:
    """Raise RefusedError (405) unless the request's method is one of these."""
    if scope["method"] not in methods:
        allowed = ", ".join(methods)
        raise RefusedError(405, f"{scope['path']} takes {allowed}", (b"allow", allowed.encode()))


def seconds_of(value: bytes | None) -> float | None:
    """Parse the timeout in a request's header; None without one.

    Raises:
        RequestError: The value is not a positive number of seconds.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = _NAN
    if not 0 < seconds < math.inf:
        raise RequestError("x-joulery-timeout-s must be a positive number of seconds", Outcome.INVALID)
    return seconds


def _answered(service: str, arrival_s: float, response: InferResponse, share: EnergyShare | None) -> RequestRecord:
    return RequestRecord(
        service,
        response.variant,
        response.replica,
        arrival_s,
        response.start_s,
        response.end_s,
        Outcome.OK,
        response.service_s,
        response.cpu_s,
        response.attempts,
        share,
        response.batch,
    )


def _failed(service: str, arrival_s: float, error: RequestError, share: EnergyShare | None) -> RequestRecord:
    """Record of a request that was not answered. Unknown names are not kept, since their number is unbounded."""
    name = "" if error.outcome is Outcome.UNKNOWN else service
    return RequestRecord(
        name,
        error.variant,
        "",
        arrival_s,
        _NAN,
        unix_s(),
        error.outcome,
        error.service_s,
        error.cpu_s,
        error.attempts,
        share,
    )


async def reply(
    send: Send, exchange: Exchange | None, status: int, body: bytes, headers: Headers, *, last: bool = False
) -> None:
    """Send an answer, in one write where the server offers that.

    Args:
        send: ASGI's send.
        exchange: The server's extension to answer in one write; None without it.
        status: HTTP status.
        body: The whole body.
        headers: Names in lower case; a length is added.
        last: Whether to close the connection afterwards.
    """
    if exchange is not None and exchange.answer(status, headers, body, last=last):
        return
    headers.append((b"content-length", b"%d" % len(body)))
    if last:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
