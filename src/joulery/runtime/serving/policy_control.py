"""Runs the policy of each service: observes, steps, and has the engine run the layout it chooses."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from joulery.config.site import Mode
from joulery.domain.decisions import Decision
from joulery.domain.gpu.layout import Layout
from joulery.domain.ports import Engine
from joulery.domain.serving.service import Slo
from joulery.policies.serving.observation import KEEP_LAYOUT, TRY_LAYOUT, Observation
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.state import ServiceState
from joulery.runtime.serving.controller import LayoutActuator, ServiceObserver
from joulery.runtime.serving.driver import ADVISED, SHADOWED, LiveDriver
from joulery.runtime.serving.history import SessionHistory
from joulery.runtime.serving.intensity import LiveIntensity
from joulery.runtime.serving.running_service import PolicyBinding, RunningService
from joulery.runtime.serving.trial_arbiter import TrialArbiter


@dataclass(frozen=True, slots=True, eq=False)
class Revision:
    """New objectives of a running service.

    Attributes:
        service: Its name.
        policy: Its policy with the new objectives.
        slo: Its SLO from now on.
    """

    service: str
    policy: ServicePolicy
    slo: Slo


class PolicyControl:
    """One policy a service. Implements :class:`joulery.runtime.serving.session.Control`.

    Args:
        services: The running services by name, each with a policy.
        engine: Runs the layouts.
        history: Records observations, steps and decisions.
        grid: Carbon intensity.
        mode: Layouts change in ``act`` only.
        period_s: Time between two steps.
    """

    def __init__(
        self,
        services: Mapping[str, RunningService],
        engine: Engine,
        history: SessionHistory,
        grid: LiveIntensity,
        mode: Mode,
        period_s: float,
    ) -> None:
        self._services, self._engine, self._history, self._grid = services, engine, history, grid
        self._mode, self._period_s = mode, period_s
        self._changing, self._arbiter = asyncio.Lock(), TrialArbiter()
        self._by_name = {
            name: self._driver(one, one.chosen) for name, one in services.items() if one.chosen is not None
        }

    @property
    def drivers(self) -> tuple[LiveDriver[Any, Any], ...]:
        """One driver a policy."""
        return tuple(self._by_name.values())

    @property
    def on_trial(self) -> bool:
        """True while a layout is on trial: other controllers change nothing then."""
        return any(getattr(driver.state, "trying", None) is not None for driver in self.drivers)

    async def start(self) -> None:
        """Make the first plans and run them.

        Raises:
            JouleryError: A layout cannot be run.
        """
        for name, driver in self._by_name.items():
            chosen = self._services[name].chosen
            if chosen is not None and chosen.remark:
                self._history.warn(chosen.remark)
            self._history.add_policy(driver.policy)
            await driver.step(time.time())
            if driver.failure is not None:
                raise driver.failure

    def revise(self, revision: Revision) -> None:
        """Go on with new objectives."""
        one = self._services[revision.service]
        assert one.chosen is not None  # revisions are made of services with a policy
        self._by_name[revision.service].policy = revision.policy
        one.setup = replace(one.setup, slo=revision.slo)
        one.chosen = replace(one.chosen, policy=revision.policy)
        self._history.add_policy(revision.policy)

    def _driver(self, one: RunningService, chosen: PolicyBinding) -> LiveDriver[Any, Observation]:
        return LiveDriver(
            chosen.policy,
            lambda now_s: self._observe(one, now_s),
            lambda decision: self._act(one, chosen.base, decision),
            watch=lambda seen, step: self._history.add_step(one.name, seen, step),
            record=self._history.add_decision,
            period_s=self._period_s,
        )

    def _observe(self, one: RunningService, now_s: float) -> Observation:
        observer = ServiceObserver(one.window, self._engine, one.setup.slo, self._grid.at, self._power_w, one.sampling)
        seen = observer.observe(now_s)
        if self._mode is not Mode.ACT:
            # The policy observes its advice as if it were carried out; the latency is of another layout and left out.
            return replace(seen, running=one.advised, latency_s=math.nan, requests=0)
        return replace(seen, waits_for=self._arbiter.ahead_of(one.name, self._wanting()))

    def _wanting(self) -> dict[str, bool]:
        """Of each service that tries layouts whether it is on trial, or waits for one."""
        states = {name: driver.state for name, driver in self._by_name.items()}
        return {
            name: state.trying is not None or bool(state.deferred)
            for name, state in states.items()
            if isinstance(state, ServiceState)
        }

    def _power_w(self) -> float:
        return math.nan if self._history.latest is None else self._history.latest.power_w

    async def _act(self, one: RunningService, base: Layout, decision: Decision) -> tuple[str, str]:
        """Carry out a decision; in other modes than act, start the baseline and change nothing after.

        One change of replicas at a time: each names the replicas of all services.
        """
        actuator = LayoutActuator(self._engine, one.name, one.setup.models, one.setup.seats)
        async with self._changing:
            if self._mode is Mode.ACT:
                done = await actuator.carry_out(decision)
                if decision.kind == TRY_LAYOUT and one.sampling is not None:
                    one.sampling.begin(time.time())
                if decision.kind != KEEP_LAYOUT:
                    one.layouts.append((time.time(), Layout.parse(decision.value)))
                return done
            detail = f"mode {self._mode}: nothing was changed"
            if not one.layouts:
                detail = f"mode {self._mode}: the baseline runs instead, {await actuator.run(base)}"
                one.layouts.append((time.time(), base))
        one.advised = Layout.parse(decision.value)
        return ADVISED if self._mode is Mode.ADVISE else SHADOWED, detail
