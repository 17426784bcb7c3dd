"""Leases of device settings on this machine: hold, list and revert them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

from joulery.app.wiring.devices import cpufreq_spec, open_device, rapl_spec
from joulery.domain.errors import ActuationError, CapabilityError, JouleryError
from joulery.domain.gpu.device import DeviceSpec, Lease, Owner
from joulery.domain.ports import Device
from joulery.runtime.leasing.leases import DURATION_S, LeaseHolder, renewed_leases
from joulery.runtime.leasing.watchdog import Watchdog, guard, revert_lease
from joulery.store.leases import MACHINE_FOLDER, LeaseBook, LeaseState, lease_state
from joulery.user import home_folder

_WATCHDOG = "joulery.app.wiring.lease_watchdog"


def start_watchdog(book: LeaseBook, owner: Owner) -> Watchdog:
    """Start the watchdog of a holder's leases.

    Raises:
        CapabilityError: The process cannot be started; without a watchdog nothing is set.
    """
    return Watchdog.start(_WATCHDOG, book, owner)


def held_leases(
    tell: Callable[[str], None], duration_s: float = DURATION_S
) -> AbstractAsyncContextManager[LeaseHolder]:
    """Open a lease holder whose leases are renewed while the block runs and reverted when it ends.

    Args:
        tell: Receives a message when a lease is lost or cannot be renewed.
        duration_s: How long a lease stays valid without a renewal.
    """
    return renewed_leases(tell, duration_s, watch=start_watchdog)


def guard_leases(wait: Callable[[float], bool], book: LeaseBook | None = None) -> None:
    """Revert the leases of processes that ended or stopped renewing, also in other containers, until ``wait`` is True.

    Args:
        wait: Waits for a number of seconds; returns True to stop.
        book: The leases; this user's when None.

    Raises:
        CapabilityError: Another guard runs.
    """
    guard(book or LeaseBook(), _open_hardware, wait)


def _open_hardware(spec: DeviceSpec) -> Device[Any]:
    """Open the device of a lease that another container may have written: only known hardware, never a path it names.

    Raises:
        CapabilityError: The lease names something else; ``joulery doctor --reset`` opens that too.
    """
    options = dict(spec.options)
    options.pop("cpus", None)
    usual = {
        "cpufreq": cpufreq_spec().options,
        "rapl-power": rapl_spec().options,
        "nvidia-clock": {},
        "nvidia-mig": {},
        "nvidia-power": {},
    }.get(spec.kind)
    if spec.kind.startswith("nvidia"):
        options.pop("gpu", None)
    if usual is None or options != usual:
        raise CapabilityError("the guard does not open this device", resource=spec.kind, hint="joulery doctor --reset")
    return open_device(spec)


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """One lease as ``joulery doctor`` shows it.

    Attributes:
        name: Its name, the stem of its file.
        lease: The lease; None where its file is damaged.
        state: ``held`` (its owner is alive), ``expired`` (its owner is alive and does not renew it), ``abandoned`` (its
            owner has ended), ``damaged``.
        detail: One sentence.
    """

    name: str
    lease: Lease | None
    state: LeaseState | Literal["damaged"]
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """The status as a JSON-ready dictionary."""
        lease = self.lease
        known = {} if lease is None else {"device": lease.device, "wanted": lease.wanted, "pid": lease.owner.pid}
        return {"name": self.name, "state": self.state, "detail": self.detail, **known}


def lease_statuses(book: LeaseBook | None = None) -> tuple[LeaseStatus, ...]:
    """Status of every recorded lease, by name."""
    found = ((each, name) for each in _lease_books(book) for name in each.names())
    return tuple(status for each, name in found if (status := _status(each, name)) is not None)


def _lease_books(book: LeaseBook | None) -> tuple[LeaseBook, ...]:
    """The given lease book; else this user's, and the one in root's home that earlier versions wrote."""
    if book is not None:
        return (book,)
    mine = LeaseBook()
    earlier = LeaseBook(home_folder() / ".local/state/joulery/leases")
    return (mine, earlier) if mine.folder == MACHINE_FOLDER / "leases" and earlier.names() else (mine,)


def _status(book: LeaseBook, name: str) -> LeaseStatus | None:
    try:
        lease = book.read(name)
    except JouleryError as error:
        return LeaseStatus(name, None, "damaged", str(error))
    if lease is None:
        return None
    state = lease_state(lease, time.time())
    owner = f"process {lease.owner.pid} ({lease.owner.program})"
    silent_s = max(0.0, time.time() - lease.renewed_s)
    detail = f"{lease.device}: {lease.wanted}, set by {owner}, renewed {silent_s:.0f} s ago; {lease.reason}"
    return LeaseStatus(name, lease, state, detail)


def reset_everything(
    book: LeaseBook | None = None, open_: Callable[[DeviceSpec], Device[Any]] = open_device
) -> tuple[str, ...]:
    """Revert every leased setting, regardless of its holder. Returns one sentence each.

    Raises:
        CapabilityError: This process may not set a device; all other settings are reverted.
        ActuationError: A device refused; all other settings are reverted.
    """
    books = _lease_books(book)
    reverted: list[str] = []
    failed: list[tuple[str, JouleryError]] = []
    for each, name in [(one, name) for one in books for name in one.names()]:
        try:
            reverted.append(revert_lease(each, name, open_))
        except JouleryError as error:
            failed.append((name, error))
    if not failed:
        return tuple(reverted)
    message = "settings could not be reverted: " + "; ".join(f"{name}: {error}" for name, error in failed)
    grants = [error.grant for _, error in failed if isinstance(error, CapabilityError) and error.grant]
    if len(grants) == len(failed):
        raise CapabilityError(message, resource=failed[0][0], grant=grants[0])
    dirty = tuple(name for name, _ in failed)
    raise ActuationError(
        message, applied=tuple(reverted), left_dirty=dirty, hint=f"the leases are in {books[0].folder}"
    )
