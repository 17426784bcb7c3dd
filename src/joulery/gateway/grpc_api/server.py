"""The gateway's gRPC server, with the same engine, limits, token, records and figures as its HTTP server."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from joulery import __version__
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.serving.engine import EnergyShare, Outcome, RequestError
from joulery.gateway.app import EXTENSIONS, Gateway
from joulery.gateway.body import RefusedError
from joulery.gateway.grpc_api import inference_pb2 as messages
from joulery.gateway.grpc_api.tensors import costs_of, parse, render
from joulery.gateway.server import only_loopback
from joulery.gateway.tls import TlsFiles
from joulery.steady_time import unix_s

SERVICE = "inference.GRPCInferenceService"

CODES = {
    Outcome.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Outcome.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Outcome.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.CANCELLED: grpc.StatusCode.CANCELLED,
    Outcome.FAILED: grpc.StatusCode.INTERNAL,
    Outcome.CRASHED: grpc.StatusCode.INTERNAL,
    Outcome.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Outcome.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The gRPC status of every outcome except success."""

Context = Any
"""grpc.aio.ServicerContext; grpcio has no types."""


class GrpcServer:
    """The Open Inference Protocol over gRPC. Use ``start`` and ``stop`` on one event loop.

    Args:
        gateway: The gateway that answers; its engine may change.
        host: Where to listen.
        port: Where to listen; 0 for a free one.
        token: Bearer token that a request must carry in its metadata (``authorization``); None for none.
        tls: Its certificate and key; None for plain text.
        drain_s: How long a stop waits for running requests.
        joined: Whether the gateway is one of several, which receive their limits once they have joined.
        shared_port: Whether other gateways listen on the same port (``SO_REUSEPORT``).

    Raises:
        ConfigError: The host is reachable from other machines and there is no token.
    """

    def __init__(
        self,
        gateway: Gateway,
        host: str,
        port: int,
        *,
        token: str | None = None,
        tls: TlsFiles | None = None,
        drain_s: float = 10.0,
        joined: bool = False,
        shared_port: bool = False,
    ) -> None:
        if token is None:
            only_loopback(host, "serving.grpc")
        self.gateway = gateway
        self.host = host
        self.port = port
        self.tls = tls
        self.drain_s = drain_s
        self.joined, self.shared_port = joined, shared_port
        self._credential = None if token is None else f"Bearer {token}".encode()
        self._server: Any = None
        self._closed_at_s = math.inf

    @property
    def address(self) -> str:
        """Its address for clients."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            CapabilityError: The port is in use or may not be taken.
            ConfigError: The certificate and key cannot be used.
        """
        limits = self.gateway.bodies.limits
        most = limits.held_bytes if self.joined else limits.body_bytes
        options = [("grpc.so_reuseport", int(self.shared_port)), ("grpc.max_receive_message_length", most)]
        options.append(("grpc.max_send_message_length", -1))
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, self._handlers())])
        try:
            if self.tls is None:
                self.port = server.add_insecure_port(self.address)
            else:
                self.port = server.add_secure_port(self.address, _credentials(self.tls))
        except RuntimeError as error:
            raise CapabilityError(
                f"cannot listen on {self.address} for gRPC: the port is in use or the address is not this machine's",
                resource=self.address,
                hint="choose another: serving.grpc in the site file, or --grpc HOST:PORT; port 0 takes a free one",
            ) from error
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Take no more requests, let running ones finish within ``drain_s``. Safe to call twice."""
        if self._server is not None:
            server, self._server = self._server, None
            self._closed_at_s = asyncio.get_running_loop().time() + self.drain_s
            await server.stop(self.drain_s)

    def _handlers(self) -> dict[str, Any]:
        """The methods of the service; ``ServerLive`` needs no token."""
        methods: dict[str, tuple[Callable[..., Awaitable[Any]], Any, Any]] = {
            "ServerLive": (self._live, messages.ServerLiveRequest, messages.ServerLiveResponse),
            "ServerReady": (self._guarded(self._ready), messages.ServerReadyRequest, messages.ServerReadyResponse),
            "ModelReady": (self._guarded(self._model_ready), messages.ModelReadyRequest, messages.ModelReadyResponse),
            "ServerMetadata": (
                self._guarded(self._metadata),
                messages.ServerMetadataRequest,
                messages.ServerMetadataResponse,
            ),
            "ModelMetadata": (
                self._guarded(self._model_metadata),
                messages.ModelMetadataRequest,
                messages.ModelMetadataResponse,
            ),
            "ModelInfer": (self._guarded(self._infer), messages.ModelInferRequest, messages.ModelInferResponse),
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(method, asked.FromString, given.SerializeToString)
            for name, (method, asked, given) in methods.items()
        }

    def _guarded(self, method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        """Wrap a method: check the token, and convert errors to statuses."""

        async def guarded(message: Any, context: Context) -> Any:
            if self._credential is not None:
                given = dict(context.invocation_metadata() or ()).get("authorization", "")
                if not hmac.compare_digest(str(given).encode(), self._credential):
                    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")
            try:
                return await method(message, context)
            except RequestError as error:
                await _abort(context, error, None)

        return guarded

    async def _live(self, message: messages.ServerLiveRequest, context: Context) -> messages.ServerLiveResponse:
        return messages.ServerLiveResponse(live=True)

    async def _ready(self, message: messages.ServerReadyRequest, context: Context) -> messages.ServerReadyResponse:
        return messages.ServerReadyResponse(ready=self.gateway.ready)

    async def _model_ready(self, message: messages.ModelReadyRequest, context: Context) -> messages.ModelReadyResponse:
        return messages.ModelReadyResponse(ready=self.gateway.model_ready(message.name, message.version))

    async def _metadata(
        self, message: messages.ServerMetadataRequest, context: Context
    ) -> messages.ServerMetadataResponse:
        return messages.ServerMetadataResponse(name="joulery", version=__version__, extensions=EXTENSIONS)

    async def _model_metadata(
        self, message: messages.ModelMetadataRequest, context: Context
    ) -> messages.ModelMetadataResponse:
        return messages.ModelMetadataResponse(**self.gateway.model_metadata(message.name, message.version))

    async def _infer(self, message: messages.ModelInferRequest, context: Context) -> messages.ModelInferResponse:
        """Handle an inference request, from its arrival to its record."""
        arrival_s, service, size = unix_s(), message.model_name, message.ByteSize()
        gateway = self.gateway
        try:
            if size > gateway.bodies.limits.body_bytes:
                longest = f"the message is longer than {gateway.bodies.limits.body_bytes} bytes"
                raise RequestError(longest, Outcome.OVERLOADED)
            with gateway.bodies.holding(size):
                request = parse(message, context.time_remaining())
                response = await gateway.engine.infer(service, request)
                share = gateway.charge(service, response)
                try:
                    answer = render(message, response.variant, response.outputs, share)
                except DataError as error:
                    raise RequestError(str(error), Outcome.FAILED, variant=response.variant) from error
            gateway.answered(service, message.id or None, request, arrival_s, response, share)
            return answer
        except RequestError as error:
            await _abort(context, error, gateway.failed(service, arrival_s, error))
            raise
        except asyncio.CancelledError:
            # Either the client has given up, or a stop has waited long enough.
            closing = asyncio.get_running_loop().time() >= self._closed_at_s
            outcome = Outcome.UNAVAILABLE if closing else Outcome.CANCELLED
            gateway.failed(service, arrival_s, RequestError("the request was cancelled", outcome))
            raise


def _credentials(tls: TlsFiles) -> Any:
    """Load the server's certificate and key.

    Raises:
        ConfigError: They cannot be used.
    """
    tls.check()
    try:
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    except OSError as error:
        raise ConfigError(f"the certificate or key cannot be read: {error.strerror}", file=str(tls.key)) from error
    return grpc.ssl_server_credentials([pair])


async def _abort(context: Context, error: RequestError, share: EnergyShare | None) -> None:
    """End a call with the status of an error, its cost, and the time to try again."""
    missing = isinstance(error, RefusedError) and error.status == 404
    costs = costs_of(error.variant, share)
    metadata = [(name, cost if isinstance(cost, str) else f"{cost:.6g}") for name, cost in costs.items()]
    if error.retry_after_s is not None or error.outcome is Outcome.UNAVAILABLE:
        metadata.append(("retry-after", str(max(1, math.ceil(error.retry_after_s or 1)))))
    await context.abort(grpc.StatusCode.NOT_FOUND if missing else CODES[error.outcome], str(error), tuple(metadata))
