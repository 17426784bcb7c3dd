"""One line of a table of what was spent."""

from __future__ import annotations

from dataclasses import dataclass

from joulery.domain.quality import Quality


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a rolled-up table.

    Attributes:
        key: What the line is about.
        energy_j: Its joules; NaN when not known.
        carbon_g: Its grams; NaN when not known.
        quality: The weakest quality in it.
        band_j: Half-width of the uncertainty of its joules; 0 when not stated.
    """

    key: str
    energy_j: float
    carbon_g: float
    quality: Quality
    band_j: float = 0.0
