"""A plan as one self-contained page: the packed GPUs as a picture, and every number behind it; no script."""

from __future__ import annotations

from joulery.domain.format import number, percent, si
from joulery.domain.gpu.provisioning import PlannedGpu, PlannedInstance, ProvisionPlan
from joulery.ui.kit.html import Html, head, tag, whole_page
from joulery.ui.reports.plan.shares_text import alike, bound_text, headline, model_colors, usd

_WIDTH, _ROW, _LEFT, _BAR, _GAP = 960, 44, 96, 640, 12
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.4rem;margin:0 0 .3rem}
p{margin:.2rem 0}
.dim{color:#666}
.bad{color:#b00020}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin-top:1rem;font-size:13px}
th,td{padding:.2rem .55rem;text-align:right;border-bottom:1px solid #e5e5e5}
th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}
svg text{font:13px system-ui,sans-serif}
@media (prefers-color-scheme:dark){
body{background:#161616;color:#e8e8e8}
th,td{border-color:#333}
.dim{color:#9a9a9a}
.bad{color:#ff6b81}
}
"""


def shares_page(plan: ProvisionPlan, title: str) -> str:
    """The page, ready to be written to a file."""
    said = headline(plan).plain.split("\n")[0]
    source = f"Predicted by the interference model; quality of its coefficients: {plan.quality.value}."
    body = tag(
        "body",
        tag("h1", title),
        tag("p", said, class_="bad" if plan.violations else None),
        tag("p", bound_text(plan).plain, class_="dim") if plan.bound is not None else None,
        picture(plan),
        _table(plan),
        tag("p", source, class_="dim"),
    )
    return whole_page(head(f"{title}: {len(plan.gpus)} GPUs, {usd(plan.usd_per_hour)}/h", _STYLE), body)


def picture(plan: ProvisionPlan) -> Html:
    """The packed GPUs as an SVG of its own: a bar a GPU, a segment a process, wide as its share."""
    rows = alike(plan.gpus)
    colors = model_colors(plan)
    legend = [
        (
            tag("rect", x=_LEFT + 120 * at, y=6, width=12, height=12, rx=2, fill=color),
            tag("text", model, x=_LEFT + 120 * at + 18, y=17, fill="currentColor"),
        )
        for at, (model, color) in enumerate(colors.items())
    ]
    bars = [_bar(first, gpu, count, 32 + _ROW * at, colors) for at, (first, gpu, count) in enumerate(rows)]
    return tag(
        "svg",
        legend,
        bars,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {40 + _ROW * len(rows)}",
        width="100%",
        role="img",
        aria_label=f"{len(plan.gpus)} GPUs and the shares of their services",
    )


def _bar(first: int, gpu: PlannedGpu, count: int, y: int, colors: dict[str, str]) -> list[Html]:
    height = _ROW - _GAP
    name = f"{gpu.type} {first + 1}" if count == 1 else f"{count} × {gpu.type}"
    parts = [
        tag("text", name, x=_LEFT - 8, y=y + 21, text_anchor="end", fill="currentColor"),
        tag("rect", x=_LEFT, y=y, width=_BAR, height=height, fill="currentColor", opacity="0.08", rx=3),
    ]
    x = float(_LEFT)
    for each in gpu.instances:
        width = _BAR * each.share_ratio
        parts += [
            tag(
                "rect",
                tag("title", _tip(each)),
                x=f"{x:.1f}",
                y=y,
                width=f"{max(width - 1, 1):.1f}",
                height=height,
                fill=colors[each.model],
                rx=3,
            )
        ]
        label = f"{each.workload} {100 * each.share_ratio:g} %"
        if width > 8 * len(label):
            parts.append(tag("text", label, x=f"{x + width / 2:.1f}", y=y + 21, text_anchor="middle", fill="#fff"))
        elif width > 9 * len(each.workload):
            parts.append(
                tag("text", each.workload, x=f"{x + width / 2:.1f}", y=y + 21, text_anchor="middle", fill="#fff")
            )
        x += width
    parts.append(
        tag(
            "text",
            f"{100 * gpu.share_ratio:g} %, {gpu.clock_mhz:.0f} MHz, {si(gpu.power_w, 'W')}",
            x=_LEFT + _BAR + 10,
            y=y + 21,
            fill="currentColor",
        )
    )
    return parts


def _tip(each: PlannedInstance) -> str:
    cut = f", replica {each.replica + 1} of {each.replicas}" if each.replicas > 1 else ""
    return (
        f"{each.workload} ({each.model}{cut}): {100 * each.share_ratio:g} % of the GPU, batch {each.batch}; "
        f"a batch takes {si(each.latency_s, 's')} of {si(each.limit_s, 's')}; "
        f"serves {number(each.throughput_rps, '/s')} of {number(each.rate_rps, '/s')}"
    )


def _table(plan: ProvisionPlan) -> Html:
    headings = ("GPU", "service", "model", "share", "batch", "latency", "limit", "slack", "serves", "needs")
    rows = []
    for first, gpu, count in alike(plan.gpus):
        for at, each in enumerate(gpu.instances):
            cells = (
                "" if at else f"{first + 1}" if count == 1 else f"×{count}",
                each.workload + (f" ({each.replica + 1}/{each.replicas})" if each.replicas > 1 else ""),
                each.model,
                f"{100 * each.share_ratio:g} %",
                str(each.batch),
                si(each.latency_s, "s"),
                si(each.limit_s, "s"),
                percent(each.slack_s / each.limit_s if each.limit_s > 0 else None),
                number(each.throughput_rps, "/s"),
                number(each.rate_rps, "/s"),
            )
            late = each.slack_s < 0 or each.throughput_rps < each.rate_rps
            rows.append(tag("tr", [tag("td", cell) for cell in cells], class_="bad" if late else None))
    return tag("table", tag("tr", [tag("th", heading) for heading in headings]), rows)
