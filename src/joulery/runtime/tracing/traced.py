"""Account the recorded steps of a traced run by operation, besides the account of the whole run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from joulery.accounting.charge import DividedPower, divide_power
from joulery.accounting.operations.align import Estimator, align, canonical, matched
from joulery.accounting.operations.cpu_lanes import RunCpu, run_cpu
from joulery.accounting.operations.rows import added
from joulery.accounting.operations.run_power import at_run_times
from joulery.accounting.operations.session import is_accelerator
from joulery.accounting.steps import NS_PER_S, PowerSteps, carbon_steps, energy_by_bin
from joulery.domain.energy.power import BusyTimes
from joulery.domain.energy.tensor_footprint import DeviceEnergy, TensorFootprint
from joulery.domain.errors import DataError
from joulery.domain.ports import CarbonSource, Tracer
from joulery.domain.trace.events import EventTrace, joined, with_devices
from joulery.domain.trace.tracing import StepCounts, Steps, TracedSession
from joulery.runtime.measuring.account import Account, Basis, account_again
from joulery.store.files import disk_errors
from joulery.store.run.directory import Run, RunWriter
from joulery.store.run.intensity import read_intensity
from joulery.store.run.readings import RunReadings, load_readings
from joulery.store.run.tensors import has_footprint, keep_events, keep_footprint

TRACES = "trace"
"""Folder of a run in which the traced program writes."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """Records the operations of a run besides its power.

    Attributes:
        framework: ``torch``, ``jax`` or ``tensorflow``.
        tracer: Tracer of the framework.
        steps: Which steps to record.
        estimator: How energy is divided among the operations.
        calls: Whether to number repeated calls of one module.
    """

    framework: str
    tracer: Tracer
    steps: Steps = field(default_factory=Steps)
    estimator: Estimator = "recency"
    calls: bool = False

    def folder(self, writer: RunWriter) -> Path:
        """Folder into which a command writes its trace."""
        return writer.path / TRACES

    def environment(self, writer: RunWriter) -> dict[str, str]:
        """Environment in which a command traces its operations into the run."""
        return {**os.environ, **self.tracer.environment(str(trace_folder(writer, self)), self.steps, os.environ)}

    def keep(self, writer: RunWriter, made: Account, readings: RunReadings) -> Anatomy:
        """Account what was recorded and keep it in the run (:func:`keep_anatomy`)."""
        return keep_anatomy(writer, self, made.basis, readings.offset_ns)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Energy of the recorded steps of a run.

    Attributes:
        footprint: Joules by operation, all sessions together.
        trace: Events of the recorded steps.
        sessions: The recorded sessions.
    """

    footprint: TensorFootprint
    trace: EventTrace
    sessions: tuple[TracedSession, ...]


def trace_folder(writer: RunWriter, tracing: Tracing) -> Path:
    """Create the folder for the traced program's files and describe it in the run, in case the run is killed.

    Raises:
        CapabilityError: The folder cannot be created.
    """
    folder = writer.path / TRACES
    with disk_errors(folder):
        folder.mkdir()
    writer.describe(
        tracing={"framework": tracing.framework, "estimator": tracing.estimator, "calls": tracing.calls, "sessions": []}
    )
    return folder


def keep_anatomy(writer: RunWriter, tracing: Tracing, basis: Basis, offset_ns: int | None) -> Anatomy:
    """Account what a traced program recorded, keep it in the run, delete the raw recording.

    Args:
        writer: The run.
        tracing: Settings and tracer.
        basis: Inputs of the account of the whole run.
        offset_ns: Unix minus monotonic nanoseconds of the sampler; None when nothing was read.

    Raises:
        DataError: Nothing was recorded, or a recording is damaged.
        CapabilityError: The disk cannot be written.
    """
    tracer = tracing.tracer
    folder = writer.path / TRACES
    sessions, notes = tracer.recorded(str(folder), offset_ns, calls=tracing.calls)
    for note in notes:
        writer.log("warning", text=note)
    if not sessions:
        raise DataError(notes[-1])
    anatomy = dissect(sessions, basis, tracing.estimator, notes)
    keep_events(writer, anatomy.trace)
    keep_footprint(writer, anatomy.footprint)
    counts = tracer.step_counts(str(folder))
    writer.describe(tracing=_described(tracing, sessions, counts, basis.t1_s - basis.t0_s))
    tracer.leftovers(str(folder))
    return anatomy


def unfinished(run: Run) -> bool:
    """Whether a run was traced and its operations are not accounted: it was killed, still runs, or recorded nothing."""
    return "tracing" in run.manifest and not has_footprint(run) and (run.path / TRACES).is_dir()


@dataclass(frozen=True, slots=True)
class RunOpeners:
    """Functions that open the tracer and the carbon source named in the manifest of a recorded run.

    Attributes:
        tracer: Tracer of a framework.
        carbon: Source of carbon intensity that flags describe; None without flags.
    """

    tracer: Callable[[str], Tracer]
    carbon: Callable[[Mapping[str, str]], CarbonSource | None]


def dissect_again(run: Run, openers: RunOpeners, estimator: Estimator | None = None) -> Anatomy:
    """Account the operations of an unfinished run from the files of its program and sampler. Changes no file.

    Args:
        run: One that is :func:`unfinished`.
        openers: Opens its tracer and its source of carbon intensity.
        estimator: How energy is divided among the operations; the run's own when None.

    Raises:
        DataError: No cycle of steps was complete, the run was killed before the command started, or a file is damaged.
    """
    asked = run.manifest["tracing"]
    offset_ns = load_readings(run).offset_ns
    folder = str(run.path / TRACES)
    sessions, notes = openers.tracer(asked["framework"]).recorded(folder, offset_ns, calls=asked["calls"])
    if not sessions:
        raise DataError(notes[-1], file=str(run.path))
    source = openers.carbon(run.manifest["terms"]["carbon"]) if read_intensity(run) is None else None
    if not run.closed:
        notes.append("the measuring process was killed, or still runs: this is what had been recorded until then")
    return dissect(sessions, account_again(run, source).basis, estimator or asked["estimator"], notes)


def dissect(
    sessions: Sequence[TracedSession], basis: Basis, estimator: Estimator, notes: Sequence[str] = ()
) -> Anatomy:
    """Account sessions with the power of a run; of a shared device, only the run's share counts.

    Sessions of several processes that overlap in time are accounted together, over the union of their windows.
    """
    parts: list[TensorFootprint] = []
    traces: list[EventTrace] = []
    for group in _together(sessions):
        events = joined([_with_boards(session, basis.uuids) for session in group])
        window = min(s.window_ns[0] for s in group), max(s.window_ns[1] for s in group)
        steps = group[0].steps if len(group) == 1 else 0
        part, trace = _dissect(events, window, basis, estimator, steps)
        parts.append(part)
        traces.append(trace)
    whole = added(parts)
    processes = len({session.process for session in sessions})
    clock = [clock_note(sessions)]
    if processes > 1:
        clock.append(f"{processes} processes were traced; where several ran at once they share the devices' power")
    noted = list(dict.fromkeys((*notes, *whole.notes, *clock, *_share_notes(whole.devices))))
    return Anatomy(replace(whole, notes=tuple(noted)), joined(traces), tuple(sessions))


def _dissect(
    events: EventTrace, window: tuple[int, int], basis: Basis, estimator: Estimator, steps: int
) -> tuple[TensorFootprint, EventTrace]:
    fine, cpu = _fine_times(basis, window)
    busy = _with_kernels({**basis.busy, **fine}, events, window)
    shared = {
        item.channel: divide_power(item, busy[item.channel.device]) for item in basis.power if _shared(item, basis)
    }
    if cpu is not None:
        shared |= {
            channel: at_run_times(divided, fine[channel.device], cpu)
            for channel, divided in shared.items()
            if channel.device in fine
        }
    ours = [shared[item.channel].run if item.channel in shared else item for item in basis.power]
    trace, channels = matched(events, ours)
    footprint = align(
        trace,
        channels,
        window,
        estimator=estimator,
        carbon=basis.carbon,
        pue=basis.terms.pue,
        steps=steps,
        threads=basis.threads,
    )
    rest = {
        name: [shared[item.channel] for item in items if item.channel in shared] for name, items in channels.items()
    }
    devices = tuple(_whole_device(entry, rest.get(entry.device, []), window, basis) for entry in footprint.devices)
    return replace(footprint, devices=devices), trace


def _fine_times(basis: Basis, window: tuple[int, int]) -> tuple[Mapping[str, BusyTimes], RunCpu | None]:
    """Busy times of the only socket in a window by the threads of the run, and their CPU time.

    Returns:
        Busy times by device, and the CPU time; empty and None with several sockets, or without readings of threads.
    """
    sockets = [device for device in basis.fine_busy if device.startswith("cpu:")]
    if basis.threads is None or len(sockets) != 1:
        return {}, None
    times = basis.fine_busy[sockets[0]]
    first = max(0, int(np.searchsorted(times.edges_ns, window[0], "right")) - 1)
    last = min(len(times.app_s), int(np.searchsorted(times.edges_ns, window[1], "left")))
    edges = times.edges_ns[first : last + 1]
    cpu = run_cpu(basis.threads, (int(edges[0]), int(edges[-1]))) if len(edges) > 1 else None
    if cpu is None:
        return {}, None
    run_s = cpu.between(edges)
    fine = BusyTimes(edges, run_s, np.maximum(times.all_s[first:last], run_s), times.cpus)
    return {name: fine for name in (sockets[0], "machine") if name in basis.busy}, cpu


def _with_kernels(
    busy: Mapping[str, BusyTimes], events: EventTrace, window: tuple[int, int]
) -> Mapping[str, BusyTimes]:
    """Busy times by device, corrected with the trace: a board that ran kernels of the run was not idle.

    The driver is queried once a second for the processes on a board, so it can miss a program that records for a tenth
    of a second. Where only other processes were seen, the run's share is unknown.
    """
    ran = np.bincount(events.device[(events.start_ns < window[1]) & (events.end_ns > window[0])])
    boards = {canonical(events.devices[device]) for device in np.flatnonzero(ran).tolist()}
    return {**busy} | {
        name: _present(times, window)
        for name, times in busy.items()
        if is_accelerator(name) and canonical(name) in boards
    }


def _present(times: BusyTimes, window: tuple[int, int]) -> BusyTimes:
    """Busy times of a board on which the run computed during a window."""
    edges = times.edges_ns
    absent = (times.app_s == 0) & (edges[1:] > window[0]) & (edges[:-1] < window[1])
    alone = absent & (times.all_s == 0)
    length_s = np.diff(edges) / NS_PER_S
    run_s = np.where(alone, length_s, np.where(absent, np.nan, times.app_s))
    return BusyTimes(edges, run_s, np.where(alone, length_s, times.all_s), times.cpus)


def _shared(item: PowerSteps, basis: Basis) -> bool:
    return item.channel.device in basis.busy and item.channel.device not in basis.exclusive


def _energy_j(steps: PowerSteps, window: tuple[int, int]) -> float:
    return float(np.sum(energy_by_bin(steps, np.array(window, np.int64))[0]))


def _whole_device(
    entry: DeviceEnergy, parts: Sequence[DividedPower], window: tuple[int, int], basis: Basis
) -> DeviceEnergy:
    """Entry of the whole device: energy of others and idle energy are added to the unattributed energy."""
    if not entry.metered or not parts:
        return entry
    other_j = math.fsum(_energy_j(part.other, window) for part in parts)
    idle_j = math.fsum(_energy_j(part.idle, window) for part in parts)
    rest_g = 0.0
    if basis.carbon is not None:
        rest = [steps for part in parts for steps in (part.other, part.idle)]
        rest_g = math.fsum(_energy_j(carbon_steps(steps, basis.carbon, basis.terms.pue), window) for steps in rest)
    return replace(
        entry,
        total_j=entry.total_j + other_j + idle_j,
        unattributed_j=entry.unattributed_j + other_j + idle_j,
        other_j=other_j,
        idle_j=idle_j,
        carbon_g=entry.carbon_g + rest_g,
    )


def _together(sessions: Sequence[TracedSession]) -> list[list[TracedSession]]:
    """Group the sessions of different processes that overlap in time; each other session is a group of its own."""
    groups: list[list[TracedSession]] = []
    for session in sorted(sessions, key=lambda s: s.window_ns):
        last = groups[-1] if groups else []
        meets = last and session.window_ns[0] < max(s.window_ns[1] for s in last)
        if meets and session.process not in {s.process for s in last}:
            last.append(session)
        else:
            groups.append([session])
    return groups


def _with_boards(session: TracedSession, boards: Mapping[str, str]) -> EventTrace:
    """The events of a session with its GPUs renamed to the meters' names, matched by UUID.

    A program numbers only the GPUs that it may use. A GPU whose UUID no meter reports is named by its UUID, so that no
    other board is charged for it.
    """
    known = {_bare(uuid): device for uuid, device in boards.items()}
    if not known or not session.uuids:
        return session.trace
    trace = session.trace
    names = [
        known.get(_bare(session.uuids[device]), f"gpu:{session.uuids[device]}") if device in session.uuids else device
        for device in trace.devices
    ]
    return with_devices(trace, names)


def _bare(uuid: str) -> str:
    """A UUID in the form that NVML and PyTorch share: lower case, without the prefix."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _union(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows merged where they overlap, by start."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(windows):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def clock_note(sessions: Sequence[TracedSession]) -> str:
    """Remark on the offset between the clocks of trace and sampler."""
    known = [session.clock for session in sessions if session.clock.offset_ns is not None]
    if not known:
        return "the clock of the trace was not compared with that of the power readings"
    worst = max(known, key=lambda fit: abs(fit.offset_ns or 0))
    return (
        f"the trace's clock was {(worst.offset_ns or 0) / 1e3:+.1f} µs from the sampler's and was moved by that; "
        f"marks then agree to {max(fit.residual_ns for fit in known) / 1e3:.1f} µs "
        f"(each known to ± {max(fit.uncertainty_ns for fit in known) / 1e3:.1f} µs)"
    )


def _share_notes(devices: Sequence[DeviceEnergy]) -> list[str]:
    return [
        f"{entry.device}: of {entry.total_j:.3g} J, {entry.other_j:.3g} J are other processes' and "
        f"{entry.idle_j:.3g} J the idle device's; operations share the rest"
        for entry in devices
        if entry.metered and entry.other_j + entry.idle_j > 0
    ]


def _described(tracing: Tracing, sessions: Sequence[TracedSession], counts: StepCounts, run_s: float) -> dict[str, Any]:
    recorded_ns = sum(group[1] - group[0] for group in _union([session.window_ns for session in sessions]))
    return {
        "framework": tracing.framework,
        "estimator": tracing.estimator,
        "calls": tracing.calls,
        "steps": sum(session.steps for session in sessions),
        "step_counts": {
            **asdict(counts),
            "recorded": sum(session.steps for session in sessions),
            "share_of_run_ratio": recorded_ns / NS_PER_S / run_s if run_s > 0 else None,
        },
        "sessions": [
            {
                "process": session.process,
                "rank": session.rank,
                "kind": session.kind,
                "steps": session.steps,
                "samples": session.samples,
                "tokens": session.tokens,
                "start_s": session.window_ns[0] / NS_PER_S,
                "end_s": session.window_ns[1] / NS_PER_S,
                "clock_offset_ns": session.clock.offset_ns,
                "clock_residual_ns": session.clock.residual_ns,
                "clock_uncertainty_ns": session.clock.uncertainty_ns,
            }
            for session in sessions
        ],
    }
