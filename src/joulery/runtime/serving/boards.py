"""Boards that services run on: what of their energy is idle, and who kept them busy where the driver does not say.

A driver in a container, and some outside, names no process on a board, or none that was ever busy, though requests are
answered there. When they were is known: every request says from when to when it ran, and for what part of a board.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from joulery.accounting.load_line import work_by_bin
from joulery.domain.arrays import FloatArray
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.serving.engine import RequestRecord
from joulery.store.run.readings import RunReadings


@dataclass(frozen=True, slots=True)
class OnBoards:
    """A service on GPUs.

    Attributes:
        service: Its name.
        gpus: What they are called as devices (``gpu:0``), at least one.
        idle_w: What they draw together with nothing to do, by its profile; NaN where there is none.
    """

    service: str
    gpus: tuple[str, ...]
    idle_w: float = math.nan


def of_boards(
    evidence: RunReadings, services: Sequence[OnBoards], records: Sequence[RequestRecord]
) -> tuple[RunReadings, tuple[str, ...]]:
    """The evidence with what the services know of their boards.

    Each board's idle power is that of the profile its requests are charged by (the lowest, where services share it). A
    board on which the driver named nobody busy was busy when requests ran there.

    Args:
        evidence: What was read.
        services: Those that run on GPUs.
        records: Requests, of any service.

    Returns:
        The evidence, and what a reader should know.
    """
    idle_w = _idle_w(services)
    busy, notes = dict(evidence.busy), []
    for device in idle_w:
        told = busy.get(device)
        if told is None or np.nansum(told.all_s) > 0:
            continue
        app_s = _requests_s(device, services, records, told)
        busy[device] = BusyTimes(told.edges_ns, app_s, app_s)
        notes.append(f"{device}: the driver names nobody who kept it busy; requests say when they ran there")
    return replace(evidence, traces=tuple(_idling(trace, idle_w) for trace in evidence.traces), busy=busy), tuple(notes)


def _idle_w(services: Sequence[OnBoards]) -> dict[str, float]:
    """Idle power of each board; NaN where nobody knows it."""
    told = [(device, one.idle_w / len(one.gpus)) for one in services for device in one.gpus]
    lowest = {device: math.nan for device, _ in told}
    for device, watts in told:
        if not watts >= lowest[device]:
            lowest[device] = watts if math.isfinite(watts) else lowest[device]
    return lowest


def _idling(trace: PowerTrace, idle_w: Mapping[str, float]) -> PowerTrace:
    """The same readings of a channel whose idle power is known; a meter that says it itself is believed."""
    known_w = idle_w.get(trace.channel.device, math.nan)
    if not known_w > 0 or trace.channel.idle_w > 0:
        return trace
    return PowerTrace(replace(trace.channel, idle_w=known_w), trace.t_ns, trace.values, trace.period_s)


def _requests_s(
    device: str, services: Sequence[OnBoards], records: Sequence[RequestRecord], told: BusyTimes
) -> FloatArray:
    """Seconds that requests kept a board busy, in the intervals of the driver's answers.

    Which of several boards of a service answered a request is not kept: each counts an equal part of it. An engine that
    does not say what part of a board a request took had it whole.
    """
    part = {one.service: 1.0 / len(one.gpus) for one in services if device in one.gpus}
    work = [
        (record.start_s, record.start_s + record.service_s, _board_s(record) * part[record.service])
        for record in records
        if record.service in part
    ]
    return work_by_bin(np.array(work, np.float64).reshape(-1, 3), told.edges_ns)


def _board_s(record: RequestRecord) -> float:
    return record.service_s if math.isnan(record.cpu_s) else record.cpu_s
