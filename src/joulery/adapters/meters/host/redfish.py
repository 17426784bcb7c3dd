"""The host's power as its management controller (BMC) reports over Redfish (DMTF DSP0266, DSP2046).

Read is one chassis, by the first of these that it has:

1. ``EnvironmentMetrics``: ``EnergyJoules``, a counter; else ``PowerWatts``;
2. ``Power``: ``PowerControl[].PowerConsumedWatts`` (deprecated, and what most machines of today have). With several,
   the first with a number counts: the others may be parts of it.

``EnergykWh`` is not read: a tenth of a kilowatt hour resolves no run. A machine with several chassis is read by the one
that lies in no other; where there are several, one must be named, because their sum may count a part twice.

User and password come from ``REDFISH_USER`` and ``REDFISH_PASSWORD``; an account with the role ReadOnly is enough. They
are sent over TLS alone, except to this machine. ``REDFISH_CA`` names the certificate of a BMC that signed its own.
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
    """The power of a host.

    Args:
        address: ``https://BMC`` or ``https://BMC/redfish/v1/Chassis/NAME``.
        fetch: Returns a resource.
        background: Ask in a thread.

    Raises:
        ConfigError: It is no address, several chassis could be meant, or a password would be sent in the clear.
        CapabilityError: Nothing answers there, the account is refused, or no power is reported.
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
    """The address of a BMC.

    Raises:
        ConfigError: It is none.
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
    """GETs resources with an account, bounded in time and size.

    Args:
        address: Of the BMC.
        environ: Holds the account.

    Raises:
        ConfigError: The password would travel without TLS.
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
            CapabilityError: It does not answer, refuses the account, or answers no JSON object.
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
    """The path of the one chassis that reports power and lies in no other."""
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
    """A chassis's reading now, joules or watts, and notes for a reader."""
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
    """A reading of a running host: finite and above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(value)


def _id(link: object) -> str:
    found = link.get("@odata.id") if isinstance(link, Mapping) else None
    return found if isinstance(found, str) and found.startswith("/redfish/") else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
