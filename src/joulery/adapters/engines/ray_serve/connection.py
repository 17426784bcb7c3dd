"""One connection to a replica on Ray: requests and answers are frames, matched by number."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from joulery.adapters.engines.embedded.wire import Frame, FrameReader, Piece
from joulery.domain.errors import DataError

_LOST_AFTER = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000),
)
"""Socket options by which the kernel closes the connection to a lost machine after nine silent seconds."""


class ReplicaConnection(asyncio.Protocol):
    """The requesting side of a connection to a replica.

    Args:
        leaving: Called once when the replica reports that it takes no more requests. The connection is closed when
            those on it are answered.
        closed: Called once when the connection has ended, with whether a request was on it.
    """

    def __init__(self, leaving: Callable[[], None], closed: Callable[[bool], None]) -> None:
        self._leaving_called, self._closed_called = leaving, closed
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._answers: dict[str, asyncio.Future[Frame]] = {}
        self._leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        line = transport.get_extra_info("socket")
        for level, option, value in _LOST_AFTER:
            line.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        try:
            frames = self._reader.feed(data)
        except DataError:
            self.hang_up()
            return
        for frame in frames:
            if "leaving" in frame.header:
                self._leaving = True
                self._leaving_called()
                continue
            answer = self._answers.pop(frame.header.pop("n", ""), None)
            if answer is not None and not answer.done():
                answer.set_result(frame)
        if self._leaving and not self._answers:
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = None
        waiting, self._answers = self._answers, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("its connection was closed"))
        self._closed_called(bool(waiting))

    def write(self, pieces: list[Piece]) -> None:
        """Send a frame.

        Raises:
            ConnectionError: The connection is closed.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("its connection was closed")
        for piece in pieces:
            self._transport.write(piece)

    async def ask(self, number: str, pieces: list[Piece]) -> Frame:
        """Send a request and wait for its answer.

        Args:
            number: The request's number; its answer has the same.
            pieces: Its frame.

        Raises:
            ConnectionError: The connection was closed.
        """
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.write(pieces)
        except ConnectionError:
            del self._answers[number]
            raise
        return await answer

    def hang_up(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
