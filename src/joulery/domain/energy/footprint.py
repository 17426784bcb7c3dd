"""Energy and carbon of a piece of work: joules by part, idle and unattributed joules, grams with their coverage."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from joulery.domain.energy.carbon import JOULES_PER_KWH, Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.format import duration, grams, percent, si
from joulery.domain.quality import Quality, weakest


@dataclass(frozen=True, slots=True)
class Part:
    """Energy of one component of one device that is charged to the work.

    Attributes:
        device: ``cpu:0``, ``gpu:1`` ...
        component: ``package``, ``dram``, ``board`` ...
        energy_j: Joules charged to the work.
        quality: Measured, modelled or assumed.
        meter: The meter behind the number.
        band_j: Half-width of its uncertainty in joules; 0 when not stated.
        carbon_g: Grams of its joules, counted like the footprint's ``carbon_g``; NaN where they were not kept.
    """

    device: str
    component: str
    energy_j: float
    quality: Quality
    meter: str
    band_j: float = 0.0
    carbon_g: float = 0.0

    @property
    def key(self) -> tuple[str, str, Quality, str]:
        """Device, component, quality and meter: parts with equal keys are added up."""
        return (self.device, self.component, self.quality, self.meter)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Joules and grams of one piece of work. A monoid: ``a + b`` adds up, ``Footprint()`` is neutral.

    The laws, held to 1e-9: ``sum(part.energy_j) + idle_j + unattributed_j == energy_j``, and the same of grams.

    Attributes:
        parts: Energy charged to the work itself, one entry a (device, component, quality, meter), sorted by key.
        idle_j: Energy of its idle devices, as far as the idle rule charges it to this work.
        unattributed_j: Metered energy of its scope without an owner.
        carbon_g: Grams of CO2-equivalent of ``carbon_covered_j`` joules, facility overhead (``pue``) included; None
            without a carbon source.
        carbon_covered_j: Joules (IT side) with a known intensity; 0 when no carbon source was given.
        embodied_g: Embodied grams charged to the work; 0 when not requested.
        facility_j: Energy with facility overhead; ``facility_j / energy_j`` is the PUE.
        start_s, end_s: Hull of the windows, Unix seconds; NaN when empty.
        duration_s: Requested metered time, summed over windows.
        covered_s: Metered time with readings, averaged over the channels of a window, summed over windows.
        idle_quality: Quality of ``idle_j`` and ``unattributed_j``; where both are 0, that of the readings behind it.
        idle_band_j: Half-width of the uncertainty of ``idle_j + unattributed_j`` in joules; 0 when not stated.
        idle_g, unattributed_g: Grams of ``idle_j`` and ``unattributed_j``; NaN where they were not kept.
        signal, scope: What ``carbon_g`` counts; None while no grams are known.
        carbon_quality: Quality of the intensities behind ``carbon_g``.
    """

    parts: tuple[Part, ...] = ()
    idle_j: float = 0.0
    unattributed_j: float = 0.0
    carbon_g: float | None = None
    carbon_covered_j: float = 0.0
    embodied_g: float = 0.0
    facility_j: float = 0.0
    start_s: float = field(default=float("nan"))
    end_s: float = field(default=float("nan"))
    duration_s: float = 0.0
    covered_s: float = 0.0
    idle_quality: Quality = Quality.MEASURED
    signal: Signal | None = None
    scope: Scope | None = None
    carbon_quality: Quality = Quality.MEASURED
    idle_band_j: float = 0.0
    idle_g: float = 0.0
    unattributed_g: float = 0.0

    @property
    def attributed_j(self) -> float:
        """Energy charged to the work itself: the sum of the parts."""
        return math.fsum(part.energy_j for part in self.parts)

    @property
    def energy_j(self) -> float:
        """Parts + idle + unattributed, joules."""
        return math.fsum((*(part.energy_j for part in self.parts), self.idle_j, self.unattributed_j))

    @property
    def counted_g(self) -> float:
        """Grams for use in sums: ``carbon_g``, or 0 without a carbon source."""
        return self.carbon_g or 0.0

    @property
    def band_j(self) -> float:
        """Half-width of the uncertainty of ``energy_j``, joules: bands add linearly (errors of one meter correlate)."""
        return math.fsum((*(part.band_j for part in self.parts), self.idle_band_j))

    @property
    def coverage_ratio(self) -> float:
        """Share of the metered time with readings, 0 to 1; 1 for an empty window."""
        return _ratio(self.covered_s, self.duration_s)

    @property
    def carbon_coverage_ratio(self) -> float:
        """Share of the energy with a known carbon intensity, 0 to 1."""
        return _ratio(self.carbon_covered_j, self.energy_j)

    @property
    def pue(self) -> float:
        """Facility energy per IT energy, energy-weighted."""
        energy_j = self.energy_j
        return max(1.0, self.facility_j / energy_j) if energy_j > 0 else 1.0

    @property
    def quality(self) -> Quality:
        """The weakest quality of anything in the total."""
        rest = (self.idle_quality,) if self.idle_j > 0 or self.unattributed_j > 0 else ()
        return weakest((*(part.quality for part in self.parts if part.energy_j > 0), *rest))

    def _rest_quality(self, other: Footprint) -> Quality:
        """Quality of both footprints' idle and unattributed joules; one without any counts only if neither has any."""
        both = (self, other)
        having = [each for each in both if each.idle_j > 0 or each.unattributed_j > 0]
        return weakest(each.idle_quality for each in having or both)

    @property
    def energy_kwh(self) -> float:
        """``energy_j`` in kilowatt hours."""
        return self.energy_j / JOULES_PER_KWH

    def cost(self, price_per_kwh: float) -> float:
        """Cost of the energy with its facility overhead, in the currency of the price.

        Args:
            price_per_kwh: Price of a kilowatt hour.
        """
        return self.facility_j / JOULES_PER_KWH * price_per_kwh

    def __str__(self) -> str:
        """One line for people: energy with its quality and uncertainty, grams, time."""
        return ", ".join(text for _, text in self._figures())

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in self._figures())
        return f"<table>{rows}</table>"

    def _figures(self) -> tuple[tuple[str, str], ...]:
        energy_j = self.energy_j
        spread = f" ± {percent(self.band_j / energy_j, 0)}" if self.band_j > 0 and energy_j > 0 else ""
        known = "" if self.coverage_ratio == 1 else f", {percent(self.coverage_ratio)} of the time covered"
        carbon = "no carbon source" if self.carbon_g is None else f"{grams(self.carbon_g)} CO2e, {self.carbon_quality}"
        return (
            ("energy", f"{si(energy_j, 'J')} ({si(energy_j / 3600, 'Wh')}) {self.quality}{spread}{known}"),
            ("carbon", carbon),
            ("time", duration(self.duration_s)),
        )

    def portion(self, ratio: float) -> Footprint:
        """A share of the footprint, 0 to 1, time included; portions whose ratios sum to 1 add up to the whole."""
        return replace(
            self,
            parts=tuple(
                replace(
                    part,
                    energy_j=part.energy_j * ratio,
                    band_j=part.band_j * ratio,
                    carbon_g=part.carbon_g * ratio,
                )
                for part in self.parts
            ),
            **{name: value * ratio for name in _ADDED if (value := getattr(self, name)) is not None},
        )

    def __add__(self, other: Footprint) -> Footprint:
        """The sum of two footprints.

        Raises:
            DataError: The grams of the two count different things (signal or scope).
        """
        for name in ("signal", "scope"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine is not theirs:
                raise DataError(
                    f"cannot add grams of {name} {mine} and {theirs}", hint="account both with one carbon source"
                )
        return Footprint(
            parts=merge_parts((*self.parts, *other.parts)),
            idle_j=self.idle_j + other.idle_j,
            unattributed_j=self.unattributed_j + other.unattributed_j,
            carbon_g=None if self.carbon_g is other.carbon_g is None else self.counted_g + other.counted_g,
            carbon_covered_j=self.carbon_covered_j + other.carbon_covered_j,
            embodied_g=self.embodied_g + other.embodied_g,
            facility_j=self.facility_j + other.facility_j,
            start_s=_fmin(self.start_s, other.start_s),
            end_s=-_fmin(-self.end_s, -other.end_s),
            duration_s=self.duration_s + other.duration_s,
            covered_s=self.covered_s + other.covered_s,
            idle_quality=self._rest_quality(other),
            signal=self.signal or other.signal,
            scope=self.scope or other.scope,
            carbon_quality=weakest((self.carbon_quality, other.carbon_quality)),
            idle_band_j=self.idle_band_j + other.idle_band_j,
            idle_g=self.idle_g + other.idle_g,
            unattributed_g=self.unattributed_g + other.unattributed_g,
        )


_ADDED = (
    "idle_j",
    "unattributed_j",
    "carbon_g",
    "carbon_covered_j",
    "embodied_g",
    "facility_j",
    "duration_s",
    "covered_s",
    "idle_band_j",
    "idle_g",
    "unattributed_g",
)
"""Fields of a footprint that a portion scales."""


def merge_parts(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts with equal keys added up, sorted by key; bands add linearly (errors of one meter are correlated)."""
    merged: dict[tuple[str, str, Quality, str], Part] = {}
    for part in parts:
        seen = merged.get(part.key)
        merged[part.key] = (
            part
            if seen is None
            else replace(
                seen,
                energy_j=seen.energy_j + part.energy_j,
                band_j=seen.band_j + part.band_j,
                carbon_g=seen.carbon_g + part.carbon_g,
            )
        )
    return tuple(merged[key] for key in sorted(merged))


def _ratio(part: float, whole: float) -> float:
    """Ratio of a part to a whole, 0 to 1; 1 where only rounding is missing, or where the whole is 0."""
    return part / whole if part < whole * (1 - 1e-12) else 1.0


def _fmin(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a rolled-up table.

    Attributes:
        key: Subject of the line.
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
