"""Charge a run for its share of shared devices: the run, other processes, idle and unattributed.

Smaragdine's "virtualisation" done per socket (``share = busy_app / busy_all``): always
``E_app + E_other + E_idle + E_unattributed = E``. :func:`split` is the arithmetic on arrays, :func:`charge` applies it
to the power of all channels and builds footprints. Grams are ``integral p(t) c(t) dt / 3.6e6`` (c in g/kWh); both are
step functions, so the integral is an exact sum over the union of their edges.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from joulery.accounting.steps import NS_PER_S, PowerSteps, energy_by_bin, to_ns
from joulery.domain.arrays import BoolArray, FloatArray, IntArray
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries
from joulery.domain.energy.channel import Channel
from joulery.domain.energy.footprint import Footprint, Part, merge_parts
from joulery.domain.energy.power import BusyTimes
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality, weakest

if TYPE_CHECKING:
    import numpy.typing as npt


class ShareRule(StrEnum):
    """Divisor of the run's busy time."""

    BUSY = "busy"
    """The busy time of all processes on the device: they pay for it; idle is the time without any."""
    CAPACITY = "capacity"
    """All the time the device's CPUs had: the unused rest is idle."""


class IdleRule(StrEnum):
    """Part of the idle energy that the run pays for."""

    WHOLE = "whole"
    """All of it: the machine is kept on for this run."""
    SHARE = "share"
    """In proportion to the run's share of all busy time known of the device."""
    NONE = "none"
    """Nothing of it: another owner keeps the machine on."""


@dataclass(frozen=True, slots=True)
class Charged:
    """A metered total, divided between a run and the rest of the machine.

    ``run + rest`` is the footprint of everything metered, to 1e-9.

    Attributes:
        run: What the run pays for. ``parts``: its own share. ``idle_j``: idle energy by the rule. ``unattributed_j``:
            energy of the window without an owner, because no busy time is known there.
        rest: What the run does not pay for. ``parts``: other processes. ``idle_j``: idle energy the rule leaves out.
            Its ``duration_s`` is 0: it adds no time of its own.
    """

    run: Footprint
    rest: Footprint

    @property
    def other_j(self) -> float:
        """Energy of other processes on the same devices, joules."""
        return self.rest.attributed_j


@dataclass(frozen=True, slots=True, eq=False)
class WindowBins:
    """A window split at every change of intensity or busy share, with the intensity of each bin.

    Attributes:
        edges_ns: Increasing Unix nanoseconds from the start to the end of the window, int64[k+1].
        g_per_kwh: Intensity of each bin, float64[k]; NaN where unknown.
        estimated: True where the provider estimated it, bool[k].
        carbon: The series of these intensities; None when grams were not requested.
    """

    edges_ns: IntArray
    g_per_kwh: FloatArray
    estimated: BoolArray
    carbon: CarbonSeries | None

    def grams(self, energy_j: FloatArray) -> tuple[float, float]:
        """Grams of the energy of each bin at the meter, and its joules with a known intensity."""
        known = ~np.isnan(self.g_per_kwh)
        return float(np.sum(energy_j[known] * self.g_per_kwh[known])) / JOULES_PER_KWH, float(np.sum(energy_j[known]))

    def quality(self, energy_j: FloatArray) -> Quality:
        """Quality of the intensities that weigh this energy; ``MEASURED``, the neutral element, when none does."""
        used = ~np.isnan(self.g_per_kwh) & (energy_j > 0)
        if self.carbon is None or not bool(used.any()):
            return Quality.MEASURED
        flagged = Quality.MODELLED if bool(np.any(self.estimated[used])) else Quality.MEASURED
        return weakest((self.carbon.quality, flagged))


def split(
    energy_j: npt.ArrayLike,
    app_s: npt.ArrayLike,
    all_s: npt.ArrayLike,
    *,
    by: ShareRule = ShareRule.BUSY,
    capacity_s: npt.ArrayLike = np.nan,
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Energy of each interval as (run, others, idle, unattributed), joules; the four add up to ``energy_j``.

    Args:
        energy_j: Energy of the device in each interval, joules.
        app_s, all_s: Busy CPU seconds of the run and of all processes; NaN = not known, the energy is unattributed.
        by: Divisor of the run's time.
        capacity_s: CPU seconds the device had (CPUs times the interval); for ``ShareRule.CAPACITY``.
    """
    energy, app, total_s = np.broadcast_arrays(
        np.asarray(energy_j, np.float64), np.asarray(app_s, np.float64), np.asarray(all_s, np.float64)
    )
    total_s = np.maximum(total_s, app)
    whole = total_s if by is ShareRule.BUSY else np.maximum(np.asarray(capacity_s, np.float64), total_s)
    unknown = np.isnan(whole) | np.isnan(total_s)
    divisor = np.where(whole > 0, whole, 1.0)
    app_j = np.where(unknown, 0.0, energy * (app / divisor))
    busy_j = np.where(unknown, 0.0, energy * (total_s / divisor))
    return app_j, busy_j - app_j, np.where(unknown, 0.0, energy - busy_j), np.where(unknown, energy, 0.0)


def charge(
    power: Sequence[PowerSteps],
    busy: Mapping[str, BusyTimes],
    t0_s: float,
    t1_s: float,
    *,
    idle: IdleRule,
    by: ShareRule = ShareRule.BUSY,
    exclusive: Collection[str] = (),
    carbon: CarbonSeries | None = None,
    pue: float = 1.0,
    embodied_g: float = 0.0,
) -> Charged:
    """Divide the energy of the devices over ``[t0_s, t1_s)`` between one run and the rest of the machine.

    By ``ShareRule.BUSY``, energy up to the channel's known idle power (``idle_w``) is idle first, and only the excess
    is divided; without one, idle is the energy of intervals without a busy process. Everything is additive over splits
    of the window, grams included: shares hold for whole intervals of ``busy``, even where the window cuts one.

    Args:
        power: One entry a channel; the components of one device must not overlap.
        busy: Busy times by device name (``cpu:0``).
        t0_s, t1_s: The window, Unix seconds.
        idle: How much of the idle energy the run pays for.
        by: Divisor of the run's busy time.
        exclusive: Devices that only the run uses (a GPU it has to itself). A device that is neither here nor in
            ``busy`` is unattributed.
        carbon: Intensity of the grid; None when grams are not asked for.
        pue: Facility energy per IT energy, at least 1. Multiplies grams and ``facility_j``, never ``energy_j``.
        embodied_g: Embodied grams that the caller charges to this window.

    Raises:
        DataError: The window ends before it starts, ``pue`` or ``embodied_g`` is out of range, or a device charged by
            ``ShareRule.CAPACITY`` has no number of CPUs.
    """
    bins = window_bins(t0_s, t1_s, carbon, [times.edges_ns for times in busy.values()])
    rows, covered_s = _rows(power, busy, bins, exclusive, idle, by)
    run = build_footprint(
        bins,
        t0_s,
        t1_s,
        parts=[(row.channel, row.app_j) for row in rows if row.app_j is not None],
        idle=[(row.channel, row.idle_paid_j) for row in rows if row.idle_paid_j is not None],
        unattributed=[(row.channel, row.unattributed_j) for row in rows if row.unattributed_j is not None],
        covered_s=float(np.mean(covered_s)) if covered_s else 0.0,
        pue=pue,
        embodied_g=embodied_g,
    )
    rest = build_footprint(
        bins,
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


def _rows(
    power: Sequence[PowerSteps],
    busy: Mapping[str, BusyTimes],
    bins: WindowBins,
    exclusive: Collection[str],
    idle: IdleRule,
    by: ShareRule,
) -> tuple[list[_Row], list[float]]:
    """The energy of every channel, divided, and the covered seconds of each."""
    rows, covered_s = [], []
    for item in power:
        energy_j, covered = energy_by_bin(item, bins.edges_ns)
        covered_s.append(float(np.sum(covered)))
        times = busy.get(item.channel.device)
        if item.channel.device in exclusive:
            rows.append(_exclusive_row(item, bins, energy_j, idle))
        elif times is not None:
            rows.append(_shared_row(item, bins, energy_j, times, idle, by))
        else:
            rows.append(_Row(item.channel, unattributed_j=energy_j))
    return rows, covered_s


def _exclusive_row(item: PowerSteps, bins: WindowBins, energy_j: FloatArray, idle: IdleRule) -> _Row:
    floor_j = _floor(item, bins)
    paid_j, left_j = (np.zeros_like(floor_j), floor_j) if idle is IdleRule.NONE else (floor_j, np.zeros_like(floor_j))
    return _Row(item.channel, app_j=energy_j - floor_j, idle_paid_j=paid_j, idle_left_j=left_j)


def _shared_row(
    item: PowerSteps, bins: WindowBins, energy_j: FloatArray, times: BusyTimes, idle: IdleRule, by: ShareRule
) -> _Row:
    device = item.channel.device
    if by is ShareRule.CAPACITY and times.cpus < 1:
        raise DataError(f"{device}: a capacity share needs its number of CPUs", hint="give cpus, or use the busy share")
    index = np.searchsorted(times.edges_ns, bins.edges_ns[:-1], "right") - 1
    inside = (index >= 0) & (index < len(times.app_s))
    index = np.clip(index, 0, len(times.app_s) - 1)
    app_s, all_s = (np.where(inside, column[index], np.nan) for column in (times.app_s, times.all_s))
    capacity_s = times.cpus * np.diff(times.edges_ns)[index] / NS_PER_S
    known = ~(np.isnan(app_s) | np.isnan(all_s))
    floor_j = np.where(known, _floor(item, bins), 0.0) if by is ShareRule.BUSY else np.zeros_like(energy_j)
    app_j, other_j, idle_j, unattributed_j = split(energy_j - floor_j, app_s, all_s, by=by, capacity_s=capacity_s)
    idle_j = idle_j + floor_j
    paid = {IdleRule.WHOLE: 1.0, IdleRule.SHARE: times.app_ratio, IdleRule.NONE: 0.0}[idle]
    return _Row(item.channel, app_j, other_j, idle_j * paid, idle_j * (1.0 - paid), unattributed_j)


def _floor(item: PowerSteps, bins: WindowBins) -> FloatArray:
    """Energy in each bin that the known idle power of the channel explains; 0 where it is not known."""
    if not item.channel.idle_w > 0:
        return np.zeros(len(bins.g_per_kwh))
    return energy_by_bin(item.capped(item.channel.idle_w), bins.edges_ns)[0]


def window_bins(t0_s: float, t1_s: float, carbon: CarbonSeries | None, also_ns: Sequence[IntArray] = ()) -> WindowBins:
    """The window split at every edge of the intensity and at every edge in ``also_ns``.

    Args:
        t0_s, t1_s: The window, Unix seconds.
        carbon: Intensity over time; None without one. Bins beyond its ends have an intensity of NaN.
        also_ns: Further edges, Unix nanoseconds, sorted; those outside of the window are ignored.

    Raises:
        DataError: The window ends before it starts.
    """
    if not t1_s >= t0_s:
        raise DataError(f"the window ends at {t1_s} before it starts at {t0_s}")
    start_ns, end_ns = (int(t) for t in to_ns([t0_s, t1_s]))
    carbon_ns = to_ns(carbon.edges_s) if carbon is not None else np.empty(0, np.int64)
    cuts = [edges[(edges > start_ns) & (edges < end_ns)] for edges in (carbon_ns, *also_ns)]
    edges_ns = np.sort(np.concatenate([np.array([start_ns, end_ns], np.int64), *cuts]))
    edges_ns = edges_ns[np.diff(edges_ns, prepend=edges_ns[0] - 1) > 0]  # np.unique imports numpy.ma
    begins = edges_ns[:-1]
    if carbon is None:
        return WindowBins(edges_ns, np.full(len(begins), np.nan), np.zeros(len(begins), bool), None)
    index = np.searchsorted(carbon_ns, begins, "right") - 1
    inside = (index >= 0) & (index < len(carbon))
    index = np.clip(index, 0, len(carbon) - 1)
    return WindowBins(
        edges_ns, np.where(inside, carbon.g_per_kwh[index], np.nan), inside & carbon.estimated[index], carbon
    )


def build_footprint(
    bins: WindowBins,
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
    """Assemble a footprint from the energy of each channel in each of the ``k`` bins.

    Args:
        bins: The window, split where the intensity changes.
        t0_s, t1_s: The window, Unix seconds.
        parts: Energy charged to the work, joules, float64[k] a channel.
        idle: Idle energy charged to the work, in the same form.
        unattributed: Energy without a known user, in the same form.
        covered_s: Seconds of the window with readings.
        pue: Facility energy per IT energy; multiplies grams and the facility's joules.
        embodied_g: Embodied grams, kept apart from the operational ones.
        duration_s: Length of the window, seconds; ``t1_s - t0_s`` when None.

    Raises:
        DataError: ``pue`` is below 1 or ``embodied_g`` negative, or either is not finite.
    """
    if not (1.0 <= pue < float("inf")):
        raise DataError(f"PUE is {pue}, expected facility energy per IT energy, at least 1")
    if not (0.0 <= embodied_g < float("inf")):
        raise DataError(f"embodied carbon is {embodied_g} g, expected at least 0")
    entries = (*parts, *idle, *unattributed)
    total_j = np.sum([energy_j for _, energy_j in entries], axis=0) if entries else np.zeros(len(bins.g_per_kwh))
    carbon_g, covered_j = bins.grams(total_j)
    rest = [channel.quality for channel, energy_j in (*idle, *unattributed) if float(np.sum(energy_j)) > 0]
    seen = [channel.quality for channel, _ in entries]  # no joules are known as well as they were looked for
    return Footprint(
        parts=merge_parts(tuple(_part(channel, energy_j, bins, pue) for channel, energy_j in parts)),
        idle_j=sum(float(np.sum(energy_j)) for _, energy_j in idle),
        unattributed_j=sum(float(np.sum(energy_j)) for _, energy_j in unattributed),
        carbon_g=None if bins.carbon is None else carbon_g * pue,
        carbon_covered_j=covered_j,
        embodied_g=embodied_g,
        facility_j=float(np.sum(total_j)) * pue,
        start_s=t0_s,
        end_s=t1_s,
        duration_s=float(bins.edges_ns[-1] - bins.edges_ns[0]) / NS_PER_S if duration_s is None else duration_s,
        covered_s=covered_s,
        idle_quality=weakest(rest or seen),
        signal=bins.carbon.signal if bins.carbon is not None else None,
        scope=bins.carbon.scope if bins.carbon is not None else None,
        carbon_quality=bins.quality(total_j),
        idle_band_j=sum(float(np.sum(energy_j)) * channel.band_ratio for channel, energy_j in (*idle, *unattributed)),
        idle_g=sum(bins.grams(energy_j)[0] for _, energy_j in idle) * pue,
        unattributed_g=sum(bins.grams(energy_j)[0] for _, energy_j in unattributed) * pue,
    )


def _part(channel: Channel, energy_j: FloatArray, bins: WindowBins, pue: float) -> Part:
    total_j = float(np.sum(energy_j))
    return Part(
        channel.device,
        channel.component,
        total_j,
        channel.quality,
        channel.meter,
        band_j=total_j * channel.band_ratio,
        carbon_g=bins.grams(energy_j)[0] * pue,
    )


@dataclass(frozen=True, slots=True, eq=False)
class DividedPower:
    """Power of a shared device by consumer; the three add up to the device's wherever all are known.

    Attributes:
        run: Power of the traced program; NaN where the busy times are not known.
        other: Power of other processes.
        idle: Idle power, and the power of intervals without a busy process.
    """

    run: PowerSteps
    other: PowerSteps
    idle: PowerSteps


def divide_power(item: PowerSteps, times: BusyTimes) -> DividedPower:
    """Divide a channel's power among the traced program, others and idle, interval by interval (virtualisation).

    Args:
        item: The channel. Power up to its ``idle_w`` is idle first, where that is known.
        times: Busy times of the device.
    """
    begin, end = (int(item.edges_ns[0]), int(item.edges_ns[-1])) if len(item) else (0, 0)
    cuts = times.edges_ns[(times.edges_ns > begin) & (times.edges_ns < end)]
    edges = np.union1d(item.edges_ns, cuts)
    watts = item.at(edges[:-1])
    floor = np.minimum(watts, item.channel.idle_w) if item.channel.idle_w > 0 else np.zeros_like(watts)
    index = np.searchsorted(times.edges_ns, edges[:-1], "right") - 1
    inside = (index >= 0) & (index < len(times.app_s))
    index = np.clip(index, 0, max(0, len(times.app_s) - 1))
    app_s, all_s = (
        np.where(inside, column[index], np.nan) if len(column) else np.full(len(watts), np.nan)
        for column in (times.app_s, times.all_s)
    )
    all_s = np.maximum(all_s, app_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(all_s > 0, app_s / all_s, np.where(np.isnan(all_s), np.nan, 0.0))
        busy = np.where(all_s > 0, 1.0, np.where(np.isnan(all_s), np.nan, 0.0))
    dynamic = watts - floor
    return DividedPower(
        PowerSteps(item.channel, edges, dynamic * ratio, item.faults),
        PowerSteps(item.channel, edges, dynamic * (busy - ratio)),
        PowerSteps(item.channel, edges, floor + dynamic * (1.0 - busy)),
    )


@dataclass(frozen=True, slots=True)
class EnergyShares:
    """Division of the joules charged to the run; they add up to the footprint's parts.

    Attributes:
        requests_j: Joules of the replicas while they answered.
        load_j: Joules of the load generator.
        serving_j: Joules of the gateway, the controller, and the replicas between requests and while they started.
        joules_per_cpu_s: Charge of one CPU second of a request; of one second of a whole GPU where services run on
            GPUs.
    """

    requests_j: float
    load_j: float
    serving_j: float
    joules_per_cpu_s: float


def cpu_shares(cpu_s: Sequence[float]) -> list[float]:
    """CPU seconds as shares of their sum; equal ones where no service used any. They add up to 1."""
    total_s = math.fsum(cpu_s)
    return [one / total_s for one in cpu_s] if total_s > 0 else [1 / max(1, len(cpu_s))] * len(cpu_s)


def divide(attributed_j: float, requests_cpu_s: float, load_cpu_s: float, cpu_s: float) -> EnergyShares:
    """Divide the run's joules in proportion to CPU seconds.

    Args:
        attributed_j: Joules charged to the run's processes.
        requests_cpu_s, load_cpu_s: CPU seconds of the requests and of the load generator (NaN: not known, in serving).
        cpu_s: CPU seconds of all the run's processes. The kernel counts ticks of 10 ms; where that is less than the sum
            of the parts, the sum counts instead.
    """
    load_cpu_s = 0.0 if math.isnan(load_cpu_s) else load_cpu_s
    whole_s = max(cpu_s, requests_cpu_s + load_cpu_s)
    if whole_s < 1e-9:
        return EnergyShares(0.0, 0.0, attributed_j, 0.0)
    rate = attributed_j / whole_s
    requests_j, load_j = requests_cpu_s * rate, load_cpu_s * rate
    return EnergyShares(requests_j, load_j, attributed_j - requests_j - load_j, rate)
