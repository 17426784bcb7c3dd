"""The value of a looser SLO: plans made again with one SLO longer by the smallest step that saves anything.

Rates are divided into halves, thirds ... and shares into steps, so the prices of the relaxation do not price a
millisecond: a little more time mostly changes no plan at all. The result is the difference of two plans, with its step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.policies.placement.joint.generation import JointEffort
from joulery.policies.placement.joint.planner import plan_joint
from joulery.policies.placement.joint.problem import JointRequest

STEPS = (0.02, 0.05, 0.1, 0.2)
"""Ratios by which an SLO is made longer; the first that saves anything is reported."""
_LEAST = 1e-6
"""A saving smaller than this, as a ratio, is rounding."""


class LooserSlo(NamedTuple):
    """Saving of a longer SLO of one service.

    Attributes:
        service: Its name.
        slo_s: Its SLO.
        looser_s: The longer one: the first step that saves anything, the largest step where none does.
        saved: Lower bound on the saving of the plan, in units of the objective; 0 where no step saves anything.
        saved_w: Watts that the plan saves; NaN where no step saves anything.
    """

    service: str
    slo_s: float
    looser_s: float
    saved: float
    saved_w: float


def looser_slos(
    request: JointRequest,
    plan: ProvisionPlan,
    services: Sequence[str] = (),
    steps: Sequence[float] = STEPS,
    effort: JointEffort | None = None,
) -> tuple[LooserSlo, ...]:
    """Savings of longer SLOs, one service after the other.

    A plan that is not optimal might be improved within its SLOs, so only the saving beyond its bound counts there.

    Args:
        request: The request that the plan was made for.
        plan: The plan.
        services: The services in question; all of them where empty.
        steps: Steps to try, increasing.
        effort: Limits on the work of each plan.

    Raises:
        ConfigError: There is no such service, or the plan has no bound.
    """
    proof = plan.certificate
    if proof is None or not math.isfinite(proof.bound):
        raise ConfigError("the plan has no bound to hold a longer SLO against", expected="a plan made afresh")
    known = {each.workload.id: at for at, each in enumerate(request.services)}
    unknown = next((name for name in services if name not in known), None)
    if unknown is not None:
        raise ConfigError("no such service", got=unknown, expected=", ".join(known))
    least = proof.value if proof.optimal else proof.bound

    def made(at: int, step: float) -> ProvisionPlan:
        workload = request.services[at].workload
        slo = replace(workload.slo, latency_s=workload.slo.latency_s * (1 + step))
        changed = list(request.services)
        changed[at] = replace(changed[at], workload=replace(workload, slo=slo))
        return plan_joint(replace(request, services=tuple(changed)), effort, others=[plan])

    found = []
    for name in services or known:
        slo_s = request.services[known[name]].workload.slo.latency_s
        last = LooserSlo(name, slo_s, slo_s * (1 + steps[-1]), 0.0, math.nan)
        # Most SLOs do not bind: the largest step shows that with one plan.
        order = [steps[-1], *steps[:-1]] if len(steps) > 1 else list(steps)
        for step in order:
            again = made(known[name], step).certificate
            saved = 0.0 if again is None else least - again.value
            if again is not None and saved > _LEAST * abs(least):
                last = LooserSlo(name, slo_s, slo_s * (1 + step), saved, proof.power_w - again.power_w)
                if step != steps[-1]:
                    break
            elif step == steps[-1]:
                break
        found.append(last)
    return tuple(found)
