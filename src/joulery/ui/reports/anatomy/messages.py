"""Notes on a tensor energy footprint, as text."""

from __future__ import annotations

import math

import numpy as np

from joulery.accounting.operations.precision import Sight, resolution
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.format import UNKNOWN, percent

_WORDS = {
    Sight.SHARED: "their energy is their share of the time within its windows",
    Sight.ESTIMATED: "their power was estimated over many of its windows",
}


def sight_notes(footprint: TensorFootprint) -> list[str]:
    """Notes on the share of the energy of operations that the sensor cannot resolve."""
    attributed = footprint.attributed_j
    if not attributed > 0:
        return []
    rows = resolution(footprint)
    notes = []
    for sight, words in _WORDS.items():
        seen = [row.sight is sight and energy_j > 0 for row, energy_j in zip(rows, footprint.energy_j, strict=True)]
        part = float(np.sum(footprint.energy_j[np.array(seen, np.bool_)]))
        if part > 0:
            ratio = percent(part / attributed)
            notes.append(f"{ratio} of it went to operations shorter than the sensor resolves: {words}")
    return notes


def share_text(energy_j: float, whole_j: float) -> str:
    """Share of the whole in percent; a dash where one is not known."""
    return percent(energy_j / whole_j) if whole_j > 0 and not math.isnan(energy_j) else UNKNOWN
