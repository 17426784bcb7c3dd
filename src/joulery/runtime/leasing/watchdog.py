"""The watchdog of leases: ``python -m joulery.runtime.leasing.watchdog FOLDER PID``.

It watches one process. As soon as that has ended, in whatever way, every setting it holds goes back to what it was; so
does one setting whose lease has run out while the process lives on (it hangs, or was stopped). ``done`` on its standard
input says that the process needs it no more; the end of its input without a word, that something is still to be set
back. It ends then when nothing of that process is on loan.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from joulery.app.wiring.devices import open_device
from joulery.domain.errors import JouleryError
from joulery.domain.gpu.device import Lease
from joulery.runtime.leasing.leases import DONE, take_back
from joulery.store.leases import LeaseBook, lives

PERIOD_S = 0.5
"""How often leases are looked at while their holder lives; its end is noticed at once."""
PATIENCE_S = 60.0
"""For how long a device that refuses to be set back is asked again after its holder has ended."""


def watch(book: LeaseBook, pid: int) -> int:
    """Watch a process until nothing of it is on loan.

    Returns:
        0 when everything is back, 1 when something could not be set back: its lease is still there.
    """
    try:
        descriptor: int | None = os.pidfd_open(pid)
    except ProcessLookupError:
        descriptor = None
    _say("watching")
    dismissed, gone_s = False, None if descriptor is not None else time.monotonic()
    while True:
        gone_s = time.monotonic() if gone_s is None and _ended(descriptor, dismissed) else gone_s
        heard = None if dismissed else _heard()
        if heard == DONE:
            return 0
        dismissed = dismissed or heard is not None
        left = [lease for lease in _held(book, pid) if not _settled(book, lease, gone=gone_s is not None)]
        if not left and (dismissed or gone_s is not None):
            return 0
        if gone_s is not None:
            if time.monotonic() - gone_s > PATIENCE_S:
                return 1
            time.sleep(PERIOD_S)


def _ended(descriptor: int | None, dismissed: bool) -> bool:
    """Wait a period, or until the process ends or closes the pipe; True when it has ended."""
    if descriptor is None:
        return True
    watched = [descriptor] if dismissed else [descriptor, sys.stdin.fileno()]
    ready, _, _ = select.select(watched, [], [], PERIOD_S)
    return descriptor in ready


def _heard() -> bytes | None:
    """What the process has said on the pipe; nothing when it closed it without a word, None while it is silent."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
    return os.read(sys.stdin.fileno(), 4096) if ready else None


def _held(book: LeaseBook, pid: int) -> list[Lease]:
    """The leases of that process; damaged files are left for ``joulery doctor`` to show."""
    found = []
    for name in book.names():
        try:
            lease = book.read(name)
        except JouleryError:
            continue
        if lease is not None and lease.owner.pid == pid:
            found.append(lease)
    return found


def _settled(book: LeaseBook, lease: Lease, *, gone: bool) -> bool:
    """True when the setting is back; False while it is on loan, or refuses to go back."""

    def due(present: Lease) -> bool:
        same = present.owner == lease.owner
        return same and (gone or not lives(present.owner) or present.expires_s <= time.time())

    if not due(lease):
        return False
    try:
        said = take_back(book, lease.name, open_device, due)
    except JouleryError as error:
        said = f"{lease.name} could not be set back: {error}"
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {said}\n")
    sys.stderr.flush()
    left = book.read(lease.name)
    return left is None or left.owner != lease.owner


def _say(text: str) -> None:
    with suppress(BrokenPipeError):  # the process ended while this one started: all the more to do
        os.write(sys.stdout.fileno(), text.encode() + b"\n")


def main() -> int:
    """Watch the process named on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends the holder so may end its group and its service with it
    return watch(LeaseBook(Path(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
