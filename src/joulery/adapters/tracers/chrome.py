"""Reader of Chrome trace JSON, one block of events at a time.

A file is plain or gzipped, an object with ``traceEvents`` or a bare array. A trace of a million events is some 230 MB
of text and, parsed whole, some gigabytes of objects. The reader splits the text where one event ends and the next
begins, and parses each block by itself. It finds a split by trial: text that ends inside an event, a list or a string
is not valid JSON, so the parser itself rejects a bad split.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import orjson

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import DataError

BLOCK_BYTES = 4 << 20
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_CLOSE = re.compile(rb"\}\s*\]")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_TS = re.compile(rb'"ts"\s*:\s*(-?[0-9.eE+-]+)')
_HEAD_BYTES = 64 << 20
_TRIES = 64
_LAST_US = 4.6e15
"""Microseconds beyond which nanoseconds leave int64 (the year 2115)."""

_EXACT_US = 2.0**42
"""Below this, two stamps that differ by a nanosecond are different floats of microseconds."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive events of a trace.

    Attributes:
        events: The parsed events.
        text: The JSON they were parsed from, without the brackets.
    """

    events: list[Any]
    text: bytes


class ChromeTrace:
    """A trace file. Iterate :meth:`blocks` once; ``meta`` is complete after that.

    Attributes:
        path: The file.
        meta: Every other key of the object, including the keys behind the events; empty for a bare array.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}

    def blocks(self) -> Iterator[Block]:
        """The events in file order.

        Raises:
            DataError: The file cannot be read, ends early, or is not a trace.
        """
        with open_stream(self.path) as stream:
            rest, bare = self._head(stream)
            count = 0
            while True:
                block, rest = _whole_events(rest)
                if block is None:
                    block, after = _closing_events(rest)
                    if block is not None:
                        self._foot(after + b"".join(iter(lambda: self._read(stream), b"")), bare)
                        yield block
                        return
                    more = self._read(stream)
                    rest += more
                    if not more:
                        break
                else:
                    count += len(block.events)
                    yield block
            raise DataError(f"{_damage(rest)} after about {count} events", file=str(self.path), hint=_COPY_HINT)

    def _read(self, stream: IO[bytes]) -> bytes:
        try:
            return stream.read(BLOCK_BYTES)
        except EOFError as error:
            raise DataError("the gzip stream ends early", file=str(self.path), hint=_COPY_HINT) from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"the gzip stream is damaged: {error}", file=str(self.path), hint=_COPY_HINT) from error

    def _head(self, stream: IO[bytes]) -> tuple[bytes, bool]:
        """The text behind the bracket that opens the events, and whether the file is a bare array."""
        text = self._read(stream).lstrip(b"\xef\xbb\xbf \t\r\n")
        if text.startswith(b"["):
            return text[1:], True
        while True:
            for match in _EVENTS.finditer(text):
                head = _parsed(text[: match.end()] + b"]}")
                if isinstance(head, dict):
                    del head["traceEvents"]
                    self.meta.update(head)
                    return text[match.end() :], False
            more = self._read(stream)
            if not more or len(text) > _HEAD_BYTES:
                raise DataError(
                    "no trace: expected a JSON object with traceEvents, or an array of events",
                    file=str(self.path),
                    hint=_COPY_HINT if text.startswith(b"{") else "",
                )
            text += more

    def _foot(self, text: bytes, bare: bool) -> None:
        """Check the text that follows the events and keep its keys."""
        keys = ({} if not text.strip() else None) if bare else _parsed(b'{"":0' + text)
        if not isinstance(keys, dict):
            raise DataError("truncated or damaged behind the events", file=str(self.path), hint=_COPY_HINT)
        keys.pop("", None)
        self.meta.update(keys)


_COPY_HINT = "the program may have died while writing it, or the copy is incomplete: record or copy it again"


def open_stream(path: Path) -> IO[bytes]:
    """Open a file for reading, through gzip where it begins with the gzip magic number.

    Raises:
        DataError: There is no such file, or it may not be read.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(2)
        return cast(IO[bytes], gzip.open(path, "rb")) if magic == b"\x1f\x8b" else path.open("rb")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=str(path)) from error


def stamps_ns(block: Block, stamps: list[Any], *, file: str) -> IntArray:
    """The time stamps (``ts``) of a block's events as exact nanoseconds, int64[n].

    Microseconds with three decimals lose their last digits as floats when they count from 1970 or from some months
    ago; then the digits are read from the text instead.

    Args:
        block: The block.
        stamps: ``event["ts"]`` of the events that have one, in order, all events of the block.
        file: The file's name, for the error.

    Raises:
        DataError: A stamp is not a finite number, or is beyond the year 2115.
    """
    values = numbers(stamps, "a time stamp", file=file)
    if float(np.max(np.abs(values), initial=0.0)) > _LAST_US:
        raise DataError(f"a time stamp is {values[np.argmax(np.abs(values))]:g} us, beyond any clock", file=file)
    if set(map(type, stamps)) <= {int}:
        return np.array(stamps, np.int64) * 1000
    if float(np.max(np.abs(values), initial=0.0)) < _EXACT_US:
        return microseconds_ns(values)
    written = _TS.findall(block.text)
    if len(written) == len(stamps):
        found = _decimals_ns(written)
        if bool(np.all(np.abs(found / 1000 - values) < 1)):
            return found
    quoted = orjson.loads(b"[%b]" % _TS.sub(rb'"ts":"\1"', block.text))
    return np.array([_decimal_ns(str(event["ts"]).encode()) for event in quoted if "ts" in event], np.int64)


def numbers(values: list[Any], what: str, *, file: str) -> FloatArray:
    """Convert values to finite numbers, float64[n].

    Raises:
        DataError: A value is not a finite number; the message names it ``what``.
    """
    try:
        column = np.array(values, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} is not a number: {error}", file=file) from error
    if column.ndim != 1 or not bool(np.all(np.isfinite(column))):
        raise DataError(f"{what} is not a finite number", file=file)
    return column


def microseconds_ns(values_us: Any) -> IntArray:
    """Microseconds as nanoseconds, exact for whole numbers and for decimals below 50 days, int64[n]."""
    values = np.asarray(values_us, np.float64)
    whole = np.floor(values)
    return np.asarray(whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64), np.int64)


def _decimals_ns(written: list[bytes]) -> IntArray:
    """Decimal microseconds as nanoseconds; vectorised where all have three decimals and the same length."""
    texts = np.array(written)
    digits = texts.view(np.uint8).reshape(len(texts), -1).astype(np.int64) - ord("0")
    width = digits.shape[1]
    if width < 5 or width > 22 or bool(np.any(digits[:, -4] != ord(".") - ord("0"))):
        return np.array([_decimal_ns(text) for text in written], np.int64)
    digits = np.delete(digits, width - 4, axis=1)
    if bool(np.any((digits < 0) | (digits > 9))):
        return np.array([_decimal_ns(text) for text in written], np.int64)
    return np.asarray(digits @ 10 ** np.arange(width - 2, -1, -1, dtype=np.int64), np.int64)


def _decimal_ns(text: bytes) -> int:
    """Decimal microseconds as integer nanoseconds, digit by digit."""
    whole, dot, decimals = text.partition(b".")
    if not dot:
        return int(float(text) * 1000) if b"e" in text.lower() else int(whole) * 1000
    if len(decimals) == 3 and decimals.isdigit():
        return int(whole + decimals)
    if not decimals.isdigit():
        return round(float(text) * 1000)
    sign = -1 if whole.startswith(b"-") else 1
    return int(whole or b"0") * 1000 + sign * round(int(decimals) * 1000 / int(10 ** len(decimals)))


def _whole_events(text: bytes) -> tuple[Block | None, bytes]:
    """The events of a text up to its last clean split, and the text from there on."""
    end = len(text)
    for _ in range(_TRIES):
        end = text.rfind(b"}", 0, end)
        between = _BETWEEN.match(text, end) if end >= 0 else None
        if between:
            events = _parsed(b"[%b]" % text[: end + 1])
            if isinstance(events, list):
                return Block(events, text[: end + 1]), text[between.end() - 1 :]
    return None, text


def _closing_events(text: bytes) -> tuple[Block | None, bytes]:
    """The events up to the bracket that closes them, and the text behind it."""
    if text.lstrip().startswith(b"]"):
        return Block([], b""), text.lstrip()[1:]
    for number, match in enumerate(_CLOSE.finditer(text)):
        events = _parsed(b"[%b]" % text[: match.start() + 1])
        if isinstance(events, list):
            return Block(events, text[: match.start() + 1]), text[match.end() :]
        if number > _TRIES:
            break
    return None, text


def _damage(text: bytes) -> str:
    """The reason why the rest of a trace is not valid JSON."""
    try:
        orjson.loads(b"[%b]" % text)
    except orjson.JSONDecodeError as error:
        if error.pos < len(text):
            return f"damaged: {error.msg}"
    return "truncated or damaged: the events do not end"


def _parsed(text: bytes) -> Any:
    """The parsed JSON value, or None where the text is not valid JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
