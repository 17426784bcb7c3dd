"""The watchdog of leases: a process that reverts the settings of one other process.

The watchdog reverts every setting as soon as the watched process ends for any reason, and one setting whose lease has
expired although the process lives (it hangs, or is stopped). ``done`` on its standard input ends it at once; end of
file without it ends it as soon as the process holds no lease any more. Its entry point is
``joulery.app.wiring.lease_watchdog``, which can open the devices.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from joulery.domain.errors import CapabilityError, JouleryError
from joulery.domain.gpu.device import DeviceSpec, Lease, Owner
from joulery.domain.ports import Device
from joulery.runtime.process import spawn_process
from joulery.store.leases import LeaseBook, LeaseState, lease_state

DONE = b"done\n"
"""The holder writes this to its watchdog when every setting is reverted."""
PERIOD_S = 0.5
"""Interval at which leases are checked while their holder lives; its end is noticed at once."""
PATIENCE_S = 60.0
"""Time for which a device that refuses to be reverted is retried after its holder has ended."""


class Watchdog:
    """Handle of the process that reverts settings when their holder is gone. It ends when no lease is left."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, module: str, book: LeaseBook, owner: Owner) -> Self:
        """Start the watchdog in its own session, so that a signal to this process group does not reach it.

        Args:
            module: Its entry point, called with the folder of the book and the holder's process id and start.
            book: Where leases are recorded.
            owner: The holder.

        Raises:
            CapabilityError: The process cannot be started; without a watchdog nothing is set.
        """
        arguments = (str(book.folder.absolute()), str(owner.pid), str(owner.start_ticks))
        try:
            with (book.folder / "watchdog.log").open("ab") as log:
                process = spawn_process(module, arguments, log)
        except OSError as error:
            raise CapabilityError(f"the watchdog of leases cannot be started: {error.strerror}") from error
        watchdog = cls(process)
        assert process.stdout is not None
        if process.stdout.readline().strip() != b"watching":
            watchdog.dismiss(wait=True)
            raise CapabilityError("the watchdog of leases ended at once; without it nothing is set")
        return watchdog

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the watchdog process runs."""
        return self._process.poll() is None

    def dismiss(self, *, wait: bool) -> None:
        """End the watchdog: at once with ``wait``, else as soon as every setting is reverted."""
        if wait and self.alive and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it is ending by itself
                self._process.stdin.write(DONE)
                self._process.stdin.flush()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if wait:
            self._process.wait()


def revert_lease(
    book: LeaseBook,
    name: str,
    open_: Callable[[DeviceSpec], Device[Any]],
    due: Callable[[Lease], bool] = lambda lease: True,
) -> str:
    """Restore the setting recorded in a lease and remove the lease. Returns one sentence about it.

    Args:
        book: Where leases are recorded.
        name: The lease.
        open_: Opens its device.
        due: Called with the locked lease; nothing is done if it returns False.

    Raises:
        JouleryError: The device refuses; the lease stays.
    """
    with book.locked(name):
        lease = book.read(name)
        if lease is None or not due(lease):
            return f"{name}: nothing to revert"
        device = open_(lease.spec)
        done = device.reset(lease.before)
        book.remove(name)
        return f"{lease.device}: {done.before} -> {done.after}"


def watch_leases(book: LeaseBook, owner: Owner, open_device: Callable[[DeviceSpec], Device[Any]]) -> int:
    """Watch a process until it holds no lease any more.

    Args:
        book: Where leases are recorded.
        owner: The process.
        open_device: Opens the device of a lease.

    Returns:
        0 when every setting is reverted, 1 when a device refused: its lease is still recorded.
    """
    try:
        descriptor: int | None = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        descriptor = None
    _say("watching")
    dismissed, gone_s = False, None if descriptor is not None else time.monotonic()
    while True:
        gone_s = time.monotonic() if gone_s is None and _ended(descriptor, dismissed) else gone_s
        received = None if dismissed else _received()
        if received == DONE:
            return 0
        dismissed = dismissed or received is not None
        left = [
            lease for lease in _held(book, owner) if not _reverted(book, lease, open_device, gone=gone_s is not None)
        ]
        if not left and (dismissed or gone_s is not None):
            return 0
        if gone_s is not None:
            if time.monotonic() - gone_s > PATIENCE_S:
                return 1
            time.sleep(PERIOD_S)


def guard(book: LeaseBook, open_device: Callable[[DeviceSpec], Device[Any]], wait: Callable[[float], bool]) -> None:
    """Revert every lease whose owner has ended or does not renew it, whatever container it was in.

    A watchdog reverts the settings of a process that ends alone. A container that ends takes the watchdog with it; the
    guard runs outside of it.

    Args:
        book: Where leases are recorded; containers share its folder.
        open_device: Opens the device of a lease.
        wait: Waits so many seconds; True ends the guard.

    Raises:
        CapabilityError: Another guard runs.
    """
    with book.guarding():
        while True:
            for lease in _leases(book):
                _reverted(book, lease, open_device, gone=False)
            if wait(PERIOD_S):
                return


def _ended(descriptor: int | None, dismissed: bool) -> bool:
    """Wait a period, or until the process ends or closes the pipe; True when it has ended."""
    if descriptor is None:
        return True
    watched = [descriptor] if dismissed else [descriptor, sys.stdin.fileno()]
    ready, _, _ = select.select(watched, [], [], PERIOD_S)
    return descriptor in ready


def _received() -> bytes | None:
    """Bytes the process wrote to the pipe; empty if it closed the pipe, None while it is silent."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
    return os.read(sys.stdin.fileno(), 4096) if ready else None


def _leases(book: LeaseBook) -> list[Lease]:
    """Every lease; ``joulery doctor`` shows damaged files."""
    found = []
    for name in book.names():
        try:
            lease = book.read(name)
        except JouleryError:
            continue
        found += [] if lease is None else [lease]
    return found


def _held(book: LeaseBook, owner: Owner) -> list[Lease]:
    """The leases of a process."""

    def identity(one: Owner) -> tuple[object, ...]:
        return one.pid, one.start_ticks, one.boot_id, one.pid_namespace

    return [lease for lease in _leases(book) if identity(lease.owner) == identity(owner)]


def _reverted(book: LeaseBook, lease: Lease, open_device: Callable[[DeviceSpec], Device[Any]], *, gone: bool) -> bool:
    """True when the setting is reverted; False while its lease is valid or the device refuses."""

    def due(present: Lease) -> bool:
        same = present.owner == lease.owner
        return same and (gone or lease_state(present, time.time()) is not LeaseState.HELD)

    if not due(lease):
        return False
    try:
        outcome = revert_lease(book, lease.name, open_device, due)
    except JouleryError as error:
        outcome = f"{lease.name} could not be reverted: {error}"
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {outcome}\n")
    sys.stderr.flush()
    left = book.read(lease.name)
    return left is None or left.owner != lease.owner


def _say(text: str) -> None:
    with suppress(BrokenPipeError):  # the holder ended while the watchdog started: revert its settings
        os.write(sys.stdout.fileno(), text.encode() + b"\n")
