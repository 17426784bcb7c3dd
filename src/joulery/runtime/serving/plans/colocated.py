"""The services and language models of a governed device: their SLOs, their pending requests and their work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from joulery.domain.ports import Backlog, Engine
from joulery.domain.serving.engine import Outcome, QueuedRequest
from joulery.policies.clocks.observation import ColocatedService, CompletedRequest, Pending, Work
from joulery.runtime.serving.running_service import RunningService

ColocatedServices = Callable[[float], Sequence[ColocatedService]]
"""The services of a device at an instant, Unix seconds."""


def colocated_services(hosted: Sequence[RunningService], engine: Engine, now_s: float) -> tuple[ColocatedService, ...]:
    """Every service with its work and the requests that the engine has not answered yet."""
    queued = _backlog(engine)
    return tuple(_colocated(one, engine, queued, now_s) for one in hosted)


def _colocated(one: RunningService, engine: Engine, queued: Sequence[QueuedRequest], now_s: float) -> ColocatedService:
    work = work_of(one, engine, now_s)
    pending = [
        Pending(request.arrival_s, work.service_s, work.energy_j, request.start_s)
        for request in queued
        if request.service == one.name
    ]
    answered = [
        CompletedRequest(record.end_s, record.latency_s)
        for record in one.window.since(now_s)
        if record.outcome is Outcome.OK
    ]
    return ColocatedService(one.name, one.setup.slo, work, pending, answered)


def work_of(one: RunningService, engine: Engine, now_s: float) -> Work:
    """Work of a service's requests at the highest clock, by its profile; by its latest answers where it has none."""
    running = [view for view in engine.replicas() if view.spec.service == one.name and not view.spec.standby]
    rate_rps = one.window.rate_rps(now_s)
    recent = [record for record in one.window.since(now_s) if record.outcome is Outcome.OK]
    if math.isnan(rate_rps):
        rate_rps = one.rate_rps if recent else 0.0
    servers = max(1, len(running))
    if one.profile is not None and running:
        entries = [one.profile.entry(view.spec.variant, view.spec.slice) for view in running]
        speed = np.array([1.0 / entry.each_s for entry in entries])
        share = speed / speed.sum()
        return Work(
            service_s=len(entries) / float(speed.sum()),
            own_tail_s=float(share @ [entry.slowest_s(one.setup.slo.quantile) for entry in entries]),
            energy_j=float(share @ [entry.energy_j for entry in entries]),
            servers=servers,
            rate_rps=rate_rps,
        )
    if not recent:
        return Work(one.setup.slo.latency_s, one.setup.slo.latency_s, 0.0, servers, rate_rps)
    times = np.array([record.service_s for record in recent])
    return Work(float(times.mean()), float(np.quantile(times, one.setup.slo.quantile)), 0.0, servers, rate_rps)


def _backlog(engine: Engine) -> tuple[QueuedRequest, ...]:
    """Requests that an engine has not answered yet; none where it does not report them."""
    return cast(Backlog, engine).backlog() if hasattr(engine, "backlog") else ()
