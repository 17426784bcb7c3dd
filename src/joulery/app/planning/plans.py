"""Plan a site: choose the planner that its preset names, compare with other policies and with the running plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from joulery.app.planning.prices import priced
from joulery.app.planning.shares import ShareRequest, share_request
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.plan_change import PlanDifference
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.policies.placement.provisioning.planner import (
    PlannedPeriod,
    followed,
    lower_bound,
    periods_of,
    plan_series,
    provision,
)
from joulery.policies.placement.provisioning.planner import SeriesPlan as SeriesPlan
from joulery.policies.placement.provisioning.replan import difference, running_of
from joulery.sim.placement.plan_judge import PlanVerdict
from joulery.store.plan_documents import Plan, comparison_document, difference_document, document_of, finite
from joulery.store.plans import read_plan

SERIES_SCHEMA = "joulery.plan-series/1"
LAYOUT_PRESETS = ("columns", "clover")
LANGUAGE_PRESET = "language"
"""Presets that plan layouts; layouts and stages are imported on use, for a plan of shares needs neither."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How to plan, beside what the site says.

    Attributes:
        preset: Policy; None for the site's.
        compare: Other policies to plan with.
        running: Plan file of what runs now.
        follow: Keep the running plan's processes where they are, as far as SLOs allow.
        max_migrations: Processes that ``follow`` may migrate to release GPUs.
        g_per_kwh: Carbon intensity for layouts and joint plans; the site's own when None.
        objective: What a joint plan minimises; the site's when None.
        lock: Knobs that a joint plan leaves alone.
    """

    preset: str | None = None
    compare: tuple[str, ...] = ()
    running: Path | None = None
    follow: bool = False
    max_migrations: int = 0
    g_per_kwh: float | None = None
    objective: str | None = None
    lock: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SitePlan:
    """A plan and what it is compared with.

    Attributes:
        plan: The plan.
        others: Plans of the policies to compare with.
        difference: What changes against the running plan; None without one.
        margin_ratio: Safety margin that presets best and joint kept on latencies and demands; None for others.
        verdict: What a simulation saw of a joint plan; None where none was run.
        uncovered_ratio: Error that the profiles report of themselves (1 measurement in 20 took so much longer than
            predicted) and that the plan does not cover by its margin; 0 where it does.
    """

    plan: Plan
    others: tuple[Plan, ...] = ()
    difference: PlanDifference | None = None
    margin_ratio: float | None = None
    verdict: PlanVerdict | None = None
    uncovered_ratio: float = 0.0

    @property
    def violates(self) -> bool:
        """Whether the plan is predicted, or was simulated, to violate an SLO."""
        return bool(getattr(self.plan, "violations", ())) or bool(self.verdict is not None and self.verdict.violated)

    def document(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        document = document_of(self.plan)
        if self.margin_ratio is not None:
            document["margin_ratio"] = self.margin_ratio
        if self.uncovered_ratio > 0:
            document["uncovered_error_ratio"] = finite(self.uncovered_ratio)
        if self.others:
            document["compare"] = comparison_document(self.others)
        if self.difference is not None:
            document["difference"] = difference_document(self.difference)
        if self.verdict is not None:
            document["simulation"] = {
                "truth": self.verdict.truth,
                "seeds": self.verdict.seeds,
                "power_w": self.verdict.power_w,
                "tail_ratio": {name: finite(ratio) for name, ratio in self.verdict.tail_ratio.items()},
                "violations": list(self.verdict.violated),
            }
        return document


def plan_site(site: Site, options: PlanOptions | None = None) -> SitePlan:
    """Plan the services of a site on its fleet.

    Preset ``language`` (and any site with ``plan.language`` and no services) plans language models; presets
    ``columns`` and ``clover`` plan layouts, ``muserve`` (and any preset of a site with ``plan.pipelines``)
    pipeline stages, every other policy shares of GPUs.

    Raises:
        ConfigError: The site says too little, or an option does not fit the kind of plan.
        DataError: A profile, a score database or the running plan cannot be read.
        InfeasibleError: No plan is within the SLOs.
    """
    options = options or PlanOptions()
    preset = options.preset or _preset_of(site)
    if preset == "joint":
        return _plan_jointly(priced(site), options)
    if options.lock or options.objective is not None:
        flag = "--lock" if options.lock else "--objective"
        raise ConfigError(f"{flag} goes with preset joint", pointer=flag, hint="add --preset joint")
    if preset == LANGUAGE_PRESET:
        return _plan_language_models(priced(site), options)
    if preset in LAYOUT_PRESETS:
        for flag, given in (("--compare", options.compare), ("--running", options.running)):
            if given:
                raise ConfigError(f"plans of layouts take no {flag}", pointer=flag, hint="plan with preset best")
        from joulery.app.planning.layouts import layout_request, plan_layouts

        return SitePlan(plan_layouts(preset, layout_request(priced(site), options.g_per_kwh)))
    if preset == "muserve" or site.plan.pipelines is not None:
        if options.running is not None:
            raise ConfigError("plans of pipelines cannot be compared with a running one", pointer="--running")
        from joulery.app.planning.stages import plan_stages, stage_request

        staged = stage_request(priced(site))
        plan = plan_stages(staged, preset)
        return SitePlan(plan, _others(plan, options, lambda policy: plan_stages(staged, policy)))
    return _plan_shares(share_request(site), preset, options)


def _preset_of(site: Site) -> str:
    """The preset that a site asks for; that of language models where it plans nothing else."""
    return LANGUAGE_PRESET if site.plan.language is not None and not site.services else site.plan.preset


def plan_site_series(site: Site, preset: str | None, max_migrations: int) -> SeriesPlan:
    """Plan each period of a site whose services have ``rates``.

    Raises:
        ConfigError: No service has, or the site says too little.
        InfeasibleError: No plan of some period is within the SLOs.
    """
    request = share_request(site)
    steps = {
        service.name: [(step.from_s, step.rate_rps) for step in service.rates] or [(0.0, service.rate_rps or 0.0)]
        for service in site.services
    }
    if all(len(mine) == 1 for mine in steps.values()):
        raise ConfigError(
            "no service says how its rate changes",
            pointer="services",
            expected="rates: [{from: 0 s, rate: 40 /s}, {from: 8 h, rate: 90 /s}]",
        )
    return plan_series(
        preset or site.plan.preset,
        request.workloads,
        periods_of(steps, site.plan.lasts_s),
        request.types,
        request.rules,
        max_migrations=max_migrations,
    )


def series_document(series: SeriesPlan) -> dict[str, Any]:
    """The plans of all periods as one JSON object."""
    return {
        "schema": SERIES_SCHEMA,
        "periods": [_period_document(each) for each in series.periods],
        "cost_usd": round(series.usd, 6),
        "peak_cost_usd": round(series.peak_usd, 6),
        "bound_usd": round(series.bound_usd, 6),
        "migrations": series.migrations,
        "moves": series.migrations,
        "violations": [
            {"from_s": each.period.from_s, "workload": violation.workload}
            for each in series.periods
            for violation in each.plan.violations
        ],
        "peak": document_of(series.peak),
    }


def _period_document(each: PlannedPeriod) -> dict[str, Any]:
    return {
        "from_s": each.period.from_s,
        "until_s": each.period.until_s,
        "rates_rps": dict(each.period.rates_rps),
        "plan": document_of(each.plan),
        "difference": None if each.change is None else difference_document(each.change),
    }


def _others(plan: Plan, options: PlanOptions, make: Callable[[str], Plan]) -> tuple[Plan, ...]:
    """The plans of the policies to compare with; the plan itself is not made again."""
    names = dict.fromkeys(name for name in options.compare if name)
    return tuple(plan if name == plan.policy else make(name) for name in names)


def _plan_shares(request: ShareRequest, preset: str, options: PlanOptions) -> SitePlan:
    def make(policy: str) -> ProvisionPlan:
        return provision(policy, request.workloads, request.types, request.rules)

    old = None if options.running is None else read_plan(options.running).running()
    if old is not None and options.follow:
        plan = followed(old, request.workloads, request.types, request.rules, options.max_migrations)
    else:
        plan = make(preset)
        if plan.bound is None:
            plan = replace(plan, bound=lower_bound(request.workloads, request.types, request.rules))
    changes = None if old is None else difference(old, running_of(plan.gpus))
    margin = request.rules.margin_ratio if plan.policy in ("best", "follow") else None
    uncovered = request.error_ratio if request.error_ratio > (margin or 0.0) else 0.0
    return SitePlan(plan, _others(plan, options, make), changes, margin, uncovered_ratio=uncovered)


def _plan_jointly(site: Site, options: PlanOptions) -> SitePlan:
    """A plan of preset joint.

    Raises:
        ConfigError: A flag or section does not go with it.
        InfeasibleError: No plan is within the SLOs.
    """
    from joulery.app.planning.joint import plan_joint_site

    if options.running is not None or site.plan.pipelines is not None:
        at = "--running" if options.running is not None else "plan.pipelines"
        raise ConfigError("preset joint plans shares of GPUs afresh", pointer=at, hint="plan with preset best")
    joint = plan_joint_site(site, options.objective, options.g_per_kwh, options.lock, options.compare)
    return SitePlan(joint.plan, joint.others, None, joint.margin_ratio, joint.verdict)


def _plan_language_models(site: Site, options: PlanOptions) -> SitePlan:
    """A plan of language models.

    Raises:
        ConfigError: A flag does not go with it.
        InfeasibleError: No plan is within the SLOs.
    """
    from joulery.app.planning.language import plan_language_models

    for flag, given in (("--compare", options.compare), ("--running", options.running)):
        if given:
            raise ConfigError(f"plans of language models take no {flag}", pointer=flag, hint="leave it out")
    return SitePlan(plan_language_models(site, options.g_per_kwh))
