"""The energy dependency diagram as a picture: nested boxes by share, colour by energy, arrows by dataflow.

As in Smaragdine (ICSE'24), Figures 2 and 4: a box is as long as its share of its parent; below a certain size its
children are left out. An arrow leads from a sibling to those it feeds, where the trace has the dataflow; elsewhere to
the one that ran first after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from joulery.accounting.operations.edd import Node
from joulery.domain.format import percent, si
from joulery.ui.kit import charts
from joulery.ui.kit.html import Html, static_text, tag

HEATS = 9
"""Steps of the colour scale (classes ``heat0`` to ``heat8`` of anatomy.css)."""

_DARK = 5
"""From this step on the boxes are dark."""
_HEAD, _PAD, _GAP = 20.0, 6.0, 16.0
_SMALLEST = 14.0
_SCALE, _SWATCH = 42.0, 76.0
"""Height of the scale below the boxes, and width of one of its colours."""


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float
    height: float


def edd_svg(root: Node, *, depth: int = 4, width: int = 1080, height: int = 560, standalone: bool = False) -> Html:
    """The diagram of a tree.

    Args:
        root: Root of the tree.
        depth: Levels below the top that are shown; one that has a single child does not count.
        width, height: Of the picture, pixels.
        standalone: Whether it contains its style, for a separate file.
    """
    parts: list[Html] = []
    _draw(root, _Box(1, 1, width - 2, height - _SCALE - 2), depth, root.energy_j, parts, root.name or "all")
    parts.extend(_scale(root.energy_j, height))
    style = tag("style", Html(static_text("anatomy.css"))) if standalone else None
    arrow = tag(
        "defs",
        tag(
            "marker",
            tag("path", d="M0,0 L7,3.5 L0,7 z", class_="arrow-head"),
            id="joulery-arrow",
            viewBox="0 0 7 7",
            refX=6.5,
            refY=3.5,
            markerWidth=7,
            markerHeight=7,
            orient="auto",
        ),
    )
    label = f"Energy dependency diagram of {root.name or 'the program'}: {si(root.energy_j, 'J')}"
    return tag(
        "svg",
        style,
        arrow,
        parts,
        xmlns="http://www.w3.org/2000/svg" if standalone else None,
        viewBox=f"0 0 {width} {height}",
        class_="edd",
        role="img",
        aria_label=label,
    )


def _scale(total_j: float, height: float) -> Iterator[Html]:
    """Draw the colours and their meaning: shares of the whole, and the joules of these."""
    top = height - _SCALE + 10
    for step in range(HEATS):
        least = 10 ** (4 * step / HEATS - 4)
        tip = f"from {percent(least, 2)} of all"
        yield charts.box(1 + step * _SWATCH, top, _SWATCH, 10, tip, class_=f"box heat{step}")
    for power in range(-4, 1):
        share = 10.0**power
        text = f"{100 * share:g} %"
        at, anchor = 1 + (power + 4) / 4 * HEATS * _SWATCH, "start" if power == -4 else "middle"
        yield tag("text", f"{text} = {si(share * total_j, 'J')}", x=at, y=top + 24, text_anchor=anchor, class_="soft")


def heat(share: float) -> int:
    """Step of the colour scale of a share of the whole: logarithmic, from a ten-thousandth to all of it."""
    if share <= 1e-4:
        return 0
    return min(HEATS - 1, int((math.log10(share) + 4) / 4 * HEATS))


def _draw(node: Node, box: _Box, depth: int, total_j: float, parts: list[Html], path: str) -> None:
    share = node.energy_j / total_j if total_j > 0 else 0.0
    title = f"{path}: {si(node.energy_j, 'J')}, {percent(node.share_ratio)} of its parent, {percent(share)} of all"
    sizes = box.x, box.y, max(0.0, box.width), max(0.0, box.height)
    parts.append(charts.box(*sizes, title, _caption(node, box, heat(share)), class_=f"box heat{heat(share)}"))
    inner = _Box(box.x + _PAD, box.y + _HEAD, box.width - 2 * _PAD, box.height - _HEAD - _PAD)
    shown = [child for child in node.children if child.energy_j > 0]
    if depth < 1 or not shown or min(inner.width, inner.height) < _SMALLEST:
        return
    boxes = _split(inner, [child.energy_j for child in shown])
    for child, place in zip(shown, boxes, strict=True):
        if place is not None:
            _draw(child, place, depth - (len(shown) > 1), total_j, parts, f"{path}/{child.name}")
    placed = {child.name: place for child, place in zip(shown, boxes, strict=True) if place is not None}
    next_to = list(pairwise(placed))
    for one, other in node.feeds or next_to:
        if one in placed and other in placed:
            draw = _arrow if (one, other) in next_to else _arc
            parts.append(draw(placed[one], placed[other], inner, heat(share)))


def _split(inner: _Box, energies: list[float]) -> list[_Box | None]:
    """Places for children along the longer side, by energy; None for one too small to be seen."""
    wide = inner.width >= inner.height
    length = inner.width if wide else inner.height
    total = math.fsum(energies)
    kept = [energy / total * length >= _SMALLEST / 2 for energy in energies]
    while True:
        free = length - _GAP * (sum(kept) - 1)
        sum_kept = math.fsum(energy for energy, keep in zip(energies, kept, strict=True) if keep)
        again = [
            keep and energy / sum_kept * free >= _SMALLEST / 2 for energy, keep in zip(energies, kept, strict=True)
        ]
        if again == kept or not any(again):
            break
        kept = again
    places: list[_Box | None] = []
    at = 0.0
    for energy, keep in zip(energies, kept, strict=True):
        if not keep:
            places.append(None)
            continue
        size = energy / sum_kept * free
        places.append(
            _Box(inner.x + at, inner.y, size, inner.height) if wide else _Box(inner.x, inner.y + at, inner.width, size)
        )
        at += size + _GAP
    return places


def _arrow(one: _Box, other: _Box, inner: _Box, step: int) -> Html:
    if inner.width >= inner.height:
        y = inner.y + inner.height / 2
        return _line(one.x + one.width, y, other.x, y, step)
    x = inner.x + inner.width / 2
    return _line(x, one.y + one.height, x, other.y, step)


def _arc(one: _Box, other: _Box, inner: _Box, step: int) -> Html:
    """An arrow past the boxes in between, or back."""
    (x1, y1), (x2, y2) = (_middle(box) for box in (one, other))
    if inner.width >= inner.height:
        path = f"M{x1:.1f},{inner.y:.1f} Q{(x1 + x2) / 2:.1f},{inner.y - _HEAD:.1f} {x2:.1f},{inner.y:.1f}"
    else:
        path = f"M{inner.x:.1f},{y1:.1f} Q{inner.x - _PAD * 2:.1f},{(y1 + y2) / 2:.1f} {inner.x:.1f},{y2:.1f}"
    classes = "arrow arc light" if step >= _DARK else "arrow arc"
    return tag("path", d=path, class_=classes, marker_end="url(#joulery-arrow)")


def _middle(box: _Box) -> tuple[float, float]:
    return box.x + box.width / 2, box.y + box.height / 2


def _line(x1: float, y1: float, x2: float, y2: float, step: int) -> Html:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return tag(
        "line",
        **{key: round(value, 1) for key, value in ends.items()},
        class_="arrow light" if step >= _DARK else "arrow",
        marker_end="url(#joulery-arrow)",
    )


def _caption(node: Node, box: _Box, step: int) -> Html | None:
    text = charts.fitted(f"{node.name or 'all'} {percent(node.share_ratio)}", box.width - 10)
    if box.height < 16 or not text:
        return None
    return tag("text", text, x=round(box.x + 5, 1), y=round(box.y + 14, 1), class_=f"on-heat{step}")
