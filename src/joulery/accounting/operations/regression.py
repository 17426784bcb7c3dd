"""Energy of operations by regression over many readings, where a sensor is too slow to resolve each of them.

Every update of the sensor gives one equation: its energy is the sum over operations of power times the time each had in
that window. Windows cut the steps of a program at different places, so hundreds of them separate the powers even where
a window holds ten operations. A reading of an instant gives the equation of that instant. Ridge regression pulls
towards the mean power, generalised cross-validation chooses how hard, and the result is scaled so that the meter's
total is kept. Specs: Smaragdine report, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from joulery.accounting.operations.estimators import DevicePower, fair_shares, shares_by_weight, split
from joulery.accounting.operations.session import Session
from joulery.accounting.steps import NS_PER_S
from joulery.domain.arrays import BoolArray, FloatArray, IntArray

MAX_RESOLUTION_S = 0.020
"""Slowest update interval of a mean or a counter that separates operations of 1 ms with few readings."""

MAX_SLOW_RESOLUTION_S, WINDOWS_PER_ROW = 0.100, 20
"""Slowest interval that suffices, with this many readings for each operation (of those that take 95 % of the time)."""

MAX_ROWS = 1500
"""Rows with an estimated power, longest first; the others run at the mean power."""

MIN_WINDOWS = 50
INSTANT_NS = 1_000
"""Length of the instant of a reading."""
_IDLE_PULL = 1e-3
"""Factor by which idle power is pulled less towards the mean: it is expected to differ."""
_BLOCK = 256
"""Number of windows of the matrix that are processed together."""
_DENSE = 100
"""Number of products of a dense matrix that take as long as one pair of entries."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Energies of one device by regression.

    Attributes:
        energy_j: Energy by row of the session, float64[k].
        idle_j: Energy of the time in which nothing ran.
        pull: Ridge parameter chosen, as a ratio of the largest eigenvalue of the problem.
    """

    energy_j: FloatArray
    idle_j: float
    pull: float


def why_not(power: DevicePower, runtime_s: FloatArray) -> str | None:
    """The reason why regression would mislead for a device; None where it helps.

    Args:
        power: The device's power.
        runtime_s: Time of each of its operations, float64[k].
    """
    windows = int(np.count_nonzero(np.isin(power.edges_ns[:-1][~power.missing], power.updates_ns)))
    if windows < MIN_WINDOWS:
        return f"only {windows} readings"
    if power.instant or power.resolution_s <= MAX_RESOLUTION_S:
        return None
    every = f"its sensor is renewed every {power.resolution_s * 1e3:.3g} ms"
    if power.resolution_s > MAX_SLOW_RESOLUTION_S * (1 + 1e-6):
        return f"{every}, more than {MAX_SLOW_RESOLUTION_S * 1e3:g} ms"
    longest = np.sort(runtime_s)[::-1]
    operations = int(np.searchsorted(np.cumsum(longest), 0.95 * float(np.sum(longest)))) + 1
    if windows < WINDOWS_PER_ROW * operations:
        return f"{every}, and {operations} operations need {WINDOWS_PER_ROW * operations} readings, not {windows}"
    return None


def regress(cut: Session, pieces: IntArray, power: DevicePower) -> Estimate:
    """Estimate the energy of each row of a device.

    Args:
        cut: The session.
        pieces: Pieces of the session on the device, by start, int64[p].
        power: The device's power; one step is one window.
    """
    times = _times(cut, pieces, power)
    windows_j = (power.watts * np.diff(power.edges_ns) / NS_PER_S)[~power.missing]
    total_s, known_j = times.total_s(), float(np.sum(windows_j))
    if power.instant:
        times, windows_j = _instants(cut, pieces, power)
    elif power.averaging_ns:
        times, windows_j = _means(cut, pieces, power)
    mean_w = known_j / float(np.sum(total_s)) if np.sum(total_s) > 0 else 0.0
    rows = np.argsort(-total_s[:-1], kind="stable")[:MAX_ROWS]
    fitted = np.append(np.sort(rows[total_s[rows] > 0]), len(total_s) - 1)
    watts = np.full(len(total_s), mean_w)
    excess_w, pull = _ridge(times, fitted, windows_j - times.energy_j(watts))
    watts[fitted] = np.maximum(mean_w + excess_w, 0.0)
    energy_j = watts * total_s
    attributed = float(np.sum(energy_j))
    energy_j *= known_j / attributed if attributed > 0 else 0.0
    return Estimate(energy_j[:-1], float(energy_j[-1]), pull)


@dataclass(frozen=True, slots=True, eq=False)
class WindowTimes:
    """Fair-share seconds of each column (the rows of a session, idle last) in each window, where there are any.

    Attributes:
        windows, columns: Number of each.
        window, column: Window and column of each entry, int64[n]; a pair may occur twice, its seconds add up.
        seconds: float64[n].
    """

    windows: int
    columns: int
    window: IntArray
    column: IntArray
    seconds: FloatArray

    def total_s(self) -> FloatArray:
        """Seconds of each column, float64[columns]."""
        return np.asarray(np.bincount(self.column, self.seconds, self.columns), np.float64)

    def energy_j(self, watts: FloatArray) -> FloatArray:
        """Joules of each window if each column had its watts, float64[windows].

        Args:
            watts: float64[columns].
        """
        return np.asarray(np.bincount(self.window, self.seconds * watts[self.column], self.windows), np.float64)

    def only(self, chosen: BoolArray) -> WindowTimes:
        """The entries of chosen windows, renumbered.

        Args:
            chosen: bool[windows].
        """
        kept, number = chosen[self.window], np.cumsum(chosen) - 1
        fields = number[self.window[kept]], self.column[kept], self.seconds[kept]
        return WindowTimes(int(np.count_nonzero(chosen)), self.columns, *fields)

    def joined(self, windows: int, window: IntArray, part: IntArray) -> WindowTimes:
        """The times of new windows that are composed of these and may overlap.

        Args:
            windows: Number of the new windows.
            window, part: Each new window and a window of these that it contains, int64[p].
        """
        order = np.argsort(self.window, kind="stable")
        count = np.bincount(self.window, minlength=self.windows)
        first = np.cumsum(count) - count
        entry = np.repeat(first[part] - (np.cumsum(count[part]) - count[part]), count[part])
        entry = order[entry + np.arange(len(entry))]
        return WindowTimes(
            windows, self.columns, np.repeat(window, count[part]), self.column[entry], self.seconds[entry]
        )

    def normal_equations(self, chosen: IntArray, residual_j: FloatArray) -> tuple[FloatArray, FloatArray]:
        """``A.T @ A`` and ``A.T @ residual_j`` of the matrix ``A`` [windows, chosen columns], built block by block.

        Args:
            chosen: Columns, increasing, int64[c].
            residual_j: float64[windows].
        """
        place = np.full(self.columns, -1)
        place[chosen] = np.arange(len(chosen))
        order = np.argsort(self.window, kind="stable")
        order = order[place[self.column[order]] >= 0]
        window, column, seconds = self.window[order], place[self.column[order]], self.seconds[order]
        size = len(chosen)
        gram = np.zeros((size, size))
        for begin in range(0, self.windows, _BLOCK):
            first, last = np.searchsorted(window, [begin, begin + _BLOCK])
            rows, columns, values = window[first:last] - begin, column[first:last], seconds[first:last]
            count = np.bincount(rows, minlength=_BLOCK)
            if int(np.sum(count**2)) * _DENSE < _BLOCK * size**2:
                one, other = _pairs(count)
                gram += np.bincount(columns[one] * size + columns[other], values[one] * values[other], size**2).reshape(
                    size, size
                )
            else:
                block = np.bincount(rows * size + columns, values, _BLOCK * size).reshape(_BLOCK, size)
                gram += block.T @ block
        return gram, np.asarray(np.bincount(column, seconds * residual_j[window], len(chosen)), np.float64)


def _pairs(count: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of entries that lie in the same group, each in both orders and with itself.

    Args:
        count: Entries of each group; those of a group follow one another, int64[g].
    """
    first = np.cumsum(count) - count
    partners = np.repeat(count, count)
    one = np.repeat(np.arange(len(partners)), partners)
    within = np.arange(len(one)) - np.repeat(np.cumsum(partners) - partners, partners)
    return one, np.repeat(np.repeat(first, count), partners) + within


def _times(cut: Session, pieces: IntArray, power: DevicePower) -> WindowTimes:
    """Fair-share seconds of each row in each known window, and of idle last."""
    start_ns, end_ns, row = cut.start_ns[pieces], cut.end_ns[pieces], cut.row[pieces]
    piece, window, begin, end = split(start_ns, end_ns, power.edges_ns)
    order = np.argsort(begin, kind="stable")
    one_watt = replace(power, watts=np.ones(len(power.watts)), missing=np.zeros(len(power.watts), np.bool_))
    seconds = np.empty(len(order))
    weight = cut.weight_on(pieces)
    if weight is None:
        seconds[order] = fair_shares(begin[order], end[order], one_watt).energy_j
    else:
        seconds = shares_by_weight(begin, end, one_watt, weight[piece], cut.rest_on(pieces)).energy_j
    windows, rows = len(power.watts), len(cut.rows)
    idle_s = np.diff(power.edges_ns) / NS_PER_S - np.bincount(window, seconds, windows)
    values = np.concatenate([seconds, np.maximum(idle_s, 0.0)])
    where = np.concatenate([window, np.arange(windows)])
    column = np.concatenate([row[piece], np.full(windows, rows)])
    return WindowTimes(windows, rows + 1, where, column, values).only(~power.missing)


def _instants(cut: Session, pieces: IntArray, power: DevicePower) -> tuple[WindowTimes, FloatArray]:
    """As :func:`_times`, for readings of an instant: what ran in the microsecond of each reading, and its joules.

    A reading of an instant does not describe the rest of its step: as a mean it would charge the operations there.
    """
    known = ~power.missing
    begins, ends = power.edges_ns[:-1], power.edges_ns[1:]
    fresh = known & np.isin(begins, power.updates_ns)
    at, until = begins[fresh], np.minimum(begins[fresh] + INSTANT_NS, ends[fresh])
    edges = np.unique(np.concatenate([at, until, power.edges_ns[[0, -1]]]))
    outside = ~np.isin(edges[:-1], at)
    times = _times(cut, pieces, replace(power, edges_ns=edges, watts=np.ones(len(edges) - 1), missing=outside))
    times = replace(times, seconds=times.seconds * (NS_PER_S / INSTANT_NS))
    return times, power.watts[fresh] * (until - at) / INSTANT_NS


def _means(cut: Session, pieces: IntArray, power: DevicePower) -> tuple[WindowTimes, FloatArray]:
    """As :func:`_times`, for means of a window: what ran in the window of each reading, not in its step."""
    begins, half = power.edges_ns[:-1], power.averaging_ns // 2
    first, last = int(power.edges_ns[0]), int(power.edges_ns[-1])
    fresh = ~power.missing & np.isin(begins, power.updates_ns) & (begins - half >= first)
    fresh &= begins - half + power.averaging_ns <= last
    start, end = begins[fresh] - half, begins[fresh] - half + power.averaging_ns
    edges = np.unique(np.concatenate([start, end, power.edges_ns[[0, -1]]]))
    known = np.zeros(len(edges) - 1, np.bool_)
    fine = _times(cut, pieces, replace(power, edges_ns=edges, watts=np.ones(len(edges) - 1), missing=known))
    reading, part, _, _ = split(start, end, edges)
    return fine.joined(len(start), reading, part), power.watts[fresh] * power.averaging_ns / NS_PER_S


def _ridge(times: WindowTimes, fitted: IntArray, residual_j: FloatArray) -> tuple[FloatArray, float]:
    """Watts above the mean of the fitted columns, idle last, and the pull that cross-validation scores best."""
    columns = len(fitted)
    gram, moments = times.normal_equations(fitted, residual_j)
    pulled = np.ones(columns)
    pulled[-1] = _IDLE_PULL
    scale = 1.0 / np.sqrt(pulled)
    eigen, vectors = np.linalg.eigh(scale[:, None] * gram * scale)
    eigen = np.maximum(eigen, 0.0)
    if not eigen[-1] > 0:
        return np.zeros(columns), 1.0
    along = vectors.T @ (scale * moments)
    total, count = float(residual_j @ residual_j), len(residual_j)

    def score(pull: float) -> float:
        shrunk = 1.0 / (eigen + pull * eigen[-1])
        left = total - 2 * float(np.sum(shrunk * along**2)) + float(np.sum(shrunk**2 * eigen * along**2))
        freedom = float(np.sum(eigen * shrunk)) / count
        return left / (1.0 - freedom) ** 2 if freedom < 1 else float("inf")

    pull = min(np.geomspace(1e-8, 1.0, 33).tolist(), key=score)
    return scale * (vectors @ (along / (eigen + pull * eigen[-1]))), float(pull)
