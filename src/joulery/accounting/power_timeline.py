"""What a run was charged with as it went: the same charge as for the whole, window by window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from joulery.accounting.charge import BusyTimes, IdleRule, charge
from joulery.accounting.integrate import Metered
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.serving.timeline import Tick


def course(
    metered: Sequence[Metered],
    busy: Mapping[str, BusyTimes],
    t0_s: float,
    t1_s: float,
    *,
    windows: int,
    idle: IdleRule,
    exclusive: Collection[str] = (),
    carbon: CarbonSeries | None = None,
    pue: float = 1.0,
) -> tuple[Tick, ...]:
    """Ticks of equal length over ``[t0_s, t1_s)``; the last cumulative values are the charge of the whole window.

    The arguments are those of :func:`~joulery.accounting.charge.charge`, whose additivity over splits this rests on.
    Power is that of what the run pays for, idle by the rule included; NaN where nothing was read.
    """
    edges = np.linspace(t0_s, t1_s, windows + 1).tolist() if t1_s > t0_s else []
    ticks, energy_j, carbon_g = [], 0.0, 0.0
    for start_s, end_s in itertools.pairwise(edges):
        run = charge(metered, busy, start_s, end_s, idle=idle, exclusive=exclusive, carbon=carbon, pue=pue).run
        length_s = end_s - start_s
        energy_j, carbon_g = energy_j + run.energy_j, carbon_g + run.carbon_g
        ticks.append(
            Tick(
                end_s,
                length_s,
                power_w=run.energy_j / length_s if run.covered_s > 0 else math.nan,
                power_band_w=run.band_j / length_s,
                quality=run.quality,
                g_per_kwh=_mean(carbon, start_s, end_s),
                grid_s=end_s,
                energy_j=energy_j,
                carbon_g=math.nan if carbon is None else carbon_g,
            )
        )
    return tuple(ticks)


def _mean(carbon: CarbonSeries | None, start_s: float, end_s: float) -> float:
    """Mean intensity over the part of a window that the series speaks of."""
    if carbon is None:
        return math.nan
    low_s, high_s = max(start_s, carbon.start_s), min(end_s, carbon.end_s)
    return carbon.mean(low_s, high_s) if high_s > low_s else math.nan
