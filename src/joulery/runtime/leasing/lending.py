"""Leases inside an event loop: renewed while a block runs, everything given back at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from joulery.domain.errors import JouleryError
from joulery.runtime.leasing.leases import LASTS_S, LeaseHolder
from joulery.store.leases import LeaseBook

_RENEWALS = 5
"""How often a lease is renewed in the time it lasts."""


@asynccontextmanager
async def lending(
    tell: Callable[[str], None], lasts_s: float = LASTS_S, folder: Path | None = None
) -> AsyncIterator[LeaseHolder]:
    """A holder of leases for as long as the block runs.

    Args:
        tell: Told when a setting was taken away, or cannot be renewed.
        lasts_s: How long a lease holds without being renewed.
        folder: Where leases are written down; the user's when None.

    Raises:
        ActuationError: Something cannot be given back; its lease stays and the watchdog goes on trying.
    """
    holder = LeaseHolder(LeaseBook(folder), lasts_s)
    renewing = asyncio.create_task(_renew(holder, lasts_s / _RENEWALS, tell), name="leases")
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
                tell(f"{name} was set back by somebody else while it was on loan here")
        except JouleryError as error:
            tell(f"a lease could not be renewed: {error}")
