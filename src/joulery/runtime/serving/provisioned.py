"""A provisioning plan, running: its instances, their shadows, and the next plan when services come and go."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from joulery.app.wiring.meters import MeterSpec
from joulery.config.site import Mode, Site
from joulery.domain.decisions import Decision, Step
from joulery.domain.errors import JouleryError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.gpu.plan_change import RunningGpu
from joulery.domain.gpu.provisioning import PlannedGpu
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef, Outcome, ReplicaState, RequestRecord
from joulery.domain.serving.service import Slo
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.placement.provisioning.replan import difference, running_of
from joulery.policies.placement.provisioning.standby import (
    ACTIVATE_SHADOW,
    REFUSED_S,
    ShadowObservation,
    ShadowPolicy,
    ShadowState,
    Tail,
    watched_of,
)
from joulery.runtime.runs.replay import POLICY, STEP, policy_entry, step_entry
from joulery.runtime.serving.driver import ADVISED, APPLIED, FAILED, SHADOWED, LiveDriver
from joulery.runtime.serving.intensity import Grid
from joulery.runtime.serving.pace import Pace
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.serving.session import Session
from joulery.runtime.serving.slice_assignment import PlannedReplica, cores_for, seats_of
from joulery.store.run.directory import RunWriter
from joulery.store.run.timeline import write_site

RUN_PLAN = "run_plan"
REJECTED = "rejected"
WATCH_S = 0.5
"""How often latencies are looked at: each second, and once more half a second later (section 5.3)."""
WINDOW_S = 1.0
"""How far back they count at least (section 4.2: every second)."""
_LATE = frozenset({Outcome.DEADLINE, Outcome.OVERLOADED, Outcome.UNAVAILABLE, Outcome.CRASHED})


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan and where it runs.

    Attributes:
        gpus: The plan.
        cores: The CPU cores that stand for each GPU; its number in ``shared``, where that names any.
        seats: Its instances.
        shared: GPUs of this machine that its processes share under MPS; empty where cores stand for GPUs.
        switched_s: When shadows took over, by instance; grows while the plan runs.
    """

    gpus: tuple[PlannedGpu, ...]
    cores: tuple[tuple[int, ...], ...]
    seats: tuple[PlannedReplica, ...]
    shared: tuple[str, ...] = ()
    switched_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        gpus: Sequence[PlannedGpu],
        cores: tuple[tuple[int, ...], ...],
        models: Mapping[str, ModelRef],
        slos: Mapping[str, Slo],
        shared: tuple[str, ...] = (),
    ) -> PlanInForce:
        """A plan on these cores or GPUs; ``models`` and ``slos`` by service."""
        return cls(tuple(gpus), cores, seats_of(gpus, cores, models, watched_of(gpus, slos), shared), shared)

    @property
    def noun(self) -> str:
        """What its GPUs run on."""
        return "GPUs" if self.shared else "CPU cores"

    @property
    def policy(self) -> ShadowPolicy:
        """Watches it."""
        return ShadowPolicy(tuple(seat.watched for seat in self.seats))

    @property
    def running(self) -> tuple[RunningGpu, ...]:
        """The plan as something that runs; an instance whose shadow answers has the shadow's share."""
        active = {seat.watched.key: seat.watched.shadow_percent for seat in self.seats}
        return tuple(
            gpu._replace(
                processes=tuple(
                    process._replace(share_percent=active[f"{process.workload}/{process.replica}"])
                    if f"{process.workload}/{process.replica}" in self.switched_s
                    else process
                    for process in gpu.processes
                )
            )
            for gpu in running_of(self.gpus)
        )

    def words(self) -> str:
        """In one line: which service beside which, with what."""
        return " | ".join(
            " + ".join(f"{each.workload} {100 * each.share_ratio:g} % x{each.batch}" for each in gpu.instances)
            for gpu in self.gpus
        )


class ProvisionedSession(Session):
    """Services run as a plan says; see :class:`~joulery.runtime.serving.session.Session`.

    Args:
        plan: The plan.
        size: CPU cores that stand for one GPU, by its type.
        all_cores: The CPU cores that may be used.
    """

    def __init__(
        self,
        site: Site,
        hosted: Sequence[RunningService],
        writer: RunWriter,
        engine: Engine,
        *,
        meters: Sequence[MeterSpec] | None,
        grid: Grid,
        pace: Pace,
        plan: PlanInForce,
        size: Mapping[str, int],
        all_cores: Sequence[int],
    ) -> None:
        self.plan = self._looked_at = plan
        self._turn = asyncio.Lock()
        self._size, self._all_cores = size, tuple(all_cores)
        super().__init__(site, hosted, writer, engine, meters=meters, grid=grid, pace=pace)

    def _make_drivers(self) -> list[LiveDriver[Any, Any]]:
        self._watch = LiveDriver(
            self.plan.policy, self._look, self._switch, watch=self._log_look, record=self._record, period_s=WATCH_S
        )
        return [self._watch]

    async def _first(self) -> None:
        self.writer.log(POLICY, **policy_entry(self.plan.policy))
        words = self.plan.words()
        decision = Decision(RUN_PLAN, "plan", words, "plan", f"the plan given: {words}", cause="start")
        self._record(DecisionRecord(time.time(), decision, APPLIED, await self._apply(self.plan)))

    async def go_over(
        self,
        gpus: Sequence[PlannedGpu],
        came: Sequence[RunningService],
        models: Mapping[str, ModelRef],
        slos: Mapping[str, Slo],
    ) -> None:
        """Go over to another plan: what it leaves as it is runs on untouched.

        Args:
            gpus: The plan.
            came: Services that came; those that left stay in the account.
            models: What each service of the plan loads.
            slos: What each promises from now on.

        Raises:
            JouleryError: It cannot be had; the old plan runs on.
        """
        async with self._turn:
            change = difference(self.plan.running, running_of(gpus))
            kept = {new: self.plan.cores[was] for new, was in enumerate(change.same_gpu) if was is not None}
            begun_s = time.time()
            counts = ", ".join(f"{change.count(what)} {what}" for what in ("start", "stop", "resize", "move"))
            try:
                cores = cores_for(gpus, self._all_cores, self._size, kept, self.plan.noun)
                plan = PlanInForce.of(gpus, cores, models, slos, self.plan.shared)
                decision = Decision(
                    RUN_PLAN, "plan", plan.words(), "follow", f"{counts}: {plan.words()}", cause="services"
                )
                detail = await self._apply(plan)
            except JouleryError as error:
                decision = Decision(RUN_PLAN, "plan", None, "follow", counts, cause="services")
                self._record(DecisionRecord(begun_s, decision, FAILED, str(error)))
                raise
            self.adopt(came)
            for one in self.hosted:
                one.setup = replace(one.setup, slo=slos.get(one.name, one.setup.slo))
            self.plan = plan
            self._watch.change(plan.policy)
            self.writer.log(POLICY, **policy_entry(plan.policy))
            self._record(DecisionRecord(begun_s, decision, APPLIED, detail))
            self.site_label = self._label()
            write_site(self.writer, self.site_label)
            self._note_layouts()

    async def _apply(self, plan: PlanInForce) -> str:
        """Have the engine run a plan; what that took."""
        specs = [spec for seat in plan.seats for spec in seat.processes(plan.switched_s)]
        async with self._changing:
            done = await self.engine.apply(specs)
        if plan is self.plan:
            self._note_layouts()
        return (
            f"{len(done.started)} processes started, {len(done.stopped)} stopped, {len(done.kept)} kept, "
            f"in force after {done.ready_s:.2f} s"
        )

    def _note_layouts(self) -> None:
        """What answers for each service from now on."""
        for one in self.hosted:
            seats = [seat for seat in self.plan.seats if seat.watched.workload == one.name]
            mine = [seat.answering(self.plan.switched_s) for seat in seats]
            layout = Layout(Instance(spec.variant, spec.slice) for spec in mine) if mine else None
            if layout is not None and (not one.layouts or one.layouts[-1][1] != layout):
                one.layouts.append((time.time(), layout))

    def _look(self, now_s: float) -> ShadowObservation:
        """The tail of each instance, over its service's window."""
        self._looked_at = self.plan
        lately = {one.name: one.window.since(now_s) for one in self.hosted}
        ids = self._replicas()
        tails = [
            tail_of(seat, lately[seat.watched.workload], ids[seat.watched.key], self.plan.switched_s)
            for seat in self.plan.seats
        ]
        return ShadowObservation(now_s, tuple(tails))

    def _replicas(self) -> dict[str, str]:
        """The engine's replica of each instance; where several are alike, in the order of their names."""
        views = [view for view in self.engine.replicas() if view.state is not ReplicaState.DRAINING]
        found: dict[str, str] = {}
        for seat in self.plan.seats:
            spec = seat.answering(self.plan.switched_s)
            match = next((view for view in views if view.spec == spec), None)
            if match is not None:
                views.remove(match)
            found[seat.watched.key] = "" if match is None else match.id
        return found

    async def _switch(self, decision: Decision) -> tuple[str, str]:
        """Have a shadow take over."""
        if decision.kind != ACTIVATE_SHADOW:
            return APPLIED, "nothing can be done within this plan; plan again with a margin, or with what was measured"
        if self.site.mode is not Mode.ACT:
            said = f"mode {self.site.mode}: the original answers on"
            return ADVISED if self.site.mode is Mode.ADVISE else SHADOWED, said
        async with self._turn:
            if self._looked_at is not self.plan:
                return REJECTED, "another plan was gone over to meanwhile"
            self.plan.switched_s[decision.target] = time.time()
            try:
                return APPLIED, await self._apply(self.plan)
            except JouleryError:
                del self.plan.switched_s[decision.target]
                raise

    def _log_look(self, seen: ShadowObservation, step: Step[ShadowState]) -> None:
        self.writer.log(STEP, t_s=seen.now_s, **step_entry(ShadowPolicy.service, seen, step))


def tail_of(
    seat: PlannedReplica, records: Sequence[RequestRecord], replica: str, switched_s: Mapping[str, float]
) -> Tail:
    """What an instance's requests saw, those before its shadow took over left out; refused ones count as late."""
    watched = seat.watched
    since_s = switched_s.get(watched.key, -math.inf)
    mine = [record for record in records if record.replica in ("", replica) and record.arrival_s >= since_s]
    latency_s = [record.latency_s for record in mine if record.outcome is Outcome.OK]
    latency_s += [REFUSED_S for record in mine if record.outcome in _LATE]
    quantile = float(np.quantile(latency_s, watched.quantile)) if latency_s else math.nan
    return Tail(watched.key, quantile, len(latency_s))
