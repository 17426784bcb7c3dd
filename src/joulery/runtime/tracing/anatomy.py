"""Compute joules by operation from a recorded trace and recorded power."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from joulery.accounting.operations.align import Estimator, Multiplicity, align, matched
from joulery.accounting.steps import NS_PER_S, PowerSteps, power_steps
from joulery.domain.energy.channel import Channel
from joulery.domain.energy.footprint import Footprint, Part, merge_parts
from joulery.domain.energy.power import PowerTrace
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.ports import CarbonSource
from joulery.domain.quality import weakest
from joulery.domain.trace.events import EventTrace
from joulery.runtime.measuring.account import intensity
from joulery.runtime.tracing.traced import RunOpeners, dissect_again, unfinished
from joulery.store.run.directory import create_run, open_run
from joulery.store.run.footprints import footprint_to_dict
from joulery.store.run.readings import RunReadings, load_readings, save_readings
from joulery.store.run.tensors import keep_events, keep_footprint, kept_events, kept_footprint


@dataclass(frozen=True, slots=True)
class AccountSettings:
    """Settings of the account of a recorded trace.

    Attributes:
        window_ns: The session on the clock of the files; the span of events and power together when None.
        estimator, multiplicity: As for :func:`joulery.accounting.operations.align.align`.
        form: Format of the event file; recognised when None.
        hlo: Files with compiled programs, for JAX.
        period_s: Sampling period of the power; derived from the stamps when None.
        offset_ns: Added to the stamps of the power, where its clock differs from that of the events.
        carbon: Source of carbon intensity; None when no grams are requested.
    """

    window_ns: tuple[int, int] | None = None
    estimator: Estimator = "recency"
    multiplicity: Multiplicity = "events"
    form: str | None = None
    hlo: tuple[Path, ...] = ()
    period_s: float | None = None
    offset_ns: int = 0
    carbon: CarbonSource | None = None


@dataclass(frozen=True, slots=True)
class Accounted:
    """A footprint and its sources.

    Attributes:
        footprint: Joules by operation.
        trace: The events, with the meters' device names.
        power: The readings.
    """

    footprint: TensorFootprint
    trace: EventTrace
    power: tuple[PowerTrace, ...] = field(default=())


def account_traced(path: Path, openers: RunOpeners, estimator: Estimator | None = None) -> Accounted:
    """Account a traced run; where the measuring process was killed, from the files that it left.

    Args:
        path: The run directory; no file in it is changed.
        openers: Opens tracer and carbon source of a run that was killed.
        estimator: How energy is divided among the operations; the run's own when None. A run that ended keeps the
            result of its own estimator.

    Raises:
        DataError: There is no run, it was not traced, or it was killed before a cycle of steps was complete.
        ConfigError: Another estimator is requested for a run that has ended.
    """
    run = open_run(path)
    power = load_readings(run).traces
    if unfinished(run):
        made = dissect_again(run, openers, estimator)
        return Accounted(made.footprint, made.trace, power)
    footprint = kept_footprint(run)
    if estimator is not None and estimator != footprint.estimator:
        raise ConfigError(
            "the run has ended and keeps its answer", pointer="--estimator", got=estimator, expected=footprint.estimator
        )
    return Accounted(footprint, kept_events(run), power)


def account_trace(events: EventTrace, traces: Sequence[PowerTrace], settings: AccountSettings) -> Accounted:
    """Account a trace with the readings of its devices.

    Raises:
        DataError: Events and power do not overlap in time, or the window is empty.
    """
    power = [power_steps(trace, hole_periods=math.inf) for trace in traces]
    trace, channels = matched(events, power)
    window_ns = settings.window_ns or _span(trace, traces, power)
    series, reason = None, None
    if settings.carbon is not None:
        series, reason = intensity(settings.carbon, window_ns[0] / NS_PER_S, window_ns[1] / NS_PER_S, None)
    footprint = align(
        trace, channels, window_ns, multiplicity=settings.multiplicity, estimator=settings.estimator, carbon=series
    )
    if reason is not None:
        footprint = replace(footprint, notes=(*footprint.notes, f"grams are not known: {reason}"))
    return Accounted(footprint, trace, tuple(traces))


def keep(accounted: Accounted, out: Path, sources: Mapping[str, str]) -> Path:
    """Save an accounted trace as a run of kind ``account``.

    Args:
        accounted: The footprint and its sources.
        out: The run directory, which must not hold a run.
        sources: The files it was made from, for the manifest.

    Raises:
        ConfigError: The folder holds a run already.
        CapabilityError: The run cannot be written.
    """
    with create_run(out, kind="account", details={"sources": dict(sources)}) as writer:
        save_readings(RunReadings(accounted.power), writer)
        keep_events(writer, accounted.trace)
        keep_footprint(writer, accounted.footprint)
        writer.write_report(footprint_to_dict(summary(accounted.footprint, accounted.power)))
    return out


def summary(footprint: TensorFootprint, power: Sequence[PowerTrace]) -> Footprint:
    """A footprint with one part for each metered device, for reports without operations."""
    meters = {trace.channel.device: trace.channel for trace in power}
    known = [entry for entry in footprint.devices if entry.metered]
    parts = [
        Part(entry.device, "operations", entry.attributed_j, entry.quality, _meter(entry.device, meters))
        for entry in known
    ]
    t0_s, t1_s = (at_ns / NS_PER_S for at_ns in footprint.window_ns)
    unattributed_j = math.fsum(entry.unattributed_j for entry in known)
    return Footprint(
        parts=merge_parts(tuple(parts)),
        unattributed_j=unattributed_j,
        facility_j=math.fsum(entry.total_j for entry in known),
        start_s=t0_s,
        end_s=t1_s,
        duration_s=t1_s - t0_s,
        covered_s=math.fsum(entry.covered_s for entry in known) / len(known) if known else 0.0,
        idle_quality=weakest(entry.quality for entry in known),
    )


def _meter(device: str, meters: Mapping[str, Channel]) -> str:
    return meters[device].meter if device in meters else "several"


def _span(trace: EventTrace, traces: Sequence[PowerTrace], power: Sequence[PowerSteps]) -> tuple[int, int]:
    """Common span of events and power.

    Raises:
        DataError: There are neither events nor readings, or they do not overlap in time: their clocks differ.
    """
    events = trace.extent_ns
    stamps = [one.t_ns for one in traces if len(one)]
    readings = (min(int(t[0]) for t in stamps), max(int(t[-1]) for t in stamps)) if stamps else None
    if events is None and readings is None:
        raise DataError("neither an event nor a reading of power: there is nothing to account")
    if events is None or readings is None:
        return _at_least_1_ns(events or readings or (0, 1))
    last = max((int(item.edges_ns[-1]) for item in power if len(item)), default=readings[1])
    if events[1] < readings[0] or events[0] > max(last, readings[1]):
        raise DataError(
            f"events ({events[0]} to {events[1]} ns) and power ({readings[0]} to {readings[1]} ns) have no moment in "
            "common",
            hint="their clocks differ: shift the power with --offset, or name the session with --window START END",
        )
    return _at_least_1_ns((min(events[0], readings[0]), max(events[1], readings[1])))


def _at_least_1_ns(span: tuple[int, int]) -> tuple[int, int]:
    return span[0], max(span[1], span[0] + 1)
