"""Convert messages of the gRPC protocol to arrays and back.

Tensors have one of two forms, which all inputs of a request share: elements in typed fields, or raw bytes as in the
binary extension of the HTTP protocol. The answer has the form of the request, but is raw if it contains FP16, for which
there is no typed field.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from joulery.domain.errors import DataError
from joulery.domain.serving.engine import EnergyShare, InferRequest, Outcome, RequestError
from joulery.domain.serving.tensors import NUMPY_TYPES, Tensor, datatype_of, from_bytes, to_bytes
from joulery.gateway.grpc_api import inference_pb2 as messages
from joulery.gateway.protocol import MAX_RANK

FIELDS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The typed field of each datatype; FP16 has none."""


def parse(message: messages.ModelInferRequest, timeout_s: float | None = None) -> InferRequest:
    """Parse the request in a message.

    Args:
        message: The message of a client.
        timeout_s: How long the client waits; None for the engine's own limit.

    Raises:
        RequestError: The message is not a request of the protocol.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise _bad(f"raw_input_contents has {len(raw)} entries for {len(message.inputs)} inputs")
    inputs: dict[str, Tensor] = {}
    for index, entry in enumerate(message.inputs):
        if entry.name in inputs:
            raise _bad(f"input {entry.name!r} is listed twice")
        inputs[entry.name] = _input(entry, raw[index] if raw else None)
    outputs = [output.name for output in message.outputs]
    if len(set(outputs)) != len(outputs):
        raise _bad("an output is listed twice")
    return InferRequest(inputs, tuple(outputs), timeout_s, message.model_version)


def render(
    message: messages.ModelInferRequest, variant: str, outputs: Mapping[str, Tensor], share: EnergyShare | None
) -> messages.ModelInferResponse:
    """Encode the answer to a request, with its cost as parameters; unknown figures are left out.

    Raises:
        DataError: An output is of a type that the protocol cannot carry.
    """
    answer = messages.ModelInferResponse(model_name=message.model_name, model_version=variant, id=message.id)
    for name, text in costs_of(variant, share).items():
        if isinstance(text, str):
            answer.parameters[name].string_param = text
        else:
            answer.parameters[name].double_param = text
    types = {name: datatype_of(array) for name, array in outputs.items()}
    raw = bool(message.raw_input_contents) or not set(types.values()) <= set(FIELDS)
    for name, array in outputs.items():
        entry = answer.outputs.add(name=name, datatype=types[name], shape=array.shape)
        if raw:
            answer.raw_output_contents.append(to_bytes(array))
        else:
            getattr(entry.contents, FIELDS[types[name]]).extend(_elements(array))
    return answer


def costs_of(variant: str, share: EnergyShare | None) -> dict[str, str | float]:
    """The variant that answered and its cost, named like the HTTP headers."""
    found: dict[str, str | float] = {"x-joulery-variant": variant} if variant else {}
    if share is not None:
        found |= {"x-joulery-energy-j": share.energy_j, "x-joulery-quality": share.quality.value}
        if share.carbon_g is not None:
            found["x-joulery-carbon-g"] = share.carbon_g
    return found


def _input(entry: messages.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    name, datatype, shape = entry.name, entry.datatype, tuple(entry.shape)
    if not name:
        raise _bad("every input needs a name")
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise _bad(f"input {name!r} needs a shape: at most {MAX_RANK} sizes of 0 or more")
    if datatype not in NUMPY_TYPES:
        raise _bad(f"input {name!r} has datatype {datatype!r}; known are {', '.join(NUMPY_TYPES)}")
    if raw is not None and entry.HasField("contents"):
        raise _bad(f"input {name!r} has contents and raw_input_contents; give one")
    try:
        if raw is not None:
            return from_bytes(raw, datatype, shape)
        return _typed(entry, datatype).reshape(shape)
    except (DataError, ValueError, OverflowError) as error:
        raise _bad(f"input {name!r}: {error}") from error


def _typed(entry: messages.ModelInferRequest.InferInputTensor, datatype: str) -> Tensor:
    """The elements of a typed field, flat."""
    field = FIELDS.get(datatype)
    if field is None:
        raise DataError(f"{datatype} has no typed field: send it in raw_input_contents")
    others = [one.name for one, _ in entry.contents.ListFields() if one.name != field]
    if others:
        raise DataError(f"{datatype} goes in {field}, not in {others[0]}")
    values = getattr(entry.contents, field)
    if datatype == "BYTES":
        elements = np.empty(len(values), object)
        elements[:] = list(values)
        return elements
    dtype = NUMPY_TYPES[datatype]
    if dtype.kind in "iu" and len(values):
        limits = np.iinfo(dtype)
        if min(values) < limits.min or max(values) > limits.max:
            raise DataError(f"a number outside {datatype}")
    return np.array(values, dtype)


def _elements(array: Tensor) -> list[object]:
    """The elements of an output for its typed field; text as bytes.

    Raises:
        DataError: An object array holds something else than bytes or text.
    """
    flat: list[object] = array.reshape(-1).tolist()
    if array.dtype.kind not in "OSU":
        return flat
    found: list[object] = []
    for element in flat:
        text = element.encode() if isinstance(element, str) else element
        if not isinstance(text, bytes):
            raise DataError(f"a BYTES tensor holds {type(element).__name__}", hint="use bytes or str elements")
        found.append(text)
    return found


def _bad(message: str) -> RequestError:
    return RequestError(message, Outcome.INVALID)
