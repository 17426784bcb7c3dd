"""Run a provisioning plan: its instances, their standbys, and the next plan when services come and go.

Each original has a standby beside it, loaded and warm, where the plan leaves room for one; an instance on a MIG slice
has none, for a slice does not grow. Where a plan has several variants of a service, the engine keeps its shares of the
requests, from the moment in which the plan's processes take over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from joulery.config.site import Mode
from joulery.domain.decisions import Decision
from joulery.domain.errors import ActuationError, JouleryError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.domain.ports import Engine, Steering
from joulery.domain.serving.engine import ReplicaState
from joulery.domain.serving.service import Slo
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.placement.provisioning.difference import difference, running_of
from joulery.policies.placement.standby import ACTIVATE_STANDBY, StandbyObservation, StandbyPolicy
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.plans.plan_in_force import (
    Models,
    PlanInForce,
    cores_for,
    devices_for,
    held_places,
    tail_of,
)
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.session.driver import ADVISED, APPLIED, FAILED, SHADOWED, LiveDriver
from joulery.runtime.session.history import SessionHistory
from joulery.steady_time import unix_s

RUN_PLAN, RENEW_STANDBY = "run_plan", "renew_standby"
REJECTED = "rejected"
WATCH_S = 0.5
"""Seconds between two readings of the latencies: twice a second (section 5.3)."""
WINDOW_S = 1.0
"""The shortest span they are taken over (section 4.2: every second)."""


class PlanControl:
    """Runs a plan and its standbys. Implements :class:`joulery.runtime.serving.session.Control`.

    Args:
        services: The running services by name; services that a later plan adds are put into it.
        engine: Runs the processes.
        history: Records observations, steps and decisions.
        mode: Standbys take over in ``act`` only.
        plan: The plan.
        size: CPU cores that stand for one GPU, by its type.
        all_cores: The CPU cores that may be used.

    Attributes:
        plan: The plan in force.
        joint: The joint plan that the plan in force was made as; None for plans of other presets.
        bound_clocks: Called with the plans whose clocks must suffice: both before a change, the new one after it.
    """

    on_trial = False

    def __init__(
        self,
        services: dict[str, RunningService],
        engine: Engine,
        history: SessionHistory,
        mode: Mode,
        *,
        plan: PlanInForce,
        size: Mapping[str, int],
        all_cores: Sequence[int],
    ) -> None:
        self.plan = self._observed = plan
        self._services, self._engine, self._history, self._mode = services, engine, history, mode
        self._size, self._all_cores = size, tuple(all_cores)
        self._turn = asyncio.Lock()
        self.joint: ProvisionPlan | None = None
        self.bound_clocks: Callable[[Sequence[PlanInForce]], None] = lambda plans: None
        self._driver: LiveDriver[Any, StandbyObservation] = LiveDriver(
            plan.policy,
            self._observe,
            self._act,
            watch=lambda seen, step: history.add_step(StandbyPolicy.service, seen, step),
            record=history.add_decision,
            period_s=WATCH_S,
        )

    @property
    def drivers(self) -> tuple[LiveDriver[Any, Any], ...]:
        """The loop that watches the instances."""
        return (self._driver,)

    async def start(self) -> None:
        """Run the plan.

        Raises:
            JouleryError: It cannot be run.
        """
        self._history.add_policy(self.plan.policy)
        text = self.plan.summary()
        decision = Decision(RUN_PLAN, "plan", text, "plan", f"the plan given: {text}", cause="start")
        self._history.add_decision(DecisionRecord(unix_s(), decision, APPLIED, await self._apply(self.plan)))

    def revise(self, revision: Revision) -> None:
        """Refuse a revision: a changed site file needs a new plan.

        Raises:
            ActuationError: Always.
        """
        raise ActuationError(f"a plan decides for {revision.setup.name}: plan again")

    async def go_over(
        self,
        gpus: Sequence[PlannedGpu],
        added: Sequence[RunningService],
        models: Models,
        slos: Mapping[str, Slo],
        cause: str = "services",
        why: str = "",
    ) -> None:
        """Change to another plan; instances that it does not change continue untouched.

        Args:
            gpus: The plan.
            added: Services that are new; those that left stay in the account.
            models: What is loaded, by service and variant.
            slos: Each service's SLO from now on.
            cause: Why: ``services``, ``load``, ``intensity`` or ``latency``.
            why: The cause as text; empty where ``cause`` is sufficient.

        Raises:
            JouleryError: The plan cannot be run; the old plan continues.
        """
        async with self._turn:
            change = difference(self.plan.running, running_of(gpus))
            kept = held_places(self.plan, gpus, change.same_gpu)
            begun_s = unix_s()
            counts = ", ".join(f"{change.count(what)} {what}" for what in ("start", "stop", "resize", "move"))
            try:
                shared, partitioned = self.plan.shared, self.plan.partitioned
                if shared:
                    cores = devices_for(
                        gpus, shared, partitioned, kept, [at for mine in self.plan.cores for at in mine]
                    )
                else:
                    cores = cores_for(gpus, self._all_cores, self._size, kept)
                plan = PlanInForce.of(gpus, cores, models, slos, shared, partitioned)
                plan.keep_corrections(self.plan)
                self.bound_clocks((self.plan, plan))
                reason = f"{counts}: {plan.summary()}" + (f"; {why}" if why else "")
                decision = Decision(RUN_PLAN, "plan", plan.summary(), "follow", reason, cause=cause)
                detail = await self._apply(plan)
            except JouleryError as error:
                decision = Decision(RUN_PLAN, "plan", None, "follow", counts, cause=cause)
                self.bound_clocks((self.plan,))
                self._history.add_decision(DecisionRecord(begun_s, decision, FAILED, str(error)))
                raise
            self._services.update({one.name: one for one in added})
            for one in self._services.values():
                one.setup = replace(one.setup, slo=slos.get(one.name, one.setup.slo))
            self.plan = plan
            self.bound_clocks((plan,))
            self._driver.change(plan.policy)
            self._history.add_policy(plan.policy)
            self._history.add_decision(DecisionRecord(begun_s, decision, APPLIED, detail))
            self._note_layouts()

    async def _apply(self, plan: PlanInForce) -> str:
        """Run a plan in the engine; return a text on the changes and on how long they took."""
        specs = [spec for one in plan.replicas for spec in one.processes(plan.switched_s, plan.renewed)]
        # Every engine that runs plans steers requests: a plan takes the embedded one.
        cast(Steering, self._engine).set_next_mixes(plan.mixes)
        done = await self._engine.apply(specs)
        if plan is self.plan:
            self._note_layouts()
        return (
            f"{len(done.started)} processes started, {len(done.stopped)} stopped, {len(done.kept)} kept, "
            f"in force after {done.ready_s:.2f} s"
        )

    def _note_layouts(self) -> None:
        """Record the layout that answers for each service from now on."""
        for one in self._services.values():
            planned = [each for each in self.plan.replicas if each.watched.workload == one.name]
            specs = [each.answering(self.plan.switched_s) for each in planned]
            layout = Layout(Instance(spec.variant, spec.slice) for spec in specs) if specs else None
            if layout is not None and (not one.layouts or one.layouts[-1][1] != layout):
                one.layouts.append((unix_s(), layout))

    def _observe(self, now_s: float) -> StandbyObservation:
        """The latency tail of each instance, over its service's window."""
        self._observed = self.plan
        recent = {name: one.window.since(now_s) for name, one in self._services.items()}
        ids = self._replica_ids()
        tails = [
            tail_of(one, recent[one.watched.workload], ids[one.watched.key], self.plan.switched_s)
            for one in self.plan.replicas
        ]
        return StandbyObservation(now_s, tuple(tails))

    def _replica_ids(self) -> dict[str, frozenset[str]]:
        """The engine's replicas of each instance; where several are alike, in the order of their names."""
        views = [view for view in self._engine.replicas() if view.state is not ReplicaState.DRAINING]
        found: dict[str, frozenset[str]] = {}
        for one in self.plan.replicas:
            spec = one.answering(self.plan.switched_s)
            mine = [view for view in views if view.spec == spec][: one.count]
            views = [view for view in views if view not in mine]
            found[one.watched.key] = frozenset(view.id for view in mine)
        return found

    async def _act(self, decision: Decision) -> tuple[str, str]:
        """Make a standby active."""
        if decision.kind != ACTIVATE_STANDBY:
            return ADVISED, "this plan has no room left; plan again with a margin, or with what was measured"
        if self._mode is not Mode.ACT:
            return (ADVISED if self._mode is Mode.ADVISE else SHADOWED), f"mode {self._mode}: the original answers on"
        async with self._turn:
            if self._observed is not self.plan:
                return REJECTED, "another plan took over meanwhile"
            self.plan.switched_s[decision.target] = unix_s()
            try:
                detail = await self._apply(self.plan)
            except JouleryError:
                del self.plan.switched_s[decision.target]
                raise
        renewal = asyncio.create_task(self._renew(self.plan, decision.target), name=f"standby {decision.target}")
        if (watching := asyncio.current_task()) is not None:
            watching.add_done_callback(lambda _: renewal.cancel())
        return APPLIED, detail

    async def _renew(self, plan: PlanInForce, key: str) -> None:
        """Start a new standby beside the one that took over, once that has settled."""
        await asyncio.sleep(plan.policy.settle_s)
        async with self._turn:
            if self.plan is not plan:
                return
            plan.renewed.add(key)
            decision = Decision(
                RENEW_STANDBY, key, None, "standby", "its standby answers: a new one stands by", "switch"
            )
            try:
                detail, outcome = await self._apply(plan), APPLIED
            except JouleryError as error:
                plan.renewed.discard(key)
                detail, outcome = str(error), FAILED
            self._history.add_decision(DecisionRecord(unix_s(), decision, outcome, detail))
