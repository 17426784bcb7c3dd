"""Power of a channel as a step function of time.

:func:`power_steps` converts the readings of a meter once (Smaragdine, ICSE'24, section 3, corrected). Charging and
alignment use the steps and do not depend on the kind of reading. Times are integer Unix nanoseconds, so splitting a
window loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.carbon import JOULES_PER_KWH, CarbonSeries
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import PowerTrace
from joulery.domain.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

NS_PER_S = 1_000_000_000

HOLD_PERIODS = 2.0
"""Time for which the last reading of a power channel is held, in sampling periods."""

HOLE_PERIODS = 10.0
"""Gap after a reading, in sampling periods, beyond which it counts as a last one; shorter gaps are jitter."""

RESET_RATIO = 10.0
"""A counter that ran backwards counts as wrapped unless a wrap needs this many times the highest power seen."""

_LAST_S = 9.2e9
"""Unix seconds beyond which int64 nanoseconds end (the year 2261)."""

_BLOCK = 1 << 17
"""Steps summed at a time: the scratch arrays stay in the cache, a year of 1 Hz needs no gigabyte."""


@dataclass(frozen=True, slots=True, eq=False)
class PowerSteps:
    """Power of one channel, constant on each right-open step ``[edges_ns[i], edges_ns[i+1])``.

    Attributes:
        channel: Device and component, with the quality of the readings.
        edges_ns: Unix nanoseconds, strictly increasing, int64[n+1]; empty when there is no step.
        watts: Watts, float64[n]; NaN = not covered, which is not 0 W.
        faults: Readings left out and why, one sentence each.

    Raises:
        DataError: Shapes disagree or edges do not increase.
    """

    channel: Channel
    edges_ns: IntArray
    watts: FloatArray
    faults: tuple[str, ...] = ()

    def __init__(
        self, channel: Channel, edges_ns: npt.ArrayLike, watts: npt.ArrayLike, faults: tuple[str, ...] = ()
    ) -> None:
        edges = np.ascontiguousarray(edges_ns, np.int64).view()
        values = np.ascontiguousarray(watts, np.float64).view()
        if edges.ndim != 1 or values.ndim != 1 or len(edges) != (len(values) + 1 if len(values) else 0):
            raise DataError(f"{edges.shape} edges and {values.shape} powers do not make steps")
        if bool(np.any(edges[1:] <= edges[:-1])):
            raise DataError("the edges of power steps must increase")
        edges.flags.writeable = values.flags.writeable = False
        object.__setattr__(self, "channel", channel)
        object.__setattr__(self, "edges_ns", edges)
        object.__setattr__(self, "watts", values)
        object.__setattr__(self, "faults", faults)

    def __len__(self) -> int:
        return len(self.watts)

    def at(self, t_ns: npt.ArrayLike) -> FloatArray:
        """Power at each Unix nanosecond, watts; NaN where it is not covered."""
        times = np.atleast_1d(np.asarray(t_ns, np.int64))
        if not len(self):
            return np.full(times.shape, np.nan)
        index = np.searchsorted(self.edges_ns, times, "right") - 1
        inside = (index >= 0) & (index < len(self))
        return np.where(inside, self.watts[np.clip(index, 0, len(self) - 1)], np.nan)

    def capped(self, limit_w: float) -> PowerSteps:
        """The part of the power that does not exceed ``limit_w``, such as the part that an idle floor explains."""
        return PowerSteps(self.channel, self.edges_ns, np.minimum(self.watts, limit_w))


def to_ns(t_s: npt.ArrayLike) -> IntArray:
    """Unix seconds as integer nanoseconds, to the nanosecond of the float given; same shape.

    Raises:
        DataError: A time is not finite or lies beyond the year 2261, where int64 nanoseconds end.
    """
    seconds = np.asarray(t_s, np.float64)
    beyond = ~(np.abs(seconds) < _LAST_S)
    if bool(np.any(beyond)):
        raise DataError(f"expected Unix seconds, got {float(seconds[beyond][0])}")
    whole = np.floor(seconds)
    rest_ns = np.rint((seconds - whole) * NS_PER_S).astype(np.int64)
    return np.asarray(whole.astype(np.int64) * NS_PER_S + rest_ns, np.int64)


def power_steps(trace: PowerTrace, *, hole_periods: float = HOLE_PERIODS) -> PowerSteps:
    """Power as steps, from a trace of readings.

    * ``COUNTER``: the difference of two readings belongs to the interval that ended at the later one. A reading equal
      to the one before is a counter not yet updated and is dropped. A wrap is undone on the difference. A counter that
      ran backwards without wrapping, or that may have wrapped more than once, leaves a gap and a fault.
    * ``POWER``: held to the next reading; the last one, and one before a hole of more than ``hole_periods`` sampling
      periods, for ``HOLD_PERIODS`` periods.
    * ``AVERAGE``: as ``POWER`` after moving each reading back by half its averaging window.
    * A missing reading (NaN) of power is a gap to the next reading; of a counter, it is as if it had not been taken.

    Args:
        trace: The readings.
        hole_periods: Distance of two readings of power, in sampling periods, from which on the first does not reach
            the second; infinite where readings are known to stand until the next one.
    """
    if trace.channel.kind is ReadingKind.COUNTER:
        return _counter_steps(trace)
    shift_ns = round(trace.channel.averaging_s * NS_PER_S / 2) if trace.channel.kind is ReadingKind.AVERAGE else 0
    return _held_steps(trace, shift_ns, hole_periods)


def carbon_steps(steps: PowerSteps, carbon: CarbonSeries, pue: float = 1.0) -> PowerSteps:
    """Emission rate of a channel: grams of CO2-equivalent a second in place of watts, NaN where either is unknown.

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
    return PowerSteps(steps.channel, edges, steps.at(edges[:-1]) * intensity * (pue / JOULES_PER_KWH))


def energy_by_bin(steps: PowerSteps, bins_ns: IntArray) -> tuple[FloatArray, FloatArray]:
    """Energy and covered time of each bin ``[bins_ns[i], bins_ns[i+1])``.

    Args:
        steps: The power.
        bins_ns: Non-decreasing Unix nanoseconds, int64[k+1].

    Returns:
        Joules float64[k] and covered seconds float64[k].
    """
    count = max(0, len(bins_ns) - 1)
    if not len(steps) or not count:
        return np.zeros(count), np.zeros(count)
    energy_j, covered_s = np.zeros(count), np.zeros(count)
    first, last = np.searchsorted(steps.edges_ns, [bins_ns[0], bins_ns[-1]], "right") - 1
    for low in range(max(0, int(first)), min(int(last) + 1, len(steps)), _BLOCK):
        edges, watts = steps.edges_ns[low : low + _BLOCK + 1], steps.watts[low : low + _BLOCK]
        begin = max(0, int(np.searchsorted(bins_ns, edges[0], "right")) - 1)
        end = min(count, int(np.searchsorted(bins_ns, edges[-1], "left")))
        energy, covered = _block_energy(edges, watts, np.clip(bins_ns[begin : end + 1], edges[0], edges[-1]))
        energy_j[begin:end] += energy
        covered_s[begin:end] += covered
    return energy_j, covered_s


def _block_energy(edges: IntArray, watts: FloatArray, cuts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Energy and covered time between successive cuts, all of which lie inside the steps."""
    at = np.minimum(np.searchsorted(edges, cuts, "right") - 1, len(watts) - 1)
    missing = np.isnan(watts)
    if not bool(missing.any()):
        return _weighted_time(watts, edges, cuts, at), np.diff(cuts) / NS_PER_S
    known = np.where(missing, 0.0, watts)
    return _weighted_time(known, edges, cuts, at), _weighted_time((~missing).astype(np.float64), edges, cuts, at)


def _weighted_time(weight: FloatArray, edges: IntArray, cuts: IntArray, at: IntArray) -> FloatArray:
    """Integral of a step function between successive cuts, weight times seconds; ``at[j]`` is the step of ``cuts[j]``.

    Each bin is summed by itself (numpy sums pairwise), not as a difference of a running total, which would cost a
    short bin of a long trace its digits.
    """
    begin, end = at[:-1], at[1:]
    whole = weight * np.diff(edges)
    pairs = np.empty(2 * len(begin), np.int64)
    pairs[0::2], pairs[1::2] = np.minimum(begin + 1, len(weight) - 1), end
    inner = np.where(end > begin + 1, np.add.reduceat(whole, pairs)[0::2], 0.0)
    same = begin == end
    head = weight[begin] * (np.where(same, cuts[1:], edges[begin + 1]) - cuts[:-1])
    tail = np.where(same, 0.0, weight[end] * (cuts[1:] - edges[end]))
    return np.asarray((head + inner + tail) / NS_PER_S, np.float64)


def _held_steps(trace: PowerTrace, shift_ns: int, hole_periods: float) -> PowerSteps:
    if not len(trace):
        return PowerSteps(trace.channel, [], [])
    hold_ns = max(1, round(HOLD_PERIODS * trace.period_s * NS_PER_S))
    stamps = trace.t_ns - shift_ns if shift_ns else trace.t_ns
    edges = np.append(stamps, stamps[-1] + hold_ns)
    holes = np.flatnonzero(np.diff(stamps) > hole_periods * trace.period_s * NS_PER_S)
    if not len(holes):
        return PowerSteps(trace.channel, edges, trace.values)
    lost_s = float(np.sum(stamps[holes + 1] - stamps[holes] - hold_ns)) / NS_PER_S
    fault = f"{trace.channel.device}: no reading for {lost_s:.3g} s in {len(holes)} hole(s), energy there not counted"
    edges = np.insert(edges, holes + 1, stamps[holes] + hold_ns)
    return PowerSteps(trace.channel, edges, np.insert(trace.values, holes + 1, np.nan), (fault,))


def _counter_steps(trace: PowerTrace) -> PowerSteps:
    stamps, values = trace.t_ns, trace.values
    present = ~np.isnan(values)
    if not bool(present.all()):
        stamps, values = stamps[present], values[present]
    fresh = np.diff(values, prepend=np.nan) != 0
    if not bool(fresh.all()):
        stamps, values = stamps[fresh], values[fresh]
    if len(values) < 2:
        return PowerSteps(trace.channel, [], [])
    seconds = np.diff(stamps) / NS_PER_S
    joules = np.diff(values)
    if trace.channel.wrap_j > 0:
        return _unwrapped(trace, stamps, joules, seconds)
    backwards = joules < 0
    watts = np.where(backwards, np.nan, joules / seconds)
    return PowerSteps(trace.channel, stamps, watts, _fault(trace, backwards, "ran backwards (a reset)"))


def _unwrapped(trace: PowerTrace, stamps: IntArray, joules: FloatArray, seconds: FloatArray) -> PowerSteps:
    """Undo wraps where one, and only one, explains the readings; leave a gap elsewhere."""
    channel = trace.channel
    backwards = joules < 0
    watts = np.where(backwards, joules + channel.wrap_j, joules) / seconds
    plain_w = float(np.max(watts, where=~backwards, initial=0.0))
    known = channel.max_w if channel.max_w > 0 else None
    believable_w = known if known is not None else RESET_RATIO * plain_w if plain_w > 0 else np.inf
    reset = backwards & ((watts > believable_w) | (watts < 0))
    again = (known if known is not None else plain_w) * seconds >= channel.wrap_j
    faults = (
        *_fault(trace, reset & ~again, "ran backwards by more than a wrap explains (a reset)"),
        *_fault(trace, again, "went unread for so long that it may have wrapped more than once"),
    )
    return PowerSteps(channel, stamps, np.where(reset | again, np.nan, watts), faults)


def _fault(trace: PowerTrace, where: npt.NDArray[np.bool_], what: str) -> tuple[str, ...]:
    count = int(np.count_nonzero(where))
    if not count:
        return ()
    channel = trace.channel
    return (f"{channel.device} {channel.component}: the counter {what}; {count} interval(s) left out",)
