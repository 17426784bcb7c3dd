"""The figures that reports and the dashboard share; ``static/charts.js`` draws into them."""

from __future__ import annotations

from collections.abc import Sequence

from joulery.domain.energy.footprint import Footprint
from joulery.domain.format import duration, percent, si
from joulery.domain.quality import Quality
from joulery.domain.serving.timeline import CarbonLabel, ServiceLabel, SiteLabel
from joulery.ui.kit.charts import bar, class_legend
from joulery.ui.kit.html import Html, figure, tag
from joulery.ui.reports.messages import basis_text


def figures(site: SiteLabel) -> Html:
    """All figures of a site: grid intensity, power, then variants and latency by service, then carbon."""
    shown = [_intensity(site.carbon)] if site.carbon else []
    scope = "Everything metered" if site.services else "Charged to the run, idle energy included"
    shown.append(_live("power", "Power", "W", f"{scope}; the shade is its uncertainty.", [("power", "power")]))
    for index, service in enumerate(site.services):
        shown.append(_tokens(index, service) if service.language_model else _mix(index, service))
        shown.append(_latency(index, service))
    if site.carbon:
        # The script hides the name of a line that has no value (yet).
        lines = [("ours", "as run"), ("baseline", "baseline")]
        caption = "Grams since the start; a shade is the uncertainty."
        shown.append(_live("carbon", "Cumulative CO2e", "g", caption, lines, wide=True))
    return tag("div", *shown, class_="grid")


def _intensity(carbon: CarbonLabel) -> Html:
    caption = f"{carbon.zone}, {carbon.signal} {carbon.scope}, {basis_text(carbon)}: {carbon.source}."
    return _live("intensity", "Carbon intensity of the grid", "g/kWh", caption, [("grid-line", "intensity")])


def _mix(index: int, service: ServiceLabel) -> Html:
    best = ", ".join(f"{name} {percent(ratio)}" for name, ratio in service.variants)
    lines = [(f"v{rank % 6}", name) for rank, (name, _) in enumerate(service.variants)]
    return _live(f"mix-{index}", f"{service.name}: answers by variant", "% of answers", f"Accuracy: {best}.", lines)


def _tokens(index: int, service: ServiceLabel) -> Html:
    caption = "Generated tokens a second, of the answers that ended in each period."
    return _live(f"tokens-{index}", f"{service.name}: tokens", "/s", caption, [("v0", "tokens")])


def _latency(index: int, service: ServiceLabel) -> Html:
    quantile = f"p{service.quantile_ratio * 100:g}"
    caption = f"{quantile} of each period against the SLO of {duration(service.slo_s)}."
    lines = [("latency", quantile), ("slo", "SLO")]
    return _live(f"latency-{index}", f"{service.name}: latency", "ms", caption, lines)


def _live(
    name: str, title: str, unit: str, caption: str, lines: Sequence[tuple[str, str]], *, wide: bool = False
) -> Html:
    chart = tag("div", class_="chart", data_chart=name, role="img", aria_label=f"{title} in {unit}. {caption}")
    return figure(title, caption, chart, class_legend(lines), unit=unit, wide=wide)


def waterfall(footprint: Footprint) -> Html:
    """One bar of charged energy by quality, idle and unattributed energy; the parts add up to the whole."""
    sums = dict.fromkeys(Quality, 0.0)
    for part in footprint.parts:
        sums[part.quality] += part.energy_j
    pieces = [(quality.value, f"charged, {quality}", joules) for quality, joules in sums.items()]
    pieces += [("idle", "idle", footprint.idle_j), ("unattributed", "unattributed", footprint.unattributed_j)]
    pieces = [piece for piece in pieces if piece[2] > 0]
    total_j = footprint.energy_j
    if not total_j > 0:
        return tag("p", "No energy was metered.", class_="soft")
    captions = [f"{label} {si(joules, 'J')} ({percent(joules / total_j)})" for _, label, joules in pieces]
    items = ((key, text) for (key, _, _), text in zip(pieces, captions, strict=True))
    return tag(
        "div",
        bar([(f"fill-{key}", joules / total_j) for key, _, joules in pieces], "; ".join(captions)),
        class_legend(items),
    )
