"""The anatomy of a run as one self-contained HTML page: pictures, an expandable tree, and the operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from joulery.accounting.operations.edd import Node, powers_w, tree
from joulery.accounting.operations.precision import resolution
from joulery.domain.energy.tensor_footprint import TensorFootprint
from joulery.domain.format import count, duration, grams, percent, si
from joulery.ui.kit.charts import class_legend
from joulery.ui.kit.html import Html, content_hash, data_block, head, static_text, table, tag, whole_page
from joulery.ui.reports.anatomy.edd import edd_svg
from joulery.ui.reports.anatomy.messages import share_text, sight_notes

ROWS = 200
_LEVELS = 40
_DRAWN = 0.01
"""Share of the whole below which a phase has no diagram of its own."""


def page(title: str, body: Iterable[Html | None]) -> str:
    """A page around a body, with the style and the script of the anatomy inside."""
    style, script = static_text("joulery.css") + static_text("anatomy.css"), static_text("anatomy.js")
    policy = (
        f"default-src 'none'; style-src {content_hash(style)}; script-src {content_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    top = tag("header", tag("div", tag("h1", tag("span", "joulery ", class_="brand"), title)), class_="top")
    content = tag("body", top, tag("main", *body), tag("script", Html(script)))
    return whole_page(head(title, style, policy=policy), content)


def anatomy_page(title: str, footprint: TensorFootprint, spans: Html | None, *, top: int, depth: int) -> str:
    """The page of one footprint.

    Args:
        title: Title of the page.
        footprint: Joules by operation, folded or not.
        spans: The picture of power over time; None where events are not kept.
        top: Bars to draw.
        depth: Levels of the diagram.
    """
    return page(title, _body(footprint, spans, top, depth))


def _body(footprint: TensorFootprint, spans: Html | None, top: int, depth: int) -> Iterable[Html | None]:
    notes = list(dict.fromkeys((*sight_notes(footprint), *footprint.notes)))
    yield tag("ul", (tag("li", note) for note in notes), class_="notes") if notes else None
    yield tag("h2", "Devices")
    yield tag("div", devices_table(footprint), class_="card scroll")
    phases = phase_trees(footprint)
    yield tag("h2", "Where the joules went")
    yield tag("p", "Click a box to look inside; the path above leads back out.", class_="soft small")
    whole = with_phases(phases)
    yield tag("div", data_block("tree", as_tree(whole)), tag("div", data_tree="tree"), class_="card")
    for node in (node for node in phases if node.energy_j >= _DRAWN * whole.energy_j):
        yield tag("h2", f"Energy dependency diagram: {node.name}, {si(node.energy_j, 'J')}")
        arrows = "the dataflow" if footprint.feeds else "the order of execution"
        text = f"A box is as long as its share of its parent; arrows follow {arrows}."
        yield tag("p", text, class_="soft small")
        yield tag("div", edd_svg(node, depth=depth), class_="card")
    yield tag("h2", f"The {min(top, len(footprint))} operations that used most")
    shades = [(f"phase-{name}", name) for name in ("forward", "backward", "recompute", "optimizer", "data", "other")]
    yield tag("div", bars_svg(footprint, top=top), _shade_legend(shades), class_="card")
    if spans is not None:
        yield tag("h2", "Power over time, and what ran")
        yield tag("div", spans, class_="card")
    yield tag("h2", "Operations")
    yield tag("div", operations_table(footprint), class_="card scroll")


def _shade_legend(shades: Sequence[tuple[str, str]]) -> Html:
    swatch = (
        tag(
            "li",
            tag("svg", tag("rect", width=11, height=11, rx=3, class_=name), width=11, height=11, class_="swatch"),
            label,
        )
        for name, label in shades
    )
    return tag("ul", swatch, class_="legend") if shades else class_legend([])


def phase_trees(footprint: TensorFootprint) -> list[Node]:
    """One tree per phase, the one with most energy first; phases without energy are left out."""
    trees = [tree(footprint, phase=phase, root=phase or "other") for phase in sorted(set(footprint.phase))]
    return sorted((node for node in trees if node.energy_j > 0), key=lambda node: -node.energy_j)


def with_phases(phases: Sequence[Node]) -> Node:
    """One tree with the phases as its first level."""
    return Node.over("all", phases)


def as_tree(node: Node, level: int = 0) -> dict[str, Any]:
    """A tree as JSON for the script of the page; levels beyond :data:`_LEVELS` are left out."""
    written: dict[str, Any] = {"n": node.name, "e": node.energy_j, "s": node.runtime_s, "c": node.count}
    shown = sorted((child for child in node.children if child.energy_j > 0), key=lambda child: -child.energy_j)
    if shown and level < _LEVELS:
        written["k"] = [as_tree(child, level + 1) for child in shown]
    return written


def devices_table(footprint: TensorFootprint) -> Html:
    """Energy of each device."""
    names = ("Device", "Total", "Attributed", "Unattributed", "Others", "Idle", "Uncovered", "Carbon", "Known")
    rows = (
        (
            entry.device,
            si(entry.total_j, "J"),
            si(entry.attributed_j, "J"),
            si(entry.unattributed_j, "J"),
            si(entry.other_j, "J"),
            si(entry.idle_j, "J"),
            duration(entry.uncovered_s),
            grams(entry.carbon_g),
            f"{entry.quality}, {entry.estimator}" if entry.metered else "no meter",
        )
        for entry in footprint.devices
    )
    return table(names, rows, text={0, 8})


def operations_table(footprint: TensorFootprint) -> Html:
    """The rows by energy, at most :data:`ROWS` of them."""
    order = sorted(range(len(footprint)), key=lambda at: -_known(float(footprint.energy_j[at])))
    attributed = footprint.attributed_j
    shared_w, device_w = powers_w(footprint)
    sights = resolution(footprint)
    kinds = ("Energy", "Share", "Carbon", "Time", "Count", "W shared", "W run")
    names = ("Operation", "Phase", "Device", *kinds, "Seen")
    rows: list[tuple[str, ...]] = [
        (
            footprint.op[at] + (" (composite)" if footprint.op[at] in footprint.composite else ""),
            footprint.phase[at],
            footprint.device[at],
            si(math.nan if footprint.unread[at] else float(footprint.energy_j[at]), "J"),
            share_text(float(footprint.energy_j[at]), attributed),
            grams(float(footprint.carbon_g[at])),
            duration(float(footprint.runtime_ns[at]) / 1e9),
            count(int(footprint.count[at])),
            si(shared_w[at], "W"),
            si(device_w[at], "W"),
            sights[at].sight.value,
        )
        for at in order[:ROWS]
    ]
    if len(order) > ROWS:
        rest = math.fsum(_known(float(footprint.energy_j[at])) for at in order[ROWS:])
        summed = (si(rest, "J"), share_text(rest, attributed))
        rows.append((f"{count(len(order) - ROWS)} more", "", "", *summed, *[""] * 6))
    return table(names, rows, text={0, 1, 2, 10})


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


PHASES = ("forward", "backward", "recompute", "optimizer", "data", "other")
_ROW, _LABEL = 24, 12


def bars_svg(footprint: TensorFootprint, *, top: int = 10, width: int = 1080) -> Html:
    """The ``top`` rows by energy: joules as bars, both powers as text."""
    energy = np.nan_to_num(footprint.energy_j)
    order = np.argsort(-energy, kind="stable")[:top].tolist()
    most = float(energy[order[0]]) if order else 0.0
    attributed = footprint.attributed_j
    shared_w, device_w = powers_w(footprint)
    room = width * 0.42
    parts: list[Html] = []
    for place, at in enumerate(order):
        y = place * 2 * _ROW
        phase = footprint.phase[at] if footprint.phase[at] in PHASES else "other"
        length = room * float(energy[at]) / most if most > 0 else 0.0
        share = percent(float(energy[at]) / attributed) if attributed > 0 else ""
        watts = f"{si(shared_w[at], 'W')} shared, {si(device_w[at], 'W')} of the run"
        text = f"{si(float(energy[at]), 'J')}  {share}  ·  {watts}  ·  {footprint.phase[at] or 'other'}"
        parts.append(
            tag(
                "g",
                tag("text", footprint.op[at], x=0, y=y + _LABEL + 2),
                tag(
                    "rect",
                    x=0,
                    y=y + _LABEL + 7,
                    width=round(max(length, 1), 1),
                    height=_ROW - 10,
                    rx=2,
                    class_=f"phase-{phase}",
                ),
                tag("text", text, x=round(max(length, 1) + 8, 1), y=y + _LABEL + 18, class_="label"),
            )
        )
    return tag(
        "svg",
        parts,
        viewBox=f"0 0 {width} {max(1, len(order)) * 2 * _ROW}",
        class_="bars",
        role="img",
        aria_label=f"The {len(order)} operations that used most energy",
    )
