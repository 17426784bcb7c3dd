"""Privileged server for :mod:`joulery.adapters.meters.rapl_helper`: it reads counters and accepts only ``r``.

It opens the counters and its socket as root, then gives up root: the kernel checks permissions when a file is opened,
not when it is read.
"""

from __future__ import annotations

import contextlib
import grp
import json
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from joulery.adapters.meters.rapl_helper import ASK, RENEWED_S, description, peer
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.ports import Meter
from joulery.unix_sockets import clear_socket_path

MAX_CLIENTS = 64
_SO_PEERGROUPS = 59
_GROUP_BYTES = 1024
"""The most that ``getsockopt`` of Python takes: 256 groups; a user of more has none here."""
_TICK_S = 0.2


class RaplServer:
    """Server of RAPL counters for root, the user who started it, and one group.

    Args:
        meter: The counters.
        listener: A listening socket.
        group: Id of the permitted group.
        say: Receives messages for the operator.
        now_s: A monotonic clock, seconds.
    """

    def __init__(
        self,
        meter: Meter,
        listener: socket.socket,
        group: int,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter, self._listener, self._group, self._say, self._now_s = meter, listener, group, say, now_s
        self._owner = os.geteuid()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._clients: set[socket.socket] = set()
        self._refused: set[int] = set()
        self._answer, self._read_at_s = b"", -math.inf

    def serve(self, stop: threading.Event) -> None:
        """Answer requests until ``stop`` is set."""
        while not stop.is_set():
            self.step(_TICK_S)
        for client in tuple(self._clients):
            self._disconnect(client)
        self._selector.close()

    def step(self, timeout_s: float) -> None:
        """Answer pending requests, after waiting for one at most ``timeout_s``."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._serve_one(key.fileobj)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it hung up before it was answered
            return
        client.setblocking(False)
        _, uid, gid = peer(client)
        if not self._permitted(client, uid, gid):
            if uid not in self._refused and len(self._refused) < MAX_CLIENTS:
                self._refused.add(uid)
                self._say(f"user {uid} is refused: neither root nor a member of group {self._group}")
            client.close()
            return
        if len(self._clients) >= MAX_CLIENTS:
            client.close()
            return
        try:
            client.send(description(self._meter.channels))
        except OSError:
            client.close()
            return
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ)

    def _permitted(self, client: socket.socket, uid: int, gid: int) -> bool:
        return uid in (0, self._owner) or self._group in (gid, *peer_groups(client))

    def _serve_one(self, client: socket.socket) -> None:
        try:
            if client.recv(16) != ASK:
                self._disconnect(client)
                return
            client.send(self._reading())
        except OSError:
            self._disconnect(client)

    def _reading(self) -> bytes:
        """The answer packet with the counters, at most :data:`RENEWED_S` old."""
        if self._now_s() - self._read_at_s >= RENEWED_S:
            values = self._meter.read()
            self._answer = json.dumps([None if math.isnan(v) else round(v * 1e6) for v in values]).encode()
            self._read_at_s = self._now_s()
            for note in self._meter.notes():
                self._say(note)
        return self._answer

    def _disconnect(self, client: socket.socket) -> None:
        self._clients.discard(client)
        self._selector.unregister(client)
        client.close()


def peer_groups(connection: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of the other end, from the kernel; none on kernels older than Linux 4.13."""
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUP_BYTES)
    except OSError:
        return ()
    return struct.unpack(f"{len(packed) // 4}I", packed[: len(packed) // 4 * 4])


def group_number(name: str) -> int:
    """The id of a group, given by name or number.

    Raises:
        ConfigError: There is no such group.
    """
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(
            "there is no such group", pointer="--group", got=name, expected="sudo groupadd --system joulery"
        ) from error


@contextlib.contextmanager
def listening(path: Path, group: int) -> Iterator[socket.socket]:
    """Open a socket that its owner and one group may connect to; its file is removed at the end.

    Raises:
        ConfigError: Another helper listens there, or the path is not a socket.
        CapabilityError: The socket cannot be created.
    """
    clear_socket_path(path, socket.SOCK_SEQPACKET, "--listen")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if os.geteuid() == 0:
            os.chown(path, -1, group)
        path.chmod(0o660)
        listener.listen(16)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise CapabilityError(f"{path} cannot be made: {error.strerror or error}", resource=str(path)) from error
    made = path.stat()
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if path.stat().st_ino == made.st_ino:
                path.unlink()
