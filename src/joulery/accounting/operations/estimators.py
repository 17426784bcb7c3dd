"""Energy of intervals that share a device: the cumulative fair-share clock.

**Fair shares.** With ``n(t)`` intervals running and power ``p(t)``, the clock ``G(t) = integral p/n`` ticks only
while something runs, and the energy of ``[s, f)`` is ``G(f) - G(s)``: one sort of all boundaries, one cumulative sum,
no set of operations at any instant. Summed over the intervals it is exactly the energy of the time in which something
ran. Source: Smaragdine (ICSE'24), Algorithm 2, with half-open intervals, power times time, and events instead of
names.

Work is cut into slices of time, each with its own clock that starts at zero: memory stays bounded and a short event
of a long session keeps its digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from joulery.accounting.operations.session import OtherUse, unions
from joulery.accounting.steps import NS_PER_S, PowerSteps
from joulery.domain.arrays import BoolArray, FloatArray, IntArray
from joulery.domain.energy.channel import ReadingKind

CHUNK = 1 << 17
"""Number of intervals that begin in one slice of time."""


@dataclass(frozen=True, slots=True, eq=False)
class DevicePower:
    """Power of one device over a window.

    Attributes:
        edges_ns: Edges of the steps, from the start to the end of the window, strictly increasing, int64[k+1].
        watts: Known power of each step, 0 where nothing is known, float64[k].
        missing: Steps where the power of a component is unknown, bool[k].
        updates_ns: Times at which the sensor gave a new value inside the window, a subset of the edges, int64[u].
        instant: Whether each reading is the power of one instant, not the mean of its step.
        averaging_ns: Length of the window that each reading is the mean of, around the begin of its step; 0 where the
            reading is the mean of its step.
        resolution_s: Median distance of two updates, or what the sensor resolves if that is longer; NaN when unknown.
    """

    edges_ns: IntArray
    watts: FloatArray
    missing: BoolArray
    updates_ns: IntArray
    resolution_s: float
    instant: bool = False
    averaging_ns: int = 0

    @property
    def known_j(self) -> float:
        """Known energy of the window."""
        return float(np.sum(self.watts * np.diff(self.edges_ns))) / NS_PER_S

    def place(self, t_ns: IntArray) -> IntArray:
        """Index of the first edge that is not before each instant of the window, int64[...]."""
        return np.asarray(np.searchsorted(self.edges_ns, t_ns, "left"), np.int64)

    def known_until_j(self, t_ns: IntArray, place: IntArray) -> FloatArray:
        """Known energy from the start of the window to each instant, joules, float64[...].

        Args:
            t_ns: Instants inside the window.
            place: Their :meth:`place`.
        """
        spent = np.concatenate([np.zeros(1), np.cumsum(self.watts * np.diff(self.edges_ns))])
        at = np.maximum(place - 1, 0)
        return np.asarray((spent[at] + self.watts[at] * (t_ns - self.edges_ns[at])) / NS_PER_S, np.float64)

    def updates_before(self, place: IntArray) -> IntArray:
        """Number of sensor updates before each instant, of which the :meth:`place` is given."""
        return np.asarray(np.searchsorted(self.updates_ns, self.edges_ns, "left")[place], np.int64)

    @property
    def missing_ns(self) -> int:
        """Time of the window in which power is not, or not fully, known."""
        return int(np.sum(np.diff(self.edges_ns)[self.missing]))


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Energy of each interval, and of the time without intervals.

    Attributes:
        energy_j: Energy of each interval, float64[n].
        uncovered_ns: Time of each interval without known power, int64[n].
        idle_j: Energy of the time in which no interval ran.
        active_ns: Time in which at least one interval ran.
    """

    energy_j: FloatArray
    uncovered_ns: IntArray
    idle_j: float
    active_ns: int


def device_power(components: list[PowerSteps], window_ns: tuple[int, int], resolved_s: float = 0.0) -> DevicePower:
    """Power of a device over ``[t0, t1)`` as the sum of its components (package, DRAM ...), none of which overlap.

    Args:
        components: Power of each component; where one is unknown the sum of the others counts as missing in part.
        window_ns: The session.
        resolved_s: Averaging window or update interval of the sensor, where it is known; 0 otherwise.
    """
    t0, t1 = window_ns
    inner = [steps.edges_ns[(steps.edges_ns > t0) & (steps.edges_ns < t1)] for steps in components]
    edges = np.unique(np.concatenate([np.array([t0, t1], np.int64), *inner]))
    each = [steps.at(edges[:-1]) for steps in components]
    missing = np.logical_or.reduce([np.isnan(watts) for watts in each])
    known = [~np.isnan(steps.watts) for steps in components]
    begins = np.unique(np.concatenate([steps.edges_ns[:-1][at] for steps, at in zip(components, known, strict=True)]))
    spacing = np.concatenate([np.diff(steps.edges_ns)[at] for steps, at in zip(components, known, strict=True)])
    return DevicePower(
        edges,
        np.sum([np.nan_to_num(watts) for watts in each], axis=0),
        missing,
        begins[(begins >= t0) & (begins < t1)],
        max(float(np.median(spacing)) / NS_PER_S, resolved_s) if len(spacing) else float("nan"),
        instant=all(s.channel.kind is ReadingKind.POWER and not s.channel.update_s for s in components),
        averaging_ns=_averaging_ns(components),
    )


def _averaging_ns(components: list[PowerSteps]) -> int:
    """Averaging window that all components have in common; 0 where they have none."""
    windows = {s.channel.averaging_s if s.channel.kind is ReadingKind.AVERAGE else 0.0 for s in components}
    return round(windows.pop() * NS_PER_S) if len(windows) == 1 else 0


def fair_shares(start_ns: IntArray, end_ns: IntArray, power: DevicePower) -> Shares:
    """Share the power of a device among the intervals running on it, equally at every instant.

    Args:
        start_ns: Beginnings, not decreasing, inside the window, int64[n].
        end_ns: Ends, ``end_ns >= start_ns``, inside the window, int64[n].
        power: Power over the window.
    """
    count = len(start_ns)
    energy_j, uncovered_ns = np.zeros(count), np.zeros(count, np.int64)
    idle_j, active_ns = 0.0, 0
    carried = np.zeros(0, np.int64)
    bounds = sorted({int(t) for t in (power.edges_ns[0], *start_ns[CHUNK::CHUNK], power.edges_ns[-1])})
    for begin, end in pairwise(bounds):
        first, last = np.searchsorted(start_ns, [begin, end], "left")
        fresh = slice(first, last)
        starts = np.concatenate([np.full(len(carried), begin), start_ns[fresh]])
        ends = np.minimum(np.concatenate([end_ns[carried], end_ns[fresh]]), end)
        piece = _slice_shares(starts, ends, power, begin, end)
        old = len(carried)
        for total, part in ((energy_j, piece.energy_j), (uncovered_ns, piece.uncovered_ns)):
            total[carried] += part[:old]
            total[fresh] = part[old:]
        idle_j += piece.idle_j
        active_ns += piece.active_ns
        carried = np.concatenate([carried[end_ns[carried] > end], first + np.flatnonzero(end_ns[fresh] > end)])
    return Shares(energy_j, uncovered_ns, idle_j, active_ns)


def _slice_shares(start_ns: IntArray, end_ns: IntArray, power: DevicePower, begin: int, end: int) -> Shares:
    """One slice ``[begin, end)`` of :func:`fair_shares`; the intervals lie inside it."""
    count = len(start_ns)
    step = int(np.searchsorted(power.edges_ns, begin, "right")) - 1
    beyond = int(np.searchsorted(power.edges_ns, end, "left"))
    changes = power.edges_ns[step + 1 : beyond]
    # Boundaries at one instant may come in any order: no time passes between them, so no clock moves.
    time = np.concatenate([start_ns, end_ns, changes, np.array([begin, end], np.int64)]) - begin
    order = np.argsort(time, kind="stable")
    passed = np.diff(time[order])
    change = np.zeros(len(time), np.int64)
    change[:count], change[count : 2 * count] = 1, -1
    running = np.cumsum(change[order])[:-1]
    change[:] = 0
    change[2 * count : 2 * count + len(changes)] = 1
    at = step + np.cumsum(change[order])[:-1]
    energy_delta = power.watts[at] * passed / NS_PER_S
    busy = running > 0
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    from_at, to_at = position[:count], position[count : 2 * count]

    clock = np.zeros(len(time))
    np.cumsum(np.divide(energy_delta, running, out=np.zeros(len(energy_delta)), where=busy), out=clock[1:])
    uncovered = np.zeros(count, np.int64)
    if bool(power.missing[step:beyond].any()):
        blind = np.zeros(len(time), np.int64)
        np.cumsum(np.where(power.missing[at], passed, 0), out=blind[1:])
        uncovered = blind[to_at] - blind[from_at]
    return Shares(
        clock[to_at] - clock[from_at],
        uncovered,
        float(np.sum(energy_delta[~busy])),
        int(np.sum(passed[busy])),
    )


def shares_by_weight(
    start_ns: IntArray, end_ns: IntArray, power: DevicePower, weight: IntArray, rest: OtherUse | None
) -> Shares:
    """Share the energy of each step of power among the intervals in it, in proportion to weight times time.

    Within a step the power is one number: how it varied with what ran is not known.

    Args:
        start_ns: Beginnings inside the window, int64[n].
        end_ns: Ends, ``end_ns >= start_ns``, inside the window, int64[n].
        power: Power over the window.
        weight: CPUs (times a million) that each interval kept busy, int64[n].
        rest: Intervals that have a share and belong to no operation: their share counts as energy without intervals.
    """
    steps = len(power.watts)
    interval, step, begin, end = split(start_ns, end_ns, power.edges_ns)
    used = weight[interval] * (end - begin).astype(np.float64)
    total = np.bincount(step, used, steps)
    if rest is not None:
        owner, where, first, last = split(rest.start_ns, rest.end_ns, power.edges_ns)
        total += np.bincount(where, rest.weight[owner] * (last - first).astype(np.float64), steps)
    energy_j = power.watts * np.diff(power.edges_ns) / NS_PER_S
    rate = np.divide(energy_j, total, out=np.zeros(steps), where=total > 0)
    given = used * rate[step]
    order = np.argsort(start_ns, kind="stable")
    _, opener, closer = unions(np.zeros(len(start_ns), np.int64), start_ns[order], end_ns[order])
    return Shares(
        np.asarray(np.bincount(interval, given, len(start_ns)), np.float64),
        np.bincount(interval, np.where(power.missing[step], end - begin, 0), len(start_ns)).astype(np.int64),
        float(np.sum(energy_j)) - float(np.sum(given)),
        int(np.sum(end_ns[order][closer] - start_ns[order][opener])),
    )


def split(start_ns: IntArray, end_ns: IntArray, edges_ns: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Intervals cut at edges, which span them: interval, window, start and end of each part that has a length."""
    first = np.searchsorted(edges_ns, start_ns, "right") - 1
    last = np.searchsorted(edges_ns, end_ns, "left") - 1
    count = np.maximum(last - first + 1, 0)
    window = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(np.sum(count)))
    interval = np.repeat(np.arange(len(start_ns)), count)
    begin = np.maximum(start_ns[interval], edges_ns[window])
    return interval, window, begin, np.minimum(end_ns[interval], edges_ns[window + 1])
