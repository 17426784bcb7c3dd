"""One door to every way of provisioning: name a policy, get a plan with its predictions and what it would break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.plan_change import RunningGpu
from joulery.domain.gpu.provisioning import PlanBound, ProvisionPlan, Workload
from joulery.domain.quality import Quality, weakest
from joulery.policies.placement.provisioning import best, igniter
from joulery.policies.placement.provisioning.baselines import BASELINES
from joulery.policies.placement.provisioning.column_generation import Effort
from joulery.policies.placement.provisioning.exact import SERVICES_MAX
from joulery.policies.placement.provisioning.predict import GpuType, Placed, predict, shortages_of, violations_of
from joulery.policies.placement.provisioning.replan import follow
from joulery.policies.placement.provisioning.rules import Rules

POLICIES = ("best", "igniter", *BASELINES)
"""Names of the policies."""


def provision(
    policy: str,
    workloads: Sequence[Workload],
    types: Sequence[GpuType],
    rules: Rules | None = None,
    effort: Effort | None = None,
) -> ProvisionPlan:
    """Plan a fleet.

    ``best`` mixes GPU types; every other policy plans each type by itself and takes the cheapest, as the paper does
    (section 5.3).

    Args:
        policy: One of :data:`POLICIES`.
        workloads: The services.
        types: GPU types with prices.
        rules: What has to be kept and what ``best`` may choose; the paper's constraints when left out.
        effort: How hard ``best`` tries.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: No such policy, no GPU type, two services of one name, or a model that no type knows.
    """
    rules = rules or Rules()
    _check(policy, workloads, types)
    quality = weakest([Quality.MODELLED, *(gpu_type.profile.quality for gpu_type in types)])
    if policy == "best":
        solution = best.plan(workloads, types, rules, effort)
        gpus = predict(solution.gpus, workloads, types, rules)
        violations = (*violations_of(gpus), *shortages_of(gpus, types))
        return ProvisionPlan("best", gpus, violations, solution.bound, quality)
    candidates: list[ProvisionPlan] = []
    reasons: list[InfeasibleError | ConfigError] = []
    for index, gpu_type in enumerate(types):
        try:
            placed = _one_type(policy, workloads, gpu_type, index, rules.max_batch)
        except (InfeasibleError, ConfigError) as error:
            reasons.append(error)
            continue
        gpus = predict(placed, workloads, types, rules)
        candidates.append(ProvisionPlan(policy, gpus, violations_of(gpus), None, quality))
    if not candidates:
        raise reasons[0]
    return min(candidates, key=lambda plan: (bool(plan.violations), plan.usd_per_hour))


def followed(
    running: Sequence[RunningGpu],
    workloads: Sequence[Workload],
    types: Sequence[GpuType],
    rules: Rules | None = None,
    max_migrations: int = 0,
) -> ProvisionPlan:
    """A plan for today's services that moves as little as possible of the running one; see :func:`replan.follow`.

    Raises:
        InfeasibleError: A service can be served on none of the types, or the GPUs there are do not suffice.
        ConfigError: As :func:`provision`.
    """
    rules = rules or Rules()
    _check("best", workloads, types)
    gpus = predict(follow(running, workloads, types, rules, max_migrations), workloads, types, rules)
    bound = best.volume_bound(workloads, types, rules)
    quality = weakest([Quality.MODELLED, *(gpu_type.profile.quality for gpu_type in types)])
    return ProvisionPlan("follow", gpus, violations_of(gpus), bound, quality)


def lower_bound(workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules) -> PlanBound:
    """What no plan costs less than, services uncut where they can be: the baseline of policies that prove nothing.

    Exact for a few services; the sum of the shares needed alone for many.

    Raises:
        InfeasibleError: A service can be served on none of the types.
        ConfigError: As :func:`provision`.
    """
    uncut = replace(rules, max_replicas=1)
    if len(workloads) <= SERVICES_MAX:
        try:
            return best.plan(workloads, types, uncut).bound
        except InfeasibleError:
            return best.plan(workloads, types, rules).bound
    return best.volume_bound(workloads, types, rules)


def _one_type(
    policy: str, workloads: Sequence[Workload], gpu_type: GpuType, index: int, max_batch: int
) -> list[Placed]:
    plan = igniter.plan if policy == "igniter" else BASELINES[policy]
    placed = [Placed(index, shares) for shares in plan(workloads, gpu_type.profile, max_batch) if shares]
    if gpu_type.available is not None and len(placed) > gpu_type.available:
        raise InfeasibleError(
            f"{policy} needs {len(placed)} {gpu_type.name}, but there are {gpu_type.available}",
            binding=f"number of {gpu_type.name}",
            nearest={"gpus": len(placed)},
            hint="raise `available` in the fleet, or let preset best choose",
        )
    return placed


def _check(policy: str, workloads: Sequence[Workload], types: Sequence[GpuType]) -> None:
    if policy not in POLICIES:
        raise ConfigError("no such provisioning policy", got=policy, expected=", ".join(POLICIES))
    if not types:
        raise ConfigError("the fleet has no GPU type", expected="at least one", hint="add one under fleet.gpus")
    names = [workload.id for workload in workloads]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise ConfigError("two services have the same name", got=twice)
