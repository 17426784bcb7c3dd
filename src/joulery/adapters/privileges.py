"""What the kernel lets this process do, as drivers ask it."""

from __future__ import annotations

from pathlib import Path

_CAP_SYS_ADMIN = 21
_FIRST_USER_NAMESPACE = "user:[4026531837]"
"""The machine's own user namespace (``PROC_USER_INIT_INO``): drivers ask for capabilities there."""


def may_administer(proc: Path = Path("/proc/self")) -> bool:
    """Whether ``capable(CAP_SYS_ADMIN)`` holds, which NVIDIA's driver asks before it sets clocks, limits or partitions.

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
