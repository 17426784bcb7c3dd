"""What is on loan on this machine, what may be set, and having everything back: the part of ``joulery doctor``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from joulery.app.wiring.devices import open_device
from joulery.domain.errors import ActuationError, CapabilityError, JouleryError
from joulery.domain.gpu.device import DeviceSpec, Lease
from joulery.domain.ports import Device
from joulery.runtime.leasing.leases import take_back
from joulery.store.leases import LeaseBook, lives


@dataclass(frozen=True, slots=True)
class Loan:
    """One lease as a person wants to see it.

    Attributes:
        name: Its name; the file's stem.
        lease: The lease; None where its file is damaged.
        state: ``held`` (its owner lives), ``expired`` (lives and has gone silent), ``abandoned`` (its owner is gone),
            ``damaged``.
        detail: In words.
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


def loans(book: LeaseBook | None = None) -> tuple[Loan, ...]:
    """Everything that is on loan, by name."""
    book = book or LeaseBook()
    return tuple(loan for name in book.names() if (loan := _loan(book, name)) is not None)


def _loan(book: LeaseBook, name: str) -> Loan | None:
    try:
        lease = book.read(name)
    except JouleryError as error:
        return Loan(name, None, "damaged", str(error))
    if lease is None:
        return None
    state = "abandoned"
    if lives(lease.owner):
        state = "held" if lease.expires_s > time.time() else "expired"
    owner = f"process {lease.owner.pid} ({lease.owner.program})"
    silent_s = max(0.0, time.time() - lease.renewed_s)
    detail = f"{lease.device}: {lease.wanted}, for {owner}, renewed {silent_s:.0f} s ago; {lease.reason}"
    return Loan(name, lease, state, detail)


def reset_everything(
    book: LeaseBook | None = None, open_: Callable[[DeviceSpec], Device[Any]] = open_device
) -> tuple[str, ...]:
    """Set everything on loan back to what it was found at, whoever holds it; a sentence each.

    Raises:
        CapabilityError: Something may not be set by this process; everything else is back.
        ActuationError: Something could not be set back; everything else is.
    """
    book = book or LeaseBook()
    said: list[str] = []
    failed: list[tuple[str, JouleryError]] = []
    for name in book.names():
        try:
            said.append(take_back(book, name, open_))
        except JouleryError as error:
            failed.append((name, error))
    if not failed:
        return tuple(said)
    message = "not everything could be set back: " + "; ".join(f"{name}: {error}" for name, error in failed)
    grants = [error.grant for _, error in failed if isinstance(error, CapabilityError) and error.grant]
    if len(grants) == len(failed):
        raise CapabilityError(message, resource=failed[0][0], grant=grants[0])
    dirty = tuple(name for name, _ in failed)
    raise ActuationError(message, applied=tuple(said), left_dirty=dirty, hint=f"the leases are in {book.folder}")
