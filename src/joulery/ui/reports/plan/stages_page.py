"""A plan of pipelines as one self-contained page: one bar per GPU that shows its memory, coloured by sensitivity."""

from __future__ import annotations

from joulery.domain.format import number, percent, si
from joulery.domain.gpu.pipeline_plan import PipelineGpu, PipelinePlan
from joulery.ui.kit.charts import Piece, StackedRow, stacked
from joulery.ui.kit.html import Html, head, static_text, table, tag, whole_page
from joulery.ui.reports.plan.stages_text import part_name, pipeline_explanation, pipeline_headline

_COLUMNS = ("service", "model", "sensitivity", "replicas", "stages", "GPUs a stage", "latency", "SLO", "in time")
_STYLE = "pre{white-space:pre-wrap;font:inherit}"


def pipeline_page(plan: PipelinePlan, title: str) -> str:
    """The page, ready to be written to a file."""
    headline_lines = pipeline_headline(plan).plain.split("\n")
    body = (
        tag("header", tag("div", tag("h1", title)), class_="top"),
        tag(
            "main",
            tag("p", headline_lines[0], class_="banner bad" if plan.violations else None),
            tag("p", headline_lines[1], class_="soft small"),
            tag(
                "figure",
                tag("h3", "GPUs"),
                tag("figcaption", "Width: memory. Colour: sensitivity to the clock, from blue (0) to red (2)."),
                pipeline_picture(plan),
            ),
            tag("h2", "Services"),
            tag("div", tag("div", _services(plan), class_="scroll"), class_="card"),
            tag("h2", "Why"),
            tag("pre", pipeline_explanation(plan).plain),
        ),
    )
    style = static_text("joulery.css") + _STYLE
    return whole_page(head(f"{title}: {number(plan.power_w, 'W')}", style), tag("body", *body))


def pipeline_picture(plan: PipelinePlan) -> Html:
    """One bar per GPU, one piece per part of a model, as wide as its memory."""
    rows = [_row(at, gpu) for at, gpu in enumerate(plan.gpus)]
    return stacked(rows, f"{len(plan.gpus)} GPUs and what they host", name_width=70, note_width=370)


def color(score: float) -> str:
    """Blue for what does not depend on the clock, violet for memory-bound, red for compute-bound."""
    share = min(max(score / 2.0, 0.0), 1.0)
    ends = ((38, 95, 155), (177, 52, 55))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


def _row(at: int, gpu: PipelineGpu) -> StackedRow:
    pieces = [
        Piece(
            (part_name(part),),
            part.memory_bytes / gpu.memory_bytes,
            color(part.score),
            f"{part_name(part)} ({part.model}): sensitivity {part.score:.2f}, {si(part.memory_bytes, 'B')}, "
            f"{si(part.latency_s, 's')} a pass at {gpu.clock_mhz:.0f} MHz",
        )
        for part in gpu.parts
    ]
    note = (
        f"{gpu.clock_mhz:.0f} MHz, {number(gpu.power_w, 'W')} instead of {number(gpu.full_power_w, 'W')}, "
        f"{percent(gpu.busy_ratio, 0)} busy"
    )
    return StackedRow(f"GPU {at + 1}", pieces, note)


def _services(plan: PipelinePlan) -> Html:
    late = {each.workload for each in plan.violations}
    rows = [
        (
            each.workload,
            each.model,
            f"{each.score:.2f}",
            str(each.replicas),
            str(each.stages),
            str(each.shards),
            si(each.latency_s, "s"),
            si(each.slo_s, "s"),
            f"{percent(each.attainment_ratio, 2)} of {percent(each.required_ratio)}",
        )
        for each in plan.services
    ]
    bad = [at for at, each in enumerate(plan.services) if each.workload in late]
    return table(_COLUMNS, rows, text={0, 1}, bad=bad)
