"""A running joint plan, made again from what runs: when the site file, the load or the batches' times change.

The new plan keeps running instances as far as that pays, within ``plan.moves``. Prediction errors that were measured
stand as decisions of the run, with what was predicted and what was measured, and as margins of every later plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.app.planning.joint import joint_request
from joulery.config.site import Mode, Site
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.domain.serving.engine import Outcome
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.placement.joint.drift import (
    CORRECT_PREDICTOR,
    REPLAN,
    DriftObservation,
    DriftState,
    PlanDrift,
    ServiceReading,
)
from joulery.policies.placement.joint.warm import replan
from joulery.runtime.serving.driver import ADVISED, APPLIED
from joulery.runtime.serving.planned import PlanControl
from joulery.runtime.serving.session import ServingSession


@dataclass(slots=True)
class JointFollower:
    """Plans again what a session runs.

    Attributes:
        session: The session.
        control: Runs the plan.
        policy: Says when to plan again.
        rates_rps: Rates of the load that was measured; empty for those of the site file.
    """

    session: ServingSession
    control: PlanControl
    policy: PlanDrift
    rates_rps: Mapping[str, float] = field(default_factory=dict)
    _state: DriftState = field(default_factory=DriftState)
    _made: ProvisionPlan | None = None

    @classmethod
    def of(cls, session: ServingSession, control: PlanControl) -> JointFollower | None:
        """The follower of a session's joint plan; None where another preset made the plan."""
        if control.joint is None:
            return None
        policy = policy_of(control.joint, {})
        return cls(session, control, policy, _state=policy.initial())

    def look(self, now_s: float) -> str:
        """Compare the load and the batches with the plan; why to plan again, empty for no reason."""
        step = self.policy.step(self._state, self._observe(now_s))
        self._state, cause = step.state, ""
        acts = self.session.site.mode is Mode.ACT
        for decision in step.decisions:
            if decision.kind == REPLAN:
                self.rates_rps = dict(decision.value)
                cause = decision.cause if acts else ""
            corrected = decision.kind == CORRECT_PREDICTOR
            detail = "from the next plan on" if corrected else "" if acts else f"mode {self.session.site.mode}"
            self.session.history.add_decision(
                DecisionRecord(now_s, decision, APPLIED if corrected or acts else ADVISED, detail)
            )
        return cause

    def next(self, site: Site, cause: str) -> tuple[PlannedGpu, ...]:
        """The GPUs of the next plan.

        Raises:
            InfeasibleError: No plan was found within the GPUs and the moves.
            ConfigError: The site says too little.
        """
        joint = self.control.joint
        assert joint is not None  # a follower is made for a joint plan alone
        request = joint_request(site)
        rates = {} if cause == "services" else self.rates_rps
        corrections = self._state.corrections
        services = tuple(
            replace(
                each,
                workload=replace(each.workload, rate_rps=rates.get(each.workload.id, each.workload.rate_rps)),
                margin_ratio=max(each.margin_ratio, corrections.get(each.workload.id, 0.0)),
            )
            for each in request.services
        )
        made = replan(replace(request, services=services), joint, site.plan.moves).plan
        self._made = made
        return made.gpus

    def taken_over(self) -> None:
        """The next plan runs now: watch it."""
        if self._made is None:
            return
        self.control.joint, made, self._made = self._made, self._made, None
        self.policy = policy_of(made, self._state.corrections)
        self._state = replace(self.policy.initial(), seen_s=self._state.seen_s, rates_rps=self._state.rates_rps)

    def _observe(self, now_s: float) -> DriftObservation:
        readings = {}
        for name, one in self.session.services.items():
            times = [record.service_s for record in one.window.since(now_s) if record.outcome is Outcome.OK]
            median_s = float(np.median(times)) if times else math.nan
            readings[name] = ServiceReading(one.window.rate_rps(now_s), median_s, len(times))
        return DriftObservation(now_s, readings)


def policy_of(plan: ProvisionPlan, corrections: Mapping[str, float]) -> PlanDrift:
    """The policy that watches a plan."""
    rates: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for each in (one for gpu in plan.gpus for one in gpu.instances):
        rates[each.workload] = rates.get(each.workload, 0.0) + each.rate_rps
        predicted[each.workload] = max(predicted.get(each.workload, 0.0), each.latency_s)
    return PlanDrift(rates, predicted, dict(corrections))
