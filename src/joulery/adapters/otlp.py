"""OTLP over HTTP: posts one body of metrics to an OpenTelemetry collector, through no proxy."""

from __future__ import annotations

import http.client
from urllib.parse import SplitResult, urlsplit

from joulery.domain.errors import CapabilityError, ConfigError

PATH = "/v1/metrics"
TIMEOUT_S = 5.0
_ANSWER_BYTES = 4096


def collector_address(text: str) -> SplitResult:
    """The address of a collector's metrics endpoint; its path is ``/v1/metrics`` unless given.

    Raises:
        ConfigError: The text is not such an address.
    """
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.username is not None:
        raise ConfigError(
            "not the address of a collector", pointer="--otlp", got=text, expected=f"http://HOST:4318[{PATH}]"
        )
    return parts if parts.path not in ("", "/") else parts._replace(path=PATH)


def push(address: SplitResult, body: bytes, timeout_s: float = TIMEOUT_S) -> None:
    """Post a body of metrics to the collector.

    Raises:
        CapabilityError: The collector does not answer, or refuses the metrics.
    """
    make = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = make(address.hostname or "", address.port, timeout=timeout_s)
    try:
        connection.request("POST", address.path, body, {"Content-Type": "application/json", "Connection": "close"})
        answer = connection.getresponse()
        text = answer.read(_ANSWER_BYTES).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise CapabilityError(f"{address.geturl()} does not answer: {reason}", resource=address.geturl()) from error
    finally:
        connection.close()
    if not http.client.OK <= answer.status < http.client.MULTIPLE_CHOICES:
        raise CapabilityError(
            f"{address.geturl()} refuses metrics: {answer.status} {text[:200]}", resource=address.geturl()
        )
