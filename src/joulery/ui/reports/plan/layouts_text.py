"""A plan of layouts on the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from joulery.domain.format import percent, si
from joulery.domain.gpu.layout_plan import LayoutBound, LayoutPlan


def layouts_view(plan: LayoutPlan, explain: bool) -> list[RenderableType]:
    """The plan for a terminal."""
    off = plan.gpus_off
    head = f"{plan.gpus_on} GPUs on" + (f", {off} of the baseline's switched off" if off else "")
    parts: list[RenderableType] = [Text(f"{plan.policy}: {head}", style="bold"), _layout_table(plan), Text()]
    parts += [_service_table(plan), Text()]
    if plan.bound is not None:
        parts.append(Text(bound_text(plan.bound, plan)))
    parts.append(Text("simulated request by request; savings against the most accurate variant on whole GPUs", "dim"))
    if explain:
        parts += [Text(), Text("why", style="bold"), *(Text(f"- {line}") for line in explanation(plan))]
    return parts


def _layout_table(plan: LayoutPlan) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("GPUs", justify="right")
    table.add_column("type")
    table.add_column("on its slices")
    for each in plan.layouts:
        clock = "" if each.clock_mhz is None else f" at {each.clock_mhz:.0f} MHz"
        many = len(plan.services) > 1
        placed = [
            f"{one.slice.partition('.')[0]} {one.service + ' ' if many else ''}{one.variant}" for one in each.instances
        ]
        table.add_row(str(each.count), each.gpu + clock, ", ".join(placed))
    return table


def _service_table(plan: LayoutPlan) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    names = ("service", "rate", "accuracy", "lost", "p95", "limit", "J a request", "saved", "same GPUs", "baseline")
    for name in names:
        table.add_column(name, justify="left" if name == "service" else "right", no_wrap=True)
    for each in plan.services:
        table.add_row(
            each.service,
            f"{each.rate_rps:g} /s",
            percent(each.accuracy_ratio, 2),
            f"{each.loss_points:.2f} pts",
            si(each.latency_s, "s"),
            si(each.limit_s, "s"),
            f"{each.energy_j:.1f}",
            percent(each.saving_ratio),
            percent(each.saving_same_gpus_ratio),
            f"{each.baseline.gpus} × {each.baseline.variant}",
        )
    return table


def bound_text(bound: LayoutBound, plan: LayoutPlan) -> str:
    """Largest improvement that any plan could bring."""
    return (
        f"no pool costs less than {percent(1 - bound.gap_ratio)} of this one (closed form); "
        f"{percent(1 - bound.corrected_gap_ratio)} with its latencies corrected by the trials; "
        f"{plan.boxes} relaxations, {plan.trials} trials"
    )


def explanation(plan: LayoutPlan) -> list[str]:
    """Binding constraints, and the cost of other numbers of GPUs; one sentence each."""
    power = plan.power_w
    lines = [f"{percent(plan.idle_w / power)} of {si(power, 'W')} is idle power of GPUs that are on: why so few are"]
    for each in plan.services:
        slack = 1 - each.latency_s / each.limit_s
        text = f"{each.service}: {percent(slack)} of the latency limit is left"
        if each.minimum_accuracy_ratio > 0:
            spare = 100 * (each.accuracy_ratio - each.minimum_accuracy_ratio)
            text += f", {spare:.2f} points above the accuracy asked for"
        lines.append(text)
    for other in plan.by_gpus:
        if other.gpus != plan.gpus_on:
            more = other.cost_w / plan.cost_w - 1
            lines.append(f"with {other.gpus} GPUs the best found costs {percent(more)} more")
    if plan.g_per_kwh is not None:
        lines.append(f"accuracy is weighed against carbon at {plan.g_per_kwh:g} g/kWh")
    return lines
