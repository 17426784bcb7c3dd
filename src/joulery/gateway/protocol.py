"""Parse and render the Open Inference Protocol's inference bodies: JSON and the binary tensor data extension.

Pure functions that convert bytes to domain objects and back. An invalid body raises a
:class:`~joulery.domain.serving.engine.RequestError` with outcome ``INVALID`` that names the position.

Source: KServe, Open Inference Protocol (V2), REST, and its binary tensor data extension.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from joulery.domain.errors import DataError
from joulery.domain.serving.engine import InferRequest, Outcome, RequestError
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, datatype_of, from_bytes, to_bytes

MAX_RANK = 32
_FEW = 64
"""Largest number of values that are packed faster without numpy's checks of types."""
_PACKED = {"FP32": "f", "FP64": "d"}
_FLOATS = {float}


class Call(NamedTuple):
    """An inference request of the protocol.

    Attributes:
        id: Request id, returned with the answer; None without one.
        request: The request for the engine.
        binary: Whether an output is sent in binary, by name, where the request states it.
        binary_default: The same for all others.
    """

    id: str | None
    request: InferRequest
    binary: Mapping[str, bool]
    binary_default: bool


class Answer(NamedTuple):
    """The body of an answer.

    Attributes:
        body: JSON, followed by the binary outputs.
        json_bytes: Length of the JSON part when there are binary outputs; None when there are none.
    """

    body: bytes
    json_bytes: int | None


def parse(body: bytes, json_bytes: int | None = None, *, timeout_s: float | None = None, variant: str = "") -> Call:
    """Parse the request in ``body``.

    Args:
        body: The HTTP body.
        json_bytes: Length of its JSON part (``Inference-Header-Content-Length``); None when it is all JSON.
        timeout_s, variant: Passed on in the request.

    Raises:
        RequestError: The body is not such a request.
    """
    if json_bytes is not None and json_bytes > len(body):
        raise _bad(f"Inference-Header-Content-Length is {json_bytes}, the body has {len(body)} bytes")
    try:
        content = orjson.loads(body if json_bytes is None else body[:json_bytes])
    except orjson.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: {error}") from error
    if type(content) is not dict:
        raise _bad("the body must be a JSON object")
    name = content.get("id")
    if name is not None and type(name) is not str:
        raise _bad("id must be a string")
    entries = content.get("inputs")
    if type(entries) is not list:
        raise _bad("inputs must be a list of tensors")
    inputs: dict[str, Tensor] = {}
    rest = memoryview(body)[len(body) if json_bytes is None else json_bytes :]
    for entry in entries:
        tensor_name, array, rest = _input(entry, rest)
        if tensor_name in inputs:
            raise _bad(f"input {tensor_name!r} is listed twice")
        inputs[tensor_name] = array
    if rest:
        raise _bad(f"{len(rest)} bytes of binary data belong to no input")
    default = _flag(content, "binary_data_output", "the request")
    outputs, binary = _outputs(content.get("outputs"), default)
    return Call(name, InferRequest(inputs, outputs, timeout_s, variant), binary, default)


def render(service: str, variant: str, call: Call, outputs: Mapping[str, Tensor]) -> Answer:
    """The body of the answer to ``call``. Numbers that JSON lacks (NaN, infinities) become null.

    Raises:
        RequestError: An output has bytes that are not text, and was not requested in binary.
        DataError: An output is of a type that the protocol cannot carry.
    """
    entries: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, array in outputs.items():
        datatype = datatype_of(array)
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
        if call.binary.get(name, call.binary_default):
            raw.append(to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            flat = array.reshape(-1)
            entry["data"] = _texts(name, flat) if datatype == "BYTES" else flat
        entries.append(entry)
    content: dict[str, Any] = {"model_name": service, "model_version": variant, "outputs": entries}
    if call.id is not None:
        content["id"] = call.id
    text = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(b"".join((text, *raw)), len(text)) if raw else Answer(text, None)


def _bad(message: str) -> RequestError:
    return RequestError(message, Outcome.INVALID)


def _flag(entry: dict[str, Any], name: str, where: str) -> bool:
    """A boolean in the parameters of ``entry``; False if missing."""
    parameters = entry.get("parameters")
    if parameters is None:
        return False
    if type(parameters) is not dict:
        raise _bad(f"parameters of {where} must be an object")
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise _bad(f"{name} of {where} must be true or false")
    return value


def _outputs(entries: object, default: bool) -> tuple[tuple[str, ...], dict[str, bool]]:
    if entries is None:
        return (), {}
    if type(entries) is not list:
        raise _bad("outputs must be a list")
    binary: dict[str, bool] = {}
    for entry in entries:
        if type(entry) is not dict or type(entry.get("name")) is not str:
            raise _bad("every output needs a name")
        name = entry["name"]
        if name in binary:
            raise _bad(f"output {name!r} is listed twice")
        given = "binary_data" in (entry.get("parameters") or ())
        binary[name] = _flag(entry, "binary_data", f"output {name!r}") if given else default
    return tuple(binary), binary


def _input(entry: object, rest: memoryview) -> tuple[str, Tensor, memoryview]:
    """Parse one input; return it with the remaining binary data."""
    if type(entry) is not dict or type(entry.get("name")) is not str:
        raise _bad("every input needs a name")
    name: str = entry["name"]
    shape = entry.get("shape")
    if type(shape) is not list or len(shape) > MAX_RANK or not _is_shape(shape):
        raise _bad(f"input {name!r} needs a shape: a list of at most {MAX_RANK} sizes")
    datatype = entry.get("datatype")
    if type(datatype) is not str or datatype not in NUMPY_TYPES:
        raise _bad(f"input {name!r} has datatype {datatype!r}; known are {', '.join(NUMPY_TYPES)}")
    parameters = entry.get("parameters")
    size = parameters.get("binary_data_size") if type(parameters) is dict else None
    if parameters is not None and type(parameters) is not dict:
        raise _bad(f"parameters of input {name!r} must be an object")
    if size is None:
        return name, _from_json(name, datatype, shape, entry.get("data")), rest
    if "data" in entry:
        raise _bad(f"input {name!r} has data and binary_data_size; give one")
    if type(size) is not int or size < 0 or size > len(rest):
        raise _bad(f"input {name!r} has binary_data_size {size}, {len(rest)} bytes of binary data are left")
    try:
        return name, from_bytes(rest[:size], datatype, tuple(shape)), rest[size:]
    except (DataError, ValueError, OverflowError) as error:
        raise _bad(f"input {name!r}: {error}") from error


def _is_shape(sizes: list[Any]) -> bool:
    for size in sizes:  # noqa: SIM110 - on the hot path, where a generator is dearer
        if type(size) is not int or size < 0:
            return False
    return True


def _from_json(name: str, datatype: str, shape: list[int], data: object) -> Tensor:
    """Convert JSON data to an array, flat or nested according to its shape."""
    if type(data) is not list:
        raise _bad(f"input {name!r} needs data: a list, flat or nested")
    letter = _PACKED.get(datatype)
    if letter is not None and len(data) <= _FEW and set(map(type, data)) == _FLOATS and math.prod(shape) == len(data):
        try:
            return np.frombuffer(struct.pack(f"<{len(data)}{letter}", *data), NUMPY_TYPES[datatype]).reshape(shape)
        except OverflowError as error:
            raise _bad(f"input {name!r} holds a number too large for {datatype}") from error
    if datatype == "BYTES":
        flat = _flatten_texts(name, data)
    else:
        try:
            flat = _numbers(data, datatype)
        except (ValueError, OverflowError) as error:
            raise _bad(f"the data of input {name!r} is not a regular list: {error}") from error
        if flat.ndim > 1 and list(flat.shape) != shape:
            raise _bad(f"the data of input {name!r} is nested as {list(flat.shape)}, its shape is {shape}")
        flat = _typed(name, datatype, flat)
    count = math.prod(shape)
    if flat.size != count:
        raise _bad(f"input {name!r} has {flat.size} elements, its shape {shape} needs {count}")
    try:
        return flat.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise _bad(f"input {name!r} cannot have shape {shape}") from error


def _numbers(data: list[Any], datatype: str) -> Tensor:
    """Convert a nested list to an array; keep integers where required, since numpy turns 2**63 beside 0 into floats.

    Raises:
        ValueError: The list is not regular.
        OverflowError: A number is too large for any type.
    """
    array = np.array(data)
    if NUMPY_TYPES[datatype].kind in "iu" and array.dtype.kind == "f":
        exact = np.array(data, dtype=object)
        return exact if _all_whole(exact) else array
    return array


def _all_whole(array: Tensor) -> bool:
    return all(type(value) is int for value in array.flat)


def _typed(name: str, datatype: str, array: Tensor) -> Tensor:
    """Convert ``array`` to ``datatype``, if every element can be converted."""
    dtype = NUMPY_TYPES[datatype]
    if array.dtype == dtype:
        return array
    if array.size == 0:
        return array.astype(dtype)
    kind, wanted = array.dtype.kind, dtype.kind
    if wanted == "f" and kind in "iuf":
        try:
            with np.errstate(over="raise"):
                return array.astype(dtype)
        except FloatingPointError as error:
            raise _bad(f"input {name!r} holds a number too large for {datatype}") from error
    if wanted in "iu" and (kind in "iu" or (kind == "O" and _all_whole(array))):
        limits = np.iinfo(dtype)
        if int(array.min()) >= limits.min and int(array.max()) <= limits.max:
            return array.astype(dtype)
        raise _bad(f"input {name!r} holds a number outside {datatype}")
    raise _bad(f"input {name!r} holds something else than {datatype}")


def _flatten_texts(name: str, data: list[Any]) -> Tensor:
    """The strings of a nested list, in order, as bytes."""
    elements: list[bytes] = []
    stack: list[Any] = [iter(data)]
    while stack:
        for item in stack[-1]:
            if type(item) is str:
                elements.append(item.encode())
            elif type(item) is list:
                stack.append(iter(item))
                break
            else:
                raise _bad(f"input {name!r} holds something else than strings")
        else:
            stack.pop()
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


def _texts(name: str, array: Tensor) -> list[str]:
    try:
        return [element.decode() if isinstance(element, bytes) else str(element) for element in array.tolist()]
    except UnicodeDecodeError as error:
        raise _bad(f"output {name!r} holds bytes that are not text; ask for it with binary_data") from error
