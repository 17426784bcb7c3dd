"""One HTTP GET of a metrics page: bounded in time and size, through no proxy, following no redirect to another host."""

from __future__ import annotations

import http.client
from urllib.parse import SplitResult, urlsplit

from joulery.domain.errors import CapabilityError, ConfigError

TIMEOUT_S = 2.0
MAX_BYTES = 16 << 20
_SECURE = "https"


def metrics_address(text: str, pointer: str) -> SplitResult:
    """The address of a metrics page; its path is ``/metrics`` unless given.

    Raises:
        ConfigError: The text is not such an address.
    """
    written = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(written)
        known = parts.scheme in ("http", _SECURE) and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.username is not None:
        raise ConfigError(
            "not the address of a metrics page", pointer=pointer, got=text, expected="http://HOST:PORT[/metrics]"
        )
    return parts if parts.path not in ("", "/") else parts._replace(path="/metrics")


def scrape(address: SplitResult, timeout_s: float = TIMEOUT_S) -> str:
    """The text of a metrics page.

    Raises:
        CapabilityError: The page does not answer in time, or not with status 200, or with too much.
    """
    make = http.client.HTTPSConnection if address.scheme == _SECURE else http.client.HTTPConnection
    connection = make(address.hostname or "", address.port, timeout=timeout_s)
    target = address.path + (f"?{address.query}" if address.query else "")
    try:
        connection.request("GET", target, headers={"Accept": "text/plain;version=0.0.4", "Connection": "close"})
        answer = connection.getresponse()
        body = answer.read(MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise CapabilityError(f"{address.geturl()} does not answer: {reason}", resource=address.geturl()) from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise CapabilityError(f"{address.geturl()} answers {answer.status} {answer.reason}", resource=address.geturl())
    if len(body) > MAX_BYTES:
        raise CapabilityError(f"{address.geturl()} answers more than {MAX_BYTES >> 20} MiB", resource=address.geturl())
    return body.decode("utf-8", "replace")
