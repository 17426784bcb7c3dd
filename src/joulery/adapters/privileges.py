"""Privileges of this process as drivers check them, and dropping them."""

from __future__ import annotations

import ctypes
import os
import pwd
from pathlib import Path

from joulery.domain.errors import CapabilityError, ConfigError

_CAP_SYS_ADMIN = 21
_FIRST_USER_NAMESPACE = "user:[4026531837]"
"""The machine's own user namespace (``PROC_USER_INIT_INO``): drivers check capabilities there."""


def may_administer(proc: Path = Path("/proc/self")) -> bool:
    """Whether ``capable(CAP_SYS_ADMIN)`` holds: NVIDIA's driver checks it before setting clocks, limits or partitions.

    Root without the capability (an ordinary container) may not; another user with it may; root of a user namespace
    (a rootless container) may not.

    Args:
        proc: The process, in /proc.
    """
    try:
        status = (proc / "status").read_text()
        namespace = str((proc / "ns/user").readlink())
    except OSError:
        return False
    effective = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_ADMIN & 1) and namespace == _FIRST_USER_NAMESPACE


_PR_SET_NO_NEW_PRIVS = 38


def become(user: str) -> None:
    """Switch this process to another user permanently and drop its other groups; open files stay open.

    Raises:
        ConfigError: There is no such user.
        CapabilityError: This process may not change its user.
    """
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except KeyError as error:
        raise ConfigError("there is no such user", pointer="--user", got=user) from error
    if os.geteuid() != entry.pw_uid:
        try:
            os.setgroups([])
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
        except OSError as error:
            raise CapabilityError(
                f"this process may not become {user}: {error.strerror}", hint="start it as root, or leave --user out"
            ) from error
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
