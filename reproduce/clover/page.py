"""Clover's evaluation as one self-contained page: Figs. 9 to 16 redrawn, the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from joulery.domain.format import percent
from joulery.ui.kit.charts import Axes, Dot, Line, Series, bars, legend, lines, points
from joulery.ui.kit.html import Html, figure, head, static_text, tag, tiles, whole_page
from reproduce.claim import STYLE, claims_table
from reproduce.clover.claims import claims
from reproduce.clover.figures import LOSSES, SCHEMES, WEIGHTS, WINDOWS, CloverFigures, TriedConfiguration

NAMES = {"yolo": "detection", "efficientnet": "classification", "albert": "language"}
"""Display names of the services."""
_SCHEME_NAMES = {
    "base": "BASE", "co2opt": "CO2OPT", "blover": "BLOVER", "clover": "CLOVER", "learning": "learning, ours",
    "oracle": "ORACLE",
}  # fmt: skip
_SCHEME_COLORS = {
    "base": "var(--idle)", "co2opt": "var(--v4)", "blover": "var(--v3)", "clover": "var(--v1)",
    "learning": "var(--v2)", "oracle": "var(--v0)",
}  # fmt: skip
_TRIAL_KEYS = (("chosen", "var(--v2)"), ("within the limit", "var(--v0)"), ("above it", "var(--bad)"))
_COLORS = ("var(--v0)", "var(--v1)", "var(--v2)", "var(--v3)", "var(--v4)", "var(--v5)")


def page(made: CloverFigures, qualities: Mapping[str, str]) -> str:
    """The page, ready to be written to a file.

    Args:
        made: Results that the figures show.
        qualities: Source of each service's table.
    """
    title = "Clover: carbon against accuracy"
    sources = "; ".join(dict.fromkeys(qualities.values()))
    top = tag(
        "header",
        tag("div", tag("h1", title), tag("span", "simulated", class_="pill warn"), tag("span", sources, class_="soft")),
        class_="top",
    )
    body = tag(
        "main",
        _tiles(made),
        tag("h2", "The paper's claims, and ours"),
        tag(
            "p", f"Three figures are those of {', '.join(_name(service) for service in made.services)}.", class_="soft"
        ),
        tag("div", claims_table(claims(made)), class_="card"),
        tag("h2", "What is saved, and what it costs in accuracy"),
        tag("div", _figure_9(made), _figure_9_loss(made), _figure_16(made), _figure_9_latency(made), class_="grid"),
        tag("h2", "Fig. 10 · Schemes against one another"),
        tag("div", [_figure_10(made, service) for service in made.services], class_="grid three"),
        tag("h2", "Fig. 11 · The objective over time"),
        tag("div", [_figure_11(made, service) for service in made.services], class_="grid three"),
        tag("h2", "Fig. 12 · What the search costs"),
        tag("div", _figure_12a(made), _figure_12b(made), class_="grid"),
        tag("h2", "Fig. 13 · What CLOVER tried"),
        tag("div", _figures_13(made), class_="grid three"),
        tag("h2", "Fig. 14 · Weights and thresholds"),
        tag("div", _figure_14a(made), _figure_14_loss(made), _figure_14b(made), class_="grid"),
        tag("h2", "Fig. 15 · Fewer GPUs"),
        tag("div", _figure_15(made), _figure_15_mixture(made), class_="grid"),
        _footer(),
    )
    return whole_page(head(title, static_text("joulery.css") + STYLE), tag("body", top, body))


def _name(service: str) -> str:
    return NAMES.get(service, service)


def _tiles(made: CloverFigures) -> Html:
    mine = [made.mean(service, "clover") for service in made.services]
    ours = [made.mean(service, "learning") for service in made.services]
    saving, same = (float(np.mean([getattr(m, n) for m in mine])) for n in ("saving_ratio", "saving_same_gpus_ratio"))
    points_lost = float(np.mean([one.loss_points for one in mine]))
    trials = sum(one.trials for one in ours) / max(sum(one.trials for one in mine), 1.0)
    facts = (
        ("CLOVER saves, consolidated", percent(saving), "mean of the services, the other GPUs switched off"),
        ("on the same GPUs, all powered", percent(same), "most of the saving is switching GPUs off"),
        ("and loses", f"{points_lost:.1f} points", "of accuracy, mean of the services"),
        ("our search: trials", percent(trials, 0), "of CLOVER's, closer to ORACLE"),
    )
    return tiles(facts, four=True)


def _figure_9(made: CloverFigures) -> Html:
    mine = [made.mean(service, "clover") for service in made.services]
    series = [
        Series("other GPUs off", "var(--v0)", np.array([100 * one.saving_ratio for one in mine])),
        Series("same GPUs powered", "var(--v1)", np.array([100 * one.saving_same_gpus_ratio for one in mine])),
    ]
    picture = bars([_name(service) for service in made.services], series, Axes("", "carbon saved, %"), line_at=75)
    words = f"CLOVER on {_main(made)}. The paper: more than 75 % each (dashed), 80 % on average."
    return _shown("Fig. 9 · Carbon saved", words, picture, _keys(series))


def _figure_9_loss(made: CloverFigures) -> Html:
    mine = [made.mean(service, "clover") for service in made.services]
    series = [
        Series("percentage points", "var(--v0)", np.array([one.loss_points for one in mine])),
        Series("relative, %", "var(--v1)", np.array([100 * one.loss_ratio for one in mine])),
    ]
    picture = bars([_name(service) for service in made.services], series, Axes("", "accuracy lost"), line_at=4)
    words = "The paper: 2 to 4 % (dashed: 4), 3 % on average; its scripts count points."
    return _shown("Fig. 9 · Accuracy lost", words, picture, _keys(series))


def _figure_9_latency(made: CloverFigures) -> Html:
    series = [
        Series(
            _SCHEME_NAMES[scheme],
            _SCHEME_COLORS[scheme],
            np.array([made.mean(service, scheme).p95_ratio for service in made.services]),
        )
        for scheme in ("clover", "learning", "oracle")
    ]
    groups = [_name(service) for service in made.services]
    picture = bars(groups, series, Axes("", "p95 over that of BASE"), line_at=1)
    late = sum(one.violations for one in made.means)
    words = f"Of the chosen configurations, mean over hours. The SLO is 1 (dashed); {late or 'no'} hours violate it."
    return _shown("Fig. 9 · Tail latency", words, picture, _keys(series))


def _figure_16(made: CloverFigures) -> Html:
    series = [
        Series(
            trace.replace("_", " "),
            _COLORS[at % len(_COLORS)],
            np.array([100 * made.mean(service, "clover", trace).saving_ratio for service in made.services]),
        )
        for at, trace in enumerate(made.grids)
    ]
    groups = [_name(service) for service in made.services]
    picture = bars(groups, series, Axes("", "carbon saved, %"), line_at=60)
    return _shown("Fig. 16 · Regions and seasons", "The paper: more than 60 % (dashed).", picture, _keys(series))


def _figure_10(made: CloverFigures, service: str) -> Html:
    dots = []
    for scheme in SCHEMES:
        one = made.mean(service, scheme)
        strong = scheme in ("clover", "learning")
        dots.append(
            Dot(_SCHEME_NAMES[scheme], 100 * one.saving_ratio, -100 * one.loss_ratio, _SCHEME_COLORS[scheme], strong)
        )
    picture = points(dots, [], Axes("carbon saved, %", "accuracy against BASE, %", width=420))
    return _shown(_name(service), "Up and to the right is better.", picture)


def _figure_11(made: CloverFigures, service: str) -> Html:
    hours = np.arange(len(next(iter(made.grids.values()))), dtype=np.float64)
    drawn = [
        Line(_SCHEME_NAMES[s], _SCHEME_COLORS[s], hours, made.objective[service, s], _dash(s), steps=True)
        for s in ("base", "co2opt", "blover", "clover", "oracle")
    ]
    picture = lines(drawn, Axes("hour", "Eq. 3, %", zero=False, width=420))
    return _shown(_name(service), "One run; trials included.", picture, [(o.name, o.color, o.dash) for o in drawn])


def _dash(scheme: str) -> str | None:
    return {"base": "2 3", "oracle": "6 3", "co2opt": "2 3"}.get(scheme)


def _figure_12a(made: CloverFigures) -> Html:
    hours = len(next(iter(made.grids.values())))
    edges = np.linspace(0, hours, WINDOWS + 1).round().astype(int)
    groups = [f"{a}-{b} h" for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)] + ["all"]
    series = []
    for scheme in ("blover", "clover"):
        whole = np.mean([made.mean(service, scheme).optimise_time_ratio for service in made.services])
        values = 100 * np.array([*made.windows[scheme].tolist(), float(whole)])
        series.append(Series(_SCHEME_NAMES[scheme], _SCHEME_COLORS[scheme], values))
    true = np.mean([made.mean(service, "clover").optimise_time_true_ratio for service in made.services])
    picture = bars(groups, series, Axes("", "time in trials, %"))
    words = (
        "At the paper's 30 s a trial. The paper: CLOVER 1.2 %, BLOVER 2.3 %, both above 2.5 % at first. "
        f"A thousand requests and the changes really take {percent(float(true))} for CLOVER."
    )
    return _shown("Time spent optimising", words, picture, _keys(series))


def _figure_12b(made: CloverFigures) -> Html:
    names = ("blover", "clover", "learning")
    series = [
        Series("within the limit", "var(--v2)", _counts(made, names, within=True)),
        Series("above it", "var(--bad)", _counts(made, names, within=False)),
    ]
    ratio = sum(made.mean(s, "clover").trials for s in made.services)
    ratio /= max(sum(made.mean(s, "blover").trials for s in made.services), 1.0)
    picture = bars([_SCHEME_NAMES[name] for name in names], series, Axes("", "configurations tried, all services"))
    words = f"The paper: CLOVER under half of BLOVER's, 60 % within the limit. Here {percent(ratio, 0)} of BLOVER's."
    return _shown("Configurations tried", words, picture, _keys(series))


def _counts(made: CloverFigures, schemes: Sequence[str], *, within: bool) -> np.typing.NDArray[np.float64]:
    found = []
    for scheme in schemes:
        each = [made.mean(service, scheme) for service in made.services]
        found.append(sum(one.trials * (one.meeting_ratio if within else 1 - one.meeting_ratio) for one in each))
    return np.array(found)


def _figures_13(made: CloverFigures) -> list[Html]:
    service = "efficientnet" if "efficientnet" in made.invocations else made.services[0]
    shown = []
    for name, trials in zip(("first", "second", "last"), made.invocations[service], strict=False):
        dots = [Dot(_order(number, one), one.carbon_percent, one.accuracy_percent, _trial_color(one), one.settled)
                for number, one in enumerate(trials, 1)]  # fmt: skip
        picture = points(dots, [], Axes("carbon against the baseline, %", "accuracy, %", width=420))
        words = f"{_name(service)}: {len(trials)} configurations, in the order of trials."
        keys = [
            ("chosen", "var(--v2)", None),
            ("within the limit", "var(--v0)", None),
            ("above it", "var(--bad)", None),
        ]
        shown.append(_shown(f"The {name} invocation", words, picture, keys))
    return shown


def _order(number: int, one: TriedConfiguration) -> str:
    return f"{number} ✓" if one.settled else str(number)


def _trial_color(one: TriedConfiguration) -> str:
    return "var(--v2)" if one.settled else "var(--v0)" if one.within else "var(--bad)"


def _figure_14a(made: CloverFigures) -> Html:
    x = np.array(WEIGHTS)
    drawn = [
        Line(_name(service), _COLORS[at], x, 100 * made.weights[service][:, 0])
        for at, service in enumerate(made.services)
    ]
    picture = lines(drawn, Axes("lambda", "carbon saved, %", zero=False), list(WEIGHTS))
    words = "The best configuration at 100 g/kWh. The paper: saving rises with lambda."
    return _shown("Fig. 14a · Saved", words, picture, [(one.name, one.color, None) for one in drawn])


def _figure_14_loss(made: CloverFigures) -> Html:
    x = np.array(WEIGHTS)
    drawn = [
        Line(_name(service), _COLORS[at], x, 100 * made.weights[service][:, 1])
        for at, service in enumerate(made.services)
    ]
    picture = lines(drawn, Axes("lambda", "accuracy lost, relative %"), list(WEIGHTS))
    return _shown(
        "Fig. 14a · Lost", "The paper: accuracy falls with it.", picture, [(o.name, o.color, None) for o in drawn]
    )


def _figure_14b(made: CloverFigures) -> Html:
    series = []
    for at, service in enumerate(made.services):
        mine = {one.loss_ratio: one for one in made.allowed if one.service == service}
        values = np.array([100 * mine[loss].columns_saving_ratio for loss in LOSSES])
        if np.isfinite(values).any():
            series.append(Series(_name(service), _COLORS[at], values))
    feasible = sum(not math.isnan(one.standard_saving_ratio) for one in made.allowed)
    words = (
        "Ours: every GPU a layout of its own, any number of them. The paper: 60 to 75 % for 0.2 to 0.8 % (dashed: 60). "
        f"With one configuration on two GPUs, {feasible} of these {len(made.allowed)} are feasible at all."
    )
    if not series:
        return _shown("Fig. 14b · Accuracy thresholds", "Needs what a request costs (profile.csv).", Html(""))
    picture = bars(
        [f"{100 * loss:g} %" for loss in LOSSES], series, Axes("", "carbon saved, %", width=1060), line_at=60
    )
    return _shown("Fig. 14b · Accuracy thresholds", words, picture, _keys(series), wide=True)


def _figure_15(made: CloverFigures) -> Html:
    return _fewer(
        made, "BASE: the most accurate variant, whole GPUs", "The paper: above 1 on 4 and on 2 GPUs.", mixture=False
    )


def _figure_15_mixture(made: CloverFigures) -> Html:
    return _fewer(made, "The published mixtures on {3g, 4g}", "The paper: 2 GPUs suffice.", mixture=True)


def _fewer(made: CloverFigures, title: str, words: str, *, mixture: bool) -> Html:
    series = [
        Series(
            _name(one.service),
            _COLORS[at],
            np.minimum(one.mixture_p95_ratio if mixture else one.base_p95_ratio, 50.0),
        )
        for at, one in enumerate(made.fewer)
    ]
    groups = [f"{count} GPUs" for count in made.fewer[0].gpus]
    capped = mixture is False and any(float(one.max()) >= 2 for one in (s.values for s in series))
    drawn = [Series(s.name, s.color, np.minimum(s.values, 2.0)) for s in series] if capped else series
    picture = bars(groups, drawn, Axes("", "p95 over the SLO"), line_at=1)
    if capped:
        high = [
            f"{one.name} {value:.1f} on {group}"
            for one in series
            for group, value in zip(groups, one.values.tolist(), strict=True)
            if value > 2
        ]
        over = "; ".join(high)
        words += f" Cut off at 2: {over}."
    return _shown(title, words, picture, _keys(series))


def _footer() -> Html:
    return tag(
        "footer",
        "Every number is simulated. The paper's own profiles were never published; what is served here is a profile "
        "calibrated on the eighteen points that were. Li et al., Clover, SC'23, doi 10.1145/3581784.3607034.",
    )


def _main(made: CloverFigures) -> str:
    return next(iter(made.grids)).replace("_", " ")


def _keys(series: Sequence[Series]) -> list[tuple[str, str, str | None]]:
    return [(one.name, one.color, None) for one in series]


def _shown(
    title: str, words: str, picture: Html, keys: Sequence[tuple[str, str, str | None]] = (), *, wide: bool = False
) -> Html:
    return figure(title, words, picture, legend(keys) if keys else None, wide=wide)
