"""Reports as text for a terminal."""

from __future__ import annotations

import math

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from joulery.app.runs.recorded import RunView
from joulery.domain.format import duration, grams, moment, percent, si
from joulery.ui.reports.messages import (
    accuracy_text,
    carbon_note,
    carbon_text,
    energy_note,
    energy_text,
    interruption,
    latency_text,
    notes_together,
    requests_text,
    saving_text,
    variants_text,
)
from joulery.ui.reports.table import Rollup

_QUALITY_STYLE = {"measured": "green", "modelled": "yellow", "assumed": "red"}


def print_text(rollup: Rollup, console: Console) -> None:
    """Print the totals, a heading for each run, and the table."""
    for part in _parts(rollup):
        console.print(part)


def _parts(rollup: Rollup) -> list[RenderableType]:
    views = rollup.views
    label = views[0].site.carbon if views[0].site and len(views) == 1 else None
    parts: list[RenderableType] = [_heading(view) for view in views]
    parts += [Text(note, style="yellow") for note in notes_together(views)]
    if len(views) > 1:
        parts.append(Text(f"\n{len(views)} runs together", style="bold"))
    reason = views[0].report.get("carbon_reason") if len(views) == 1 else None
    facts = [
        ("energy", energy_text(rollup.footprint), energy_note(rollup.footprint)),
        ("carbon", carbon_text(rollup.footprint), carbon_note(rollup.footprint, label, reason)),
    ]
    if rollup.footprint.embodied_g > 0:
        facts.append(("embodied", grams(rollup.footprint.embodied_g), "CO2e of making the machine, as stated; besides"))
    if len(views) == 1:
        facts += _served(views[0])
    parts.append(Padding(_facts(facts), (1, 0, 1, 2), expand=False))
    parts.append(Padding(_rows(rollup), (0, 0, 0, 2), expand=False))
    return parts


def _heading(view: RunView) -> RenderableType:
    name = f"{view.site.name} " if view.site else ""
    lines = [Text.assemble((f"{view.kind} ", "bold"), (name, "bold"), (view.name, "dim"))]
    start_s = view.footprint.start_s
    lines.append(Text(f"{duration(view.footprint.duration_s)} from {moment(start_s)}", style="dim"))
    if view.interrupted:
        lines.append(Text(interruption(view), style="yellow"))
    elif view.manifest.get("state") == "failed":
        lines.append(Text("the run ended with an error", style="yellow"))
    return Group(*lines)


def _served(view: RunView) -> list[tuple[str, str, str]]:
    named = (
        ("saving", saving_text(view.report)),
        ("requests", requests_text(view.report)),
        ("latency", latency_text(view.report)),
        ("accuracy", accuracy_text(view.report)),
    )
    facts = [(name, *values) for name, values in named if values is not None]
    variants = variants_text(view.report)
    if variants is not None:
        facts.append(("variants", "", variants))
    return facts


def _facts(facts: list[tuple[str, str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column()
    for name, value, note in facts:
        table.add_row(name, value, Text(note))
    return table


def _rows(rollup: Rollup) -> Table:
    total_j = rollup.footprint.energy_j
    with_grams = any(not math.isnan(row.carbon_g) for row in rollup.rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_footer=True)
    table.add_column(rollup.by, footer="total")
    table.add_column("energy", justify="right", footer=si(total_j, "J"), no_wrap=True)
    table.add_column("share", justify="right", footer="100 %" if total_j > 0 else "", no_wrap=True)
    if with_grams:
        table.add_column("carbon", justify="right", footer=carbon_text(rollup.footprint), no_wrap=True)
    table.add_column("quality")
    for row in rollup.rows:
        share = percent(row.energy_j / total_j) if total_j > 0 else ""
        band = f" ± {percent(row.band_j / row.energy_j, 0)}" if row.band_j > 0 and row.energy_j > 0 else ""
        quality = Text(f"{row.quality}{band}", style=_QUALITY_STYLE[row.quality])
        carbon = (grams(row.carbon_g),) if with_grams else ()
        table.add_row(Text(row.key), si(row.energy_j, "J"), share, *carbon, quality)
    return table
