"""A traced run: its steps accounted by operation, kept beside what the run cost as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from joulery.accounting.align import Estimator, align
from joulery.accounting.devices import Divided, divided, matched
from joulery.accounting.integrate import Metered, in_grams
from joulery.accounting.rows import added
from joulery.accounting.steps import NS_PER_S, PowerSteps, energy_by_bin
from joulery.app.wiring.tracers import open_tracer
from joulery.domain.energy.tensor_footprint import DeviceEnergy, TensorFootprint
from joulery.domain.errors import DataError
from joulery.domain.trace.events import EventTrace, joined
from joulery.domain.trace.tracing import Steps, TracedSession
from joulery.runtime.measuring.account import Basis, account_again
from joulery.runtime.measuring.readings import unfold
from joulery.runtime.measuring.terms import source_of
from joulery.store.files import disk_errors
from joulery.store.run.directory import Run, RunWriter
from joulery.store.run.intensity import read_intensity
from joulery.store.run.tensors import has_footprint, keep_events, keep_footprint

TRACES = "trace"
"""Folder of a run in which the traced program writes."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """How to trace a program.

    Attributes:
        framework: ``torch``, ``jax`` or ``tensorflow``.
        steps: Which steps to record.
        estimator: How the operations get their energy.
        calls: Number repeated calls of one module.
    """

    framework: str
    steps: Steps = field(default_factory=Steps)
    estimator: Estimator = "recency"
    calls: bool = False


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What a traced run's steps cost.

    Attributes:
        footprint: Joules by operation, all sessions together.
        trace: Their events.
        sessions: What was recorded.
    """

    footprint: TensorFootprint
    trace: EventTrace
    sessions: tuple[TracedSession, ...]


def trace_folder(writer: RunWriter, tracing: Tracing) -> Path:
    """The folder for the traced program's files, made new; the run says how they are to be read, should it be killed.

    Raises:
        CapabilityError: It cannot be made.
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
        tracing: How it was traced.
        basis: What the run as a whole was charged from.
        offset_ns: Unix minus monotonic nanoseconds of the sampler; None when nothing was read.

    Raises:
        DataError: Nothing was recorded, or a recording is damaged.
        CapabilityError: The disk refuses.
    """
    tracer = open_tracer(tracing.framework)
    folder = writer.path / TRACES
    sessions, notes = tracer.recorded(str(folder), offset_ns, calls=tracing.calls)
    for note in notes:
        writer.log("warning", text=note)
    if not sessions:
        raise DataError(notes[-1])
    anatomy = dissect(sessions, basis, tracing.estimator, notes)
    keep_events(writer, anatomy.trace)
    keep_footprint(writer, anatomy.footprint)
    writer.describe(tracing=_described(tracing, sessions))
    tracer.leftovers(str(folder))
    return anatomy


def unfinished(run: Run) -> bool:
    """Whether a run was traced and its operations not accounted: it was killed, it lasts, or nothing came of it."""
    return "tracing" in run.manifest and not has_footprint(run) and (run.path / TRACES).is_dir()


def dissect_again(run: Run, estimator: Estimator | None = None) -> Anatomy:
    """The operations of an unfinished run, from what its program and the sampler had written. Changes no file.

    Args:
        run: One that is :func:`unfinished`.
        estimator: How the operations get their energy; as the run was asked to, when None.

    Raises:
        DataError: No cycle of steps was complete, it was killed before the command started, or a file is damaged.
    """
    asked = run.manifest["tracing"]
    offset_ns = unfold(run).offset_ns
    folder = str(run.path / TRACES)
    sessions, notes = open_tracer(asked["framework"]).recorded(folder, offset_ns, calls=asked["calls"])
    if not sessions:
        raise DataError(notes[-1], file=str(run.path))
    source = source_of(run.manifest["terms"]["carbon"]) if read_intensity(run) is None else None
    if not run.closed:
        notes.append("the measuring process was killed, or still runs: this is what had been recorded until then")
    return dissect(sessions, account_again(run, source).basis, estimator or asked["estimator"], notes)


def dissect(
    sessions: Sequence[TracedSession], basis: Basis, estimator: Estimator, notes: Sequence[str] = ()
) -> Anatomy:
    """Account sessions with the power of a run: of each shared device the run's share of it alone.

    Sessions of several processes that overlap in time are accounted together, in the time all of them recorded.
    """
    parts: list[TensorFootprint] = []
    traces: list[EventTrace] = []
    for group in _together(sessions):
        events = joined([session.trace for session in group])
        window = max(s.window_ns[0] for s in group), min(s.window_ns[1] for s in group)
        part, trace = _dissect(events, window, basis, estimator)
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
    events: EventTrace, window: tuple[int, int], basis: Basis, estimator: Estimator
) -> tuple[TensorFootprint, EventTrace]:
    shared = {
        item.channel: divided(item, basis.busy[item.channel.device]) for item in basis.metered if _shared(item, basis)
    }
    ours = [Metered(m.channel, shared[m.channel].run) if m.channel in shared else m for m in basis.metered]
    trace, channels = matched(events, ours)
    footprint = align(trace, channels, window, estimator=estimator, carbon=basis.carbon, pue=basis.terms.pue)
    rest = {
        name: [shared[item.channel] for item in items if item.channel in shared] for name, items in channels.items()
    }
    devices = tuple(_whole_device(entry, rest.get(entry.device, []), window, basis) for entry in footprint.devices)
    return replace(footprint, devices=devices), trace


def _shared(item: Metered, basis: Basis) -> bool:
    return item.channel.device in basis.busy and item.channel.device not in basis.exclusive


def _energy_j(steps: PowerSteps, window: tuple[int, int]) -> float:
    return float(np.sum(energy_by_bin(steps, np.array(window, np.int64))[0]))


def _whole_device(entry: DeviceEnergy, parts: Sequence[Divided], window: tuple[int, int], basis: Basis) -> DeviceEnergy:
    """The entry of the whole device: what others and nobody used joins what no operation was given."""
    if not entry.metered or not parts:
        return entry
    other_j = math.fsum(_energy_j(part.other, window) for part in parts)
    idle_j = math.fsum(_energy_j(part.idle, window) for part in parts)
    rest_g = 0.0
    if basis.carbon is not None:
        rest = [steps for part in parts for steps in (part.other, part.idle)]
        rest_g = math.fsum(_energy_j(in_grams(steps, basis.carbon, basis.terms.pue), window) for steps in rest)
    return replace(
        entry,
        total_j=entry.total_j + other_j + idle_j,
        unattributed_j=entry.unattributed_j + other_j + idle_j,
        other_j=other_j,
        idle_j=idle_j,
        carbon_g=entry.carbon_g + rest_g,
    )


def _together(sessions: Sequence[TracedSession]) -> list[list[TracedSession]]:
    """Sessions of different processes that overlap in time, in groups; the others each alone."""
    groups: list[list[TracedSession]] = []
    for session in sorted(sessions, key=lambda s: s.window_ns):
        last = groups[-1] if groups else []
        meets = last and session.window_ns[0] < min(s.window_ns[1] for s in last)
        if meets and session.process not in {s.process for s in last}:
            last.append(session)
        else:
            groups.append([session])
    return groups


def clock_note(sessions: Sequence[TracedSession]) -> str:
    """How well the clocks of trace and sampler were tied together, in words."""
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


def _described(tracing: Tracing, sessions: Sequence[TracedSession]) -> dict[str, Any]:
    return {
        "framework": tracing.framework,
        "estimator": tracing.estimator,
        "calls": tracing.calls,
        "steps": sum(session.steps for session in sessions),
        "sessions": [
            {
                "process": session.process,
                "steps": session.steps,
                "start_s": session.window_ns[0] / NS_PER_S,
                "end_s": session.window_ns[1] / NS_PER_S,
                "clock_offset_ns": session.clock.offset_ns,
                "clock_residual_ns": session.clock.residual_ns,
                "clock_uncertainty_ns": session.clock.uncertainty_ns,
            }
            for session in sessions
        ],
    }
