"""The power limit of a live device that serves: observes requests and joules, decides, sets a leased limit, logs.

The policy (:class:`~joulery.policies.clocks.service_limit.ServiceLimitTuner`, the object that the simulator drives) is
stepped once a period. Every limit is leased: the former one returns when the session ends or dies. Work is service
time: how long a replica or an engine worked on a request, queueing left out.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from joulery.domain.decisions import Decision
from joulery.domain.errors import JouleryError
from joulery.domain.gpu.device import PowerSetting
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import Outcome, ReplicaState
from joulery.domain.serving.service import Slo, SloScope
from joulery.policies.clocks.limit_comparison import LimitRecord, WorkTotals, add_totals
from joulery.policies.clocks.service_limit import (
    ServiceLimitState,
    ServiceLimitTuner,
    ServicePressure,
    ServingDeviceView,
)
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.limited_device import LimitedDevice
from joulery.runtime.llm.governed import slo_of
from joulery.runtime.llm.service import LLMService
from joulery.runtime.serving.controller import backlog_of
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.session.driver import APPLIED, LiveDriver
from joulery.runtime.session.history import SessionHistory
from joulery.steady_time import unix_s


class AnsweredWork(NamedTuple):
    """An answer: its kind, start and end, Unix seconds, its service time, s, and its size."""

    kind: str
    start_s: float
    end_s: float
    service_s: float
    size: float


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """One service or language model of a device at an instant.

    Attributes:
        name: Its name.
        answers: Its latest answers.
        running_s: How long its running requests have run, together, s.
        servers: Requests that it runs at once.
        pressure: How near it is to missing its SLO.
    """

    name: str
    answers: tuple[AnsweredWork, ...]
    running_s: float
    servers: int
    pressure: ServicePressure


ServedLoads = Callable[[float], Sequence[ServedLoad]]
"""Loads that a device serves at an instant, Unix seconds."""


def service_load(one: RunningService, engine: Engine, now_s: float) -> ServedLoad:
    """The load of a service on a device with a power limit; a kind is one of its variants."""
    slo, queued = one.setup.slo, backlog_of(engine, one.name)
    records = [record for record in one.window.since(now_s) if record.outcome is Outcome.OK]
    replicas = [view for view in engine.replicas() if view.spec.service == one.name and not view.spec.standby]
    servers = max(1, sum(view.spec.batch for view in replicas))
    running = [now_s - each.start_s for each in queued if not math.isnan(each.start_s)]
    alone = slo.scope is not SloScope.END_TO_END
    times = [record.service_s if alone else record.latency_s for record in records]
    mean_s = math.fsum(record.service_s for record in records) / len(records) if records else 0.0
    waiting = len(queued) - len(running)
    ages = running if alone else [now_s - each.arrival_s for each in queued]
    return ServedLoad(
        one.name,
        tuple(
            AnsweredWork(f"{one.name}/{each.variant}", each.start_s, each.end_s, each.service_s, 1.0)
            for each in records
        ),
        math.fsum(running),
        servers,
        _pressure(one.name, slo, ages, 0.0 if alone else waiting * mean_s / servers, times),
    )


def llm_load(llm: LLMService, now_s: float) -> ServedLoad:
    """The load of a language model on a device with a power limit; the size of an answer is its tokens."""
    slo, answers, tasks = slo_of(llm), llm.traffic.served(now_s), llm.tasks()
    running = [now_s - task.start_s for task in tasks if task.in_engine and not math.isnan(task.start_s)]
    return ServedLoad(
        llm.name,
        tuple(
            AnsweredWork(llm.name, each.end_s - each.work_s, each.end_s, each.work_s, float(each.tokens))
            for each in answers
            if each.tokens > 0
        ),
        math.fsum(running),
        llm.settings.max_num_seqs,
        _pressure(llm.name, slo, [now_s - task.arrival_s for task in tasks], 0.0, [one.latency_s for one in answers]),
    )


def _figures(device: LimitedDevice, one: LimitRecord, policy: ServiceLimitTuner) -> dict[str, Any]:
    low, high = one.interval()
    return {
        "ratio": one.ratio,
        "limit_w": device.limit_w(one.ratio),
        "slowdown": one.slowdown if one.comparisons else math.nan,
        "slowdown_low": low if math.isfinite(high) else math.nan,
        "slowdown_high": high if math.isfinite(high) else math.nan,
        "energy_ratio": one.energy_ratio if one.comparisons else math.nan,
        "comparisons": len(one.comparisons),
        "within_bound": one.kept(policy.max_slowdown),
    }


def _pressure(
    name: str, slo: Slo, ages_s: Sequence[float], delay_s: float, latencies_s: Sequence[float]
) -> ServicePressure:
    kept = sum(latency_s <= slo.latency_s for latency_s in latencies_s)
    attained = kept / len(latencies_s) if latencies_s else math.nan
    return ServicePressure(
        name, slo.latency_s, slo.quantile, max(ages_s, default=0.0), delay_s, attained, len(latencies_s)
    )


def totals(answers: Iterable[AnsweredWork], fresh_s: float) -> tuple[WorkTotals, ...]:
    """Totals of answers by kind.

    Args:
        answers: The answers.
        fresh_s: Those that began at this time or later are fresh, Unix seconds.
    """
    found: dict[str, WorkTotals] = {}
    for one in answers:
        total = found.get(one.kind, WorkTotals(one.kind))
        if one.start_s >= fresh_s:
            mine = WorkTotals(one.kind, fresh_count=1, fresh_size=one.size, fresh_s=one.service_s)
            (total,) = add_totals((total,), (mine,))
        found[one.kind] = replace(
            total,
            count=total.count + 1,
            size=total.size + one.size,
            service_s=total.service_s + one.service_s,
        )
    return tuple(found[kind] for kind in sorted(found))


@dataclass(slots=True, eq=False)
class PowerLimitController:
    """Observes one device, decides on its power limit, and sets it.

    Attributes:
        device: The device.
        policy: The policy of the limit.
        loads: Loads that the device serves.
        engine: Runs the services; its replicas are the arrangement that is measured.
        holder: Holds the lease.
        pinned: True while a trial of a layout runs.
        tell: Receives messages for the operator.
    """

    device: LimitedDevice
    policy: ServiceLimitTuner
    loads: ServedLoads
    engine: Engine
    holder: LeaseHolder
    pinned: Callable[[], bool] = lambda: False
    tell: Callable[[str], None] = lambda text: None
    now_s: Callable[[], float] = unix_s
    _ratio: float = 1.0
    _set_s: float = -math.inf
    _ended_s: dict[str, float] = field(default_factory=dict)
    _driver: LiveDriver[ServiceLimitState, ServingDeviceView] | None = None

    def driver(self, history: SessionHistory) -> LiveDriver[ServiceLimitState, ServingDeviceView]:
        """The driver of the policy; policy, views and decisions are logged, to be replayed."""
        history.add_policy(self.policy)
        subject = self.policy.service
        self._driver = LiveDriver(
            self.policy,
            self.look,
            self.act,
            watch=lambda view, step: history.add_step(subject, view, step),
            record=history.add_decision,
            period_s=self.policy.period_s,
            now_s=self.now_s,
        )
        return self._driver

    def summary(self) -> dict[str, Any]:
        """Findings: the limits that were compared with full power, and the best of them; all measured."""
        records = () if self._driver is None else self._driver.state.records
        best = self.policy.best(records)
        return {
            "device": self.device.label,
            "full_w": self.device.full_w,
            "max_slowdown": self.policy.max_slowdown,
            "best_ratio": best.ratio,
            "best_w": self.device.limit_w(best.ratio),
            "limits": [_figures(self.device, one, self.policy) for one in records],
        }

    def look(self, now_s: float) -> ServingDeviceView:
        """The answers since the last call, the pressure on the SLOs, and the device's energy."""
        if self._ratio < 1 and self.device.lease not in {lease.name for lease in self.holder.held}:
            self._ratio, self._set_s = 1.0, now_s  # another process has reverted it
        loads = self.loads(now_s)
        new = []
        for load in loads:
            since_s = self._ended_s.get(load.name, -math.inf)
            latest = [one for one in load.answers if one.end_s > since_s]
            self._ended_s[load.name] = max((one.end_s for one in latest), default=since_s)
            new += latest
        energy_j, _ = self.device.activity.read(now_s)
        if math.isnan(energy_j):
            self.tell(f"the energy of {self.device.label} cannot be read: no power limit is tried meanwhile")
        return ServingDeviceView(
            now_s=now_s,
            ratio=self._ratio,
            set_s=self._set_s,
            energy_j=energy_j,
            servers=sum(load.servers for load in loads),
            running_s=math.fsum(load.running_s for load in loads),
            answers=totals(new, self._set_s + self.policy.settle_s),
            services=tuple(load.pressure for load in loads),
            arrangement=self._arrangement(),
            pinned=self.pinned(),
        )

    async def act(self, decision: Decision) -> tuple[str, str]:
        """Set a leased limit; for full power, release the lease.

        After a limit that the device refuses, no further limit is tried.
        """
        ratio = float(decision.value)
        try:
            done = await asyncio.to_thread(self._change, ratio, decision.reason)
        except JouleryError:
            self._ratio, self._set_s = self._held_ratio(), self.now_s()
            if ratio < 1 and self._driver is not None:
                self.tell(f"{self.device.label} keeps full power: its power limit could not be set")
                self._driver.change(replace(self.policy, ratios=()))
            raise
        self._ratio, self._set_s = ratio, self.now_s()
        return APPLIED, done

    def _change(self, ratio: float, reason: str) -> str:
        device = self.device
        if ratio < 1:
            wanted = PowerSetting(device.limit_w(ratio))
            return str(self.holder.set(device.device, device.spec, wanted, reason))
        held = {lease.name for lease in self.holder.held}
        done = self.holder.release(device.lease) if device.lease in held else None
        return "it has the limit that it had before" if done is None else str(done)

    def _held_ratio(self) -> float:
        """The limit that is in force after a failure: full power unless its lease is still there."""
        return self._ratio if self.device.lease in {lease.name for lease in self.holder.held} else 1.0

    def _arrangement(self) -> str:
        """The replicas that answer, by variant and slice."""
        running = Counter(
            f"{view.spec.service}/{view.spec.variant} on {view.spec.slice}, batch {view.spec.batch}"
            for view in self.engine.replicas()
            if view.state is ReplicaState.READY and not view.spec.standby
        )
        return "; ".join(f"{count} {name}" for name, count in sorted(running.items()))
