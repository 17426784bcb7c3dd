"""A joint plan on the terminal: clocks and watts GPU by GPU, the bound, the simulation, the worth of changes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.domain.format import number, percent, si
from joulery.domain.gpu.optimum import PlanCertificate, PlanObjective
from joulery.domain.gpu.plan_moves import PlanMoves
from joulery.domain.gpu.provisioning import ProvisionPlan
from joulery.ui.reports.plan.shares_text import alike, pictures, usd, violations_view

if TYPE_CHECKING:
    from joulery.app.planning.plans import SitePlan

_WORTH_SHOWN = 6
"""Services whose further requests are priced in the explanation, the dearest first."""


def joint_view(made: SitePlan, plan: ProvisionPlan, explain: bool) -> list[RenderableType]:
    """The headline, the picture, the table, the simulation, the comparison; with ``explain`` the worth of changes."""
    certificate = plan.certificate
    assert certificate is not None
    parts: list[RenderableType] = [_headline(plan, certificate), Text(), *pictures(plan), Text(), _table(plan)]
    parts += [Text(), _powers(plan)]
    if made.moves is not None:
        parts.append(_moves(made.moves))
    simulated = _simulated(made, certificate)
    parts += [simulated] if simulated is not None else []
    if plan.violations:
        parts.append(violations_view(plan.violations))
    if explain:
        parts += [Text(), _explanation(plan, certificate)]
    if made.looser_slos:
        parts += [Text(), Text("\n".join(_looser(made, certificate)))]
    if made.others:
        parts += [Text(), _comparison([each for each in made.others if isinstance(each, ProvisionPlan)])]
    return parts


def joint_facts(made: SitePlan, plan: ProvisionPlan) -> tuple[list[str], list[str]]:
    """Sentences about a plan: objective, bound, watts and simulation; and what changes are worth."""
    certificate = plan.certificate
    assert certificate is not None
    parts = [_headline(plan, certificate), _powers(plan)]
    parts += [] if made.moves is None else [_moves(made.moves)]
    simulated = _simulated(made, certificate)
    parts += [] if simulated is None else [simulated]
    worth = [*_explanation(plan, certificate).plain.split("\n"), *_looser(made, certificate)]
    return [line for part in parts for line in part.plain.split("\n")], worth


def _looser(made: SitePlan, certificate: PlanCertificate) -> list[str]:
    """Savings of longer SLOs: the difference of two plans each, the largest first."""
    lines, none = [], []
    for each in sorted(made.looser_slos, key=lambda one: -one.saved):
        longer = f"{each.service}: {si(each.looser_s, 's')} instead of {si(each.slo_s, 's')}"
        if each.saved > 0:
            saved = value_text(certificate.objective, each.saved)
            watted = "" if certificate.objective.unit == "W" else f" ({watts(each.saved_w)})"
            lines.append(f"{longer} saves {'' if certificate.optimal else 'at least '}{saved}{watted}, planned again")
        else:
            none.append(each.service)
    if none:
        step = max(each.looser_s / each.slo_s for each in made.looser_slos) - 1
        shown = "nothing" if certificate.optimal else "nothing that is proven"
        lines.append(f"{percent(step)} more time for any one of {', '.join(none)} saves {shown}")
    return lines


def value_text(objective: PlanObjective, value: float) -> str:
    """A value of the objective with its unit: ``1,277 W``."""
    if objective.unit == "USD/h":
        return f"{usd(value)}/h"
    return watts(value) if objective.unit == "W" else f"{value:,.4g} {objective.unit}"


def watts(value: float) -> str:
    """Power with four digits: differences of a percent count here."""
    return f"{value:,.0f} W" if value >= 1000 else f"{value:.4g} W"


def _headline(plan: ProvisionPlan, certificate: PlanCertificate) -> Text:
    counts: dict[str, int] = {}
    for gpu in plan.gpus:
        counts[gpu.type] = counts.get(gpu.type, 0) + 1
    fleet = " + ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"
    grams = certificate.objective.carbon_g_per_hour(certificate.power_w, len(plan.gpus))
    carbon = "" if grams is None else f", {grams:,.4g} g CO2/h"
    text = Text(f"{plan.policy}: {fleet}, {watts(certificate.power_w)}{carbon}, {usd(plan.usd_per_hour)}/h; ")
    text.append(f"least {certificate.objective.name}; ")
    if plan.violations:
        text.append("not within the limits of the site", "bold red")
    else:
        text.append("every service within its SLO by the model", "green")
    bound = value_text(certificate.objective, certificate.bound)
    if not certificate.bound > 0 and not certificate.optimal:
        text.append(f"\n{certificate.method}", "dim")
        return text
    if not math.isnan(certificate.relaxed):
        below = f"{percent(certificate.gap_ratio)} below this one"
        proven = "this one is optimal within its choices" if certificate.optimal else below
        text.append(f"\nno plan has less than {bound}, {proven}; prices alone prove ", "dim")
        text.append(value_text(certificate.objective, certificate.relaxed), "dim")
    elif certificate.optimal:
        text.append(f"\noptimal within its choices; prices prove that no plan has less than {bound}", "dim")
    else:
        text.append(f"\nno plan has less than {bound}, {percent(certificate.gap_ratio)} below this one", "dim")
    text.append(f" ({certificate.method})", "dim")
    if certificate.limit_reached:
        text.append("\nthe solver reached its limit: this is the best plan so far, and more search may close the gap")
    return text


def _table(plan: ProvisionPlan) -> Table:
    shown = Table(box=None, pad_edge=False)
    for heading, justify in (
        *(("GPU", "right"), ("clock", "right"), ("service", "left"), ("model", "left"), ("share", "right")),
        *(("batch", "right"), ("rate", "right"), ("capacity", "right"), ("latency", "right"), ("limit", "right")),
        *(("process power", "right"), ("request power", "right")),
    ):
        shown.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for first, gpu, count in alike(plan.gpus):
        for at, each in enumerate(gpu.instances):
            replica = f"#{each.replica + 1}" if each.replicas > 1 and count == 1 else ""
            shown.add_row(
                "" if at else f"{first + 1}" if count == 1 else f"×{count}",
                "" if at or gpu.clock_set_mhz is None else f"{gpu.clock_set_mhz:.0f} MHz",
                each.workload + replica,
                each.model if math.isnan(each.accuracy_ratio) else f"{each.model} ({percent(each.accuracy_ratio)})",
                each.slice or f"{100 * each.share_ratio:g} %",
                str(each.batch) if each.processes == 1 else f"{each.processes} × {each.batch}",
                number(each.rate_rps, "/s"),
                number(each.provided_rps, "/s"),
                si(each.latency_s, "s"),
                si(each.limit_s, "s"),
                si(each.overhead_w, "W"),
                si(each.requests_w, "W"),
            )
    return shown


def _powers(plan: ProvisionPlan) -> Text:
    """Power by part."""
    idle_w = math.fsum(gpu.idle_w for gpu in plan.gpus)
    host_w = math.fsum(gpu.host_w for gpu in plan.gpus)
    there_w = math.fsum(each.overhead_w for gpu in plan.gpus for each in gpu.instances)
    requests_w = math.fsum(each.requests_w for gpu in plan.gpus for each in gpu.instances)
    return Text(
        f"modelled power: idle boards {watts(idle_w)}, hosts {watts(host_w)} as stated, processes without "
        f"requests {watts(there_w)}, requests {watts(requests_w)}"
    )


def _moves(moves: PlanMoves) -> Text:
    """Changes of the running plan."""
    return Text(
        f"{moves.moves} moves from the running plan: {moves.started} started, {moves.stopped} stopped, "
        f"{moves.changed} with another share or batch; {moves.opened} GPUs more, {moves.closed} fewer, "
        f"{moves.reclocked} at another clock"
    )


def _simulated(made: SitePlan, certificate: PlanCertificate) -> Text | None:
    verdict = made.verdict
    if verdict is None:
        return None
    off = verdict.power_w / certificate.power_w - 1
    text = Text(f"simulated on {verdict.truth}, {verdict.seeds} seeds")
    text.append(f", {verdict.layouts} GPUs that differ, those alike once: " if verdict.layouts else ": ")
    if verdict.violated:
        text.append(f"{', '.join(verdict.violated)} violate their SLO", "bold red")
    else:
        worst = max(verdict.tail_ratio, key=lambda name: verdict.tail_ratio[name])
        text.append("every SLO kept", "green")
        text.append(f", the nearest {worst} at {percent(verdict.tail_ratio[worst])} of its limit")
    text.append(f"; {watts(verdict.power_w)}, {abs(100 * off):.1f} % {'more' if off > 0 else 'less'} than modelled")
    return text


def _explanation(plan: ProvisionPlan, certificate: PlanCertificate) -> Text:
    """Binding constraints, and the worth of a change of each at the prices of the bound."""
    objective, lines = certificate.objective, []
    binding = plan.binding
    if binding is not None:
        lines.append(
            f"binding: {binding.what} of {binding.workload} on GPU {(binding.gpu or 0) + 1}, "
            f"{percent(binding.slack_ratio, 2)} slack"
        )
    unknown = sorted({each.workload for gpu in plan.gpus for each in gpu.instances if math.isnan(each.memory_bytes)})
    if unknown:
        lines.append(f"GPU memory is not checked for {', '.join(unknown)}: state services[].memory to have it checked")
    dearest = sorted(
        certificate.demand_price, key=lambda name: -certificate.demand_price[name] * certificate.rates_rps[name]
    )
    more = {name: len(names) - 1 for names in certificate.alike for name in names[:1]}
    others = {name for names in certificate.alike for name in names[1:]}
    labels = {name: f"{name}, or any of {more[name]} alike," if name in more else name for name in dearest}
    for name in [each for each in dearest if each not in others][:_WORTH_SHOWN]:
        price = certificate.demand_price[name]
        worth = value_text(objective, price * certificate.rates_rps[name] / 10)
        lines.append(f"a tenth more requests of {labels[name]} would cost about {worth}")
    for name, price in certificate.accuracy_price.items():
        if price > 0 and name not in others:
            worth = value_text(objective, price * certificate.rates_rps[name] / 100)
            lines.append(f"a point of accuracy of {labels[name]} less would save about {worth}")
    for name, price in certificate.pool_price.items():
        if price > 0:
            lines.append(f"one {name} more would save about {value_text(objective, price)}")
    if certificate.carbon_price > 0:
        worth = value_text(objective, 10 * certificate.carbon_price)
        lines.append(f"10 g/h more under the carbon cap would save about {worth}")
    elif certificate.power_price > 0:
        lines.append(
            f"100 W more under the cap would save about {value_text(objective, 100 * certificate.power_price)}"
        )
    lines.append("These are prices of the relaxation: they hold for small changes, in fractions of GPUs.")
    return Text("\n".join(lines))


def _comparison(plans: list[ProvisionPlan]) -> Table:
    """Plans side by side, the joint one last."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("plan", "GPUs", "power", "price", "objective", "against joint"):
        shown.add_column(heading, justify="left" if heading == "plan" else "right")
    last = plans[-1].certificate
    for plan in plans:
        certificate = plan.certificate
        if certificate is None or last is None:
            continue
        shown.add_row(
            plan.policy,
            str(len(plan.gpus)),
            watts(certificate.power_w),
            f"{usd(plan.usd_per_hour)}/h",
            value_text(certificate.objective, certificate.value),
            "" if plan is plans[-1] else f"{100 * (certificate.value / last.value - 1):+.1f} %",
        )
    return shown
