"""Meter of the host's power from its management controller (BMC), over Redfish (DMTF DSP0266, DSP2046).

The meter reads one chassis, from the first of these resources that it has:

1. ``EnvironmentMetrics``: ``EnergyJoules``, a counter; else ``PowerWatts``;
2. ``Power``: ``PowerControl[].PowerConsumedWatts`` (deprecated, and present on most machines of today). With several,
   the first with a number counts: the others may be parts of it.

``EnergykWh`` is not read: its resolution of 0.1 kWh is too coarse for a run. Of several chassis, the meter reads the
one that no other contains; where there are several such, the user must name one, because a sum may count a part twice.

``REDFISH_USER`` and ``REDFISH_PASSWORD`` contain the account; the role ReadOnly is enough. They are sent only over TLS,
except to this machine. ``REDFISH_CA`` names the certificate file of a BMC with a self-signed certificate.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from joulery.adapters.meters.host.polled import DIVIDED, PolledMeter
from joulery.domain.energy.channel import HOST, Channel, ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.quality import Quality

PERIOD_S = 2.0
TIMEOUT_S = 5.0
ROOT = "/redfish/v1/Chassis"
MAX_BYTES = 4 << 20
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_SECURE = "https"

Fetch = Callable[[str], Mapping[str, Any] | None]
"""The JSON of a path of the BMC; None where there is no such resource. Raises CapabilityError."""


def open_redfish(address: str, fetch: Fetch | None = None, *, background: bool = True) -> PolledMeter:
    """Open a meter of the power of a host.

    Args:
        address: ``https://BMC`` or ``https://BMC/redfish/v1/Chassis/NAME``.
        fetch: Returns a resource.
        background: Whether a thread polls the BMC.

    Raises:
        ConfigError: The address is invalid, several chassis are possible, or a password would be sent without TLS.
        CapabilityError: The BMC does not answer, refuses the account, or reports no power.
    """
    parts = redfish_address(address)
    ask = fetch or RedfishClient(parts, os.environ).get
    path = parts.path.rstrip("/")
    chassis = path if path.startswith(ROOT + "/") else _chassis(ask, parts)
    source, several = _source(ask, chassis)
    if source is None:
        raise CapabilityError(
            f"{chassis} reports no power",
            resource=address,
            hint="name another chassis: --meter redfish:URL/redfish/v1/...",
        )
    kind = source[1]
    channel = Channel("machine", HOST, kind, "redfish", Quality.MEASURED, update_s=PERIOD_S)

    def values() -> tuple[float, ...]:
        now, _ = _source(ask, chassis)
        if now is None or now[1] is not kind:
            return (math.nan,)
        return (now[0],)

    name = f"the BMC (Redfish, {parts.hostname})"
    notes = (DIVIDED, *several)
    return PolledMeter((channel,), values, name, PERIOD_S, background=background, notes=notes, first=(source[0],))


def redfish_address(text: str) -> SplitResult:
    """Parse the address of a BMC.

    Raises:
        ConfigError: The text is not such an address.
    """
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        known = parts.scheme in ("http", _SECURE) and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.username is not None:
        raise ConfigError(
            "not the address of a BMC",
            pointer="--meter",
            got=f"redfish:{text}" if "@" not in text else "",
            expected="redfish:https://HOST[/redfish/v1/Chassis/NAME]; credentials in REDFISH_USER, REDFISH_PASSWORD",
        )
    return parts


class RedfishClient:
    """HTTP client of a BMC, with an account and limits of time and size.

    Args:
        address: The BMC's address.
        environ: Environment variables with the account.

    Raises:
        ConfigError: The password would be sent without TLS.
        CapabilityError: The certificate file cannot be read.
    """

    def __init__(self, address: SplitResult, environ: Mapping[str, str]) -> None:
        self._address = address
        user, password = environ.get("REDFISH_USER", ""), environ.get("REDFISH_PASSWORD", "")
        self._headers = {"Accept": "application/json", "OData-Version": "4.0", "Connection": "close"}
        if user and address.scheme != _SECURE and address.hostname not in _LOCAL:
            raise ConfigError(
                "a password is not sent without TLS", pointer="--meter", got=address.geturl(), expected="https://"
            )
        if user:
            self._headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        self._tls: ssl.SSLContext | None = None
        if address.scheme == _SECURE:
            try:
                self._tls = ssl.create_default_context(cafile=environ.get("REDFISH_CA") or None)
            except (OSError, ssl.SSLError) as error:
                raise CapabilityError(
                    f"the certificate in REDFISH_CA cannot be read: {error}", resource="REDFISH_CA"
                ) from error

    def get(self, path: str) -> Mapping[str, Any] | None:
        """The JSON of a resource; None where there is none.

        Raises:
            CapabilityError: The BMC does not answer, refuses the account, or its answer is not a JSON object.
        """
        url = self._address._replace(path=path, query="").geturl()
        connection: http.client.HTTPConnection
        if self._tls is not None:
            connection = http.client.HTTPSConnection(
                self._address.hostname or "", self._address.port, timeout=TIMEOUT_S, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES + 1)
        except ssl.SSLCertVerificationError as error:
            raise CapabilityError(
                f"{url}: {error.verify_message}",
                resource=url,
                hint="REDFISH_CA=FILE names the BMC's own certificate (PEM)",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise CapabilityError(
                f"{url} does not answer: {str(error) or type(error).__name__}", resource=url
            ) from error
        finally:
            connection.close()
        if answer.status in (401, 403):
            raise CapabilityError(
                f"{url} answers {answer.status}",
                resource=url,
                hint="set REDFISH_USER and REDFISH_PASSWORD (role ReadOnly)",
            )
        if answer.status == http.client.NOT_FOUND:
            return None
        try:
            found = json.loads(body) if answer.status == http.client.OK and len(body) <= MAX_BYTES else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CapabilityError(f"{url} answers {answer.status} and no JSON object", resource=url)
        return found


def _chassis(ask: Fetch, parts: SplitResult) -> str:
    """The path of the only chassis that reports power and is not contained in another."""
    listed = ask(ROOT)
    paths = [_id(member) for member in _list((listed or {}).get("Members"))]
    outer = []
    for path in filter(None, paths):
        links = (ask(path) or {}).get("Links")
        inside = isinstance(links, Mapping) and bool(_id(links.get("ContainedBy")))
        if not inside and _source(ask, path)[0] is not None:
            outer.append(path)
    if len(outer) > 1:
        raise ConfigError(
            f"{parts.hostname} has {len(outer)} chassis that report power: {', '.join(outer)}",
            pointer="--meter",
            got=f"redfish:{parts.geturl()}",
            expected=f"one of them, such as redfish:{parts._replace(path=outer[0]).geturl()}",
        )
    if not outer:
        raise CapabilityError(f"no chassis of {parts.hostname} reports its power", resource=parts.geturl())
    return outer[0]


def _source(ask: Fetch, chassis: str) -> tuple[tuple[float, ReadingKind] | None, tuple[str, ...]]:
    """The current reading of a chassis, joules or watts, and notes; None without a reading."""
    found = ask(chassis) or {}
    if path := _id(found.get("EnvironmentMetrics")):
        metrics = ask(path) or {}
        for key, kind in (("EnergyJoules", ReadingKind.COUNTER), ("PowerWatts", ReadingKind.POWER)):
            excerpt = metrics.get(key)
            value = _number(excerpt.get("Reading") if isinstance(excerpt, Mapping) else None)
            if value is not None:
                return (value, kind), ()
    if path := _id(found.get("Power")):
        controls = [item for item in _list((ask(path) or {}).get("PowerControl")) if isinstance(item, Mapping)]
        reported = [
            (item, value) for item in controls if (value := _number(item.get("PowerConsumedWatts"))) is not None
        ]
        if reported:
            name = str(reported[0][0].get("Name") or reported[0][0].get("MemberId") or "0")
            several = f"{chassis} reports {len(reported)} powers: only the first, {name!r}, is read"
            return (reported[0][1], ReadingKind.POWER), (several,) if len(reported) > 1 else ()
    return None, ()


def _number(value: object) -> float | None:
    """The number of a plausible reading, finite and above 0; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(value)


def _id(link: object) -> str:
    found = link.get("@odata.id") if isinstance(link, Mapping) else None
    return found if isinstance(found, str) and found.startswith("/redfish/") else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
