"""Plan a site: choose its preset and the planner, compare with other policies and with the running plan.

A site that names no preset is planned with joint if it has a setting that asks for joint (such as an objective in watts
or grams), else with best. Preset best uses the fewest GPUs, which is the cheapest fleet in rent; joint plans often have
more GPUs at lower clocks. The default therefore depends on the site, and the first line of the plan states the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from joulery.app.planning.prices import priced
from joulery.app.planning.shares import ShareRequest, share_request
from joulery.config.parsing.problem import nearest
from joulery.config.services import ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.plan_change import PlanDifference
from joulery.domain.gpu.plan_moves import PlanMoves
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.domain.json_numbers import known_number
from joulery.policies.placement.provisioning.difference import difference, running_of
from joulery.policies.placement.provisioning.planner import POLICIES, followed, lower_bound, provision
from joulery.policies.placement.provisioning.series import PlannedPeriod, periods_of, plan_series
from joulery.policies.placement.provisioning.series import SeriesPlan as SeriesPlan
from joulery.store.plan_documents import Plan, comparison_document, difference_document, document_of
from joulery.store.plans import read_plan

if TYPE_CHECKING:  # a plan of shares needs none of them
    from joulery.policies.placement.joint.day import DayPlan as DayPlan
    from joulery.policies.placement.joint.looser_slos import LooserSlo
    from joulery.sim.placement.plan_judge import PlanVerdict

SERIES_SCHEMA = "joulery.plan-series/1"
JOINT_PRESET, LANGUAGE_PRESET = "joint", "language"
LAYOUT_PRESETS = ("columns", "clover")
"""Presets that plan layouts; layouts and stages are imported on use, for a plan of shares needs neither."""
STAGE_PRESETS = ("muserve", "best")
"""Presets that plan pipeline stages."""
PRESETS = tuple(dict.fromkeys((*POLICIES, *STAGE_PRESETS, *LAYOUT_PRESETS, JOINT_PRESET, LANGUAGE_PRESET)))
"""Every preset."""
COMPARED = tuple(dict.fromkeys((*POLICIES, *STAGE_PRESETS, JOINT_PRESET, "knobs")))
"""Names that some kind of plan can be compared with."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of planning, in addition to the site file.

    Attributes:
        preset: Policy; None for the site's.
        compare: Other policies to plan with.
        running: Plan file of the running plan.
        follow: Whether to keep the running plan's processes in place, as far as SLOs allow.
        max_migrations: Processes that ``follow`` may migrate to release GPUs.
        max_moves: Instances that a joint plan may start, stop or change against the running one; the site's when None.
        g_per_kwh: Carbon intensity for layouts and joint plans; the site's own when None.
        objective: What a joint plan minimises; the site's when None.
        lock: Knobs that a joint plan leaves alone.
        slo_prices: Whether to compute the savings from longer SLOs; for joint plans.
    """

    preset: str | None = None
    compare: tuple[str, ...] = ()
    running: Path | None = None
    follow: bool = False
    max_migrations: int = 0
    max_moves: int | None = None
    g_per_kwh: float | None = None
    objective: str | None = None
    lock: tuple[str, ...] = ()
    slo_prices: bool = False


@dataclass(frozen=True, slots=True)
class SitePlan:
    """A plan and what it is compared with.

    Attributes:
        plan: The plan.
        others: Plans of the policies to compare with.
        difference: Changes against the running plan; None without one.
        margin_ratio: Safety margin that presets best and joint kept on latencies and demands; None for others.
        verdict: Result of simulating a joint plan; None where no simulation was run.
        uncovered_ratio: Error that the profiles report (1 measurement in 20 took so much longer than predicted) where
            the margin of the plan does not cover it; 0 where it does.
        moves: Changes of a joint plan against the running one; None without one.
        why_preset: Reason why joulery chose the preset; empty where the user chose it, or where it is the default.
        looser_slos: Savings from longer SLOs; empty where they were not requested.
    """

    plan: Plan
    others: tuple[Plan, ...] = ()
    difference: PlanDifference | None = None
    margin_ratio: float | None = None
    verdict: PlanVerdict | None = None
    uncovered_ratio: float = 0.0
    moves: PlanMoves | None = None
    why_preset: str = ""
    looser_slos: tuple[LooserSlo, ...] = ()

    @property
    def violates(self) -> bool:
        """Whether the plan is predicted, or was simulated, to violate an SLO."""
        return bool(getattr(self.plan, "violations", ())) or bool(self.verdict is not None and self.verdict.violated)

    def document(self) -> dict[str, Any]:
        """The plan and its comparisons as one JSON object."""
        document = document_of(self.plan)
        if self.why_preset:
            document["why_preset"] = self.why_preset
        if self.margin_ratio is not None:
            document["margin_ratio"] = self.margin_ratio
        if self.uncovered_ratio > 0:
            document["uncovered_error_ratio"] = known_number(self.uncovered_ratio)
        if self.others:
            document["compare"] = comparison_document(self.others)
        if self.difference is not None:
            document["difference"] = difference_document(self.difference)
        if self.moves is not None:
            moves = dataclasses.asdict(self.moves)
            document["moves"] = {"moves": self.moves.moves, **moves, "same_gpu": list(self.moves.same_gpu)}
        if self.looser_slos:
            document["looser_slos"] = [
                each._asdict() | {"saved_w": known_number(each.saved_w)} for each in self.looser_slos
            ]
        if self.verdict is not None:
            document["simulation"] = {
                "truth": self.verdict.truth,
                "seeds": self.verdict.seeds,
                **({"layouts": self.verdict.layouts} if self.verdict.layouts else {}),
                "power_w": self.verdict.power_w,
                "tail_ratio": {name: known_number(ratio) for name, ratio in self.verdict.tail_ratio.items()},
                "violations": list(self.verdict.violated),
            }
        return document


class ChosenPreset(NamedTuple):
    """Preset that a site is planned with, and the reason for it.

    Attributes:
        name: The preset.
        why: Reason why joulery chose it; empty where the user chose it, or where it is the default.
    """

    name: str
    why: str = ""


def chosen_preset(
    site: Site, stated: str | None = None, objective: str | None = None, *, shares: bool = False
) -> ChosenPreset:
    """Choose the preset to plan a site with.

    Args:
        site: The site.
        stated: The preset that the command names; None for none.
        objective: The objective that the command names; None for the site's.
        shares: Whether the command needs a feature that only presets of shares have.
    """
    if stated is not None:
        return ChosenPreset(stated)
    if site.plan.language is not None and not site.services:
        return ChosenPreset(LANGUAGE_PRESET)
    if "preset" in site.plan.model_fields_set or site.plan.pipelines is not None:
        return ChosenPreset(site.plan.preset)
    why = "" if shares else _wanted(site, objective)
    if not why:
        return ChosenPreset(site.plan.preset)
    return ChosenPreset(JOINT_PRESET, f"preset joint, because {why}; --preset best for fewest GPUs")


def _wanted(site: Site, objective: str | None) -> str:
    """Setting of the site or of the command that asks for preset joint; empty for none."""
    if not site.services or not site.fleet.gpus:
        return ""
    plan, choice = site.plan, any(service.variants for service in site.services)
    if choice:
        return "services list variants"
    if any(gpu.measurements is not None for gpu in site.fleet.gpus):
        return "fleet.gpus has measurements of slices"
    known = objective or (plan.objective if "objective" in plan.model_fields_set else None)
    if known is not None:
        source = "--objective" if objective is not None else "plan.objective"
        return "" if known == "cost" else f"{source} is {known}"  # in dollars nothing beats preset best
    if plan.power_cap_w is not None:
        return "plan.power_cap is stated"
    if plan.carbon_cap_g_per_hour is not None:
        return "plan.carbon_cap is stated"
    if any(gpu.host_w > 0 for gpu in site.fleet.gpus):
        return "fleet.gpus states host watts"
    return ""


def plan_site(site: Site, options: PlanOptions | None = None) -> SitePlan:
    """Plan the services of a site on its fleet.

    A site that names no preset is planned with best, or with joint where it has a setting that asks for joint
    (:func:`chosen_preset`). Preset ``language`` (and any site with ``plan.language`` and no
    services) plans language models; presets ``columns`` and ``clover`` plan layouts, ``muserve`` (and any preset of a
    site with ``plan.pipelines``) pipeline stages, every other policy shares of GPUs.

    Raises:
        ConfigError: The site lacks a setting that the plan needs, or an option does not fit the kind of plan.
        DataError: A profile, a score database or the running plan cannot be read.
        InfeasibleError: No plan is within the SLOs.
    """
    options = options or PlanOptions()
    preset, why = chosen_preset(site, options.preset, options.objective, shares=options.follow)
    if preset == JOINT_PRESET:
        return replace(_plan_jointly(site, options), why_preset=why)
    if options.lock or options.objective is not None or options.slo_prices:
        flag = "--lock" if options.lock else "--slo-prices" if options.slo_prices else "--objective"
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
        _check_presets("pipelines", STAGE_PRESETS, preset, options.preset, options.compare)
        from joulery.app.planning.stages import plan_stages, stage_request

        staged = stage_request(priced(site))
        plan = plan_stages(staged, preset)
        return SitePlan(plan, _others(plan, options, lambda policy: plan_stages(staged, policy)))
    _check_presets("shares of GPUs", POLICIES, preset, options.preset, options.compare)
    return _plan_shares(share_request(site), preset, options)


def _check_presets(
    kind: str, known: Sequence[str], preset: str, stated: str | None, compare: Sequence[str] = ()
) -> None:
    """Check that presets make plans of one kind, before planning.

    Raises:
        ConfigError: A preset does not; the error names its flag or key.
    """
    pairs = [("plan.preset" if stated is None else "--preset", preset), *(("--compare", name) for name in compare)]
    for pointer, name in pairs:
        if name and name not in known:
            there = name in PRESETS
            near = nearest(name, known if there else PRESETS)
            raise ConfigError(
                f"no such preset for {kind}" if there else "no such preset",
                pointer=pointer,
                got=name,
                expected=", ".join(known if there else PRESETS),
                hint=f"did you mean {near}?" if near else "",
            )


def plan_site_series(
    site: Site, preset: str | None, max_migrations: int, loads: Path | None = None
) -> SeriesPlan | DayPlan:
    """Plan each period of a site whose services have ``rates``, or of a file of loads.

    Args:
        site: The site.
        preset: Policy; None for the site's.
        max_migrations: Processes that may migrate from one period to the next, with presets of shares.
        loads: A CSV file of loads over time; None for the services' rates.

    Raises:
        ConfigError: No service has ``rates``, or the site lacks a setting that the plan needs.
        DataError: The file of loads cannot be read.
        InfeasibleError: For some period, no plan is within the SLOs.
    """
    stated, preset = preset, chosen_preset(site, preset, shares=max_migrations > 0).name
    steps = {
        service.name: [(step.from_s, step.rate_rps) for step in service.rates] or [(0.0, service.rate_rps or 0.0)]
        for service in site.services
    }
    intensity: tuple[tuple[float, float], ...] = ()
    if loads is not None:
        from joulery.app.planning.load_series import read_loads

        read = read_loads(loads, {name: max(rate for _, rate in mine) for name, mine in steps.items()})
        steps, intensity = read.steps, read.g_per_kwh
        most = {name: max(rate for _, rate in mine) for name, mine in steps.items()}
        site = site.model_copy(update={"services": tuple(_at_rate(one, most[one.name]) for one in site.services)})
    if all(len(mine) == 1 for mine in steps.values()):
        raise ConfigError(
            "no service states how its rate changes",
            pointer="services",
            expected="rates: [{from: 0 s, rate: 40 /s}, {from: 8 h, rate: 90 /s}]",
        )
    if preset == JOINT_PRESET:
        from joulery.app.planning.load_series import plan_joint_series

        return plan_joint_series(site, steps, intensity)
    _check_presets("series", (*POLICIES, JOINT_PRESET), preset, stated)
    request = share_request(site)
    return plan_series(
        preset,
        request.workloads,
        periods_of(steps, site.plan.lasts_s),
        request.types,
        request.rules,
        max_migrations=max_migrations,
    )


def _at_rate(service: ServiceConfig, rate_rps: float) -> ServiceConfig:
    """The service with a planned rate; unchanged for a rate of 0."""
    return service.model_copy(update={"rate_rps": rate_rps, "rates": ()}) if rate_rps > 0 else service


def series_document(series: SeriesPlan | DayPlan) -> dict[str, Any]:
    """The plans of all periods as one JSON object."""
    if not isinstance(series, SeriesPlan):
        from joulery.app.planning.load_series import day_document

        return day_document(series, SERIES_SCHEMA)
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
    """Make the plans of the policies to compare with; the plan itself is reused."""
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
    """Plan with preset joint.

    Raises:
        ConfigError: A flag or section does not apply to this preset.
        InfeasibleError: No plan is within the SLOs.
    """
    from joulery.app.planning.joint import plan_joint_site

    if site.plan.pipelines is not None:
        raise ConfigError("preset joint plans shares of GPUs", pointer="plan.pipelines", hint="plan with preset best")
    moves = site.plan.moves if options.max_moves is None else options.max_moves
    running = None if options.running is None else _running_joint(options.running)
    joint = plan_joint_site(
        site,
        options.objective,
        options.g_per_kwh,
        options.lock,
        options.compare,
        running=running,
        max_moves=moves,
        slo_prices=options.slo_prices,
    )
    made = SitePlan(joint.plan, joint.others, None, joint.margin_ratio, joint.verdict, moves=joint.moves)
    return replace(made, looser_slos=joint.looser_slos)


def _running_joint(file: Path) -> ProvisionPlan:
    """Read the running joint plan.

    Raises:
        DataError: The file is not a plan of preset joint.
    """
    plan = read_plan(file).plan()
    if not isinstance(plan, ProvisionPlan) or plan.certificate is None:
        raise DataError(
            f"a joint plan follows a joint plan, this is one of {plan.policy}",
            file=str(file),
            hint="write one with: joulery plan SITE --preset joint --out FILE",
        )
    return plan


def _plan_language_models(site: Site, options: PlanOptions) -> SitePlan:
    """Plan language models.

    Raises:
        ConfigError: A flag does not apply to language models.
        InfeasibleError: No plan is within the SLOs.
    """
    from joulery.app.planning.language import plan_language_models

    for flag, given in (("--compare", options.compare), ("--running", options.running)):
        if given:
            raise ConfigError(f"plans of language models take no {flag}", pointer=flag, hint="leave it out")
    return SitePlan(plan_language_models(site, options.g_per_kwh))
