"""Energy of intervals that share a device: the cumulative fair-share clock, and regression over many readings.

**Fair shares.** With ``n(t)`` intervals running and power ``p(t)``, the clock ``G(t) = integral p/n`` ticks only
while something runs, and the energy of ``[s, f)`` is ``G(f) - G(s)``: one sort of all boundaries, one cumulative sum,
no set of operations at any instant. Summed over the intervals it is exactly the energy of the time in which something
ran. Source: Smaragdine (ICSE'24), Algorithm 2, with half-open intervals, power times time, and events instead of
names.

Work is cut into slices of time, each with its own clock that starts at zero: memory stays bounded and a short event
of a long session keeps its digits.

**Regression** finds powers of operations that a sensor is too slow to see one by one. Every update of the sensor
gives one equation: its energy is the sum over operations of power times the time each had in that window. Windows cut
the steps of a program at different places, so hundreds of them separate the powers even where a window holds ten
operations. A reading of an instant gives the equation of that instant. Ridge regression towards the mean power;
generalised cross-validation chooses how hard it pulls; the result is scaled so that the meter's total is kept. Specs:
Smaragdine report, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from joulery.accounting.session import Session
from joulery.accounting.steps import NS_PER_S, PowerSteps
from joulery.domain.arrays import BoolArray, FloatArray, IntArray
from joulery.domain.energy.channel import ReadingKind

CHUNK = 1 << 17
"""Intervals that begin in one slice of time."""

MAX_RESOLUTION_S = 0.020
"""Slowest updates of a mean or a counter that separate operations of 1 ms; beyond it ridge is no better than time."""

MAX_ROWS = 1500
"""Rows with an estimated power, longest first; the others run at the mean power."""

MIN_WINDOWS = 50
INSTANT_NS = 1_000
"""Length of the instant of a reading."""
_IDLE_PULL = 1e-3
"""How much weaker idle power is pulled towards the mean: it is expected to differ."""


@dataclass(frozen=True, slots=True, eq=False)
class DevicePower:
    """Power of one device over a window.

    Attributes:
        edges_ns: From the start to the end of the window, strictly increasing, int64[k+1].
        watts: Known power of each step, 0 where nothing is known, float64[k].
        missing: Steps where the power of a component is unknown, bool[k].
        updates_ns: When the sensor gave a new value inside the window, some of the edges, int64[u].
        instant: Whether each reading is the power of one instant, not the mean of its step.
        resolution_s: Median distance of two updates, or what the sensor resolves if that is longer; NaN when unknown.
    """

    edges_ns: IntArray
    watts: FloatArray
    missing: BoolArray
    updates_ns: IntArray
    resolution_s: float
    instant: bool = False

    @property
    def known_j(self) -> float:
        """Known energy of the window."""
        return float(np.sum(self.watts * np.diff(self.edges_ns))) / NS_PER_S

    def place(self, t_ns: IntArray) -> IntArray:
        """Which edge is the first that is not before each instant of the window, int64[...]."""
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
        """How often the sensor gave a new value before each instant, of which the :meth:`place` is given."""
        return np.asarray(np.searchsorted(self.updates_ns, self.edges_ns, "left")[place], np.int64)

    @property
    def missing_ns(self) -> int:
        """Time of the window in which power is not, or not fully, known."""
        return int(np.sum(np.diff(self.edges_ns)[self.missing]))


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Energy of each interval, and of the time without intervals.

    Attributes:
        energy_j: Of each interval, float64[n].
        uncovered_ns: Time of each interval without known power, int64[n].
        idle_j: Energy of the time in which no interval ran.
        active_ns: Time in which at least one ran.
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
    )


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


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Energies of one device by regression.

    Attributes:
        energy_j: By row of the session, float64[k].
        idle_j: Of the time in which nothing ran.
        pull: Ridge parameter chosen, as a ratio of the largest eigenvalue of the problem.
    """

    energy_j: FloatArray
    idle_j: float
    pull: float


def why_not(power: DevicePower) -> str | None:
    """Why regression would mislead for a device; None where it helps."""
    if not (power.instant or power.resolution_s <= MAX_RESOLUTION_S):
        return f"its sensor is renewed every {power.resolution_s * 1e3:.3g} ms, more than {MAX_RESOLUTION_S * 1e3:g} ms"
    windows = int(np.count_nonzero(~power.missing))
    return f"only {windows} readings" if windows < MIN_WINDOWS else None


def regress(cut: Session, pieces: IntArray, power: DevicePower) -> Estimate:
    """Energy of each row of a device.

    Args:
        cut: The session.
        pieces: Pieces of the session on the device, by start, int64[p].
        power: The device's power; one step is one window.
    """
    times = _times(cut, pieces, power)
    windows_j = (power.watts * np.diff(power.edges_ns) / NS_PER_S)[~power.missing]
    total_s, known_j = np.asarray(times.sum(axis=0)).ravel(), float(np.sum(windows_j))
    if power.instant:
        times, windows_j = _instants(cut, pieces, power)
    mean_w = known_j / float(np.sum(total_s)) if np.sum(total_s) > 0 else 0.0
    rows = np.argsort(-total_s[:-1], kind="stable")[:MAX_ROWS]
    fitted = np.append(np.sort(rows[total_s[rows] > 0]), len(total_s) - 1)
    watts = np.full(len(total_s), mean_w)
    excess_w, pull = _ridge(times[:, fitted], windows_j - times @ watts)
    watts[fitted] = np.maximum(mean_w + excess_w, 0.0)
    energy_j = watts * total_s
    attributed = float(np.sum(energy_j))
    energy_j *= known_j / attributed if attributed > 0 else 0.0
    return Estimate(energy_j[:-1], float(energy_j[-1]), pull)


def _times(cut: Session, pieces: IntArray, power: DevicePower) -> Any:
    """Fair-share seconds of each row in each known window, and of idle last: a sparse matrix [windows, rows + 1]."""
    from scipy.sparse import csr_array

    start_ns, end_ns, row = cut.start_ns[pieces], cut.end_ns[pieces], cut.row[pieces]
    first = np.searchsorted(power.edges_ns, start_ns, "right") - 1
    last = np.searchsorted(power.edges_ns, end_ns, "left") - 1
    count = last - first + 1
    window = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(np.sum(count)))
    begin = np.maximum(np.repeat(start_ns, count), power.edges_ns[window])
    end = np.minimum(np.repeat(end_ns, count), power.edges_ns[window + 1])
    order = np.argsort(begin, kind="stable")
    one_watt = replace(power, watts=np.ones(len(power.watts)), missing=np.zeros(len(power.watts), np.bool_))
    seconds = np.empty(len(order))
    seconds[order] = fair_shares(begin[order], end[order], one_watt).energy_j
    shape = (len(power.watts), len(cut.rows) + 1)
    idle_s = np.diff(power.edges_ns) / NS_PER_S - np.bincount(window, seconds, shape[0])
    values = np.concatenate([seconds, np.maximum(idle_s, 0.0)])
    where = np.concatenate([window, np.arange(shape[0])])
    column = np.concatenate([np.repeat(row, count), np.full(shape[0], shape[1] - 1)])
    return csr_array((values, (where, column)), shape=shape)[~power.missing]


def _instants(cut: Session, pieces: IntArray, power: DevicePower) -> tuple[Any, FloatArray]:
    """As :func:`_times`, for readings of an instant: what ran in the microsecond of each reading, and its joules.

    A reading of an instant says nothing of the rest of its step: as a mean it would charge the operations there.
    """
    known = ~power.missing
    begins, ends = power.edges_ns[:-1], power.edges_ns[1:]
    fresh = known & np.isin(begins, power.updates_ns)
    at, until = begins[fresh], np.minimum(begins[fresh] + INSTANT_NS, ends[fresh])
    edges = np.unique(np.concatenate([at, until, power.edges_ns[[0, -1]]]))
    outside = ~np.isin(edges[:-1], at)
    times = _times(cut, pieces, replace(power, edges_ns=edges, watts=np.ones(len(edges) - 1), missing=outside))
    return times * (NS_PER_S / INSTANT_NS), power.watts[fresh] * (until - at) / INSTANT_NS


def _ridge(times: Any, residual_j: FloatArray) -> tuple[FloatArray, float]:
    """Watts above the mean of each column, the last being idle, and the pull that cross-validation likes best."""
    columns = times.shape[1]
    pulled = np.ones(columns)
    pulled[-1] = _IDLE_PULL
    scale = 1.0 / np.sqrt(pulled)
    eigen, vectors = np.linalg.eigh(scale[:, None] * (times.T @ times).toarray() * scale)
    eigen = np.maximum(eigen, 0.0)
    if not eigen[-1] > 0:
        return np.zeros(columns), 1.0
    along = vectors.T @ (scale * (times.T @ residual_j))
    total, count = float(residual_j @ residual_j), len(residual_j)

    def score(pull: float) -> float:
        shrunk = 1.0 / (eigen + pull * eigen[-1])
        left = total - 2 * float(np.sum(shrunk * along**2)) + float(np.sum(shrunk**2 * eigen * along**2))
        freedom = float(np.sum(eigen * shrunk)) / count
        return left / (1.0 - freedom) ** 2 if freedom < 1 else float("inf")

    pull = min(np.geomspace(1e-8, 1.0, 33).tolist(), key=score)
    return scale * (vectors @ (along / (eigen + pull * eigen[-1]))), float(pull)
