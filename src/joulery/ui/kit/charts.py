"""Charts as SVG without a script: grouped and stacked bars, lines, points with curves, named boxes, legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.ui.kit.html import Child, Html, tag

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 40
_LETTER, _BAR_LETTER, _BOX_LETTER = 6.4, 7.6, 7.2
"""Approximate width of a letter of a label, of a piece of a bar, and of a box."""
_ROW, _BAR, _SHORTEST = 46, 34, 3
"""Height of a stacked row and of its bar; minimum letters of a shortened text."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values under one name and colour.

    Attributes:
        name: For the legend.
        color: A CSS colour.
        values: For bars one value per group, float64[n]; NaN for none.
    """

    name: str
    color: str
    values: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A line.

    Attributes:
        name, color: For the legend; an empty name is left out of it.
        x, y: float64[n].
        dash: Pattern of strokes; none for a full line.
        second: Whether it belongs to the right-hand axis.
        steps: Whether it holds each value until the next.
        tips: A text for each point, which is then marked; none for a plain line.
        area: Whether the area below it is shaded.
    """

    name: str
    color: str
    x: FloatArray
    y: FloatArray
    dash: str | None = None
    second: bool = False
    steps: bool = False
    tips: Sequence[str] = ()
    area: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a stacked bar.

    Attributes:
        labels: Forms of its name, longest first; the first that fits is shown.
        share_ratio: Its share of the whole bar.
        color: A CSS colour.
        tip: Its tooltip.
    """

    labels: Sequence[str]
    share_ratio: float
    color: str
    tip: str


@dataclass(frozen=True, slots=True)
class StackedRow:
    """A stacked bar with a name before it and a note after it; the part without pieces is pale."""

    name: str
    pieces: Sequence[Piece]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """A labelled point; ``strong`` ones are emphasised."""

    label: str
    x: float
    y: float
    color: str
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """Both axes of a picture.

    Attributes:
        x, y: What they show, with the unit.
        second: What the right-hand one shows; None for none.
        zero: Whether y begins at 0.
        x_zero: Whether x begins at 0.
        height: Of the picture.
    """

    x: str
    y: str
    second: str | None = None
    zero: bool = True
    height: int = HEIGHT
    width: int = WIDTH
    x_zero: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def bars(groups: Sequence[str], series: Sequence[Series], axes: Axes, line_at: float | None = None) -> Html:
    """Grouped bars, each with its value on top; ``line_at`` draws a dashed line at a reference value."""
    finite = np.concatenate([one.values for one in series])
    high = max(float(np.nanmax(finite)), line_at or 0.0) * 1.12
    box = _Box(axes, 0.0, max(1, len(groups)), 0.0, high)
    parts = [box.y_axis()]
    room = 0.82 / len(series)
    for number, group in enumerate(groups):
        parts.append(_text(box.x(number + 0.5), box.bottom + 17, group, anchor="middle"))
        for at, one in enumerate(series):
            value = float(one.values[number])
            if math.isnan(value):
                continue
            x0, x1 = box.x(number + 0.09 + at * room), box.x(number + 0.09 + (at + 0.9) * room)
            y = box.y(value)
            title = tag("title", f"{group}, {one.name}: {value:.3g}")
            parts.append(
                tag(
                    "rect",
                    title,
                    x=_at(x0),
                    y=_at(y),
                    width=_at(x1 - x0),
                    height=_at(box.bottom - y),
                    rx=2,
                    fill=one.color,
                )
            )
            if (x1 - x0) >= 17:
                parts.append(_text((x0 + x1) / 2, y - 4, f"{value:.2f}", anchor="middle", size=11))
    if line_at is not None:
        parts.append(_stroke([(box.left, box.y(line_at)), (box.right, box.y(line_at))], "var(--soft)", dash="4 4"))
    return _picture(axes, parts, f"{axes.y} by {', '.join(groups)}")


def lines(drawn: Sequence[Line], axes: Axes, x_ticks: Sequence[float] | None = None) -> Html:
    """Lines over one x axis, some on a second y axis."""
    first, second = [one for one in drawn if not one.second], [one for one in drawn if one.second]
    x = np.concatenate([one.x for one in drawn])
    low, high = _span(first, zero=axes.zero)
    left = 0.0 if axes.x_zero else float(x.min())
    box = _Box(axes, left, float(x.max()), low, high)
    parts = [box.y_axis(), box.x_axis(x_ticks)]
    other = _Box(axes, left, float(x.max()), *_span(second, zero=False)) if second else None
    if other is not None:
        parts.append(other.right_axis())
    for one in drawn:
        place = other if one.second and other is not None else box
        points = _stepped(one) if one.steps else list(zip(one.x.tolist(), one.y.tolist(), strict=True))
        marks = [(place.x(a), place.y(b)) for a, b in points]
        if one.area:
            floor = [(marks[-1][0], place.bottom), (marks[0][0], place.bottom)]
            parts.append(tag("path", d=_path([*marks, *floor]) + "Z", fill=one.color, opacity=".12"))
        parts.append(_stroke(marks, one.color, dash=one.dash, width=1.8))
        for (x_at, y_at), tip in zip(marks, one.tips, strict=False):
            title = tag("title", tip)
            parts.append(tag("circle", title, cx=_at(x_at), cy=_at(y_at), r=4, fill=one.color, stroke="var(--card)"))
    return _picture(axes, parts, f"{axes.y} against {axes.x}")


def points(dots: Sequence[Dot], curves: Sequence[Line], axes: Axes) -> Html:
    """Labelled points over curves; labels do not overlap."""
    x = np.array([dot.x for dot in dots] + [v for one in curves for v in one.x.tolist()])
    y = np.array([dot.y for dot in dots] + [v for one in curves for v in one.y.tolist()])
    pad_x, pad_y = 0.05 * (x.max() - x.min()), 0.08 * (y.max() - y.min())
    box = _Box(axes, max(0.0, x.min() - pad_x), x.max() + pad_x, y.min() - pad_y, y.max() + pad_y)
    parts = [box.y_axis(), box.x_axis(None)]
    for one in curves:
        marks = [(box.x(a), box.y(b)) for a, b in zip(one.x.tolist(), one.y.tolist(), strict=True)]
        parts.append(_stroke(marks, one.color, dash=one.dash, width=2.0))
    taken = [(box.x(dot.x) - 6, box.y(dot.y) - 6, box.x(dot.x) + 6, box.y(dot.y) + 6) for dot in dots]
    taken += [(box.x(a) - 3, box.y(b) - 3, box.x(a) + 3, box.y(b) + 3) for one in curves for a, b in _dense(one)]
    for dot in sorted(dots, key=lambda dot: not dot.strong):
        cx, cy = box.x(dot.x), box.y(dot.y)
        title = tag("title", f"{dot.label}: {dot.x:.3g}, {dot.y:.5g}")
        parts.append(tag("circle", title, cx=_at(cx), cy=_at(cy), r=5.5 if dot.strong else 4, fill=dot.color))
        if dot.label:
            parts.append(_label(dot, cx, cy, taken, box))
    return _picture(axes, parts, f"{axes.y} against {axes.x}")


def stacked(rows: Sequence[StackedRow], label: str, *, name_width: int = 110, note_width: int = 0) -> Html:
    """Stacked bars below one another, with ``label`` for screen readers; widths in pixels of 1000."""
    length = 1000 - name_width - note_width
    parts: list[Html] = []
    for number, row in enumerate(rows):
        y, x = 4 + _ROW * number, float(name_width)
        parts.append(_text(0, y + 22, row.name))
        parts.append(tag("rect", x=name_width, y=y, width=length, height=_BAR, rx=3, fill="var(--grid)"))
        for piece in row.pieces:
            width = length * piece.share_ratio
            fitting = next((text for text in piece.labels if width > _BAR_LETTER * len(text) + 4), "")
            parts.append(box(x, y, max(width - 1.5, 1), _BAR, piece.tip, fill=piece.color))
            if fitting:
                parts.append(
                    tag("text", fitting, x=_at(x + width / 2), y=_at(y + 22), text_anchor="middle", class_="on")
                )
            x += width
        parts.append(_text(name_width + length + 12, y + 22, row.note))
    height = 4 + _ROW * len(rows)
    return tag("svg", parts, viewBox=f"0 0 1000 {height}", width="100%", role="img", aria_label=label)


def box(x: float, y: float, width: float, height: float, tip: str, *content: Child, **attributes: str | float) -> Html:
    """A box with a tooltip and its content; further attributes go to the rectangle."""
    rect = tag("rect", x=_at(x), y=_at(y), width=_at(width), height=_at(height), rx=3, **attributes)
    return tag("g", tag("title", tip), rect, *content)


def fitted(text: str, width: float) -> str:
    """A text shortened with an ellipsis to a width in pixels; empty below three letters."""
    letters = int(width / _BOX_LETTER)
    if letters < _SHORTEST:
        return ""
    return text if len(text) <= letters else text[: letters - 1] + "…"


def legend(entries: Sequence[tuple[str, str, str | None]]) -> Html:
    """Name, colour and stroke pattern of each line or bar."""

    def swatch(color: str, dash: str | None) -> Html:
        stroke = tag("line", x1=0, y1=6, x2=20, y2=6, stroke=color, stroke_width=3, stroke_dasharray=dash)
        return tag("svg", stroke, width=20, height=12, style="margin-right:6px;vertical-align:-1px")

    return tag("ul", (tag("li", swatch(color, dash), name) for name, color, dash in entries if name), class_="legend")


def color_legend(entries: Mapping[str, str]) -> Html:
    """Name and colour of each kind of piece."""
    swatches = ((tag("span", class_="swatch", style=f"background:{color}"), name) for name, color in entries.items())
    return tag("ul", (tag("li", *item) for item in swatches), class_="legend")


def class_legend(entries: Iterable[tuple[str, str]]) -> Html:
    """CSS class and name of each line, for charts that ``static/charts.js`` draws; it adds the value at the pointer."""
    return tag(
        "ul",
        (tag("li", tag("span", class_=f"swatch back-{color}"), label, tag("b")) for color, label in entries),
        class_="legend",
    )


def bar(pieces: Sequence[tuple[str, float]], label: str, **attributes: str | int) -> Html:
    """A horizontal bar of pieces ``(class, share)``, named ``label``; further attributes go to the element."""
    rects, at = [], 0.0
    for name, share in pieces:
        rects.append(tag("rect", x=round(at, 3), y=0, width=round(share * 1000, 3), height=10, class_=name))
        at += share * 1000
    return tag(
        "svg",
        rects,
        class_="bar",
        viewBox="0 0 1000 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        **attributes,
    )


class _Box:
    """Maps values to positions in the picture."""

    def __init__(self, axes: Axes, x0: float, x1: float, y0: float, y1: float) -> None:
        self.axes = axes
        self.left, self.right = _LEFT, axes.width - (_LEFT if axes.second else _RIGHT)
        self.top, self.bottom = _TOP, axes.height - _BOTTOM
        self.x0, self.x1, self.y0, self.y1 = x0, max(x1, x0 + 1e-9), y0, max(y1, y0 + 1e-9)

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y0) / (self.y1 - self.y0) * (self.bottom - self.top)

    def y_axis(self) -> Html:
        parts = []
        for value in ticks(self.y0, self.y1):
            at = self.y(value)
            parts.append(_stroke([(self.left, at), (self.right, at)], "var(--grid)", width=1))
            parts.append(_text(self.left - 7, at + 4, f"{value:g}", anchor="end", size=12))
        middle = (self.top + self.bottom) / 2
        turned = f"rotate(-90 14 {middle:.0f})"
        return Html(
            "".join(parts) + tag("text", self.axes.y, x=14, y=_at(middle), text_anchor="middle", transform=turned)
        )

    def right_axis(self) -> Html:
        parts = [
            _text(self.right + 7, self.y(value) + 4, f"{value:g}", size=12) for value in ticks(self.y0, self.y1, 4)
        ]
        middle, edge = (self.top + self.bottom) / 2, self.axes.width - 8
        turned = f"rotate(90 {edge} {middle:.0f})"
        name = self.axes.second or ""
        return Html("".join(parts) + tag("text", name, x=edge, y=_at(middle), text_anchor="middle", transform=turned))

    def x_axis(self, at: Sequence[float] | None) -> Html:
        values = ticks(self.x0, self.x1, 7) if at is None else at
        parts = [_text(self.x(value), self.bottom + 17, f"{value:g}", anchor="middle", size=12) for value in values]
        parts.append(_stroke([(self.left, self.bottom), (self.right, self.bottom)], "var(--line)", width=1))
        return Html(
            "".join(parts) + _text((self.left + self.right) / 2, self.bottom + 35, self.axes.x, anchor="middle")
        )


def _label(dot: Dot, cx: float, cy: float, taken: list[tuple[float, float, float, float]], box: _Box) -> Html:
    """The label of a point at its least crowded side."""
    wide = _LETTER * len(dot.label) + 4
    places = [
        (cx + 9, cy + 4), (cx - 9 - wide, cy + 4), (cx - wide / 2, cy - 10), (cx - wide / 2, cy + 20),
        (cx + 7, cy - 10), (cx + 7, cy + 19), (cx - 7 - wide, cy - 10), (cx - 7 - wide, cy + 19),
        (cx - wide / 2, cy - 24), (cx - wide / 2, cy + 34),
    ]  # fmt: skip

    def crowd(place: tuple[float, float]) -> float:
        x, y = place
        spot = (x, y - 11, x + wide, y + 3)
        over = sum(_overlap(spot, other) for other in taken)
        outside = max(0.0, box.left - x) + max(0.0, x + wide - box.right) + max(0.0, box.top - y + 11)
        return over + 50 * outside

    x, y = min(places, key=crowd)
    taken.append((x, y - 11, x + wide, y + 3))
    weight = "650" if dot.strong else None
    return tag(
        "text", dot.label, x=_at(x + 2), y=_at(y), font_weight=weight, style="fill:var(--ink)" if dot.strong else None
    )


def _dense(one: Line) -> list[tuple[float, float]]:
    """Positions along a line, close enough that no label fits between two."""
    if len(one.x) < 2:
        return []
    grid = np.linspace(0, len(one.x) - 1, 60)
    at = np.arange(len(one.x))
    return list(zip(np.interp(grid, at, one.x).tolist(), np.interp(grid, at, one.y).tolist(), strict=True))


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _span(drawn: Sequence[Line], *, zero: bool) -> tuple[float, float]:
    values = np.concatenate([one.y for one in drawn])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    pad = 0.05 * (high - low or 1.0)
    return (0.0 if zero else low - pad), high + pad


def _stepped(one: Line) -> list[tuple[float, float]]:
    x, y = np.repeat(one.x, 2)[1:], np.repeat(one.y, 2)[:-1]
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _stroke(marks: Sequence[tuple[float, float]], color: str, dash: str | None = None, width: float = 1.2) -> Html:
    return tag("path", d=_path(marks), fill="none", stroke=color, stroke_width=width, stroke_dasharray=dash)


def _path(marks: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in marks)


def _text(x: float, y: float, label: str, anchor: str | None = None, size: int = 13) -> Html:
    return tag(
        "text", label, x=_at(x), y=_at(y), text_anchor=anchor, style=None if size == 13 else f"font-size:{size}px"
    )


def _at(value: float) -> str:
    return f"{value:.1f}"


def _picture(axes: Axes, parts: Sequence[Html], label: str) -> Html:
    return tag("svg", parts, viewBox=f"0 0 {axes.width} {axes.height}", width="100%", role="img", aria_label=label)
