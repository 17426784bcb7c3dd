"""A plan of pipeline stages on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from joulery.domain.format import number, percent, si
from joulery.domain.gpu.pipeline_plan import PipelineGpu, PipelinePlan, PlannedPart
from joulery.ui.reports.plan.shares_text import usd


def pipeline_view(plan: PipelinePlan) -> RenderableType:
    """The headline, the GPUs, the services."""
    return Group(pipeline_headline(plan), Text(), _gpus(plan), Text(), _services(plan))


def pipeline_headline(plan: PipelinePlan) -> Text:
    """The headline of a plan: power, price, predicted SLO violations."""
    text = Text(f"{plan.policy}: {len(plan.gpus)} × {plan.gpus[0].type}, {usd(plan.usd_per_hour)}/h; ")
    text.append(
        f"{number(plan.power_w, 'W')} at the planned clocks, {plan.saving_ratio:.2f} x less than at full clock; "
    )
    if plan.violations:
        services = len(plan.violations)
        text.append(f"{services} service{'s' if services > 1 else ''} predicted to violate the SLO", "bold red")
    else:
        text.append("every service within its SLO", "green")
    text.append(f"\n{plan.quality.value}: predicted from clock profiles by a simulated workload", "dim")
    return text


def pipeline_violations(plan: PipelinePlan) -> Text:
    """Every predicted SLO violation, one a line."""
    return Text(
        "\n".join(
            f"{each.workload}: {percent(each.predicted, 2)} within the SLO, {percent(each.allowed)} required"
            for each in plan.violations
        ),
        "red",
    )


def pipeline_explanation(plan: PipelinePlan) -> Text:
    """Reasons for the plan."""
    tight = plan.binding
    lines = [
        f"groups: {plan.grouping}",
        f"placement: {plan.placement}; spread of sensitivity within devices {plan.scatter:.3g}",
        f"searched with {plan.simulated_requests:,} simulated requests",
    ]
    if tight is not None:
        slack = f"{100 * tight.slack_ratio:.2f} points" if tight.what == "attainment" else percent(tight.slack_ratio)
        lines.insert(0, f"binding: {tight.what} of {tight.workload}, {slack} slack")
    for at, gpu in enumerate(plan.gpus):
        bounds = f"a governor may set {gpu.clock_floor_mhz:.0f} to {gpu.clock_ceiling_mhz:.0f} MHz"
        idle = "nothing runs here" if not gpu.parts else bounds
        lines.append(f"GPU {at + 1}: {idle}; {si(gpu.free_bytes, 'B')} of memory free")
    return Text("\n".join(lines))


def pipeline_comparison(plans: Sequence[PipelinePlan]) -> Table:
    """Presets side by side."""
    table = _table("policy", "power", "saving", "scatter", "SLO violations")
    for plan in plans:
        violated = ", ".join(each.workload for each in plan.violations)
        table.add_row(
            plan.policy,
            number(plan.power_w, "W"),
            f"{plan.saving_ratio:.2f} x",
            f"{plan.scatter:.3g}",
            violated or "none",
        )
    return table


def part_name(part: PlannedPart) -> str:
    """Name of a part: ``chat``, ``chat 2/3`` for a stage, ``chat#2`` for a replica."""
    name = part.workload + (f"#{part.replica + 1}" if part.replicas > 1 else "")
    return name + (f" {part.stage + 1}/{part.stages}" if part.stages > 1 else "")


def _gpus(plan: PipelinePlan) -> Table:
    table = _table("GPU", "clock", "floor", "power", "full clock", "busy", "memory", "hosts (sensitivity)")
    for at, gpu in enumerate(plan.gpus):
        table.add_row(
            str(at + 1),
            f"{gpu.clock_mhz:.0f} MHz",
            f"{gpu.clock_floor_mhz:.0f}",
            number(gpu.power_w, "W"),
            number(gpu.full_power_w, "W"),
            percent(gpu.busy_ratio, 0),
            percent(1 - gpu.free_bytes / gpu.memory_bytes, 0),
            _hosts(gpu),
        )
    return table


def _hosts(gpu: PipelineGpu) -> str:
    return ", ".join(f"{part_name(part)} ({part.score:.2f})" for part in gpu.parts) or "nothing"


def _services(plan: PipelinePlan) -> Table:
    table = _table("service", "model", "sensitivity", "clusters", "runs as", "latency", "SLO", "in time", "required")
    violated = {each.workload for each in plan.violations}
    for each in plan.services:
        copies = f"{each.replicas} × " if each.replicas > 1 else ""
        stages = f"{each.stages} stage{'s' if each.stages > 1 else ''}"
        table.add_row(
            each.workload,
            each.model,
            f"{each.score:.2f}",
            str(each.clusters),
            f"{copies}{stages}" + (f" of {each.shards} GPUs" if each.shards > 1 else ""),
            si(each.latency_s, "s"),
            si(each.slo_s, "s"),
            percent(each.attainment_ratio, 2),
            percent(each.required_ratio),
            style="red" if each.workload in violated else None,
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    left = {"hosts (sensitivity)", "service", "model", "runs as", "policy", "SLO violations"}
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right")
    return table
