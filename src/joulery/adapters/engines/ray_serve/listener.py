"""The side of a replica on Ray that answers requests on connections of their own; see :mod:`.direct`."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from joulery.adapters.engines.embedded.wire import Frame, FrameReader, encode
from joulery.domain.errors import DataError

_RECEIVE_BYTES = 65536
Answering = Callable[[Frame], dict[str, Any]]
"""The answer of a request's frame: fields of the header, and arrays under ``y``."""


class Listener:
    """Listens from now on; each connection has a thread.

    Args:
        host: Address of this machine to listen at.
        answer: Answers one request.

    Attributes:
        place: Host, port and the token that a connection begins with.
    """

    def __init__(self, host: str, answer: Answering) -> None:
        self._answer = answer
        self._socket = socket.create_server((host, 0))
        self.place = (host, int(self._socket.getsockname()[1]), secrets.token_hex(16))
        threading.Thread(target=self._accept, name="requests", daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                line, _ = self._socket.accept()
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(line,), name="request", daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        reader, known = FrameReader(), False
        with line, suppress(OSError, DataError):
            while chunk := line.recv(max(_RECEIVE_BYTES, reader.missing)):
                for frame in reader.feed(chunk):
                    if not known:
                        if not hmac.compare_digest(str(frame.header.get("token", "")), self.place[2]):
                            return
                        known = True
                        continue
                    answer = self._answer(frame)
                    tensors = answer.pop("y", {})
                    for piece in encode(answer, tensors):
                        line.sendall(piece)

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()
