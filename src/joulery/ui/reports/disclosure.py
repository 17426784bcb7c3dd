"""Reports for publication: a Markdown table, the snippet of a model card, and the SCI score."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from joulery import __version__
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.format import grams, percent, si
from joulery.ui.reports.table import Rollup

_UNIT = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([^\d\s].*?)\s*")


@dataclass(frozen=True, slots=True)
class FunctionalUnit:
    """Unit of a score.

    Attributes:
        count: Number of units that the runs did.
        name: Name of one unit (``request``).
    """

    count: float
    name: str

    @classmethod
    def parse(cls, text: str) -> FunctionalUnit:
        """Parse a number and a name, such as ``1000 requests``.

        Raises:
            ConfigError: It is not a number above 0 with a name.
        """
        match = _UNIT.fullmatch(text)
        count = float(re.sub("[_,]", "", match[1])) if match else math.nan
        if match is None or not 0 < count < math.inf:
            raise ConfigError("not a number of functional units", pointer="--per", got=text, expected='"1000 requests"')
        return cls(count, match[2])


@dataclass(frozen=True, slots=True)
class SciScore:
    """Software Carbon Intensity (ISO/IEC 21031:2024): (energy x intensity + embodied) per functional unit.

    Attributes:
        operational_g, embodied_g: Grams of the runs; embodied ones are 0 where none were stated.
        unit: The functional units.
    """

    operational_g: float
    embodied_g: float
    unit: FunctionalUnit

    @property
    def g_per_unit(self) -> float:
        """The score, grams of CO2-equivalent per functional unit."""
        return (self.operational_g + self.embodied_g) / self.unit.count

    def as_dict(self) -> dict[str, object]:
        """The score as a JSON-ready object."""
        return {
            "g_per_unit": self.g_per_unit,
            "operational_g": self.operational_g,
            "embodied_g": self.embodied_g,
            "units": self.unit.count,
            "unit": self.unit.name,
        }

    def __str__(self) -> str:
        embodied = grams(self.embodied_g) if self.embodied_g > 0 else "0 g, none stated (measure --embodied)"
        count = f"{self.unit.count:,.15g} {self.unit.name}"
        parts = f"operational {grams(self.operational_g)}, embodied {embodied}"
        return f"SCI {grams(self.g_per_unit)} CO2e each of {count} ({parts})"


def sci_score(rollup: Rollup, unit: FunctionalUnit) -> SciScore:
    """The score of runs.

    Raises:
        DataError: Their grams are not known for all of their energy.
    """
    return SciScore(_whole_grams(rollup, "an SCI score"), rollup.footprint.embodied_g, unit)


def as_markdown(rollup: Rollup, score: SciScore | None = None) -> str:
    """The table as Markdown, with its total and the basis of the numbers."""
    footprint = rollup.footprint
    known = footprint.carbon_g is not None
    lines = [f"| {rollup.by} | energy | share | carbon | quality |", "| --- | ---: | ---: | ---: | --- |"]
    total_j = footprint.energy_j
    for row in rollup.rows:
        share = percent(row.energy_j / total_j) if total_j > 0 else ""
        carbon = "–" if math.isnan(row.carbon_g) else grams(row.carbon_g)
        lines.append(f"| {_cell(row.key)} | {si(row.energy_j, 'J')} | {share} | {carbon} | {row.quality} |")
    total_g = grams(footprint.counted_g) if known else "–"
    lines += [f"| **total** | **{si(total_j, 'J')}** | | **{total_g}** | {footprint.quality} |", ""]
    lines.append(f"{footprint.energy_kwh:.6g} kWh; {_basis(rollup)}.")
    if footprint.embodied_g > 0:
        lines.append(f"Embodied carbon besides: {grams(footprint.embodied_g)}.")
    if score is not None:
        lines.append(f"{score}.")
    return "\n".join([*lines, ""])


def as_model_card(rollup: Rollup) -> str:
    """The ``co2_eq_emissions`` of a Hugging Face model card, in grams.

    Source: Hugging Face Hub, model cards, "Displaying carbon emissions for your model".

    Raises:
        DataError: The grams are not known for all of the energy.
    """
    emissions_g = _whole_grams(rollup, "a model card")
    devices = sorted({part.device for part in rollup.footprint.parts})
    zones = sorted({view.site.carbon.zone for view in rollup.views if view.site and view.site.carbon} - {"stated"})
    lines = [
        "co2_eq_emissions:",
        f"  emissions: {emissions_g:.6g}  # grams of CO2-equivalent",
        f"  source: {_quoted(f'joulery {__version__}: {_basis(rollup)}')}",
        "  # training_type: pre-training or fine-tuning",
    ]
    if zones:
        lines.append(f"  geographical_location: {_quoted(', '.join(zones))}")
    if devices:
        lines.append(f"  hardware_used: {_quoted(', '.join(devices))}  # better: the names of the devices")
    return "\n".join([*lines, ""])


def _whole_grams(rollup: Rollup, what: str) -> float:
    footprint = rollup.footprint
    if footprint.carbon_g is None or footprint.carbon_coverage_ratio < 1:
        raise DataError(
            f"{what} needs the grams of all the energy, known are those of "
            f"{percent(footprint.carbon_coverage_ratio if footprint.carbon_g is not None else 0.0)}",
            hint='name an intensity: joulery report RUN --zone Z or --carbon "250 g/kWh"',
        )
    return footprint.carbon_g


def _basis(rollup: Rollup) -> str:
    footprint = rollup.footprint
    known = "" if footprint.coverage_ratio == 1 else f", {percent(footprint.coverage_ratio)} of the time covered"
    if footprint.carbon_g is None or footprint.signal is None or footprint.scope is None:
        return f"energy {footprint.quality}{known}, no carbon intensity"
    kind = f"{footprint.signal} {footprint.scope} intensity, {footprint.carbon_quality}"
    return f"energy {footprint.quality}{known}, {kind}, PUE {footprint.pue:.3g}"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
