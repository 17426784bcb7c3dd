"""A request that one process passes on to another, and its answer as it comes: whole, or a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class RelayedRequest(NamedTuple):
    """An HTTP request, read in full.

    Attributes:
        method, path: As the client sent them.
        headers: Without those that concern one connection, or the client's token.
        body: The body.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class RelayedPart(NamedTuple):
    """A part of an answer, in order.

    Attributes:
        status, headers: Of the first part; 0 and none of the others.
        body: Bytes of the body.
        more: Whether another part comes.
        error: Why the answer ends without being complete; empty where it does not.
    """

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    more: bool = True
    error: str = ""


Passed = Callable[[RelayedPart], None]
"""Receives the parts of one answer."""
