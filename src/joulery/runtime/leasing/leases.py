"""Leased device settings: recorded before they are applied, renewed while in use, reverted afterwards.

::

    with LeaseHolder(LeaseBook(), watch=start_watchdog) as holder:
        holder.set(device, spec, ClockSetting(1000.0), "no request is running or queued")   # recorded, watched, set
        ... holder.renew() every few seconds ...
    # the setting found before is restored

Four components revert a setting: the holder when it closes; the watchdog, a separate process, when the holder's
process ends for any reason or lets the lease expire; the guard (``joulery doctor --guard``) when both end at once, with
their container; and ``joulery doctor --reset``. In a container nothing is set without a guard outside of it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from joulery.domain.errors import ActuationError, CapabilityError, JouleryError
from joulery.domain.gpu.device import DeviceCapability, DeviceChange, DeviceSpec, Knob, Lease, Owner, S, lease_name
from joulery.domain.ports import Device
from joulery.runtime.leasing.watchdog import Watchdog
from joulery.store.leases import Isolation, LeaseBook, LeaseState, lease_state, owner_of

DURATION_S = 10.0
"""Time that a lease stays valid without a renewal, s."""
_RENEWALS_PER_DURATION = 5


@dataclass(slots=True)
class _Held:
    """A setting that this process holds a lease on."""

    device: Device[Any]
    lease: Lease


class LeaseHolder:
    """The leases of this process. One thread may renew while another sets.

    Args:
        book: Where leases are recorded.
        duration_s: How long a lease stays valid without a renewal.
        watch: Starts the watchdog process.
    """

    def __init__(
        self, book: LeaseBook, duration_s: float = DURATION_S, *, watch: Callable[[LeaseBook, Owner], Watchdog]
    ) -> None:
        owner = owner_of(os.getpid(), _program())
        if owner is None:
            raise CapabilityError("leases need /proc to identify processes", resource="/proc/self/stat")
        self.owner = owner
        self._book, self._duration_s = book, duration_s
        self._watch = watch
        self._watchdog: Watchdog | None = None
        self._held: dict[str, _Held] = {}
        self._starting = threading.Lock()
        self._settling, self._closed = threading.Condition(), False
        self._setting: list[int] = []
        """Threads that set something now."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def held(self) -> tuple[Lease, ...]:
        """The leases this process holds, sorted by name."""
        return tuple(self._held[name].lease for name in sorted(self._held))

    def set(self, device: Device[S], spec: DeviceSpec, wanted: S, reason: str) -> DeviceChange[S]:
        """Record the lease, make sure the watchdog runs, then set the device.

        Args:
            device: The device.
            spec: How another process opens it, for the watchdog.
            wanted: The setting.
            reason: Why, for the lease's file.

        Raises:
            CapabilityError: Another process holds the lease, this process may not set the device, it is in a container
                without a guard outside of it, or the holder is closed; nothing changed.
            ConfigError, ActuationError: As :meth:`joulery.domain.ports.Device.apply`.
        """
        with self._settling:
            if self._closed:
                raise CapabilityError(f"leases are being reverted: {wanted} is not set", resource=spec.kind)
            self._setting.append(threading.get_ident())
        try:
            return self._set(device, spec, wanted, reason)
        finally:
            with self._settling:
                self._setting.remove(threading.get_ident())
                self._settling.notify_all()

    def _set(self, device: Device[S], spec: DeviceSpec, wanted: S, reason: str) -> DeviceChange[S]:
        able = device.capability()
        label = able.device
        if able.uuid:
            spec = replace(spec, options={**spec.options, "gpu": able.uuid})  # indices differ between containers
        name = lease_name(able.uuid or label, spec.knob)
        self.require_guard(able)
        with self._book.locked(name):
            present = self._book.read(name)
            mine = present is not None and present.owner == self.owner
            if present is not None and not mine:
                self._take_over(device, present)
            other = self._book.elsewhere(name)
            if other is not None and lease_state(other, time.time()) is LeaseState.HELD:
                raise _leased(other)
            before = present.before if present is not None and mine else device.observe().memento
            lease = Lease(
                device=label,
                spec=spec,
                before=before,
                wanted=str(wanted),
                reason=reason,
                owner=self.owner,
                renewed_s=time.time(),
                lasts_s=self._duration_s,
                uuid=able.uuid,
            )
            self._book.write(lease)
            try:
                self._ensure_watched()
                done = device.apply(wanted)
            except JouleryError as error:
                if not mine and not getattr(error, "left_dirty", ()):
                    self._book.remove(name)
                    self._held.pop(name, None)
                else:
                    self._held[name] = _Held(device, lease)
                raise
            self._held[name] = _Held(device, lease)
            self._book.renew(name)  # setting the device may take longer than the lease lasts
            return done

    def require_guard(self, able: DeviceCapability) -> None:
        """Check that settings of this device are reverted whatever happens to this process.

        Raises:
            CapabilityError: As :meth:`joulery.store.leases.LeaseBook.require_guard`.
        """
        # An MPS daemon is a process of the container and ends with it. The guard runs no commands of a lease: a machine
        # that sleeps when a container ends is woken by the next ``joulery up`` there.
        if not able.emulated and able.knob not in (Knob.MPS, Knob.SLEEP):
            self._book.require_guard(able.device)

    def renew(self) -> tuple[str, ...]:
        """Renew every lease. Returns the names of leases that another process has reverted."""
        if self._held:
            self._ensure_watched()
        lost = tuple(name for name in tuple(self._held) if not self._renewed(name))
        for name in lost:
            self._held.pop(name, None)
        return lost

    def release(self, name: str) -> DeviceChange[Any] | None:
        """Revert one setting. Returns None if another process has reverted it already.

        Raises:
            CapabilityError, ActuationError: The device refuses; the lease stays for the watchdog and
                ``doctor --reset``.
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
        """Revert every setting, also one that another thread is setting meanwhile. Safe to call twice.

        Raises:
            ActuationError: A device refuses; its lease stays and the watchdog retries.
        """
        with self._settling:
            self._closed = True
            # Not for this thread: a signal's handler may close in the middle of its own setting.
            self._settling.wait_for(lambda: set(self._setting) <= {threading.get_ident()})
        failed: list[str] = []
        # The last first: what was set on a slice goes before the cut does.
        for name in reversed(tuple(self._held)):
            try:
                self.release(name)
            except JouleryError as error:
                failed.append(f"{name}: {error}")
                self._held.pop(name, None)
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.dismiss(wait=not failed)  # another holder of this process has its own watchdog
        if failed:
            raise ActuationError(
                f"settings could not be reverted: {'; '.join(failed)}",
                left_dirty=tuple(failed),
                hint="joulery doctor --reset tries again",
            )

    def _renewed(self, name: str) -> bool:
        present = self._book.read(name)
        return present is not None and present.owner == self.owner and self._book.renew(name)

    def _take_over(self, device: Device[Any], present: Lease) -> None:
        if lease_state(present, time.time()) is LeaseState.HELD:
            raise _leased(present)
        device.reset(present.before)
        self._book.remove(present.name)

    def _ensure_watched(self) -> None:
        with self._starting:
            if self._watchdog is None or not self._watchdog.alive:
                if self._watchdog is not None:
                    self._watchdog.dismiss(wait=True)
                self._watchdog = self._watch(self._book, self.owner)


def _leased(present: Lease) -> CapabilityError:
    owner = present.owner
    where = "" if owner.pid_namespace in (0, Isolation.find().pid) else " of another container"
    return CapabilityError(
        f"{present.device} is leased by process {owner.pid}{where} ({owner.program}): {present.wanted}",
        resource=present.device,
        hint="stop that process, or: joulery doctor --reset",
    )


def _program() -> str:
    """Readable name of this process: the program and its subcommand."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    return " ".join((name, *(word for word in sys.argv[1:2] if not word.startswith("-"))))


@asynccontextmanager
async def renewed_leases(
    tell: Callable[[str], None],
    duration_s: float = DURATION_S,
    folder: Path | None = None,
    *,
    watch: Callable[[LeaseBook, Owner], Watchdog],
) -> AsyncIterator[LeaseHolder]:
    """A lease holder whose leases are renewed while the block runs and reverted when it ends.

    Args:
        tell: Receives a message when a setting was reverted by another process or cannot be renewed.
        duration_s: How long a lease stays valid without a renewal.
        folder: Where leases are recorded; the user's state folder when None.
        watch: Starts the watchdog process.

    Raises:
        ActuationError: A setting cannot be reverted; its lease stays and the watchdog retries.
    """
    holder = LeaseHolder(LeaseBook(folder), duration_s, watch=watch)
    renewing = asyncio.create_task(_renew(holder, duration_s / _RENEWALS_PER_DURATION, tell), name="leases")
    try:
        yield holder
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await asyncio.to_thread(holder.close)


async def _renew(holder: LeaseHolder, period_s: float, tell: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(period_s)
        try:
            for name in await asyncio.to_thread(holder.renew):
                tell(f"{name} was reverted by another process while this one held its lease")
        except JouleryError as error:
            tell(f"a lease could not be renewed: {error}")
