"""Plans for a series of demands: each period follows the plan before it.

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

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.plan_change import PlanDifference, RunningGpu
from joulery.domain.gpu.provisioning import ProvisionPlan, Workload
from joulery.policies.placement.provisioning.difference import difference, running_of
from joulery.policies.placement.provisioning.gpu_shares import GpuType
from joulery.policies.placement.provisioning.options import Rules
from joulery.policies.placement.provisioning.planner import followed, provision

_S_PER_H = 3600.0


class Period(NamedTuple):
    """A period of constant demand.

    Attributes:
        from_s, until_s: Its begin and end, seconds from the start of the series.
        rates_rps: Requests a second by service; 0 for none.
    """

    from_s: float
    until_s: float
    rates_rps: Mapping[str, float]

    @property
    def hours(self) -> float:
        """Its length, hours."""
        return (self.until_s - self.from_s) / _S_PER_H


@dataclass(frozen=True, slots=True)
class PlannedPeriod:
    """A period and its plan.

    Attributes:
        period: The period with its demand.
        plan: Its plan; without GPUs where there is no demand.
        change: Changes from the period before; None for the first.
    """

    period: Period
    plan: ProvisionPlan
    change: PlanDifference | None

    @property
    def migrations(self) -> int:
        """Processes that run in the period before and in this one, on different GPUs."""
        return 0 if self.change is None else self.change.migrations


@dataclass(frozen=True, slots=True)
class SeriesPlan:
    """Plans for a whole series of demands.

    Attributes:
        periods: The periods, in order.
        peak: The plan for every service's highest rate at once, to compare with.
    """

    periods: tuple[PlannedPeriod, ...]
    peak: ProvisionPlan

    @property
    def usd(self) -> float:
        """Cost of the series, period by period."""
        return math.fsum(each.plan.usd_per_hour * each.period.hours for each in self.periods)

    @property
    def peak_usd(self) -> float:
        """Cost of keeping the peak's fleet all the time."""
        return self.peak.usd_per_hour * math.fsum(each.period.hours for each in self.periods)

    @property
    def bound_usd(self) -> float:
        """Lower bound on the cost of any plan within the SLOs of every period; 0 where no period has a bound."""
        return math.fsum(
            each.plan.bound.usd_per_hour * each.period.hours for each in self.periods if each.plan.bound is not None
        )

    @property
    def migrations(self) -> int:
        """Migrations over all periods."""
        return sum(each.migrations for each in self.periods)


def periods_of(steps: Mapping[str, Sequence[tuple[float, float]]], lasts_s: float | None = None) -> tuple[Period, ...]:
    """The periods between changes of demand.

    Args:
        steps: ``(from_s, rate_rps)`` by service, from 0 s on, in order; one entry for a constant rate.
        lasts_s: End of the series; when None, the last period is as long as the one before it (an hour, if it is the
            only one).

    Raises:
        ConfigError: The series ends before its last step begins.
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
        policy: Policy of the first period, of the peak, and of fresh plans to compare with.
        workloads: The services, at their highest rates.
        periods: The demands.
        types, rules: As for :func:`~joulery.policies.placement.provisioning.planner.provision`.
        max_migrations: Most processes that may migrate from one period to the next, to release GPUs.

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
    """The plan of a period that follows ``before``, and the changes; None for the first."""
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
