"""A gateway on a free port, in front of a fake engine or of real replicas."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np

from joulery.domain.ports import Engine
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    ModelRef,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestRecord,
    Transition,
)
from joulery.domain.serving.service import Slice, SliceKind
from joulery.domain.serving.tensors import TensorSpec
from joulery.gateway.app import Gateway
from joulery.gateway.server import GatewayServer, ServerLimits
from tests.waiting import PATIENCE_S

INFER = "/v2/models/toy/infer"
X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}


def body(*inputs: Any, **rest: Any) -> bytes:
    return json.dumps({"inputs": list(inputs) or [X], **rest}).encode()


def view(variant: str = "small", state: ReplicaState = ReplicaState.READY, service: str = "toy") -> ReplicaView:
    spec = ReplicaSpec(service, variant, Slice(SliceKind.CPU, cores=1), ModelRef.parse("m:f"))
    tensors = (TensorSpec("x", "FP32", (-1, 2)),)
    return ReplicaView(f"r-{variant}", spec, state, inputs=tensors, outputs=tensors, platform="python")


class FakeEngine:
    """Answers with what ``reply`` makes of a request; remembers what it was asked."""

    def __init__(self, *views: ReplicaView) -> None:
        self.views = views or (view(),)
        self.asked: list[tuple[str, InferRequest]] = []
        self.cancelled = 0
        self.reply: Callable[[InferRequest], Any] = lambda request: dict(request.inputs)

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        self.asked.append((service, request))
        try:
            outputs = self.reply(request)
            if asyncio.iscoroutine(outputs):
                outputs = await outputs
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        arrays = {name: np.asarray(value) for name, value in outputs.items()}
        return InferResponse(arrays, "small", "r0", 10.0, 10.5, 11.0, 0.4, 0.3, 1)

    def replicas(self) -> tuple[ReplicaView, ...]:
        return self.views

    async def apply(self, target: Sequence[ReplicaSpec], /) -> Transition:
        raise AssertionError("the gateway does not change replicas")

    async def close(self) -> None:
        return None


class Served:
    """A running gateway, a client for it, and the records of its requests."""

    def __init__(self, server: GatewayServer, client: httpx.AsyncClient, records: list[RequestRecord]) -> None:
        self.server = server
        self.client = client
        self.records = records

    async def post(self, content: bytes | None = None, path: str = INFER, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, content=body() if content is None else content, headers=named)

    async def raw(self, data: bytes, *, finish: bool = False) -> bytes:
        """What comes back for these bytes until the server closes or, unless ``finish``, a whole answer is there."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(data)
            return await (reader.read() if finish else reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError as error:
            return error.partial
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@asynccontextmanager
async def serving(
    engine: Engine, *, server_limits: ServerLimits | None = None, protected: bool = False, **options: Any
) -> AsyncIterator[Served]:
    records: list[RequestRecord] = []
    app = Gateway(engine, telemetry=[records.append], **options)
    server = GatewayServer(app, "127.0.0.1", 0, limits=server_limits or ServerLimits(), protected=protected)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
            yield Served(server, client, records)
    finally:
        await server.stop()
