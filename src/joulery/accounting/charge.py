"""Whose joules: the energy of a shared device split into the run's, others' and idle.

Smaragdine's "virtualisation" done per socket (``share = busy_app / busy_all``): always
``E_app + E_other + E_idle + E_unattributed = E``. :func:`split` is the arithmetic on arrays, :func:`charge` applies it
to power traces and makes footprints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from joulery.accounting.integrate import Grid, Metered, footprint, grid_over
from joulery.accounting.steps import NS_PER_S, energy_by_bin
from joulery.domain.arrays import FloatArray, IntArray, readonly
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.footprint import Footprint
from joulery.domain.energy.power import Channel, PowerTrace
from joulery.domain.errors import DataError


class Share(StrEnum):
    """What the run's busy time is divided by."""

    BUSY = "busy"
    """The busy time of everybody on the device: who keeps it busy pays for it; idle is what nobody keeps busy."""
    CAPACITY = "capacity"
    """All the time the device's CPUs had: the unused rest is idle."""


class IdleRule(StrEnum):
    """How much of the idle energy the run pays for."""

    WHOLE = "whole"
    """All of it: the machine is kept on for this run."""
    SHARE = "share"
    """In proportion to the run's share of all busy time known of the device."""
    NONE = "none"
    """Nothing of it: somebody else keeps the machine on."""


@dataclass(frozen=True, slots=True, eq=False)
class BusyTimes:
    """How busy one device (a CPU socket) was, and how much of that was the run, interval by interval.

    Attributes:
        edges_ns: Unix nanoseconds, strictly increasing, int64[n+1]. One busy share holds for a whole interval, so an
            interval should be no longer than needed and, for jiffies (10 ms each), no shorter than 100 ms.
        app_s: CPU seconds of the run in each interval, float64[n]; NaN = not known.
        all_s: CPU seconds of everybody, the run included, float64[n]; NaN = not known. Where clocks disagree and
            ``app_s`` is larger, ``app_s`` counts for both.
        cpus: Logical CPUs of the device; needed by ``Share.CAPACITY`` only.

    Raises:
        DataError: Shapes disagree, edges do not increase, or a time is negative or infinite.
    """

    edges_ns: IntArray
    app_s: FloatArray
    all_s: FloatArray
    cpus: int

    def __init__(self, edges_ns: npt.ArrayLike, app_s: npt.ArrayLike, all_s: npt.ArrayLike, cpus: int = 0) -> None:
        edges, app, everybody = readonly(edges_ns, np.int64), readonly(app_s, np.float64), readonly(all_s, np.float64)
        if not len(app) == len(everybody) == len(edges) - 1:
            raise DataError(f"{len(edges)} edges, {len(app)} and {len(everybody)} busy times do not fit")
        if bool(np.any(np.diff(edges) <= 0)):
            raise DataError("the edges of busy times must increase")
        for name, times in (("app_s", app), ("all_s", everybody)):
            if bool(np.any(np.isinf(times) | (times < 0))):
                raise DataError(f"{name} holds {times[np.isinf(times) | (times < 0)][0]}, expected seconds >= 0")
        for name, value in (("edges_ns", edges), ("app_s", app), ("all_s", everybody), ("cpus", cpus)):
            object.__setattr__(self, name, value)

    @property
    def app_ratio(self) -> float:
        """The run's share of all busy time, over the intervals where both are known; 0 when nothing was busy."""
        known = ~(np.isnan(self.app_s) | np.isnan(self.all_s))
        everybody_s = float(np.sum(np.maximum(self.all_s, self.app_s)[known]))
        return float(np.sum(self.app_s[known])) / everybody_s if everybody_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Charged:
    """A metered total, divided.

    ``run + rest`` is the footprint of everything metered (:func:`~joulery.accounting.integrate.integrate`), to 1e-9.

    Attributes:
        run: What the run pays for. ``parts``: its own share. ``idle_j``: idle energy by the rule. ``unattributed_j``:
            energy of the window that nobody can be given, because no busy time is known there.
        rest: What it does not. ``parts``: other processes. ``idle_j``: idle energy the rule leaves out. Its
            ``duration_s`` is 0: it adds no time of its own.
    """

    run: Footprint
    rest: Footprint

    @property
    def other_j(self) -> float:
        """Energy of other processes on the same devices, joules."""
        return self.rest.attributed_j


def split(
    energy_j: npt.ArrayLike,
    app_s: npt.ArrayLike,
    all_s: npt.ArrayLike,
    *,
    by: Share = Share.BUSY,
    capacity_s: npt.ArrayLike = np.nan,
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Energy of each interval as (run, others, idle, unattributed), joules; the four add up to ``energy_j``.

    Args:
        energy_j: Energy of the device in each interval, joules.
        app_s, all_s: Busy CPU seconds of the run and of everybody; NaN = not known, the energy is unattributed.
        by: What the run's time is divided by.
        capacity_s: CPU seconds the device had (CPUs times the interval); for ``Share.CAPACITY``.
    """
    energy, app, everybody = np.broadcast_arrays(
        np.asarray(energy_j, np.float64), np.asarray(app_s, np.float64), np.asarray(all_s, np.float64)
    )
    everybody = np.maximum(everybody, app)
    whole = everybody if by is Share.BUSY else np.maximum(np.asarray(capacity_s, np.float64), everybody)
    unknown = np.isnan(whole) | np.isnan(everybody)
    divisor = np.where(whole > 0, whole, 1.0)
    app_j = np.where(unknown, 0.0, energy * (app / divisor))
    busy_j = np.where(unknown, 0.0, energy * (everybody / divisor))
    return app_j, busy_j - app_j, np.where(unknown, 0.0, energy - busy_j), np.where(unknown, energy, 0.0)


def charge(
    traces: Sequence[PowerTrace | Metered],
    busy: Mapping[str, BusyTimes],
    t0_s: float,
    t1_s: float,
    *,
    idle: IdleRule,
    by: Share = Share.BUSY,
    exclusive: Collection[str] = (),
    carbon: CarbonSeries | None = None,
    pue: float = 1.0,
    embodied_g: float = 0.0,
) -> Charged:
    """Divide what the devices used over ``[t0_s, t1_s)`` between one run and the rest of the machine.

    By ``Share.BUSY``, energy up to the channel's known idle power (``idle_w``) is idle first, and only what exceeds it
    is divided; without one, idle is the energy of intervals in which nobody was busy. Everything is additive over
    splits of the window, grams included: shares hold for whole intervals of ``busy``, whatever the window cuts.

    Args:
        traces: One per channel.
        busy: Busy times by device name (``cpu:0``).
        t0_s, t1_s: The window, Unix seconds.
        idle: How much of the idle energy the run pays for.
        by: What the run's busy time is divided by.
        exclusive: Devices that only the run uses (a GPU it has to itself). A device that is neither here nor in
            ``busy`` is unattributed: nobody knows whose its energy is.
        carbon, pue, embodied_g: As for :func:`~joulery.accounting.integrate.integrate`.

    Raises:
        DataError: As ``integrate``; or ``Share.CAPACITY`` and a device whose number of CPUs is not given.
    """
    metered = [Metered.of(trace) for trace in traces]
    grid = grid_over(t0_s, t1_s, carbon, [times.edges_ns for times in busy.values()])
    rows, covered_s = [], []
    for item in metered:
        energy_j, covered = energy_by_bin(item.steps, grid.edges_ns)
        covered_s.append(float(np.sum(covered)))
        times = busy.get(item.channel.device)
        if item.channel.device in exclusive:
            rows.append(_exclusive_row(item, grid, energy_j, idle))
        elif times is not None:
            rows.append(_shared_row(item, grid, energy_j, times, idle, by))
        else:
            rows.append(_Row(item.channel, unattributed_j=energy_j))
    run = footprint(
        grid,
        t0_s,
        t1_s,
        parts=[(row.channel, row.app_j) for row in rows if row.app_j is not None],
        idle=[(row.channel, row.idle_paid_j) for row in rows if row.idle_paid_j is not None],
        unattributed=[(row.channel, row.unattributed_j) for row in rows if row.unattributed_j is not None],
        covered_s=float(np.mean(covered_s)) if covered_s else 0.0,
        pue=pue,
        embodied_g=embodied_g,
    )
    rest = footprint(
        grid,
        t0_s,
        t1_s,
        parts=[(row.channel, row.other_j) for row in rows if row.other_j is not None],
        idle=[(row.channel, row.idle_left_j) for row in rows if row.idle_left_j is not None],
        covered_s=0.0,
        pue=pue,
        duration_s=0.0,
    )
    return Charged(run, rest)


@dataclass(frozen=True, slots=True)
class _Row:
    """The energy of one channel in each bin, divided; None where a kind does not occur."""

    channel: Channel
    app_j: FloatArray | None = None
    other_j: FloatArray | None = None
    idle_paid_j: FloatArray | None = None
    idle_left_j: FloatArray | None = None
    unattributed_j: FloatArray | None = None


def _exclusive_row(item: Metered, grid: Grid, energy_j: FloatArray, idle: IdleRule) -> _Row:
    floor_j = _floor(item, grid)
    paid_j, left_j = (np.zeros_like(floor_j), floor_j) if idle is IdleRule.NONE else (floor_j, np.zeros_like(floor_j))
    return _Row(item.channel, app_j=energy_j - floor_j, idle_paid_j=paid_j, idle_left_j=left_j)


def _shared_row(item: Metered, grid: Grid, energy_j: FloatArray, times: BusyTimes, idle: IdleRule, by: Share) -> _Row:
    device = item.channel.device
    if by is Share.CAPACITY and times.cpus < 1:
        raise DataError(f"{device}: a capacity share needs its number of CPUs", hint="give cpus, or use the busy share")
    index = np.searchsorted(times.edges_ns, grid.edges_ns[:-1], "right") - 1
    inside = (index >= 0) & (index < len(times.app_s))
    index = np.clip(index, 0, len(times.app_s) - 1)
    app_s, all_s = (np.where(inside, column[index], np.nan) for column in (times.app_s, times.all_s))
    capacity_s = times.cpus * np.diff(times.edges_ns)[index] / NS_PER_S
    known = ~(np.isnan(app_s) | np.isnan(all_s))
    floor_j = np.where(known, _floor(item, grid), 0.0) if by is Share.BUSY else np.zeros_like(energy_j)
    app_j, other_j, idle_j, unattributed_j = split(energy_j - floor_j, app_s, all_s, by=by, capacity_s=capacity_s)
    idle_j = idle_j + floor_j
    paid = {IdleRule.WHOLE: 1.0, IdleRule.SHARE: times.app_ratio, IdleRule.NONE: 0.0}[idle]
    return _Row(item.channel, app_j, other_j, idle_j * paid, idle_j * (1.0 - paid), unattributed_j)


def _floor(item: Metered, grid: Grid) -> FloatArray:
    """Energy in each bin that the known idle power of the channel explains; nothing where it is not known."""
    if not item.channel.idle_w > 0:
        return np.zeros(len(grid.g_per_kwh))
    return energy_by_bin(item.steps.capped(item.channel.idle_w), grid.edges_ns)[0]
