"""A plan of layouts as one self-contained page: every GPU with its slices as a picture, the numbers below."""

from __future__ import annotations

from joulery.domain.format import percent, si
from joulery.domain.gpu.layout_plan import LayoutPlan, PlannedLayout
from joulery.domain.gpu.mig import menu_for
from joulery.ui.kit.html import Html, head, static_text, tag, whole_page
from joulery.ui.reports.plan.layouts_text import bound_text, explanation

_WIDTH, _LEFT, _BAR, _ROW, _GAP = 1040, 150, 870, 46, 12
_LETTER = 7.4
_COLORS = ("var(--v0)", "var(--v1)", "var(--v2)", "var(--v3)", "var(--v4)", "var(--v5)")
_STYLE = """
main{padding-top:8px}
svg.pool{width:100%;height:auto;display:block}
svg.pool text.on{fill:#fff;font-size:12px}
table td:not(:first-child),table th:not(:first-child){text-align:right;white-space:nowrap}
"""


def layouts_page(plan: LayoutPlan, title: str) -> str:
    """The page, ready to be written to a file."""
    said = f"{plan.gpus_on} GPUs on, {plan.gpus_off} of the baseline's switched off"
    top = tag(
        "header",
        tag("div", tag("h1", title), tag("span", "simulated", class_="pill warn"), tag("span", said, class_="soft")),
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
    style = static_text("joulery.css") + _STYLE
    return whole_page(head(f"{title}: {plan.gpus_on} GPUs", style), tag("body", top, body))


def _colors(plan: LayoutPlan) -> dict[tuple[str, str], str]:
    """A colour for each variant of each service, in order of appearance."""
    placed = [(one.service, one.variant) for layout in plan.layouts for one in layout.instances]
    names = dict.fromkeys(sorted(placed))
    return {name: _COLORS[at % len(_COLORS)] for at, name in enumerate(names)}


def _legend(colors: dict[tuple[str, str], str]) -> Html:
    items = (
        tag("li", tag("span", class_="swatch", style=f"background:{color}"), f"{service}: {variant}")
        for (service, variant), color in colors.items()
    )
    return tag("ul", items, class_="legend")


def _picture(plan: LayoutPlan, colors: dict[tuple[str, str], str]) -> Html:
    rows = [_gpu(layout, 8 + _ROW * at, colors) for at, layout in enumerate(plan.layouts)]
    return tag(
        "svg",
        rows,
        viewBox=f"0 0 {_WIDTH} {8 + _ROW * len(rows)}",
        class_="pool",
        role="img",
        aria_label=f"{plan.gpus_on} GPUs and what runs on their slices",
    )


def _gpu(layout: PlannedLayout, y: int, colors: dict[tuple[str, str], str]) -> list[Html]:
    """One row: slices as wide as their share of the compute slices, what is left of the GPU pale."""
    clock = "" if layout.clock_mhz is None else f", {layout.clock_mhz:.0f} MHz"
    height, menu = _ROW - _GAP, menu_for(layout.gpu)
    assert menu is not None, "the plan was made with its menu"
    parts = [
        tag("text", f"{layout.count} × {layout.gpu}{clock}", x=0, y=y + 21),
        tag("rect", x=_LEFT, y=y, width=_BAR, height=height, rx=3, fill="var(--grid)"),
    ]
    x = float(_LEFT)
    for one in layout.instances:
        width = _BAR * menu[one.slice].compute_slices / menu.compute_slices
        name = f"{one.slice.partition('.')[0]} {one.variant}"
        color = colors[one.service, one.variant]
        title = tag("title", f"{one.service}: {one.variant} on {one.slice}")
        parts.append(
            tag("rect", title, x=f"{x:.1f}", y=y, width=f"{max(width - 2, 1):.1f}", height=height, rx=3, fill=color)
        )
        short = name if width > _LETTER * len(name) else name.split(" ")[0]
        parts.append(tag("text", short, x=f"{x + width / 2 - 1:.1f}", y=y + 21, text_anchor="middle", class_="on"))
        x += width
    return parts


def _table(plan: LayoutPlan) -> Html:
    names = ("service", "rate", "accuracy", "lost", "p95", "limit", "a request", "saved", "on the same GPUs")
    rows = [
        tag(
            "tr",
            [
                tag("td", cell)
                for cell in (
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
            ],
        )
        for each in plan.services
    ]
    return tag("table", tag("thead", tag("tr", (tag("th", name) for name in names))), tag("tbody", rows))
