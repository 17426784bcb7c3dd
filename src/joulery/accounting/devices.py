"""Which meter belongs to which device of a trace: the two are written by different hands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.accounting.charge import BusyTimes
from joulery.accounting.integrate import Metered
from joulery.accounting.steps import PowerSteps
from joulery.domain.trace.events import EventTrace, with_devices

_ACCELERATORS = ("cuda:", "hip:", "rocm:")
_HOSTS = ("cpu", "host")
_WHOLE_MACHINE = ("machine", "psys")


def matched(trace: EventTrace, metered: Sequence[Metered]) -> tuple[EventTrace, dict[str, list[Metered]]]:
    """Name the devices of a trace as its meters do.

    Names match regardless of case (``GPU:0``, ``gpu:0``, ``cuda:0``). Frameworks do not say which socket a host thread
    ran on: their device ``CPU`` is the one metered socket, all metered sockets together, or the metered machine.

    Returns:
        The trace with meters' names, and the channels of each device; devices without events keep theirs.
    """
    channels: dict[str, list[Metered]] = {}
    for item in metered:
        channels.setdefault(item.channel.device, []).append(item)
    by_name = {canonical(name): name for name in channels}
    names, notes = [], list(trace.notes)
    for device in trace.devices:
        name = by_name.get(canonical(device))
        if name is None and canonical(device) in _HOSTS:
            name = _host(device, channels, by_name, notes)
        names.append(name or device)
    return with_devices(trace, names, notes), channels


def canonical(device: str) -> str:
    """The name by which devices are compared."""
    name = device.strip().lower().removeprefix("/device:")
    for prefix in _ACCELERATORS:
        if name.startswith(prefix):
            return "gpu:" + name.removeprefix(prefix)
    return name


def _host(device: str, channels: dict[str, list[Metered]], by_name: dict[str, str], notes: list[str]) -> str | None:
    """Meter of a host whose sockets the trace does not tell apart; sockets are put together under ``device``."""
    sockets = sorted(name for name in by_name if name.startswith("cpu:"))
    if len(sockets) == 1:
        return by_name[sockets[0]]
    if not sockets:
        return next((by_name[name] for name in _WHOLE_MACHINE if name in by_name), None)
    notes.append(
        f"{len(sockets)} sockets are accounted together: the trace does not say on which one a host thread ran"
    )
    channels[device] = [item for name in sockets for item in channels.pop(by_name[name])]
    return device


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """Power of a shared device, whose it is; the three add up to the device's wherever all are known.

    Attributes:
        run: Of the traced program; NaN where nobody knows who kept the device busy.
        other: Of other processes.
        idle: Of nobody: what the idle device draws, and intervals in which nobody was busy.
    """

    run: PowerSteps
    other: PowerSteps
    idle: PowerSteps


def divided(item: Metered, times: BusyTimes) -> Divided:
    """Divide a channel's power among the traced program, others and idle, interval by interval (virtualisation).

    Args:
        item: The channel. Power up to its ``idle_w`` is idle first, where that is known.
        times: Who kept the device busy.
    """
    begin, end = (int(item.steps.edges_ns[0]), int(item.steps.edges_ns[-1])) if len(item.steps) else (0, 0)
    cuts = times.edges_ns[(times.edges_ns > begin) & (times.edges_ns < end)]
    edges = np.union1d(item.steps.edges_ns, cuts)
    watts = item.steps.at(edges[:-1])
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
    return Divided(
        PowerSteps(edges, dynamic * ratio, item.steps.faults),
        PowerSteps(edges, dynamic * (busy - ratio)),
        PowerSteps(edges, floor + dynamic * (1.0 - busy)),
    )
