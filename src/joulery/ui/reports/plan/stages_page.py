"""A plan of pipelines as one self-contained page: a bar a GPU, as full as its memory, coloured by sensitivity."""

from __future__ import annotations

from joulery.domain.format import number, percent, si
from joulery.domain.gpu.pipeline_plan import PipelineGpu, PipelinePlan
from joulery.ui.kit.html import Html, head, static_text, tag, whole_page
from joulery.ui.reports.plan.stages_text import part_name, pipeline_explanation, pipeline_headline

_WIDTH, _ROW, _LEFT, _BAR = 1000, 46, 70, 560
_STYLE = """
svg{width:100%;height:auto;display:block}
svg text{font-size:13px;fill:var(--ink)}
svg text.on{fill:#fff}
svg text.soft{fill:var(--soft)}
.back{fill:var(--grid)}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--line)}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
.bad td{color:var(--bad)}
pre{white-space:pre-wrap;font:inherit}
.scroll{overflow-x:auto}
"""


def pipeline_page(plan: PipelinePlan, title: str) -> str:
    """The page, ready to be written to a file."""
    said = pipeline_headline(plan).plain.split("\n")
    body = (
        tag("header", tag("div", tag("h1", title)), class_="top"),
        tag(
            "main",
            tag("p", said[0], class_="banner bad" if plan.violations else None),
            tag("p", said[1], class_="soft small"),
            tag(
                "figure",
                tag("h3", "GPUs"),
                tag("figcaption", "Width: memory. Colour: sensitivity to the clock, from blue (0) to red (2)."),
                pipeline_picture(plan),
            ),
            tag("h2", "Services"),
            tag("div", _services(plan), class_="scroll"),
            tag("h2", "Why"),
            tag("pre", pipeline_explanation(plan).plain),
        ),
    )
    style = static_text("joulery.css") + _STYLE
    return whole_page(head(f"{title}: {number(plan.power_w, 'W')}", style), tag("body", *body))


def pipeline_picture(plan: PipelinePlan) -> Html:
    """The GPUs as an SVG of its own."""
    return tag(
        "svg",
        [_gpu(at, gpu) for at, gpu in enumerate(plan.gpus)],
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_ROW * len(plan.gpus) + 4}",
        role="img",
        aria_label=f"{len(plan.gpus)} GPUs and what they host",
    )


def color(score: float) -> str:
    """Blue for what does not feel the clock, violet for memory-bound, red for compute-bound."""
    share = min(max(score / 2.0, 0.0), 1.0)
    ends = ((38, 95, 155), (177, 52, 55))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


def _gpu(at: int, gpu: PipelineGpu) -> list[Html]:
    y = _ROW * at + 4
    shown = [
        tag("text", f"GPU {at + 1}", x=0, y=y + 22),
        tag("rect", x=_LEFT, y=y, width=_BAR, height=_ROW - 12, rx=3, class_="back"),
        tag(
            "text",
            f"{gpu.clock_mhz:.0f} MHz, {number(gpu.power_w, 'W')} instead of {number(gpu.full_power_w, 'W')}, "
            f"{percent(gpu.busy_ratio, 0)} busy",
            x=_LEFT + _BAR + 12,
            y=y + 22,
        ),
    ]
    x = float(_LEFT)
    for part in gpu.parts:
        width = _BAR * part.memory_bytes / gpu.memory_bytes
        tip = (
            f"{part_name(part)} ({part.model}): sensitivity {part.score:.2f}, {si(part.memory_bytes, 'B')}, "
            f"{si(part.latency_s, 's')} a pass at {gpu.clock_mhz:.0f} MHz"
        )
        box = {"x": round(x, 1), "y": y, "width": round(max(width - 1.5, 1), 1), "height": _ROW - 12, "rx": 3}
        shown.append(tag("rect", tag("title", tip), fill=color(part.score), **box))
        if width > 8 * len(part_name(part)):
            shown.append(
                tag("text", part_name(part), x=round(x + width / 2, 1), y=y + 22, text_anchor="middle", class_="on")
            )
        x += width
    return shown


def _services(plan: PipelinePlan) -> Html:
    titles = ("service", "model", "sensitivity", "replicas", "stages", "GPUs a stage", "latency", "SLO", "in time")
    broken = {each.workload for each in plan.violations}
    rows = [
        tag(
            "tr",
            tag("td", each.workload),
            tag("td", each.model),
            tag("td", f"{each.score:.2f}"),
            tag("td", str(each.replicas)),
            tag("td", str(each.stages)),
            tag("td", str(each.shards)),
            tag("td", si(each.latency_s, "s")),
            tag("td", si(each.slo_s, "s")),
            tag("td", f"{percent(each.attainment_ratio, 2)} of {percent(each.required_ratio)}"),
            class_="bad" if each.workload in broken else None,
        )
        for each in plan.services
    ]
    return tag("table", tag("tr", [tag("th", title) for title in titles]), rows)
