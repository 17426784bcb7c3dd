"""The answering side of joulery's own connections to replicas on Ray; see :mod:`.direct`."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from joulery.adapters.engines.embedded.models import failure
from joulery.adapters.engines.embedded.wire import Frame, FrameReader, Piece, encode
from joulery.domain.errors import DataError

LOOPBACK, NODE_ADDRESS = "127.0.0.1", "node"
"""Listening addresses of a replica with connections of its own: its machine alone, or its node's address."""
_RECEIVE_BYTES = 65536
_TOKEN_S = 5.0
"""Time limit for a connection to show its token."""
Answering = Callable[[Frame], dict[str, Any]]
"""The answer of a request's frame: fields of the header, and arrays under ``y``."""


@cache
def this_machine() -> str:
    """Identity shared by processes that reach each other on loopback: the kernel, and its network namespace."""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').stat().st_ino}"
        )
    except OSError:
        return socket.gethostname()


class Listener:
    """Server for joulery's connections to a replica, with a thread for each; listens as soon as it is created.

    Args:
        host: Address of this machine to listen at.
        answer: Answers one request.

    Raises:
        OSError: It cannot listen at that address.

    Attributes:
        place: Host, port, the token that a connection begins with, and the machine (:func:`this_machine`).
    """

    def __init__(self, host: str, answer: Answering) -> None:
        self._answer = answer
        self._socket = socket.create_server((host, 0))
        self._lines: dict[socket.socket, _Line] = {}
        self._changed, self._leaving = threading.Condition(), False
        self.place = (host, int(self._socket.getsockname()[1]), secrets.token_hex(16), this_machine())
        threading.Thread(target=self._accept, name="requests", daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                line = _Line(self._socket.accept()[0])
                with self._changed:
                    self._lines[line.socket] = line
                threading.Thread(target=self._serve, args=(line,), name="request", daemon=True).start()

    def _serve(self, line: _Line) -> None:
        reader = FrameReader()
        try:
            with line.socket, suppress(OSError, DataError):
                line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.socket.settimeout(_TOKEN_S)
                while chunk := line.socket.recv(max(_RECEIVE_BYTES, reader.missing)):
                    for frame in reader.feed(chunk):
                        if line.known:
                            line.send(self._pieces(frame))
                        elif not hmac.compare_digest(str(frame.header.get("token", "")), self.place[2]):
                            return
                        else:
                            self._joined(line)
        finally:
            with self._changed:
                del self._lines[line.socket]
                self._changed.notify_all()

    def _joined(self, line: _Line) -> None:
        line.socket.settimeout(None)
        with self._changed:
            line.known, leaving = True, self._leaving
        if leaving:
            line.send(encode({"leaving": True}, {}))

    def _pieces(self, frame: Frame) -> list[Piece]:
        """The frame of an answer."""
        answer = {**self._answer(frame), "n": frame.header.get("n", "")}
        tensors = answer.pop("y", {})
        try:
            return encode(answer, tensors)
        except DataError as error:
            message, outcome = failure(error)
            return encode({**answer, "e": message, "o": outcome.value}, {})

    def leave(self) -> None:
        """Announce on every connection that no more requests are taken; return when the other side has closed all.

        Requests that arrive meanwhile are answered.
        """
        self.close()
        with self._changed:
            self._leaving, known = True, [line for line in self._lines.values() if line.known]
        for line in known:
            with suppress(OSError):
                line.send(encode({"leaving": True}, {}))
        with self._changed:
            self._changed.wait_for(lambda: not self._lines)

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a mere close would not end the wait for a connection
        self._socket.close()


class _Line:
    """One connection; ``known`` once it has shown the token."""

    def __init__(self, line: socket.socket) -> None:
        self.socket, self.known = line, False
        self._sending = threading.Lock()

    def send(self, pieces: list[Piece]) -> None:
        """Send a frame, whole.

        Raises:
            OSError: The connection is closed.
        """
        with self._sending:
            for piece in pieces:
                self.socket.sendall(piece)
