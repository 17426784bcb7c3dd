"""Encoding and decoding of bodies of the Open Inference Protocol for a client: tensors in binary, otherwise JSON.

Source: KServe, Open Inference Protocol (V2), REST; Triton's extensions for binary tensors and request parameters
(``timeout``, in microseconds).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from joulery.domain.serving.engine import InferRequest
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, TensorSpec, datatype_of, from_bytes, to_bytes

_HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_MICROSECONDS = 1e6


def encoded(request: InferRequest) -> tuple[bytes, dict[str, str]]:
    """The body of a request, tensors in binary, and the headers that describe it.

    Raises:
        DataError: A tensor's type has no name in the protocol.
    """
    entries: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, array in request.inputs.items():
        raw.append(to_bytes(array))
        entries.append(
            {
                "name": name,
                "datatype": datatype_of(array),
                "shape": array.shape,
                "parameters": {"binary_data_size": len(raw[-1])},
            }
        )
    parameters: dict[str, Any] = {"binary_data_output": True}
    if request.timeout_s is not None:
        parameters["timeout"] = round(request.timeout_s * _MICROSECONDS)
    content: dict[str, Any] = {"inputs": entries, "parameters": parameters}
    if request.outputs:
        content["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in request.outputs]
    text = orjson.dumps(content)
    headers = {"content-type": "application/octet-stream", _HEADER_LENGTH: str(len(text))}
    return b"".join((text, *raw)), headers


def decoded(headers: Mapping[str, str], body: bytes) -> dict[str, Tensor]:
    """The outputs in an answer.

    Raises:
        DataError, ValueError, KeyError, TypeError: The body is not a valid answer.
    """
    length = int(headers.get(_HEADER_LENGTH, len(body)))
    content = orjson.loads(body[:length])
    view, at = memoryview(body), length
    outputs: dict[str, Tensor] = {}
    for entry in content["outputs"]:
        shape = tuple(int(size) for size in entry["shape"])
        size = entry.get("parameters", {}).get("binary_data_size")
        if size is None:
            outputs[entry["name"]] = _of_json(entry["data"], entry["datatype"], shape)
        else:
            outputs[entry["name"]] = from_bytes(view[at : at + size], entry["datatype"], shape)
            at += size
    return outputs


def _of_json(data: Any, datatype: str, shape: tuple[int, ...]) -> Tensor:
    """The array of JSON data, from a server that sends no binary; null is NaN."""
    if datatype == "BYTES":
        texts = [text.encode() for text in np.asarray(data, object).ravel().tolist()]
        return np.array([*texts, None], object)[:-1].reshape(shape)
    dtype = NUMPY_TYPES[datatype]
    values = np.asarray(data, np.float64 if dtype.kind == "f" else None)
    return values.astype(dtype).reshape(shape)


def specs(entries: Any) -> tuple[TensorSpec, ...]:
    """Parse the declarations of tensors.

    Raises:
        ValueError, KeyError, TypeError: The entries are not such declarations.
    """
    return tuple(
        TensorSpec(str(entry["name"]), str(entry["datatype"]), tuple(int(size) for size in entry["shape"]))
        for entry in entries
    )
