"""A request that one process passes on to another, and the parts of its answer, whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class RelayedRequest(NamedTuple):
    """An HTTP request, read in full.

    Attributes:
        method, path: As the client sent them.
        headers: The headers, without those of the connection and the client's token.
        body: The body.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class RelayedPart(NamedTuple):
    """A part of an answer, in order.

    Attributes:
        status, headers: Status and headers in the first part; 0 and none in the others.
        body: Bytes of the body.
        more: Whether another part follows.
        error: Reason why the answer ends incomplete; empty where it does not.
    """

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    more: bool = True
    error: str = ""


Passed = Callable[[RelayedPart], None]
"""Function that receives the parts of one answer."""
