"""Frames between the engine and a worker: a JSON header with raw tensors behind it; errors as JSON.

::

    header length (uint32) | body length (uint64) | header, padded with blanks | tensors, each padded to 16 bytes

The paddings keep every tensor aligned in memory, so that both sides read it in place. The header is an object; its key
``t`` lists the tensors as ``[name, datatype, shape, bytes]``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from joulery.domain.errors import ActuationError, CapabilityError, ConfigError, DataError, JouleryError
from joulery.domain.serving.tensors import Tensor, datatype_of, from_bytes, to_bytes

ALIGNMENT = 16
MAX_FRAME_BYTES = 1 << 31
SMALL_BYTES = 65536
"""A frame below this size is cheaper to copy than to hand over in pieces."""
PREFIX = struct.Struct("<IQ")
_PADDING = [bytes(-size % ALIGNMENT) for size in range(ALIGNMENT)]

Piece = bytes | memoryview


class Frame(NamedTuple):
    """One message.

    Attributes:
        header: The JSON object, without the list of tensors.
        tensors: Read-only arrays by name, in order.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def encode(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> list[Piece]:
    """The pieces of one frame, to be written one after the other: one for a small frame, and no copy of large tensors.

    Raises:
        DataError: A tensor's type has no name in the protocol.
    """
    listing: list[tuple[str, str, tuple[int, ...], int]] = []
    body: list[Piece] = []
    total = 0
    for name, array in tensors.items():
        datatype = datatype_of(array)
        raw = to_bytes(array) if array.nbytes < SMALL_BYTES else _raw(array)
        size = len(raw)
        listing.append((name, datatype, array.shape, size))
        body.append(raw)
        if size % ALIGNMENT:
            body.append(_PADDING[size % ALIGNMENT])
        total += size + -size % ALIGNMENT
    text = orjson.dumps({**header, "t": listing} if header else {"t": listing})
    padding = -(PREFIX.size + len(text)) % ALIGNMENT
    first = (PREFIX.pack(len(text) + padding, total), text, b" " * padding)
    return [b"".join((*first, *body))] if total < SMALL_BYTES else [b"".join(first), *body]


def _raw(array: Tensor) -> Piece:
    if array.flags.c_contiguous and array.dtype.kind not in "OSU":
        return memoryview(array.reshape(-1).view("u1").data)
    return to_bytes(array)


def decode(header: Piece, body: Piece) -> Frame:
    """The frame of a header and a body; its arrays are views of ``body``.

    Raises:
        DataError: Header and body are not a frame of ``encode``.
    """
    try:
        content = orjson.loads(header)
        listing = content.pop("t")
        tensors: dict[str, Tensor] = {}
        view, at = memoryview(body), 0
        for name, datatype, shape, length in listing:
            tensors[name] = from_bytes(view[at : at + length], datatype, tuple(shape))
            at += length + -length % ALIGNMENT
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"a frame cannot be read: {error}") from error
    return Frame(content, tensors)


class FrameReader:
    """Splits a stream into frames, from chunks of any size."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = PREFIX.size

    @property
    def missing(self) -> int:
        """Least number of bytes needed before ``feed`` can return another frame."""
        return self._need - self._have

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that ``chunk`` completes.

        Raises:
            DataError: The stream does not consist of frames.
        """
        self._have += len(chunk)
        if self._chunks:
            self._chunks.append(chunk)
            if self._have < self._need:
                return []
            chunk = b"".join(self._chunks)
        frames: list[Frame] = []
        start, end = 0, PREFIX.size
        while end <= len(chunk):
            header, body = PREFIX.unpack_from(chunk, start)
            end += header + body
            if end - start > MAX_FRAME_BYTES:
                raise DataError(f"a frame of {end - start} bytes is too large")
            if end <= len(chunk):
                view = memoryview(chunk)
                middle = start + PREFIX.size + header
                frames.append(decode(view[start + PREFIX.size : middle], view[middle:end]))
                start, end = end, end + PREFIX.size
        self._chunks = [chunk[start:]] if start < len(chunk) else []
        self._have, self._need = len(chunk) - start, end - start
        return frames


_ERRORS: dict[str, type[JouleryError]] = {kind.__name__: kind for kind in (CapabilityError, ConfigError, DataError)}


def pack_error(error: JouleryError) -> dict[str, Any]:
    """Type and fields of an error, JSON-ready."""
    fields = {key: value for key, value in vars(error).items() if value is not None}
    return {"type": type(error).__name__, "arguments": fields}


def unpack_error(error: dict[str, Any]) -> JouleryError:
    """The error that :func:`pack_error` packed; an ActuationError with its message for any other kind."""
    fields = dict(error["arguments"])
    message, kind = fields.pop("message"), _ERRORS.get(error["type"])
    return ActuationError(message) if kind is None else kind(message, **fields)
