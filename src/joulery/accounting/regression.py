"""Powers of operations that a sensor is too slow to see one by one, from many of its windows.

Every update of the sensor gives one equation: its energy is the sum over operations of power times the time each had
in that window. Windows cut the steps of a program at different places, so hundreds of them separate the powers even
where a window holds ten operations. A reading of an instant gives the equation of that instant. Ridge regression
towards the mean power; generalised cross-validation chooses how hard it pulls; the result is scaled so that the meter's
total is kept. Specs: Smaragdine report, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from joulery.accounting.fairshare import DevicePower, fair_shares
from joulery.accounting.session import Session
from joulery.accounting.steps import NS_PER_S
from joulery.domain.arrays import FloatArray, IntArray

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
