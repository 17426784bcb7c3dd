"""Recorded traces of events and of power, by file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from joulery.domain.energy.power import PowerTrace
    from joulery.domain.trace.events import EventTrace


def load_events(path: Path, form: str | None = None, hlo: Sequence[Path] = ()) -> EventTrace:
    """The named events of a trace file of any known form (:func:`joulery.adapters.tracers.files.read_events`)."""
    from joulery.adapters.tracers.files import read_events

    return read_events(path, form, hlo)


def load_power(path: Path, period_s: float | None = None) -> list[PowerTrace]:
    """The channels of a power table (:func:`joulery.adapters.tracers.tables.read_power_table`)."""
    from joulery.adapters.tracers.tables import read_power_table

    return read_power_table(path, period_s=period_s)
