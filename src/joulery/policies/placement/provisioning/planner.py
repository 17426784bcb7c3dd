"""Name a policy, get a plan with its predictions and SLO violations; follow a running plan; plan a series of demands.

A fleet planned for the peak idles at night; a fleet planned afresh for every period migrates everything at each step.
In a series each period follows the plan before it (:func:`~joulery.policies.placement.provisioning.replan.follow`):
processes are resized in place, and at most ``max_migrations`` of them migrate to release GPUs. A fresh plan replaces it
where it is cheaper and migrates no more. Each period's plan is within the SLOs at that period's rates, with headroom
for random arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from joulery.domain.errors import ConfigError, InfeasibleError
from joulery.domain.gpu.plan_change import PlanDifference, RunningGpu
from joulery.domain.gpu.provisioning import PlanBound, PlannedGpu, ProvisionPlan, Violation, Workload
from joulery.domain.quality import Quality, weakest
from joulery.policies.placement.provisioning import best, igniter
from joulery.policies.placement.provisioning.baselines import BASELINES
from joulery.policies.placement.provisioning.column_generation import Effort
from joulery.policies.placement.provisioning.exact import SERVICES_MAX
from joulery.policies.placement.provisioning.options import may_use, only_spot
from joulery.policies.placement.provisioning.predict import (
    GpuType,
    Placed,
    on_hosts,
    predict,
    shared_domains_of,
    shortages_of,
    violations_of,
)
from joulery.policies.placement.provisioning.replan import difference, follow, running_of
from joulery.policies.placement.provisioning.rules import FailureDomain, Rules

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
        gpus, violations = _predicted(solution.gpus, workloads, types, rules)
        violations = (*violations, *shortages_of(gpus, types))
        return ProvisionPlan("best", gpus, violations, solution.bound, quality)
    candidates: list[ProvisionPlan] = []
    reasons: list[InfeasibleError | ConfigError] = []
    for index, gpu_type in enumerate(types):
        barred = next((workload for workload in workloads if not may_use(workload, gpu_type)), None)
        if barred is not None:
            reasons.append(only_spot(barred))
            continue
        try:
            placed = _one_type(policy, workloads, gpu_type, index, rules.max_batch)
        except (InfeasibleError, ConfigError) as error:
            reasons.append(error)
            continue
        gpus, violations = _predicted(placed, workloads, types, rules)
        candidates.append(ProvisionPlan(policy, gpus, violations, None, quality))
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
    placed = follow(running, workloads, types, rules, max_migrations)
    gpus, violations = _predicted(placed, workloads, types, rules)
    bound = best.volume_bound(workloads, types, rules)
    quality = weakest([Quality.MODELLED, *(gpu_type.profile.quality for gpu_type in types)])
    return ProvisionPlan("follow", gpus, violations, bound, quality)


def _predicted(
    placed: Sequence[Placed], workloads: Sequence[Workload], types: Sequence[GpuType], rules: Rules
) -> tuple[tuple[PlannedGpu, ...], tuple[Violation, ...]]:
    """The GPUs of a plan, on hosts where they matter, and what is predicted to be violated."""
    gpus = predict(placed, workloads, types, rules)
    if rules.domain is FailureDomain.HOST:
        gpus = on_hosts(gpus, types)
    return gpus, (*violations_of(gpus), *(shared_domains_of(gpus, types) if rules.apart else ()))


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


_S_PER_H = 3600.0


class Period(NamedTuple):
    """A stretch of constant demand.

    Attributes:
        from_s, until_s: When, seconds from the start of the series.
        rates_rps: Requests a second by service; 0 for none.
    """

    from_s: float
    until_s: float
    rates_rps: Mapping[str, float]

    @property
    def hours(self) -> float:
        """How long it lasts."""
        return (self.until_s - self.from_s) / _S_PER_H


@dataclass(frozen=True, slots=True)
class PlannedPeriod:
    """A period and its plan.

    Attributes:
        period: When, and how much.
        plan: What runs; no GPUs where nothing is asked for.
        change: Against the period before; None for the first.
    """

    period: Period
    plan: ProvisionPlan
    change: PlanDifference | None

    @property
    def migrations(self) -> int:
        """Processes that run before and in it, on different GPUs."""
        return 0 if self.change is None else self.change.migrations


@dataclass(frozen=True, slots=True)
class SeriesPlan:
    """Plans for a whole series of demands.

    Attributes:
        periods: In order.
        peak: The plan for every service's highest rate at once, to compare with.
    """

    periods: tuple[PlannedPeriod, ...]
    peak: ProvisionPlan

    @property
    def usd(self) -> float:
        """What the series costs, period by period."""
        return math.fsum(each.plan.usd_per_hour * each.period.hours for each in self.periods)

    @property
    def peak_usd(self) -> float:
        """What it costs to keep the peak's fleet all the time."""
        return self.peak.usd_per_hour * math.fsum(each.period.hours for each in self.periods)

    @property
    def bound_usd(self) -> float:
        """No plan within the SLOs of every period costs less; 0 where no period has a bound."""
        return math.fsum(
            each.plan.bound.usd_per_hour * each.period.hours for each in self.periods if each.plan.bound is not None
        )

    @property
    def migrations(self) -> int:
        """Migrations over all periods."""
        return sum(each.migrations for each in self.periods)


def periods_of(steps: Mapping[str, Sequence[tuple[float, float]]], lasts_s: float | None = None) -> tuple[Period, ...]:
    """The stretches between any two changes of demand.

    Args:
        steps: ``(from_s, rate_rps)`` by service, from 0 s on, in order; one entry for a constant rate.
        lasts_s: When the series ends; the last stretch lasts as long as the one before it (an hour, if it is the only
            one) when None.

    Raises:
        ConfigError: It ends before its last step begins.
    """
    edges = sorted({from_s for mine in steps.values() for from_s, _ in mine})
    end_s = lasts_s if lasts_s is not None else edges[-1] + (edges[-1] - edges[-2] if len(edges) > 1 else _S_PER_H)
    if not end_s > edges[-1]:
        raise ConfigError(
            "the series of rates ends before its last step begins",
            got=f"{end_s:g} s",
            expected=f"more than {edges[-1]:g} s",
        )
    return tuple(
        Period(begin, until, {name: _rate_at(mine, begin) for name, mine in steps.items()})
        for begin, until in zip(edges, [*edges[1:], end_s], strict=True)
    )


def _rate_at(steps: Sequence[tuple[float, float]], at_s: float) -> float:
    return [rate for from_s, rate in steps if from_s <= at_s][-1]


def plan_series(
    policy: str,
    workloads: Sequence[Workload],
    periods: Sequence[Period],
    types: Sequence[GpuType],
    rules: Rules | None = None,
    *,
    max_migrations: int = 0,
) -> SeriesPlan:
    """A plan for every period.

    Args:
        policy: Plans the first period, the peak, and fresh plans to compare with.
        workloads: The services, at their highest rates.
        periods: The demands.
        types, rules: As for :func:`~joulery.policies.placement.provisioning.planner.provision`.
        max_migrations: How many processes may move from one period to the next, to give GPUs back.

    Raises:
        InfeasibleError: No plan of some period is within the SLOs.
        ConfigError: As ``provision``.
    """
    rules = rules or Rules()
    found: list[PlannedPeriod] = []
    for period in periods:
        now = [replace(each, rate_rps=rate) for each in workloads if (rate := period.rates_rps[each.id]) > 0]
        before = running_of(found[-1].plan.gpus) if found else ()
        plan, change = _next(policy, now, types, rules, before, max_migrations, first=not found)
        found.append(PlannedPeriod(period, plan, change))
    return SeriesPlan(tuple(found), provision(policy, workloads, types, rules))


def _next(
    policy: str,
    now: Sequence[Workload],
    types: Sequence[GpuType],
    rules: Rules,
    before: tuple[RunningGpu, ...],
    max_migrations: int,
    *,
    first: bool,
) -> tuple[ProvisionPlan, PlanDifference | None]:
    """The plan of a period that follows on ``before``, and what changes."""
    if not now:
        nothing = ProvisionPlan(policy, ())
        return nothing, None if first else difference(before, ())
    fresh = provision(policy, now, types, rules)
    if first:
        return fresh, None
    changed = difference(before, running_of(fresh.gpus))
    if not before:
        return fresh, changed
    follow = followed(before, now, types, rules, max_migrations)
    if changed.migrations <= max_migrations and fresh.usd_per_hour < follow.usd_per_hour and not fresh.violations:
        return fresh, changed
    return replace(follow, bound=fresh.bound or follow.bound), difference(before, running_of(follow.gpus))
