"""Joules and grams of a window: power steps times intensity steps, exactly, with every gap kept.

``integral p(t) dt`` gives joules, ``integral p(t) c(t) dt / 3.6e6`` gives grams (c in g/kWh). Both are step functions,
so the integral is a sum over the union of their edges; no interpolation, no averaging of one over the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.accounting.steps import NS_PER_S, PowerSteps, energy_by_bin, power_steps, to_ns
from joulery.domain.arrays import BoolArray, FloatArray, IntArray
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.footprint import Footprint, Part, merge_parts
from joulery.domain.energy.power import Channel, PowerTrace
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality, weakest

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, eq=False)
class Metered:
    """A channel and its power as steps: a :class:`PowerTrace` converted once, for many windows."""

    channel: Channel
    steps: PowerSteps

    @classmethod
    def of(cls, trace: PowerTrace | Metered) -> Metered:
        """The trace as steps; unchanged when it is already."""
        return trace if isinstance(trace, Metered) else cls(trace.channel, power_steps(trace))


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """A window cut wherever something changes, with the intensity of each bin.

    Attributes:
        edges_ns: Increasing Unix nanoseconds from the start to the end of the window, int64[k+1].
        g_per_kwh: Intensity of each bin, float64[k]; NaN where unknown.
        estimated: True where the provider estimated it, bool[k].
        carbon: The series it comes from; None when grams were not asked for.
    """

    edges_ns: IntArray
    g_per_kwh: FloatArray
    estimated: BoolArray
    carbon: CarbonSeries | None

    def grams(self, energy_j: FloatArray) -> tuple[float, float]:
        """Grams of the energy of each bin at the meter, and the joules among it whose intensity is known."""
        known = ~np.isnan(self.g_per_kwh)
        return float(np.sum(energy_j[known] * self.g_per_kwh[known])) / JOULES_PER_KWH, float(np.sum(energy_j[known]))

    def quality(self, energy_j: FloatArray) -> Quality:
        """Quality of the intensities that weigh this energy; ``MEASURED``, the neutral element, when none does."""
        used = ~np.isnan(self.g_per_kwh) & (energy_j > 0)
        if self.carbon is None or not bool(used.any()):
            return Quality.MEASURED
        flagged = Quality.MODELLED if bool(np.any(self.estimated[used])) else Quality.MEASURED
        return weakest((self.carbon.quality, flagged))


def in_grams(steps: PowerSteps, carbon: CarbonSeries, pue: float = 1.0) -> PowerSteps:
    """Power as grams of CO2-equivalent a second; NaN where power or intensity is unknown.

    Args:
        steps: The power.
        carbon: Intensity of the grid.
        pue: Facility energy per IT energy.
    """
    if not len(steps):
        return steps
    carbon_ns = to_ns(carbon.edges_s)
    inner = carbon_ns[(carbon_ns > steps.edges_ns[0]) & (carbon_ns < steps.edges_ns[-1])]
    edges = np.union1d(steps.edges_ns, inner)
    index = np.searchsorted(carbon_ns, edges[:-1], "right") - 1
    inside = (index >= 0) & (index < len(carbon))
    intensity = np.where(inside, carbon.g_per_kwh[np.clip(index, 0, len(carbon) - 1)], np.nan)
    return PowerSteps(edges, steps.at(edges[:-1]) * intensity * (pue / JOULES_PER_KWH))


def integrate(
    traces: Sequence[PowerTrace | Metered],
    t0_s: float,
    t1_s: float,
    *,
    carbon: CarbonSeries | None = None,
    pue: float = 1.0,
    embodied_g: float = 0.0,
) -> Footprint:
    """What the metered devices used over ``[t0_s, t1_s)``, all of it as parts.

    Additive over any split of the window. Where power is unknown no energy is counted and ``coverage_ratio`` drops
    (the mean over the channels); where intensity is unknown no grams are counted and ``carbon_coverage_ratio`` drops.
    A counter's difference is spread evenly over its interval, so an interval that crosses an edge of the window counts
    by its share.

    Args:
        traces: One per channel; the components of one device must not overlap.
        t0_s, t1_s: The window, Unix seconds.
        carbon: Intensity of the grid; None when grams are not asked for.
        pue: Facility energy per IT energy, at least 1. Multiplies grams and ``facility_j``, never ``energy_j``.
        embodied_g: Embodied grams that the caller charges to this window.

    Raises:
        DataError: The window ends before it starts, or ``pue`` or ``embodied_g`` makes no sense.
    """
    metered = [Metered.of(trace) for trace in traces]
    grid = grid_over(t0_s, t1_s, carbon)
    energies = [energy_by_bin(m.steps, grid.edges_ns) for m in metered]
    return footprint(
        grid,
        t0_s,
        t1_s,
        parts=[(m.channel, energy_j) for m, (energy_j, _) in zip(metered, energies, strict=True)],
        covered_s=float(np.mean([np.sum(covered) for _, covered in energies])) if energies else 0.0,
        pue=pue,
        embodied_g=embodied_g,
    )


def grid_over(t0_s: float, t1_s: float, carbon: CarbonSeries | None, also_ns: Sequence[IntArray] = ()) -> Grid:
    """The window cut at every edge of the intensity and at every edge in ``also_ns``.

    Raises:
        DataError: The window ends before it starts.
    """
    if not t1_s >= t0_s:
        raise DataError(f"the window ends at {t1_s} before it starts at {t0_s}")
    start_ns, end_ns = (int(t) for t in to_ns([t0_s, t1_s]))
    carbon_ns = to_ns(carbon.edges_s) if carbon is not None else np.empty(0, np.int64)
    cuts = [edges[(edges > start_ns) & (edges < end_ns)] for edges in (carbon_ns, *also_ns)]
    edges_ns = np.unique(np.concatenate([np.array([start_ns, end_ns], np.int64), *cuts]))
    begins = edges_ns[:-1]
    if carbon is None:
        return Grid(edges_ns, np.full(len(begins), np.nan), np.zeros(len(begins), bool), None)
    index = np.searchsorted(carbon_ns, begins, "right") - 1
    inside = (index >= 0) & (index < len(carbon))
    index = np.clip(index, 0, len(carbon) - 1)
    return Grid(edges_ns, np.where(inside, carbon.g_per_kwh[index], np.nan), inside & carbon.estimated[index], carbon)


def footprint(
    grid: Grid,
    t0_s: float,
    t1_s: float,
    *,
    parts: Sequence[tuple[Channel, FloatArray]],
    idle: Sequence[tuple[Channel, FloatArray]] = (),
    unattributed: Sequence[tuple[Channel, FloatArray]] = (),
    covered_s: float,
    pue: float = 1.0,
    embodied_g: float = 0.0,
    duration_s: float | None = None,
) -> Footprint:
    """Assemble a footprint from the energy of each channel in each bin of ``grid`` (joules, float64[k]).

    Raises:
        DataError: ``pue`` is below 1 or ``embodied_g`` negative, or either is not finite.
    """
    if not (1.0 <= pue < float("inf")):
        raise DataError(f"PUE is {pue}, expected facility energy per IT energy, at least 1")
    if not (0.0 <= embodied_g < float("inf")):
        raise DataError(f"embodied carbon is {embodied_g} g, expected at least 0")
    entries = (*parts, *idle, *unattributed)
    total_j = np.sum([energy_j for _, energy_j in entries], axis=0) if entries else np.zeros(len(grid.g_per_kwh))
    carbon_g, covered_j = grid.grams(total_j)
    rest = [channel.quality for channel, energy_j in (*idle, *unattributed) if float(np.sum(energy_j)) > 0]
    return Footprint(
        parts=merge_parts(tuple(_part(channel, energy_j, grid, pue) for channel, energy_j in parts)),
        idle_j=sum(float(np.sum(energy_j)) for _, energy_j in idle),
        unattributed_j=sum(float(np.sum(energy_j)) for _, energy_j in unattributed),
        carbon_g=carbon_g * pue,
        carbon_covered_j=covered_j,
        embodied_g=embodied_g,
        facility_j=float(np.sum(total_j)) * pue,
        start_s=t0_s,
        end_s=t1_s,
        duration_s=float(grid.edges_ns[-1] - grid.edges_ns[0]) / NS_PER_S if duration_s is None else duration_s,
        covered_s=covered_s,
        idle_quality=weakest(rest),
        signal=grid.carbon.signal if grid.carbon is not None else None,
        scope=grid.carbon.scope if grid.carbon is not None else None,
        carbon_quality=grid.quality(total_j),
        idle_band_j=sum(float(np.sum(energy_j)) * channel.band_ratio for channel, energy_j in (*idle, *unattributed)),
        idle_g=sum(grid.grams(energy_j)[0] for _, energy_j in idle) * pue,
        unattributed_g=sum(grid.grams(energy_j)[0] for _, energy_j in unattributed) * pue,
    )


def _part(channel: Channel, energy_j: FloatArray, grid: Grid, pue: float) -> Part:
    total_j = float(np.sum(energy_j))
    return Part(
        channel.device,
        channel.component,
        total_j,
        channel.quality,
        channel.meter,
        band_j=total_j * channel.band_ratio,
        carbon_g=grid.grams(energy_j)[0] * pue,
    )
