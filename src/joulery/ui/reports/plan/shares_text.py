"""A plan of shares on the terminal: GPUs as bars, processes in a table, the bound, comparisons, periods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from joulery.app.planning.plans import SeriesPlan
from joulery.domain.format import number, percent, si
from joulery.domain.gpu.plan_change import PlanDifference, ProcessChange
from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance, ProvisionPlan, Violation

BAR = 48
"""Width of the bar of a whole GPU, characters."""
_ALIKE_MIN = 3
"""Minimum number of equal GPUs that are shown as one."""
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#bab0ac")
"""Colours of models, in order of first appearance."""


def plan_view(plan: ProvisionPlan) -> RenderableType:
    """The headline, the picture and the table."""
    return Group(headline(plan), Text(), *pictures(plan), Text(), table(plan))


def headline(plan: ProvisionPlan) -> Text:
    """The headline of a plan: price, predicted SLO violations, distance to the lower bound."""
    counts: dict[str, int] = {}
    for gpu in plan.gpus:
        counts[gpu.type] = counts.get(gpu.type, 0) + 1
    fleet = " + ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"
    text = Text(f"{plan.policy}: {fleet}, {usd(plan.usd_per_hour)}/h; ")
    if plan.violations:
        services = len({each.workload for each in plan.violations})
        text.append(f"{services} service{'s' if services > 1 else ''} predicted to violate the SLO", "bold red")
    else:
        text.append("every service within its SLO", "green")
    if plan.bound is not None:
        text.append("\n")
        text.append_text(bound_text(plan))
    return text


def bound_text(plan: ProvisionPlan) -> Text:
    """The proven lower bound of the cost, as text."""
    bound = plan.bound
    assert bound is not None
    if plan.optimal:
        return Text(f"optimal: no plan costs less than {usd(bound.usd_per_hour)}/h ({bound.method})", "dim")
    gap = f", {percent(plan.gap_ratio)} below this plan" if plan.gap_ratio > 0 else ""
    return Text(f"no plan costs less than {usd(bound.usd_per_hour)}/h{gap} ({bound.method})", "dim")


def pictures(plan: ProvisionPlan) -> Iterable[Text]:
    """One bar per GPU, one segment per process; GPUs that are alike share a bar."""
    colors = model_colors(plan)
    for first, gpu, count in alike(plan.gpus):
        label = f"GPU {first + 1}" if count == 1 else f"{count} GPUs"
        text = Text(f"{label:>9} ", "bold")
        used = 0
        for each in gpu.instances:
            width = max(1, round(BAR * each.share_ratio))
            width = min(width, BAR - used)
            name = f" {each.workload}{_replica(each)} {each.slice or f'{100 * each.share_ratio:g}'}"
            text.append(name[:width].ljust(width), f"bold white on {colors[each.model]}")
            used += width
        text.append("░" * (BAR - used), "dim")
        text.append(f" {100 * gpu.share_ratio:5.1f} %  {gpu.clock_mhz:.0f} MHz  {si(gpu.power_w, 'W')}")
        if gpu.memory_bytes >= 0 and gpu.memory_limit_bytes > 0:
            text.append(f"  {gpu.memory_bytes / 1e9:.3g} of {gpu.memory_limit_bytes / 1e9:.3g} GB")
        if gpu.host is not None:
            text.append(f"  host {gpu.host + 1}")
        if gpu.clock_mhz < (gpu.clock_set_mhz or gpu.clock_max_mhz) - 0.5:
            text.append("  throttled", "yellow")
        yield text


def table(plan: ProvisionPlan) -> Table:
    """Table of every process: share, batch, parts of its latency, slack to the limit."""
    shown = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("GPU", "right"),
        ("service", "left"),
        ("model", "left"),
        ("share", "right"),
        ("batch", "right"),
        ("load", "right"),
        ("launch", "right"),
        ("compute", "right"),
        ("throttle", "right"),
        ("result", "right"),
        ("latency", "right"),
        ("limit", "right"),
        ("slack", "right"),
        ("serves", "right"),
        ("needs", "right"),
    ):
        shown.add_column(heading, justify=justify)  # type: ignore[arg-type]
    violated = {(each.gpu, each.workload) for each in plan.violations}
    for first, gpu, count in alike(plan.gpus):
        for at, each in enumerate(gpu.instances):
            parts = each.parts
            shown.add_row(
                "" if at else f"{first + 1}" if count == 1 else f"×{count}",
                each.workload + _replica(each),
                each.model,
                f"{100 * each.share_ratio:g} %",
                str(each.batch),
                *(
                    f"{1e3 * part:.2f}"
                    for part in (parts.load_s, parts.schedule_s, parts.active_s, parts.throttle_s, parts.feedback_s)
                ),
                si(each.latency_s, "s"),
                si(each.limit_s, "s"),
                f"{100 * each.slack_s / each.limit_s:.1f} %",
                number(each.throughput_rps, "/s"),
                number(each.rate_rps, "/s"),
                style="red" if (first, each.workload) in violated else None,
            )
    return shown


def alike(gpus: Sequence[PlannedGpu]) -> list[tuple[int, PlannedGpu, int]]:
    """Groups of GPUs alike but for service names: first index, GPU and count; GPUs of small groups one by one."""
    groups: dict[object, list[int]] = {}
    for index, gpu in enumerate(gpus):
        look = tuple(
            (e.model, e.slice, e.processes, e.share_ratio, e.batch, e.replicas, e.rate_rps, e.slo_s)
            for e in gpu.instances
        )
        groups.setdefault((gpu.type, gpu.host, look), []).append(index)
    shown: list[tuple[int, PlannedGpu, int]] = []
    for members in groups.values():
        if len(members) >= _ALIKE_MIN:
            shown.append((members[0], gpus[members[0]], len(members)))
        else:
            shown += [(index, gpus[index], 1) for index in members]
    return sorted(shown, key=lambda each: each[0])


def model_colors(plan: ProvisionPlan) -> dict[str, str]:
    """A colour for each model."""
    models = dict.fromkeys(each.model for gpu in plan.gpus for each in gpu.instances)
    return {model: COLORS[index % len(COLORS)] for index, model in enumerate(models)}


def violations_view(violations: Sequence[Violation]) -> Text:
    """Every predicted SLO violation, one a line."""
    lines = []
    for each in violations:
        if each.what == "latency":
            finding = f"a batch takes {si(each.predicted, 's')}, {si(each.allowed, 's')} is allowed"
        elif each.what == "throughput":
            finding = f"serves {number(each.predicted, '/s')}, {number(each.allowed, '/s')} come"
        elif each.what == "available":
            finding = (
                f"the plan has {each.predicted:.0f} GPUs of this type, {each.allowed:.0f} are available; "
                "no plan within the limit was found, and none was proven impossible"
            )
        elif each.what == "memory":
            finding = f"processes and standbys take {each.predicted / 1e9:.3g} GB of {each.allowed / 1e9:.3g} GB"
        elif each.what == "gpu":
            finding = f"{each.predicted:.0f} of its replicas share a GPU"
        elif each.what == "host":
            finding = f"replicas that share no host take {each.predicted:.0f} hosts, {each.allowed:.0f} are available"
        else:
            finding = f"shares come to {percent(each.predicted)} of the GPU"
        lines.append(f"{each.workload} on GPU {each.gpu + 1}: {finding}")
    return Text("\n".join(lines), "red")


def uncovered(error_ratio: float) -> Text:
    """A warning: the profile's own errors are larger than the margin of the plan."""
    return Text(
        f"\nThe profile reports that 1 measurement in 20 took {percent(error_ratio)} longer than predicted, or more, "
        "and this plan's margin does not cover it.",
        "yellow",
    )


def explanation(plan: ProvisionPlan) -> Text:
    """Reasons for the plan: its binding constraint, and what every process pays for its neighbours."""
    lines = []
    tightest = plan.binding
    if tightest is not None:
        lines.append(
            f"binding: {tightest.what} of {tightest.workload} on GPU {(tightest.gpu or 0) + 1}, "
            f"{percent(tightest.slack_ratio, 2)} slack"
        )
    if plan.bound is not None:
        relaxed, whole = usd(plan.bound.relaxed_usd_per_hour), usd(plan.bound.usd_per_hour)
        lines.append(f"bound: {relaxed}/h if fractions of GPUs could be rented, {whole}/h in whole GPUs")
    unknown = sorted({each.workload for gpu in plan.gpus for each in gpu.instances if math.isnan(each.memory_bytes)})
    if unknown:
        lines.append(f"GPU memory is not checked for {', '.join(unknown)}: state services[].memory to have it checked")
    for index, gpu in enumerate(plan.gpus):
        for each in gpu.instances:
            parts = each.parts
            share, limit = f"{100 * each.share_ratio:g} %", si(each.limit_s, "s")
            why = [f"{share} is the least share at which a batch of {each.batch} takes at most {limit}"]
            if len(gpu.instances) > 1:
                why.append(f"beside {', '.join(o.workload for o in gpu.instances if o is not each)}")
            if parts.throttle_s > 0:
                why.append(f"the power cap costs {si(parts.throttle_s, 's')}")
            if each.replicas > 1:
                why.append(f"one of {each.replicas} replicas of {number(each.rate_rps, '/s')} each")
            lines.append(f"GPU {index + 1} {each.workload}{_replica(each)}: {'; '.join(why)}")
    return Text("\n".join(lines))


def comparison(plans: Sequence[ProvisionPlan]) -> Table:
    """Policies side by side."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("policy", "GPUs", "price", "shares", "SLO violations"):
        shown.add_column(heading, justify="left" if heading in ("policy", "SLO violations") else "right")
    for plan in plans:
        violated = sorted({each.workload for each in plan.violations}, key=lambda name: (len(name), name))
        shown.add_row(
            plan.policy,
            str(len(plan.gpus)),
            f"{usd(plan.usd_per_hour)}/h",
            f"{100 * sum(gpu.share_ratio for gpu in plan.gpus):g} %",
            f"{len(violated)}: {', '.join(violated)}" if violated else "none",
            style="red" if violated else None,
        )
    return shown


_CHANGES = {"move": "migrated", "start": "started", "stop": "stopped", "resize": "resized in place"}


def difference_view(difference: PlanDifference) -> Text:
    """Changes against the running plan, one process a line."""
    changes = [
        f"{difference.count(what)} {name}"
        for what, name in (
            ("move", "migrated"),
            ("start", "started"),
            ("stop", "stopped"),
            ("resize", "resized in place"),
        )
        if difference.count(what)
    ]
    text = Text("against the running plan: " + (", ".join(changes) or "nothing changes"))
    if difference.opened or difference.closed:
        text.append(f"; {difference.opened} GPUs rented, {difference.closed} released")
    for change in difference.changes:
        text.append(f"\n  {_change(change)}")
    return text


def _change(change: ProcessChange) -> str:
    def portion(what: tuple[float, int] | None) -> str:
        return "" if what is None else f"{what[0]:g} %, batch {what[1]}"

    name = change.workload + (f"#{change.replica + 1}" if change.replica else "")
    if change.what == "move":
        return f"migrate {name}: GPU {(change.source or 0) + 1} → {(change.target or 0) + 1} ({portion(change.after)})"
    if change.what == "resize":
        return f"resize {name} on GPU {(change.target or 0) + 1}: {portion(change.before)} → {portion(change.after)}"
    if change.what == "start":
        return f"start {name} on GPU {(change.target or 0) + 1} ({portion(change.after)})"
    return f"stop {name} on old GPU {(change.source or 0) + 1}"


def usd(amount: float) -> str:
    """A price in dollars: ``$18.36``."""
    return f"${amount:,.2f}"


def _replica(each: PlannedInstance) -> str:
    return f"#{each.replica + 1}" if each.replicas > 1 else ""


def series_view(series: SeriesPlan) -> RenderableType:
    """One line per period, then the total."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("from", "hours", "demand", "GPUs", "cost", "migrated", "started", "stopped", "resized"):
        shown.add_column(heading, justify="right")
    for each in series.periods:
        change = each.change
        counts = [str(change.count(what)) if change else "" for what in ("move", "start", "stop", "resize")]
        shown.add_row(
            clock_text(each.period.from_s),
            f"{each.period.hours:.3g}",
            f"{sum(each.period.rates_rps.values()):.4g} /s",
            str(len(each.plan.gpus)),
            f"{usd(each.plan.usd_per_hour)}/h",
            *counts,
        )
    saved = 1 - series.usd / series.peak_usd if series.peak_usd > 0 else 0.0
    total = (
        f"{usd(series.usd)} over the series, {percent(saved)} less than {len(series.peak.gpus)} GPUs all the time "
        f"({usd(series.peak_usd)}); {series.migrations} migrations; no plan costs less than {usd(series.bound_usd)}"
    )
    return Group(shown, Text(), Text(total))


def clock_text(seconds: float) -> str:
    """Hours and minutes since the start."""
    minutes = round(seconds / 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
