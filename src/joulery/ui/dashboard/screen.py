"""The frame of the screen "Now": every label and figure of one site, without a number; the script writes those in."""

from __future__ import annotations

from joulery.domain.format import UNKNOWN, duration, percent
from joulery.domain.serving.timeline import CarbonBasis, ServiceLabel, SiteLabel
from joulery.ui.kit.figures import bar, figures, legend
from joulery.ui.kit.html import Html, join, tag
from joulery.ui.reports.messages import basis_text

_MODES = {
    "advise": "says what it would do, changes nothing",
    "shadow": "runs what it would do beside what runs",
    "act": "changes what runs",
}


def screen(site: SiteLabel) -> Html:
    """The fragment that ``/api/screen`` serves."""
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
            tag("h2", "Course"),
            figures(site),
            tag("h2", "Decisions and their reasons"),
            _decisions(),
        )
    )


def labels(site: SiteLabel) -> list[Html]:
    """What must be said of all numbers: the mode, and what is not live and real."""
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
    promise = f"p{service.quantile_ratio * 100:g}"
    floor = f"never below {percent(service.minimum_accuracy_ratio)}" if service.minimum_accuracy_ratio > 0 else ""
    variants = [(f"v{rank % 6}", name) for rank, (name, _) in enumerate(service.variants)]
    mix = bar([(f"fill-{color}", 0.0) for color, _ in variants], "no answers yet", data_mix=index)
    return join(
        (
            tag("h2", service.name),
            tag(
                "div",
                _tile(f"latency-{index}", f"Latency {promise}", f"service level {duration(service.slo_s)}"),
                _tile(
                    f"attainment-{index}",
                    "Within the service level",
                    f"last minute; promised {percent(service.quantile_ratio, 0)}",
                ),
                _tile(f"accuracy-{index}", "Accuracy", floor),
                _tile(f"rate-{index}", "Requests"),
                class_="tiles four",
            ),
            tag("div", tag("h3", "Who answers"), mix, legend(variants), class_="card spaced"),
        )
    )


def _decisions() -> Html:
    head = tag("tr", (tag("th", name, scope="col") for name in ("after", "what", "to", "why", "outcome")))
    table = tag("table", tag("thead", head), tag("tbody", id="decisions"), class_="stack")
    return tag("div", table, tag("p", "None yet.", class_="soft", id="no-decisions"), class_="card scroll")
