"""Settings on loan: written down first, renewed while somebody cares, taken back when nobody does.

::

    with LeaseHolder(LeaseBook()) as holder:
        holder.set(device, spec, ClockSetting(1000.0), "nothing runs or waits")   # written down, watched, then set
        ... holder.renew() at least every few seconds ...
    # back to what was found

Three things take a setting back: the holder when it closes; the watchdog, a process of its own, as soon as the holder's
process has ended in whatever way, or has not renewed for as long as the lease lasts; and ``joulery doctor --reset``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from joulery.domain.errors import ActuationError, CapabilityError, JouleryError
from joulery.domain.gpu.device import DeviceChange, DeviceSpec, Lease, Owner, S, lease_name
from joulery.domain.ports import Device
from joulery.runtime.process import spawn_process
from joulery.store.leases import LeaseBook, lives, owner_of

DONE = b"done\n"
"""What a holder says to its watchdog when everything is back."""
LASTS_S = 10.0
"""How long a lease holds without being renewed."""


@dataclass(slots=True)
class _Held:
    """One setting this process is responsible for."""

    device: Device[Any]
    lease: Lease


class LeaseHolder:
    """The leases of this process. One thread may renew while another sets.

    Args:
        book: Where they are written down.
        lasts_s: How long one holds without being renewed.
        watch: Starts the watchdog; another in tests.
    """

    def __init__(
        self, book: LeaseBook, lasts_s: float = LASTS_S, watch: Callable[[LeaseBook, Owner], Watchdog] | None = None
    ) -> None:
        owner = owner_of(os.getpid(), _program())
        if owner is None:
            raise CapabilityError("leases need /proc to tell one process from another", resource="/proc/self/stat")
        self.owner = owner
        self._book, self._lasts_s = book, lasts_s
        self._watch = watch or Watchdog.start
        self._watchdog: Watchdog | None = None
        self._held: dict[str, _Held] = {}
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def held(self) -> tuple[Lease, ...]:
        """What this process is responsible for, sorted by name."""
        return tuple(self._held[name].lease for name in sorted(self._held))

    def set(self, device: Device[S], spec: DeviceSpec, wanted: S, reason: str) -> DeviceChange[S]:
        """Write the lease down, see that somebody watches, then set the device.

        Raises:
            CapabilityError: Another process holds it, or it may not be set; nothing was changed.
            ConfigError, ActuationError: As :meth:`joulery.domain.ports.Device.apply`.
        """
        label = device.capability().device
        name = lease_name(label, spec.knob)
        with self._book.locked(name):
            present = self._book.read(name)
            mine = present is not None and present.owner == self.owner
            if present is not None and not mine:
                self._take_over(device, present)
            before = present.before if present is not None and mine else device.observe().memento
            lease = Lease(
                device=label,
                spec=spec,
                before=before,
                wanted=str(wanted),
                reason=reason,
                owner=self.owner,
                renewed_s=time.time(),
                lasts_s=self._lasts_s,
            )
            self._book.write(lease)
            try:
                self._see_watched()
                done = device.apply(wanted)
            except JouleryError as error:
                if not mine and not getattr(error, "left_dirty", ()):
                    self._book.remove(name)
                    self._held.pop(name, None)
                else:
                    self._held[name] = _Held(device, lease)
                raise
            self._held[name] = _Held(device, lease)
            self._book.renew(name)  # it may have taken longer than a lease lasts
            return done

    def renew(self) -> tuple[str, ...]:
        """Say that this process still cares; the names of leases that were taken away meanwhile."""
        if self._held:
            self._see_watched()
        lost = tuple(name for name in tuple(self._held) if not self._renewed(name))
        for name in lost:
            self._held.pop(name, None)
        return lost

    def release(self, name: str) -> DeviceChange[Any] | None:
        """Take one setting back; None where somebody else has done so.

        Raises:
            CapabilityError, ActuationError: It cannot be; the lease stays, the watchdog and ``doctor --reset`` try on.
        """
        held = self._held[name]
        with self._book.locked(name):
            present = self._book.read(name)
            done = None
            if present is not None and present.owner == self.owner:
                done = held.device.reset(present.before)
                self._book.remove(name)
        self._held.pop(name, None)
        return done

    def close(self) -> None:
        """Take everything back. Safe to call twice.

        Raises:
            ActuationError: Something cannot be taken back; its lease stays and the watchdog goes on trying.
        """
        failed: list[str] = []
        for name in tuple(self._held):
            try:
                self.release(name)
            except JouleryError as error:
                failed.append(f"{name}: {error}")
                self._held.pop(name, None)
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.dismiss(wait=not failed)  # another holder of this process has a watchdog of its own
        if failed:
            raise ActuationError(
                f"not everything could be set back: {'; '.join(failed)}",
                left_dirty=tuple(failed),
                hint="joulery doctor --reset tries again",
            )

    def _renewed(self, name: str) -> bool:
        present = self._book.read(name)
        return present is not None and present.owner == self.owner and self._book.renew(name)

    def _take_over(self, device: Device[Any], present: Lease) -> None:
        if lives(present.owner) and present.expires_s > time.time():
            raise CapabilityError(
                f"{present.device} is on loan to process {present.owner.pid} ({present.owner.program}): "
                f"{present.wanted}",
                resource=present.device,
                hint="stop that process, or: joulery doctor --reset",
            )
        device.reset(present.before)
        self._book.remove(present.name)

    def _see_watched(self) -> None:
        with self._starting:
            if self._watchdog is None or not self._watchdog.alive:
                if self._watchdog is not None:
                    self._watchdog.dismiss(wait=True)
                self._watchdog = self._watch(self._book, self.owner)


class Watchdog:
    """The process that takes settings back when their holder has gone. It ends by itself when nothing is on loan."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, book: LeaseBook, owner: Owner) -> Self:
        """Start it, in a session of its own: what ends this process's group does not end it. Waits until it watches.

        Raises:
            CapabilityError: It cannot be started; without it nothing is set.
        """
        told = (str(book.folder.absolute()), str(owner.pid))
        try:
            with (book.folder / "watchdog.log").open("ab") as log:
                process = spawn_process("joulery.runtime.leasing.watchdog", told, log)
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
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while it watches."""
        return self._process.poll() is None

    def dismiss(self, *, wait: bool) -> None:
        """Tell it that its holder needs it no more: it ends at once; without ``wait``, once all is set back."""
        if wait and self.alive and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it ends by itself this very moment
                self._process.stdin.write(DONE)
                self._process.stdin.flush()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if wait:
            self._process.wait()


def _program() -> str:
    """What this process is, for people: the program and its verb."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    return " ".join((name, *(word for word in sys.argv[1:2] if not word.startswith("-"))))


def take_back(
    book: LeaseBook,
    name: str,
    open_: Callable[[DeviceSpec], Device[Any]],
    due: Callable[[Lease], bool] = lambda lease: True,
) -> str:
    """Set a device back to what its lease says it was, and forget the lease; a sentence about it.

    Args:
        book: Where it is written down.
        name: Which lease.
        open_: Opens its device.
        due: Asked once nobody else can change the lease any more; where it says no, nothing is done.

    Raises:
        JouleryError: It cannot be; the lease stays.
    """
    with book.locked(name):
        lease = book.read(name)
        if lease is None or not due(lease):
            return f"{name}: nothing to set back"
        device = open_(lease.spec)
        done = device.reset(lease.before)
        book.remove(name)
        return f"{lease.device}: {done.before} -> {done.after}"
