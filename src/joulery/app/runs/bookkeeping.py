"""Record runs in the ledger."""

from __future__ import annotations

import os
from pathlib import Path

from joulery.accounting.rollup import IDLE, UNATTRIBUTED, hourly
from joulery.app.runs.recorded import RunView
from joulery.store.ledger import CarbonEntry, EnergyEntry, Ledger, RunEntry
from joulery.user import state_home

CHARGED = "charged"


def default_ledger() -> Path:
    """Path of the ledger: ``$JOULERY_LEDGER``, or ``joulery/ledger.db`` in the user's state folder."""
    named = os.environ.get("JOULERY_LEDGER")
    if named:
        return Path(named)
    return state_home() / "joulery" / "ledger.db"


def book(view: RunView, ledger: Ledger) -> None:
    """Record a run in the ledger; an earlier record of the run is replaced.

    Raises:
        CapabilityError: The ledger cannot be written.
        DataError: The run's charges or the ledger are damaged.
    """
    energy: list[EnergyEntry] = []
    carbon: list[CarbonEntry] = []
    for workload, owner, footprint in view.charges:
        parts = [(part.device, CHARGED, part.quality, part.energy_j) for part in footprint.parts]
        parts.append(("", IDLE, footprint.idle_quality, footprint.idle_j))
        parts.append(("", UNATTRIBUTED, footprint.idle_quality, footprint.unattributed_j))
        for hour_s, (share, share_of_grams) in hourly(footprint, view.ticks).items():
            energy += [
                EnergyEntry(owner, workload, device, hour_s, role, quality, energy_j * share)
                for device, role, quality, energy_j in parts
                if energy_j * share > 0
            ]
            if footprint.signal is not None and footprint.scope is not None:
                grams = footprint.counted_g * share_of_grams
                carbon.append(CarbonEntry(owner, workload, hour_s, footprint.signal, footprint.scope, grams))
    ledger.record(_entry(view), energy, carbon)


def _entry(view: RunView) -> RunEntry:
    manifest = view.manifest
    started_s, ended_s = manifest.get("created_s"), manifest.get("ended_s")
    return RunEntry(
        id=view.name,
        kind=view.kind,
        path=str(view.path.absolute()),
        owner=view.owner,
        host=str(manifest.get("host", "")),
        started_s=float(started_s) if isinstance(started_s, (int, float)) else 0.0,
        ended_s=float(ended_s) if isinstance(ended_s, (int, float)) else None,
        state=str(manifest.get("state", "")),
    )
