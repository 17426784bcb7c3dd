"""GREEN's evaluation as one self-contained page: every figure and table redrawn, the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from joulery.domain.format import percent
from joulery.sim.training.study import scheme
from joulery.ui.kit.charts import Axes, Dot, Line, Series, bars, legend, lines, points
from joulery.ui.kit.html import Html, figure, head, static_text, tag, tiles, whole_page
from reproduce.claim import STYLE, Claim, claims_table
from reproduce.green.claims import bound_at, changes, signed_percent
from reproduce.green.figures import GreenFigures, PolicyOutcome

_COLORS = {
    "green": "var(--v2)", "green-paper": "var(--good)", "green-paper:mu=1": "var(--idle)", "tiresias": "var(--v0)",
    "tiresias-requested": "var(--v5)", "gaia": "var(--v1)", "ecovisor": "var(--v4)", "pollux": "var(--v3)",
    "zeus": "var(--accent)", "green-lean": "var(--bad)", "lean": "var(--bad)",
}  # fmt: skip
_OURS = ("green", "green-sleep", "swift", "lean", "frugal", "green-swift", "green-lean", "green-frugal")
_NAMES = {
    "green-paper": "GREEN as published", "green": "GREEN, ours", "green-lean": "green-lean, ours",
    "lean": "lean, ours", "swift": "swift, ours", "frugal": "frugal, ours",
    "green-paper:mu=1": "GREEN, no shifting", "tiresias": "Tiresias",
    "tiresias-requested": "Tiresias, GPUs as requested",
    "gaia": "GAIA", "ecovisor": "EcoVisor", "pollux": "Pollux", "zeus": "Zeus + Tiresias", "fifo": "first come",
    "tiresias-sleep": "Tiresias + sleep", "zeus:sleep=1": "Zeus + sleep",
    "pollux:sleep=1:eta=0.5": "Pollux + sleep + limits",
}  # fmt: skip


def page(made: GreenFigures, found: Sequence[Claim], source: str) -> str:
    """The page, ready to be written to a file.

    Args:
        made: The results.
        found: The claims.
        source: Sources of the jobs and the intensities, in one line.
    """
    title = "GREEN: carbon against completion time"
    top = tag(
        "header",
        tag(
            "div",
            tag("h1", title),
            tag("span", "simulated", class_="pill warn"),
            tag("span", source, class_="soft small"),
        ),
        class_="top",
    )
    body = tag("main", _tiles(made), _frontier(made), _evaluation(made), _claims(found), _footer())
    return whole_page(head(title, static_text("joulery.css") + STYLE), tag("body", top, body))


def name_of(policy: str) -> str:
    """Display name of a policy."""
    return _NAMES.get(policy, policy)


def _tiles(made: GreenFigures) -> Html:
    base = next(one for one in made.frontier if one.policy == "tiresias")
    lean = next(one for one in made.frontier if one.policy == "lean")
    bound = bound_at(made, lean.mean_jct_s)
    reached = (base.cluster_kg - lean.cluster_kg) / max(1e-9, base.cluster_kg - bound)
    facts = (
        ("lean: CO2e of the cluster", signed_percent(lean.cluster_kg / base.cluster_kg - 1), "against Tiresias"),
        ("its mean completion time", signed_percent(lean.mean_jct_s / base.mean_jct_s - 1), "against Tiresias"),
        ("its slowest hundredth (p99)", signed_percent(lean.p99_jct_s / base.p99_jct_s - 1), "against Tiresias"),
        ("of the possible saving", percent(reached, 0), "no schedule of this speed can go below the bound"),
    )
    return tiles(facts, four=True)


def _frontier(made: GreenFigures) -> Html:
    hour = 3600.0
    shown = [one for one in made.frontier if one.cluster_kg < 1.6 * made.frontier[0].cluster_kg]
    slowest = 1.25 * max(one.mean_jct_s for one in shown if _is_ours(one.policy) or one.policy.startswith("tiresias"))
    shown = [one for one in shown if one.mean_jct_s <= slowest]
    left_out = [name_of(one.policy) for one in made.frontier if one not in shown]
    dots = [
        Dot(_dot_name(one.policy), one.mean_jct_s / hour, one.cluster_kg, _dot_color(one.policy), _is_ours(one.policy))
        for one in shown
    ]
    fastest = 0.8 * min(one.mean_jct_s for one in shown)
    curves = [
        _curve([(p.mean_jct_s, p.cluster_kg) for p in curve], name, dash, (fastest, slowest))
        for curve, name, dash in (
            (made.bound, "bound: start within 12 h", "2 4"),
            (made.bound_at_once, "bound: no job waits", "7 4"),
        )
    ]
    front = _front([(one.mean_jct_s, one.cluster_kg) for one in shown if _is_ours(one.policy)])
    curves.append(Line("our frontier", "var(--good)", front[0] / hour, front[1]))
    drawn = points(dots, curves, Axes("mean completion time, h", "CO2e of the cluster, kg", height=420, width=1060))
    words = (
        "The jobs of the first days of the year on one cluster, in the first region. Left and low is better. The bound "
        "is every job on the GPUs, limit and hour that cost least for itself, idle nodes asleep, no contention."
    )
    if left_out:
        words += f" Off the picture: {', '.join(left_out)}."
    keys = [(one.name, one.color, one.dash) for one in curves]
    return figure("Carbon against completion time", words, drawn, legend(keys), unit="kg, h", wide=True)


def _curve(pairs: Sequence[tuple[float, float]], name: str, dash: str, within: tuple[float, float]) -> Line:
    x, y = np.array(sorted(pairs)).T
    grid = np.linspace(max(within[0], x.min()), min(within[1], x.max()), 40)
    return Line(name, "var(--soft)", grid / 3600.0, np.interp(grid, x, y), dash)


def _front(pairs: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    kept: list[tuple[float, float]] = []
    for x, y in sorted(pairs):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return np.array([x for x, _ in kept]), np.array([y for _, y in kept])


def _is_ours(policy: str) -> bool:
    return policy.partition(":")[0] in _OURS


def _dot_name(policy: str) -> str:
    """Label of a policy's point; empty for our policies with changed parameters."""
    return "" if _is_ours(policy) and ":" in policy else name_of(policy).replace(", ours", "")


def _dot_color(policy: str) -> str:
    if policy.startswith("green-paper"):
        return "var(--warn)"
    return "var(--good)" if _is_ours(policy) else "var(--v0)"


def _evaluation(made: GreenFigures) -> Html:
    day = ("green-paper:mu=1", "tiresias", "gaia", "ecovisor", "green-lean")
    year = ("green", "tiresias", "pollux", "lean")
    parts = [
        *_ratios("Fig. 8", "the testbed day", made.day, "green-paper", day),
        *_timelines(made),
        _queues(made),
        *_ratios(
            "Fig. 11", "150 jobs, beside Pollux and Zeus", made.small, "green-paper", ("pollux", "zeus", "green-lean")
        ),
        *_ratios("Fig. 12", "the year", made.year, "green-paper", year),
        *_sensitivity(made),
    ]
    return Html(tag("h2", "The paper's figures, redrawn") + tag("div", parts, class_="grid"))


def _ratios(name: str, what: str, ones: Sequence[PolicyOutcome], base: str, policies: Sequence[str]) -> list[Html]:
    """CO2e and completion time of each policy in each region as a ratio to GREEN as published."""
    regions = list(dict.fromkeys(one.region for one in ones))
    shown = [policy for policy in policies if any(one.policy == policy for one in ones)]
    found = []
    for title, of in (("CO2e", lambda one: one.cluster_kg), ("mean JCT", lambda one: one.mean_jct_s)):
        series = [
            Series(name_of(policy), _COLORS[policy], 1.0 + np.array(changes(ones, policy, base, of)))
            for policy in shown
        ]
        drawn = bars(regions, series, Axes("", f"{title} / GREEN as published"), line_at=1.0)
        keys = legend([(one.name, one.color, None) for one in series])
        found.append(figure(f"{name}: {title}, {what}", "GREEN as published is 1.", drawn, keys, unit="ratio"))
    return found


def _timelines(made: GreenFigures) -> list[Html]:
    shown = [(one, _COLORS[one.policy]) for one in made.timelines]
    longest = max(one.t_s[-1] for one in made.timelines if one.policy != "ecovisor") * 1.15
    power, kg = [], []
    for one, color in shown:
        keep = one.t_s <= longest
        power.append(Line(name_of(one.policy), color, one.t_s[keep] / 3600, one.power_w[keep] / 1e3, steps=True))
        kg.append(Line(name_of(one.policy), color, one.t_s[keep] / 3600, one.carbon_kg[keep]))
    keys = legend([(one.name, one.color, None) for one in kg])
    words = "First region. EcoVisor goes on beyond the right edge."
    return [
        figure("Fig. 9a: carbon so far", words, lines(kg, Axes("hours since the start", "CO2e, kg")), keys, unit="kg"),
        figure(
            "Fig. 9b: power of the cluster",
            words,
            lines(power, Axes("hours since the start", "power, kW")),
            keys,
            unit="kW",
        ),
    ]


def _queues(made: GreenFigures) -> Html:
    seen = made.queues
    hours = seen.t_s / 3600
    drawn = [
        Line("upper queue", "var(--v1)", hours, seen.upper, steps=True),
        Line("lower queue, low power", "var(--v2)", hours, seen.low_power, steps=True),
        Line("lower queue, high power", "var(--v0)", hours, seen.high_power, steps=True),
        Line("intensity (right)", "var(--bad)", hours, seen.g_per_kwh, "2 3", second=True, steps=True),
        Line("its mean (right)", "var(--soft)", hours, seen.mean_g_per_kwh, "6 4", second=True),
    ]
    axes = Axes("hours since the start", "running jobs", "g/kWh", width=1060, height=320)
    keys = legend([(one.name, one.color, one.dash) for one in drawn])
    words = "GREEN as published, first region: low-power jobs take over while the intensity is above its mean."
    return figure("Fig. 10: running jobs by queue", words, lines(drawn, axes), keys, unit="jobs", wide=True)


def _sensitivity(made: GreenFigures) -> list[Html]:
    green = next(one for one in made.ablations if one.policy == "green")
    mus = [one.policy.rpartition("=")[2] for one in made.mus]
    first = made.mus[0]

    def three(ones: Sequence[PolicyOutcome], base: PolicyOutcome) -> list[Series]:
        kinds = (
            ("CO2e", "var(--good)", "cluster_kg"),
            ("mean JCT", "var(--v0)", "mean_jct_s"),
            ("p99 JCT", "var(--v1)", "p99_jct_s"),
        )
        return [
            Series(name, color, np.array([getattr(one, key) / getattr(base, key) for one in ones]))
            for name, color, key in kinds
        ]

    series = three(made.mus, first)
    keys = legend([(one.name, one.color, None) for one in series])
    quanta = three([one for _, one in made.quanta], made.quanta[0][1])
    minutes = [f"{minute} min" for minute, _ in made.quanta]
    ablations = three(made.ablations, green)
    names = ["GREEN", "1 GPU", "2 GPUs", "GPU hours", "no shift"]
    return [
        figure("Fig. 13a: strength of the shift", "First region.",
                bars([f"mu {mu}" for mu in mus], series, Axes("", "ratio"), line_at=1.0), keys, unit="ratio to mu = 1"),
        figure("Fig. 13b: scheduling interval", "First region.",
                bars(minutes, quanta, Axes("", "ratio"), line_at=1.0), keys, unit="ratio to 15 min"),
        figure("Table 4: parts taken out", "First region; GREEN with cache and hysteresis.",
                bars(names, ablations, Axes("", "ratio"), line_at=1.0), keys, unit="ratio to GREEN"),
    ]  # fmt: skip


def _claims(found: Sequence[Claim]) -> Html:
    words = (
        "Means over regions, their range in brackets. The paper's savings of carbon against schedulers that use the "
        "same GPUs do not come out: what re-ordering can save is bounded by how power and intensity vary together."
    )
    return Html(
        tag("h2", "Claim by claim")
        + tag(
            "div",
            tag("p", words, class_="soft small"),
            claims_table(found),
            class_="card",
        )
    )


def _footer() -> Html:
    about = [f"{policy}: {scheme(policy).about}" for policy in _OURS]
    words = (
        "Every number of ours is simulated, on a power model put together from measurements (A40 power as a share of "
        "its limit, T4 scaling); job classes are drawn uniformly; every policy alike knows intensities in hindsight."
    )
    return tag("footer", tag("p", words), (tag("p", line) for line in about))
