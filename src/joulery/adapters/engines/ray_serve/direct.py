"""Requests to replicas on Ray over a connection of their own, as the embedded engine's go to its workers.

Ray's handle takes milliseconds of CPU time a request. A replica that may listens at a port of its node, and says at
which; only who knows the replica's token is answered, and Ray alone passes that on. A replica that does not listen, or
cannot be reached, is asked through Ray.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any, Protocol, cast

from joulery.adapters.engines.embedded.wire import Frame, FrameReader, Piece, encode
from joulery.adapters.engines.ray_serve.cluster import ReplicaGoneError
from joulery.domain.errors import DataError
from joulery.domain.serving.engine import InferRequest

_CONNECT_S = 2.0
_LOST_AFTER = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000),
)
"""A machine that vanishes closes nothing: after nine silent seconds the kernel does."""


class Asked(Protocol):
    """Asks a replica through Ray."""

    async def infer(self, application: str, replica: str, request: InferRequest) -> dict[str, Any]:
        """See :meth:`.cluster.RayCluster.infer`."""
        ...


class DirectLines:
    """The connections to replicas.

    Args:
        cluster: Asks those that do not listen.
    """

    def __init__(self, cluster: Asked) -> None:
        self._cluster = cluster
        self._lines: dict[str, _Line | None] = {}

    async def infer(self, application: str, info: Mapping[str, Any], request: InferRequest) -> dict[str, Any]:
        """What one replica answers; see :meth:`.replica.Instances.infer`.

        Args:
            application: Its application.
            info: Its description.
            request: What it is asked.

        Raises:
            ReplicaGoneError: It ended.
        """
        replica = str(info["id"])
        line = self._lines[replica] if replica in self._lines else await self._connected(replica, info)
        if line is None:
            return await self._cluster.infer(application, replica, request)
        try:
            header = {"v": request.variant, "w": request.outputs, "id": replica}
            frame = await line.ask(encode(header, request.inputs))
        except ConnectionError as error:
            self._lines.pop(replica, None)
            raise ReplicaGoneError(str(error) or type(error).__name__) from error
        answer = frame.header
        return answer if "e" in answer or "moved" in answer else {**answer, "y": frame.tensors}

    async def _connected(self, replica: str, info: Mapping[str, Any]) -> _Line | None:
        """A connection to a replica; None where it is to be asked through Ray."""
        found, direct = None, info.get("direct")
        if direct is not None:
            host, port, token = direct
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(_CONNECT_S):
                    _, found = await loop.create_connection(_Line, str(host), int(port))
                found.write(encode({"token": token}, {}))
            except (OSError, TimeoutError):
                found = None
        self._lines[replica] = found
        return found

    def close(self) -> None:
        """Hang up."""
        for line in self._lines.values():
            if line is not None:
                line.hang_up()
        self._lines.clear()


class _Line(asyncio.Protocol):
    """One connection: a replica answers one request at a time."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Frame] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        line = transport.get_extra_info("socket")
        for level, option, value in _LOST_AFTER:
            line.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except DataError:
            self.hang_up()
            return
        for frame in frames:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("its connection was closed"))

    def write(self, pieces: list[Piece]) -> None:
        """Send a frame.

        Raises:
            ConnectionError: The connection is closed.
        """
        if self._transport is None:
            raise ConnectionResetError("its connection was closed")
        for piece in pieces:
            self._transport.write(piece)

    async def ask(self, pieces: list[Piece]) -> Frame:
        """Send a request and wait for its answer.

        Raises:
            ConnectionError: The connection was closed.
        """
        self._answer = asyncio.get_running_loop().create_future()
        self.write(pieces)
        return await self._answer

    def hang_up(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
