"""A plan as one self-contained page: the packed GPUs as a picture, and every number behind it; no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from joulery.domain.format import number, percent, si
from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance, ProvisionPlan
from joulery.ui.kit.charts import Piece, StackedRow, color_legend, stacked
from joulery.ui.kit.html import Html, head, static_text, table, tag, whole_page
from joulery.ui.reports.plan.shares_text import alike, bound_text, headline, model_colors, usd

_COLUMNS = ("GPU", "service", "model", "share", "batch", "latency", "limit", "slack", "serves", "needs")


def shares_page(plan: ProvisionPlan, title: str, facts: Sequence[str] = (), worth: Sequence[str] = ()) -> str:
    """The page, ready to be written to a file.

    Args:
        plan: The plan.
        title: Its heading.
        facts: Sentences about it from its planner, the most important first; none for preset best and the like.
        worth: Worth of changes, one sentence each.
    """
    banner, *more = facts or [headline(plan).plain.split("\n")[0]]
    source = f"Predicted by the interference model; quality of its coefficients: {plan.quality.value}."
    colors = model_colors(plan)
    body = (
        tag("header", tag("div", tag("h1", title)), class_="top"),
        tag(
            "main",
            tag("p", banner, class_="banner bad" if plan.violations else None),
            [tag("p", text, class_="soft") for text in more],
            tag("p", bound_text(plan).plain, class_="soft") if plan.bound is not None and not facts else None,
            tag("figure", tag("h3", "GPUs and their shares"), color_legend(colors), picture(plan)),
            tag("h2", "Services"),
            tag("div", tag("div", _table(plan), class_="scroll"), class_="card"),
            [tag("h2", "What changes are worth"), tag("ul", [tag("li", text) for text in worth])] if worth else None,
            tag("p", source, class_="soft"),
        ),
    )
    page_title = f"{title}: {len(plan.gpus)} GPUs, {usd(plan.usd_per_hour)}/h"
    return whole_page(head(page_title, static_text("joulery.css")), tag("body", *body))


def picture(plan: ProvisionPlan) -> Html:
    """The packed GPUs: one bar per GPU, one piece per process, as wide as its share."""
    colors = model_colors(plan)
    rows = [
        StackedRow(
            f"{gpu.type} {first + 1}" if count == 1 else f"{count} × {gpu.type}",
            [_piece(each, colors[each.model]) for each in gpu.instances],
            f"{100 * gpu.share_ratio:g} %, {gpu.clock_mhz:.0f} MHz, {si(gpu.power_w, 'W')}",
        )
        for first, gpu, count in alike(plan.gpus)
    ]
    return stacked(rows, f"{len(plan.gpus)} GPUs and the shares of their services", note_width=200)


def _piece(each: PlannedInstance, color: str) -> Piece:
    replica = f", replica {each.replica + 1} of {each.replicas}" if each.replicas > 1 else ""
    tip = (
        f"{each.workload} ({each.model}{replica}): {100 * each.share_ratio:g} % of the GPU, batch {each.batch}; "
        f"a batch takes {si(each.latency_s, 's')} of {si(each.limit_s, 's')}; "
        f"serves {number(each.throughput_rps, '/s')} of {number(each.rate_rps, '/s')}"
    )
    return Piece((f"{each.workload} {100 * each.share_ratio:g} %", each.workload), each.share_ratio, color, tip)


def _table(plan: ProvisionPlan) -> Html:
    rows = [(_row(place, count, each), each) for place, count, each in _instances(plan)]
    late = [at for at, (_, each) in enumerate(rows) if each.slack_s < 0 or each.throughput_rps < each.rate_rps]
    return table(_COLUMNS, (row for row, _ in rows), text=range(3), bad=late)


def _instances(plan: ProvisionPlan) -> Iterator[tuple[int | None, int, PlannedInstance]]:
    """Each instance, with the place of its GPU where it is the first there, and how many GPUs are alike."""
    groups: list[tuple[int, PlannedGpu, int]] = list(alike(plan.gpus))
    for first, gpu, count in groups:
        for at, each in enumerate(gpu.instances):
            yield None if at else first, count, each


def _row(place: int | None, count: int, each: PlannedInstance) -> tuple[str, ...]:
    return (
        "" if place is None else f"{place + 1}" if count == 1 else f"×{count}",
        each.workload + (f" ({each.replica + 1}/{each.replicas})" if each.replicas > 1 else ""),
        each.model,
        each.slice or f"{100 * each.share_ratio:g} %",
        str(each.batch) if each.processes == 1 else f"{each.processes} × {each.batch}",
        si(each.latency_s, "s"),
        si(each.limit_s, "s"),
        percent(each.slack_s / each.limit_s if each.limit_s > 0 else None),
        number(each.throughput_rps, "/s"),
        number(each.rate_rps, "/s"),
    )
