"""Ports for the programs that tests start.

A port that is only looked for and let go may be another program's before the test's own program takes it: a connection
of anybody's gets one of the same range from the kernel. These lie below that range, and no other test process is
given one until this one ends.
"""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_FIRST, _LAST = 20_000, 32_000
"""Above what Ray gives its workers, below what the kernel gives to connections."""
_held: dict[int, int] = {}
"""What holds each port of this process: the descriptor of a locked file."""


def free_ports(count: int = 1) -> list[int]:
    """Ports in a row that are free, and no other test process will be given."""
    places = list(range(_FIRST, _LAST - count))
    random.Random(os.urandom(8)).shuffle(places)
    for first in places:
        ports = range(first, first + count)
        taken = [port for port in ports if _take(port)]
        if len(taken) == count:
            return taken
        for port in taken:
            os.close(_held.pop(port))
    raise RuntimeError(f"no {count} ports in a row are free")


def free_port() -> int:
    """A port that is free, and no other test process will be given."""
    return free_ports()[0]


def _take(port: int) -> bool:
    if port in _held:
        return False
    folder = Path(tempfile.gettempdir(), f"joulery-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        socket.create_server(("", port)).close()
    except OSError:
        os.close(descriptor)
        return False
    _held[port] = descriptor
    return True
