"""What a job drew since the last look, whoever counts it: every joule once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from joulery.domain.cluster import JobEnergy

_KEPT = 8
"""Sources of a job that are remembered: a scheduler that restarts without its disk states power anew each time."""


@dataclass(frozen=True, slots=True)
class SourceTotal:
    """What one source has counted of a job.

    Attributes:
        energy_j, slot_j: Its last totals.
        beside_j, beside_slot_j: Booked for the job from other sources since, and not yet made up for: when this one is
            back, its total holds that time too.
    """

    energy_j: float
    slot_j: float
    beside_j: float = 0.0
    beside_slot_j: float = 0.0


NOBODY: Mapping[str, SourceTotal] = MappingProxyType({})


def drawn(told: Mapping[str, SourceTotal], total: JobEnergy) -> tuple[float, float, Mapping[str, SourceTotal]]:
    """Joules of a job and of its slots since the last look, and what is to be remembered.

    A source never heard of, or one whose total has fallen, starts at 0. One that is back after another stood in for it
    adds what its total grew by in the meantime, less what was booked from the other.
    """
    last = told.get(total.source)
    if last is None or total.energy_j < last.energy_j or total.slot_j < last.slot_j:
        last = SourceTotal(0.0, 0.0)
    energy_j, beside_j = _less(total.energy_j - last.energy_j, last.beside_j)
    slot_j, beside_slot_j = _less(total.slot_j - last.slot_j, last.beside_slot_j)
    others = {
        source: SourceTotal(one.energy_j, one.slot_j, one.beside_j + energy_j, one.beside_slot_j + slot_j)
        for source, one in told.items()
        if source != total.source
    }
    kept = dict(list(others.items())[-(_KEPT - 1) :])
    kept[total.source] = SourceTotal(total.energy_j, total.slot_j, beside_j, beside_slot_j)
    return energy_j, slot_j, MappingProxyType(kept)


def _less(grown: float, booked: float) -> tuple[float, float]:
    """What is left to book, and what remains to be made up for."""
    return max(0.0, grown - booked), max(0.0, booked - grown)
