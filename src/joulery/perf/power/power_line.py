"""A machine's power as a straight line over its busy cores: idle power, and power of each busy core."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError

_LEAST_RISE_RATIO = 1e-6
"""Least power of the busiest interval above idle, relative to the mean: anything smaller is rounding."""


@dataclass(frozen=True, slots=True)
class PowerLine:
    """Power of a machine: ``idle_w + active_w * busy cores``.

    Attributes:
        idle_w: Power of the idle machine.
        active_w: Power above idle for each busy core.
        residual_ratio: Root mean square of the line's residuals, relative to the mean power.
        points: Intervals it was fitted to.
    """

    idle_w: float
    active_w: float
    residual_ratio: float
    points: int


def fit_power_line(busy_cores: FloatArray, power_w: FloatArray, *, idle_w: float = float("nan")) -> PowerLine:
    """Fit the line to intervals of known power and known number of busy cores, by least squares.

    Idle power is not below the lowest power observed with no core busy: work that is assigned to the wrong intervals,
    as on a machine that others keep busy, tilts the line.

    Args:
        busy_cores: Mean number of busy cores in each interval, float64[n].
        power_w: Mean power in each, float64[n].
        idle_w: Idle power where the meter reports it; the line is then forced through it.

    Raises:
        DataError: Fewer than two intervals, none with a busy core, or the power does not rise with the load.
    """
    known = np.isfinite(busy_cores) & np.isfinite(power_w)
    cores, watts = busy_cores[known], power_w[known]
    if len(cores) < 2:
        raise DataError("fewer than two intervals with known power and load", hint="let the meters run for longer")
    if np.isfinite(idle_w):
        square = float(cores @ cores)
        active_w = float(cores @ (watts - idle_w)) / square if square > 0 else 0.0
    else:
        spread = cores - cores.mean()
        square = float(spread @ spread)
        active_w = float(spread @ watts) / square if square > 0 else 0.0
        idle_w = float(watts.mean() - active_w * cores.mean())
        watched_w = float(np.min(watts, where=cores == 0.0, initial=np.inf))
        if idle_w < watched_w < np.inf:
            return fit_power_line(cores, watts, idle_w=watched_w)
    if not float(cores.max()) > 0.0:
        raise DataError(
            f"no core was busy in {len(cores)} intervals, so the power of a busy core is unknown",
            hint="the work was too short for the clock of CPU time: measure more of it (--runs)",
        )
    if not active_w * float(cores.max()) > _LEAST_RISE_RATIO * float(watts.mean()):
        raise DataError(
            "the metered power does not rise when cores are busy, so no request can be charged for it",
            hint="name a meter that sees the CPU: --meter rapl, or --meter cpu-model:IDLE,MAX with the watts you know",
        )
    left = watts - (idle_w + active_w * cores)
    return PowerLine(idle_w, active_w, float(np.sqrt(np.mean(left**2)) / watts.mean()), len(cores))
