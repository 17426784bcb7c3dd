"""The end of a served run: accounted, compared with its baseline, written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from joulery.accounting.steps import NS_PER_S
from joulery.domain.energy.power import BusyTimes
from joulery.domain.serving.engine import RequestRecord
from joulery.runtime.measuring.account import Basis, account
from joulery.runtime.measuring.terms import Span, Terms
from joulery.runtime.serving.boards import OnBoards, of_boards
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import Session
from joulery.runtime.serving.summary import RunCost, Served, compared, summarise_run, with_baseline
from joulery.store.run.directory import SAMPLES, RunWriter
from joulery.store.run.footprints import footprint_to_dict
from joulery.store.run.intensity import write_intensity
from joulery.store.run.readings import read_samples, save_readings
from joulery.store.run.timeline import write_ticks


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that has ended.

    Attributes:
        path: Its folder.
        report: The object of ``report.json``.
    """

    path: Path
    report: dict[str, Any]


def finish(
    session: Session, *, load_cpu_s: float = math.nan, language_models: Sequence[Mapping[str, Any]] = ()
) -> Finished:
    """Account for a session that was stopped, and write all there is to keep.

    Args:
        session: Stopped.
        load_cpu_s: CPU seconds of the load generators; NaN where there was none or it is not known.
        language_models: The figures of models that wrote text beside its services.

    Raises:
        CapabilityError: The disk refuses; what was logged as the run went stays readable.
    """
    writer = session.writer
    boards = [_on_boards(one) for one in session.hosted if one.setup.gpus]
    readings, remarks = of_boards(read_samples(writer.path / SAMPLES), boards, session.ran.records)
    unix_offset_ns = round(session.started_s * NS_PER_S) - session.start_ns
    span = Span(session.start_ns, session.end_ns, unix_offset_ns)
    terms = Terms(idle="whole", pue=session.site.pue)
    made = account(readings, span, terms, session.grid.source, (*remarks, *session.ran.warnings))
    basis, charged = made.basis, made.charged
    served = [_served(session, one, basis) for one in session.hosted]
    found = [compared(one) for one in served]
    devices = frozenset(device for one in boards for device in one.gpus)
    cost = RunCost(charged, tree_cpu_s(basis), load_cpu_s, devices)
    charges = [
        {"workload": one.name, "owner": one.owner, "footprint": footprint_to_dict(part)}
        for one, part in zip(served, cost.portions(served), strict=True)
    ]
    figures = summarise_run(served, cost, found)
    if session.grid.source is None:
        figures["carbon_reason"] = "the site file names no source of carbon intensity"
    control = {"plans": len(session.ran.decisions), "controller_cpu_s": session.controller_cpu_s}
    written = {"language_models": list(language_models)}
    report = known_numbers({**made.report, **figures, **control, **written, "charges": charges})
    write_ticks(writer, with_baseline(session.ran.ticks, served, found, cost))
    write_requests(writer, [record for record in session.ran.records if record.service in session.names])
    save_readings(readings, writer)
    if basis.carbon is not None:
        write_intensity(writer, basis.carbon)
    writer.write_report(report)
    shutil.rmtree(writer.path / SAMPLES, ignore_errors=True)
    writer.close()
    return Finished(writer.path, report)


def _on_boards(one: RunningService) -> OnBoards:
    return OnBoards(one.name, one.setup.gpus, math.nan if one.profile is None else one.profile.idle_w)


def _served(session: Session, one: RunningService, basis: Basis) -> Served:
    return Served(
        records=[record for record in session.ran.records if record.service == one.name],
        layouts=one.layouts,
        family=one.setup.family,
        slo=one.setup.slo,
        predictor=None if one.chosen is None else one.chosen.predictor,
        base=None if one.chosen is None else one.chosen.base,
        carbon=basis.carbon,
        pue=session.site.pue,
        name=one.name,
        owner=one.setup.owner,
    )


def tree_cpu_s(basis: Basis) -> float:
    """CPU seconds of the run's own processes within the run, as the kernel counts them."""
    sockets = [times for device, times in basis.busy.items() if device.startswith("cpu:")]
    return sum(_within(times, basis.t0_s, basis.t1_s) for times in sockets)


def _within(times: BusyTimes, t0_s: float, t1_s: float) -> float:
    """The run's busy seconds in a window, spread evenly within each interval."""
    low_s = np.maximum(times.edges_ns[:-1] / NS_PER_S, t0_s)
    high_s = np.minimum(times.edges_ns[1:] / NS_PER_S, t1_s)
    share = np.maximum(high_s - low_s, 0.0) / (np.diff(times.edges_ns) / NS_PER_S)
    return float(np.nansum(times.app_s * share))


def write_requests(writer: RunWriter, records: Sequence[RequestRecord]) -> None:
    """Keep every request as a series: ``requests``, a row a request that ended.

    Raises:
        CapabilityError: The disk refuses.
    """
    writer.write_series(
        "requests",
        {
            "service": [record.service for record in records],
            "arrival_s": [record.arrival_s for record in records],
            "start_s": [record.start_s for record in records],
            "end_s": [record.end_s for record in records],
            "variant": [record.variant for record in records],
            "outcome": [record.outcome.value for record in records],
            "service_s": [record.service_s for record in records],
            "cpu_s": [record.cpu_s for record in records],
            "attempts": [record.attempts for record in records],
        },
    )


def known_numbers(value: Any) -> Any:
    """The same object with null for every number that is not known, all the way down."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {key: known_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [known_numbers(item) for item in value]
    return value
