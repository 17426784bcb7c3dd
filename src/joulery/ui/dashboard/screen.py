"""The dashboard's page: labels and empty figures of one site; ``static/dashboard.js`` fills in the numbers."""

from __future__ import annotations

from joulery.domain.format import UNKNOWN, duration, percent
from joulery.domain.serving.timeline import CarbonBasis, ServiceLabel, SiteLabel
from joulery.ui.kit.charts import bar, class_legend
from joulery.ui.kit.html import Html, join, tag
from joulery.ui.reports.figures import figures
from joulery.ui.reports.messages import basis_text

_MODES = {
    "advise": "reports its decisions, changes nothing",
    "shadow": "simulates its decisions beside the running system",
    "act": "changes what runs",
}


def screen(site: SiteLabel) -> Html:
    """The HTML fragment that ``/api/screen`` serves."""
    return join(
        (
            tag("div", *labels(site), id="label-source"),
            tag(
                "div",
                _tile("power", "Power now"),
                _tile("intensity", "Grid intensity"),
                _tile("rate", "Emission rate"),
                _tile("total", "CO2e so far"),
                class_="tiles four",
            ),
            *(_service(index, service) for index, service in enumerate(site.services)),
            tag("h2", "Over time"),
            figures(site),
            tag("h2", "Decisions and their reasons"),
            _decisions(),
        )
    )


def labels(site: SiteLabel) -> list[Html]:
    """Labels that hold for every number: the mode, and whether data is simulated or replayed."""
    pills = [tag("span", f"{site.mode}: {_MODES.get(site.mode, 'unknown mode')}", class_="pill")]
    if site.simulated:
        pills.append(tag("span", "simulated", class_="pill warn"))
    if site.carbon is not None and site.carbon.basis is not CarbonBasis.LIVE:
        pills.append(tag("span", f"carbon {basis_text(site.carbon)}", class_="pill warn", title=site.carbon.source))
    return pills


def _tile(name: str, label: str, note: str = "") -> Html:
    return tag(
        "div",
        tag("p", label, class_="label"),
        tag("p", UNKNOWN, class_="value", data_value=name),
        tag("p", note, class_="note", data_note=name),
        class_="tile",
    )


def _service(index: int, service: ServiceLabel) -> Html:
    floor = f"never below {percent(service.minimum_accuracy_ratio)}" if service.minimum_accuracy_ratio > 0 else ""
    if service.language_model:
        return _language_model(index, service)
    variants = [(f"v{rank % 6}", name) for rank, (name, _) in enumerate(service.variants)]
    mix = bar([(f"fill-{color}", 0.0) for color, _ in variants], "no answers yet", data_mix=index)
    return join(
        (
            tag("h2", service.name),
            tag(
                "div",
                *_slo_tiles(index, service),
                _tile(f"accuracy-{index}", "Accuracy", floor),
                _tile(f"rate-{index}", "Requests"),
                class_="tiles four",
            ),
            tag("div", tag("h3", "Answers by variant"), mix, class_legend(variants), class_="card spaced"),
        )
    )


def _slo_tiles(index: int, service: ServiceLabel) -> tuple[Html, Html]:
    latency = f"Latency p{service.quantile_ratio * 100:g}"
    objective = f"last minute; objective {percent(service.quantile_ratio, 0)}"
    return (
        _tile(f"latency-{index}", latency, f"SLO {duration(service.slo_s)}"),
        _tile(f"attainment-{index}", "SLO attainment", objective),
    )


def _language_model(index: int, service: ServiceLabel) -> Html:
    names = ", ".join(name for name, _ in service.variants)
    return join(
        (
            tag("h2", service.name),
            tag("p", f"Language model {names}", class_="soft"),
            tag(
                "div",
                *_slo_tiles(index, service),
                _tile(f"first-token-{index}", "Time to first token", "median of the last minute"),
                _tile(f"token-energy-{index}", "Energy a token", "last minute"),
                _tile(f"tokens-{index}", "Tokens", "of answers that ended in the last minute"),
                _tile(f"rate-{index}", "Requests"),
                class_="tiles",
            ),
        )
    )


def _decisions() -> Html:
    head = tag("tr", (tag("th", name, scope="col") for name in ("after", "what", "to", "why", "outcome")))
    table = tag("table", tag("thead", head), tag("tbody", id="decisions"), class_="stack")
    return tag("div", table, tag("p", "None yet.", class_="soft", id="no-decisions"), class_="card scroll")
