"""A clock profile as one self-contained page: latency, power and energy against the clock, and the operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.format import percent, si
from joulery.domain.gpu.clock_profile import ClockProfile
from joulery.ui.kit.charts import Axes, Line, lines
from joulery.ui.kit.html import Html, figure, head, static_text, table, tag, whole_page
from joulery.ui.reports.clock_profile_text import headline, longest, quality_note

_COLUMNS = ("operator", "type", "phase", "calls", "flop", "bytes", "score", "share of the time", "")
_STYLE = """
.meter{display:inline-block;height:9px;border-radius:3px;background:var(--v1);vertical-align:middle}
.grid{grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr))}
"""


def clock_page(profile: ClockProfile, notes: Sequence[str]) -> str:
    """The page, ready to be written to a file."""
    energy_j = profile.latency_s * profile.power_w
    charts = [
        chart("Latency of one pass", "s", profile.clocks_mhz, profile.latency_s, "var(--v0)"),
        chart("Board power while it runs", "W", profile.clocks_mhz, profile.power_w, "var(--v1)"),
        chart("Energy of one pass", "J", profile.clocks_mhz, energy_j, "var(--v2)"),
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
            tag("div", tag("div", _table(profile), class_="scroll"), class_="card"),
        ),
    )
    style = static_text("joulery.css") + _STYLE
    return whole_page(head(f"{profile.model} against the clock", style), tag("body", *body))


def chart(title: str, unit: str, clocks_mhz: FloatArray, values: FloatArray, color: str) -> Html:
    """A figure of a quantity against the clock, axes from zero; the caption states its ends and its minimum."""
    known = np.isfinite(values)
    if not known.any():
        return figure(title, "Not known: no meter read it.")
    x, y = clocks_mhz[known], values[known]
    factor, prefixed = _prefix(float(y.max()), unit)
    tips = [f"{clock:.0f} MHz: {si(float(value), unit)}" for clock, value in zip(x, y, strict=True)]
    curve = Line(title, color, x, y * factor, tips=tips, area=True)
    picture = lines([curve], Axes("SM clock, MHz", f"{title}, {prefixed}", height=250, width=400, x_zero=True))
    return figure(title, f"{_ends_and_least(x, y, unit)}.", picture)


def _prefix(largest: float, unit: str) -> tuple[float, str]:
    """Factor, and the unit with its prefix, so that the axis has short numbers."""
    for factor, prefix in ((1.0, ""), (1e3, "m"), (1e6, "µ")):
        if largest * factor >= 1:
            return factor, prefix + unit
    return 1e9, "n" + unit


def _ends_and_least(x: FloatArray, y: FloatArray, unit: str) -> str:
    """The values at the highest and the lowest clock, and the least value if it is at another clock."""
    least, ends = int(y.argmin()), (len(x) - 1, 0)
    captions = [f"{si(float(y[index]), unit)} at {x[index]:.0f} MHz" for index in ends]
    if least not in ends:
        captions.append(f"least {si(float(y[least]), unit)} at {x[least]:.0f} MHz")
    return ", ".join(captions)


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
    rows = [
        (
            name,
            type_,
            phase,
            f"{calls:,g}",
            si(flops, ""),
            si(moved, "B"),
            f"{score:.2f}",
            percent(share),
            tag("span", class_="meter", style=f"width:{160 * share:.0f}px"),
        )
        for name, type_, phase, calls, flops, moved, score, share in longest(profile, 40)
    ]
    return table(_COLUMNS, rows, text={0, 1, 2, 8})
