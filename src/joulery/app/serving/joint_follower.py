"""Replanning of a running joint plan when the site file, the load, the intensity or the batches' times change.

The new plan keeps running instances as far as that pays, within ``plan.moves``. Where only cost is at stake (less load,
another intensity), the new plan takes effect only if it saves more than the change costs. Measured prediction errors
are recorded as decisions of the run, with the predicted and the measured values, and become margins of later plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from joulery.app.planning.joint import joint_request
from joulery.config.plan import PlanSection
from joulery.config.site import Mode, Site
from joulery.domain.decisions import Decision
from joulery.domain.gpu.optimum import PlanObjective
from joulery.domain.gpu.provisioning import PlannedGpu, ProvisionPlan
from joulery.domain.serving.engine import Outcome
from joulery.domain.serving.timeline import DecisionRecord
from joulery.policies.placement.joint.day import PlanGain, gain_of
from joulery.policies.placement.joint.following.drift import (
    CORRECT_PREDICTOR,
    KEEP_PLAN,
    REPLAN,
    DriftObservation,
    DriftState,
    PlanDrift,
    ServiceReading,
    WattPrice,
)
from joulery.policies.placement.joint.following.warm import replan
from joulery.runtime.serving.plans.planned import PlanControl
from joulery.runtime.serving.session import ServingSession
from joulery.runtime.session.driver import ADVISED, APPLIED

LOOK_S = 5.0
"""Time between two checks of the load, the intensity and the batches."""
_LASTS_S = (600.0, 3600.0)
"""Bounds on the assumed duration of a new plan, which is that of the plan before it."""
_G_PER_KG = 1000.0
_W_PER_KW = 1000.0


@dataclass(slots=True)
class JointFollower:
    """Replans a session that runs a joint plan.

    Attributes:
        session: The session.
        control: Runs the plan.
        policy: Decides when to plan again.
        rates_rps: Measured rates of the load; empty for those of the site file.
        site: The site that the plan in force is for; the session's, or its changed file.
        why: Gain of the latest plan as text; empty where it was not computed.
    """

    session: ServingSession
    control: PlanControl
    policy: PlanDrift
    site: Site
    rates_rps: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    _state: DriftState = field(default_factory=DriftState)
    _made: tuple[ProvisionPlan, Site] | None = None
    _kept: Decision | None = None
    _g_per_kwh: float = math.nan
    _since_s: float = math.nan

    @classmethod
    def of(cls, session: ServingSession, control: PlanControl) -> JointFollower | None:
        """Create the follower of a session's joint plan; None where another preset made the plan."""
        if control.joint is None:
            return None
        policy = policy_of(control.joint, session.site.plan)
        session.history.add_policy(policy)
        return cls(session, control, policy, session.site, _state=policy.initial())

    def look(self, now_s: float) -> str:
        """Compare load, intensity and batches with the plan; return the cause to plan again, empty for none."""
        if now_s - self._state.seen_s < LOOK_S - 1e-6:
            return ""
        if math.isnan(self._since_s):
            self._since_s = now_s
        seen = self._observe(now_s)
        step = self.policy.step(self._state, seen)
        self.session.history.add_step(PlanDrift.service, seen, step)
        self._state, cause, self._g_per_kwh = step.state, "", seen.g_per_kwh
        acts = self.session.site.mode is Mode.ACT
        for decision in step.decisions:
            if decision.kind == REPLAN:
                self.rates_rps = dict(decision.value)
                cause = decision.cause if acts else ""
            asks = decision.kind == REPLAN
            detail = "from the next plan on" if decision.kind == CORRECT_PREDICTOR else ""
            detail = f"mode {self.session.site.mode}" if asks and not acts else detail
            outcome = APPLIED if acts or not asks else ADVISED
            self.session.history.add_decision(DecisionRecord(now_s, decision, outcome, detail))
        return cause

    def next(self, site: Site, cause: str) -> tuple[PlannedGpu, ...] | None:
        """Make the next plan and return its GPUs; None where the plan in force stays (:meth:`stay` records the reason).

        Raises:
            InfeasibleError: No plan was found within the GPUs and the moves.
            ConfigError: The site lacks a setting that the plan needs.
        """
        joint = self.control.joint
        assert joint is not None and joint.certificate is not None  # a follower is made for a joint plan alone
        # What was asked for on the command line stays, until the site file says something else.
        objective = joint.certificate.objective.name if site.plan == self.site.plan else None
        request = joint_request(site, objective, self._g_per_kwh if self._g_per_kwh > 0 else None)
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
        self._made, self._kept, self.why = (made, site), None, ""
        if cause in ("load", "intensity"):
            low_s, high_s = _LASTS_S
            lasts_s = min(max(self._state.seen_s - self._since_s, low_s), high_s)
            gain = gain_of(request.objective, joint.gpus, made.gpus, rates, lasts_s)
            self.why = gain_text(gain, request.objective)
            if not gain.worthwhile and not self.policy.rises(rates):
                reason = f"not worth a change: {self.why}"
                self._made, self._kept = None, Decision(KEEP_PLAN, "plan", None, PlanDrift.name, reason, cause=cause)
                return None
        return made.gpus

    def stay(self, now_s: float) -> None:
        """Record the reason why the plan in force stays."""
        if self._kept is not None:
            self.session.history.add_decision(DecisionRecord(now_s, self._kept, APPLIED, "the plan runs on"))
            self._kept = None

    def taken_over(self) -> None:
        """Watch the next plan, which has taken effect."""
        if self._made is None:
            return
        (made, self.site), self._made = self._made, None
        self.control.joint = made
        self.policy = policy_of(made, self.site.plan, self._state)
        self.session.history.add_policy(self.policy)
        self._state, self._since_s = self.policy.initial(), self._state.seen_s

    def _observe(self, now_s: float) -> DriftObservation:
        readings = {}
        for name, one in self.session.services.items():
            times = [record.service_s for record in one.window.since(now_s) if record.outcome is Outcome.OK]
            median_s = float(np.median(times)) if times else math.nan
            readings[name] = ServiceReading(one.window.rate_rps(now_s), median_s, len(times))
        return DriftObservation(now_s, readings, self.session.grid.at(now_s))


def gain_text(gain: PlanGain, objective: PlanObjective) -> str:
    """The gain of a plan as text."""
    unit = objective.unit
    change = f"a change costs {gain.change:.3g} {unit} for an hour, at {gain.lasts_s / 60:.0f} min to come"
    return f"{gain.after:.4g} {unit} instead of {gain.held:.4g} ({100 * gain.ratio:+.1f} % saved); {change}"


def policy_of(plan: ProvisionPlan, section: PlanSection, before: DriftState | None = None) -> PlanDrift:
    """Create the policy that watches a plan.

    Args:
        plan: The plan.
        section: The site's ``plan`` section, with the weights of its objective.
        before: State under the previous plan; None for none.
    """
    before = before or DriftState()
    rates: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for each in (one for gpu in plan.gpus for one in gpu.instances):
        rates[each.workload] = rates.get(each.workload, 0.0) + each.rate_rps
        predicted[each.workload] = max(predicted.get(each.workload, 0.0), each.latency_s)
    watt = WattPrice() if plan.certificate is None else watt_price(plan.certificate.objective, section)
    return PlanDrift(
        rates, predicted, dict(before.corrections), watt, rates_rps=dict(before.rates_rps), seen_s=before.seen_s
    )


def watt_price(objective: PlanObjective, section: PlanSection) -> WattPrice:
    """The price of a watt in a plan's objective, and its dependence on the carbon intensity."""
    g_per_kwh = math.nan if objective.g_per_kwh is None else objective.g_per_kwh
    per_kg = 0.0 if section.weights is None else section.weights.carbon
    slope = {
        "carbon": objective.pue / _W_PER_KW,
        "weights": per_kg * objective.pue / (_W_PER_KW * _G_PER_KG),
    }.get(objective.name, 0.0)
    if objective.name in ("energy", "cost"):
        why = f"objective {objective.name} counts {'watts' if objective.name == 'energy' else 'dollars'} alone"
    elif slope <= 0:
        why = "the weights of its objective give carbon none"
    elif objective.per_usd <= 0 and objective.per_gpu <= 0:
        why = "its objective weighs watts alone, which the intensity scales in every plan alike"
    else:
        return WattPrice(objective.per_w, slope, g_per_kwh)
    return WattPrice(objective.per_w, 0.0, g_per_kwh, why)
