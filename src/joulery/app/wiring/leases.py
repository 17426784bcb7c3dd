"""Leases of device settings on this machine: holding them, listing them and reverting all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from joulery.app.wiring.devices import open_device
from joulery.domain.errors import ActuationError, CapabilityError, JouleryError
from joulery.domain.gpu.device import DeviceSpec, Lease, Owner
from joulery.domain.ports import Device
from joulery.runtime.leasing.leases import DURATION_S, LeaseHolder, renewed_leases
from joulery.runtime.leasing.watchdog import Watchdog, revert_lease
from joulery.store.leases import LeaseBook, lives

_WATCHDOG = "joulery.app.wiring.lease_watchdog"


def start_watchdog(book: LeaseBook, owner: Owner) -> Watchdog:
    """The watchdog of a holder's leases, running.

    Raises:
        CapabilityError: The process cannot be started; without a watchdog nothing is set.
    """
    return Watchdog.start(_WATCHDOG, book, owner)


def held_leases(
    tell: Callable[[str], None], duration_s: float = DURATION_S
) -> AbstractAsyncContextManager[LeaseHolder]:
    """A lease holder whose leases are renewed while the block runs and reverted when it ends.

    Args:
        tell: Receives a message when a lease is lost or cannot be renewed.
        duration_s: How long a lease stays valid without a renewal.
    """
    return renewed_leases(tell, duration_s, watch=start_watchdog)


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """One lease as ``joulery doctor`` shows it.

    Attributes:
        name: Its name, the stem of its file.
        lease: The lease; None where its file is damaged.
        state: ``held`` (its owner lives), ``expired`` (its owner lives and does not renew it), ``abandoned`` (its
            owner has ended), ``damaged``.
        detail: One sentence.
    """

    name: str
    lease: Lease | None
    state: str
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        lease = self.lease
        known = {} if lease is None else {"device": lease.device, "wanted": lease.wanted, "pid": lease.owner.pid}
        return {"name": self.name, "state": self.state, "detail": self.detail, **known}


def lease_statuses(book: LeaseBook | None = None) -> tuple[LeaseStatus, ...]:
    """Every recorded lease, by name."""
    book = book or LeaseBook()
    return tuple(status for name in book.names() if (status := _status(book, name)) is not None)


def _status(book: LeaseBook, name: str) -> LeaseStatus | None:
    try:
        lease = book.read(name)
    except JouleryError as error:
        return LeaseStatus(name, None, "damaged", str(error))
    if lease is None:
        return None
    state = "abandoned"
    if lives(lease.owner):
        state = "held" if lease.expires_s > time.time() else "expired"
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
    book = book or LeaseBook()
    said: list[str] = []
    failed: list[tuple[str, JouleryError]] = []
    for name in book.names():
        try:
            said.append(revert_lease(book, name, open_))
        except JouleryError as error:
            failed.append((name, error))
    if not failed:
        return tuple(said)
    message = "settings could not be reverted: " + "; ".join(f"{name}: {error}" for name, error in failed)
    grants = [error.grant for _, error in failed if isinstance(error, CapabilityError) and error.grant]
    if len(grants) == len(failed):
        raise CapabilityError(message, resource=failed[0][0], grant=grants[0])
    dirty = tuple(name for name, _ in failed)
    raise ActuationError(message, applied=tuple(said), left_dirty=dirty, hint=f"the leases are in {book.folder}")
