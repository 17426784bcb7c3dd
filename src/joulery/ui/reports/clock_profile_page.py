"""A clock profile as one self-contained page: latency, power and energy against the clock, and the operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.format import percent, si
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.ui.kit.html import Child, Html, head, static_text, tag, whole_page
from joulery.ui.reports.clock_profile_text import headline, longest, quality_note

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 240, 50, 12, 12, 42
_STYLE = """
svg{width:100%;height:auto;display:block}
svg text{font-size:13px;fill:var(--soft)}
.grid-x{stroke:var(--grid)}
.curve{fill:none;stroke-width:2.5;stroke-linejoin:round}
.point{stroke:var(--card);stroke-width:1.5}
.area{opacity:.12}
svg text.said{fill:var(--ink);font-weight:600}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--line)}
th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}
.meter{display:inline-block;height:9px;border-radius:3px;background:var(--v1);vertical-align:middle}
.scroll{overflow-x:auto}
.grid{grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr))}
"""


def clock_page(profile: ClockProfile, notes: Sequence[str]) -> str:
    """The page, ready to be written to a file."""
    top = float(profile.clocks_mhz[-1])
    energy_j = profile.latency_s * profile.power_w
    charts = [
        chart("Latency of one pass", "s", profile.clocks_mhz, profile.latency_s, "var(--v0)", top),
        chart("Board power while it runs", "W", profile.clocks_mhz, profile.power_w, "var(--v1)", top),
        chart("Energy of one pass", "J", profile.clocks_mhz, energy_j, "var(--v2)", top),
    ]
    body = (
        tag("header", tag("div", tag("h1", headline(profile))), class_="top"),
        tag(
            "main",
            tag("p", quality_note(profile), class_="banner"),
            tag("p", f"Source: {profile.source}.", class_="soft small"),
            [tag("p", note, class_="soft small") for note in notes],
            tag("div", charts, class_="grid"),
            tag("h2", "Operators"),
            tag("p", _scores_text(profile), class_="soft small"),
            tag("div", _table(profile), class_="scroll"),
        ),
    )
    style = static_text("joulery.css") + _STYLE
    return whole_page(head(f"{profile.model} against the clock", style), tag("body", *body))


def chart(title: str, unit: str, clocks_mhz: FloatArray, values: FloatArray, color: str, top_mhz: float) -> Html:
    """One figure: a quantity against the clock, axes from zero, its ends and its least value named."""
    known = np.isfinite(values)
    if not known.any():
        return tag("figure", tag("h3", title), tag("figcaption", "Not known: no meter read it."))
    x, y = clocks_mhz[known], values[known]
    factor, prefixed = _prefix(float(y.max()), unit)
    said = _ends_and_least(x, y, unit)
    frame = _Frame.around(top_mhz, float(y.max()) * factor)
    points = [frame.at(float(a), float(b) * factor) for a, b in zip(x, y, strict=True)]
    path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in points)
    floor = frame.at(0, 0)[1]
    shade = f"{path}L{points[-1][0]:.1f},{floor:.1f}L{points[0][0]:.1f},{floor:.1f}Z"
    dots = [
        tag(
            "circle",
            tag("title", f"{clock:.0f} MHz: {si(float(value), unit)}"),
            cx=round(a, 1),
            cy=round(b, 1),
            r=4,
            fill=color,
            class_="point",
        )
        for (a, b), clock, value in zip(points, x, y, strict=True)
    ]
    return tag(
        "figure",
        tag("h3", title, tag("span", f", {prefixed}", class_="soft small")),
        tag("figcaption", f"{said}."),
        tag(
            "svg",
            frame.drawn(),
            tag("path", d=shade, fill=color, class_="area"),
            tag("path", d=path, stroke=color, class_="curve"),
            dots,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            role="img",
            aria_label=f"{title}: {said}",
        ),
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """The axes of a figure, both from zero.

    Attributes:
        top_mhz: Right end.
        high: Upper end.
        across, up: Where numbers stand on them.
    """

    top_mhz: float
    high: float
    across: Sequence[float]
    up: Sequence[float]

    @classmethod
    def around(cls, top_mhz: float, largest: float) -> _Frame:
        """The frame of values up to the largest."""
        up = _ticks(largest)
        return cls(top_mhz, max(up[-1], largest), _ticks(top_mhz), up)

    def at(self, clock_mhz: float, value: float) -> tuple[float, float]:
        """Where a point stands in the picture."""
        across, down = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * clock_mhz / self.top_mhz, _TOP + down * (1 - value / self.high)

    def drawn(self) -> list[Child]:
        """Lines and numbers."""
        lines: list[Child] = []
        for value in self.up:
            y = self.at(0, value)[1]
            lines.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=round(y, 1), y2=round(y, 1), class_="grid-x"))
            lines.append(tag("text", f"{value:g}", x=_LEFT - 8, y=round(y + 4, 1), text_anchor="end"))
        for clock in self.across:
            x = round(self.at(clock, 0)[0], 1)
            lines.append(tag("text", f"{clock:g}", x=x, y=_HEIGHT - 20, text_anchor="middle"))
        lines.append(tag("text", "SM clock, MHz", x=(_WIDTH + _LEFT) / 2, y=_HEIGHT - 3, text_anchor="middle"))
        return lines


def _prefix(largest: float, unit: str) -> tuple[float, str]:
    """What to multiply with, and the unit with its prefix, so that the axis has short numbers."""
    for factor, prefix in ((1.0, ""), (1e3, "m"), (1e6, "µ")):
        if largest * factor >= 1:
            return factor, prefix + unit
    return 1e9, "n" + unit


def _ends_and_least(x: FloatArray, y: FloatArray, unit: str) -> str:
    """The values at the highest and the lowest clock, and the least where that is another."""
    least, ends = int(y.argmin()), (len(x) - 1, 0)
    said = [f"{si(float(y[index]), unit)} at {x[index]:.0f} MHz" for index in ends]
    if least not in ends:
        said.append(f"least {si(float(y[least]), unit)} at {x[least]:.0f} MHz")
    return ", ".join(said)


def _ticks(largest: float) -> list[float]:
    """Four to seven round numbers from zero to the largest value."""
    if not largest > 0:
        return [0.0]
    raw = largest / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw)
    return [round(step * index, 12) for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _scores_text(profile: ClockProfile) -> str:
    phases = "; ".join(
        f"{phase} {profile.phase_score(phase):.2f} in {percent(profile.phase_share(phase), 0)} of the time"
        for phase in profile.phases
    )
    return (
        f"Score: relative slowdown per relative loss of clock, between full and half clock. 0: held up by launches; "
        f"about 0.9: by memory; 2: by arithmetic. Weighted by time: {phases}."
    )


def _table(profile: ClockProfile) -> Html:
    titles = ("operator", "type", "phase", "calls", "flop", "bytes", "score", "share of the time", "")
    rows = [
        tag(
            "tr",
            tag("td", name),
            tag("td", type_),
            tag("td", phase),
            tag("td", f"{calls:,g}"),
            tag("td", si(flops, "")),
            tag("td", si(moved, "B")),
            tag("td", f"{score:.2f}"),
            tag("td", percent(share)),
            tag("td", tag("span", class_="meter", style=f"width:{160 * share:.0f}px"), style="text-align:left"),
        )
        for name, type_, phase, calls, flops, moved, score, share in longest(profile, 40)
    ]
    return tag("table", tag("tr", [tag("th", title) for title in titles]), rows)
