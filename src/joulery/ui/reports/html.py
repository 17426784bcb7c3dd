"""A report as one self-contained HTML page: style, script and data inside, no external request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from joulery import __version__
from joulery.accounting.power_timeline import downsample_ticks
from joulery.app.runs.recorded import RunView
from joulery.domain.format import duration, grams, moment, percent, si
from joulery.domain.serving.timeline import CarbonBasis, DecisionRecord
from joulery.ui.kit.html import Html, content_hash, data_block, head, join, static_text, tag, tiles, whole_page
from joulery.ui.reports.figures import figures, waterfall
from joulery.ui.reports.messages import (
    BEYOND,
    accuracy_text,
    basis_text,
    carbon_note,
    carbon_text,
    energy_note,
    energy_text,
    interruption,
    latency_text,
    notes_together,
    requests_text,
    saving_text,
)
from joulery.ui.reports.table import Rollup

MAX_POINTS = 1500
MAX_DECISIONS = 500


def render_html(rollup: Rollup) -> str:
    """Render a report as a page: a single run with plots and decisions, several runs as their sum and table."""
    style = static_text("uplot.min.css") + static_text("joulery.css")
    script = static_text("uplot.min.js") + static_text("charts.js")
    policy = (
        f"default-src 'none'; style-src {content_hash(style)}; script-src {content_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    single = rollup.views[0] if len(rollup.views) == 1 else None
    title = _title(rollup)
    body = (
        _top(title, single),
        tag("main", _content(rollup, single), tag("footer", _footer(rollup))),
        _charts(single, script),
    )
    return whole_page(head(title, style, policy=policy), tag("body", *body))


def _title(rollup: Rollup) -> str:
    if len(rollup.views) > 1:
        return f"{len(rollup.views)} runs"
    view = rollup.views[0]
    return view.site.name if view.site else f"{view.kind} {view.name}"


def _top(title: str, view: RunView | None) -> Html:
    pills: list[Html] = []
    if view is not None:
        if view.site is not None:
            pills.append(tag("span", f"mode {view.site.mode}" if view.site.services else view.kind, class_="pill"))
            if view.site.simulated:
                pills.append(tag("span", "simulated", class_="pill warn"))
            if view.site.carbon is not None and view.site.carbon.basis is not CarbonBasis.LIVE:
                pills.append(tag("span", f"carbon {basis_text(view.site.carbon)}", class_="pill warn"))
        if view.interrupted:
            pills.append(tag("span", "interrupted", class_="pill bad"))
        elif view.manifest.get("state") == "failed":
            pills.append(tag("span", "ended with an error", class_="pill bad"))
    name = tag("h1", tag("span", "joulery ", class_="brand"), title)
    return tag("header", tag("div", name, tag("span", class_="spacer"), *pills), class_="top")


def _content(rollup: Rollup, view: RunView | None) -> Iterable[Html]:
    since = f"{duration(rollup.footprint.duration_s)} from {moment(rollup.footprint.start_s)}"
    yield tag("p", since, class_="soft")
    if view is not None and view.interrupted:
        yield tag("p", interruption(view), class_="banner")
    if notes := notes_together(rollup.views):
        yield tag("ul", (tag("li", note) for note in notes), class_="notes")
    yield _facts(rollup, view)
    yield tag("h2", "Where the energy went")
    yield tag("div", waterfall(rollup.footprint), _rows(rollup), class_="card")
    if view is not None and view.ticks and view.site is not None:
        yield tag("h2", "Over time")
        yield figures(view.site)
        yield tag("noscript", tag("p", "The plots need a browser that runs scripts; the numbers above do not."))
    if view is not None and view.decisions:
        yield tag("h2", "Decisions and their reasons")
        yield _decisions(view.decisions, view.footprint.start_s)


def _facts(rollup: Rollup, view: RunView | None) -> Html:
    label = view.site.carbon if view is not None and view.site is not None else None
    reason = view.report.get("carbon_reason") if view is not None else None
    facts: list[tuple[str, str, str]] = [
        ("Energy", energy_text(rollup.footprint), energy_note(rollup.footprint)),
        ("Carbon", carbon_text(rollup.footprint), carbon_note(rollup.footprint, label, reason)),
    ]
    if view is not None:
        named = (
            ("Saving", saving_text(view.report)),
            ("Latency", latency_text(view.report)),
            ("Accuracy", accuracy_text(view.report)),
            ("Requests", requests_text(view.report)),
        )
        facts += [(name, *values) for name, values in named if values is not None]
    return tiles(facts, tone=_tone)


def _tone(note: str) -> str:
    """CSS class of a value: an SLO violation is highlighted."""
    return "bad-text" if BEYOND in note else ""


def _rows(rollup: Rollup) -> Html:
    total_j = rollup.footprint.energy_j
    with_grams = any(not math.isnan(row.carbon_g) for row in rollup.rows)
    names = [rollup.by, "energy", "share", *(["carbon"] if with_grams else []), "quality"]
    head = tag("thead", tag("tr", (tag("th", name, class_=_align(name), scope="col") for name in names)))
    body = []
    for row in rollup.rows:
        band = f" ± {percent(row.band_j / row.energy_j, 0)}" if row.band_j > 0 and row.energy_j > 0 else ""
        share = percent(row.energy_j / total_j) if total_j > 0 else ""
        cells = [si(row.energy_j, "J"), share, *([grams(row.carbon_g)] if with_grams else [])]
        numbers = (tag("td", cell, class_="number") for cell in cells)
        body.append(tag("tr", tag("th", row.key, scope="row"), numbers, tag("td", f"{row.quality}{band}")))
    totals = [
        si(total_j, "J"),
        "100 %" if total_j > 0 else "",
        *([carbon_text(rollup.footprint)] if with_grams else []),
    ]
    foot = tag("tfoot", tag("tr", tag("th", "total", scope="row"), _numbers(totals), tag("td")))
    return tag("div", tag("table", head, tag("tbody", body), foot), class_="scroll")


def _numbers(cells: Sequence[str]) -> Iterable[Html]:
    return (tag("td", cell, class_="number") for cell in cells)


def _align(name: str) -> str | None:
    return "number" if name in {"energy", "share", "carbon"} else None


def _decisions(decisions: Sequence[DecisionRecord], start_s: float) -> Html:
    head = tag("tr", (tag("th", name, scope="col") for name in ("after", "what", "to", "why", "outcome")))
    shown = decisions[-MAX_DECISIONS:]
    body = (
        tag(
            "tr",
            tag("td", duration(max(record.t_s - start_s, 0.0)), class_="number"),
            tag("td", f"{record.decision.kind} {record.decision.target}"),
            tag("td", value_text(record.decision.value)),
            tag(
                "td",
                record.decision.reason,
                tag("div", f"policy {record.decision.policy}", class_="note"),
                class_="reason",
            ),
            tag("td", record.outcome, tag("div", record.detail, class_="note") if record.detail else None),
        )
        for record in shown
    )
    note = None
    if len(shown) < len(decisions):
        note = tag("p", f"The last {len(shown)} of {len(decisions)}; log.jsonl of the run holds all.", class_="note")
    return tag("div", tag("table", tag("thead", head), tag("tbody", body), class_="stack"), note, class_="card scroll")


def value_text(value: Any) -> str:
    """A decision's value in a line: mappings as ``name value``, lists with commas, mappings in lists in brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {value_text(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        bracketed = any(isinstance(inner, dict) for inner in value)
        return ", ".join(f"({value_text(inner)})" if bracketed else value_text(inner) for inner in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _charts(view: RunView | None, script: str) -> Html:
    """The data of the plots and the script that draws them; empty where there is nothing to draw."""
    if view is None or view.site is None or not view.ticks:
        return Html("")
    started_s = view.ticks[0].t_s - view.ticks[0].period_s
    recorded = {"site": view.site, "started_s": started_s, "ticks": downsample_ticks(view.ticks, MAX_POINTS)}
    return join((data_block("recorded", recorded), tag("script", Html(script))))


def _footer(rollup: Rollup) -> Html:
    runs = ", ".join(f"{view.name} ({view.path})" for view in rollup.views)
    return join(f"Run {runs}. Written by joulery {__version__}. Unknown is shown as –, never as 0.")
