"""Reading a request's body within limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from joulery.domain.serving.engine import Outcome, RequestError

if TYPE_CHECKING:
    from starlette.types import Receive


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a request.

    Attributes:
        body_bytes: Longest body; beyond it the answer is 413.
        held_bytes: Bytes held for all requests together; beyond it the answer is 503.
    """

    body_bytes: int = 16 << 20
    held_bytes: int = 256 << 20

    @classmethod
    def of(cls, body_bytes: int) -> Limits:
        """The limits for a longest body: sixteen such bodies, and at least 256 MiB, may be held at once."""
        return cls(body_bytes, max(cls().held_bytes, 16 * body_bytes))


class RefusedError(RequestError):
    """A request that is refused without the engine, with its own status, possibly before it is received in full."""

    def __init__(
        self, status: int, message: str, *headers: tuple[bytes, bytes], outcome: Outcome = Outcome.INVALID
    ) -> None:
        super().__init__(message, outcome)
        self.status = status
        self.headers = list(headers)


class BodyReader:
    """Reads bodies of requests within the limits.

    Args:
        limits: The limits.

    Attributes:
        held_bytes: Bytes of bodies that are being read, or were read and not given back.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held_bytes = 0

    def give_back(self, body: bytes) -> None:
        """Release a body that ``read`` returned."""
        self.held_bytes -= len(body)

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count a request that was read elsewhere as held while it is answered.

        Args:
            size: Its length in bytes.

        Raises:
            RefusedError: Too much is held already.
        """
        self.held_bytes += size
        try:
            if self.held_bytes > self.limits.held_bytes:
                raise self._too_much()
            yield
        finally:
            self.held_bytes -= size

    async def read(self, headers: MutableMapping[bytes, bytes], receive: Receive) -> bytes:
        """Read the whole body, which is held until it is given back.

        Raises:
            RequestError: The body is too long or encoded, or its client disconnected.
        """
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise RefusedError(415, "bodies are taken as they are, without content-encoding")
        length = headers.get(b"content-length")
        if length is not None and (length_of(length, "Content-Length") or 0) > self.limits.body_bytes:
            raise self._too_large()
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False) and message["type"] == "http.request":
            self.held_bytes += len(body)
            return body
        pieces = [body]
        size = 0
        while True:
            size += len(pieces[-1])
            self.held_bytes += len(pieces[-1])
            try:
                if size > self.limits.body_bytes:
                    raise self._too_large()
                if self.held_bytes > self.limits.held_bytes:
                    raise self._too_much()
                if message["type"] == "http.disconnect":
                    raise RequestError("the client went away while it sent its request", Outcome.CANCELLED)
                if not message.get("more_body", False):
                    return b"".join(pieces)
                message = await receive()
            except BaseException:
                self.held_bytes -= size
                raise
            pieces.append(message.get("body", b""))

    @staticmethod
    def _too_much() -> RefusedError:
        message = "too much is being received at once"
        return RefusedError(503, message, (b"retry-after", b"1"), outcome=Outcome.OVERLOADED)

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"the body is longer than {self.limits.body_bytes} bytes")


def length_of(value: bytes | None, name: str) -> int | None:
    """Parse a header with a number of bytes; None without one.

    Raises:
        RequestError: The value is not a number of bytes.
    """
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise RequestError(f"{name} must be a number of bytes", Outcome.INVALID)
    return int(value)


def first_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The first header of a name; empty where there is none."""
    return next((value for key, value in headers if key == name), b"")
