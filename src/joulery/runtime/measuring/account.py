"""Account a measured run, at its end or again later: compute its footprint and report from its readings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from joulery.accounting.charge import Charged, IdleRule, charge
from joulery.accounting.steps import NS_PER_S, PowerSteps, power_steps
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.energy.power import BusyTimes
from joulery.domain.errors import DataError, JouleryError
from joulery.domain.quality import Quality
from joulery.runtime.measuring.terms import Span, Terms
from joulery.store.fields import instant, number, text, whole
from joulery.store.run.footprints import footprint_to_dict
from joulery.store.run.readings import RunReadings, load_readings

if TYPE_CHECKING:
    from joulery.domain.ports import CarbonSource
    from joulery.domain.serving.timeline import Tick
    from joulery.domain.trace.threads import ThreadTimes
    from joulery.store.run.directory import Run

SCHEMA = "joulery.report/1"
SHARE_WINDOW_S = 1.0
"""Length of the intervals in which busy time is divided: kernel ticks of 10 ms are 1 % of it."""
FINE_WINDOW_S = 0.25
"""The same where the run's own CPU time is known to the nanosecond, thread by thread."""
TIMELINE_WINDOWS = 240
"""Most points of a timeline: a screen shows no more."""
NO_SOURCE = "no source of carbon intensity was named (--zone or --carbon)"


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """The inputs that a run is charged from.

    Attributes:
        power: Power of every channel, as steps.
        busy: Busy times by device.
        t0_s, t1_s: Start and end of the run, Unix seconds.
        exclusive: Devices the run had to itself.
        carbon: The intensity; None when it is not known.
        terms: Terms of the charge.
        uuids: Device name by UUID.
        threads: CPU times of the run's threads while a traced program recorded; None where none were read.
        fine_busy: Busy times in shorter intervals, for the recorded stretches of a traced program.
    """

    power: tuple[PowerSteps, ...]
    busy: Mapping[str, BusyTimes]
    t0_s: float
    t1_s: float
    exclusive: frozenset[str]
    carbon: CarbonSeries | None
    terms: Terms
    uuids: Mapping[str, str] = field(default_factory=dict)
    threads: ThreadTimes | None = None
    fine_busy: Mapping[str, BusyTimes] = field(default_factory=dict)

    def charged(self) -> Charged:
        """The run's charge."""
        return charge(
            self.power,
            self.busy,
            self.t0_s,
            self.t1_s,
            idle=IdleRule(self.terms.idle),
            exclusive=self.exclusive,
            carbon=self.carbon,
            pue=self.terms.pue,
            embodied_g=self.terms.embodied_g(self.t1_s - self.t0_s),
        )

    def power_timeline(self) -> tuple[Tick, ...]:
        """The charge over time, in windows of at least four readings, at most :data:`TIMELINE_WINDOWS`."""
        from joulery.accounting.power_timeline import power_timeline  # a block asks for none

        readings = max((len(item) for item in self.power), default=0)
        windows = min(TIMELINE_WINDOWS, max(1, readings // 4))
        return power_timeline(
            self.power,
            self.busy,
            self.t0_s,
            self.t1_s,
            windows=windows,
            idle=IdleRule(self.terms.idle),
            exclusive=self.exclusive,
            carbon=self.carbon,
            pue=self.terms.pue,
        )


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a run.

    Attributes:
        charged: Its footprint, and what others used meanwhile.
        report: The object of ``report.json``.
        basis: What it was charged from.
    """

    charged: Charged
    report: dict[str, Any]
    basis: Basis


def account(
    readings: RunReadings, span: Span, terms: Terms, source: CarbonSource | None, notes: tuple[str, ...] = ()
) -> Account:
    """Compute the charge of a run from its readings.

    Args:
        readings: What the meters read.
        span: Start and end of the run.
        terms: Terms of the charge.
        source: Source of carbon intensity; None for no grams.
        notes: Further remarks for the report.
    """
    t0_s, t1_s = _window(readings, span)
    series, reason = intensity(source, t0_s, t1_s, terms.carbon_at_s)
    return _account(readings, span, terms, series, reason, notes)


def _window(readings: RunReadings, span: Span) -> tuple[float, float]:
    """Start and end of a run, Unix seconds."""
    offset_ns = readings.offset_ns if readings.offset_ns is not None else span.unix_offset_ns
    return (span.start_ns + offset_ns) / NS_PER_S, (span.end_ns + offset_ns) / NS_PER_S


def _account(
    readings: RunReadings,
    span: Span,
    terms: Terms,
    series: CarbonSeries | None,
    reason: str | None,
    notes: tuple[str, ...],
) -> Account:
    t0_s, t1_s = _window(readings, span)
    power = tuple(power_steps(trace) for trace in readings.traces)
    busy = {device: _coarser(times, SHARE_WINDOW_S) for device, times in _completed(readings.busy, span.cpu_s).items()}
    sockets = [times for device, times in busy.items() if device.startswith("cpu:")]
    if sockets:
        busy["machine"] = busy_together(sockets)
    devices = {item.channel.device for item in power}
    exclusive = frozenset(device for device in devices if device.startswith("gpu:") and device not in busy)
    fine = {device: _coarser(times, FINE_WINDOW_S) for device, times in readings.busy.items()}
    basis = Basis(power, busy, t0_s, t1_s, exclusive, series, terms, readings.uuids, readings.threads, fine)
    charged = basis.charged()
    faults = tuple(fault for item in power for fault in item.faults)
    if charged.run.signal is not None and charged.run.carbon_coverage_ratio < 1:
        reason = (
            f"the intensity is known for {charged.run.carbon_coverage_ratio:.1%} of the energy; the grams are of that"
        )
    known = charged.run.covered_s > 0
    report = {
        **footprint_to_dict(charged.run),
        "schema": SCHEMA,
        "other_j": charged.other_j if known else None,
        "other_idle_j": charged.rest.idle_j if known else None,
        "idle_rule": terms.idle,
        "carbon_reason": reason,
        "carbon_source": series.source if series is not None else None,
        "cpu_s": span.cpu_s or None,
        "exit_code": span.exit_code,
        "notes": [*readings.notes, *faults, *notes],
        "sampler": dict(readings.sampler) or None,
    }
    return Account(charged, report, basis)


def intensity(
    source: CarbonSource | None, t0_s: float, t1_s: float, at_s: float | None
) -> tuple[CarbonSeries | None, str | None]:
    """The carbon intensity during a run; where it is not known, None and the reason.

    Args:
        source: Source of carbon intensity.
        t0_s, t1_s: Start and end of the run, Unix seconds.
        at_s: When the run is taken to have started instead; the series is moved to ``t0_s`` and labelled assumed.
    """
    if source is None:
        return None, NO_SOURCE
    begin_s = t0_s if at_s is None else at_s
    try:
        series = source.history(begin_s, begin_s + (t1_s - t0_s))
    except JouleryError as error:
        return None, f"{error}; {error.hint}" if error.hint else str(error)
    if at_s is None:
        return series, None
    return moved(series, t0_s - at_s), None


def moved(series: CarbonSeries, by_s: float) -> CarbonSeries:
    """A series shifted later by ``by_s`` seconds; its quality becomes assumed."""
    return CarbonSeries(
        series.zone,
        series.edges_s + by_s,
        series.g_per_kwh,
        signal=series.signal,
        scope=series.scope,
        source=f"{series.source}, of another time",
        estimated=series.estimated,
        quality=Quality.ASSUMED,
    )


def account_again(run: Run, source: CarbonSource | None, *, regardless: bool = False) -> Account:
    """Account a run again from its files, also after its measuring process was killed.

    Args:
        run: A run of kind ``measure``.
        source: Source of carbon intensity, where the run does not keep it; None for no grams.
        regardless: Use the source although the run keeps an intensity: the same joules on another grid.

    Raises:
        DataError: The run is of another kind, it was killed before the command started, or its files are damaged.
    """
    from joulery.store.run.intensity import read_intensity

    if run.manifest["kind"] != "measure":
        raise DataError(f"{run.path} is a run of kind {run.manifest['kind']}, not measure")
    readings = load_readings(run)
    started, ended = next(run.log("started"), None), next(run.log("ended"), None)
    if started is None:
        raise DataError(f"{run.path} ended before the command started", hint="there is nothing to report")
    start_ns = whole(started["monotonic_ns"])
    offset_ns = round(instant(started["t_s"]) * NS_PER_S) - start_ns
    notes = tuple(text(entry["text"]) for entry in run.log("warning"))
    if ended is not None:
        span = Span(start_ns, whole(ended["monotonic_ns"]), offset_ns, number(ended["cpu_s"]), ended["exit_code"])
    else:
        end_ns = start_ns if readings.end_ns is None else readings.end_ns - (readings.offset_ns or offset_ns)
        span = Span(start_ns, max(end_ns, start_ns), offset_ns)
        notes += ("the measuring process was killed: this is the part of the run until then",)
    terms, kept = Terms.from_dict(run.manifest["terms"]), read_intensity(run)
    if kept is not None and not regardless:
        return _account(readings, span, terms, kept, None, notes)
    return account(readings, span, terms, source, notes)


def _coarser(times: BusyTimes, window_s: float) -> BusyTimes:
    """Busy times in intervals of about ``window_s``: much shorter ones are dominated by ticks of 10 ms."""
    edges, window_ns = times.edges_ns, round(window_s * NS_PER_S)
    starts = np.flatnonzero(np.diff((edges[:-1] - edges[0]) // window_ns, prepend=-1) > 0)
    starts = starts[(starts == 0) | (edges[starts] <= edges[-1] - window_ns)]
    return BusyTimes(
        np.append(edges[starts], edges[-1]),
        np.add.reduceat(times.app_s, starts),
        np.add.reduceat(times.all_s, starts),
        times.cpus,
    )


def _completed(busy: Mapping[str, BusyTimes], cpu_s: float) -> dict[str, BusyTimes]:
    """Busy times scaled so that their sum is at least the CPU time the system reports: ticks of 10 ms round down."""
    sockets = [device for device in busy if device.startswith("cpu:")]
    seen_s = math.fsum(float(np.sum(busy[device].app_s)) for device in sockets)
    if not sockets or seen_s >= cpu_s:
        return dict(busy)
    weights = [
        busy[device].app_s if seen_s > 0 else np.diff(busy[device].edges_ns).astype(np.float64) for device in sockets
    ]
    factor = cpu_s / math.fsum(float(np.sum(weight)) for weight in weights)
    return dict(busy) | {
        device: BusyTimes(busy[device].edges_ns, weight * factor, busy[device].all_s, busy[device].cpus)
        for device, weight in zip(sockets, weights, strict=True)
    }


def busy_together(sockets: list[BusyTimes]) -> BusyTimes:
    """Busy times of the whole machine: the sum of those of its sockets, read at the same moments."""
    return BusyTimes(
        sockets[0].edges_ns,
        np.sum([times.app_s for times in sockets], axis=0),
        np.sum([np.maximum(times.app_s, times.all_s) for times in sockets], axis=0),
        sum(times.cpus for times in sockets),
    )
