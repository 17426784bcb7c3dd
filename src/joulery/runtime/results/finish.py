"""Finish a served run: account it, compare it with its baseline and write its report.

A GPU's driver may name no process, in a container for instance, though requests ran there. The requests themselves show
when the GPU was busy: each has a start, a duration and the share of a GPU it had.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from joulery.accounting.charge import cpu_shares
from joulery.accounting.load_line import work_by_bin
from joulery.accounting.steps import NS_PER_S
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.footprint import Footprint
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.json_numbers import known_numbers
from joulery.runtime.load import LoadResult
from joulery.runtime.measuring.account import Basis, account, busy_together
from joulery.runtime.measuring.terms import Span, Terms
from joulery.runtime.results.measured_baseline import PeriodEnergy, period_energy
from joulery.runtime.results.pricing import prices_of
from joulery.runtime.results.summary import RunCost, ServedService, compared, summarise_run, with_baseline
from joulery.runtime.serving.live_intensity import LiveIntensity
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import ServingSession
from joulery.runtime.session.requests import RequestColumns, series_columns
from joulery.store.run.directory import SAMPLES, RunWriter, open_run
from joulery.store.run.footprints import footprint_to_dict
from joulery.store.run.intensity import write_intensity
from joulery.store.run.readings import RunReadings, read_samples, save_readings
from joulery.store.run.series import write_blocks
from joulery.store.run.timeline import read_ticks, write_ticks


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
    session: ServingSession,
    *,
    loads: Mapping[str, LoadResult] | None = None,
    labels: Callable[[str], Mapping[str, tuple[int, int]]] = lambda _: {},
    load_cpu_s: float = math.nan,
    more: Mapping[str, Any] = {},
) -> Finished:
    """Account for a session that was stopped, and write its report and series.

    Args:
        session: The stopped session.
        loads: What the client of each service measured, by service; None for no load.
        labels: Of a service, by variant, how many labelled answers were right, and how many were labelled.
        load_cpu_s: CPU seconds of the load generators; NaN where there was none or it is not known.
        more: Further fields of the report.

    Raises:
        CapabilityError: The disk refuses; what was logged during the run stays readable.
    """
    writer, history, services = session.writer, session.history, session.services.values()
    requests, ticks = history.requests.columns(), read_ticks(open_run(writer.path))
    boards = [_gpu_service(one) for one in services if one.setup.gpus]
    readings, remarks = with_requests(read_samples(writer.path / SAMPLES), boards, requests)
    unix_offset_ns = round(session.started_s * NS_PER_S) - session.start_ns
    span = Span(session.start_ns, session.end_ns, unix_offset_ns)
    terms = Terms(idle="whole", pue=session.site.pue)
    grid = None if session.grid.source is None else session.grid
    made = account(readings, span, terms, grid, (*remarks, *history.warnings))
    served = [replace(_served(session, one, requests, made.basis), labels=labels(one.name)) for one in services]
    energy = _period_energy(served, readings, made.basis)
    found = [compared(one) for one in served]
    devices = frozenset(device for one in boards for device in one.gpus)
    cost = RunCost(made.charged, tree_cpu_s(made.basis), load_cpu_s, devices)
    models = session.models.usage.figures() if session.models else []
    figures = {
        **summarise_run(served, cost, found, energy),
        "plans": history.plan_count,
        "controller_cpu_s": session.controller_cpu_s,
        "language_models": models,
        "language_families": [family.summary() for family in session.families],
        "power_limits": [limit.summary() for limit in session.limits],
        "charges": [
            {"workload": one.name, "owner": one.owner, "footprint": footprint_to_dict(part)}
            for one, part in zip(served, cost.portions(served), strict=True)
        ],
    }
    figures |= _carbon_times(grid, made.basis) | ({} if served else models_alone(models, figures, made.charged.run))
    report = known_numbers(with_clients({**made.report, **figures, **more}, loads or {}))
    write_ticks(writer, with_baseline(ticks, served, found, cost))
    write_requests(writer, requests)
    save_readings(readings, writer)
    if made.basis.carbon is not None:
        write_intensity(writer, made.basis.carbon)
    writer.write_report(report)
    shutil.rmtree(writer.path / SAMPLES, ignore_errors=True)
    history.requests.remove()
    writer.close()
    return Finished(writer.path, report)


def _carbon_times(grid: LiveIntensity | None, basis: Basis) -> dict[str, Any]:
    """Seconds of the run with no known intensity, and with a last value held; the age of the newest at the end."""
    if grid is None:
        return {"carbon_reason": "the site file names no source of carbon intensity"}
    length_s = basis.t1_s - basis.t0_s
    covered_s = 0.0 if basis.carbon is None else basis.carbon.covered_s(basis.t0_s, basis.t1_s)
    age_s = grid.feed(basis.t1_s).age_s
    return {"carbon_unknown_s": length_s - covered_s, "carbon_held_s": grid.held_s, "carbon_age_s": age_s}


def models_alone(models: Sequence[Mapping[str, Any]], figures: Mapping[str, Any], run: Footprint) -> dict[str, Any]:
    """The figures of a run that served language models only: counts, joules of requests, and the charge of each model.

    The run's joules are divided among the models by those of their requests; equally where none are known.

    Args:
        models: Figures of each model.
        figures: Of the run: ``serving_j`` is all that is charged beside the load generator.
        run: Charge of the run.
    """
    known_j = [0.0 if math.isnan(one["energy_j"]) else one["energy_j"] for one in models]
    # The models' joules were read by meters of their own, at other moments than the run's.
    requests_j = min(math.fsum(known_j), figures["serving_j"])
    answered = sum(one["answered"] for one in models)
    within = math.fsum(one["attainment_ratio"] * one["answered"] for one in models if one["answered"])
    return {
        **{name: sum(one[name] for one in models) for name in ("requests", "answered", "failed", "late")},
        "slo_met": all(one["slo_met"] for one in models),
        "attainment_ratio": within / answered if answered else math.nan,
        "requests_j": requests_j,
        "serving_j": figures["serving_j"] - requests_j,
        "charges": [
            {"workload": one["model"], "owner": one["owner"], "footprint": footprint_to_dict(run.portion(ratio))}
            for one, ratio in zip(models, cpu_shares(known_j), strict=True)
        ],
    }


def with_clients(report: Mapping[str, Any], loads: Mapping[str, LoadResult]) -> dict[str, Any]:
    """Add the clients' measurements to a report, for each service and together.

    Args:
        report: With its ``services``.
        loads: By service.
    """
    services = [{**entry, **client_figures(loads.get(entry["service"]))} for entry in report["services"]]
    together = LoadResult.together([loads[entry["service"]] for entry in services if entry["service"] in loads])
    return {**report, **client_figures(together), "services": services}


def client_figures(result: LoadResult | None) -> dict[str, Any]:
    """Figures of a client: ``planned`` is ``sent`` and ``unsent``; zeros where no load was sent."""
    result = result or LoadResult()
    return {"client": result.as_dict(), "planned": result.planned, "sent": result.sent, "unsent": result.unsent}


def _gpu_service(one: RunningService) -> GpuService:
    return GpuService(one.name, one.setup.gpus, math.nan if one.profile is None else one.profile.idle_w)


def _served(session: ServingSession, one: RunningService, requests: RequestColumns, basis: Basis) -> ServedService:
    prices = prices_of(one.setup.models, one.profile)
    return ServedService(
        requests=prices.columns(requests),
        layouts=one.layouts,
        family=one.setup.family,
        slo=one.setup.slo,
        predictor=None if one.chosen is None else prices.predictor(one.chosen.predictor),
        base=None if one.chosen is None else one.chosen.base,
        carbon=basis.carbon,
        pue=session.site.pue,
        name=one.name,
        owner=one.setup.owner,
        periods=tuple((each.from_s, each.until_s) for each in one.periods),
        audit=one.audit,
        tally=one.tally,
        floor_ratio=one.floor_ratio,
        prices=prices,
        shadow={} if one.shadow is None else {one.shadow.variant: np.array(one.shadow.ratios)},
    )


def _period_energy(served: Sequence[ServedService], readings: RunReadings, basis: Basis) -> PeriodEnergy | None:
    """Metered energy of the baseline's periods; None where it was not measured, or other services ran too."""
    if len(served) != 1 or served[0].measured is None or served[0].prices:
        return None
    busy = dict(readings.busy)
    if sockets := [times for device, times in busy.items() if device.startswith("cpu:")]:
        busy["machine"] = busy_together(sockets)
    return period_energy(basis, busy, served[0].periods)


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


def write_requests(writer: RunWriter, requests: RequestColumns, name: str = "requests.parquet") -> None:
    """Write a series of requests in blocks: one row for each request that ended.

    Raises:
        CapabilityError: The disk refuses.
    """
    blocks = (series_columns(block, requests) for block in requests.blocks())
    write_blocks(writer.path / name, blocks, series_columns(requests.rows[:0], requests))


@dataclass(frozen=True, slots=True)
class GpuService:
    """A service on GPUs.

    Attributes:
        service: Its name.
        gpus: Their device names (``gpu:0``), at least one.
        idle_w: Their idle power together, by its profile; NaN where there is none.
    """

    service: str
    gpus: tuple[str, ...]
    idle_w: float = math.nan


def with_requests(
    readings: RunReadings, services: Sequence[GpuService], requests: RequestColumns
) -> tuple[RunReadings, tuple[str, ...]]:
    """Complete readings with the services' data on their GPUs.

    A GPU's idle power is that of the profile its requests are charged by (the lowest, where services share it). A GPU
    on which the driver names no busy process was busy while requests ran there.

    Args:
        readings: What was read.
        services: Those that run on GPUs.
        requests: Requests, of any service.

    Returns:
        The readings, and warnings for the report.
    """
    idle_w = _idle_w(services)
    busy, notes = dict(readings.busy), []
    for device in idle_w:
        times = busy.get(device)
        if times is None or np.nansum(times.all_s) > 0:
            continue
        app_s = _requests_s(device, services, requests, times)
        busy[device] = BusyTimes(times.edges_ns, app_s, app_s)
        notes.append(f"{device}: the driver names no busy process; its busy time is taken from the requests")
    return replace(readings, traces=tuple(_idling(trace, idle_w) for trace in readings.traces), busy=busy), tuple(notes)


def _idle_w(services: Sequence[GpuService]) -> dict[str, float]:
    """Idle power of each GPU; NaN where it is unknown."""
    known = [(device, one.idle_w / len(one.gpus)) for one in services for device in one.gpus]
    lowest = {device: math.nan for device, _ in known}
    for device, watts in known:
        if not watts >= lowest[device]:
            lowest[device] = watts if math.isfinite(watts) else lowest[device]
    return lowest


def _idling(trace: PowerTrace, idle_w: Mapping[str, float]) -> PowerTrace:
    """The same readings with the idle power of their device, unless the meter reports its own."""
    known_w = idle_w.get(trace.channel.device, math.nan)
    if not known_w > 0 or trace.channel.idle_w > 0:
        return trace
    return PowerTrace(trace.channel._replace(idle_w=known_w), trace.t_ns, trace.values, trace.period_s)


def _requests_s(device: str, services: Sequence[GpuService], requests: RequestColumns, times: BusyTimes) -> FloatArray:
    """Seconds that requests kept a GPU busy, in the intervals of the driver's answers.

    A run does not record which of a service's GPUs answered a request: each counts an equal part of it. A request with
    an unknown share of a GPU counts as if it had the whole GPU.
    """
    busy_s = np.zeros(len(times.edges_ns) - 1)
    for one in services:
        if device not in one.gpus:
            continue
        for block in requests.blocks(one.service):
            gpu_s = np.where(np.isnan(block["cpu_s"]), block["service_s"], block["cpu_s"]) / len(one.gpus)
            work = np.column_stack((block["start_s"], block["start_s"] + block["service_s"], gpu_s))
            busy_s += work_by_bin(work, times.edges_ns)
    return busy_s
