"""Tensors of the Open Inference Protocol as plain NumPy arrays.

Datatype names, their numpy types and the byte layout of the binary extension: row-major, little-endian, no padding;
``BYTES`` elements each preceded by their length (uint32). ``BYTES`` arrays are object arrays of :class:`bytes`.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from joulery.domain.errors import DataError

Tensor = npt.NDArray[Any]

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""The numpy type of every datatype of the protocol."""

_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_TYPES.items()}
_LENGTH = struct.Struct("<I")


class TensorSpec(NamedTuple):
    """A model's declaration of one input or output.

    Attributes:
        name: Tensor name.
        datatype: Name in ``NUMPY_TYPES``.
        shape: Dimensions; -1 where any size is accepted.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


def datatype_of(array: Tensor) -> str:
    """The protocol's name of an array's type.

    Raises:
        DataError: The protocol has no name for it.
    """
    name = _NAMES.get(array.dtype)
    if name is None and array.dtype.kind in "SU":
        return "BYTES"
    if name is None:
        raise DataError(
            f"a tensor of numpy type {array.dtype} cannot be sent", hint=f"return one of {', '.join(NUMPY_TYPES)}"
        )
    return name


def to_bytes(array: Tensor) -> bytes:
    """The elements of ``array`` in the binary layout.

    Raises:
        DataError: An object array holds something else than bytes or text.
    """
    if array.dtype.kind not in "OSU":
        return array.tobytes()
    pieces: list[bytes] = []
    for element in array.ravel().tolist():
        text = element.encode() if isinstance(element, str) else element
        if not isinstance(text, bytes):
            raise DataError(f"a BYTES tensor holds {type(element).__name__}", hint="use bytes or str elements")
        pieces += (_LENGTH.pack(len(text)), text)
    return b"".join(pieces)


def from_bytes(raw: bytes | memoryview, datatype: str, shape: tuple[int, ...]) -> Tensor:
    """Read an array from its binary layout; it is a read-only view of ``raw``, except for ``BYTES``.

    Raises:
        DataError: Unknown datatype, or the length does not fit the shape.
    """
    dtype = NUMPY_TYPES.get(datatype)
    if dtype is None:
        raise DataError(f"unknown datatype {datatype!r}", hint=f"one of {', '.join(NUMPY_TYPES)}")
    count = math.prod(shape)
    if datatype == "BYTES":
        return _split_bytes(raw, count).reshape(shape)
    if len(raw) != count * dtype.itemsize:
        raise DataError(f"{len(raw)} bytes given where {datatype} of shape {list(shape)} has {count * dtype.itemsize}")
    return np.frombuffer(raw, dtype).reshape(shape)


def _split_bytes(raw: bytes | memoryview, count: int) -> Tensor:
    """Split ``count`` length-prefixed elements; the count is checked before memory is allocated."""
    view = memoryview(raw)
    if count * _LENGTH.size > len(view):
        raise DataError(f"{len(view)} bytes cannot hold {count} BYTES elements")
    elements = np.empty(count, dtype=object)
    at = 0
    for index in range(count):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(view, at)[0] if start <= len(view) else len(view) + 1
        if at > len(view):
            raise DataError(f"BYTES element {index} reaches beyond the end of its tensor")
        elements[index] = bytes(view[start:at])
    if at != len(view):
        raise DataError(f"{len(view) - at} bytes left over after {count} BYTES elements")
    return elements
