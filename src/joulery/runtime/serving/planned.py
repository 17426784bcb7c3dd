"""A provisioning plan, running: its instances, their standbys, and the next plan when services come and go.

Where CPU cores stand for the plan's GPUs, a group of cores stands for each GPU and an instance's share of the GPU is a
quota of those cores' time. The plan's batch is the replica's batch. Each original has a standby beside it, loaded and
warm, where the plan leaves room for one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from joulery.config.site import Mode
from joulery.domain.decisions import Decision
from joulery.domain.errors import ActuationError, CapabilityError, JouleryError
from joulery.domain.gpu.layout import Instance, Layout
from joulery.domain.gpu.plan_change import RunningGpu
from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance, ProvisionPlan
from joulery.domain.ports import Engine
from joulery.domain.serving.engine import ModelRef, Outcome, ReplicaSpec, ReplicaState, RequestRecord
from joulery.domain.serving.service import Slice, SliceKind, Slo
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.placement.provisioning.replan import difference, running_of
from joulery.policies.placement.standby import (
    ACTIVATE_STANDBY,
    REFUSED_S,
    StandbyObservation,
    StandbyPolicy,
    Tail,
    WatchedInstance,
    watched_instances,
)
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.driver import ADVISED, APPLIED, FAILED, SHADOWED, LiveDriver
from joulery.runtime.serving.history import SessionHistory
from joulery.runtime.serving.running_service import RunningService
from joulery.steady_time import unix_s

RUN_PLAN, RENEW_STANDBY = "run_plan", "renew_standby"
REJECTED = "rejected"
WATCH_S = 0.5
"""Time between two looks at the latencies: twice a second (section 5.3)."""
WINDOW_S = 1.0
"""The shortest span they are taken over (section 4.2: every second)."""
_ROUNDING_PERCENT = 1e-6
_LATE = frozenset({Outcome.DEADLINE, Outcome.OVERLOADED, Outcome.UNAVAILABLE, Outcome.CRASHED})


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """One instance of a running plan.

    Attributes:
        watched: Its SLO, and the share of its standby.
        original: Its process as the plan says.
        standby: The process that stands by; None where the plan leaves no room for one.
    """

    watched: WatchedInstance
    original: ReplicaSpec
    standby: ReplicaSpec | None

    def answering(self, active: Collection[str]) -> ReplicaSpec:
        """The process that answers: the standby where it is active."""
        return self.standby if self.standby is not None and self.watched.key in active else self.original

    def processes(self, active: Collection[str], renewed: Collection[str] = ()) -> list[ReplicaSpec]:
        """What runs: the process that answers, with a standby beside it.

        Args:
            active: Instances whose standby answers.
            renewed: Those of them that have a new standby: one that answers if the active one dies.
        """
        if self.standby is None:
            return [self.original]
        beside = [replace(self.standby, standby=True)]
        if self.watched.key not in active:
            return [self.original, *beside]
        return [self.standby, *(beside if self.watched.key in renewed else [])]


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan and where it runs.

    Attributes:
        gpus: The plan.
        cores: The CPU cores that stand for each GPU; its index in ``shared``, where that names any.
        replicas: Its instances.
        shared: GPUs of this machine that its processes share under MPS; empty where cores stand for GPUs.
        switched_s: When standbys became active, by instance; grows while the plan runs.
        renewed: Instances with a new standby beside the active one; grows while the plan runs.
    """

    gpus: tuple[PlannedGpu, ...]
    cores: tuple[tuple[int, ...], ...]
    replicas: tuple[PlannedReplica, ...]
    shared: tuple[str, ...] = ()
    switched_s: dict[str, float] = field(default_factory=dict)
    renewed: set[str] = field(default_factory=set)

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
        return cls(
            tuple(gpus), cores, planned_replicas(gpus, cores, models, watched_instances(gpus, slos), shared), shared
        )

    @property
    def noun(self) -> str:
        """What its GPUs run on."""
        return "GPUs" if self.shared else "CPU cores"

    @property
    def clock_bounds_mhz(self) -> dict[str, tuple[float, float]]:
        """The lowest and highest clock of each of this machine's GPUs whose clock the plan sets, by device."""
        if not self.shared:
            return {}
        placed = zip(self.gpus, self.cores, strict=True)
        return {
            self.shared[cores[0]]: gpu.clock_bounds_mhz for gpu, cores in placed if gpu.clock_bounds_mhz is not None
        }

    def services_on(self, device: str) -> frozenset[str]:
        """The services with an instance on one of this machine's GPUs."""
        return frozenset(
            each.workload
            for gpu, cores in zip(self.gpus, self.cores, strict=True)
            for each in gpu.instances
            if self.shared and self.shared[cores[0]] == device
        )

    @property
    def policy(self) -> StandbyPolicy:
        """Watches its instances."""
        return StandbyPolicy(tuple(one.watched for one in self.replicas), taken_over=tuple(self.switched_s.items()))

    def keep_corrections(self, before: PlanInForce) -> None:
        """Leave standbys active that took over under the plan before, where this plan changes nothing for them.

        The model that plans is the one that was wrong about them: planned afresh, they would be late again.
        """
        was = {one.watched.key: one for one in before.replicas}
        used = [100.0 * gpu.share_ratio for gpu in self.gpus]
        for one in self.replicas:
            key, old = one.watched.key, was.get(one.watched.key)
            if key not in before.switched_s or old is None or one.standby is None or old.original != one.original:
                continue
            used[one.watched.gpu] += one.watched.standby_percent - one.watched.share_percent
            if used[one.watched.gpu] <= 100 + _ROUNDING_PERCENT:
                self.switched_s[key] = before.switched_s[key]
                if old.standby == one.standby and key in before.renewed:
                    self.renewed.add(key)

    @property
    def running(self) -> tuple[RunningGpu, ...]:
        """The plan as it runs; an instance with an active standby has the standby's share."""
        active = {one.watched.key: one.watched.standby_percent for one in self.replicas}
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

    def summary(self) -> str:
        """One line: the instances of each GPU with their shares and batches."""
        return " | ".join(
            " + ".join(f"{each.workload} {100 * each.share_ratio:g} % x{each.batch}" for each in gpu.instances)
            + ("" if gpu.clock_set_mhz is None or not self.shared else f" at {gpu.clock_set_mhz:g} MHz")
            for gpu in self.gpus
        )


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
        """Refuse: a changed site file is a changed plan.

        Raises:
            ActuationError: Always.
        """
        raise ActuationError(f"a plan decides for {revision.setup.name}: plan again")

    async def go_over(
        self,
        gpus: Sequence[PlannedGpu],
        added: Sequence[RunningService],
        models: Mapping[str, ModelRef],
        slos: Mapping[str, Slo],
        cause: str = "services",
    ) -> None:
        """Go over to another plan: what it leaves as it is runs on untouched.

        Args:
            gpus: The plan.
            added: Services that are new; those that left stay in the account.
            models: What each service of the plan loads.
            slos: Each service's SLO from now on.
            cause: Why: ``services``, ``load`` or ``latency``.

        Raises:
            JouleryError: It cannot be run; the old plan runs on.
        """
        async with self._turn:
            change = difference(self.plan.running, running_of(gpus))
            kept = {new: self.plan.cores[was] for new, was in enumerate(change.same_gpu) if was is not None}
            begun_s = unix_s()
            counts = ", ".join(f"{change.count(what)} {what}" for what in ("start", "stop", "resize", "move"))
            try:
                cores = cores_for(gpus, self._all_cores, self._size, kept, self.plan.noun)
                plan = PlanInForce.of(gpus, cores, models, slos, self.plan.shared)
                plan.keep_corrections(self.plan)
                self.bound_clocks((self.plan, plan))
                reason = f"{counts}: {plan.summary()}"
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
        """Have the engine run a plan; the text says what changed and how long that took."""
        specs = [spec for one in plan.replicas for spec in one.processes(plan.switched_s, plan.renewed)]
        done = await self._engine.apply(specs)
        if plan is self.plan:
            self._note_layouts()
        return (
            f"{len(done.started)} processes started, {len(done.stopped)} stopped, {len(done.kept)} kept, "
            f"in force after {done.ready_s:.2f} s"
        )

    def _note_layouts(self) -> None:
        """Keep which layout answers for each service from now on."""
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

    def _replica_ids(self) -> dict[str, str]:
        """The engine's replica of each instance; where several are alike, in the order of their names."""
        views = [view for view in self._engine.replicas() if view.state is not ReplicaState.DRAINING]
        found: dict[str, str] = {}
        for one in self.plan.replicas:
            spec = one.answering(self.plan.switched_s)
            match = next((view for view in views if view.spec == spec), None)
            if match is not None:
                views.remove(match)
            found[one.watched.key] = "" if match is None else match.id
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


def tail_of(
    planned: PlannedReplica, records: Sequence[RequestRecord], replica: str, switched_s: Mapping[str, float]
) -> Tail:
    """The latency tail of an instance's requests since its standby became active; refused ones count as late."""
    watched = planned.watched
    since_s = switched_s.get(watched.key, -math.inf)
    mine = [record for record in records if record.replica in ("", replica) and record.arrival_s >= since_s]
    latency_s = [record.latency_s for record in mine if record.outcome is Outcome.OK]
    latency_s += [REFUSED_S for record in mine if record.outcome in _LATE]
    quantile = float(np.quantile(latency_s, watched.quantile)) if latency_s else math.nan
    return Tail(watched.key, quantile, len(latency_s))


def cores_for(
    gpus: Sequence[PlannedGpu],
    cores: Sequence[int],
    size: Mapping[str, int],
    kept: Mapping[int, tuple[int, ...]] = {},
    noun: str = "CPU cores",
) -> tuple[tuple[int, ...], ...]:
    """The cores that stand for each GPU of a plan.

    Args:
        gpus: The plan.
        cores: The cores that may be used.
        size: Cores that stand for one GPU, by its type; 1 where it is not named.
        kept: GPUs that go on, with the cores they have.
        noun: What messages call them: cores, or the GPUs themselves.

    Raises:
        CapabilityError: There are not enough cores.
    """
    free = [core for core in cores if not any(core in bound for bound in kept.values())]
    wanted = sum(size.get(gpu.type, 1) for index, gpu in enumerate(gpus) if index not in kept)
    if wanted > len(free):
        raise CapabilityError(
            f"the plan has {len(gpus)} GPUs, which takes {wanted - len(free)} {noun} more than may be used here",
            resource=noun,
            hint="plan for fewer GPUs (fleet.gpus.*.available), or run it on a larger machine",
        )
    found = []
    for index, gpu in enumerate(gpus):
        bound = kept.get(index)
        if bound is None:
            count = size.get(gpu.type, 1)
            bound, free = tuple(free[:count]), free[count:]
        found.append(bound)
    return tuple(found)


def planned_replicas(
    gpus: Sequence[PlannedGpu],
    cores: Sequence[tuple[int, ...]],
    models: Mapping[str, ModelRef],
    watched: Sequence[WatchedInstance],
    shared: Sequence[str] = (),
) -> tuple[PlannedReplica, ...]:
    """The processes of a plan.

    Args:
        gpus: The plan.
        cores: The cores of each GPU; its index in ``shared``, where that names any.
        models: What each service loads, by name.
        watched: Its instances, in order.
        shared: GPUs of this machine that processes share under MPS; empty where cores stand for GPUs.
    """
    instances = [(index, each) for index, gpu in enumerate(gpus) for each in gpu.instances]
    return tuple(
        _planned_replica(each, cores[index], models[each.workload], one, shared[cores[index][0]] if shared else "")
        for (index, each), one in zip(instances, watched, strict=True)
    )


def _planned_replica(
    each: PlannedInstance, cores: tuple[int, ...], model: ModelRef, watched: WatchedInstance, device: str
) -> PlannedReplica:
    def process(percent: float) -> ReplicaSpec:
        share = min(1.0, round(percent / 100, 9))
        if device:
            piece = Slice(SliceKind.MPS, share_ratio=share)
            delayed = delay_s(each)
            return ReplicaSpec(each.workload, each.model, piece, model, 0, each.batch, delayed, device=device)
        piece = Slice(SliceKind.CPU, cores=len(cores), share_ratio=share)
        return ReplicaSpec(each.workload, each.model, piece, model, 0, each.batch, delay_s(each), cores)

    larger = watched.standby_percent > watched.share_percent + 1e-9
    return PlannedReplica(watched, process(watched.share_percent), process(watched.standby_percent) if larger else None)


def delay_s(each: PlannedInstance) -> float:
    """How long a live batch waits to fill: as planned; for a plan of evenly spaced requests, as long as they take.

    A plan for evenly spaced requests lets them wait for a full batch. Live ones are never quite even: a batch that has
    waited that long goes as it is.
    """
    if math.isfinite(each.max_delay_s):
        return each.max_delay_s
    return (each.batch - 1) / each.rate_rps
