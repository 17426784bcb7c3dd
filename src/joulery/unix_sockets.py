"""The path of a Unix socket: a socket that a killed process left behind is removed, and nothing else is.

Every layer may import it, except the pure ones.
"""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path

from joulery.domain.errors import ConfigError


def clear_socket_path(path: Path, kind: int, flag: str) -> None:
    """Remove a socket to which nothing listens, so that another one can be bound to its path.

    Args:
        path: The path of the socket that is about to be bound.
        kind: Type of that socket, such as ``socket.SOCK_STREAM``.
        flag: The command-line flag that names the path, for errors.

    Raises:
        ConfigError: The path is something other than a socket, another process listens there, or the socket cannot be
            removed.
    """
    wanted = "a free path, or that of a socket without a listener"
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # nothing is there, or binding names the fault of the path
    if not stat.S_ISSOCK(mode):
        raise ConfigError("is not a socket", pointer=flag, got=str(path), expected=wanted)
    with socket.socket(socket.AF_UNIX, kind) as probe:
        failed = probe.connect_ex(str(path))
    if failed not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ConfigError("another process listens there", pointer=flag, got=str(path), expected=wanted)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be removed: {error.strerror}", pointer=flag, got=str(path)) from error
