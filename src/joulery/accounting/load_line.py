"""Power against busy cores or GPUs by interval: the points that a linear power model is fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from joulery.accounting.steps import NS_PER_S, PowerSteps, energy_by_bin
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.channel import Channel
from joulery.domain.energy.power import BusyTimes

_COVERED_RATIO = 0.99
"""Share of a bin's time that readings must cover; a bin with less is left out."""
_LEAST_S = 1e-6
"""Work shorter than this counts as rounding error."""


def cpu_channels(channels: Iterable[Channel]) -> tuple[Channel, ...]:
    """The channels that measure the CPUs: sockets, else the machine as a whole."""
    found = tuple(channels)
    sockets = tuple(channel for channel in found if channel.device.startswith("cpu:"))
    return sockets or tuple(channel for channel in found if channel.device == "machine")


def gpu_channels(channels: Iterable[Channel], gpus: Sequence[str]) -> tuple[Channel, ...]:
    """The channels that measure these GPUs as boards."""
    return tuple(channel for channel in channels if channel.device in gpus)


def gpu_points(power: Sequence[PowerSteps], work: FloatArray, bins_ns: IntArray) -> tuple[FloatArray, FloatArray]:
    """Work done in each bin, in GPUs, and the mean power of the boards.

    Args:
        power: Power of the boards.
        work: Start and end of each piece of work, Unix seconds, and the seconds of a whole GPU it took, float64[m, 3];
            spread evenly between start and end.
        bins_ns: Edges of the bins, Unix nanoseconds, increasing, int64[n+1].

    Returns:
        Busy GPUs and watts, float64[n] each; watts are NaN where not known.
    """
    seconds = np.diff(bins_ns) / NS_PER_S
    energy_j, covered = np.zeros(len(seconds)), np.ones(len(seconds), np.bool_)
    for steps in power:
        joules, covered_s = energy_by_bin(steps, bins_ns)
        energy_j += joules
        covered &= covered_s >= _COVERED_RATIO * seconds
    return work_by_bin(work, bins_ns) / seconds, np.where(covered, energy_j / seconds, np.nan)


def work_by_bin(work: FloatArray, bins_ns: IntArray) -> FloatArray:
    """GPU seconds of work in each bin.

    Args:
        work: As for :func:`gpu_points`; work that took no time is left out.
        bins_ns: Edges of the bins, Unix nanoseconds, increasing, int64[n+1].

    Returns:
        Seconds of a whole GPU, float64[n]; 0 where nothing ran, to a microsecond.
    """
    edges_s = (bins_ns - bins_ns[0]) / NS_PER_S
    start_s, end_s, gpu_s = (work - np.array([bins_ns[0] / NS_PER_S] * 2 + [0.0])).T
    ran = end_s > start_s
    start_s, end_s, rate = start_s[ran], end_s[ran], gpu_s[ran] / (end_s[ran] - start_s[ran])
    at_s = np.concatenate((start_s, end_s))
    if not len(at_s):
        return np.zeros(len(edges_s) - 1)
    order = np.argsort(at_s, kind="stable")
    slope = np.cumsum(np.concatenate((rate, -rate))[order])
    done_s = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(at_s[order]))))
    busy_s = np.diff(np.interp(edges_s, at_s[order], done_s))
    return np.where(busy_s < _LEAST_S, 0.0, busy_s)


def power_points(
    power: Sequence[PowerSteps], busy: Mapping[str, BusyTimes], bins_ns: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Mean number of busy cores and mean power of all CPUs in each bin.

    Args:
        power: Power of the CPUs; channels of other devices are ignored.
        busy: Busy times by socket.
        bins_ns: Edges of the bins, Unix nanoseconds, increasing, int64[n+1].

    Returns:
        Busy cores and watts, float64[n] each; NaN where not known.
    """
    seconds = np.diff(bins_ns) / NS_PER_S
    seeing = {id(channel) for channel in cpu_channels(steps.channel for steps in power)}
    energy_j = np.zeros(len(seconds))
    covered = np.ones(len(seconds), np.bool_)
    for steps in power:
        if id(steps.channel) in seeing:
            joules, covered_s = energy_by_bin(steps, bins_ns)
            energy_j += joules
            covered &= covered_s >= _COVERED_RATIO * seconds
    if not seeing:
        covered[:] = False
    used_s = np.zeros(len(seconds))
    sockets = [times for device, times in busy.items() if device.startswith("cpu:")]
    for times in sockets:
        used_s += _resampled(times, bins_ns)
    cores = used_s / seconds if sockets else np.full(len(seconds), np.nan)
    return np.asarray(cores), np.where(covered, energy_j / seconds, np.nan)


def _resampled(times: BusyTimes, bins_ns: IntArray) -> FloatArray:
    """Busy seconds of all processes in each bin, spread evenly within each interval; NaN outside what is known."""
    known = np.concatenate(([0.0], np.cumsum(np.maximum(times.all_s, times.app_s))))
    at = np.interp(bins_ns, times.edges_ns, known, left=np.nan, right=np.nan)
    return np.diff(at)
