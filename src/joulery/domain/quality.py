"""Quality of a number: measured, modelled or assumed, never mixed without a label."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Quality(StrEnum):
    """Origin of a number, best first."""

    MEASURED = "measured"
    """Read from a sensor or counter of the device in question."""
    MODELLED = "modelled"
    """Computed from measured quantities (utilisation, time) through a model of the device."""
    ASSUMED = "assumed"
    """Taken from a table or a person, nothing of it observed here."""


_ORDER = {Quality.MEASURED: 0, Quality.MODELLED: 1, Quality.ASSUMED: 2}


def weakest(qualities: Iterable[Quality]) -> Quality:
    """The weakest of several qualities; ``MEASURED``, the neutral element, for none."""
    return max(qualities, key=_ORDER.__getitem__, default=Quality.MEASURED)
