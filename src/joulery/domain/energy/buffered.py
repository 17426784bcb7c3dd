"""Refinement of an energy counter by the power readings that its device buffers."""

from __future__ import annotations

import numpy as np

from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.power import PowerTrace

_ANCHOR_NS = 10_000_000_000
"""Interval of the counter's readings that are kept. A counter renewed every 100 ms is late by up to 100 ms."""
_HOLE_NS = 250_000_000
"""Longest gap in the buffered readings; over a longer one, the counter's own readings are kept."""
_FEWEST = 4
_RATIO = (0.5, 2.0)
"""Range of the counter's energy over the buffered energy; outside it, the two are not readings of the same board."""


def refined(counter: PowerTrace, t_ns: IntArray, watts: FloatArray, late_ns: int = 0) -> PowerTrace:
    """Resample a counter at the times of buffered power readings: its energy, with the shape of their power.

    A buffered reading is a mean over some milliseconds, whose middle lies before the reading's stamp. It holds for the
    time that is nearest to that middle.

    The counter's first and last reading and one every ten seconds are kept. In between, its energy is distributed like
    the integral of the buffered power; where that has gaps or contradicts the counter, the counter's own readings are
    kept.

    Args:
        counter: Readings of a counter, joules.
        t_ns: Unix nanoseconds of the buffered readings, strictly increasing, int64[n].
        watts: Their power, float64[n].
        late_ns: How long before its stamp the middle of a reading lies.
    """
    known = np.flatnonzero(~np.isnan(counter.values))
    if len(known) < 2 or len(t_ns) < _FEWEST:
        return counter
    anchors = _anchors(counter.t_ns, known)
    edges_ns, power_j = _integral(t_ns - late_ns, watts, int(t_ns[-1]))
    pieces: list[tuple[IntArray, FloatArray]] = []
    refined_any = False
    for first, last in zip(anchors[:-1].tolist(), anchors[1:].tolist(), strict=True):
        piece = _between(counter, first, last, edges_ns, power_j)
        refined_any |= piece is not None
        pieces.append(piece or (counter.t_ns[first:last], counter.values[first:last]))
    if not refined_any:
        return counter
    end = int(anchors[-1])
    pieces.append((counter.t_ns[end:], counter.values[end:]))
    head = counter.t_ns[: int(anchors[0])], counter.values[: int(anchors[0])]
    step_s = float(np.median(np.diff(t_ns))) / 1e9
    return PowerTrace(
        counter.channel._replace(update_s=step_s),
        np.concatenate([head[0], *(stamps for stamps, _ in pieces)]),
        np.concatenate([head[1], *(values for _, values in pieces)]),
        step_s,
    )


def _integral(middle_ns: IntArray, watts: FloatArray, end_ns: int) -> tuple[IntArray, FloatArray]:
    """Times at which the power changes, and the energy up to each; the last power holds to the end.

    Args:
        middle_ns: Middle of each reading, int64[n].
        watts: Its power, float64[n].
        end_ns: Stamp of the last reading.
    """
    half_ns = np.diff(middle_ns) // 2
    first, last = middle_ns[0] - half_ns[0], middle_ns[-1] + half_ns[-1]
    edges_ns = np.concatenate([[first], middle_ns[:-1] + half_ns, [max(int(last), end_ns)]])
    return edges_ns, np.concatenate([[0.0], np.cumsum(watts * np.diff(edges_ns) / 1e9)])


def _anchors(t_ns: IntArray, known: IntArray) -> IntArray:
    """Indices of the readings that are kept: the first, one every ten seconds, the last."""
    slots = (t_ns[known] - t_ns[known[0]]) // _ANCHOR_NS
    starts = known[np.flatnonzero(np.diff(slots, prepend=-1) > 0)]
    near = len(starts) > 1 and t_ns[known[-1]] - t_ns[starts[-1]] < _ANCHOR_NS // 2
    return np.unique(np.append(starts[:-1] if near else starts, known[-1]))


def _between(
    counter: PowerTrace, first: int, last: int, edges_ns: IntArray, power_j: FloatArray
) -> tuple[IntArray, FloatArray] | None:
    """Stamps and joules from one reading to just before another; None where the buffered power is not usable."""
    begin_ns, end_ns = int(counter.t_ns[first]), int(counter.t_ns[last])
    inside = slice(int(np.searchsorted(edges_ns, begin_ns, "right")), int(np.searchsorted(edges_ns, end_ns, "left")))
    stamps = edges_ns[inside]
    edges = np.concatenate([[begin_ns], stamps, [end_ns]])
    shape_j = np.interp(edges, edges_ns, power_j)
    energy_j, whole_j = float(counter.values[last] - counter.values[first]), float(shape_j[-1] - shape_j[0])
    if len(stamps) < _FEWEST or int(np.diff(edges).max()) > _HOLE_NS or whole_j <= 0:
        return None
    ratio = energy_j / whole_j
    if not _RATIO[0] <= ratio <= _RATIO[1]:
        return None
    values = counter.values[first] + ratio * (shape_j[:-1] - shape_j[0])
    return edges[:-1], np.asarray(values, np.float64)
