"""The run's power inside a busy interval, by the CPU times of its threads.

Kernel ticks show the run's share of a socket over a quarter of a second. On a machine that others keep busy, the power
of the socket hardly changes inside such an interval, while the run's part changes with its threads: spread evenly,
its energy would go to the operations of quiet moments at the expense of busy ones. Threads are read every 20 ms, so the
energy of each interval moves to the times at which they ran. The run's energy in each interval stays as it is.
"""

from __future__ import annotations

import numpy as np

from joulery.accounting.charge import DividedPower
from joulery.accounting.operations.cpu_lanes import RunCpu
from joulery.accounting.steps import NS_PER_S, PowerSteps
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.power import BusyTimes

_HALVINGS = 40


def at_run_times(divided: DividedPower, times: BusyTimes, cpu: RunCpu) -> DividedPower:
    """The division of a channel, with the run's energy of each busy interval at the times when its threads ran.

    Other processes are taken to use the CPUs at an even rate, as far as the run leaves CPUs free. What the run has of
    an interval beyond that is spread over its remaining power.

    Args:
        divided: The division, with one share for each busy interval.
        times: Busy times of the device, by which it was divided.
        cpu: CPU time of the run's threads.

    Returns:
        The division with the same steps; steps outside the readings of the threads are unchanged.
    """
    edges = divided.run.edges_ns
    inside = np.flatnonzero((edges[:-1] >= cpu.edges_ns[0]) & (edges[1:] <= cpu.edges_ns[-1]))
    interval = np.searchsorted(times.edges_ns, edges[inside], "right") - 1
    known = (interval >= 0) & (interval < len(times.all_s))
    inside, interval = inside[known], interval[known]
    run_w, other_w = divided.run.watts[inside], divided.other.watts[inside]
    length_s = np.diff(edges)[inside] / NS_PER_S
    rate = cpu.between(edges)[inside] / length_s
    other = _others(interval, length_s, rate, times)
    ratio = np.divide(rate, rate + other, out=np.zeros(len(rate)), where=rate + other > 0)
    moved_w = _as_before(interval, length_s, run_w, run_w + other_w, ratio)
    watts, others = divided.run.watts.copy(), divided.other.watts.copy()
    watts[inside], others[inside] = moved_w, run_w + other_w - moved_w
    return DividedPower(
        PowerSteps(divided.run.channel, edges, watts, divided.run.faults),
        PowerSteps(divided.other.channel, edges, others, divided.other.faults),
        divided.idle,
    )


def _others(interval: IntArray, length_s: FloatArray, rate: FloatArray, times: BusyTimes) -> FloatArray:
    """CPUs that other processes keep busy in each step: one rate an interval, at most what the run leaves."""
    count = len(times.all_s)
    whole_s = np.diff(times.edges_ns) / NS_PER_S
    wanted = np.nan_to_num(np.maximum(times.all_s - times.app_s, 0.0) / whole_s)
    if not times.cpus:
        return np.asarray(wanted[interval], np.float64)
    free = np.maximum(times.cpus - rate, 0.0)
    need_s = np.minimum(wanted * np.bincount(interval, length_s, count), np.bincount(interval, free * length_s, count))
    low, high = np.zeros(count), np.full(count, float(times.cpus))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = np.bincount(interval, np.minimum(middle[interval], free) * length_s, count) >= need_s
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.asarray(np.minimum(high[interval], free), np.float64)


def _as_before(
    interval: IntArray, length_s: FloatArray, run_w: FloatArray, busy_w: FloatArray, ratio: FloatArray
) -> FloatArray:
    """Power of the run at these shares, with the energy that each interval had before; NaN where it was."""
    energy_j = np.nan_to_num(run_w * length_s)
    count = int(interval.max()) + 1 if len(interval) else 0
    known_w = np.nan_to_num(busy_w)
    had_j = np.bincount(interval, energy_j, count)
    taken_j = np.bincount(interval, known_w * ratio * length_s, count)
    left_j = np.bincount(interval, known_w * (1.0 - ratio) * length_s, count)
    less = np.divide(had_j, taken_j, out=np.ones(count), where=taken_j > had_j)
    more = np.divide(had_j - taken_j, left_j, out=np.zeros(count), where=(had_j > taken_j) & (left_j > 0))
    share = np.minimum(ratio * less[interval] + (1.0 - ratio) * more[interval], 1.0)
    return np.asarray(np.where(np.isnan(run_w), np.nan, busy_w * share), np.float64)
