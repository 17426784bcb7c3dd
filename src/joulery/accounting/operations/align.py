"""Align events with power: joules by operation, device and phase, and the unattributed rest.

Input is an :class:`~joulery.domain.trace.events.EventTrace` and the power of its devices; output a
:class:`~joulery.domain.energy.tensor_footprint.TensorFootprint` with parts that add up to the meter. Source: Smaragdine
(ICSE'24), sections 3.2-3.3, with the corrections its Algorithms 1 and 2 need (docs/papers/smaragdine.md lists them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from joulery.accounting.operations.cpu_lanes import silent_processes, weighed
from joulery.accounting.operations.estimators import (
    DevicePower,
    Shares,
    device_power,
    fair_shares,
    shares_by_weight,
)
from joulery.accounting.operations.regression import regress, why_not
from joulery.accounting.operations.session import Session, is_accelerator, session, unions
from joulery.accounting.steps import NS_PER_S, PowerSteps, carbon_steps
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.tensor_footprint import DeviceEnergy, TensorFootprint
from joulery.domain.errors import DataError
from joulery.domain.quality import weakest
from joulery.domain.trace.events import EventTrace, with_devices
from joulery.domain.trace.threads import ThreadTimes

Multiplicity = Literal["events", "set"]
Estimator = Literal["recency", "regression"]
_ACCELERATORS = ("cuda:", "hip:", "rocm:")
_SILENT_S = 0.1
_HOSTS = ("cpu", "host")
_WHOLE_MACHINE = ("machine", "psys")


def align(
    trace: EventTrace,
    power: Mapping[str, Sequence[PowerSteps]],
    window_ns: tuple[int, int],
    *,
    multiplicity: Multiplicity = "events",
    estimator: Estimator = "recency",
    carbon: CarbonSeries | None = None,
    pue: float = 1.0,
    steps: int = 0,
    threads: ThreadTimes | None = None,
) -> TensorFootprint:
    """Divide the power of each instant among the events that run on the device then: equally, or by CPU time.

    Energy of the time without events is unattributed; where power is unknown, time is uncovered and no energy is
    counted.

    Args:
        trace: The events.
        power: The channels of each metered device, by the device name the trace uses; no two channels of a device
            may count the same energy.
        window_ns: The session ``[t0, t1)`` on the clock of the trace; events are clipped to it.
        multiplicity: ``events`` gives every concurrent event a share; ``set`` gives every distinct operation one share
            however many of its events run (the letter of Algorithm 2).
        estimator: ``recency`` gives every instant the power last read; ``regression`` estimates the power of each
            operation over all readings (:mod:`joulery.accounting.operations.regression`) on devices where that helps,
            and the footprint notes where it does not.
        carbon: Intensity of the grid, for grams; None when they are not asked for.
        pue: Facility energy per IT energy; multiplies grams, never joules.
        steps: Equal steps that the session consists of, for standard errors over them; 0 when not known.
        threads: CPU times of the host threads that the trace names: then host events have shares by CPU time.

    Raises:
        DataError: The window is empty, or regression is asked for in ``set`` multiplicity.
    """
    if estimator == "regression" and multiplicity == "set":
        raise DataError("regression works on events, not on sets of operations", hint="use --multiplicity events")
    cut = session(trace, window_ns)
    if threads is not None and multiplicity == "events":
        cut = _weighed_hosts(cut, trace, threads)
    columns = _Columns(cut, trace.lanes, steps)
    devices, notes = _devices(cut, power, columns, multiplicity, estimator, carbon, pue)
    notes = [*trace.notes, *notes, *_notes(cut, devices, columns, power)]
    if threads is not None and not cut.weighed and not all(is_accelerator(name) for name in cut.rows.device):
        notes.append("the CPU time of the trace's threads is not known: threads share equally, those that wait too")
    if cut.weighed and threads is not None:
        known = [trace.lanes[at] for at in np.unique(cut.lane[cut.lane >= 0]).tolist()]
        notes += _silent_notes(silent_processes(threads, known, window_ns))
    return _footprint(trace, cut, columns, devices, estimator, multiplicity, notes)


def _footprint(
    trace: EventTrace,
    cut: Session,
    columns: _Columns,
    devices: Sequence[DeviceEnergy],
    estimator: Estimator,
    multiplicity: Multiplicity,
    notes: Sequence[str],
) -> TensorFootprint:
    """The filled rows of a session as a footprint."""
    return TensorFootprint(
        cut.window_ns,
        devices,
        cut.rows.op,
        cut.rows.device,
        cut.rows.phase,
        energy_j=columns.energy_j,
        runtime_ns=columns.runtime_ns,
        uncovered_ns=columns.uncovered_ns,
        count=cut.rows.count,
        samples=columns.samples,
        median_ns=cut.median_ns,
        first_ns=cut.first_ns,
        active_ns=columns.active_ns,
        active_j=columns.active_j,
        carbon_g=columns.carbon_g,
        error_j=columns.error_j,
        estimator=estimator,
        multiplicity=multiplicity,
        composite=trace.composite & set(cut.rows.op),
        feeds=trace.feeds,
        process_j=columns.process_j(),
        notes=notes,
    )


def _weighed_hosts(cut: Session, trace: EventTrace, threads: ThreadTimes) -> Session:
    """The session with the lanes of host threads weighed by their CPU time, where that is known."""
    for device in dict.fromkeys(cut.rows.device):
        if not is_accelerator(device):
            cut = weighed(cut, device, trace.lanes, threads) or cut
    return cut


def _silent_notes(cpu_s: Sequence[float]) -> list[str]:
    """Notes on the CPU time of processes without operations (workers of a loader, launchers)."""
    if not sum(cpu_s) >= _SILENT_S:
        return []
    return [
        f"{len(cpu_s)} other process(es) of the run recorded no operation (launchers, workers that call no model): "
        f"the energy of their {sum(cpu_s):.3g} s of CPU time is unattributed"
    ]


def _devices(
    cut: Session,
    power: Mapping[str, Sequence[PowerSteps]],
    columns: _Columns,
    multiplicity: Multiplicity,
    estimator: Estimator,
    carbon: CarbonSeries | None,
    pue: float,
) -> tuple[list[DeviceEnergy], list[str]]:
    """Fill the rows of every device; return the devices by name, and notes."""
    devices: list[DeviceEnergy] = []
    notes: list[str] = []
    for name in sorted({*cut.rows.device, *(name for name, channels in power.items() if channels)}):
        channels = power.get(name, ())
        meter = device_power(list(channels), cut.window_ns, _resolved_s(channels)) if channels else None
        entry = _account(cut, name, meter, channels, multiplicity, columns)
        if carbon is not None and meter is not None:
            grams = [carbon_steps(c, carbon, pue) for c in channels]
            entry = _weighed(cut, entry, device_power(grams, cut.window_ns), multiplicity, columns)
        if estimator == "regression" and meter is not None:
            entry = _regressed(cut, meter, entry, columns, notes)
        devices.append(entry)
    return devices, notes


def _notes(
    cut: Session, devices: Sequence[DeviceEnergy], columns: _Columns, power: Mapping[str, Sequence[PowerSteps]]
) -> list[str]:
    """Notes on the parts that are not counted, and the reasons."""
    outside = [f"{cut.outside} events lie outside the window and are not counted"] if cut.outside else []
    return [
        *outside,
        *(f"{entry.device}: no meter, its time is listed without energy" for entry in devices if not entry.metered),
        *_blind_notes(cut, devices, columns),
        *(fault for channels in power.values() for channel in channels for fault in channel.faults),
    ]


def _blind_notes(cut: Session, devices: Sequence[DeviceEnergy], columns: _Columns) -> list[str]:
    """Notes on the time for which operations of metered devices ran without known power."""
    metered = {entry.device for entry in devices if entry.metered}
    blind_ns: dict[str, int] = {}
    for device, ns in zip(cut.rows.device, columns.uncovered_ns.tolist(), strict=True):
        if ns and device in metered:
            blind_ns[device] = blind_ns.get(device, 0) + ns
    return [
        f"{device}: operations ran {ns / NS_PER_S:.3g} s without known power; their joules and watts are at "
        "least what is given"
        for device, ns in sorted(blind_ns.items())
    ]


class _Columns:
    """The columns of a footprint while its devices are being filled in."""

    def __init__(self, cut: Session, lanes: Sequence[tuple[int, int]], steps: int) -> None:
        self.steps = steps
        count = len(cut.rows)
        self._processes, of_lane = np.unique(np.array([process for process, _ in lanes], np.int64), return_inverse=True)
        unknown = np.full(len(cut.row), -1, np.int64)
        self._process = np.where(cut.lane >= 0, of_lane[np.maximum(cut.lane, 0)], -1) if len(lanes) else unknown
        self._by_process = np.zeros((len(self._processes), count))
        self.energy_j, self.active_j, self.carbon_g, self.error_j = np.full((4, count), np.nan)
        self.runtime_ns, self.uncovered_ns = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.samples, self.active_ns = np.zeros(count, np.int64), np.zeros(count, np.int64)

    def book(self, pieces: IntArray, row: IntArray, energy_j: FloatArray) -> None:
        """Book the energy of some pieces on their processes."""
        process = self._process[pieces]
        known = process >= 0
        np.add.at(self._by_process, (process[known], row[known]), energy_j[known])

    def scale(self, rows: IntArray, factor: FloatArray) -> None:
        """Scale the energy of some rows in every process, for another estimate."""
        self._by_process[:, rows] *= factor

    def process_j(self) -> dict[int, float]:
        """Joules of the operations of each process; empty where lanes name none."""
        sums = zip(self._processes.tolist(), self._by_process.sum(axis=1).tolist(), strict=True)
        return {process: joules for process, joules in sums if process}


def _account(
    cut: Session,
    device: str,
    meter: DevicePower | None,
    channels: Sequence[PowerSteps],
    multiplicity: Multiplicity,
    columns: _Columns,
) -> DeviceEnergy:
    """Fill the rows of one device and return the energy of the whole device."""
    here, size = cut.on(device), len(cut.rows)
    rows = np.flatnonzero([name == device for name in cut.rows.device])
    row, start_ns, end_ns = cut.row[here], cut.start_ns[here], cut.end_ns[here]
    active_row, opener, closer = unions(row, start_ns, end_ns)
    columns.active_ns[rows] = _sums(active_row, end_ns[closer] - start_ns[opener], size)[rows]
    if meter is not None:
        places = meter.place(start_ns), meter.place(end_ns)
        drawn_j = meter.known_until_j(end_ns, places[1])[closer] - meter.known_until_j(start_ns, places[0])[opener]
        columns.active_j[rows] = np.bincount(active_row, drawn_j, size)[rows]
    row, start_ns, end_ns = _sharers(row, start_ns, end_ns, multiplicity)
    columns.runtime_ns[rows] = _sums(row, end_ns - start_ns, size)[rows]
    if meter is None:
        columns.uncovered_ns[rows] = columns.runtime_ns[rows]
        return _unmetered(device, cut.window_ns, start_ns, end_ns)
    if multiplicity == "set":
        places = meter.place(start_ns), meter.place(end_ns)
    seen = meter.updates_before(places[1]) - meter.updates_before(places[0])
    columns.samples[rows] = _sums(row, seen, size)[rows]
    shares = _divided(cut, here, (row, start_ns, end_ns), multiplicity, meter)
    columns.energy_j[rows] = np.bincount(row, shares.energy_j, size)[rows]
    if multiplicity == "events":
        columns.book(here, row, shares.energy_j)
    columns.uncovered_ns[rows] = _sums(row, shares.uncovered_ns, size)[rows]
    if columns.steps > 1:
        columns.error_j[rows] = _step_errors(cut, row, start_ns, shares.energy_j, columns.steps)[rows]
    return DeviceEnergy(
        device=device,
        total_j=meter.known_j,
        attributed_j=float(np.sum(shares.energy_j)),
        unattributed_j=shares.idle_j,
        covered_s=(cut.window_ns[1] - cut.window_ns[0] - meter.missing_ns) / NS_PER_S,
        uncovered_s=meter.missing_ns / NS_PER_S,
        active_s=shares.active_ns / NS_PER_S,
        resolution_s=meter.resolution_s,
        quality=weakest(channel.channel.quality for channel in channels),
    )


def _step_errors(cut: Session, row: IntArray, start_ns: IntArray, energy_j: FloatArray, steps: int) -> FloatArray:
    """Standard error of each row's energy from its variation over equal steps of the session, joules, float64[k].

    Any stretch as long as a step holds every operation of a step once, wherever it begins.
    """
    t0, t1 = cut.window_ns
    step = np.minimum((start_ns - t0) * steps // (t1 - t0), steps - 1)
    by_step = np.bincount(step * len(cut.rows) + row, energy_j, steps * len(cut.rows)).reshape(steps, len(cut.rows))
    return np.asarray(np.sqrt(steps) * np.std(by_step, axis=0, ddof=1), np.float64)


def _weighed(
    cut: Session, entry: DeviceEnergy, grams: DevicePower, multiplicity: Multiplicity, columns: _Columns
) -> DeviceEnergy:
    """Share the grams of one device as its joules are shared: by the same clock, with grams a second for watts."""
    here, size = cut.on(entry.device), len(cut.rows)
    rows = np.flatnonzero([name == entry.device for name in cut.rows.device])
    row, start_ns, end_ns = _sharers(cut.row[here], cut.start_ns[here], cut.end_ns[here], multiplicity)
    shares = _divided(cut, here, (row, start_ns, end_ns), multiplicity, grams)
    columns.carbon_g[rows] = np.bincount(row, shares.energy_j, size)[rows]
    return replace(entry, carbon_g=grams.known_j)


def _divided(
    cut: Session,
    here: IntArray,
    sharers: tuple[IntArray, IntArray, IntArray],
    multiplicity: Multiplicity,
    power: DevicePower,
) -> Shares:
    """Shares of what :func:`_sharers` gave for the pieces ``here`` of one device."""
    _, start_ns, end_ns = sharers
    weight = cut.weight_on(here)
    if multiplicity == "set" or weight is None:
        return fair_shares(start_ns, end_ns, power)
    return shares_by_weight(start_ns, end_ns, power, weight, cut.rest_on(here))


def _sharers(
    row: IntArray, start_ns: IntArray, end_ns: IntArray, multiplicity: Multiplicity
) -> tuple[IntArray, IntArray, IntArray]:
    """Holders of one share each: every piece, or every row however many of its pieces run; row, start, end by start."""
    if multiplicity == "events":
        return row, start_ns, end_ns
    merged, opener, closer = unions(row, start_ns, end_ns)
    by_start = np.argsort(start_ns[opener], kind="stable")
    return merged[by_start], start_ns[opener[by_start]], end_ns[closer[by_start]]


def _regressed(
    cut: Session, meter: DevicePower, entry: DeviceEnergy, columns: _Columns, notes: list[str]
) -> DeviceEnergy:
    """Replace the energies of one device by those of the regression, where its sensor allows it."""
    here = cut.on(entry.device)
    spent = np.bincount(cut.row[here], (cut.end_ns - cut.start_ns)[here], len(cut.rows)) / NS_PER_S
    reason = why_not(meter, spent[spent > 0])
    if reason is not None:
        notes.append(f"{entry.device}: accounted by recency, since regression would mislead: {reason}")
        return entry
    estimate = regress(cut, here, meter)
    rows = np.flatnonzero([name == entry.device for name in cut.rows.device])
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.where(columns.energy_j[rows] > 0, estimate.energy_j[rows] / columns.energy_j[rows], 1.0)
    columns.scale(rows, scale)
    unseen = np.zeros(len(cut.rows), np.bool_)
    unseen[rows] = columns.energy_j[rows] == 0
    at = here[unseen[cut.row[here]]]  # recency gave these nothing to scale: by time
    part = (cut.end_ns - cut.start_ns)[at] / NS_PER_S / spent[cut.row[at]]
    columns.book(at, cut.row[at], estimate.energy_j[cut.row[at]] * part)
    columns.carbon_g[rows] *= scale
    columns.error_j[rows] *= scale
    columns.energy_j[rows] = estimate.energy_j[rows]
    return replace(
        entry,
        attributed_j=float(np.sum(estimate.energy_j[rows])),
        unattributed_j=estimate.idle_j,
        estimator="regression",
    )


def _unmetered(device: str, window_ns: tuple[int, int], start_ns: IntArray, end_ns: IntArray) -> DeviceEnergy:
    _, opener, closer = unions(np.zeros(len(start_ns), np.int64), start_ns, end_ns)
    return DeviceEnergy(
        device=device,
        total_j=math.nan,
        attributed_j=math.nan,
        unattributed_j=math.nan,
        covered_s=0.0,
        uncovered_s=(window_ns[1] - window_ns[0]) / NS_PER_S,
        active_s=float(np.sum(end_ns[closer] - start_ns[opener])) / NS_PER_S,
        resolution_s=math.nan,
    )


def _resolved_s(channels: Sequence[PowerSteps]) -> float:
    """Coarsest resolution of the channels, seconds; 0 where none is known."""
    return max((max(item.channel.averaging_s, item.channel.update_s) for item in channels), default=0.0)


def _sums(row: IntArray, value: IntArray, size: int) -> IntArray:
    """Sum of nanoseconds by row; exact below 2**53 ns (104 days)."""
    return np.bincount(row, value, size).astype(np.int64)


def matched(trace: EventTrace, power: Sequence[PowerSteps]) -> tuple[EventTrace, dict[str, list[PowerSteps]]]:
    """Name the devices of a trace as its meters do.

    Names match regardless of case (``GPU:0``, ``gpu:0``, ``cuda:0``). Frameworks do not report which socket a host
    thread ran on: their device ``CPU`` is the one metered socket, all metered sockets together, or the metered machine.

    Returns:
        The trace with meters' names, and the channels of each device; devices without events keep theirs.
    """
    channels: dict[str, list[PowerSteps]] = {}
    for item in power:
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


def _host(device: str, channels: dict[str, list[PowerSteps]], by_name: dict[str, str], notes: list[str]) -> str | None:
    """Meter of a host; where the trace names no socket, all sockets are combined under ``device``."""
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
