"""Messages between gateways and the engine server: frames of :mod:`joulery.adapters.engines.embedded.wire`.

Times are sent as ages, seconds before the message was sent, so that machines with different clocks agree on latencies.
A message's key ``m`` is its kind, ``n`` the number of its request; ``t`` is reserved for the frame.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from joulery.domain.errors import DataError
from joulery.domain.serving.engine import (
    InferRequest,
    ModelKind,
    ModelRef,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
    RequestRecord,
)
from joulery.domain.serving.relay import RelayedPart, RelayedRequest
from joulery.domain.serving.service import Slice, SliceKind
from joulery.domain.serving.tensors import Tensor, TensorSpec

PROTOCOL = 1
"""Version of the messages between gateways and the engine server; another one is refused."""
LENGTH = struct.Struct("!Q")
"""Prefix of each frame: its length."""
BEAT_S = 1.0
"""Seconds between two heartbeats of a gateway; the engine server sends its state four times as often."""
SILENT_S = 6.0
"""Seconds of silence after which a side is considered gone."""
CHALLENGE, JOIN, WELCOME, REFUSED, STATE, BEAT = "challenge", "join", "welcome", "refused", "state", "beat"
INFER, CANCEL, ANSWER, END, LABEL, PAGE, CONTENT = "i", "x", "a", "e", "label", "page", "content"
TEXT, PART = "text", "part"
"""A request that the controller answers, and a part of its answer: the body is a tensor."""


def seconds(value: float | None) -> float:
    """A time read from JSON: null becomes NaN, which JSON does not have."""
    return float("nan") if value is None else float(value)


def proof(secret: bytes, nonce: str, name: str) -> str:
    """Proof that a gateway knows the token, which is not sent itself."""
    return hmac.new(secret, f"{nonce} {name}".encode(), hashlib.sha256).hexdigest()


def request_header(number: int, service: str, request: InferRequest, age_s: float) -> dict[str, Any]:
    """The header of a request; its inputs are the tensors."""
    header: dict[str, Any] = {"m": INFER, "n": number, "s": service, "a": age_s}
    if request.outputs:
        header["o"] = request.outputs
    if request.timeout_s is not None:
        header["p"] = request.timeout_s
    if request.variant:
        header["v"] = request.variant
    return header


def request_of(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> InferRequest:
    """The inverse of :func:`request_header`."""
    return InferRequest(tensors, tuple(header.get("o", ())), header.get("p"), header.get("v", ""))


def text_message(number: int, request: RelayedRequest) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the body of a request that the controller answers."""
    header = {"m": TEXT, "n": number, "method": request.method, "path": request.path, "headers": request.headers}
    return header, {"body": np.frombuffer(request.body, np.uint8)}


def text_of(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RelayedRequest:
    """The inverse of :func:`text_message`."""
    method, path = str(header["method"]), str(header["path"])
    return RelayedRequest(method, path, _pairs(header["headers"]), tensors["body"].tobytes())


def part_message(number: int, part: RelayedPart) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the body of a part of the controller's answer."""
    header = {"m": PART, "n": number, "status": part.status, "headers": part.headers, "more": part.more}
    return {**header, "e": part.error}, {"body": np.frombuffer(part.body, np.uint8)}


def part_of(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RelayedPart:
    """The inverse of :func:`part_message`."""
    body = tensors["body"].tobytes()
    return RelayedPart(int(header["status"]), _pairs(header["headers"]), body, bool(header["more"]), str(header["e"]))


def _pairs(found: Sequence[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(value)) for name, value in found)


def error_header(number: int, error: RequestError) -> dict[str, Any]:
    """The header of an answer that is an error."""
    return {
        "m": ANSWER,
        "n": number,
        "e": str(error),
        "o": error.outcome.value,
        "ra": error.retry_after_s,
        "v": error.variant,
        "s": error.service_s,
        "c": error.cpu_s,
        "k": error.attempts,
    }


def error_of(header: Mapping[str, Any]) -> RequestError:
    """The inverse of :func:`error_header`."""
    return RequestError(
        str(header["e"]),
        Outcome(header["o"]),
        retry_after_s=header["ra"],
        variant=header["v"],
        service_s=seconds(header["s"]),
        cpu_s=seconds(header["c"]),
        attempts=header["k"],
    )


def record_header(number: int, record: RequestRecord, now_s: float) -> dict[str, Any]:
    """The header of a record; its times as ages at ``now_s``, on the clock of the record."""
    return {
        "m": END,
        "n": number,
        "s": record.service,
        "v": record.variant,
        "r": record.replica,
        "a": now_s - record.arrival_s,
        "b": now_s - record.start_s,
        "d": now_s - record.end_s,
        "o": record.outcome.value,
        "u": record.service_s,
        "c": record.cpu_s,
        "k": record.attempts,
        "g": record.batch,
    }


def record_of(header: Mapping[str, Any], now_s: float) -> RequestRecord:
    """The inverse of :func:`record_header`, on another clock."""
    return RequestRecord(
        str(header["s"]),
        str(header["v"]),
        str(header["r"]),
        now_s - header["a"],
        now_s - seconds(header["b"]),
        now_s - header["d"],
        Outcome(header["o"]),
        seconds(header["u"]),
        seconds(header["c"]),
        int(header["k"]),
        None,
        int(header["g"]),
    )


def views_to_json(views: Sequence[ReplicaView]) -> list[dict[str, Any]]:
    """Views of replicas for a gateway: readiness and declarations."""
    return [
        {
            "id": view.id,
            "service": view.spec.service,
            "variant": view.spec.variant,
            "state": view.state.value,
            "inputs": [list(spec) for spec in view.inputs],
            "outputs": [list(spec) for spec in view.outputs],
            "platform": view.platform,
            "warm": list(view.warm),
        }
        for view in views
    ]


def views_of(found: Sequence[Mapping[str, Any]]) -> tuple[ReplicaView, ...]:
    """The inverse of :func:`views_to_json`.

    Raises:
        DataError: The list is not of that form.
    """
    try:
        return tuple(
            ReplicaView(
                id=one["id"],
                spec=ReplicaSpec(
                    one["service"], one["variant"], Slice(SliceKind.WHOLE), ModelRef(ModelKind.REMOTE, one["id"])
                ),
                state=ReplicaState(one["state"]),
                inputs=_specs(one["inputs"]),
                outputs=_specs(one["outputs"]),
                platform=one["platform"],
                warm=tuple(one["warm"]),
            )
            for one in found
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a list of replicas: {error!r}") from error


def _specs(found: Sequence[Sequence[Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, datatype, tuple(shape)) for name, datatype, shape in found)
