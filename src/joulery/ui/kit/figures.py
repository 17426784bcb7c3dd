"""The figures that reports and the dashboard share; ``static/charts.js`` draws into them."""

from __future__ import annotations

from collections.abc import Sequence

from joulery.domain.energy.footprint import Footprint
from joulery.domain.format import duration, percent, si
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import CarbonLabel, ServiceLabel, SiteLabel
from joulery.ui.kit.html import Html, tag
from joulery.ui.reports.messages import basis_text


def figures(site: SiteLabel) -> Html:
    """All figures of a site, in the order in which a person asks: the grid, the power, what was done, what it gave."""
    shown = [_intensity(site.carbon)] if site.carbon else []
    whose = "Everything metered" if site.services else "What the run pays for, idle energy included"
    shown.append(_figure("power", "Power", "W", f"{whose}; the shade is its uncertainty.", [("power", "power")]))
    for index, service in enumerate(site.services):
        shown.append(_mix(index, service))
        shown.append(_latency(index, service))
    if site.carbon:
        # The script hides the name of a line that has no value (yet).
        lines = [("ours", "as run"), ("baseline", "baseline")]
        words = "Grams since the start; a shade is the uncertainty."
        shown.append(_figure("carbon", "Cumulative CO2e", "g", words, lines, wide=True))
    return tag("div", *shown, class_="grid")


def _intensity(carbon: CarbonLabel) -> Html:
    words = f"{carbon.zone}, {carbon.signal} {carbon.scope}, {basis_text(carbon)}: {carbon.source}."
    return _figure("intensity", "Carbon intensity of the grid", "g/kWh", words, [("grid-line", "intensity")])


def _mix(index: int, service: ServiceLabel) -> Html:
    best = ", ".join(f"{name} {percent(ratio)}" for name, ratio in service.variants)
    lines = [(f"v{rank % 6}", name) for rank, (name, _) in enumerate(service.variants)]
    return _figure(f"mix-{index}", f"{service.name}: who answered", "% of answers", f"Accuracy: {best}.", lines)


def _latency(index: int, service: ServiceLabel) -> Html:
    quantile = f"p{service.quantile_ratio * 100:g}"
    words = f"{quantile} of each period against the service level of {duration(service.slo_s)}."
    lines = [("latency", quantile), ("slo", "service level")]
    return _figure(f"latency-{index}", f"{service.name}: latency", "ms", words, lines)


def _figure(
    name: str, title: str, unit: str, caption: str, lines: Sequence[tuple[str, str]], *, wide: bool = False
) -> Html:
    return tag(
        "figure",
        tag("h3", title, tag("span", unit, class_="unit")),
        tag("figcaption", caption),
        tag("div", class_="chart", data_chart=name, role="img", aria_label=f"{title} in {unit}. {caption}"),
        legend(lines),
        class_="wide" if wide else None,
    )


def legend(lines: Sequence[tuple[str, str]]) -> Html:
    """Colour and name of each line; the script writes the value under the pointer behind the name."""
    return tag(
        "ul",
        (tag("li", tag("span", class_=f"swatch back-{color}"), label, tag("b")) for color, label in lines),
        class_="legend",
    )


def waterfall(footprint: Footprint) -> Html:
    """One bar: what was charged by how well it is known, idle, unattributed; the parts add up to the whole."""
    sums = dict.fromkeys(Quality, 0.0)
    for part in footprint.parts:
        sums[part.quality] += part.energy_j
    pieces = [(quality.value, f"charged, {quality}", joules) for quality, joules in sums.items()]
    pieces += [("idle", "idle", footprint.idle_j), ("unattributed", "unattributed", footprint.unattributed_j)]
    pieces = [piece for piece in pieces if piece[2] > 0]
    total_j = footprint.energy_j
    if not total_j > 0:
        return tag("p", "No energy was metered.", class_="soft")
    words = [f"{label} {si(joules, 'J')} ({percent(joules / total_j)})" for _, label, joules in pieces]
    items = ((key, text) for (key, _, _), text in zip(pieces, words, strict=True))
    return tag(
        "div",
        bar([(f"fill-{key}", joules / total_j) for key, _, joules in pieces], "; ".join(words)),
        legend([(key, text) for key, text in items]),
    )


def bar(pieces: Sequence[tuple[str, float]], label: str, **attributes: str | int) -> Html:
    """A horizontal bar of pieces ``(class, share)``, read out as ``label``; further attributes go to the element."""
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
