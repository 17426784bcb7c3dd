"""Which meter belongs to which device of a trace: the two are written by different hands."""

from __future__ import annotations

from collections.abc import Sequence

from joulery.accounting.integrate import Metered
from joulery.domain.events import EventTrace, with_devices

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
