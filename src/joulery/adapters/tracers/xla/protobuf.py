"""Minimal reader of the protocol buffers wire format, to read a profile without the framework that wrote it."""

from __future__ import annotations

from collections.abc import Iterator


class WireError(Exception):
    """Error for bytes that are not a protocol buffer message, or that end inside one."""


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message in order: (number, value); an integer, or the bytes of a string, message or fixed field.

    Raises:
        WireError: The message is malformed or cut short.
    """
    at, end = 0, len(message)
    try:
        while at < end:
            tag, at = _varint(message, at)
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                value, at = _varint(message, at)
                yield number, value
                continue
            if wire == 2:
                size, at = _varint(message, at)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise WireError(f"wire type {wire} at byte {at}")
            if not number or at + size > end:
                raise WireError(f"field {number} of {size} bytes at byte {at} of {end}")
            yield number, message[at : at + size]
            at += size
    except IndexError as error:
        raise WireError(f"the message ends inside a number at byte {at}") from error


def text(value: int | memoryview) -> str:
    """Decode a string field.

    Raises:
        WireError: The field is a number.
    """
    if isinstance(value, int):
        raise WireError(f"expected a string, found the number {value}")
    return bytes(value).decode("utf-8", "replace")


def sub(value: int | memoryview) -> memoryview:
    """Check that a field contains a message, and return its bytes.

    Raises:
        WireError: The field is a number.
    """
    if isinstance(value, int):
        raise WireError(f"expected a message, found the number {value}")
    return value


def number(value: int | memoryview) -> int:
    """Check that a field contains a number, and return it; a negative number is given as its low 64 bits.

    Raises:
        WireError: The field contains bytes.
    """
    if not isinstance(value, int):
        raise WireError(f"expected a number, found {len(value)} bytes")
    return value


def packed(value: int | memoryview) -> list[int]:
    """Numbers of a repeated field, packed or one by one.

    Raises:
        WireError: The bytes end inside a number.
    """
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    try:
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    except IndexError as error:
        raise WireError(f"a list of numbers ends inside one at byte {at}") from error
    return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise WireError(f"a number of more than ten bytes at byte {at}")
