"""Meter of RAPL for unprivileged users: reads the counters from ``joulery rapl-helper`` over a Unix socket.

Each request and each answer is one packet (``SOCK_SEQPACKET``). On connecting, the helper sends a list of its counters
(:func:`description`). It answers each ``r`` with their microjoules in that order, ``null`` for a counter that cannot be
read. The kernel identifies each side to the other: the helper answers root, its own user and one group, and the client
trusts only root and its own user.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from joulery.adapters.meters.rapl import SOCKET
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.domain.quality import Quality

RENEWED_S = 0.01
"""The helper reads the counters at most this often: finer readings can leak other processes' secrets."""
ASK = b"r"
MAX_BYTES = 65_536
TIMEOUT_S = 0.5
RETRY_S = 1.0
JOIN = "sudo usermod -aG joulery $USER"
"""Grants a user the helper's answers, after the next login."""

_VERSION = 1
_CREDENTIALS = struct.Struct("3i")


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """The process, user and group ids of the other end of a connection, from the kernel."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(packed)
    return pid, uid, gid


def description(channels: Sequence[Channel]) -> bytes:
    """The packet that lists the counters."""
    reported = [[channel.device, channel.component, round(channel.wrap_j * 1e6)] for channel in channels]
    return json.dumps({"joulery_rapl": _VERSION, "channels": reported}).encode()


class RaplHelperMeter:
    """Meter that reads the counters through the helper; it reconnects to a lost helper, at most once a second.

    Args:
        path: The helper's socket.
        now_s: A monotonic clock, seconds.

    Raises:
        CapabilityError: No helper answers, it refuses this user, or it is not trusted.
    """

    def __init__(self, path: Path = SOCKET, now_s: Callable[[], float] = time.monotonic) -> None:
        self._path, self._now_s = path, now_s
        self._connection: socket.socket | None
        self._connection, self._channels = _connected(path)
        self._notes: list[str] = []
        self._failed = [False] * len(self._channels)
        self._lost = False
        self._open = True
        self._retry_at_s = -math.inf

    @property
    def channels(self) -> tuple[Channel, ...]:
        """One counter for each package and one for each DRAM domain."""
        return self._channels

    def read(self) -> tuple[float, ...]:
        """Joules; NaN where the helper does not answer or cannot read a counter."""
        missing = (math.nan,) * len(self._channels)
        if not self._open or (self._connection is None and not self._connect_again()):
            return missing
        assert self._connection is not None
        try:
            self._connection.send(ASK)
            values = json.loads(self._connection.recv(MAX_BYTES) or b"null")
            if not isinstance(values, list) or len(values) != len(self._channels):
                raise ValueError("it answers with another number of counters")
            return tuple([self._joules(slot, value) for slot, value in enumerate(values)])
        except (OSError, ValueError) as error:
            self._lose(str(error) or type(error).__name__)
            return missing

    def notes(self) -> tuple[str, ...]:
        """New notes that the helper or one of its counters stopped answering or answers again."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._open = False
        self._disconnect()

    def _connect_again(self) -> bool:
        if self._now_s() < self._retry_at_s:
            return False
        self._retry_at_s = self._now_s() + RETRY_S
        try:
            connection, channels = _connected(self._path)
        except CapabilityError:
            return False
        if channels != self._channels:
            connection.close()
            return False
        self._connection, self._lost = connection, False
        self._notes.append("the RAPL helper answers again")
        return True

    def _joules(self, slot: int, value: Any) -> float:
        known = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if known is self._failed[slot]:
            self._failed[slot] = not known
            channel = self._channels[slot]
            state = "can be read again" if known else "cannot be read any more"
            self._notes.append(f"{channel.device} {channel.component}: RAPL counter {state}")
        return value / 1e6 if known else math.nan

    def _lose(self, why: str) -> None:
        self._disconnect()
        self._retry_at_s = self._now_s() + RETRY_S
        if not self._lost:
            self._lost = True
            self._notes.append(f"the RAPL helper does not answer: {why}")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connected(path: Path) -> tuple[socket.socket, tuple[Channel, ...]]:
    """Connect to a helper, and return the connection and the helper's counters."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(path))
        if peer(connection)[1] not in (0, os.geteuid()):
            raise CapabilityError(f"{path} is served by neither root nor this user", resource=str(path))
        return connection, _channels(connection.recv(MAX_BYTES), path)
    except PermissionError as error:
        connection.close()
        raise _refused(path) from error
    except OSError as error:
        connection.close()
        raise CapabilityError(f"no RAPL helper answers on {path}: {error}", resource=str(path)) from error
    except CapabilityError:
        connection.close()
        raise


def _channels(packet: bytes, path: Path) -> tuple[Channel, ...]:
    if not packet:
        raise _refused(path)
    try:
        reported = json.loads(packet)
        if reported["joulery_rapl"] != _VERSION:
            raise CapabilityError(f"the RAPL helper is of another version of joulery: {path}", resource=str(path))
        return tuple(
            Channel(
                str(device),
                str(component),
                ReadingKind.COUNTER,
                "rapl",
                Quality.MEASURED,
                wrap_j=int(wrap_uj) / 1e6,
                update_s=RENEWED_S,
            )
            for device, component, wrap_uj in reported["channels"]
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CapabilityError(f"{path} is not a RAPL helper", resource=str(path)) from error


def _refused(path: Path) -> CapabilityError:
    return CapabilityError("the RAPL helper refuses this user", resource=str(path), grant=JOIN)
