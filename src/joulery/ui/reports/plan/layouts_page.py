"""A plan of layouts as one self-contained page: every GPU with its slices as a picture, the numbers below."""

from __future__ import annotations

from joulery.domain.format import percent, si
from joulery.domain.gpu.layout_plan import LayoutPlan, PlannedLayout
from joulery.domain.gpu.mig import menu_for
from joulery.ui.kit.charts import Piece, StackedRow, color_legend, stacked
from joulery.ui.kit.html import Html, head, static_text, table, tag, whole_page
from joulery.ui.reports.plan.layouts_text import bound_text, explanation

_COLORS = ("var(--v0)", "var(--v1)", "var(--v2)", "var(--v3)", "var(--v4)", "var(--v5)")
_COLUMNS = ("service", "rate", "accuracy", "lost", "p95", "limit", "a request", "saved", "on the same GPUs")


def layouts_page(plan: LayoutPlan, title: str) -> str:
    """The page, ready to be written to a file."""
    subtitle = f"{plan.gpus_on} GPUs on, {plan.gpus_off} of the baseline's switched off"
    top = tag(
        "header",
        tag(
            "div", tag("h1", title), tag("span", "simulated", class_="pill warn"), tag("span", subtitle, class_="soft")
        ),
        class_="top",
    )
    colors = _colors(plan)
    body = tag(
        "main",
        tag("figure", tag("h3", "Every GPU that is on, slice by slice"), _legend(colors), _picture(plan, colors)),
        tag("h2", "What the services get"),
        tag("div", tag("div", _table(plan), class_="scroll"), class_="card"),
        tag("h2", "Why"),
        tag("ul", (tag("li", line) for line in explanation(plan))),
        tag("p", bound_text(plan.bound, plan), class_="soft") if plan.bound is not None else None,
    )
    style = static_text("joulery.css")
    return whole_page(head(f"{title}: {plan.gpus_on} GPUs", style), tag("body", top, body))


def _colors(plan: LayoutPlan) -> dict[tuple[str, str], str]:
    """A colour for each variant of each service, in order of appearance."""
    placed = [(one.service, one.variant) for layout in plan.layouts for one in layout.instances]
    names = dict.fromkeys(sorted(placed))
    return {name: _COLORS[at % len(_COLORS)] for at, name in enumerate(names)}


def _legend(colors: dict[tuple[str, str], str]) -> Html:
    return color_legend({f"{service}: {variant}": color for (service, variant), color in colors.items()})


def _picture(plan: LayoutPlan, colors: dict[tuple[str, str], str]) -> Html:
    """One bar per layout: slices as wide as their share of the compute slices."""
    rows = [_row(layout, colors) for layout in plan.layouts]
    return stacked(rows, f"{plan.gpus_on} GPUs and what runs on their slices", name_width=150)


def _row(layout: PlannedLayout, colors: dict[tuple[str, str], str]) -> StackedRow:
    clock = "" if layout.clock_mhz is None else f", {layout.clock_mhz:.0f} MHz"
    menu = menu_for(layout.gpu)
    assert menu is not None, "the plan was made with its menu"
    pieces = []
    for one in layout.instances:
        size = one.slice.partition(".")[0]
        share = menu[one.slice].compute_slices / menu.compute_slices
        tip = f"{one.service}: {one.variant} on {one.slice}"
        pieces.append(Piece((f"{size} {one.variant}", size), share, colors[one.service, one.variant], tip))
    return StackedRow(f"{layout.count} × {layout.gpu}{clock}", pieces)


def _table(plan: LayoutPlan) -> Html:
    rows = [
        (
            each.service,
            f"{each.rate_rps:g} /s",
            percent(each.accuracy_ratio, 2),
            f"{each.loss_points:.2f} points",
            si(each.latency_s, "s"),
            si(each.limit_s, "s"),
            si(each.energy_j, "J"),
            percent(each.saving_ratio),
            percent(each.saving_same_gpus_ratio),
        )
        for each in plan.services
    ]
    return table(_COLUMNS, rows, text={0})
